"""Banks whose bytes stay in files: where these lie, how they are read, and tensors that stand for such weights."""

from __future__ import annotations

import bisect
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..banks.layout import BankLayout, TensorSpec
from ..banks.swapping import swap
from .checkpoint import FileState, StoredTensor, is_unchanged, state_of
from .deferred import LOOKS, Packed, Recipe, pieces
from .read_only import REFUSAL, run_reading

__all__ = ["Checksum", "Extent", "FileSource", "OnDisk", "extents_of", "replace_parameter"]


@dataclass(frozen=True)
class Extent:
    """`nbytes` of a bank's block from `begin` on lie in one piece from `offset` of a tensor's file."""

    begin: int
    nbytes: int
    stored: StoredTensor
    offset: int


def extents_of(layout: BankLayout, recipes: Mapping[str, Recipe | None]) -> list[Extent] | None:
    """Where a bank's bytes lie in the files of a checkpoint, in the order of the block.

    Args:
        layout: of the bank.
        recipes: how to make each of its tensors from the checkpoint.

    Returns:
        None if some of them don't lie there as they are: they are cast, say, or somebody has made them already; or if they have
        checksums, which whoever reads a part of a bank could not compare.
    """
    found: list[Extent] = []
    for spec in layout.specs:
        recipe = recipes.get(spec.name)
        if recipe is None or isinstance(recipe, Packed) or not _is_row_major(spec):
            return None
        # It says where each piece goes, without any memory.
        whole = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for piece in pieces(recipe, whole):
            as_it_is = piece.source.dtype == spec.dtype and piece.destination.is_contiguous()
            if not as_it_is or piece.checksum is not None:
                return None
            begin = spec.offset + int(piece.destination.storage_offset()) * spec.dtype.itemsize
            found.append(Extent(begin, piece.nbytes, piece.source, piece.offset))
    return _joined(sorted(found, key=lambda extent: extent.begin))


def _joined(extents: list[Extent]) -> list[Extent]:
    """As few as possible: neighbours in the block that are neighbours in a file are one."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.stored.file == extent.stored.file
            and last.begin + last.nbytes == extent.begin
            and last.offset + last.nbytes == extent.offset
        ):
            joined[-1] = Extent(last.begin, last.nbytes + extent.nbytes, last.stored, last.offset)
        else:
            joined.append(extent)
    return joined


def _is_row_major(spec: TensorSpec) -> bool:
    return all(
        size == 1 or stride == prod(spec.shape[dim + 1 :])
        for dim, (size, stride) in enumerate(zip(spec.shape, spec.stride, strict=True))
    )


class Checksum(NamedTuple):
    """The CRC-32 of a bank's bytes from `begin` to `end`."""

    begin: int
    end: int
    known: int


