"""The files of a packed checkpoint: what is in them, how they are written, and how they are checked when they are read.

A packed checkpoint is a folder like any other, with a `config.json`, but its weights are in files that have names of their own,
so that whoever doesn't know about packing finds no weights there, rather than others. They are safetensors files:

    packed.safetensors.index.json   which tensor is in which file; it is put there last: a folder without it is not whole
    packed-00001-of-00017.safetensors, ...

While they are written they are in a folder of their own inside, `packed-unfinished-*`, and nobody else writes there. Where one
is replaced, the new files have other names (`packed-00001-of-00017-2.safetensors`): the index says which of them count.

Tensors are named as in the model (`model.layers.0.mlp.experts.gate_up_proj`). One that is packed is two of them: `NAME.blocks`,
uint8 (experts, blocks, BLOCK_BYTES), and `NAME.escapes`, int64 (experts, 1 + most), see `memory/packing.py`. The header of each
file says in its metadata:

    format      "hf_prefetch.packed"
    version     "1"
    packed      the shape of each packed tensor, by NAME, as JSON
    checksums   of each tensor, by name, as JSON: the CRC-32 of each run of rows that is read at a time, see `runs`

and the index has, under `metadata`, format and version, the model's class and dtype, and the CRC-32 of each file's header.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from math import prod
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..workers import Workers
from .checkpoint import StoredTensor, read_headers, read_metadata, runs
from .packing import BLOCK, BLOCK_BYTES, PackedRows
from .writers import hold

__all__ = ["INDEX", "Index", "PackedFiles", "damaged_tensors", "is_packed", "read_index", "read_packed"]

INDEX = "packed.safetensors.index.json"
FORMAT = "hf_prefetch.packed"
VERSION = 1
_UNFINISHED = "packed-unfinished-"
_AGAIN = "Download or copy it again, or pack the checkpoint again."
# Files in which transformers would look for weights.
_ORDINARY = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
# Threads that work out checksums: each does about 1.5 GB/s.
_THREADS = 8


@dataclass(frozen=True)
class Index:
    """What the index of a packed checkpoint says: in which file each tensor is, and the CRC-32 of each file's header.

    `model`: the class of the model that was written.
    """

    files: Mapping[str, str]
    headers: Mapping[str, int]
    model: str


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed checkpoint.

    Raises:
        ValueError: it holds an ordinary one as well, or what there is of a packed one is not whole.
    """
    ordinary = _ordinary(folder)
    if (folder / INDEX).is_file():
        if ordinary:
            raise ValueError(
                f"{folder} holds two checkpoints: an ordinary one ({ordinary}) and a packed one ({INDEX}), and nothing says "
                "which is meant. Remove the files of one of them: those of the packed one begin with 'packed'."
            )
        return True
    part = next(folder.glob("packed-*"), None)
    if part is not None and not ordinary:
        raise ValueError(
            f"{folder} holds a packed checkpoint that is not whole: there is {part.name}, but no {INDEX}, which is put there "
            "last. Writing or copying it was interrupted, or goes on. Write, copy or download it again."
        )
    return False


def _ordinary(folder: Path) -> str | None:
    """The name of a file of an ordinary checkpoint."""
    return next((file.name for pattern in _ORDINARY for file in sorted(folder.glob(pattern))), None)


