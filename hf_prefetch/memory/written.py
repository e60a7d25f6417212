"""Files that banks are written to because host memory has no room for them, and no file holds them as they are."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch

from ..banks.layout import BankLayout
from ..sizes import shown
from .checkpoint import StoredTensor, header_of, read_headers, read_metadata
from .deferred import Recipe, Stored, stored_in
from .disk import Checksum, Extent, FileSource, extents_of
from .writers import is_at

__all__ = ["check_folder", "write_bank"]

try:
    import fcntl
except ImportError:  # Windows has no such thing
    fcntl = None  # type: ignore[assignment]

_METADATA = "hf_prefetch"
_CHECKSUMS = "hf_prefetch_checksums"
_UNFINISHED = ".tmp"
# Bytes of a checksum: of those that a read touches in part the rest is read as well, once.
_CHECKED = 2**20


def write_bank(
    folder: Path, name: str, layout: BankLayout, recipes: Mapping[str, Recipe | None], fill: Callable[[torch.Tensor], None]
) -> FileSource:
    """Write a bank to a safetensors file, unless it is there already, and read it from there from now on.

    A file that was made of a checkpoint is kept, and used again as long as the checkpoint is the same. What was made of
    weights in memory is of no use later: such a file is taken off the folder as soon as it is open. What is found is compared
    with its checksums when it is read for the first time, since reading all of it now would take as long as the checkpoint.

    Args:
        folder: where the file goes.
        name: of the bank.
        layout: of the bank.
        recipes: of which tensors of a checkpoint it is made, if it is.
        fill: writes the bank's bytes to a block: flat uint8.

    Raises:
        OSError: there is no room, or the folder can't be written to.
    """
    made_of = _fingerprint(layout, recipes)
    file = folder / f"{name or 'experts'}.safetensors"
    if made_of is not None:
        # It may be gone, broken, or be replaced by another process between two looks: then it is written anew.
        with suppress(OSError, ValueError, TypeError, AttributeError):
            source = _found(file, layout, made_of)
            if source is not None:
                return source
    block = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    fill(block)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write_block(folder, name, block) if made_of is None else _write(file, layout, block, made_of)
    except OSError as error:
        raise _unwritten(folder, name, layout.nbytes, error) from error


def check_folder(folder: Path, name: str, nbytes: int) -> None:
    """See whether anything can be written to a folder, for the `nbytes` bytes of a bank, say. It is made if it is not there.

    Raises:
        OSError: nothing can.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritten(folder, name, nbytes, error) from error


def _unwritten(folder: Path, name: str, nbytes: int, error: OSError) -> OSError:
    # As `os.path` asks, since pathlib has errors of its own for names that are too long.
    is_file = os.path.exists(folder) and not os.path.isdir(folder)
    why = "it is a file. Give the path of a folder as offload_folder." if is_file else error.strerror or error
    return OSError(error.errno, f"The {shown(nbytes)} of {name} can't be written to {folder}, the offload_folder: {why}")


def _found(file: Path, layout: BankLayout, made_of: str) -> FileSource | None:
    """A file that was written before, if it is made of the same."""
    stored, metadata = read_headers([file]), read_metadata(file)
    if metadata.get(_METADATA) != made_of:
        return None
    sums, places = json.loads(metadata.get(_CHECKSUMS) or "[]"), _places(layout)
    header = _header(layout, made_of, sums)
    with file.open("rb") as stream:
        if stream.read(len(header)) != header or len(sums) != len(places):
            return None
    checks = [Checksum(begin, end, known) for (begin, end), known in zip(places, sums, strict=True)]
    return FileSource(_extents_in(stored, layout), checks=checks)


