"""HostStore: the bytes of every expert bank, in an arena of its own or still in files, and the way there and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..banks.forms import can_take_apart, is_plain, parts, replace_parts
from ..banks.layout import BankLayout
from ..streams import StreamDevice
from .beside import Beside
from .disk import FileSource, OnDisk, replace_parameter
from .ledger import Ledger, Purpose
from .locking import PageLocks
from .pages import give_back_freed
from .pinned import Arena
from .values import Load, copy_value

__all__ = ["HostStore", "StoredBank", "send_parameter"]


@dataclass(frozen=True, eq=False)
class StoredBank:
    """A bank in the store: its block in host memory or its files, and on which device each of its parameters was before.

    `inference` are those that were made under inference_mode: they must hold memory made there when they are given back.
    """

    bank: ExpertBank
    arena: Arena | None
    origins: dict[str, torch.device]
    inference: frozenset[str] = frozenset()
    source: FileSource | None = None

    @property
    def block(self) -> torch.Tensor:
        """The bank's bytes: a flat uint8 tensor in host memory, laid out as `bank.layout` says."""
        assert self.arena is not None, "a bank in files has no block"
        return self.arena.block

    @property
    def is_pinned(self) -> bool:
        """Whether the block is page-locked."""
        return self.arena is not None and self.arena.is_pinned

    @property
    def is_on_disk(self) -> bool:
        """Whether its bytes are in files, so that it has no block."""
        return self.source is not None

    def read(self, begin: int, destination: torch.Tensor) -> None:
        """Bring the bytes from `begin` on, as many as fit, into `destination`: flat uint8 on the CPU. On whatever thread."""
        if self.source is not None:
            self.source.read(begin, destination)
        else:
            # torch would start threads of its own for each of those that call this.
            np.copyto(destination.numpy(), self.block[begin : begin + destination.numel()].numpy())

    def bytes_of(self, place: slice) -> torch.Tensor:
        """Some of the bytes, in host memory: read now, if they are in files."""
        if self.source is None:
            return self.block[place]
        with torch.inference_mode(False):
            there = torch.empty(place.stop - place.start, dtype=torch.uint8, device="cpu")
        self.source.read(place.start, there)
        return there

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever torch writes to one of the bank's Parameters in place."""
        return tuple(map(_version_of, self.bank.parameters.values()))


def _weights(read: Callable[[int, torch.Tensor], None], layout: BankLayout, name: str) -> torch.Tensor:
    """One of a bank's tensors, read into memory of its own."""
    (spec,) = (spec for spec in layout.specs if spec.name == name)
    with torch.inference_mode(False):
        block = Arena(max(spec.nbytes, 1), shared=False).block[: spec.nbytes]
        read(spec.offset, block)
        return block.view(spec.dtype).as_strided(spec.shape, spec.stride)


def _version_of(parameter: nn.Parameter) -> int:
    try:
        return parameter._version
    except RuntimeError:
        return 0  # made under inference_mode: such a tensor keeps no count


