"""The timeline: what is recorded, in which order, and what a plot and a trace make of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.demo import load_demo_model
from hf_prefetch.testing import FakeDevice
from hf_prefetch.timeline import Timeline


@pytest.fixture(scope="module")
def timeline(device: torch.device) -> Timeline:
    """One pass over a prompt of the demonstration model."""
    model = enable_expert_prefetch(load_demo_model(), slots=3, device=device, progress=False)
    prompt = torch.arange(64, device=device)[None]
    with torch.no_grad(), model.expert_prefetch.timeline() as timeline:
        model(prompt)
    with torch.no_grad():
        model(prompt)  # is not recorded any more
    timeline.spans()
    disable_expert_prefetch(model)
    return timeline


def test_every_layer_is_copied_and_computed_once(timeline: Timeline) -> None:
    spans = timeline.spans()
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(7)]
    for kind in ("copy", "wait", "compute"):
        assert [span.bank for span in spans if span.kind == kind] == layers
    assert all(0 <= span.begin <= span.end for span in spans)
    begin = {(span.kind, span.bank): span.begin for span in spans}
    assert all(begin["copy", bank] <= begin["compute", bank] for bank in layers)
    sent_ahead = zip(layers[2:], layers, strict=False)
    assert all(begin["copy", after_next] <= begin["compute", bank] for after_next, bank in sent_ahead)


def test_a_plot_has_a_bar_for_every_span(timeline: Timeline) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    axes = timeline.plot()
    assert len(axes.collections) == len(timeline.spans()) == 21
    assert [label.get_text() for label in axes.get_yticklabels()] == ["copy stream", "compute stream"]
    assert {text.get_text() for text in axes.texts} <= set("0123456")
    assert timeline.plot(axes) is axes
    pyplot.close(axes.figure)


def test_a_trace_is_what_perfetto_reads(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == len(timeline.spans())
    assert {event["ph"] for event in events} == {"X"}
    assert {event["tid"] for event in events} == {"copy stream", "compute stream"}


def test_an_empty_timeline_says_what_is_missing() -> None:
    pytest.importorskip("matplotlib")
    assert Timeline().spans() == []
    with pytest.raises(ValueError, match="Nothing was recorded"):
        Timeline().plot()


def test_a_device_that_is_behind_is_waited_for() -> None:
    model = enable_expert_prefetch(load_demo_model(), slots=2, device=FakeDevice("lazy"), progress=False)
    with torch.no_grad(), model.expert_prefetch.timeline() as timeline:
        model(torch.arange(40)[None])
    assert len(timeline.spans()) == 21
    disable_expert_prefetch(model)


def test_without_matplotlib_it_says_what_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, which pyproject has."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]' in the folder of hf_prefetch"):
        Timeline().plot()
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^plot = \["matplotlib', project, re.MULTILINE)
