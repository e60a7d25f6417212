"""Packed checkpoints: what is written is what is loaded, bit by bit; and one that is broken is refused by file and key."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    PreTrainedModel,
)

import architectures
from architectures import ARCHITECTURES
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained, save_packed
from hf_prefetch.cli import main
from hf_prefetch.demo import demo_model_path, load_demo_model
from hf_prefetch.discovery import find_banks
from hf_prefetch.memory.packed_files import INDEX
from hf_prefetch.memory.writers import hold
from hf_prefetch.model.packed import PackedWeights
from hf_prefetch.testing import FakeDevice
from models import FAMILIES, build, experts_of, prompt
from test_architectures import REFUSED
from test_disk_faults import no_room

FIRST = "packed-00001-of-00008.safetensors"
# Of these AutoModelForCausalLM loads a part, under names that transformers knows from their own checkpoints only.
PARTS = ("dots3_note",)
# Of these nothing is packed: for how experts lie or are called, and of the last one because its rows are that short.
UNPACKABLE = ("dbrx", "jetmoe", "llama4_text", "longcat_flash", "nemotron_h_latent")


def load(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, device=options.pop("device", "cpu"), progress=False, **options)


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, PackedWeights)}


def assert_same(model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value.cpu().view(torch.uint8), expected[name].view(torch.uint8)), name


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model, packed."""
    folder = tmp_path_factory.mktemp("packed")
    save_packed(load_demo_model(), folder, progress=False)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


# -- what is written is what is loaded ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_the_demonstration_model(device: torch.device, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as it lies there: nothing is packed again, and its logits are those of the model."""
    expected, ids = load_demo_model().to(device), prompt(24, device=device)
    before = state_of(expected)
    monkeypatch.setattr("hf_prefetch.model.packed.pack", lambda rows: pytest.fail("something was packed again"))
    model = load(written, device=device)
    assert len(packed_names(model)) == 2 * len(experts_of(model))
    assert model.expert_prefetch.report().host_bytes < 0.8 * sum(bank.nbytes for bank in find_banks(expected).banks)
    assert_same(model, before)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    disable_expert_prefetch(model)
    assert not packed_names(model)
    assert_same(model, before)


