"""from_pretrained: the same model as transformers gives, read straight into its places; broken checkpoints; memory."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import hf_prefetch.memory.loading as reading
from hf_prefetch import disable_expert_prefetch, from_pretrained
from hf_prefetch.memory.checkpoint import read_headers
from hf_prefetch.memory.deferred import Deferred, NotDeferrableError
from hf_prefetch.memory.loading import Reader
from hf_prefetch.testing import FakeDevice
from models import FAMILIES, GATE, bank_bytes, build, prompt
from test_faults import Interrupt

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def save(family: str, folder: Path, *, shard: str = "50GB", fused: bool = False, tied: bool = False) -> Path:
    """A checkpoint on disk as transformers writes it, or with its experts fused as they are in the model."""
    model = build(family)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config.max_length = 77
    model.save_pretrained(folder, max_shard_size=shard)
    if fused:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(state, folder / SINGLE, metadata={"format": "pt"})
    return folder


def reference(folder: Path | str, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def load(folder: Path | str, slots: int = 3, **kwargs: Any) -> Any:
    return from_pretrained(folder, slots, progress=False, **kwargs)


def assert_same(loaded: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Tensor by tensor, and in what else a model is."""
    assert type(loaded) is type(expected)
    ours, theirs = dict(loaded.named_parameters()), dict(expected.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert type(parameter) is nn.Parameter, name
        assert type(parameter.data) is torch.Tensor, name
        assert parameter.dtype == theirs[name].dtype, name
        assert parameter.stride() == theirs[name].stride(), name
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert torch.equal(parameter.cpu(), theirs[name]), name
    ours, theirs = dict(loaded.named_buffers()), dict(expected.named_buffers())
    assert list(ours) == list(theirs)
    for name, buffer in ours.items():
        assert type(buffer) is torch.Tensor, name
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer.cpu(), theirs[name]), name
    assert list(loaded.state_dict()) == list(expected.state_dict())
    assert loaded.config.to_dict() == expected.config.to_dict()
    assert loaded.name_or_path == expected.name_or_path
    assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
    assert [module.training for module in loaded.modules()] == [module.training for module in expected.modules()]
    assert tied_names(loaded) == tied_names(expected)


