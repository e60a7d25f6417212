"""Files that banks are written to because host memory has no room for them, and no file holds them as they are."""

from __future__ import annotations

import glob
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch

from ..banks.layout import BankLayout
from ..sizes import shown
from .checkpoint import StoredTensor, header_of, read_headers, read_metadata
from .deferred import Recipe, Stored, stored_in
from .disk import Extent, FileSource, extents_of

__all__ = ["write_bank"]

try:
    import fcntl
except ImportError:  # Windows has no such thing
    fcntl = None  # type: ignore[assignment]

_METADATA = "hf_prefetch"
_UNFINISHED = ".tmp"


def write_bank(
    folder: Path, name: str, layout: BankLayout, recipes: Mapping[str, Recipe | None], fill: Callable[[torch.Tensor], None]
) -> FileSource:
    """Write a bank to a safetensors file, unless it is there already, and read it from there from now on.

    A file that was made of a checkpoint is kept, and used again as long as the checkpoint is the same. What was made of
    weights in memory is of no use later: such a file is taken off the folder as soon as it is open.

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
        with suppress(OSError, ValueError):
            source = _found(file, layout, made_of)
            if source is not None:
                return source
    block = torch.empty(layout.nbytes, dtype=torch.uint8)
    fill(block)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write_block(folder, name, block) if made_of is None else _write(file, layout, block, made_of)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The {shown(layout.nbytes)} of {name} can't be written to {folder}, the offload_folder: {error.strerror or error}",
        ) from error


def _found(file: Path, layout: BankLayout, made_of: str) -> FileSource | None:
    """A file that was written before, if it is made of the same."""
    stored = read_headers([file])
    if read_metadata(file).get(_METADATA) != made_of:
        return None
    return FileSource(_extents_in(stored, layout))


def _write(file: Path, layout: BankLayout, block: torch.Tensor, made_of: str) -> FileSource:
    """A file that is found again. It is there as a whole or not at all, whoever else writes it at the same time."""
    header = header_of(
        ((spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in layout.specs), {"format": "pt", _METADATA: made_of}
    )
    _remove_remains(file)
    temporary, stream = _new_file(file.parent, file.stem)
    try:
        _put(stream, header, *(block[spec.offset : spec.offset + spec.nbytes] for spec in layout.specs))
        stored = {key: replace(tensor, file=file) for key, tensor in read_headers([temporary]).items()}
        os.replace(temporary, file)
        return FileSource(_extents_in(stored, layout), opened=stream)
    except BaseException:
        stream.close()
        temporary.unlink(missing_ok=True)
        raise


def _write_block(folder: Path, name: str, block: torch.Tensor) -> FileSource:
    """A file for this process alone: it has no name any more when it is written, so it goes whatever ends the process."""
    temporary, stream = _new_file(folder, name)
    try:
        with suppress(OSError):  # where a file that is open can't be removed
            temporary.unlink()
        _put(stream, block)
        whole = StoredTensor(temporary, name, torch.uint8, tuple(block.shape), 0, block.numel())
        return FileSource([Extent(0, block.numel(), whole, 0)], opened=stream)
    except BaseException:
        stream.close()
        temporary.unlink(missing_ok=True)
        raise


def _new_file(folder: Path, name: str) -> tuple[Path, FileIO]:
    """A file of a name of its own, empty and open. Whoever writes there holds a lock on it from before the first byte on."""
    descriptor, temporary = tempfile.mkstemp(suffix=_UNFINISHED, prefix=f"{name}-", dir=folder)
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    return Path(temporary), FileIO(descriptor, "r+")


def _put(stream: FileIO, *parts: bytes | torch.Tensor) -> None:
    for part in parts:
        view, done = memoryview(part if isinstance(part, bytes) else part.numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            done += stream.write(view[done:]) or 0
    # What the disk has no room for it may say only now; and a name must not outlive a power cut that its bytes don't.
    os.fsync(stream.fileno())


def _remove_remains(file: Path) -> None:
    """Remove what processes have left behind that were killed while they wrote a file."""
    for remains in file.parent.glob(f"{glob.escape(file.stem)}-*{_UNFINISHED}") if fcntl is not None else ():
        with suppress(OSError), FileIO(remains, "r+") as stream:
            if os.fstat(stream.fileno()).st_size:
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
    states = [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, files)]
    made = repr((states, layout.specs, sorted(recipes.items())))
    for file in files:
        # The same checkpoint may be asked for by a relative path, or through the links of another revision.
        made = made.replace(repr(file), repr(file.resolve()))
    return hashlib.sha256(made.encode()).hexdigest()
