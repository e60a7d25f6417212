"""Number formats of quantized experts: scales and zero points travel with the weights that they belong to, bit for bit."""

from __future__ import annotations

import json
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BitsAndBytesConfig, CompressedTensorsConfig, PreTrainedModel
from transformers.integrations import mxfp4

import architectures
from caching import budget, cached
from formats import FP8, fp8_model, gguf_model, mxfp4_model, torch_kernels
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.memory.store import send_parameter
from hf_prefetch.testing import FakeDevice
from models import EXPERTS, Snapshot, build, experts_of, prompt

LONG, NEW_TOKENS = 24, 5


def outcome(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
    output = model.generate(ids, **options)
    return (output.sequences, *output.logits)


def check(model: PreTrainedModel, rows: int, slots: int = 3) -> Any:
    """The same off, on, again and off, a prompt and tokens after it, and the model as before. Returns what on reported."""
    ids = prompt(LONG)
    expected = outcome(model, ids)
    before = Snapshot.of(model)
    with cached(model, rows, "cpu", slots=slots) as scheduler:
        for _ in range(2):
            assert all(map(torch.equal, outcome(model, ids), expected))
        report = scheduler.report()
    before.assert_restored(model)
    assert all(map(torch.equal, outcome(model, ids), expected))
    assert report.fallbacks == 0
    assert report.lookahead_hits > 0
    assert report.bytes_to_device > 0
    return report


@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_float16(implementation: str, rows: int) -> None:
    """Other types of floats have tests everywhere."""
    model = build("gpt_oss", torch.float16)
    model.set_experts_implementation(implementation)
    report = check(model, rows)
    assert report.routed_calls + report.cached_calls == 2 * (NEW_TOKENS - 1) * report.banks


# -- fine-grained fp8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", FP8)
def test_fp8(kind: str, implementation: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of weights and rows of scales, whatever the size of these: whole banks, single experts, and a cache."""
    if kind == "static" and implementation != "eager":
        pytest.skip("transformers takes scales of inputs in eager only")
    torch_kernels(monkeypatch.setattr)
    model = fp8_model(kind)
    model.set_experts_implementation(implementation)
    bank = find_banks(model).banks[0]
    assert set(bank.parameters) == {"gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"}
    report = check(model, rows)
    assert report.routed_calls + report.cached_calls == 2 * (NEW_TOKENS - 1) * report.banks, "tokens send their experts only"
    assert (report.cached_calls > 0) == (rows > 0 and implementation != "eager")


def test_what_stays_behind_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of inputs, one an expert, are no part of the bank: a cache, whose rows have other numbers, would mix them up."""
    torch_kernels(monkeypatch.setattr)
    model = fp8_model("blocks")
    model.set_experts_implementation("batched_mm")
    for module in experts_of(model).values():
        module.register_buffer("input_scale", torch.ones(EXPERTS))
    assert check(model, EXPERTS // 2).cached_calls == 0


def test_what_is_kept_beside_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same among attributes."""
    torch_kernels(monkeypatch.setattr)
    model = fp8_model("blocks")
    model.set_experts_implementation("batched_mm")
    for module in experts_of(model).values():
        module.input = SimpleNamespace(scale=torch.ones(EXPERTS))
    assert check(model, EXPERTS // 2).cached_calls == 0


def test_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of bytes are tensors like others. They are multiplied all at once, so after one try tokens get whole banks."""
    report = check(gguf_model(monkeypatch.setattr), 0)
    assert report.routed_calls == report.banks


# -- weights in objects of kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_mxfp4(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's tensors and biases are one bank, read by the block around it; objects stay the same ones."""
    model = mxfp4_model(monkeypatch.setattr)
    banks = find_banks(model).banks
    assert len(banks) == len(experts_of(model))
    assert {name.partition(".")[2] for name in banks[0].parameters} == {
        *(f"{name}_proj{rest}" for name in ("gate_up", "down") for rest in ("_bias", ".storage.data")),
        *(f"{name}_proj_precision_config.weight_scale.storage.data" for name in ("gate_up", "down")),
    }
    module = next(iter(experts_of(model).values()))
    held = [module.gate_up_proj, module.down_proj_precision_config.weight_scale]
    before = [(each, each.storage, each.storage.data.stride(), each.storage.data.clone()) for each in held]
    report = check(model, 0, slots)
    assert report.host_bytes == sum(bank.nbytes for bank in banks)
    for each, storage, stride, value in before:
        assert each.storage is storage
        assert type(storage.data) is torch.Tensor
        assert storage.data.stride() == stride
        assert torch.equal(storage.data, value)


def test_a_slot_is_all_that_kernels_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the host is in their objects during a call, and none of a slot after it, even after an error."""
    model, ids = mxfp4_model(monkeypatch.setattr), prompt(LONG)
    module = list(experts_of(model).values())[2]
    seen: list[int] = []
    kernels = mxfp4.triton_kernels_hub.matmul_ogs
    own = kernels.matmul_ogs

    def watches(given: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if weight is module.down_proj:
            seen.append(weight.storage.data.data_ptr())
            raise ZeroDivisionError
        return own(given, weight, *args, **kwargs)

    enable_expert_prefetch(model, device="cpu")
    host = module.down_proj.storage.data.data_ptr()
    monkeypatch.setattr(kernels, "matmul_ogs", watches)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(ids)
    assert len(seen) == 1
    assert seen[0] != host
    assert module.down_proj.storage.data.data_ptr() == host
    disable_expert_prefetch(model)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_view_that_kernels_put_in_the_place_of_a_weight_is_that_weight(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss's kernels for Triton make sure of the type of the scales at each call, and keep the result in the object."""
    model = mxfp4_model(monkeypatch.setattr)
    kernels = mxfp4.triton_kernels_hub.matmul_ogs
    own = kernels.matmul_ogs

    def makes_sure(given: torch.Tensor, weight: Any, *args: Any, precision_config: Any, **kwargs: Any) -> torch.Tensor:
        storage = precision_config.weight_scale.storage
        storage.data = storage.data.view(torch.uint8)
        return own(given, weight, *args, precision_config=precision_config, **kwargs)

    monkeypatch.setattr(kernels, "matmul_ogs", makes_sure)
    check(model, 0, slots)


def test_another_view_in_the_place_of_a_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mxfp4_model(monkeypatch.setattr)
    kernels = mxfp4.triton_kernels_hub.matmul_ogs
    own = kernels.matmul_ogs

    def turns(given: torch.Tensor, weight: Any, *args: Any, precision_config: Any, **kwargs: Any) -> torch.Tensor:
        result = own(given, weight, *args, precision_config=precision_config, **kwargs)
        storage = precision_config.weight_scale.storage
        storage.data = storage.data.transpose(1, 2)
        return result

    enable_expert_prefetch(model, device="cpu")
    monkeypatch.setattr(kernels, "matmul_ogs", turns)
    with pytest.raises(RuntimeError, match=r"has replaced its own weight .*weight_scale"), torch.no_grad():
        model(prompt(LONG))


def test_views_in_objects_do_not_keep_what_they_are_views_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed tensor knows the one that it was made of; experts would be there twice."""
    model = mxfp4_model(monkeypatch.setattr)
    storage = next(iter(experts_of(model).values())).gate_up_proj.storage
    whole = storage.data.transpose(1, 2).clone()
    storage.data, held = whole.transpose(1, 2), weakref.ref(whole)
    ids, expected = prompt(LONG), outcome(model, prompt(LONG))
    del whole
    assert held() is not None
    enable_expert_prefetch(model, device="cpu")
    assert held() is None
    assert all(map(torch.equal, outcome(model, ids), expected))
    disable_expert_prefetch(model)
    assert all(map(torch.equal, outcome(model, ids), expected))


def test_weights_replaced_in_objects_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those among Parameters are."""
    model = mxfp4_model(monkeypatch.setattr)
    storage = next(iter(experts_of(model).values())).gate_up_proj.storage
    enable_expert_prefetch(model, device="cpu")
    own, storage.data = storage.data, storage.data.clone()
    with pytest.raises(RuntimeError, match=r"gate_up_proj\.storage\.data was replaced"), torch.no_grad():
        model(prompt(LONG))
    storage.data = own
    disable_expert_prefetch(model)


def test_blocks_of_matrices_as_parameters() -> None:
    """Blocks of 16 bytes and a scale each, four dimensions and three, are rows like others."""

    class BlockExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 8
            self.blocks = nn.Parameter(torch.randint(0, 16, (8, 4, 2, 4), dtype=torch.uint8), requires_grad=False)
            self.scales = nn.Parameter(torch.rand(8, 4, 2), requires_grad=False)

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            matrices = (self.blocks * self.scales[..., None]).flatten(2)
            return torch.einsum("tkoi,ti,tk->to", matrices[ids], hidden, weights).repeat(1, 2)

    torch.manual_seed(0)
    model, hidden = nn.Sequential(*(Routed(BlockExperts()) for _ in range(5))), torch.randn(16, 8)
    bank = find_banks(model).banks[0]
    assert set(bank.parameters) == {"blocks", "scales"}
    expected = model(hidden)
    enable_expert_prefetch(model, device="cpu")
    assert torch.equal(model(hidden), expected)
    assert torch.equal(model(hidden), expected)
    assert model.expert_prefetch.report().lookahead_hits > 0
    disable_expert_prefetch(model)


class Routed(nn.Module):
    """A layer around experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 8).requires_grad_(False), experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        return hidden + self.experts(hidden, ids, weights)  # type: ignore[no-any-return]


# -- wrappers around several tensors --------------------------------------------------------------------------------------


def quantized(kind: str) -> PreTrainedModel:
    """A small model whose experts torchao has quantized, as transformers has it do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization")
    config = {"int8": torchao.Int8WeightOnlyConfig, "float8": torchao.Float8WeightOnlyConfig}[kind]()
    model = build("qwen3_moe", torch.bfloat16)
    names = {rf"re:.*\.experts\.{name}": config for name in ("gate_up_proj", "down_proj")}
    torchao.quantize_(model, torchao.FqnToConfig(names), filter_fn=None)
    return model


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize(("kind", "implementation"), [("int8", "eager"), ("float8", "eager"), ("float8", "grouped_mm")])
def test_torchao(kind: str, implementation: str, slots: int) -> None:
    """Values, scales and zero points are rows of the bank; the Parameters stay the objects that they were."""
    model = quantized(kind)
    model.set_experts_implementation(implementation)
    module = next(iter(experts_of(model).values()))
    parameter, bank = module.gate_up_proj, find_banks(model).banks[0]
    inner, _ = parameter.__tensor_flatten__()
    assert [spec.name for spec in bank.layout.specs if "gate_up" in spec.name] == [f"gate_up_proj.{name}" for name in inner]
    report = check(model, 0, slots)
    assert report.routed_calls == 2 * (NEW_TOKENS - 1) * report.banks
    assert report.host_bytes < 0.6 * sum(experts.gate_up_proj.numel() * 3 for experts in experts_of(model).values())
    assert module.gate_up_proj is parameter


def test_a_cache_of_wrapped_rows() -> None:
    """A wrapper is put around as many rows as the cache has."""
    model = quantized("float8")
    model.set_experts_implementation("grouped_mm")
    assert check(model, EXPERTS // 2).cached_calls > 0


def test_wrapped_weights_that_are_loaded_while_enabled() -> None:
    """What is written into them is what the next call computes with."""
    model, other, ids = quantized("int8"), quantized("int8"), prompt(LONG)
    for each in (model, other):
        each.set_experts_implementation("eager")
    with torch.no_grad():
        for module in experts_of(other).values():
            module.down_proj.qdata.add_(1)
    expected, second = outcome(model, ids), outcome(other, ids)
    assert not all(map(torch.equal, expected, second))
    enable_expert_prefetch(model, device="cpu")
    assert all(map(torch.equal, outcome(model, ids), expected))
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, outcome(model, ids), second))
    disable_expert_prefetch(model)
    assert all(map(torch.equal, outcome(model, ids), second))


# -- libraries that quantize linear layers --------------------------------------------------------------------------------


def loaded_by(bits: int, source: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model as transformers loads it with bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    source.save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": config, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    model = type(source).from_pretrained(folder, **options).eval()
    model.generation_config = source.generation_config
    return model  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    """Linear layers are quantized and stay on the device; stacked experts are as they were, and travel."""
    model = loaded_by(bits, build("qwen3_moe", torch.bfloat16), tmp_path)
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    assert all(bank.is_plain for bank in find_banks(model).banks)
    for rows in (0, EXPERTS // 2):
        check(model, rows)


@pytest.mark.parametrize(("bits", "kind"), [(4, "Params4bit"), (8, "Int8Params")])
def test_bitsandbytes_in_lists_of_experts(bits: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are linear layers, whose weights have scales that nobody could move with them: left, and named."""
    small = architectures.ARCHITECTURES["switch_transformers"]
    # Where the processor has AVX512-BF16, bitsandbytes computes with whole blocks of 32 rows of 64 weights.
    blocks = replace(small, options={**small.options, "d_ff": 64, "num_experts": 32})
    monkeypatch.setitem(architectures.ARCHITECTURES, "switch_transformers", blocks)
    model = loaded_by(bits, architectures.build("switch_transformers"), tmp_path)
    expected = architectures.run("switch_transformers", model)
    with pytest.raises(ValueError, match=rf"expert_0\.wi\.weight is a {kind}, .* can't be taken apart"):
        enable_expert_prefetch(model, device="cpu")
    assert architectures.run("switch_transformers", model).equals(expected)


class Keeps(nn.Parameter):
    """Moves more than its data."""

    scale: torch.Tensor

    def to(self, device: torch.device) -> Keeps:  # type: ignore[override]
        moved = Keeps(self.data.clone())
        moved.scale = self.scale + 1
        return moved


def test_parameters_that_move_more_than_their_data() -> None:
    """Also those of bitsandbytes that are no experts: they go to the device by a way of their own."""
    parameter, value = Keeps(torch.randn(3)), torch.tensor(1.0)
    parameter.scale, before = value, parameter.detach().clone()
    send_parameter(parameter, torch.device("cpu"))
    assert type(parameter) is Keeps
    assert torch.equal(parameter, before)
    assert torch.equal(parameter.scale, value + 1)


def compressed(folder: Path) -> PreTrainedModel:
    """Writes a checkpoint of compressed-tensors with packed int4 weights; the model that it was made of."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "format": "pack-quantized", "weights": weights}
    scheme = pytest.importorskip("compressed_tensors.quantization").QuantizationScheme(**group)
    pack = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    model = build("qwen3_moe", torch.bfloat16)
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        own = {"": value}
        if name.endswith("proj.weight"):
            scale = value.float().unflatten(1, (-1, 32)).abs().amax(2) / 7
            own = pack.compress({"weight": value, "weight_scale": scale.bfloat16()}, scheme)
        tensors |= {name.removesuffix("weight") + key if key else name: part for key, part in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    config["quantization_config"] = about | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_compressed_tensors(tmp_path: Path) -> None:
    """Experts are unpacked while they are loaded; the rest too, if that is asked for."""
    source = compressed(tmp_path)
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True), "dtype": torch.bfloat16}
    model = type(source).from_pretrained(tmp_path, **options).eval()
    model.generation_config = source.generation_config
    assert not torch.equal(outcome(model, prompt(LONG))[1], outcome(source, prompt(LONG))[1])
    check(model, 0)


@pytest.mark.parametrize("before", [False, True], ids=["enabled first", "run first"])
def test_compressed_tensors_that_unpacks_later_is_refused(before: bool, tmp_path: Path) -> None:
    """It replaces weights at the model's first forward, and from then on keeps all Parameters itself."""
    source = compressed(tmp_path)
    model, ids = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), prompt(LONG)
    with torch.no_grad():
        expected = model(ids).logits if before else None
        reason = "keeps its Parameters, and brings them" if before else r"q_proj is a linear layer without.*dequantize=True"
        with pytest.raises(ValueError, match=reason):
            enable_expert_prefetch(model, device="cpu")
        assert expected is None or torch.equal(model(ids).logits, expected)


class Opaque(torch.Tensor):
    """A tensor type that keeps to itself what it is made of."""


def test_wrappers_that_can_not_be_taken_apart_are_left_where_they_are() -> None:
    """Said once, with the reason."""
    model, ids = build("qwen3_moe"), prompt(LONG)
    module = next(iter(experts_of(model).values()))
    module.down_proj = nn.Parameter(module.down_proj.detach().as_subclass(Opaque), requires_grad=False)
    expected = model(ids).logits.detach()
    with pytest.warns(UserWarning, match="down_proj is a Opaque, a tensor type that can't be taken apart"):
        enable_expert_prefetch(model, device="cpu")
    assert torch.equal(torch.Tensor(model(ids).logits.detach()), torch.Tensor(expected))
    assert model.expert_prefetch.report().banks == len(experts_of(model)) - 1
    disable_expert_prefetch(model)


# -- what can't be --------------------------------------------------------------------------------------------------------


def test_weights_that_are_nowhere_are_refused_with_the_remedy() -> None:
    """What an object keeps to itself can't be moved."""
    model = build("gpt_oss")
    for name in experts_of(model):
        experts = mxfp4.Mxfp4GptOssExperts(model.config)
        for own in ("gate_up_proj", "down_proj"):
            del experts._parameters[own]
            setattr(experts, own, object())
        model.set_submodule(name, experts)
    with pytest.raises(ValueError, match=r"quantization keeps them elsewhere.*dequantize=True") as caught:
        enable_expert_prefetch(model, device="cpu")
    assert "dense" not in str(caught.value)


def test_a_forward_that_replaces_its_weights_is_told() -> None:
    """Its next call would find the old ones, and believe that they are the new."""
    model, ids = build("qwen3_moe"), prompt(LONG)
    module = next(iter(experts_of(model).values()))
    own = module.forward

    def rewrites(*args: Any) -> Any:
        output = own(*args)
        module.down_proj = nn.Parameter(module.down_proj.transpose(1, 2).contiguous(), requires_grad=False)
        return output

    module.forward = rewrites
    device = FakeDevice("lazy")
    enable_expert_prefetch(model, device=device, expert_cache=budget(model, 4))
    before = module.down_proj
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"replaced its own weight down_proj.*set_experts_implementation"):
        model(ids)
    assert module.down_proj is before
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