def _header(layout: BankLayout, made_of: str, sums: Sequence[int]) -> bytes:
    return header_of(
        ((spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in layout.specs),
        {"format": "pt", _METADATA: made_of, _CHECKSUMS: json.dumps(list(sums))},
    )


def _places(layout: BankLayout) -> list[tuple[int, int]]:
    """Where in a bank's block the bytes of each checksum begin and end."""
    return [
        (spec.offset + begin, spec.offset + min(begin + _CHECKED, spec.nbytes))
        for spec in layout.specs
        for begin in range(0, spec.nbytes, _CHECKED)
    ]


def _write(file: Path, layout: BankLayout, block: torch.Tensor, made_of: str) -> FileSource:
    """A file that is found again. It is there as a whole or not at all, whoever else writes it at the same time."""
    header = _header(layout, made_of, [zlib.crc32(_bytes_of(block[begin:end])) for begin, end in _places(layout)])
    _remove_remains(file)
    temporary, stream = _new_name(file.parent, file.stem), None
    try:
        stream = _new_file(temporary)
        _put(stream, header, *(_bytes_of(block[spec.offset : spec.offset + spec.nbytes]) for spec in layout.specs))
        stored = read_headers([temporary])
        os.replace(temporary, file)
        # Its name has changed, and so its state: whoever reads from now on goes by the one that it has when it is opened here.
        stored = {key: replace(tensor, file=file, state=None) for key, tensor in stored.items()}
        return FileSource(_extents_in(stored, layout), opened=stream)
    except BaseException:
        _drop(temporary, stream)
        raise


def _write_block(folder: Path, name: str, block: torch.Tensor) -> FileSource:
    """A file for this process alone: it has no name any more when it is written, so it goes whatever ends the process."""
    temporary, stream = _new_name(folder, name), None
    try:
        stream = _new_file(temporary)
        with suppress(OSError):  # where a file that is open can't be removed
            temporary.unlink()
        _put(stream, _bytes_of(block))
        whole = StoredTensor(temporary, name, torch.uint8, tuple(block.shape), 0, block.numel())
        return FileSource([Extent(0, block.numel(), whole, 0)], opened=stream)
    except BaseException:
        _drop(temporary, stream)
        raise


def _new_name(folder: Path, name: str) -> Path:
    """Of a file that is not there yet: known before it is made, so that no interrupt leaves one that nobody knows of."""
    return folder / f"{name}-{secrets.token_hex(8)}{_UNFINISHED}"


def _new_file(file: Path) -> FileIO:
    """Make and open it. Whoever writes there holds a lock on it from before the first byte on."""
    stream = FileIO(file, "x+")
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        if not is_at(stream.fileno(), file):
            # Between the two somebody took it for one that was left behind.
            stream.close()
            return _new_file(file)
    file.chmod(0o600)
    return stream


def _drop(file: Path, stream: FileIO | None) -> None:
    if stream is not None:
        stream.close()
    file.unlink(missing_ok=True)


def _bytes_of(block: torch.Tensor) -> memoryview:
    return memoryview(block.numpy())  # type: ignore[arg-type] # an ndarray is a Buffer


def _put(stream: FileIO, *parts: bytes | memoryview) -> None:
    for part in parts:
        view, done = memoryview(part), 0
        while done < len(view):
            done += stream.write(view[done:]) or 0
    # What the disk has no room for it may say only now; and a name must not outlive a power cut that its bytes don't.
    os.fsync(stream.fileno())


def _remove_remains(file: Path) -> None:
    """Remove what processes have left behind that were killed while they wrote a file."""
    for remains in file.parent.glob(f"{glob.escape(file.stem)}-*{_UNFINISHED}") if fcntl is not None else ():
        with suppress(OSError), FileIO(remains, "r+") as stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if somebody still writes there
            remains.unlink()


def _extents_in(stored: Mapping[str, StoredTensor], layout: BankLayout) -> list[Extent]:
    extents = extents_of(layout, {key: Stored(tensor, tensor.dtype) for key, tensor in stored.items()})
    assert extents is not None, "it was written as it is read"
    return extents


def _fingerprint(layout: BankLayout, recipes: Mapping[str, Recipe | None]) -> str | None:
    """What a bank is made of, in one word; None if that is more than a checkpoint."""
    if any(recipes.get(spec.name) is None for spec in layout.specs):
        return None
    files = sorted({stored.file for recipe in recipes.values() if recipe is not None for stored in stored_in(recipe)})
    states = [(status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in map(Path.stat, files)]
    made = repr((states, layout.specs, sorted(recipes.items())))
    for file in files:
        # The same checkpoint may be asked for by a relative path, or through the links of another revision.
        made = made.replace(repr(file), repr(file.resolve()))
    return hashlib.sha256(made.encode()).hexdigest()
