"""What a real engine refuses, and says, when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines import ask, engine, stands
from hf_prefetch.integrations.vllm import plugin


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"slot": 3}, ValueError, "Did you mean slots"),
        ({"slots": 1}, ValueError, "slots=1 makes no sense"),
        ({"gpu_memory": "much"}, ValueError, "gpu_memory='much' is no size"),
    ],
)
def test_wrong_options(options, error, words, checkpoint) -> None:
    with pytest.raises(error, match=words), engine(checkpoint("mixtral"), options):
        pass


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb"),
        ({"enforce_eager": False}, "enforce_eager=True"),
    ],
)
def test_options_of_vllm(arguments, named, checkpoint) -> None:
    with pytest.raises(NotImplementedError, match=named), engine(checkpoint("mixtral"), {"slots": 3}, **arguments):
        pass


def test_a_budget_that_is_too_small(checkpoint) -> None:
    """Known when the sizes are: at the first forward, which on a GPU is vLLM's own, at its start."""
    with (
        engine(checkpoint("mixtral"), {"slots": 3, "gpu_memory": "100KiB"}) as llm,
        pytest.raises(ValueError, match=r"gpu_memory=100\.00 KiB is too little"),
    ):
        ask(llm)


def test_too_few_slots_for_graphs(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_prefetch.integrations.vllm import layers

    def with_graphs(found: Any, options: Any, device: torch.device, *, graphs: bool) -> Any:
        return real(found, options, device, graphs=True)

    real = layers.prefetch_layers
    monkeypatch.setattr(layers, "prefetch_layers", with_graphs)
    with engine(checkpoint("mixtral"), {"slots": 2}) as llm, pytest.raises(ValueError, match="too few with CUDA graphs"):
        ask(llm)
    # Nor can they be had from memory that is not page-locked, as here.
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm, pytest.raises(NotImplementedError, match="enforce_eager=True"):
        ask(llm)


def test_other_versions(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=r"vllm>=0\.26.*vLLM 0\.99\.0"), engine(checkpoint("mixtral"), {"slots": 3}):
        pass


def test_weights_are_not_loaded_again(checkpoint) -> None:
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        before = ask(llm)
        layer = stands(llm)[2].layer
        parameter = layer.w13_weight
        with pytest.raises(NotImplementedError, match="can't be loaded again"):
            parameter.weight_loader(parameter, torch.zeros(1), "w13_weight", "w1", 0)
        layer.w13_weight = torch.nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
        with pytest.raises(RuntimeError, match="was replaced after its experts had gone to host memory"):
            layer.forward_modular(
                torch.zeros(1, 64, dtype=torch.bfloat16), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32), None, None
            )
        layer.w13_weight = parameter
        assert ask(llm) == before


def test_registering_twice_changes_nothing() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    plugin.register()
    before = dict(op_registry_oot)
    plugin.register()
    assert op_registry_oot == before
    assert {"RoutedExperts", "MoERunner"} <= set(before)
