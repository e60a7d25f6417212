"""Banks beyond the budget for host memory stay in their files: the same bits, whatever the form of the checkpoint."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload, dispatch_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.cli import main
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.memory.disk import FileSource, OnDisk
from hf_prefetch.scheduling.residency import choose_file_banks
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import FAMILIES, GATE, Snapshot, bank_bytes, build, experts_of, prompt
from test_faults import Interrupt
from test_loading import SINGLE, assert_same, save
from threads import staging_threads

HALF = "half"


def load(folder: Path, device: Any = "cpu", *, host_memory: Any = 0, **options: Any) -> Any:
    if host_memory == HALF:
        host_memory = bank_bytes(AutoModelForCausalLM.from_pretrained(folder, dtype=options.get("dtype", "auto"))) // 2
    return from_pretrained(folder, device=device, host_memory=host_memory, progress=False, **options)


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def reference(folder: Path, **options: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    for parameter in model.parameters():
        # transformers leaves fused weights in the mapped file, at any address, and kernels look at addresses.
        parameter.data = parameter.data.clone()
    return model


def on_disk(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, OnDisk)]


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith(str(folder)) for link in links)


def test_banks_are_chosen_evenly() -> None:
    """As few as the budget allows; the first one only if it has to be."""
    assert choose_file_banks([10] * 8, 80) == []
    assert choose_file_banks([10] * 8, 79) == [4]
    assert choose_file_banks([10] * 8, 40) == [1, 3, 5, 7]
    assert choose_file_banks([10] * 8, 9) == list(range(8))
    assert choose_file_banks([], 0) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["single", "sharded", "fused"])
@pytest.mark.parametrize("budget", [0, HALF])
def test_the_same_bits_from_files(family: str, form: str, budget: Any, tmp_path: Path) -> None:
    """Prefill, decode and generate, on a device with streams; nothing of what stays in files takes memory."""
    folder = save(family, tmp_path, shard="300KB" if form == "sharded" else "50GB", fused=form == "fused")
    expected, device, ids = reference(folder), FakeDevice("lazy"), prompt(GATE)
    model = load(folder, device, host_memory=budget)
    layers, total = len(experts_of(model)), bank_bytes(expected)
    report = model.expert_prefetch.report()
    assert report.host_bytes + report.file_bytes == total
    kept = len({name.split(".experts")[0] for name in on_disk(model)})
    assert report.file_banks == kept
    where = "in files, 0 more" if kept == report.banks else f"{report.banks - kept} in host memory and {kept} in files, 0 more"
    assert where in str(report)
    assert report.file_bytes == total if budget == 0 else total // 2 <= report.file_bytes <= total // 2 + total // layers
    assert report.pinned_bytes == report.host_bytes
    assert device.registered_bytes <= report.host_bytes + 4096 * layers, "nothing else is page-locked before it is needed"
    for part in (ids, ids[:, :1], ids):
        with device.watching():
            assert torch.equal(logits(model, part), logits(expected, part))
    RaceChecker().assert_clean(device.log)
    assert model.expert_prefetch.report().lookahead_hits >= 2 * (layers - 2)
    assert_same_values(model, expected)
    disable_expert_prefetch(model)
    assert not on_disk(model)
    assert_same(model, expected)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert open_files(tmp_path) == 0
    assert not staging_threads()


def assert_same_values(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """What is asked of Parameters in files is answered, and a state dict has ordinary tensors."""
    theirs = dict(expected.named_parameters())
    assert on_disk(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, torch.nn.Parameter), name
        assert (parameter.shape, parameter.dtype, parameter.device.type) == (theirs[name].shape, theirs[name].dtype, "cpu")
        assert parameter.requires_grad == theirs[name].requires_grad
        assert torch.equal(parameter, theirs[name]), name
    state = model.state_dict()
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())
    assert sum(parameter.nbytes for parameter in model.parameters()) == sum(p.nbytes for p in expected.parameters())


@pytest.mark.parametrize("budgets", [{"pin_memory": 0, "host_memory": None}, {"pin_memory": 0, "host_memory": HALF}, {}])
def test_on_whatever_device_there_is(
    budgets: dict[str, Any], tmp_path: Path, device: torch.device, deterministic: None
) -> None:
    """Prompts and single tokens, with what is not page-locked and what is in files; a timeline tells of their copies."""
    folder, ids = save("qwen3_moe", tmp_path), prompt(GATE, device=device)
    expected = reference(folder).to(device)
    model = load(folder, device, **budgets)
    with model.expert_prefetch.timeline() as timeline:
        for part in (ids, ids[:, :1], ids, ids[:, :2]):
            assert torch.equal(logits(model, part), logits(expected, part))
    copies = [span for span in timeline.spans() if span.kind == "copy"]
    assert len(copies) == model.expert_prefetch.report().copies >= 2 * len(experts_of(model))
    assert all(span.end >= span.begin for span in copies)
    disable_expert_prefetch(model)


def test_a_part_that_outlives_its_model(tmp_path: Path) -> None:
    model = load(save("mixtral", tmp_path))
    parameter = next(experts_of(model)["model.layers.0.mlp.experts"].parameters())
    expected = parameter.float()
    assert expected.sum() != 0
    del model
    gc.collect()
    # It can be read as long as it is there.
    assert torch.equal(parameter.float(), expected)
    assert open_files(tmp_path) == 1
    del parameter
    assert open_files(tmp_path) == 0


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"host_memory": 0}], ids=str)
def test_a_part_that_is_left_of_a_model(options: dict[str, Any], tmp_path: Path) -> None:
    """As a merged adapter's base model is: it says what helps, which has the weights in memory again and all files closed."""
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(20)
    expected, part = logits(model, ids), model.model
    with torch.no_grad():
        hidden, before = part(ids).last_hidden_state, {name: value.clone() for name, value in part.state_dict().items()}
    if "host_memory" in options:
        options = {**options, "offload_folder": tmp_path}
    enable_expert_prefetch(model, device="cpu", progress=False, **options)
    assert torch.equal(logits(model, ids), expected)
    del model
    gc.collect()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"has ended.*call disable_expert_prefetch on the part that is left"),
    ):
        part(ids)
    disable_expert_prefetch(part)
    assert {type(parameter) for parameter in part.parameters()} == {torch.nn.Parameter}
    with torch.no_grad():
        assert torch.equal(part(ids).last_hidden_state, hidden)
    assert all(torch.equal(value, before[name]) for name, value in part.state_dict().items())
    gc.collect()
    assert open_files(tmp_path) == 0


