"""What can go wrong with files that are in use: an error names them, or the first bits come; never others."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import hf_prefetch.memory.loading as reading
import hf_prefetch.model.kept as kept
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.discovery import find_banks
from hf_prefetch.memory import written as writing
from hf_prefetch.memory.checkpoint import read_headers
from hf_prefetch.memory.disk import FileSource
from hf_prefetch.streams import InOrderDevice
from hf_prefetch.testing import FakeDevice
from models import GATE, Snapshot, build, experts_of, prompt
from test_disk import load, logits, open_files, reference
from test_faults import Interrupt
from test_loading import SINGLE, save


def generated(model: PreTrainedModel) -> torch.Tensor:
    """A prompt's tokens, and some more."""
    return model.generate(prompt(GATE), max_new_tokens=4, do_sample=False)


def another(folder: Path) -> Path:
    """A file of the same keys and shapes with other values."""
    build("mixtral", seed=1).save_pretrained(folder)
    return folder / SINGLE


# -- while generate runs ------------------------------------------------------------------------------------------


def _fail(file: Path, other: Path) -> None:
    raise OSError(5, "Input/output error")


def _truncate(file: Path, other: Path) -> None:
    os.truncate(file, 1000)


def _write(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(1, 1))


def _replace(file: Path, other: Path) -> None:
    os.replace(other, file)


