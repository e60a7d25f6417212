"""Experts that can't be packed: whoever asks for it is told so, and no checkpoint says that it is packed and is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

import architectures
from architectures import ARCHITECTURES
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained, save_packed
from hf_prefetch.cli import main
from hf_prefetch.demo import load_demo_model
from hf_prefetch.discovery import find_banks
from hf_prefetch.model.packed import unsuited
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


def test_verify_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names say what belongs to experts, and not how a model calls them."""
    weights = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"layers.0.experts.up": weights}, tmp_path / "model.safetensors")
    # Of no model, of one that is not here, and of one without experts.
    for config in ("{}", '{"model_type": "nobody_knows"}', LlamaConfig(num_hidden_layers=1).to_json_string()):
        (tmp_path / "config.json").write_text(config)
        assert main(["pack", str(tmp_path), "--verify", *ON_CPU]) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layers")]
        assert "?" in row.split()
        assert "is not known" in row


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
