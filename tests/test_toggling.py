"""Enabling and disabling while other threads call: each call is right or says what came in between; never another result."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.hooks import ExpertPrefetchHook
from hf_prefetch.memory.disk import OnDisk
from hf_prefetch.model import gate
from hf_prefetch.scheduling.scheduler import PrefetchScheduler
from models import GATE, Snapshot, build, experts_of, prompt

AT_IT = "Another thread is enabling or disabling"
ENDED = "another thread has disabled it"
KINDS: dict[str, dict[str, Any]] = {
    "memory": {},
    "packed": {"pack": True},
    "files": {"host_memory": 0},
    "cache": {"expert_cache": "1GiB"},
    "resident": {"n_cpu_moe": 2},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def enable(tmp_path: Path) -> Callable[..., PreTrainedModel]:
    def enable(model: PreTrainedModel, kind: str) -> PreTrainedModel:
        folder = {"offload_folder": tmp_path} if kind == "files" else {}
        return enable_expert_prefetch(model, device="cpu", progress=False, **KINDS[kind], **folder)

    return enable


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: int = GATE) -> torch.Tensor:
    return model(prompt(tokens)).logits


class Elsewhere:
    """Something done in a thread of its own, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Exception as error:  # noqa: BLE001 - it is looked at below
            self.result = error

    def get(self) -> Any:
        self.thread.join(20)
        assert not self.thread.is_alive(), "it hangs"
        return self.result


@pytest.fixture
def paused() -> Iterator[Callable[[nn.Module], tuple[threading.Event, threading.Event]]]:
    """Makes the next call of a module stop in its middle: `begun`, and `go_on`."""
    events: list[threading.Event] = []

    def pause(module: nn.Module) -> tuple[threading.Event, threading.Event]:
        begun, go_on = threading.Event(), threading.Event()
        events.append(go_on)

        def wait(*_: Any) -> None:
            handle.remove()
            begun.set()
            assert go_on.wait(60)

        handle = module.act_fn.register_forward_pre_hook(wait)
        return begun, go_on

    yield pause
    for event in events:
        event.set()