class FileSource:
    """Reads a bank's bytes from files. The files stay open, so that one that is replaced meanwhile does no harm: until `close`,
    or as long as somebody may read, as a Parameter does that has outlived its model.

    Args:
        extents: where the bytes are. What lies in between is of no meaning.
        opened: the only file, if it is open already; then it is closed with this.
        checks: what the bytes must be, in their order. Each is looked at when some of its bytes are read for the first time.

    Raises:
        OSError, ValueError: a file can't be opened, or is not the one any more in which the bytes were found.
    """

    def __init__(self, extents: list[Extent], *, opened: FileIO | None = None, checks: Sequence[Checksum] = ()) -> None:
        self._extents = extents
        self._begins = [extent.begin for extent in extents]
        self._checks = checks
        self._check_begins = [check.begin for check in checks]
        self._to_check = set(range(len(checks)))
        self._files: dict[Path, tuple[FileIO, FileState]] = {}
        self._open = ExitStack()
        weakref.finalize(self, self._open.close).atexit = False
        self._one_at_a_time = threading.Lock()
        try:
            for file, known in {extent.stored.file: extent.stored.state for extent in extents}.items():
                stream = self._open.enter_context(FileIO(file, "r") if opened is None else opened)
                self._files[file] = stream, state_of(stream.fileno())
                if known is not None and not is_unchanged(file, stream.fileno(), known):
                    raise ValueError(f"{file} was written to or replaced while it was loaded. Load the model again.")
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> int:
        """In how many files the bank is."""
        return len(self._files)

    def read(self, begin: int, destination: torch.Tensor) -> None:
        """Bring the bytes from `begin` of the block on, as many as fit, into `destination`: flat uint8 on the CPU.

        May be called by several threads at once.

        Raises:
            OSError, ValueError: a file can't be read, has become shorter, was written to, or is damaged; the message names it.
        """
        view = memoryview(destination.numpy())  # type: ignore[arg-type] # an ndarray is a Buffer
        self._read_into(begin, view)
        if self._to_check:
            self._check(begin, view)

    def _check(self, begin: int, view: memoryview) -> None:
        """Compare what was read with its checksums, and with it what they need besides."""
        end, at = begin + len(view), max(bisect.bisect_right(self._check_begins, begin) - 1, 0)
        for number in range(at, bisect.bisect_left(self._check_begins, end)):
            check = self._checks[number]
            if number not in self._to_check or check.end <= begin:
                continue
            if begin <= check.begin and check.end <= end:
                seen = view[check.begin - begin : check.end - begin]
            else:
                seen = memoryview(bytearray(check.end - check.begin))
                self._read_into(check.begin, seen)
            if zlib.crc32(seen) != check.known:
                raise ValueError(
                    f"{self._extents[0].stored.file} is damaged: its bytes are not those that were written. Delete it and load "
                    "the model again, which writes it anew."
                )
            self._to_check.discard(number)

    def _read_into(self, begin: int, view: memoryview) -> None:
        end = begin + len(view)
        at = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        for extent in self._extents[at:]:
            if extent.begin >= end:
                break
            first, last = max(begin, extent.begin), min(end, extent.begin + extent.nbytes)
            if first < last:
                self._read(extent, extent.offset + first - extent.begin, view[first - begin : last - begin])

    def _read(self, extent: Extent, offset: int, view: memoryview) -> None:
        opened, state = self._files[extent.stored.file]
        if opened.closed:
            raise RuntimeError(f"{extent.stored.file} is closed: the model whose experts are there is gone, or was disabled.")
        try:
            done = 0
            while done < len(view):
                count = self._read_at(opened, view[done:], offset + done)
                if not count:
                    raise ValueError(f"{extent.stored.file} has become shorter: it ends inside {extent.stored.key!r}.")
                done += count
            if not is_unchanged(extent.stored.file, opened.fileno(), state):
                raise ValueError(f"{extent.stored.file} was written to while its weights are in use. Load the model again.")
        except OSError as error:
            raise OSError(error.errno, f"{extent.stored} can't be read: {error.strerror or error}") from error

    def _read_at(self, opened: FileIO, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(opened.fileno(), [view], offset)
        with self._one_at_a_time:  # where a file has one position for all threads
            opened.seek(offset)
            return opened.readinto(view) or 0

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._open.close()


class OnDisk(torch.Tensor):
    """Stands for weights that stay in files. Whoever computes with them reads them first; nobody can write to them.

    Attributes:
        read: gives the weights as an ordinary tensor, in new memory.
        _aside: the Parameter that this was, without its weights: keeps the gradient and its hooks.
    """

    # What is not its user's.
    OWN = ("read", "recipe", "_aside", "_is_param")

    # For `forms`: one tensor, like any other, as far as its shape and type go.
    is_one_tensor = True
    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> OnDisk:
        """Stands for a tensor of this shape and type, which on the CPU `read` gives."""
        looks = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta").as_subclass(OnDisk)
        looks.read = read
        return looks

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if func in _SAME:
            with torch._C.DisableTorchFunctionSubclass():
                return OnDisk.of(args[0], args[0].read)
        if func in _TOLD:
            return _TOLD[func](args[0])
        if func == _SET_DATA:
            raise RuntimeError(REFUSAL)
        aside = args[0].__dict__.get("_aside") if func in _OF_GRADIENTS else None
        if aside is not None:
            return func(aside, *args[1:], **kwargs)
        if func in LOOKS or name == "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        read: list[torch.Tensor] = []

        def reading(weights: OnDisk) -> torch.Tensor:
            read.append(weights.read())
            return read[-1]

        args, kwargs = tree_map_only(OnDisk, reading, (args, kwargs))
        return run_reading(func, read, args, kwargs)


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _setter(name: str, *, deletes: bool = False) -> Any:
    return getattr(getattr(torch.Tensor, name), "__delete__" if deletes else "__set__")


_SET_DATA = _setter("data")
_OF_GRADIENTS = {
    _getter("grad"),
    _setter("grad"),
    _setter("grad", deletes=True),
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}
_SAME = {torch.Tensor.detach, _getter("data")}
_TOLD: dict[Any, Callable[[Any], Any]] = {
    _getter("device"): lambda _: torch.device("cpu"),
    _getter("is_meta"): lambda _: False,
    torch.Tensor.is_inference: lambda _: False,
}


def replace_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make a Parameter of another kind of tensor. It stays the same object, with its gradient, its hooks and attributes.

    Raises:
        RuntimeError: something else holds on to it. It is as before, and this can be tried again.
    """
    with torch._C.DisableTorchFunctionSubclass():
        # Asked for now: when they are swapped, the value is what the Parameter was.
        into_files, own = isinstance(value, OnDisk), dict[str, Any]()
        attributes = dict(parameter.__dict__)
        if isinstance(value, OnDisk):
            other: torch.Tensor = value.requires_grad_(parameter.requires_grad)
            own = {"read": value.read, "_is_param": True}
            # What is made under inference_mode has no gradient, and can't have memory of the other kind.
            if not parameter.is_inference():
                own["_aside"] = other  # which is what the Parameter was, when they are swapped
        else:
            attributes = {name: attribute for name, attribute in attributes.items() if name not in OnDisk.OWN}
            other = parameter.__dict__.pop("_aside", None)
            if other is None or other.is_meta != value.is_meta:
                other = nn.Parameter(value, requires_grad=parameter.requires_grad)
            else:
                own = {"_aside": other}
                other.data = value
                other.requires_grad_(parameter.requires_grad)
        try:
            swap(parameter, other)
        except BaseException:
            if "_aside" in own and not into_files:
                _empty(other)
                parameter.__dict__.update(own)
            raise
        parameter.__dict__.clear()
        if into_files:
            attributes |= own
        parameter.__dict__.update(attributes)
        if "_aside" in attributes:
            _empty(other)


def _empty(aside: torch.Tensor) -> None:
    """Leave a Parameter its shape, and no memory."""
    aside.data = torch.empty((), dtype=aside.dtype, device="meta" if aside.is_meta else "cpu").expand(aside.shape)