def tied_names(model: nn.Module) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors that were read before their place was known."""
    shapes: list[tuple[int, ...]] = []
    materialize = Reader.materialize

    def note(self: Reader, deferred: Deferred) -> torch.Tensor:
        shapes.append(tuple(deferred.shape))
        return materialize(self, deferred)

    monkeypatch.setattr(Reader, "materialize", note)
    return shapes


# -- the same model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["single", "sharded", "fused"])
def test_the_model_is_the_one_that_transformers_loads(
    family: str, form: str, tmp_path: Path, device: torch.device, made: list[tuple[int, ...]]
) -> None:
    folder = save(family, tmp_path, shard="300KB" if form == "sharded" else "50GB", fused=form == "fused")
    assert (folder / INDEX).exists() == (form == "sharded")
    expected = reference(folder)
    loaded = load(folder, device=device)
    assert_same(loaded, expected)
    assert loaded.expert_prefetch.report().host_bytes == bank_bytes(expected)
    assert all(len(shape) < 2 for shape in made), "only small buffers are read before their place is known"
    if device.type == "cpu":
        ids = prompt(GATE)
        for parameter in expected.parameters():
            # transformers leaves fused weights in the mapped file, at any address, and kernels look at addresses.
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, expected(ids).logits)
    disable_expert_prefetch(loaded)
    assert {tensor.device.type for tensor in (*loaded.parameters(), *loaded.buffers())} == {"cpu"}
    assert_same(loaded, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.float16, torch.float32])
def test_types_of_numbers_are_cast_as_transformers_casts_them(dtype: Any, fused: bool, tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path, fused=fused)
    assert_same(load(folder, dtype=dtype), reference(folder, dtype=dtype))


def test_a_checkpoint_in_half_precision_becomes_a_model_in_full(tmp_path: Path) -> None:
    build("gpt_oss", torch.bfloat16).save_pretrained(tmp_path)
    assert_same(load(tmp_path), reference(tmp_path))
    assert_same(load(tmp_path, dtype="float32"), reference(tmp_path, dtype="float32"))


@pytest.mark.parametrize("stored", ["one", "both", "both, different"])
def test_tied_weights_are_tied_as_transformers_ties_them(stored: str, tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path, tied=True)
    if stored != "one":
        state = load_file(folder / SINGLE)
        embedding = state["model.embed_tokens.weight"]
        state["lm_head.weight"] = embedding + 1 if stored == "both, different" else embedding.clone()
        save_file(state, folder / SINGLE, metadata={"format": "pt"})
    loaded = load(folder)
    assert_same(loaded, reference(folder))
    assert bool(tied_names(loaded)) == (stored != "both, different")


def test_it_can_be_saved_again(tmp_path: Path) -> None:
    """In the same form: transformers has to know how its experts were stored."""
    folder = save("mixtral", tmp_path / "first")
    disable_expert_prefetch(loaded := load(folder))
    loaded.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / name / SINGLE) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("where", ["n_cpu_moe", "gpu_memory"])
def test_resident_experts_are_read_too(where: str, tmp_path: Path) -> None:
    folder, device, ids = save("mixtral", tmp_path), FakeDevice(), prompt(GATE)
    expected = reference(folder)
    dense = sum(parameter.nbytes for parameter in expected.parameters()) - bank_bytes(expected)
    budget = {"n_cpu_moe": 3} if where == "n_cpu_moe" else {"gpu_memory": dense + bank_bytes(expected) * 4 // 5}
    loaded = load(folder, 2, device=device, **budget)
    report = loaded.expert_prefetch.report()
    assert 0 < report.host_bytes < bank_bytes(expected)
    with device.watching(), torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert_same(loaded, expected)


def test_experts_are_page_locked_and_given_back(tmp_path: Path) -> None:
    folder, device, ids = save("qwen3_moe", tmp_path), FakeDevice(), prompt(GATE)
    expected = reference(folder)
    loaded = load(folder, device=device)
    assert loaded.expert_prefetch.report().pinned_bytes == bank_bytes(expected) == device.registered_bytes
    with device.watching(), torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert device.races() == []
    del loaded
    gc.collect()
    assert (device.registered_bytes, device.allocated_bytes) == (0, 0)


def test_options_mean_what_they_mean_in_transformers(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "inner")
    options = {"subfolder": "inner", "attn_implementation": "eager", "dtype": "bfloat16", "output_router_logits": True}
    loaded, expected = load(tmp_path, **options), reference(tmp_path, **options)
    assert_same(loaded, expected)
    assert loaded.config._attn_implementation == expected.config._attn_implementation == "eager"
    config = AutoConfig.from_pretrained(folder, num_experts_per_tok=3)
    assert_same(load(folder, config=config), reference(folder, config=config))
    generation = GenerationConfig(max_new_tokens=5)
    assert load(folder, generation_config=generation).generation_config.max_new_tokens == 5
    assert load(folder).generation_config.max_length == 77
    (model, info), (_, expected_info) = (way(folder, output_loading_info=True) for way in (load, reference))
    assert model.expert_prefetch is not None
    assert info == expected_info


def test_a_cached_snapshot_of_the_hub_is_found_by_name_and_revision(tmp_path: Path) -> None:
    repo, commit = tmp_path / "models--somebody--tiny", "0" * 40
    save("mixtral", repo / "snapshots" / commit, shard="300KB")
    for reference_name in ("main", "v1"):
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / reference_name).write_text(commit)
    expected = reference("somebody/tiny", cache_dir=tmp_path)
    assert_same(load("somebody/tiny", cache_dir=tmp_path), expected)
    assert_same(load("somebody/tiny", cache_dir=tmp_path, revision="v1"), expected)
    with pytest.raises(OSError, match="find them in the cached files"):
        load("somebody/tiny", cache_dir=tmp_path, revision="v2")


def test_off_is_transformers_own_loading(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    loaded = load(folder, 0)
    assert not hasattr(loaded, "expert_prefetch")
    assert_same(loaded, reference(folder))


def test_weights_that_the_checkpoint_lacks_are_drawn_as_transformers_draws_them(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    state = load_file(folder / SINGLE)
    del state["lm_head.weight"], state["model.layers.1.self_attn.q_proj.weight"]
    save_file(state | {"nobody.knows": torch.zeros(3)}, folder / SINGLE, metadata={"format": "pt"})
    torch.manual_seed(5)
    expected = reference(folder)
    torch.manual_seed(5)
    assert_same(load(folder), expected)


def test_there_is_one_bar_over_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, bars = save("qwen2_moe", tmp_path), []
    show = reading.byte_progress

    def noted(*args: Any) -> Any:
        bars.append(show(*args))
        bars[-1].mininterval = 0.0  # it is over before there would be a second look
        return bars[-1]

    monkeypatch.setattr(reading, "byte_progress", noted)
    capsys.readouterr()
    from_pretrained(folder, progress=True)
    total = sum(stored.nbytes for stored in read_headers([folder / SINGLE]).values())
    assert [(bar.n, bar.total) for bar in bars if bar.total] == [(total, total)]
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert {line.split(":")[0].strip() for line in lines} <= {"", "loading weights"}
    rate_and_time_left = r"[\d.]+[kM]/[\d.]+M \[\d\d:\d\d<\d\d:\d\d, [\d.]+[kMG]?B/s\]"
    assert any(re.search(rate_and_time_left, line) for line in lines)


# -- tensors that are not read yet --------------------------------------------------------------------------------


@pytest.fixture
def deferred(tmp_path: Path) -> Iterator[Callable[[str], Deferred]]:
    """Deferred tensors of a file with `a` and `b` (2 x 3) and a scalar `c`."""
    values = {"a": torch.arange(6.0).view(2, 3), "b": -torch.arange(6.0).view(2, 3), "c": torch.tensor(3)}
    save_file(values, tmp_path / SINGLE)
    stored = read_headers([tmp_path / SINGLE])
    with Reader(False) as reader:
        yield lambda key: Deferred.stored(stored[key], reader.materialize)


@pytest.mark.parametrize("make", [
    lambda a, b: torch.stack([a, b]),
    lambda a, b: torch.stack([a, b], dim=-1),
    lambda a, b: torch.cat([a, b], dim=-1),
    lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).to(dtype=torch.float16),
    lambda a, b: torch.stack([a.to(dtype=torch.bfloat16), b.to(dtype=torch.bfloat16)])[...],
])  # fmt: skip
def test_joins_and_casts_are_put_off(
    make: Callable[..., torch.Tensor], deferred: Callable[[str], Deferred], made: list[tuple[int, ...]]
) -> None:
    result, a, b = make(deferred("a"), deferred("b")), deferred("a"), deferred("b")
    assert isinstance(result, Deferred)
    assert made == []
    expected = make(a.materialize(a), b.materialize(b))
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, torch.device("cpu"))
    assert torch.equal(result.materialize(result), expected)


@pytest.mark.parametrize("make", [
    lambda a, b: a.transpose(0, 1),
    lambda a, b: torch.chunk(a, 2)[1],
    lambda a, b: torch.stack([a, torch.ones(2, 3)]),
    lambda a, b: torch.cat([a, b.to(dtype=torch.float64)]),
    lambda a, b: a[1],
    lambda a, b: a.T + b.T,
    lambda a, b: torch.zeros(2, 3).copy_(a),
    lambda a, b: a.to(dtype=torch.float16).to(dtype=torch.float32),
])  # fmt: skip
def test_anything_else_reads_first(make: Callable[..., torch.Tensor], deferred: Callable[[str], Deferred]) -> None:
    a, b = deferred("a"), deferred("b")
    result = make(a, b)
    assert type(result) is torch.Tensor
    assert torch.equal(result, make(a.materialize(a), b.materialize(b)))


def test_what_would_be_lost_is_refused(deferred: Callable[[str], Deferred]) -> None:
    a = deferred("a")
    for write in (lambda: a.mul_(2), lambda: a.__setitem__(0, 1), lambda: torch.add(a, 1, out=a), lambda: a.data.zero_()):
        with pytest.raises(NotDeferrableError):
            write()
    assert int(deferred("c").materialize(deferred("c"))) == 3


def test_long_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_prefetch.memory.checkpoint._AT_ONCE", 1000)
    folder = save("gpt_oss", tmp_path)
    assert_same(load(folder, dtype="bfloat16"), reference(folder, dtype="bfloat16"))


# -- what is loaded by transformers -------------------------------------------------------------------------------


def test_other_files_are_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save("mixtral", tmp_path)
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    with caplog.at_level(logging.WARNING, "hf_prefetch"):
        loaded = load(folder)
    assert_same(loaded, reference(folder))
    assert sum("its files are not safetensors" in record.message for record in caplog.records) == 1


def test_code_that_comes_with_a_model_is_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save("mixtral", tmp_path)
    (folder / "own.py").write_text(
        "from transformers import MixtralForCausalLM\n\n\nclass Own(MixtralForCausalLM):\n    pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "hf_prefetch"):
        loaded = load(folder, trust_remote_code=True)
    assert type(loaded).__name__ == "Own"
    assert_same(loaded, reference(folder, trust_remote_code=True))
    assert sum("its code is not transformers' own" in record.message for record in caplog.records) == 1
    assert_same(load(folder, trust_remote_code=False), reference(folder, trust_remote_code=False))


def test_another_way_of_loading_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = save("mixtral", tmp_path), None
    original = PreTrainedModel._load_pretrained_model
    monkeypatch.setattr(
        PreTrainedModel, "_load_pretrained_model", staticmethod(lambda *args, **kwargs: original(*args, **kwargs))
    )
    expected = reference(folder)
    with caplog.at_level(logging.WARNING, "hf_prefetch"):
        assert_same(load(folder), expected)
    assert sum("this version of transformers" in record.message for record in caplog.records) == 1


def test_a_conversion_that_writes_in_place_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.core_model_loading import MergeModulelist

    convert = MergeModulelist.convert

    def in_place(self: Any, input_dict: Any, **kwargs: Any) -> Any:
        for tensors in input_dict.values():
            tensors[0].mul_(2)
        return convert(self, input_dict, **kwargs)

    monkeypatch.setattr(MergeModulelist, "convert", in_place)
    folder = save("mixtral", tmp_path)
    with caplog.at_level(logging.WARNING, "hf_prefetch"):
        assert_same(load(folder), reference(folder))
    assert sum("can't be put off" in record.message for record in caplog.records) == 1


def test_a_quantized_checkpoint_is_refused_by_name_where_transformers_can_not_load_it(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"is quantized \(gptq\), and transformers can't load it here: .*not quantized"):
        load(folder)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["auto", "cpu", {"": 0}])
def test_a_device_map_is_refused_with_the_remedy(place: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device_map=.* decides where weights go.*gpu_memory=.*enable_expert_prefetch"):
        load(tmp_path, device_map=place)


@pytest.mark.parametrize("name", [None, 3, ["model"]], ids=repr)
@pytest.mark.parametrize("slots", [0, 3])
def test_what_is_no_name_of_a_checkpoint_is_refused(slots: int, name: Any) -> None:
    with pytest.raises(TypeError, match=r"pretrained_model_name_or_path must be .*a folder.*, got") as caught:
        from_pretrained(name, slots)
    assert repr(name) in str(caught.value)
    assert type(name).__name__ in str(caught.value)


def test_a_dense_model_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(Reader, "read", lambda *_: pytest.fail("something was read"))
    with pytest.raises(ValueError, match="no Mixture-of-Experts layers"):
        load(tmp_path)


def _drop_a_shard(folder: Path) -> str:
    (folder / "model-00002-of-00003.safetensors").unlink()
    return r"lacks .*model-00002-of-00003\.safetensors, which holds '.*' and \d+ more tensors"


def _truncate(folder: Path) -> str:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return r"model-00002-of-00003\.safetensors is truncated: '.*' should end at byte"


def _truncate_to_nothing(folder: Path) -> str:
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"abc")
    return r"model-00001-of-00003\.safetensors is truncated or no safetensors file"


def _spoil_the_header(folder: Path) -> str:
    file = folder / "model-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"x" * 12
    file.write_bytes(data)
    return r"model-00001-of-00003\.safetensors is no safetensors file: its header"


def _drop_a_key(folder: Path) -> str:
    _change(folder, "model.layers.1.mlp.experts.3.up_proj.weight", lambda tensor: None)
    return r"lacks 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight', which the checkpoint's index says"


def _drop_an_expert(folder: Path) -> str:
    for name in ("gate_proj", "up_proj"):
        _change(folder, f"model.layers.1.mlp.experts.3.{name}.weight", lambda tensor: None, index=True)
    return r"does not fit the model: 'model\.layers\.1\.mlp\.experts\.\d+\..*' in .* make up shape \(7, 64, 64\).*\(8, 64, 64\)"


def _bend_an_expert(folder: Path) -> str:
    _change(folder, "model.layers.2.mlp.experts.5.down_proj.weight", lambda tensor: tensor[:-1].clone())
    return r"'model\.layers\.2\.mlp\.experts\.5\.down_proj\.weight' in .* has shape \(63, 32\), which does not go together"


def _bend_a_norm(folder: Path) -> str:
    _change(folder, "model.norm.weight", lambda tensor: tensor[:-1].clone())
    return r"'model\.norm\.weight' in .*safetensors has shape \(63,\), but the model's model\.norm\.weight has \(64,\)"


def _change(folder: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor | None], *, index: bool = False) -> None:
    entries = json.loads((folder / INDEX).read_text())
    file = folder / entries["weight_map"][key]
    state = load_file(file)
    changed = change(state.pop(key))
    save_file(state if changed is None else state | {key: changed}, file, metadata={"format": "pt"})
    if index:
        del entries["weight_map"][key]
        (folder / INDEX).write_text(json.dumps(entries))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in three files."""
    folder = save("qwen3_moe", tmp_path_factory.mktemp("sharded"), shard="900KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.mark.parametrize("spoil", [
    _drop_a_shard, _truncate, _truncate_to_nothing, _spoil_the_header, _drop_a_key, _drop_an_expert, _bend_an_expert,
    _bend_a_norm,
])  # fmt: skip
def test_a_broken_checkpoint_is_refused_by_file_and_key(spoil: Callable[[Path], str], sharded: Path, tmp_path: Path) -> None:
    folder, device = tmp_path / "broken", FakeDevice()
    shutil.copytree(sharded, folder)
    message = spoil(folder)
    with pytest.raises((ValueError, OSError), match=message):
        load(folder, device=device)
    assert (device.registered_bytes, device.allocated_bytes) == (0, 0)