def test_a_quarter_less_is_read(written: Path) -> None:
    """In bytes of experts in files."""

    def experts(folder: Path) -> int:
        return sum(
            opened.get_tensor(key).nbytes
            for file in folder.glob("*.safetensors")
            for opened in [safe_open(file, framework="pt")]
            for key in opened.keys()  # noqa: SIM118
            if ".experts." in key
        )

    assert experts(written) < 0.77 * experts(Path(demo_model_path()))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """With biases, float32 beside bfloat16, tied weights: what is packed and what is not."""
    model = build(family, torch.bfloat16)
    for module in experts_of(model).values():
        # One that would get larger.
        noise = torch.randint(-(2**15), 2**15, module.down_proj.shape, generator=torch.Generator().manual_seed(0))
        module.down_proj.data.copy_(noise.short().view(torch.bfloat16))
    model.save_pretrained(tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    found = save_packed(model, tmp_path / "packed", progress=False)
    assert found.packed == len(experts_of(model))
    loaded = load(tmp_path / "packed")
    assert all(name.endswith("gate_up_proj") for name in packed_names(loaded))
    assert_same(loaded, state_of(expected))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path) -> None:
    """Each tensor finds its place again under the name that the model has for it, whatever its checkpoints call it."""
    model = architectures.build(name, torch.bfloat16)
    if not model.can_generate() or type(model.config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip("not what AutoModelForCausalLM loads")
    model.save_pretrained(tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"no Mixture-of-Experts|can be prefetched"):
            save_packed(model, tmp_path / "packed", progress=False)
        return
    if name in PARTS:
        says = r"A \w+ForConditionalGeneration could not be loaded again, since .* makes a \w+ForCausalLM of its config: of "
        with pytest.raises(ValueError, match=says):
            save_packed(model, tmp_path / "packed", progress=False)
        assert not (tmp_path / "packed").exists()
        return
    if name in UNPACKABLE:
        with pytest.raises(ValueError, match="nothing to pack"):
            save_packed(model, tmp_path / "packed", progress=False)
        return
    assert save_packed(model, tmp_path / "packed", progress=False).packed
    loaded, values = load(tmp_path / "packed"), state_of(expected)
    if type(loaded) is type(model):
        # transformers may cast some, and does not find all again that it has saved.
        values = {name: value.to(values[name].dtype) for name, value in state_of(model).items()}
    assert_same(loaded, values)


def test_a_model_that_is_enabled(tmp_path: Path) -> None:
    """Packed or not, with some layers on the device: what is written is the same."""
    expected = state_of(load_demo_model())
    for number, options in enumerate(({"pack": True}, {"pack": False}, {"n_cpu_moe": 3, "pack": True})):
        model = enable_expert_prefetch(load_demo_model(), device="cpu", progress=False, **options)
        found = save_packed(model, tmp_path / str(number), progress=False)
        assert found.packed == 14
        assert_same(load(tmp_path / str(number)), expected)
        save_packed(model, tmp_path / str(number), progress=False)
        assert_same(load(tmp_path / str(number)), expected)


def test_not_from_inside_a_call(tmp_path: Path) -> None:
    """There the model's Parameters are something else."""
    model = enable_expert_prefetch(load_demo_model(), device="cpu", progress=False)
    errors: list[str] = []

    def save(*_: object) -> None:
        with pytest.raises(RuntimeError, match="from inside a forward") as raised:
            save_packed(model, tmp_path / "never")
        errors.append(str(raised.value))

    next(iter(experts_of(model).values())).act_fn.register_forward_hook(save)
    model(prompt(4))
    assert errors
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("options", "packed"),
    [({"pack": False}, 0), ({"pack": True}, 14), ({"n_cpu_moe": 3}, 6), ({"gpu_memory": "30MiB"}, 0), ({"slots": 0}, 0)],
)
def test_what_is_asked_for(options: dict[str, Any], packed: int, written: Path) -> None:
    """What stays on the device is unpacked, and so is everything for pack=False and slots=0."""
    expected = load_demo_model()
    model = from_pretrained(written, progress=False, **({} if "slots" in options else {"device": "cpu"}), **options)
    assert len(packed_names(model)) == packed
    assert_same(model, state_of(expected))
    with torch.no_grad():
        assert torch.equal(model(prompt(9)).logits, expected(prompt(9)).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto", None])
def test_another_type(dtype: Any, written: Path) -> None:
    """As transformers casts an ordinary checkpoint."""
    expected = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype)
    model = load(written, dtype=dtype)
    assert_same(model, state_of(expected))
    assert bool(packed_names(model)) == (dtype is not torch.float32)


def test_types_of_its_own(tmp_path: Path) -> None:
    """A float32 head, norm and router beside bfloat16: what transformers makes of them in an ordinary checkpoint."""
    model = load_demo_model()
    for module in (model.model.norm, model.model.layers[0].mlp.gate, model.model.layers[1].self_attn.q_proj):
        module.float()
    model.save_pretrained(tmp_path / "plain")
    save_packed(model, tmp_path / "packed", progress=False)
    for options in ({}, {"dtype": "auto"}, {"dtype": torch.float32}):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
        assert_same(load(tmp_path / "packed", **options), state_of(expected))


def test_saved_again_it_is_an_ordinary_checkpoint(written: Path, tmp_path: Path) -> None:
    """`save_pretrained` of what was loaded from packed files: nothing there knows about them."""
    load(written).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same(again, state_of(load_demo_model()))
    assert "packed" not in (tmp_path / "config.json").read_text()
    with (
        safe_open(tmp_path / "model.safetensors", framework="pt") as file,
        safe_open(Path(demo_model_path()) / "model.safetensors", framework="pt") as original,
    ):
        assert set(file.keys()) == set(original.keys())


def test_transformers_finds_no_weights(written: Path) -> None:
    """So it can't take packed bytes for weights, nor make up others."""
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(written)