class PackedFiles:
    """Writes the files of a packed checkpoint one after the other, and puts all of them into their place at the end.

    Until then a packed checkpoint that is there stays as it is, and after an error nothing is left of the new one. Files of the
    old one may be open: what has opened them goes on reading what was there.

    Args:
        folder: where; made if it is not there.
        count: how many files there will be.

    Attributes:
        unfinished: the folder in which files are until the end. Whatever else is in there is put into its place, too.
        replaces: whether there is a packed checkpoint already.

    Raises:
        FileExistsError: the folder holds an ordinary checkpoint.
        NotADirectoryError: it is a file.
        BlockingIOError: somebody else is writing there.
        OSError: it can't be made.
    """

    def __init__(self, folder: Path, count: int) -> None:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file. Give a folder to write a packed checkpoint to.")
        ordinary = _ordinary(folder)
        if ordinary:
            raise FileExistsError(
                f"{folder} holds an ordinary checkpoint ({ordinary}), which would be mixed up with a packed one. Give another "
                "folder."
            )
        self._folder = folder
        self._made = [place for place in (folder, *folder.parents) if not place.exists()]
        self.replaces = (folder / INDEX).is_file()
        self._held = ExitStack()
        try:
            with self.writing():
                self._held = hold(folder)
                # Nobody writes these any more.
                for left in folder.glob(f"{_UNFINISHED}*"):
                    shutil.rmtree(left)
                self.unfinished = Path(mkdtemp(dir=folder, prefix=_UNFINISHED))
        except BaseException as error:
            if not isinstance(error, BlockingIOError):  # else what is there is another's
                self._remove_made()
            self._held.close()
            raise
        self._count = count
        self._files: dict[str, str] = {}
        self._headers: dict[str, int] = {}
        self._nbytes = 0

    def __enter__(self) -> PackedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with self._held:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            self._remove_made()

    def _remove_made(self) -> None:
        """Remove the folders that were made for this, if nothing is in them."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever can't be written inside is an OSError that says where, and what to do."""
        try:
            yield
        except BlockingIOError:  # says all of it
            raise
        except (OSError, SafetensorError) as error:
            said = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors says it
            number = int(said[1]) if said else getattr(error, "errno", None) or errno.EIO
            why = (
                "what was written of it has been removed meanwhile. Write it again, or to another folder."
                if number == errno.ENOENT
                else f"{error}. Free space or give another folder. It takes three quarters of the bytes of a model's weights, "
                "and where it replaces one there has to be room for both."
            )
            what = f"The packed checkpoint can't be written to {self._folder}, and nothing of it is left there: {why}"
            raise OSError(number, what) from error

    def _name(self) -> str:
        """Of the next file: one that no file has which is there already."""
        stem = f"packed-{len(self._headers) + 1:05}-of-{self._count:05}"
        marks = chain([""], (f"-{number}" for number in count(2)))
        return next(name for name in (f"{stem}{mark}.safetensors" for mark in marks) if not (self._folder / name).exists())

    def write(self, tensors: Mapping[str, torch.Tensor], packed: Mapping[str, tuple[PackedRows, torch.Size]]) -> int:
        """Write a file: tensors as they are, and packed ones with their shapes. Returns its bytes."""
        name = self._name()
        everything = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        for key, (rows, _) in packed.items():
            everything |= {f"{key}.blocks": rows.blocks.cpu().contiguous(), f"{key}.escapes": rows.escapes.cpu().contiguous()}
        with Workers(_THREADS) as workers:
            sums = {key: workers.map(zlib.crc32, _parts(tensor)) for key, tensor in everything.items()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "packed": json.dumps({key: list(shape) for key, (_, shape) in packed.items()}),
            "checksums": json.dumps(sums),
        }
        with self.writing():
            save_file(everything, self.unfinished / name, metadata)
            self._headers[name] = _header_checksum(self.unfinished / name)
        self._files |= dict.fromkeys(everything, name)
        nbytes = sum(tensor.nbytes for tensor in everything.values())
        self._nbytes += nbytes
        return nbytes

    def finish(self, **about: str) -> None:
        """Write the index: `unfinished` holds a whole checkpoint.

        `about`: the model's class, and its dtype, which a config need not say.
        """
        metadata = {"format": FORMAT, "version": VERSION, "total_size": self._nbytes, "headers": self._headers}
        index = {"metadata": metadata | about, "weight_map": self._files}
        with self.writing():
            (self.unfinished / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def put_in_place(self) -> None:
        """Put everything into its place. What was there before is removed."""
        # Weights first, the index last. Nothing that is in use is written over before the index but the config.
        written = sorted(self.unfinished.iterdir(), key=lambda file: (file.name == INDEX, file.name not in self._headers))
        for file in written:
            os.replace(file, self._folder / file.name)
        for file in self._folder.glob("packed-*.safetensors"):
            if file.name not in self._headers:
                # Where a file that is open can't be removed, it stays, and does no harm.
                with suppress(PermissionError):
                    file.unlink()


def read_index(folder: Path) -> Index:
    """What the index of a packed checkpoint says.

    Raises:
        ValueError: it is damaged, or of another version; the message names it.
    """
    file = folder / INDEX
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, f"it is no JSON ({error})") from error
    said = index.get("metadata") if isinstance(index, dict) else None
    if not isinstance(said, dict):
        raise _damaged(file, "it does not say what it is")
    _check_version(file, said.get("format"), said.get("version"))
    headers, files = said.get("headers"), index.get("weight_map")
    if not isinstance(headers, dict) or not isinstance(files, dict) or not headers or not files:
        raise _damaged(file, "it does not say which tensor is in which file")
    for name in files.values():
        if not isinstance(name, str) or name not in headers or Path(name).name != name:
            raise _damaged(file, f"{name!r} is no file of this checkpoint")
    if set(headers) - set(files.values()):
        raise _damaged(file, f"it names no tensor of {min(set(headers) - set(files.values()))}")
    return Index(files, headers, str(said.get("model")))


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}. {_AGAIN}")


