"""Engines with experts in host memory give what engines without the plugin give, bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES, LAYERS
from engines import PROMPTS, Answer, ask, engine, layers_of, outputs_of, stands
from hf_prefetch import Report
from hf_prefetch.integrations.vllm.layers import worker_report

pytestmark = pytest.mark.usefixtures("poison")

# Of each layer's eight experts, in bytes: half of them for each layer, and more than the slots and some layers take.
OPTIONS: dict[str, dict[str, Any]] = {
    "2 slots": {"slots": 2},
    "3 slots, cache": {"slots": 3, "expert_cache": "400KiB"},
    "4 slots, packed": {"slots": 4, "pack": True},
    "packed, cache": {"pack": True, "expert_cache": "350KiB"},
    "some layers": {"n_cpu_moe": 2},
    "budget": {"slots": 2, "gpu_memory": "450KiB"},
}


def _everything(llm: Any) -> tuple[list[Answer], list[torch.Tensor]]:
    """Answers to several calls, with what the layers gave."""
    with outputs_of(llm) as outputs:
        answers = [
            ask(llm),
            # Parts of these prompts are in the KV cache.
            ask(llm, tuple([*prompt, 9, 8, 7] for prompt in PROMPTS)),
        ]
        answers.append(ask(llm, PROMPTS[1:2]))
        torch.manual_seed(5)
        answers.append(ask(llm, n=3, temperature=0.9))
    return answers, outputs


@pytest.fixture(scope="module")
def resident(checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[list[Answer], list[torch.Tensor]]]:
    """What an engine without the plugin's option gives."""
    known: dict[str, tuple[list[Answer], list[torch.Tensor]]] = {}

    def of(family: str) -> tuple[list[Answer], list[torch.Tensor]]:
        if family not in known:
            with engine(checkpoint(family)) as llm:
                known[family] = _everything(llm)
        return known[family]

    return of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits(family, options, checkpoint, resident) -> None:
    """Chunked and whole prompts, shared prefixes, mixed batches, several sequences of a prompt."""
    expected, expected_outputs = resident(family)
    with engine(checkpoint(family), options) as llm:
        answers, outputs = _everything(llm)
        report = _report(llm)
    assert len(outputs) == len(expected_outputs)
    for number, (output, other) in enumerate(zip(outputs, expected_outputs, strict=True)):
        assert torch.equal(output, other), f"call {number} of the experts layers"
    assert answers == expected
    assert report.banks + report.resident_banks == LAYERS[family]
    assert report.lookahead_calls > 0
    assert report.lookahead_hits > 0
    assert report.fallbacks == 0
    if "expert_cache" in options:
        assert report.cached_calls > 0
        assert report.cache_hits > 0
    else:
        assert report.routed_calls > 0


def test_what_is_asked_for_is_there(checkpoint) -> None:
    """Some layers stay on the device, the others have their experts in host memory, packed or not."""
    with engine(checkpoint("mixtral"), {"n_cpu_moe": 2}) as llm:
        ask(llm)
        assert [stand.hook is not None for stand in stands(llm)] == [True, True, False, False, False]
    with engine(checkpoint("mixtral"), {"gpu_memory": "400KiB", "slots": 2}) as llm:
        ask(llm)
        hooks = [stand.hook for stand in stands(llm)]
        assert hooks[0] is None
        assert any(hooks)
        assert _report(llm).resident_banks == hooks.count(None)
    with engine(checkpoint("gpt_oss"), {"pack": True}) as llm:
        ask(llm)
        report = _report(llm)
        assert report.host_bytes < 0.85 * report.weight_bytes


def test_memory_is_there_from_the_first_forward_on(checkpoint) -> None:
    """However short its prompt: vLLM gives the KV cache all that is left then."""
    with engine(checkpoint("mixtral"), {"slots": 3, "expert_cache": "300KiB"}) as llm:
        ask(llm, ([5],), max_tokens=1)
        report = _report(llm)
        assert report.device_bytes == 3 * report.host_bytes // report.banks
        assert 200 * 2**10 < report.cache_bytes <= 320 * 2**10
        assert report.lookahead_calls == 0


@pytest.mark.parametrize("options", [None, {"slots": 0}], ids=["absent", "slots=0"])
def test_off_is_vllm_itself(options, checkpoint) -> None:
    with engine(checkpoint("qwen3_moe"), options) as llm:
        for layer in layers_of(llm):
            assert not hasattr(layer, "prefetching")
            assert "forward_modular" not in vars(layer)


def test_two_engines_do_not_know_of_each_other(checkpoint, resident) -> None:
    with engine(checkpoint("qwen3_moe"), {"slots": 2}) as one, engine(checkpoint("mixtral"), {"slots": 3}) as other:
        for _ in range(2):
            assert ask(one) == resident("qwen3_moe")[0][0]
            assert ask(other) == resident("mixtral")[0][0]
        schedulers = {id(stand.hook.scheduler) for llm in (one, other) for stand in stands(llm)}
        assert len(schedulers) == 2


def test_what_is_held_ends_with_the_engine(checkpoint) -> None:
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        ask(llm)
        scheduler = stands(llm)[0].hook.scheduler
        layer = weakref.ref(layers_of(llm)[0])
        del llm
    gc.collect()
    assert layer() is None
    assert scheduler.has_ended


def test_an_error_in_a_forward_leaves_the_engine_usable(checkpoint, resident) -> None:
    """The layer that raised has its own weights again, and the next call is right."""
    with engine(checkpoint("mixtral"), {"slots": 2}) as llm:
        ask(llm)
        stand = stands(llm)[3]
        kernel = stand.layer.quant_method.moe_kernel
        apply = kernel.apply

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

        kernel.apply = fail
        layer, bank = stand.layer, stand.hook.bank
        hidden = torch.zeros(2, 64, dtype=torch.bfloat16)
        ids = torch.zeros(2, 2, dtype=torch.int32)
        with pytest.raises(ZeroDivisionError):
            layer.forward_modular(hidden, torch.ones(2, 2), ids, None, None)
        kernel.apply = apply
        assert all(layer._parameters[name] is parameter for name, parameter in bank.parameters.items())
        assert ask(llm) == resident("mixtral")[0][0]


def _report(llm: Any) -> Report:
    (report,) = llm.collective_rpc(worker_report)
    return report