class HostStore:
    """Moves banks into arenas one at a time, so that never more than one bank exists twice.

    Args:
        pin_budget: bytes that may be page-locked, None for as many as there are. A bank is page-locked as a whole or not.

    Attributes:
        ledger: what is held.
    """

    def __init__(self, pin_budget: int | None = None) -> None:
        self._locks = PageLocks(pin_budget)
        self.ledger = Ledger()
        for purpose, held in (
            (Purpose.BANKS, self._held),
            (Purpose.FILES, self._held_in_files),
            (Purpose.PINNED, self._pinned),
        ):
            self.ledger.add(purpose, held)
        self._stored: dict[int, StoredBank] = {}
        self._wants_back: dict[int, Callable[[], bool]] = {}
        self._kept: list[Arena] | None = None
        self._locking = Beside()

    def _in(self, *, files: bool) -> list[StoredBank]:
        return [stored for stored in self._stored.values() if stored.is_on_disk == files]

    def _held(self) -> int:
        return sum(stored.bank.nbytes for stored in self._in(files=False))

    def _held_in_files(self) -> int:
        return sum(stored.bank.nbytes for stored in self._in(files=True))

    def _pinned(self) -> int:
        return sum(stored.bank.nbytes for stored in self._stored.values() if stored.is_pinned)

    @property
    def refusals(self) -> list[str]:
        """Why the system refused to page-lock, if it did."""
        return self._locks.refusals

    @property
    def in_files(self) -> int:
        """How many banks are in files."""
        return len(self._in(files=True))

    def __getitem__(self, bank: ExpertBank) -> StoredBank:
        return self._stored[bank.index]

    def bank(self, index: int) -> ExpertBank:
        """The bank with this index."""
        return self._stored[index].bank

    def strays(self, bank: ExpertBank) -> list[str]:
        """Names of a stored bank's Parameters that somebody has pointed at other memory than the bank's block."""
        stored = self._stored.get(bank.index)
        if stored is None:
            return []
        if stored.is_on_disk:
            return [name for name, parameter in bank.parameters.items() if not isinstance(parameter, OnDisk)]
        begin, tensors = stored.block.data_ptr(), bank.parts()
        return [spec.name for spec in bank.layout.specs if tensors[spec.name].data_ptr() != begin + spec.offset]

    def adopt(
        self,
        bank: ExpertBank,
        device: StreamDevice,
        load: Load = copy_value,
        origins: dict[str, torch.device] | None = None,
    ) -> None:
        """Move a bank's bytes into an arena, page-lock it for `device`, and point the bank's Parameters there.

        The Parameters keep their identity; the memory that they had is free as soon as nobody else holds it. `load` brings
        their values there; `origins` are the devices that they go back to, those where they are now if not given. Where the
        system refuses to page-lock, the bank stays pageable and the reason is appended to `refusals`.
        """
        downloads = any(tensor.device.type != "cpu" for tensor in bank.parts().values())
        copies = load is copy_value and not downloads
        locked = self._locks.arena(bank.index, bank.nbytes, device, written=copies)
        arena = locked or Arena(bank.nbytes, shared=False)
        views = arena.views(bank.layout)
        origins = origins or {name: parameter.device for name, parameter in bank.parameters.items()}
        # From here on `give_back` can undo whatever an error or an interrupt leaves half done.
        inference = frozenset(name for name, parameter in bank.parameters.items() if parameter.is_inference())
        self._stored[bank.index] = StoredBank(bank, arena, origins, inference)
        if locked is None:
            self._fill(bank, views, load)
        elif downloads:
            # A download is fastest into locked pages.
            arena.touch()
            self._locks.lock(bank.index, arena, device)
            self._fill(bank, views, load)
        else:
            if copies and not arena.comes_by_put:
                arena.touch()
            # Whoever reads from a disk waits for that more than for pages, which come as they are written to.
            self._fill(bank, views, partial(copy_value, put=arena.put) if copies else load)
            self._locking.run(partial(self._locks.lock, bank.index, arena, device))

    def one_after_the_other(self) -> AbstractContextManager[None]:
        """Inside, each bank is page-locked while the next one is filled: neither has to wait for the other."""
        return self._locking.meanwhile()

    def _fill(self, bank: ExpertBank, views: dict[str, torch.Tensor], load: Load) -> None:
        # Each Parameter's old memory is free before the next one is copied: a bank never exists twice as a whole.
        for name, parameter in bank.parameters.items():
            if is_plain(parameter):
                load(parameter, views[name])
            else:
                for part, tensor in parts(name, parameter).items():
                    load(tensor, views[part])
            replace_parts(name, parameter, views)
        give_back_freed()

    def leave(self, bank: ExpertBank, source: FileSource, wants_back: Callable[[], bool]) -> None:
        """Have a bank's bytes in files, as they are there. Its Parameters, which stay the same objects, hold no memory.

        Args:
            bank: whose Parameters are one tensor each.
            source: reads its bytes.
            wants_back: whether the Parameters shall have their values again when the bank is given back.
        """
        origins = {name: _origin(parameter) for name, parameter in bank.parameters.items()}
        inference = frozenset(name for name, parameter in bank.parameters.items() if parameter.is_inference())
        self._stored[bank.index] = StoredBank(bank, None, origins, inference, source)
        self._wants_back[bank.index] = wants_back
        for name, parameter in bank.parameters.items():
            # Refers to nothing else of the model: the Parameter may outlive that.
            read = partial(_weights, source.read, bank.layout, name)
            if isinstance(parameter, OnDisk):
                parameter.read = read
            else:
                replace_parameter(parameter, OnDisk.of(parameter, read))
        give_back_freed()

    def give_back(self, bank: ExpertBank) -> None:
        """Move a bank's Parameters back to the devices where they were; on the CPU they stay in their arena. Idempotent.

        Those in files are read. No copy from the arena may be under way. Where a device has no room any more, they stay in host
        memory and a warning says so.
        """
        stored = self._stored.get(bank.index)
        if stored is None:
            return
        # Whatever an error leaves undone is done at the next call.
        if stored.is_on_disk:
            self._take_from_files(stored)
        _send_back(stored)
        self._let_go(stored)
        if stored.source is not None:
            stored.source.close()

    def _take_from_files(self, stored: StoredBank) -> None:
        wants_back = self._wants_back[stored.bank.index]()
        for name, parameter in stored.bank.parameters.items():
            if not isinstance(parameter, OnDisk):
                continue
            if stored.origins[name].type == "meta":
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            elif wants_back:
                value = parameter.read()
            else:
                value = torch.empty(0, dtype=parameter.dtype, device="cpu")
            replace_parameter(parameter, value)

    def keep_locked(self) -> None:
        """From here on banks that are given back leave their page-locked memory as it is, until `close`: graphs read it."""
        self._kept = []

    def close(self) -> None:
        """Give every page lock back. No copy from the arenas may be under way. Idempotent."""
        kept, self._kept = self._kept or [], None
        for arena in kept:
            arena.unpin()
        for stored in list(self._stored.values()):
            self._let_go(stored)

    def _let_go(self, stored: StoredBank) -> None:
        if stored.arena is not None and self._kept is None:
            stored.arena.unpin()
        elif stored.arena is not None and self._kept is not None:
            self._kept.append(stored.arena)
        self._wants_back.pop(stored.bank.index, None)
        self._locks.withdraw(stored.bank.index)
        self._stored.pop(stored.bank.index, None)