def _delete(file: Path, other: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("share", [0.1, 0.95])
@pytest.mark.parametrize(("change", "says"), [
    (_fail, r"'.*' in .*model\.safetensors can't be read: Input/output error"),
    (_truncate, r"model\.safetensors (has become shorter|was written to)"),
    (_write, r"model\.safetensors was written to"),
    (_replace, None),
    (_delete, None),
])  # fmt: skip
def test_a_file_that_changes_while_generate_reads_it(
    change: Callable[[Path, Path], None], says: str | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt, or in a later token. The same bits as ever, or an error that names the file; the disk may recover."""
    folder, other, device = save("mixtral", tmp_path / "model"), another(tmp_path / "other"), FakeDevice()
    model, read, lock = load(folder, device), FileSource._read_at, threading.Lock()
    counts, at = [0], [0]

    def counted(self: FileSource, *arguments: Any) -> int:
        with lock:
            counts[0] += 1
            if counts[0] == at[0]:
                change(folder / SINGLE, other)
        return read(self, *arguments)

    monkeypatch.setattr(FileSource, "_read_at", counted)
    before = -1
    while before != counts[0]:  # what is read for a token depends on what was seen in others
        before, counts[0] = counts[0], 0
        with device.watching():
            expected = generated(model)
    counts[0], at[0] = 0, max(1, int(share * before))
    with device.watching(), pytest.raises((OSError, ValueError), match=says) if says else contextlib.nullcontext():
        result = generated(model)
    assert counts[0] >= at[0]
    if change is _fail:
        with device.watching():
            result = generated(model)
    if change not in (_truncate, _write):
        assert torch.equal(result, expected)
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes, open_files(tmp_path)) == (0, 0, 0)


# -- while it is loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_memory", [0, None])
def test_a_file_that_is_replaced_while_it_is_loaded(
    host_memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where things lie in it was looked up in the first one."""
    folder, device = save("mixtral", tmp_path / "model"), FakeDevice()
    others, read, look = [another(tmp_path / "other")], reading._read_piece, kept.extents_of

    def replace_first(*arguments: Any) -> None:
        while others:
            os.replace(others.pop(), folder / SINGLE)

    monkeypatch.setattr(reading, "_read_piece", lambda piece: (replace_first(), read(piece))[1])
    monkeypatch.setattr(kept, "extents_of", lambda *arguments: (replace_first(), look(*arguments))[1])
    with pytest.raises(ValueError, match=r"model\.safetensors was written to or replaced while it was loaded"):
        load(folder, device, host_memory=host_memory)
    assert not others
    assert (device.allocated_bytes, device.registered_bytes, open_files(tmp_path)) == (0, 0, 0)


# -- a file that others touch -------------------------------------------------------------------------------------


def _write_and_set_back(file: Path, at: int) -> None:
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\1" * 900)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("when", ["in use", "while it is loaded"])
def test_a_file_that_is_written_to_and_has_its_time_set_back(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids, look = save("mixtral", tmp_path), prompt(GATE), kept.extents_of
    time.sleep(0.02)  # the clock of files is coarse

    def change(*arguments: Any) -> Any:
        _write_and_set_back(folder / SINGLE, (folder / SINGLE).stat().st_size // 2)
        return look(*arguments) if arguments else None

    if when == "in use":
        model = load(folder)
        logits(model, ids)
        change()
        with pytest.raises(ValueError, match=r"model\.safetensors was written to while"):
            logits(model, ids)
    else:
        monkeypatch.setattr(kept, "extents_of", change)
        with pytest.raises(ValueError, match=r"model\.safetensors was written to or replaced while"):
            load(folder)


@pytest.mark.parametrize("touch", [
    lambda file: file.chmod(0o600),
    lambda file: os.link(file, file.with_suffix(".link")),
    lambda file: file.rename(file.with_suffix(".old")),
    lambda file: (os.link(file, file.with_suffix(".link")), file.unlink()),
    lambda file: shutil.copyfile(file.rename(file.with_suffix(".old")), file),
], ids=["rights", "another name", "renamed", "moved", "another in its place"])  # fmt: skip
def test_what_does_a_file_no_harm(touch: Callable[[Path], Any], tmp_path: Path) -> None:
    folder, ids = save("mixtral", tmp_path), prompt(GATE)
    file = folder / SINGLE
    file.chmod(0o644)
    model = load(folder)
    expected, before = logits(model, ids), os.stat(file)
    time.sleep(0.02)
    with file.open("rb") as stream:
        touch(file)
        assert os.fstat(stream.fileno()).st_ctime_ns != before.st_ctime_ns
    assert torch.equal(logits(model, ids), expected)


# -- the offload folder -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_room(nbytes: int) -> Iterator[None]:
    """No file may become larger than this, which is as good as a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("way", ["from_pretrained", "enable"])
@pytest.mark.parametrize("trouble", ["no room", "a file is there"])
def test_an_offload_folder_that_can_not_be_written_to(trouble: str, way: str, tmp_path: Path) -> None:
    """The error says what was to be written where; nothing is left there, and a model in memory is what it was."""
    folder, written, device = save("mixtral", tmp_path / "model"), tmp_path / "written", FakeDevice()
    model, ids = build("mixtral"), prompt(GATE)
    before, expected = Snapshot.of(model), logits(model, ids)
    if trouble == "a file is there":
        written.write_text("mine")
    says = rf"The [\d.]+ KiB of model\.layers\.0\.mlp\.experts can't be written to {written}, the offload_folder: "
    why = "File too large" if trouble == "no room" else r"it is a file\. Give the path of a folder as offload_folder\."
    options: dict[str, Any] = {"host_memory": 0, "offload_folder": written, "progress": False, "device": device}
    enable = partial(enable_expert_prefetch, model) if way == "enable" else partial(from_pretrained, folder, dtype="bfloat16")
    with no_room(20_000), pytest.raises(OSError, match=says + why):
        enable(**options)
    if trouble == "no room":
        assert not list(written.iterdir())
    else:
        assert written.read_text() == "mine"
    assert (device.allocated_bytes, device.registered_bytes, open_files(tmp_path)) == (0, 0, 0)
    before.assert_restored(model)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("tokens", [1, GATE])
@pytest.mark.parametrize("tensor", [0, -1])
def test_a_damaged_file_that_is_found_again(tensor: int, tokens: int, tmp_path: Path) -> None:
    """Its weights are compared with checksums when they are read for the first time: an error names the file."""
    folder, written, ids = save("mixtral", tmp_path / "model"), tmp_path / "written", prompt(tokens)
    options: dict[str, Any] = {"dtype": "bfloat16", "offload_folder": written}
    expected = logits(load(folder, **options), ids)
    file = next(written.iterdir())
    made = file.stat().st_ino
    assert torch.equal(logits(load(folder, **options), ids), expected)
    assert file.stat().st_ino == made
    places = sorted(read_headers([file]).values(), key=lambda stored: stored.offset)
    stored = places[tensor]
    content = bytearray(file.read_bytes())
    # A bit of each row, since a single token reads few of them.
    for row in range(stored.shape[0]):
        content[stored.offset + (row + 1) * (stored.nbytes // stored.shape[0]) - 1] ^= 1
    file.write_bytes(content)
    model = load(folder, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{re.escape(file.name)} is damaged: .* Delete it"):
            logits(model, ids)
    file.unlink()
    assert torch.equal(logits(load(folder, **options), ids), expected)


def test_any_damaged_byte_of_a_header(tmp_path: Path) -> None:
    """Such a file is written anew, or what it holds is refused."""
    folder, written, ids = save("mixtral", tmp_path / "model"), tmp_path / "written", prompt(GATE)
    options: dict[str, Any] = {"dtype": "bfloat16", "offload_folder": written}
    expected = logits(load(folder, **options), ids)
    file = next(written.iterdir())
    content = file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    anew = 0
    for at in (content.index(b"down_proj"), *random.Random(1).sample(range(length), 15)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        made = file.stat().st_ino
        model = load(folder, **options)
        anew += file.stat().st_ino != made
        try:
            assert torch.equal(logits(model, ids), expected), at
        except ValueError as error:
            assert "is damaged" in str(error)  # noqa: PT017 - which of both it is depends on the byte
    assert anew > 7


def test_an_interrupt_wherever_a_file_is_written(tmp_path: Path) -> None:
    """Neither a file nor a descriptor stays behind."""
    model, written = build("mixtral"), tmp_path / "written"
    bank = find_banks(model).banks[0]
    written.mkdir()

    def write(interrupt: Interrupt, made_of: str | None) -> None:
        source = None
        with interrupt, contextlib.suppress(KeyboardInterrupt):
            block = torch.zeros(bank.nbytes, dtype=torch.uint8)
            if made_of is None:
                source = writing._write_block(written, "bank", block)
            else:
                source = writing._write(written / "bank.safetensors", bank.layout, block, made_of)
        if source is not None:
            source.close()

    for made_of in (None, "a checkpoint"):
        whole = Interrupt(0)
        write(whole, made_of)
        assert len(whole.lines) > 20
        for at in range(1, len(whole.lines)):
            for file in written.iterdir():
                file.unlink()
            interrupt = Interrupt(at)
            write(interrupt, made_of)
            assert {file.suffix for file in written.iterdir()} <= {".safetensors"}, whole.lines[at]
            assert open_files(written) == 0, whole.lines[at]


@pytest.mark.parametrize("moment", ["written", "found"])
def test_an_offload_folder_that_two_models_share(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their banks have the same names, and another process may write its own between any two steps of this one."""
    folders = [save("mixtral", tmp_path / "one"), another(tmp_path / "two").parent]
    written, theirs, ids = tmp_path / "written", tmp_path / "theirs", prompt(GATE)
    options: dict[str, Any] = {"dtype": "bfloat16"}
    expected = [logits(reference(folder, **options), ids) for folder in folders]
    assert not torch.equal(*expected)
    load(folders[1], offload_folder=theirs, **options)
    if moment == "found":
        load(folders[0], offload_folder=written, **options)
    name, replace, look, came = writing.__name__, os.replace, writing.read_metadata, []

    def meddle() -> None:
        for file in theirs.iterdir():
            if (written / file.name).exists():
                shutil.copyfile(file, tmp_path / "copy")
                replace(tmp_path / "copy", written / file.name)
                came.append(file.name)

    if moment == "written":
        monkeypatch.setattr(f"{name}.os.replace", lambda *names: (replace(*names), meddle()))
    else:
        monkeypatch.setattr(f"{name}.read_metadata", lambda file: (look(file), meddle())[0])
    models = [load(folder, offload_folder=written, **options) for folder in folders]
    monkeypatch.undo()
    assert came
    for _ in range(2):
        for model, result in zip(models, expected, strict=True):
            assert torch.equal(logits(model, ids), result)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """When the same bank is written the next time; but not what another process is writing just now."""
    folder, written = save("mixtral", tmp_path / "model"), tmp_path / "written"
    written.mkdir()
    name = next(iter(experts_of(build("mixtral"))))
    names = [writing._new_name(written, name) for _ in range(2)]
    left, (begun, busy) = written / f"{name}-left.tmp", [(file, writing._new_file(file)) for file in names]
    left.write_bytes(b"half of it")
    empty = written / f"{name}-empty.tmp"
    empty.touch()
    busy[1].write(b"half of it")
    other = written / "mine.tmp"
    other.write_bytes(b"somebody else's")
    load(folder, dtype="bfloat16", offload_folder=written)
    assert not left.exists()
    assert not empty.exists()
    assert all(file.exists() for file in (begun[0], busy[0], other))
    begun[1].close()
    busy[1].close()


def test_a_file_that_is_taken_for_remains_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker makes it again."""
    file, lock, taken = writing._new_name(tmp_path, "experts"), fcntl.flock, []

    def too_late(descriptor: int, how: int) -> None:
        if not taken:
            taken.append(descriptor)
            writing._remove_remains(tmp_path / "experts.safetensors")
            assert not file.exists()
        lock(descriptor, how)

    monkeypatch.setattr(writing.fcntl, "flock", too_late)
    with writing._new_file(file) as stream:
        assert taken
        assert os.path.samestat(os.fstat(stream.fileno()), file.stat())
        writing._remove_remains(tmp_path / "experts.safetensors")
        assert file.exists()


# -- where and by whom --------------------------------------------------------------------------------------------


def test_relative_paths_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Hub's cache has them: a snapshot is links to blobs. Who changes the directory afterwards changes nothing."""
    repo, commit, ids = tmp_path / "models--somebody--tiny", "0" * 40, prompt(GATE)
    snapshot, blobs = repo / "snapshots" / commit, repo / "blobs"
    save("mixtral", snapshot, shard="300KB")
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    expected = {dtype: logits(reference(snapshot, dtype=dtype), ids) for dtype in ("float32", "bfloat16")}
    monkeypatch.chdir(tmp_path)
    ways: list[tuple[str, dict[str, Any]]] = [
        (os.path.relpath(snapshot), {"dtype": "float32"}),
        (os.path.relpath(snapshot), {"dtype": "bfloat16", "offload_folder": "written"}),
        (str(snapshot), {"dtype": "bfloat16", "offload_folder": tmp_path / "written"}),
        ("somebody/tiny", {"dtype": "bfloat16", "offload_folder": "written", "cache_dir": str(tmp_path)}),
    ]
    states = []
    for name, options in ways:
        model = load(name, **options)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "elsewhere")
            assert torch.equal(logits(model, ids), expected[options["dtype"]])
            disable_expert_prefetch(model)
            assert torch.equal(logits(model, ids), expected[options["dtype"]])
        written = tmp_path / "written"
        states.append({file.name: file.stat().st_mtime_ns for file in written.iterdir()} if written.exists() else {})
    assert states[1] == states[2] == states[3] != {}, "it is found, whatever the checkpoint is called"


def test_threads_that_generate_at_once(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    model, expected = load(folder, host_memory=100_000), generated(reference(folder))
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: generated(model), range(8)):
            assert torch.equal(result, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_that_are_forked(tmp_path: Path) -> None:
    """A DataLoader's begin while the model runs. They end without a word, and take nothing from their parent."""
    folder = save("mixtral", tmp_path)
    model, expected = load(folder, InOrderDevice(torch.device("cpu"))), generated(reference(folder))
    assert torch.equal(generated(model), expected)
    for batch in DataLoader(prompt(64)[0].tolist(), batch_size=16, num_workers=2, multiprocessing_context="fork"):
        assert len(batch) == 16
        assert torch.equal(generated(model), expected)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = torch.equal(generated(model), expected)
            disable_expert_prefetch(model)
            status = 0 if same and torch.equal(generated(model), expected) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(generated(model), expected)
    assert open_files(tmp_path) > 0
