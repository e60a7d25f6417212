"""The files of a packed checkpoint: what is in them, how they are written, and how they are checked when they are read.

A packed checkpoint is a folder like any other, with a `config.json`, but its weights are in files that have names of their own,
so that whoever doesn't know about packing finds no weights there, rather than others. They are safetensors files:

    packed.safetensors.index.json   which tensor is in which file; it is written last, so that a folder without it is not whole
    packed-00001-of-00017.safetensors, ...

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

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .checkpoint import StoredTensor, read_headers, read_metadata, runs
from .packing import BLOCK, BLOCK_BYTES, PackedRows

__all__ = ["INDEX", "PackedFiles", "is_packed", "read_packed"]

INDEX = "packed.safetensors.index.json"
FORMAT = "hf_prefetch.packed"
VERSION = 1
_AGAIN = "Download or copy it again, or pack the checkpoint again."
# Threads that work out checksums: each does about 1.5 GB/s.
_THREADS = 8


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed checkpoint."""
    return (folder / INDEX).is_file()


class PackedFiles:
    """Writes the files of a packed checkpoint one after the other, and the index at the end.

    Args:
        folder: where; it is there already. An index that it holds is removed at once.
        count: how many files there will be.

    Raises:
        FileExistsError: the folder holds an ordinary checkpoint.
    """

    def __init__(self, folder: Path, count: int) -> None:
        others = [file.name for file in folder.glob("*.safetensors") if not file.name.startswith("packed-")]
        if others:
            raise FileExistsError(
                f"{folder} holds an ordinary checkpoint ({others[0]}), which would be mixed up with a packed one. Give another "
                "folder."
            )
        (folder / INDEX).unlink(missing_ok=True)
        for file in folder.glob("packed-*.safetensors"):
            file.unlink()
        self.folder = folder
        self._count = count
        self._files: dict[str, str] = {}
        self._headers: dict[str, int] = {}
        self._nbytes = 0

    def write(self, tensors: Mapping[str, torch.Tensor], packed: Mapping[str, tuple[PackedRows, torch.Size]]) -> int:
        """Write a file: tensors as they are, and packed ones with their shapes. Returns its bytes."""
        name = f"packed-{len(self._headers) + 1:05}-of-{self._count:05}.safetensors"
        everything = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        for key, (rows, _) in packed.items():
            everything |= {f"{key}.blocks": rows.blocks.cpu().contiguous(), f"{key}.escapes": rows.escapes.cpu().contiguous()}
        with ThreadPoolExecutor(_THREADS) as pool:
            sums = {key: list(pool.map(zlib.crc32, _parts(tensor))) for key, tensor in everything.items()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "packed": json.dumps({key: list(shape) for key, (_, shape) in packed.items()}),
            "checksums": json.dumps(sums),
        }
        save_file(everything, self.folder / name, metadata)
        self._headers[name] = _header_checksum(self.folder / name)
        self._files |= dict.fromkeys(everything, name)
        nbytes = sum(tensor.nbytes for tensor in everything.values())
        self._nbytes += nbytes
        return nbytes

    def finish(self, **about: str) -> None:
        """Write the index: the checkpoint is whole. `about`: the model's class, and its dtype, which a config need not say."""
        metadata = {"format": FORMAT, "version": VERSION, "total_size": self._nbytes, "headers": self._headers}
        index = {"metadata": metadata | about, "weight_map": self._files}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_packed(
    files: Sequence[str | Path], index: Mapping[str, Any]
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
    said = index.get("metadata") or {}
    _check_version(INDEX, said.get("format"), said.get("version"))
    stored = read_headers(files, index.get("weight_map"))
    shapes: dict[str, Any] = {}
    for file in map(Path, files):
        if _header_checksum(file) != (said.get("headers") or {}).get(file.name):
            raise ValueError(f"{file} is damaged: its header is not the one that was written. {_AGAIN}")
        metadata = read_metadata(file)
        _check_version(file, metadata.get("format"), metadata.get("version"))
        sums = json.loads(metadata["checksums"])
        shapes |= json.loads(metadata["packed"])
        stored |= {key: replace(tensor, checksums=tuple(sums[key])) for key, tensor in stored.items() if tensor.file == file}
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


def _header_checksum(file: Path) -> int:
    with file.open("rb") as stream:
        length = stream.read(8)
        return zlib.crc32(length + stream.read(int.from_bytes(length, "little")))


def _parts(tensor: torch.Tensor) -> list[memoryview]:
    """The bytes of each run of a tensor's rows."""
    flat = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]
    return [flat[begin:end] for begin, end in runs(tuple(tensor.shape), tensor.nbytes)]
