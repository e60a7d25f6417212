"""Experts that can't be packed: whoever asks for it is told so, and no checkpoint says that it is packed and is not."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

import architectures
from architectures import ARCHITECTURES
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained, save_packed
from hf_prefetch.checkpoints.saving import Written, pack_checkpoint
from hf_prefetch.cli import main
from hf_prefetch.command.verification import Verification, verify
from hf_prefetch.demo import load_demo_model
from hf_prefetch.discovery import find_banks
from hf_prefetch.model.packed import unsuited
from hf_prefetch.streams import stream_device
from models import build, experts_of

ON_CPU = ["--device", "cpu"]
WITHOUT_IDS, IN_A_LIST = "llama4_text", "switch_transformers"


def noise() -> PreTrainedModel:
    """Whose weights are random bits."""
    model, generator = build("qwen3_moe", torch.bfloat16), torch.Generator().manual_seed(0)
    for module in experts_of(model).values():
        for parameter in module.parameters():
            bits = torch.randint(-(2**15), 2**15, parameter.shape, generator=generator)
            parameter.data.copy_(bits.short().view(torch.bfloat16))
    return model


def odd() -> PreTrainedModel:
    """Whose experts have an odd number of weights."""
    model = build("qwen3_moe", torch.bfloat16)
    for module in experts_of(model).values():
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter.data[:, :-1, :-1].contiguous()))
    return model


def of(name: str) -> Callable[[], PreTrainedModel]:
    if name not in ARCHITECTURES:
        pytest.skip(f"transformers has no {name}")
    return lambda: architectures.build(name, torch.bfloat16)


KINDS = pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(lambda: of(WITHOUT_IDS)(), "are called without their ids", id="without ids"),
        pytest.param(lambda: of(IN_A_LIST)(), "don't lie in tensors with a row for each", id="in a list"),
        pytest.param(lambda: build("qwen3_moe", torch.float32), "are float32, and only bfloat16", id="float32"),
        pytest.param(odd, "have an odd number of weights", id="odd"),
        pytest.param(noise, "would hardly get smaller", id="random bits"),
    ],
)


@KINDS
def test_whoever_asks_for_it_is_told(make: Callable[[], PreTrainedModel], why: str) -> None:
    """Once, with the reason and the number of layers; the report has that number."""
    model = make()
    with pytest.warns(UserWarning, match=why) as told:
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    report = model.expert_prefetch.report()
    assert report.unpacked_banks == report.banks > 0
    (text,) = [str(each.message) for each in told if "pack=True" in str(each.message)]
    assert f"{report.banks} of {report.banks} expert banks" in text
    assert f"{report.banks} of {report.banks} banks are not packed" in str(report)
    disable_expert_prefetch(model)


@pytest.mark.parametrize("pack", [None, False, True])
def test_who_gets_what_is_asked_for_is_not(pack: bool | None) -> None:
    model = build("qwen3_moe", torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_expert_prefetch(model, device="cpu", pack=pack, progress=False)
    assert "not packed" not in str(model.expert_prefetch.report())
    disable_expert_prefetch(model)


def test_some_of_them() -> None:
    """Only those of which nothing is packed are counted."""
    model = build("qwen3_moe", torch.bfloat16)
    first, *others = experts_of(model).values()
    first.float()
    with pytest.warns(UserWarning, match=rf"1 of {1 + len(others)} expert banks \(model\.layers\.0\.mlp\.experts\).*float32"):
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    assert model.expert_prefetch.report().unpacked_banks == 1
    disable_expert_prefetch(model)


def test_no_checkpoint_is_packed_with_nothing_packed(tmp_path: Path) -> None:
    """Not even one that is called so: it is refused, and nothing is written."""
    for number, (make, why) in enumerate(
        ((of(WITHOUT_IDS), "called without their ids"), (noise, "would get a tenth smaller"), (odd, "odd number"))
    ):
        folder = tmp_path / str(number)
        with pytest.raises(ValueError, match=f"nothing to pack.*{why}"):
            save_packed(make(), folder, progress=False)
        assert not folder.exists() or not list(folder.iterdir())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither promises anything nor writes it."""
    of(WITHOUT_IDS)().save_pretrained(tmp_path / "model")
    for action in (["--verify"], ["--out", str(tmp_path / "out")]):
        assert main(["pack", str(tmp_path / "model"), *action, *ON_CPU]) == 1
        out, err = capsys.readouterr()
        assert "called without their ids" in err
        assert not out
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def of_size(family: str, inner: int, seed: int = 0) -> PreTrainedModel:
    """Eight experts of 64 by `inner` weights in each of three layers."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": inner, "num_hidden_layers": 3}
    config: Any = MixtralConfig(**sizes, num_local_experts=8)
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=inner, num_experts=8, num_experts_per_tok=2, head_dim=16)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).bfloat16()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("inner", "packed"), [(48, 1), (64, 2), (80, 1)])
def test_verify_tells_what_is_written(family: str, inner: int, packed: int, tmp_path: Path) -> None:
    """To the byte: an expert by itself, as the files have it, would take more blocks than as a row of what the model has."""
    of_size(family, inner).save_pretrained(tmp_path / "model")
    found, written = verify_and_pack(tmp_path)
    assert (found.weights_nbytes, found.written_nbytes) == (written.nbytes, written.written_nbytes)
    assert found.packed == written.packed == 3 * packed
    assert (found.tensors, found.others, found.layers) == (6, 0, (3, 3))
    model = from_pretrained(tmp_path / "model", device="cpu", pack=True, progress=False)
    banks = model.expert_prefetch.banks
    assert sum(bank.has_packed for bank in banks) == len(banks) == 3
    assert found.nbytes == sum(parameter.numel() * 2 for bank in banks for parameter in bank.parameters.values())


def test_verify_of_layers_of_which_one_is_packed(tmp_path: Path) -> None:
    """Whether a layer is depends on its weights."""
    model = of_size("qwen3_moe", 64)
    for number in (0, 2):
        for parameter in experts_of(model)[f"model.layers.{number}.mlp.experts"].parameters():
            parameter.data.copy_(torch.randint(-(2**15), 2**15, parameter.shape).short().view(torch.bfloat16))
    model.save_pretrained(tmp_path / "model")
    found, written = verify_and_pack(tmp_path)
    assert found.layers == (1, 3)
    assert (found.packed, found.weights_nbytes, found.written_nbytes) == (2, written.nbytes, written.written_nbytes)
    assert "4 tensors stay as they are" in str(found)


def test_verify_goes_by_the_type_that_a_model_has(tmp_path: Path) -> None:
    """The files may have another one, which is cast when it is loaded."""
    of_size("qwen3_moe", 64).float().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found, written = verify_and_pack(tmp_path)
    assert (found.packed, found.weights_nbytes, found.written_nbytes) == (6, written.nbytes, written.written_nbytes)


def verify_and_pack(folder: Path) -> tuple[Verification, Written]:
    found = verify(folder / "model", "it", torch.device("cpu"), progress=False)
    assert isinstance(found, Verification)
    assert found.wrong == ()
    return found, pack_checkpoint(folder / "model", folder / "out", stream_device("cpu"), progress=False)


@pytest.mark.parametrize("action", [["--verify"], ["--out", "out"]])
def test_experts_too_small_to_be_packed(
    action: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says of them that a model keeps them packed."""
    monkeypatch.chdir(tmp_path)
    of_size("mixtral", 24).save_pretrained("model")
    assert main(["pack", "model", *action, *ON_CPU]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "nothing to pack: none of this model's experts would get a tenth smaller" in err
    with pytest.warns(UserWarning, match="would hardly get smaller"):
        model = from_pretrained("model", device="cpu", pack=True, progress=False)
    assert model.expert_prefetch.report().unpacked_banks == 3


def test_a_few_experts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying takes no more memory for many experts than for some, and tells the same."""
    of_size("qwen3_moe", 64).save_pretrained(tmp_path)
    whole = verify(tmp_path, "it", torch.device("cpu"), progress=False)
    monkeypatch.setattr("hf_prefetch.command.verification._AT_ONCE", 3 * 64 * 64)
    assert verify(tmp_path, "it", torch.device("cpu"), progress=False) == whole


def test_verify_of_a_quantized_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not taken for what its config makes when nothing is loaded."""
    of_size("qwen3_moe", 64).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert main(["pack", str(tmp_path), "--verify", *ON_CPU]) == 1
    assert "is quantized" in capsys.readouterr().err


def test_verify_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names say what belongs to experts, and not how a model calls them."""
    weights = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"layers.0.experts.up": weights}, tmp_path / "model.safetensors")
    # Of no model, of one that is not here, and of one without experts.
    for config in ("{}", '{"model_type": "nobody_knows"}', LlamaConfig(num_hidden_layers=1).to_json_string()):
        (tmp_path / "config.json").write_text(config)
        assert main(["pack", str(tmp_path), "--verify", *ON_CPU]) == 0
        rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
        assert "?" in rows["layers"].split()
        assert "is not known" in rows["layers"]
        assert "each tensor packed by itself" in rows["packed"]
        assert "written" not in rows


def test_verify_makes_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that it looks at has none."""
    load_demo_model().save_pretrained(tmp_path)
    looked: list[nn.Module] = []

    def look(model: nn.Module) -> object:
        looked.append(model)
        return find_banks(model)

    monkeypatch.setattr("hf_prefetch.command.verification.find_banks", look)
    assert main(["pack", str(tmp_path), "--verify", *ON_CPU]) == 0
    assert all(parameter.is_meta for model in looked for parameter in model.parameters())
    assert len(looked) == 1


def test_what_is_packed_already_can_be(tmp_path: Path) -> None:
    save_packed(load_demo_model(), tmp_path, progress=False)
    model = from_pretrained(tmp_path, device="cpu", progress=False)
    assert {unsuited(bank) for bank in model.expert_prefetch.banks} == {None}