def read_packed(
    files: Sequence[str | Path], index: Index
) -> tuple[dict[str, StoredTensor], dict[str, tuple[StoredTensor, StoredTensor, torch.Size]]]:
    """Where everything lies in the files of a packed checkpoint. No weight is read.

    Args:
        files: its files.
        index: what its index says.

    Returns:
        The tensors that are not packed, by name, and of those that are the blocks, the escapes and the shape. All of them
        carry their checksums.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is of another version, or a file is broken. The message names the file, and the key where there is one.
    """
    stored = read_headers(files, index.files)
    shapes: dict[str, Any] = {}
    for file in map(Path, files):
        if _header_checksum(file) != index.headers.get(file.name):
            raise _damaged(file, "its header is not the one that was written")
        metadata = read_metadata(file)
        _check_version(file, metadata.get("format"), metadata.get("version"))
        sums = json.loads(metadata["checksums"])
        shapes |= json.loads(metadata["packed"])
        stored |= {key: replace(tensor, checksums=tuple(sums[key])) for key, tensor in stored.items() if tensor.file == file}
    if stored.keys() != index.files.keys():
        raise _damaged(Path(files[0]).parent / INDEX, f"it lacks {min(stored.keys() - index.files.keys())!r}")
    packed = {}
    for key, shape in shapes.items():
        blocks, escapes = stored.pop(f"{key}.blocks"), stored.pop(f"{key}.escapes")
        per_row = -(-prod(shape[1:]) // BLOCK)
        if blocks.shape != (shape[0], per_row, BLOCK_BYTES) or len(escapes.shape) != 2 or escapes.shape[0] != shape[0]:
            raise ValueError(f"{blocks} and {escapes} do not make up the {tuple(shape)} of {key!r}. {_AGAIN}")
        packed[key] = blocks, escapes, torch.Size(shape)
    return stored, packed


def _check_version(where: object, kind: object, version: object) -> None:
    if kind != FORMAT:
        raise ValueError(f"{where} is of no packed checkpoint: its format is {kind!r}, not {FORMAT!r}. {_AGAIN}")
    if str(version) != str(VERSION):
        raise ValueError(
            f"{where} is of version {version} of packed checkpoints, and this version of hf_prefetch reads {VERSION}. Take the "
            "one that has written it, or pack the checkpoint again: hf-prefetch pack PATH --out FOLDER."
        )


def damaged_tensors(folder: Path) -> Iterator[tuple[StoredTensor, bool]]:
    """Read every tensor of a packed checkpoint, and say whether it is not the one that was written.

    Raises:
        FileNotFoundError, ValueError: as `read_packed`.
    """
    index = read_index(folder)
    plain, packed = read_packed([folder / name for name in sorted(index.headers)], index)
    parts = (part for blocks, escapes, _ in packed.values() for part in (blocks, escapes))
    with Workers(_THREADS) as workers:
        for stored in (*plain.values(), *parts):
            places = list(runs(stored.shape, stored.nbytes))
            sums = workers.map(partial(_checksum, stored), places)
            yield stored, tuple(sums) != stored.checksums


def _checksum(stored: StoredTensor, place: tuple[int, int]) -> int:
    begin, end = place
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset + begin)
        return zlib.crc32(stream.read(end - begin))


def _header_checksum(file: Path) -> int:
    with file.open("rb") as stream:
        length = stream.read(8)
        return zlib.crc32(length + stream.read(int.from_bytes(length, "little")))


def _parts(tensor: torch.Tensor) -> list[memoryview]:
    """The bytes of each run of a tensor's rows."""
    flat = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]
    return [flat[begin:end] for begin, end in runs(tuple(tensor.shape), tensor.nbytes)]