def test_a_call_that_comes_late_to_a_hook_that_is_off_leaves_the_next_one_alone(
    enable: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chose its forward before the model was disabled and enabled anew, where a call is under way by then.

    Once it was told that weights were replaced, or had its module read host memory under a call with ids of cache rows.
    """
    model = build("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation("batched_mm")
    expected, module = logits(model, 1), experts_of(model)["model.layers.2.mlp.experts"]
    enable(model, "memory")
    late = module.__dict__["_old_forward"]
    disable_expert_prefetch(model)
    enable(model, "cache")
    real, seen = ExpertPrefetchHook._forward, []

    def forward(self: ExpertPrefetchHook, called: nn.Module, *args: Any) -> Any:
        if called is module and not seen:
            hidden, weights = torch.zeros(3, 64, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16)
            with torch.no_grad():
                seen.append(Elsewhere(lambda: late(hidden, torch.ones(3, 2, dtype=torch.long), weights)).get())
        return real(self, called, *args)

    monkeypatch.setattr(ExpertPrefetchHook, "_forward", forward)
    assert torch.equal(logits(model, 1), expected)
    assert model.expert_prefetch.report().cached_calls > 0
    assert [type(each) for each in seen] == [RuntimeError]
    assert ENDED in str(seen[0])


@kinds
def test_a_call_that_is_under_way_is_waited_for(
    enable: Callable[..., PreTrainedModel],
    paused: Callable[[nn.Module], tuple[threading.Event, threading.Event]],
    kind: str,
) -> None:
    """No hook shows it: its module has none yet."""
    model = build("qwen3_moe", torch.bfloat16)
    expected, before = logits(model), Snapshot.of(model)
    experts = list(experts_of(model).values())
    for module in (experts[0], experts[-1]):
        begun, go_on = paused(module)
        call = Elsewhere(lambda: logits(model))
        assert begun.wait(60)
        enabling = Elsewhere(lambda: enable(model, kind))
        while not experts[0]._forward_pre_hooks:
            time.sleep(0.001)
        # Others are told at once, and everything is as it was.
        assert AT_IT in str(Elsewhere(lambda: logits(model)).get())
        assert not any(isinstance(parameter, OnDisk) for parameter in model.parameters())
        assert not hasattr(model, "expert_prefetch")
        enabling.thread.join(0.05)
        assert enabling.thread.is_alive()
        go_on.set()
        result = call.get()
        # Whoever is at it may be there, or through, when the call comes to the next layer.
        assert AT_IT in str(result) if isinstance(result, RuntimeError) else torch.equal(result, expected)
        assert enabling.get() is model
        assert torch.equal(logits(model), expected)
        disable_expert_prefetch(model)
        before.assert_restored(model)
        assert torch.equal(logits(model), expected)


@kinds
def test_disabling_waits_for_a_call(
    enable: Callable[..., PreTrainedModel],
    paused: Callable[[nn.Module], tuple[threading.Event, threading.Event]],
    kind: str,
) -> None:
    """Of a layer that is prefetched, or of one that stays on the device."""
    model = build("qwen3_moe", torch.bfloat16)
    expected, last = logits(model), list(experts_of(model).values())[-1]
    enable(model, kind)
    begun, go_on = paused(last)
    call = Elsewhere(lambda: logits(model))
    assert begun.wait(60)
    disabling = Elsewhere(lambda: disable_expert_prefetch(model))
    disabling.thread.join(0.1)
    assert disabling.thread.is_alive()
    assert AT_IT in str(Elsewhere(lambda: logits(model)).get())
    go_on.set()
    assert torch.equal(call.get(), expected)
    assert disabling.get() is model
    assert torch.equal(logits(model), expected)


def test_a_call_while_weights_change_their_kind(
    enable: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of the new kind and have the old content then: on the meta device, where nothing is computed or refused."""
    model = build("qwen3_moe", torch.bfloat16)
    expected, told = logits(model), []
    real = torch._C._swap_tensor_impl

    def swap(*tensors: torch.Tensor) -> None:
        told.append(Elsewhere(lambda: logits(model)).get())
        real(*tensors)

    monkeypatch.setattr(torch._C, "_swap_tensor_impl", swap)
    enable(model, "files")
    count = len(told)
    disable_expert_prefetch(model)
    assert len(told) == 2 * count > 0
    assert all(AT_IT in str(each) for each in told)
    assert torch.equal(logits(model), expected)


def test_two_threads_that_enable_at_once(enable: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them does."""
    model, told = build("qwen3_moe", torch.bfloat16), []
    expected, begin = logits(model), PrefetchScheduler.__init__

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(Elsewhere(lambda: enable(model, "memory")).get())
            told.append(Elsewhere(lambda: disable_expert_prefetch(model)).get())
        begin(*args, **kwargs)

    monkeypatch.setattr(PrefetchScheduler, "__init__", meanwhile)
    enable(model, "memory")
    assert AT_IT in str(told[0])
    assert told[1] is model, "nothing was enabled then"
    assert torch.equal(logits(model), expected)
    assert model.expert_prefetch.report().calls > 0


def test_a_call_that_does_not_end(
    enable: Callable[..., PreTrainedModel],
    paused: Callable[[nn.Module], tuple[threading.Event, threading.Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits gives up at last, and calls get through again."""
    monkeypatch.setattr(gate, "_PATIENCE", 0.05)
    model = build("qwen3_moe", torch.bfloat16)
    expected, before = logits(model), Snapshot.of(model)
    begun, go_on = paused(next(iter(experts_of(model).values())))
    call = Elsewhere(lambda: logits(model))
    assert begun.wait(60)
    with pytest.raises(RuntimeError, match=r"inside the experts for 0\.05 seconds.*unchanged"):
        enable(model, "memory")
    go_on.set()
    assert torch.equal(call.get(), expected)
    before.assert_restored(model)


@kinds
def test_calls_at_any_time(enable: Callable[..., PreTrainedModel], kind: str) -> None:
    model, stop = build("qwen3_moe", torch.bfloat16), threading.Event()
    expected = {tokens: logits(model, tokens) for tokens in (1, GATE)}

    def work() -> int:
        right = 0
        while not stop.is_set():
            for tokens, one in expected.items():
                try:
                    assert torch.equal(logits(model, tokens), one)
                    right += 1
                except RuntimeError as error:  # noqa: PERF203
                    if AT_IT not in str(error) and ENDED not in str(error):
                        raise
        return right

    callers = [Elsewhere(work) for _ in range(2)]
    end = time.monotonic() + 1
    while time.monotonic() < end:
        enable(model, kind)
        time.sleep(0.01)
        disable_expert_prefetch(model)
        time.sleep(0.01)
    stop.set()
    for caller in callers:
        right = caller.get()
        assert isinstance(right, int), right
    with contextlib.suppress(RuntimeError):
        enable(model, kind)
    assert torch.equal(logits(model), expected[GATE])


@kinds
@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.mlp.experts.act_fn"])
def test_disabling_from_inside_a_forward(enable: Callable[..., PreTrainedModel], kind: str, part: str) -> None:
    """In that of experts it is refused, elsewhere the rest of the forward goes on without."""
    model, told = build("qwen3_moe", torch.bfloat16), []
    if kind == "resident" and part.endswith("act_fn"):
        part = part.replace("1", "0")

    def disable(*_: Any) -> None:
        try:
            disable_expert_prefetch(model)
        except RuntimeError as error:
            told.append(str(error))

    expected = logits(model)
    enable(model, kind)
    handle = model.get_submodule(part).register_forward_hook(disable)
    assert torch.equal(logits(model), expected)
    handle.remove()
    assert ["from inside a forward of the model's experts" in each for each in told] == [True] * len(told)
    assert bool(told) == part.endswith("act_fn") == hasattr(model, "expert_prefetch")
    assert torch.equal(logits(model), expected)