def test_a_file_that_shrinks_while_it_is_read(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of the first layers are page-locked by then."""
    folder, device, read = tmp_path / "shrinking", FakeDevice(), reading._read_piece
    shutil.copytree(sharded, folder)

    def shrink_first(piece: Any) -> int:
        if ".layers.4." in piece.source.key:
            piece.source.file.write_bytes(b"")
        return read(piece)

    monkeypatch.setattr(reading, "_read_piece", shrink_first)
    with pytest.raises(ValueError, match=r"model-.*safetensors has become shorter .* inside 'model\.layers\.4") as caught:
        load(folder, device=device)
    assert (device.registered_bytes, device.allocated_bytes) == (0, 0)
    assert held_by(caught.tb) == 0, "a traceback must not keep weights"


def held_by(trace: Any) -> int:
    """Bytes of the models in the frames of a traceback."""
    models = []
    while trace is not None:
        models += [value for value in trace.tb_frame.f_locals.values() if isinstance(value, PreTrainedModel)]
        trace = trace.tb_next
    return sum(parameter.nbytes for model in models for parameter in model.parameters())


# -- interrupts ---------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    load(folder, device=FakeDevice())
    with Interrupt() as whole:
        load(folder, device=FakeDevice())
    moments = random.Random(0).sample(range(1, len(whole.lines)), 12)
    for at in moments:
        device, model = FakeDevice(), None
        with Interrupt(at) as interrupt, contextlib.suppress(KeyboardInterrupt):
            model = load(folder, device=device)
        # How many lines it takes depends on threads, so a moment near the end may not come; one that comes is not lost.
        assert (model is None) == interrupt.hit, at
        if model is not None:
            disable_expert_prefetch(model)
            del model
        gc.collect()
        assert (device.registered_bytes, device.allocated_bytes) == (0, 0), at
    assert_same(load(folder), reference(folder))


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The script that measures loading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
        yield importlib.import_module("bench_load")


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@linux
def test_a_small_checkpoint_is_never_in_memory_twice(bench: ModuleType, tmp_path: Path) -> None:
    folder = bench.make_checkpoint(tmp_path, 100 * 2**20, "separate", layers=4)
    assert bench.measure("from_pretrained", folder, "cpu")["ratio"] < 1.25


@linux
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["separate", "fused"])
def test_the_peak_is_the_weights_and_little_more(bench: ModuleType, layout: str, tmp_path: Path) -> None:
    size = 2 * 2**30
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if shutil.disk_usage(tmp_path).free < 2 * size or int(fields["MemAvailable"].split()[0]) * 1024 < 2 * size:
        pytest.skip("needs 4 GiB on disk and in memory")
    folder = bench.make_checkpoint(tmp_path, size, layout)
    try:
        result = bench.measure("from_pretrained", folder, "cpu")
    finally:
        shutil.rmtree(folder)
    assert result["bytes"] > 0.95 * size
    assert result["ratio"] <= 1.05