# -- the command -----------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From an ordinary checkpoint, with its tokenizer; and the commands take what it has written."""
    out = tmp_path / "out"
    assert main(["pack", "demo", "--out", str(out), "--device", "cpu"]) == 0
    assert "14 tensors are packed" in capsys.readouterr().out
    assert {"config.json", "generation_config.json", "tokenizer.json", INDEX, FIRST} <= {file.name for file in out.iterdir()}
    assert_same(load(out), state_of(load_demo_model()))
    said = []
    for folder in ("demo", str(out)):
        assert main(["generate", folder, "--prompt", "The", "--max-new-tokens", "8", "--device", "cpu"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["generate", str(out), "--prompt", "The", "--prefetch-experts-slots", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(said[0].rstrip())
    (out / "tokenizer.json").write_text("of another model")
    assert main(["pack", "demo", "--out", str(out), "--device", "cpu"]) == 0
    assert (out / "tokenizer.json").read_bytes() == (Path(demo_model_path()) / "tokenizer.json").read_bytes()
    assert_same(load(out), state_of(load_demo_model()))
    capsys.readouterr()
    assert main(["pack", str(out), "--out", str(tmp_path / "twice"), "--device", "cpu"]) == 1
    assert "packed checkpoint already" in capsys.readouterr().err
    assert main(["pack", "demo", "--out", str(demo_copy(tmp_path)), "--device", "cpu"]) == 1
    assert "holds an ordinary checkpoint" in capsys.readouterr().err


def demo_copy(folder: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), folder / "demo"))


# -- what is refused -----------------------------------------------------------------------------------------------------


def _edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def _flip(place: float) -> Callable[[Path], None]:
    """One bit of the first file, so far into it."""

    def spoil(folder: Path) -> None:
        content = bytearray((folder / FIRST).read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        (folder / FIRST).write_bytes(content)

    return spoil


def _cut(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-100])


def _cut_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = len(config.pop("layer_types", [0] * 7)) + 1
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, rf"{FIRST} is truncated: '.*experts.*'"),
        (_flip(0.0), rf"{FIRST}"),
        (_flip(0.0005), rf"{FIRST} (is damaged: its header|is no safetensors file)"),
        (_flip(0.2), rf"'model\.layers\.0\.mlp\.experts\..*(blocks|escapes)' in .*{FIRST} is damaged"),
        (_flip(1.0), rf"'model\.layers\.0\.mlp\.experts\..*(blocks|escapes)' in .*{FIRST} is damaged"),
        (lambda folder: (folder / FIRST).unlink(), rf"(?s){FIRST}"),
        (_edit_index(lambda index: index["metadata"].update(version=2)), r"of version 2 .*reads 1.*hf-prefetch pack"),
        (_edit_index(lambda index: index["metadata"].update(format="pt")), "no packed checkpoint"),
        (_edit_index(lambda index: index["weight_map"].update(other=FIRST)), rf"{FIRST} lacks 'other'"),
        (_cut_config, r"lacks 'model\.layers\.7\."),
    ],
    ids=["cut", "first byte", "header", "in a block", "last byte", "missing", "version", "format", "index", "config"],
)
def test_a_broken_one(copy: Path, spoil: Callable[[Path], None], words: str) -> None:
    """The file and the key are named, and nothing stays page-locked or on the device."""
    spoil(copy)
    device = FakeDevice()
    with pytest.raises((ValueError, OSError), match=words):
        load(copy, device=device)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_a_file_that_changes_while_it_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bank: those before it are given back without being unpacked."""
    file = sorted(copy.glob("packed-*"))[6]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)
    device = FakeDevice()
    monkeypatch.setattr(PackedWeights, "unpacked", lambda self: pytest.fail("weights that nobody wants were unpacked"))
    with pytest.raises(ValueError, match=rf"'model\.layers\.6\..*' in .*{file.name} is damaged"):
        load(copy, device=device)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_what_is_not_packed_is_checked_where_it_stays_in_files(tmp_path: Path) -> None:
    """One layer of noise, which would get larger, beyond `host_memory`: it is written to a folder, its checksums compared."""
    model = load_demo_model()
    # The one that is chosen of seven.
    noisy = list(experts_of(model).values())[4]
    for weights in (noisy.gate_up_proj, noisy.down_proj):
        noise = torch.randint(-(2**15), 2**15, weights.shape, generator=torch.Generator().manual_seed(0))
        weights.data.copy_(noise.short().view(torch.bfloat16))
    save_packed(model, tmp_path / "packed", progress=False)
    nbytes = noisy.gate_up_proj.nbytes + noisy.down_proj.nbytes
    # The six others take three quarters of theirs.
    options = {"host_memory": 5 * nbytes}
    with pytest.raises(ValueError, match=r"with checksums.*offload_folder"):
        load(tmp_path / "packed", **options)
    loaded = load(tmp_path / "packed", offload_folder=tmp_path / "kept", **options)
    assert loaded.expert_prefetch.report().file_bytes == nbytes
    assert_same(loaded, state_of(model))
    disable_expert_prefetch(loaded)
    shutil.rmtree(tmp_path / "kept")
    files = json.loads((tmp_path / "packed" / INDEX).read_text())["weight_map"]
    file = tmp_path / "packed" / files["model.layers.4.mlp.experts.down_proj"]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"layers\.4\.mlp\.experts.* is damaged"):
        load(tmp_path / "packed", offload_folder=tmp_path / "kept", **options)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[]", b"null", b'{"metadata": 3}'])
def test_an_index_that_is_damaged(copy: Path, content: bytes) -> None:
    """Named, with what to do, as any other file."""
    (copy / INDEX).write_bytes(content)
    for options in ({}, {"slots": 0, "device": None}):
        with pytest.raises(ValueError, match=rf"{INDEX} is damaged: .*copy it again"):
            load(copy, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["metadata"].pop("headers"),
        lambda index: index.pop("weight_map"),
        lambda index: index["weight_map"].update({"model.norm.weight": 3}),
        lambda index: index["weight_map"].update({"model.norm.weight": "../other.safetensors"}),
        lambda index: index["weight_map"].pop("model.norm.weight"),
    ],
    ids=["headers", "map", "number", "elsewhere", "lacks one"],
)
def test_an_index_that_says_too_little(copy: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """JSON, but not what was written."""
    _edit_index(change)(copy)
    with pytest.raises(ValueError, match=rf"{INDEX} is damaged: .*copy it again"):
        load(copy)


def test_any_bit_of_the_index(copy: Path) -> None:
    """What is loaded is what was written, or an error of the kinds that are promised."""
    expected, content = state_of(load_demo_model()), (copy / INDEX).read_bytes()
    for place in range(7, len(content), len(content) // 40):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        (copy / INDEX).write_bytes(spoilt)
        try:
            model = load(copy, slots=0, device=None)
        except (ValueError, FileNotFoundError):
            continue
        assert_same(model, expected)


def test_verify_a_packed_one(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it is read and compared with its checksums."""
    assert main(["pack", str(copy), "--verify", "--device", "cpu"]) == 0
    assert "all checksums are right" in capsys.readouterr().out
    _flip(0.5)(copy)
    assert main(["pack", str(copy), "--verify", "--device", "cpu"]) == 1
    assert f"{FIRST}" in capsys.readouterr().out


