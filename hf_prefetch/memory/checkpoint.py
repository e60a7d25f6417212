"""What lies where in the safetensors files of a checkpoint, found out from their headers: no weight is read here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "FileState",
    "StoredTensor",
    "UnknownDtypeError",
    "header_of",
    "is_unchanged",
    "read_headers",
    "read_metadata",
    "runs",
    "state_of",
]

# safetensors' names of the types that torch can hold one element of. Types that pack two numbers into a byte are not here.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
# A header is a table of contents. safetensors itself refuses one beyond this size.
_MAX_HEADER = 100_000_000
# Bytes that are read at a time: enough for the full rate, little enough to stop soon after an interrupt.
_AT_ONCE = 16 * 2**20


class UnknownDtypeError(ValueError):
    """A checkpoint holds a type of number that can't be read as it lies there."""


class FileState(NamedTuple):
    """What tells whether a file is still the one that it was. `attributes`: how many names it has, its rights and its owner."""

    size: int
    written: int
    changed: int
    identity: tuple[int, int]
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: `offset` bytes from the start of `file`, row-major, `nbytes` long.

    `checksums`: the CRC-32 of each of its `runs`, where the checkpoint has such. `state`: of the file when this was found out;
    whoever reads there makes sure that it still is the same, or the bytes would be others.
    """

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksums: tuple[int, ...] = ()
    state: FileState | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.key!r} in {self.file}"


def runs(shape: tuple[int, ...], nbytes: int) -> Iterator[tuple[int, int]]:
    """Where each part of a tensor that is read at a time begins and ends, in bytes: whole rows of its first dimension."""
    if nbytes <= _AT_ONCE or not shape:
        yield from [(0, nbytes)] if nbytes else []
        return
    row = nbytes // shape[0]
    step = max(1, _AT_ONCE // row) * row
    yield from ((begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step))


def read_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file, whose header `read_headers` has found to be good, says about itself."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(length)).get("__metadata__") or {}


def read_headers(files: Sequence[str | Path], index: Mapping[str, str] | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by its key.

    Args:
        files: its safetensors files.
        index: the name of the file in which each key must be, for a checkpoint of several files.

    Raises:
        FileNotFoundError: a file is missing.
        UnknownDtypeError: a tensor has a type that torch doesn't have.
        ValueError: a file is truncated, is no safetensors file, or lacks a key. The message names the file and a key.
    """
    wanted: dict[str, list[str]] = {}
    for key, name in (index or {}).items():
        wanted.setdefault(Path(name).name, []).append(key)
    tensors: dict[str, StoredTensor] = {}
    for file in map(Path, files):
        if not file.is_file():
            keys = wanted.get(file.name, [])
            holds = f", which holds {keys[0]!r}" + (f" and {len(keys) - 1} more tensors" if keys[1:] else "") if keys else ""
            raise FileNotFoundError(f"The checkpoint lacks {file}{holds}. Download or copy it again.")
        tensors.update(_header(file))
    for file in map(Path, files):
        for key in wanted.get(file.name, []):
            if key not in tensors:
                raise ValueError(f"{file} lacks {key!r}, which the checkpoint's index says is there. Download it again.")
    return tensors


def state_of(descriptor: int) -> FileState:
    """What changes when an open file is written to, and differs when it is another one of that name."""
    now = os.fstat(descriptor)
    attributes = now.st_nlink, now.st_mode, now.st_uid, now.st_gid
    return FileState(now.st_size, now.st_mtime_ns, now.st_ctime_ns, (now.st_dev, now.st_ino), attributes)


def is_unchanged(file: Path, descriptor: int, before: FileState) -> bool:
    """Whether an open file was not written to since, as far as that can be told. It may have lost its name, or have others."""
    now = state_of(descriptor)
    if (now.size, now.written, now.changed) == (before.size, before.written, before.changed):
        return True  # some file systems number their files anew
    if (now.size, now.written, now.identity) != (before.size, before.written, before.identity):
        return False
    # Whoever writes and sets the time back changes `changed`. So does whoever removes, renames or links it, which does no harm.
    if now.attributes != before.attributes:
        return True
    try:
        there = os.stat(file)
    except OSError:
        return True
    return (there.st_dev, there.st_ino) != now.identity


def header_of(entries: Iterable[tuple[str, torch.dtype, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """How a safetensors file begins whose tensors (key, dtype, shape, bytes) follow one after the other."""
    names, end = {dtype: name for name, dtype in _DTYPES.items()}, 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, dtype, shape, nbytes in entries:
        header[key] = {"dtype": names[dtype], "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as stream:
        state = state_of(stream.fileno())
        size = state.size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{file} is truncated or no safetensors file: its header does not fit into its {size:,} bytes.")
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            tensors = {key: _stored(file, key, entry, 8 + length, state) for key, entry in entries.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no safetensors file: its header can't be read ({error}).") from error
    for stored in sorted(tensors.values(), key=lambda stored: stored.offset):
        if stored.offset + stored.nbytes > size:
            raise ValueError(
                f"{file} is truncated: {stored.key!r} should end at byte {stored.offset + stored.nbytes:,}, the file has "
                f"{size:,}. Download or copy it again."
            )
    return tensors


def _stored(file: Path, key: str, entry: dict[str, Any], begin: int, state: FileState) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise UnknownDtypeError(f"{file}: {key!r} is of type {entry['dtype']}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if last - first != prod(shape) * dtype.itemsize or first < 0:
        raise ValueError(f"{file} is no valid safetensors file: {key!r} takes {last - first} bytes, not what its shape needs.")
    return StoredTensor(file, key, dtype, shape, begin + first, last - first, state=state)