def test_what_a_parameter_has_besides_its_values(tmp_path: Path) -> None:
    """Its gradient, hooks of both kinds, and attributes: while it is in a file, and afterwards."""
    model, ids, seen = build("mixtral"), prompt(20), []
    parameter = experts_of(model)["model.layers.0.mlp.experts"].down_proj
    model(ids, labels=ids).loss.backward()
    gradient = parameter.grad.clone()
    parameter.tag = "before"
    parameter.register_hook(lambda _: seen.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("post"))
    enable_expert_prefetch(model, device="cpu", host_memory=0, offload_folder=tmp_path, progress=False)
    assert isinstance(parameter, OnDisk)
    assert torch.equal(parameter.grad, gradient)
    assert parameter.tag == "before"
    parameter.tag, parameter.other = "meanwhile", "new"
    parameter.register_hook(lambda _: seen.append("late"))
    with torch.no_grad():
        model(ids)
    disable_expert_prefetch(model)
    assert type(parameter) is torch.nn.Parameter
    assert (parameter.tag, parameter.other, set(parameter.__dict__)) == ("meanwhile", "new", {"tag", "other"})
    assert torch.equal(parameter.grad, gradient)
    model(ids, labels=ids).loss.backward()
    assert torch.equal(parameter.grad, 2 * gradient)
    assert seen == ["hook", "late", "post"]
    enable_expert_prefetch(model, device="cpu", host_memory=0, offload_folder=tmp_path, progress=False)
    model.zero_grad()
    assert parameter.grad is None
    with pytest.raises(RuntimeError, match="stay in their files"):
        parameter.data = torch.zeros_like(gradient)
    disable_expert_prefetch(model)
    assert parameter.grad is None


def test_loaded_under_inference_mode(tmp_path: Path) -> None:
    folder, ids = save("mixtral", tmp_path), prompt(GATE)
    with torch.inference_mode():
        model = load(folder)
        expected = logits(reference(folder), ids)
        assert torch.equal(model(ids).logits, expected)
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert torch.equal(logits(model, ids), expected)


def test_on_the_stand_in_and_with_a_cache(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    expected, ids = reference(folder), prompt(20)
    model = load(folder, expert_cache="700KiB")
    for part in (ids, ids[:, :1], ids[:, :2], ids):
        assert torch.equal(logits(model, part), logits(expected, part))
    generated = expected.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)
    report = model.expert_prefetch.report()
    assert report.cached_calls > 0
    assert "of experts are kept there, and read ahead of use" in str(report)
    disable_expert_prefetch(model)


