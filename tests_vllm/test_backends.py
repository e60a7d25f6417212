"""Models whose experts layers are of classes of their own, and models without any: prefetched, or an error at the start."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.models.transformers import moe

from checkpoints import DENSE
from engines import ask, engine, layers_of, outputs_of, stands
from hf_prefetch.integrations.vllm import layers
from hf_prefetch.integrations.vllm.layers import worker_report

_BACKEND = {"model_impl": "transformers"}


@pytest.mark.parametrize("router", ["vLLM's", "the model's"])
@pytest.mark.usefixtures("poison")
def test_the_transformers_backend(router, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that vLLM knows how to route for get its own runner, others one that is given their ids."""
    if router == "the model's":
        monkeypatch.setattr(moe.MoEBlockFuser, "match", lambda *args: None)
    with engine(checkpoint("qwen3_moe"), **_BACKEND) as llm, outputs_of(llm) as expected:
        answers = ask(llm)
    with engine(checkpoint("qwen3_moe"), {"slots": 3}, **_BACKEND) as llm, outputs_of(llm) as outputs:
        (kinds,) = llm.collective_rpc(lambda worker: {type(one) for one in worker.model_runner.model.modules()})
        assert (layers.PrefetchedTransformersMoERunner in kinds) == (router == "the model's")
        assert ask(llm) == answers
        (report,) = llm.collective_rpc(worker_report)
    assert all(torch.equal(output, other) for output, other in zip(outputs, expected, strict=True))
    assert report.lookahead_hits > 0
    assert report.routed_calls > 0


def test_experts_that_the_transformers_backend_leaves_as_they_are(checkpoint) -> None:
    """Those with biases: vLLM has no layers of its own in their place."""
    with (
        engine(checkpoint("gpt_oss"), {"slots": 3}, **_BACKEND) as llm,
        pytest.raises(NotImplementedError, match=r"has shown vLLM no experts layers: leave hf_prefetch out"),
    ):
        ask(llm)


def test_layers_that_nothing_stands_before(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with models that bring a layer and a runner of their own."""
    monkeypatch.setattr(layers, "_take", lambda layer: None)
    with (
        pytest.raises(NotImplementedError, match=r"classes of the model's own .*leave hf_prefetch out"),
        engine(checkpoint("mixtral"), {"slots": 3}),
    ):
        pass


def test_dense_models(checkpoint) -> None:
    with (
        pytest.raises(NotImplementedError, match=r"has no experts: leave hf_prefetch out of additional_config"),
        engine(checkpoint(DENSE), {"slots": 3}),
    ):
        pass
    for options in (None, {"slots": 0}):
        with engine(checkpoint(DENSE), options) as llm:
            assert not layers_of(llm)
            ask(llm)


def test_what_looks_for_layers_looks_once(checkpoint) -> None:
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        ask(llm)
        (kept,) = llm.collective_rpc(lambda worker: "forward" in vars(worker.model_runner.model.logits_processor))
        assert not kept
        assert stands(llm)
