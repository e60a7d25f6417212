"""What the vLLM plugin decides without vLLM: options, versions, and what it can't be combined with."""

from __future__ import annotations

import builtins
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_prefetch.banks.layout import BankLayout
from hf_prefetch.integrations.vllm import register
from hf_prefetch.integrations.vllm.banks import LayerBank
from hf_prefetch.integrations.vllm.hook import LayerHook
from hf_prefetch.integrations.vllm.options import OPTIONS, options_of
from hf_prefetch.integrations.vllm.refusals import KERNELS, REMEDIES, refuse_config, refuse_layer, warn_untried
from hf_prefetch.integrations.vllm.versions import NEWEST, OLDEST, SUPPORTED, unsupported

# -- options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {}, {"other": {"slots": 3}}, {"hf_prefetch": None}, {"hf_prefetch": {"slots": 0}}, 7])
def test_nothing_is_asked_for(config) -> None:
    assert options_of(config) is None


def test_options_are_those_of_the_other_floor() -> None:
    asked = {"slots": 2, "gpu_memory": "20GiB", "expert_cache": 0.5, "pin_memory": "40GiB", "pack": True}
    config = options_of({"hf_prefetch": asked})
    assert (config.slots, config.pack) == (2, True)
    assert config.cache_budget == 10 * 2**30
    assert config.pin_budget == 40 * 2**30
    assert options_of({"hf_prefetch": {}}).slots == 3
    assert options_of({"hf_prefetch": {"n_cpu_moe": 4}}).n_cpu_moe == 4


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        pytest.param({"slot": 3}, ValueError, ["no option slot", "Did you mean slots?", *OPTIONS], id="unknown"),
        pytest.param({"progress": True}, ValueError, ["no option progress"], id="an option of elsewhere"),
        pytest.param({"slots": 1}, ValueError, ["slots=1 makes no sense"], id="one slot"),
        pytest.param({"slots": "3"}, TypeError, ["slots must be an int"], id="text"),
        pytest.param({"slots": 3, "gpu_memory": "lots"}, ValueError, ["gpu_memory='lots' is no size"], id="size"),
        pytest.param({"expert_cache": 0.5}, ValueError, ["share of gpu_memory, which is not given"], id="share of nothing"),
        pytest.param({"pack": "yes"}, ValueError, ["pack must be True, False"], id="pack"),
        pytest.param(3, TypeError, ["must be a dict of options", "int"], id="no dict"),
        pytest.param("slots=3", TypeError, ["must be a dict of options"], id="a text"),
    ],
)
def test_wrong_options_are_errors(asked, error, words) -> None:
    with pytest.raises(error) as caught:
        options_of({"hf_prefetch": asked})
    for word in ('additional_config["hf_prefetch"]', *words):
        assert word in str(caught.value)


# -- versions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc2", "0.32.0+cpu", f"{NEWEST[0]}.{NEWEST[1]}.5"])
def test_supported_versions(version) -> None:
    assert unsupported(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", f"{NEWEST[0]}.{NEWEST[1] + 1}.0", "1.0.0", "dev"])
def test_other_versions_are_told(version) -> None:
    reason = unsupported(version)
    assert version in reason
    assert f">={OLDEST[0]}.{OLDEST[1]}" in reason


def test_declared_range_is_the_one_that_is_checked() -> None:
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert f'vllm = ["{SUPPORTED}"]' in project.read_text()


def test_without_vllm_registering_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As with a vLLM that has no such layers: others that use it must not be disturbed."""
    original = builtins.__import__

    def refuse_vllm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "vllm":
            raise ImportError("no vllm here")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse_vllm)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with caplog.at_level(logging.WARNING, "vllm.hf_prefetch"):
        register()
    assert "can't be prefetched" in caplog.text
    assert "no vllm here" in caplog.text


# -- what it can't be combined with -------------------------------------------------------------------------------------


def _engine(**changes: Any) -> tuple[Any, Any]:
    """The parts of an engine's config that are looked at, nothing of it forbidden but what is changed: `part__name=value`."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_eplb=False,
            enable_elastic_ep=False,
            use_ubatching=False,
            enable_expert_parallel=False,
            pipeline_parallel_size=1,
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False, enforce_eager=False, quantization=None),
        lora_config=None,
        offload_config=SimpleNamespace(
            offload_backend="auto",
            uva=SimpleNamespace(cpu_offload_gb=0),
            prefetch=SimpleNamespace(offload_group_size=0),
        ),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        experts=SimpleNamespace(use_all2all_kernels=False),
    )
    for path, value in changes.items():
        *parts, name = path.split("__")
        owner = config
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return config, config.experts