def test_it_is_saved_as_it_was(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "first")
    load(folder).save_pretrained(tmp_path / "second")
    first, second = load_file(folder / SINGLE), load_file(tmp_path / "second" / SINGLE)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_what_is_stored_in_another_type_needs_a_folder(tmp_path: Path) -> None:
    """It is written there once, and found the next time, unless the checkpoint has changed."""
    folder, written, ids = save("mixtral", tmp_path / "model"), tmp_path / "written", prompt(GATE)
    with pytest.raises(ValueError, match=r"go beyond host_memory.*Give offload_folder="):
        load(folder, dtype="bfloat16")
    expected = logits(reference(folder, dtype="bfloat16"), ids)
    states = []
    for _ in range(2):
        model = load(folder, dtype="bfloat16", offload_folder=written)
        assert torch.equal(logits(model, ids), expected)
        states.append({file.name: file.stat().st_mtime_ns for file in sorted(written.iterdir())})
        disable_expert_prefetch(model)
    assert states[0] == states[1]
    assert list(states[0]) == [f"{name}.safetensors" for name in experts_of(model)]
    build("mixtral", seed=1).save_pretrained(folder)
    other = logits(reference(folder, dtype="bfloat16"), ids)
    assert not torch.equal(other, expected)
    model = load(folder, dtype="bfloat16", offload_folder=written)
    assert torch.equal(logits(model, ids), other)
    assert all(file.stat().st_mtime_ns != states[0][file.name] for file in written.iterdir())
    first = sorted(written.iterdir())[0]
    first.write_bytes(first.read_bytes()[:-7])
    model = load(folder, dtype="bfloat16", offload_folder=written)
    assert torch.equal(logits(model, ids), other)


def test_a_model_in_memory_is_written_and_taken_back(tmp_path: Path) -> None:
    """The files are off the folder as soon as they are open: whatever ends the process, nothing is left of them."""
    model, ids, device = build("qwen3_moe"), prompt(GATE), FakeDevice(0)
    expected, before = logits(model, ids), Snapshot.of(model)
    with pytest.raises(ValueError, match=r"Give offload_folder="):
        enable_expert_prefetch(model, device=device, host_memory=0, progress=False)
    before.assert_restored(model)
    with pytest.raises(OSError, match=r"can't be written to .*, the offload_folder: File name too long"):
        enable_expert_prefetch(model, device=device, host_memory=0, offload_folder=tmp_path / ("x" * 300), progress=False)
    enable_expert_prefetch(model, device=device, host_memory=0, offload_folder=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert model.expert_prefetch.report().file_bytes == bank_bytes(model)
    for part in (ids, ids[:, :1]):
        with device.watching():
            logits(model, part)
    with device.watching():
        assert torch.equal(logits(model, ids), expected)
    enable_expert_prefetch(model, device=device, host_memory="1GiB", progress=False)
    assert model.expert_prefetch.report().file_bytes == 0
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert (device.allocated_bytes, device.registered_bytes, open_files(tmp_path)) == (0, 0, 0)


def test_gradients_and_writing(tmp_path: Path) -> None:
    """A forward with gradients enabled works as ever. Nobody writes to a checkpoint."""
    folder = save("mixtral", tmp_path)
    model, expected, ids = load(folder), reference(folder), prompt(GATE)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    with pytest.raises(RuntimeError, match="which are prefetched"):
        model(ids).logits.sum().backward()
    with pytest.raises(RuntimeError, match="stay in files"):
        model.load_state_dict(expected.state_dict())
    parameter = next(parameter for parameter in model.parameters() if isinstance(parameter, OnDisk))
    with pytest.raises(RuntimeError, match="stay in their files"), torch.no_grad():
        parameter.mul_(2)
    assert torch.equal(parameter.float().sum(), dict(expected.named_parameters())[on_disk(model)[0]].float().sum())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits)