def _origin(parameter: nn.Parameter) -> torch.device:
    """Where it was; meta, if somebody else keeps its value in files and has put it there."""
    return torch.device("meta") if isinstance(parameter, OnDisk) else parameter.device


def _send_back(stored: StoredBank) -> None:
    bank = stored.bank
    try:
        for name, parameter in bank.parameters.items():
            send_parameter(parameter, stored.origins[name], inference=name in stored.inference)
    except torch.OutOfMemoryError:
        warnings.warn(
            f"hf_prefetch: {bank.name} stays in host memory, there is no room for its {bank.nbytes / 2**20:,.0f} MiB on "
            f"{stored.origins[name]}. Free memory there and call model.to(...), or enable prefetching again.",
            RuntimeWarning,
            stacklevel=2,
        )


def send_parameter(parameter: nn.Parameter, device: torch.device, *, inference: bool | None = None) -> None:
    """Move a Parameter and its gradient, in place: it stays the same object.

    `inference`: whether it was made under inference_mode; asked of itself if not given.
    """
    if not is_plain(parameter) and not can_take_apart(parameter):
        with torch.no_grad():
            moved = parameter.to(device)
        parameter.data = moved.data
        # What such a kind of Parameter keeps besides its data.
        parameter.__dict__.update(moved.__dict__)
        return
    if not is_plain(parameter):
        replace_parts("", parameter, {name: tensor.to(device) for name, tensor in parts("", parameter).items()})
        return
    inference = parameter.is_inference() if inference is None else inference
    # What is made under inference_mode could never be trained or written to again, so nothing else is made there. Whoever was
    # made there keeps no count of versions, and must not hold memory of the other kind.
    with torch.inference_mode(inference), torch.no_grad():
        data = parameter.data.to(device)
        parameter.data = data.clone() if inference and not data.is_inference() else data
    with torch.inference_mode(False), torch.no_grad():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)
