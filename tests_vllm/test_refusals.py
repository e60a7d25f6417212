"""What a real engine refuses, and says, when it is made."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from engines import ask, engine, stands
from hf_prefetch.integrations.vllm import plugin
from hf_prefetch.integrations.vllm.refusals import refuse_config


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


@pytest.fixture(scope="module")
def config(checkpoint) -> Any:
    """The real config of an engine that may prefetch."""
    return EngineArgs(str(checkpoint("mixtral")), enforce_eager=True, dtype="bfloat16").create_engine_config()


@pytest.mark.parametrize(
    ("owner", "option", "value", "named"),
    [
        ("parallel_config", "enable_eplb", True, "enable_eplb"),
        ("parallel_config", "enable_elastic_ep", True, "enable_eplb"),
        ("parallel_config", "enable_dbo", True, "enable_dbo"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode"),
        ("offload_config.uva", "cpu_offload_gb", 1.0, "cpu_offload_gb"),
        ("offload_config.prefetch", "offload_group_size", 1, "offload_backend=prefetch"),
        ("offload_config", "offload_backend", "prefetch", "offload_backend=prefetch"),
        ("", "speculative_config", SimpleNamespace(method="mtp"), r"speculative_config \(method mtp\)"),
        ("", "speculative_config", SimpleNamespace(method="eagle3"), r"speculative_config \(method eagle3\)"),
        ("model_config", "enforce_eager", False, "enforce_eager=True"),
    ],
)
def test_what_a_real_config_shows(owner, option, value, named, config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that this build of vLLM refuses by itself. An option that there isn't can't be set."""
    parallel = SimpleNamespace(use_all2all_kernels=False)
    refuse_config(config, parallel)
    monkeypatch.setattr(operator.attrgetter(owner)(config) if owner else config, option, value)
    with pytest.raises(NotImplementedError, match=named):
        refuse_config(config, parallel)


def test_reloading_weights(checkpoint) -> None:
    """vLLM's own ways of it: by new Parameters, and by writing into the old ones, which graphs would not see."""
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        ask(llm)
        with pytest.raises(NotImplementedError, match="can't be loaded again"):
            llm.collective_rpc("reload_weights")
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        ask(llm)
        name = f"{stands(llm)[1].layer.layer_name}.routed_experts.w2_weight"
        weights = {"weights_iterator": [(name, torch.zeros(1))], "is_checkpoint_format": False}
        llm.collective_rpc("reload_weights", kwargs=weights)
        with pytest.raises(RuntimeError, match="were written to after its experts had gone to host memory"):
            ask(llm)


def test_adapters_on_experts(checkpoint) -> None:
    """That they sit there shows when they have been made, at the first forward."""
    with (
        engine(checkpoint("qwen3_moe"), {"slots": 3}, enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(NotImplementedError, match=r"LoRA on experts .*lora_target_modules"),
    ):
        ask(llm)


def test_warnings_name_what_helps_here(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that only models of transformers have."""
    from hf_prefetch.streams import InOrderDevice

    room = [2]

    def allocate(self: InOrderDevice, nbytes: int) -> torch.Tensor:
        room[0] -= nbytes > 4096
        if nbytes > 4096 and room[0] < 0:
            raise torch.OutOfMemoryError
        return real(self, nbytes)

    real = InOrderDevice.allocate
    monkeypatch.setattr(InOrderDevice, "allocate", allocate)
    with engine(checkpoint("mixtral"), {"slots": 3}) as llm:
        with pytest.warns(RuntimeWarning, match=r"3 slots .* do not fit .* make a new engine with fewer slots") as told:
            ask(llm)
        assert not any("enable_expert_prefetch" in str(one.message) for one in told)
    room[0] = 0
    with (
        engine(checkpoint("mixtral"), {"slots": 3}) as llm,
        pytest.warns(RuntimeWarning),
        pytest.raises(torch.OutOfMemoryError, match=r"no room for it.* or spread the model over more devices"),
    ):
        ask(llm)