WAYS_TO_WRITE: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda p: p.mul_(2),
    "an index": lambda p: p[3].zero_(),
    "set an index": lambda p: p.__setitem__(2, 0),
    "data": lambda p: p.data[1].data.add_(1),
    "a view of a view": lambda p: p.view(-1)[5:].detach().fill_(1),
    "one of many": lambda p: next(iter(p)).zero_(),
    "the same": lambda p: p.contiguous().zero_(),
    "init of all": torch.nn.init.zeros_,
    "init of one": lambda p: torch.nn.init.normal_(p[2]),
    "out=": lambda p: torch.add(torch.ones(()), 1, out=p[1]),
    "foreach": lambda p: torch._foreach_mul_(list(p.detach()), 2),
    "numpy": lambda p: p[1].detach().numpy().fill(0),
}


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_whatever_writes_is_refused(way: str, tmp_path: Path) -> None:
    """Through a view as well: what was read for it is nobody's but its own, so the write would be lost."""
    folder = save("mixtral", tmp_path)
    model, expected = load(folder), reference(folder)
    name = on_disk(model)[0]
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=r"stay in their files|destination is read-only"):
        WAYS_TO_WRITE[way](model.get_parameter(name))
    assert torch.equal(model.get_parameter(name), expected.get_parameter(name))


def test_a_view_is_as_good_as_any_to_read(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    model, expected = load(folder), reference(folder)
    name = on_disk(model)[0]
    view, same = model.get_parameter(name)[1].detach(), expected.get_parameter(name)[1].detach()
    for look in (torch.clone, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), lambda t: t.float() @ t.T.float()):
        seen = look(view)
        assert type(seen) is torch.Tensor
        assert torch.equal(seen, look(same))
        seen.zero_()
    assert view.tolist() == same.tolist()
    assert repr(view) == repr(same)
    assert (view.numpy() == same.numpy()).all()
    assert torch.equal(torch.zeros_like(same).copy_(view), same)
    grads = []
    for weights in (view, same):
        inputs = torch.ones(2, same.shape[1], requires_grad=True)
        torch.nn.functional.linear(inputs, weights).sum().backward()
        grads.append(inputs.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("change", ["truncated", "written to", "replaced", "deleted"])
def test_files_that_change_meanwhile(change: str, tmp_path: Path) -> None:
    """What is written into is refused by name. Another file in its place does no harm: the first one is open."""
    folder, ids = save("mixtral", tmp_path), prompt(GATE)
    model, file = load(folder), folder / SINGLE
    expected = logits(model, ids)
    if change == "truncated":
        os.truncate(file, 1000)
    elif change == "written to":
        with file.open("r+b") as stream:
            stream.seek(-9, os.SEEK_END)
            stream.write(b"x")
        os.utime(file, ns=(1, 1))
    elif change == "replaced":
        shutil.copyfile(file, tmp_path / "copy")
        os.replace(tmp_path / "copy", file)
    else:
        file.unlink()
    if change in ("replaced", "deleted"):
        assert torch.equal(logits(model, ids), expected)
    else:
        with pytest.raises(ValueError, match=r"model\.safetensors (has become shorter|was written to)"):
            logits(model, ids)


def test_a_model_that_is_deleted_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = load(save("mixtral", tmp_path), device := FakeDevice()), device
    logits(model, prompt(GATE))
    monkeypatch.setattr(FileSource, "read", lambda *_: pytest.fail("something was read"))
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes, open_files(tmp_path)) == (0, 0, 0)


def test_loading_that_breaks_off_reads_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to stay in files is not read just because something else went wrong."""
    monkeypatch.setattr(FileSource, "read", lambda *_: pytest.fail("something was read"))
    monkeypatch.setattr("hf_prefetch.api.guard", lambda *_: exec("raise ValueError('late')"))
    with pytest.raises(ValueError, match="late"):
        load(save("mixtral", tmp_path), FakeDevice())
    assert open_files(tmp_path) == 0


def test_an_interrupt_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nor does it leave half a file that would be taken for a whole one."""
    folder, written, ids = save("mixtral", tmp_path / "model"), tmp_path / "written", prompt(GATE)
    expected = logits(reference(folder, dtype="bfloat16"), ids)
    options: dict[str, Any] = {"dtype": "bfloat16", "offload_folder": written, "host_memory": 100_000}

    def fresh(at: int) -> tuple[Interrupt, FakeDevice]:
        shutil.rmtree(written, ignore_errors=True)
        return Interrupt(at), FakeDevice()

    whole, device = fresh(0)
    with whole:
        load(folder, device, **options)
    for at in random.Random(1).sample(range(1, len(whole.lines)), 12):
        interrupt, device = fresh(at)
        model = None
        with interrupt, contextlib.suppress(KeyboardInterrupt):
            model = load(folder, device, **options)
        if model is not None:
            # How many lines it takes depends on threads, so a moment near the end may not come.
            assert not interrupt.hit, at
            disable_expert_prefetch(model)
            del model
        gc.collect()
        assert (device.registered_bytes, device.allocated_bytes, open_files(tmp_path)) == (0, 0, 0), at
        model = load(folder, device, **options)
        assert torch.equal(logits(model, ids), expected), at
        disable_expert_prefetch(model)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_what_stays_in_files_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
    bench = importlib.import_module("bench_load")
    folder = bench.make_checkpoint(tmp_path, 512 * 2**20, "separate", layers=4)
    dense = 1 - bench.experts_share(folder)
    assert dense < 0.2
    assert bench.measure("from files", folder, "cpu")["ratio"] < dense + 0.05