def test_verify_goes_by_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where names say nothing, or files are others, it says what does."""
    save_file({"mixer.stack": torch.zeros(4, 8, 8, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for words in ("goes by names. --out packs", "reads no others; --out FOLDER packs"):
        assert main(["pack", str(tmp_path), "--verify", "--device", "cpu"]) == 1
        assert words in capsys.readouterr().err
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_two_kinds_in_a_folder(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is guessed to be the one that is meant."""
    load_demo_model().save_pretrained(copy)
    for options in ({}, {"slots": 0, "device": None}):
        with pytest.raises(ValueError, match=rf"an ordinary one \(model\.safetensors\) and a packed one \({INDEX}\).*Remove"):
            load(copy, **options)
    for arguments in (["generate", str(copy), "--prompt", "The"], ["pack", str(copy), "--verify"]):
        assert main([*arguments, "--device", "cpu"]) == 1
        assert "holds two checkpoints" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="ordinary checkpoint"):
        save_packed(load_demo_model(), copy)
    for file in copy.glob("packed*"):
        file.unlink()
    assert_same(load(copy), state_of(load_demo_model()))


def _interrupt_at(number: int, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    calls = iter(range(number + 1))

    def interrupted(*args: Any) -> None:
        if next(calls) == number:
            raise error
        save_file(*args)

    monkeypatch.setattr("hf_prefetch.memory.packed_files.save_file", interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("number", [0, 5])
def test_an_interrupt_while_one_is_replaced(
    number: int, error: type[BaseException], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one stays as it is, and nothing is left of the new one."""
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    model = load(copy)
    _interrupt_at(number, monkeypatch, error)
    with pytest.raises(error):
        save_packed(model, copy, progress=False)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


def test_an_interrupt_while_one_is_put_in_place(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the new one lie beside the old one, which is still the one that is loaded; writing again tidies up."""
    changed, replace, names = load_demo_model(), os.replace, len(list(copy.iterdir()))
    with torch.no_grad():
        next(iter(experts_of(changed).values())).down_proj.mul_(2)

    def interrupted(source: Path, target: Path) -> None:
        if target.name == INDEX:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("hf_prefetch.memory.packed_files.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_packed(changed, copy, progress=False)
    assert_same(load(copy), state_of(load_demo_model()))
    save_packed(changed, copy, progress=False)
    assert_same(load(copy), state_of(changed))
    assert len(list(copy.iterdir())) == names


def test_one_that_is_not_whole(tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process that was killed leaves, and a copy that lacks the index."""
    folder = tmp_path / "new"
    _interrupt_at(5, monkeypatch, KeyboardInterrupt)
    with monkeypatch.context() as killed:
        killed.setattr("hf_prefetch.memory.packed_files.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            save_packed(load_demo_model(), folder, progress=False)
    part = shutil.copytree(written, tmp_path / "part", ignore=lambda *_: [INDEX])
    for there in (folder, Path(part)):
        for options in ({}, {"slots": 0, "device": None}):
            with pytest.raises(ValueError, match=rf"not whole: there is packed-.*, but no {INDEX}"):
                load(there, **options)
    monkeypatch.setattr("hf_prefetch.memory.packed_files.save_file", save_file)
    save_packed(load_demo_model(), folder, progress=False)
    assert_same(load(folder), state_of(load_demo_model()))
    assert {file.name for file in folder.iterdir()} == {file.name for file in written.iterdir()}


@pytest.mark.parametrize("options", [{}, {"pin_memory": 0}, {"pack": False}, {"slots": 0, "device": None}])
def test_onto_its_own_source(options: dict[str, Any], copy: Path) -> None:
    """Whatever of them is in memory or in these very files, both stay what they are."""
    expected = load_demo_model()
    model = load(copy, **options)
    for _ in range(2):
        save_packed(model, copy, progress=False)
        assert_same(load(copy), state_of(expected))
        with torch.no_grad():
            assert torch.equal(model(prompt(9)).logits, expected(prompt(9)).logits)


def test_what_could_not_be_loaded_again(tmp_path: Path) -> None:
    """It is refused before anything is written."""
    shared, fewer, own = load_demo_model(), load_demo_model(), load_demo_model()
    shared.model.layers[1].mlp.experts = shared.model.layers[0].mlp.experts
    fewer.config.num_hidden_layers += 1
    if getattr(fewer.config, "layer_types", None):
        fewer.config.layer_types = [*fewer.config.layer_types, fewer.config.layer_types[-1]]
    experts = own.model.layers[0].mlp.experts
    experts.scale = nn.Parameter(torch.ones(experts.down_proj.shape[0], 4, dtype=torch.bfloat16))
    for model, words in (
        (load_demo_model().model, r"AutoModelForCausalLM makes a \w+ForCausalLM of its config"),
        (shared, r"'model\.layers\.1\.mlp\.experts\.down_proj' it has nothing, or shares it"),
        (fewer, r"'model\.layers\.7\..* has nothing"),
        (own, r"'model\.layers\.0\.mlp\.experts\.scale' it has .*describes has nothing"),
        (load_demo_model().float(), "nothing to pack: this model's experts are float32"),
    ):
        with pytest.raises(ValueError, match=words):
            save_packed(model, tmp_path / "never", progress=False)
    assert not (tmp_path / "never").exists()


class WithMore(MixtralForCausalLM):  # type: ignore[misc]
    """A model that somebody has given a head more."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 2, bias=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("made", "lacks"), [(MixtralForSequenceClassification, True), (MixtralForTokenClassification, True), (WithMore, False)]
)
def test_what_would_be_loaded_as_something_else(
    made: type[PreTrainedModel], lacks: bool, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer weights or with more: it is refused before a file is made, and no folder is named that is not there."""
    config = build("mixtral", torch.bfloat16).config
    config.tie_word_embeddings = tied
    model = made(config).bfloat16()
    monkeypatch.setattr("hf_prefetch.checkpoints.saving.PackedFiles", lambda *_: pytest.fail("something was written"))
    name = "lm_head" if lacks and not tied else "score"
    says = rf"^A {made.__name__} could not be loaded again, since .* makes a MixtralForCausalLM of its config: of "
    with pytest.raises(ValueError, match=rf"{says}'{name}\.\w+' it has .*\. Save a model as AutoModelForCausalLM") as caught:
        save_packed(model, tmp_path / "never", progress=False)
    assert str(tmp_path) not in str(caught.value)
    assert "unfinished" not in str(caught.value)


_OWN = """
from transformers import MixtralConfig, MixtralForCausalLM


class OwnConfig(MixtralConfig):
    model_type = "own_{number}"


class Own(MixtralForCausalLM):
    config_class = {config}
"""


@pytest.mark.parametrize("options", [{}, {"slots": 0, "device": None}])
def test_code_that_comes_with_a_model(options: dict[str, Any], tmp_path: Path) -> None:
    """It is loaded with the first call as with later ones; a model that would come back with other code is refused."""
    source, packed = tmp_path / "plain", tmp_path / "packed"
    build("mixtral", torch.bfloat16).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "own.Own"}}
    (source / "own.py").write_text(_OWN.format(number=len(options), config="MixtralConfig"))
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"code of its own, and transformers has a MixtralForCausalLM .*pack=True.*slots=0"):
        save_packed(load(source, trust_remote_code=True), packed)
    assert not packed.exists()
    config |= {"model_type": f"own_{len(options)}", "architectures": ["Own"]}
    config["auto_map"]["AutoConfig"] = "own.OwnConfig"
    (source / "own.py").write_text(_OWN.format(number=len(options), config="OwnConfig"))
    (source / "config.json").write_text(json.dumps(config))
    # Whatever of its weights is found under the names that the original has, it is the same model from here on.
    original = load(source, trust_remote_code=True)
    expected = state_of(original)
    assert save_packed(original, packed, progress=False).packed
    # In a folder of another name this is code that was never loaded.
    again = Path(shutil.copytree(packed, tmp_path / f"again_{len(options)}"))
    for _ in range(2):
        model = load(again, trust_remote_code=True, **dict(options))
        assert type(model).__name__ == "Own"
        assert_same(model, expected)


def test_where_it_can_not_be_written(tmp_path: Path) -> None:
    """In words, too."""
    with pytest.raises(ValueError, match="name of the folder is empty"):
        save_packed(load_demo_model(), "")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        save_packed(load_demo_model(), tmp_path / "file")


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says where, and what to do; the folders that were made for it are gone."""
    folder = tmp_path / "new" / "packed"
    says = rf"can't be written to {folder}, and nothing of it is left there: .*File too large.* Free space or give another"
    with no_room(20_000), pytest.raises(OSError, match=says) as caught:
        save_packed(load_demo_model(), folder, progress=False)
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
    with no_room(20_000):
        assert main(["pack", "demo", "--out", str(folder), "--device", "cpu"]) == 1
    assert "nothing of it is left there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    folder.parent.mkdir()
    with no_room(100), pytest.raises(OSError, match="can't be written"):
        save_packed(load_demo_model(), folder, progress=False)
    assert list(tmp_path.rglob("*")) == [folder.parent]


_WRITES = """
import sys
import hf_prefetch.memory.packed_files as files
from hf_prefetch import save_packed
from hf_prefetch.demo import load_demo_model


def write_slowly(*args):
    save_file(*args)
    print("writing", flush=True)
    sys.stdin.readline()


save_file, files.save_file = files.save_file, write_slowly
save_packed(load_demo_model(), sys.argv[1], progress=False)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of writing a packed checkpoint to the folder `shared`, until it is let go on."""
    command = [sys.executable, "-c", _WRITES, str(tmp_path / "shared")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


@pytest.mark.skipif(os.name == "nt", reason="folders can't be locked there")
def test_one_writer_at_a_time(writer: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second one is refused, and the first goes on."""
    shared = tmp_path / "shared"
    for _ in range(2):
        with pytest.raises(BlockingIOError, match=rf"^Another process, or .*, is writing to {shared}\. Wait until"):
            save_packed(load_demo_model(), shared, progress=False)
    assert main(["pack", "demo", "--out", str(shared), "--device", "cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-prefetch: Another process")
    writer.communicate("\n" * 100, timeout=120)
    assert writer.returncode == 0
    assert_same(load(shared), state_of(load_demo_model()))
    assert not list(shared.glob("packed-unfinished-*"))


@pytest.mark.skipif(os.name == "nt", reason="folders can't be locked there")
def test_what_a_writer_left_that_was_killed(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    """It is in nobody's way."""
    shared = tmp_path / "shared"
    writer.kill()
    writer.wait()
    assert list(shared.glob("packed-unfinished-*"))
    save_packed(load_demo_model(), shared, progress=False)
    assert_same(load(shared), state_of(load_demo_model()))
    assert not list(shared.glob("packed-unfinished-*"))


def test_where_folders_can_not_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written all the same."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for place in ("fcntl.flock", "fcntl"):
        monkeypatch.setattr(f"hf_prefetch.memory.writers.{place}", None if place == "fcntl" else refuse)
        save_packed(load_demo_model(), tmp_path / "packed", progress=False)
        assert_same(load(tmp_path / "packed"), state_of(load_demo_model()))


def test_a_folder_that_goes_as_it_is_to_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote there before has removed it: it is made anew."""
    fcntl = pytest.importorskip("fcntl")
    folder, times = tmp_path / "packed", iter(range(9))

    def flock(descriptor: int, how: int) -> None:
        if next(times) == 0:
            folder.rmdir()
        lock(descriptor, how)

    lock = fcntl.flock
    monkeypatch.setattr("hf_prefetch.memory.writers.fcntl.flock", flock)
    with hold(folder):
        assert folder.is_dir()
        with pytest.raises(BlockingIOError):
            hold(folder)
    hold(folder).close()


def test_what_is_removed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no want of room."""

    def remove(_: Any, file: Path, *__: Any) -> None:
        shutil.rmtree(file.parent)
        save_file({"x": torch.zeros(1)}, file)

    monkeypatch.setattr("hf_prefetch.memory.packed_files.save_file", remove)
    with pytest.raises(FileNotFoundError, match="what was written of it has been removed meanwhile") as caught:
        save_packed(load_demo_model(), tmp_path / "packed", progress=False)
    assert "space" not in str(caught.value)


def test_what_can_not_be_saved(tmp_path: Path) -> None:
    """In words."""
    with pytest.raises(TypeError, match="a transformers model can be saved packed, not a Linear"):
        save_packed(nn.Linear(2, 2), tmp_path)
    with pytest.raises(TypeError, match="folder must be a path, got None of type NoneType"):
        save_packed(load_demo_model(), None)  # type: ignore[arg-type]
    config = load_demo_model().config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="has no value here"):
        save_packed(empty, tmp_path)
    quantized = load_demo_model()
    quantized.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="is quantized"):
        save_packed(quantized, tmp_path)
    demo_copy(tmp_path)
    with pytest.raises(FileExistsError, match="ordinary checkpoint"):
        save_packed(load_demo_model(), tmp_path / "demo")