def test_ordinary_engines_are_let_through() -> None:
    refuse_config(*_engine())
    refuse_config(*_engine(speculative_config=SimpleNamespace(method="ngram")))
    refuse_config(*_engine(device_config__device_type="cpu", model_config__enforce_eager=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_config__enable_eplb": True}, "enable_eplb"),
        ({"parallel_config__enable_elastic_ep": True}, "enable_eplb"),
        ({"parallel_config__use_ubatching": True}, "enable_dbo"),
        ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"offload_config__uva__cpu_offload_gb": 10}, "cpu_offload_gb"),
        ({"offload_config__prefetch__offload_group_size": 1}, "offload_backend=prefetch"),
        ({"offload_config__offload_backend": "prefetch"}, "offload_backend=prefetch"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "method eagle3"),
        ({"speculative_config": SimpleNamespace(method="deepseek_mtp")}, "method deepseek_mtp"),
        ({"experts__use_all2all_kernels": True}, "enable_expert_parallel"),
        ({"device_config__device_type": "cpu"}, "enforce_eager=True"),
    ],
)
def test_what_is_refused_is_named(change, named) -> None:
    with pytest.raises(NotImplementedError, match=named):
        refuse_config(*_engine(**change))


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(NotImplementedError) as caught:
        refuse_config(*_engine(parallel_config__enable_eplb=True, model_config__enable_sleep_mode=True))
    assert "enable_eplb" in str(caught.value)
    assert "enable_sleep_mode" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size"),
        ({"parallel_config__enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"lora_config": object()}, "enable_lora"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "method ngram"),
        ({"model_config__quantization": "fp8"}, "quantization=fp8"),
        ({"model_config__enforce_eager": False}, "CUDA graphs"),
    ],
)
def test_what_has_never_run_is_told(caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str) -> None:
    with caplog.at_level(logging.WARNING, "vllm.hf_prefetch"):
        warn_untried(_engine(model_config__enforce_eager=True)[0])
        assert not caplog.records
        warn_untried(_engine(**{"model_config__enforce_eager": True} | change)[0])
    assert named in caplog.text


def _layer(kernel: str | None, *, monolithic: bool = False, lora: str = "", loaded: bool = True) -> Any:
    kind = type(kernel, (), {}) if kernel else None
    method = SimpleNamespace(is_monolithic=monolithic, moe_kernel=None)
    if loaded and kind:
        method.moe_kernel = SimpleNamespace(fused_experts=kind())
    elif kind:
        method.experts_cls = kind
    return SimpleNamespace(layer_name="model.layers.3.mlp.experts", quant_method=method, lora_base_layer_prefix=lora)


@pytest.mark.parametrize("loaded", [True, False])
def test_kernels(loaded) -> None:
    for kernel in KERNELS:
        refuse_layer(_layer(kernel, loaded=loaded))
    for kernel in ("MarlinExperts", "FlashInferExperts", "DeepGemmExperts"):
        with pytest.raises(NotImplementedError, match=rf'{kernel} \(model.layers.3.mlp.experts\).*moe_backend="triton"'):
            refuse_layer(_layer(kernel, loaded=loaded))
    with pytest.raises(NotImplementedError, match=r"TrtLlmBf16ExpertsMonolithic .* monolithic kernel"):
        refuse_layer(_layer("TrtLlmBf16ExpertsMonolithic", monolithic=True, loaded=loaded))


def test_adapters_on_experts() -> None:
    with pytest.raises(NotImplementedError, match=r"LoRA on experts .*lora_target_modules"):
        refuse_layer(_layer("TritonExperts", lora="base_layer."))


# -- what a call shows --------------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_workers_own_experts() -> None:
    """With expert parallelism ids are global; -1 stands for experts of other workers."""
    bank = LayerBank(0, "layer", (), {}, 2, ("topk_ids", 2), BankLayout.of([]), takes_other_ids=False)
    hook = LayerHook(None, bank, torch.device("cpu"))
    ids = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
    arguments = (torch.zeros(2, 4), torch.ones(2, 2), ids)
    count, rows, remaps, guards = hook.reads(SimpleNamespace(expert_map=None), None, arguments, {})
    assert (count, remaps, guards) == (4, False, False)
    assert torch.equal(rows, ids.long())
    local = torch.tensor([-1, 0, -1, 1, -1, -1], dtype=torch.int32)
    _, rows, _, _ = hook.reads(SimpleNamespace(expert_map=local), None, arguments, {})
    assert rows.tolist() == [[-1, 1], [-1, 0]]
    assert rows.dtype is torch.int64


def test_other_ids_have_the_type_of_the_calls_own() -> None:
    bank = LayerBank(0, "layer", (), {}, 2, ("topk_ids", 2), BankLayout.of([]), takes_other_ids=True)
    arguments = (torch.zeros(1, 4), torch.ones(1, 2), torch.tensor([[7, 3]], dtype=torch.int32))
    (_, _, ids), _ = bank.with_ids(arguments, {}, torch.tensor([[1, 0]]))
    assert ids.dtype is torch.int32
    assert ids.tolist() == [[1, 0]]


def test_remedies_are_those_of_engines() -> None:
    told = " ".join(vars(REMEDIES).values())
    for elsewhere in ("enable_expert_prefetch", "disable_expert_prefetch", "set_experts_implementation", "transformers"):
        assert elsewhere not in told