# -- models that were offloaded before ----------------------------------------------------------------------------


def _all_by_accelerate(folder: Path, offload: Path) -> PreTrainedModel:
    return disk_offload(reference(folder), offload, execution_device=torch.device("cpu"))


def _experts_by_accelerate(folder: Path, offload: Path) -> PreTrainedModel:
    model = reference(folder)
    leaves = [name for name, module in model.named_modules() if not list(module.children()) and ".experts" not in name]
    device_map: dict[str, Any] = dict.fromkeys(leaves, "cpu") | dict.fromkeys(experts_of(model), "disk")
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=offload, force_hooks=True)


@pytest.mark.parametrize("dispatch", [_all_by_accelerate, _experts_by_accelerate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_accelerate_has_offloaded(
    dispatch: Callable[[Path, Path], PreTrainedModel],
    dtype: torch.dtype,
    tmp_path: Path,
    fake: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stay in accelerate's files, nothing is read to take them over or to give them back, and its hooks come back."""
    build("mixtral", dtype).save_pretrained(tmp_path / "model")
    expected, ids = logits(reference(tmp_path / "model"), prompt(GATE)), prompt(GATE)
    model = dispatch(tmp_path / "model", tmp_path / "offload")
    assert torch.equal(logits(model, ids), expected)
    hooks = {name: module._hf_hook for name, module in experts_of(model).items()}
    devices = {name: dict(hook.original_devices) for name, hook in hooks.items()}
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.utils.offload.load_offloaded_weight", lambda *_: pytest.fail("something was read"))
        enable_expert_prefetch(model, host_memory=0, progress=False)
        assert model.expert_prefetch.report().file_bytes == bank_bytes(model)
        patch.undo()
        with fake.watching():
            assert torch.equal(logits(model, ids), expected)
        patch.setattr("accelerate.utils.offload.load_offloaded_weight", lambda *_: pytest.fail("something was read"))
        patch.setattr(FileSource, "read", lambda *_: pytest.fail("something was read"))
        disable_expert_prefetch(model)
    assert {name: module._hf_hook for name, module in experts_of(model).items()} == hooks
    assert {name: hook.original_devices for name, hook in hooks.items()} == devices
    assert all(parameter.is_meta for module in experts_of(model).values() for parameter in module.parameters())
    assert torch.equal(logits(model, ids), expected)
    assert open_files(tmp_path / "offload") == 0


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"host_memory": "much"}, ValueError, "host_memory='much' is no size"),
        ({"host_memory": "9" * 400 + "GiB"}, ValueError, "host_memory='9+GiB' is no size"),
        ({"host_memory": True}, TypeError, "host_memory must be bytes"),
        ({"host_memory": -1}, ValueError, "host_memory can't be negative"),
        ({"offload_folder": "somewhere"}, ValueError, "for experts beyond host_memory"),
        ({"offload_folder": 3, "host_memory": 1}, TypeError, "must be a path"),
        ({"offload_folder": "", "host_memory": 1}, ValueError, "offload_folder is empty"),
        ({"host_memory": 1, "pack": True}, ValueError, "pack=True"),
    ],
)
def test_what_can_not_be_had_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PrefetchConfig(**options)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "demo", "--prompt", "hi", "--host-memory", "much", "--device", "cpu"]) == 2
    assert "--host-memory" in capsys.readouterr().err
    options = ["--prompt", "It was a dark", "--max-new-tokens", "3", "--device", "cpu", "--report"]
    assert main(["generate", "demo", *options]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "demo", *options, "--host-memory", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == text
    assert "of experts are kept there" in err


def test_a_folder_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = build("qwen3_moe")
    enable_expert_prefetch(model, device="cpu", host_memory=0, offload_folder="~/experts", progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["experts"]
