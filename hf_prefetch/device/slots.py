"""Slot and SlotRing: device buffers that expert banks rotate through, and all the ordering between the two streams.

[Note: the orderings]
A slot is filled on the copy stream, or with single rows on the compute stream, and read on the compute stream:

    write after read    `fill` makes the copy stream wait for `slot.free`, recorded by the compute stream in `release`;
                        `fill_rows` makes the compute stream wait for it, since the reader may have been another stream
    first write         `grow` records `slot.free` too: the allocator may hand out memory that older kernels still use
    read after write    `hold` makes the compute stream wait for `slot.ready`, recorded by the copy stream in `fill`;
                        rows are read on the stream that writes them
    write after write   two fills are on the copy stream, which runs in order; rows come before `slot.free` of their
                        release, for which a fill waits; `fill_rows` waits for `slot.ready` of the fill before it

Nothing else orders anything: there is no host synchronisation outside `close`, but for banks that are not page-locked. These
come through the staging ring (see there), whose thread enqueues their copies, so `hold` waits on the host until it has, and
whoever takes the slot for something else until it has stopped.

[Note: slots and graphs]
While a CUDA graph is captured nothing outside it can be waited for, and what it does is done again at each replay, whenever
that is. So a slot that a graph has used is used by graphs alone from then on (it is *leased*): no copy for a prompt can come
into it while a graph is replayed. It must be one whose last writer was a compute stream, as after a call not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..banks.layout import BankLayout
from ..memory.store import StoredBank
from ..streams import StreamDevice
from ..timeline import Timeline
from .cache import RowCache
from .chunks import Upload
from .rows import RowCounter, RowSender
from .staging import StagingRing
from .table import Assignment

__all__ = ["Slot", "SlotRing", "SlotState"]


class SlotState(Enum):
    """FREE: holds nothing of use. FILLED: a bank's copy was enqueued. HELD: a forward reads it."""

    FREE = "free"
    FILLED = "filled"
    HELD = "held"


@dataclass(eq=False)
class Slot:
    """One buffer, and the two events that travel with it.

    Attributes:
        buffer: flat uint8 tensor on the device.
        ready: recorded by the copy stream at the end of `fill`; waited for by the compute stream in `hold` and `fill_rows`.
        free: recorded by the compute stream in `grow` and `release`; waited for by whoever writes next.
        was_filled: whether the copy stream has written here and no compute stream has waited for that yet.
        is_leased: whether a CUDA graph knows its address, see [Note: slots and graphs].
        has_rows_only: whether it holds no more than the rows of one call.
        found: which rows these are, each once, while it is held.
        bank: index of the bank whose bytes are here or on their way; None when free.
        version: of the bank's bytes, see `StoredBank.version`.
        upload: by which the staging ring brings the bank, until somebody has waited for it.
    """

    buffer: torch.Tensor
    ready: Any
    free: Any
    state: SlotState = SlotState.FREE
    bank: int | None = None
    upload: Upload | None = None
    version: tuple[int, ...] = ()
    was_filled: bool = False
    is_leased: bool = False
    has_rows_only: bool = False
    found: Assignment | None = None
    _tensors: dict[BankLayout, dict[str, nn.Parameter]] = field(default_factory=dict)

    def tensors(self, layout: BankLayout) -> dict[str, nn.Parameter]:
        """The bank's tensors in this slot.

        They never require grad: autocast keeps casts of leaves that do, by the leaf's identity, and would hand the
        cast of one bank to the next bank that passes through the slot.
        """
        if layout not in self._tensors:
            with torch.inference_mode(False):
                views = layout.views(self.buffer).items()
                # Their counts of changes are not the buffer's: only what a forward writes into them shows there.
                self._tensors[layout] = {name: nn.Parameter(view.data, requires_grad=False) for name, view in views}
        return self._tensors[layout]


class SlotRing:
    """The slots of one device: the one owner of which slot a bank gets.

    Slots are given out in rotation by a step counter, whatever the banks are called, passing over those that are held
    or whose bank the caller wants to keep.

    Attributes:
        timeline: where copies are noted, while somebody records them.
    """

    def __init__(self, device: StreamDevice, slot_nbytes: int, sender: RowSender, staging: StagingRing) -> None:
        self.device = device
        self.slot_nbytes = slot_nbytes
        self._sender = sender
        self._staging = staging
        self.timeline: Timeline | None = None
        self._slots: list[Slot] = []
        self._step = 0

    def __len__(self) -> int:
        return len(self._slots)

    def slot_of(self, bank: int) -> Slot | None:
        """The slot that holds a bank's bytes or has them on their way, if any."""
        for slot in self._slots:
            if slot.bank == bank:
                return slot
        return None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all slots."""
        return [slot.buffer for slot in self._slots]

    def held(self) -> int:
        """Device memory held, in bytes."""
        return len(self._slots) * self.slot_nbytes

    def grow(self, count: int) -> None:
        """Allocate slots until there are `count`.

        Raises:
            torch.OutOfMemoryError: there is no room for one of them; those before it stay.
        """
        while len(self._slots) < count:
            slot = Slot(self.device.allocate(self.slot_nbytes), self.device.new_event(), self.device.new_event())
            self.device.record(slot.free, self.device.compute_stream())
            self._slots.append(slot)

    def shrink(self, count: int) -> None:
        """Free slots until there are `count`, after their last copy and kernel have ended; those that graphs know come last."""
        self.forget_what_was_sent_ahead()
        self.settle()
        self._slots.sort(key=lambda slot: not slot.is_leased)
        del self._slots[count:]

    def fill(self, stored: StoredBank, keep: Collection[int] = (), note: Callable[[int, Any, Any], None] | None = None) -> bool:
        """Enqueue the copy of a bank into the next slot. Does nothing if the bank is in a slot already.

        Args:
            stored: the bank and its bytes in host memory.
            keep: indices of banks whose slots must not be taken for it.
            note: gets the copy's bytes and the marks around it.

        Returns:
            Whether the bank is in a slot now, or on its way; False if there was no slot to take.
        """
        slot = self.slot_of(stored.bank.index)
        if slot is not None:
            if slot.has_rows_only:
                # A call that is under way has some of the rows; this one, inside it, wants them all.
                everything = torch.arange(stored.bank.num_experts, device=self.device.device)
                slot.found = self._sender.send_to_slot(stored, slot.buffer, everything, RowCounter(self.device))
            return True
        slot = self._next_slot(keep)
        if slot is None:
            return False
        # Until the record below the slot belongs to nobody: an interrupt in between costs this copy and nothing else.
        slot.state, slot.bank, slot.was_filled, slot.has_rows_only = SlotState.FREE, None, True, False
        slot.version = stored.version
        self._stop_upload(slot)
        copy_stream = self.device.copy_stream()
        self.device.wait(copy_stream, slot.free)
        if self._staging.takes(stored):
            slot.upload = Upload(stored, slot.buffer[: stored.bank.nbytes], slot.ready, self.timeline)
            self._staging.send(slot.upload)
        else:
            self._copy(slot, stored, copy_stream, note)
        slot.state, slot.bank = SlotState.FILLED, stored.bank.index
        return True

    def _copy(self, slot: Slot, stored: StoredBank, copy_stream: Any, note: Callable[[int, Any, Any], None] | None) -> None:
        """Enqueue the copy of a bank's block."""
        begin = self.device.mark(copy_stream) if self.timeline or note else None
        self.device.copy(copy_stream, slot.buffer[: stored.bank.nbytes], stored.block)
        self.device.record(slot.ready, copy_stream)
        if self.timeline or note:
            end = self.device.mark(copy_stream)
            if self.timeline:
                self.timeline.add("copy", stored.bank.name, self.device, begin, end)
            if note:
                note(stored.bank.nbytes, begin, end)

    def holds_host(self, stored: StoredBank) -> bool:
        """Whether `fill` keeps the host from enqueuing anything else meanwhile."""
        return self.device.holds_host(pinned=stored.is_pinned) and not self._staging.takes(stored)

    def forget_if_changed(self, stored: StoredBank) -> None:
        """Let go of a bank that was sent ahead, if its weights in host memory have been written to since."""
        slot = self.slot_of(stored.bank.index)
        if slot is not None and slot.state is SlotState.FILLED and slot.version != stored.version:
            self._let_go(slot)

    def forget_what_was_sent_ahead(self) -> None:
        """Let go of every bank that nobody has asked for: it was sent for a pass that is over."""
        for slot in self._slots:
            if slot.state is SlotState.FILLED:
                self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        slot.state, slot.bank = SlotState.FREE, None
        if slot.upload is not None:
            self._staging.cancel(slot.upload)

    def _stop_upload(self, slot: Slot) -> None:
        """Hold the host until the staging ring enqueues nothing more for a slot."""
        if slot.upload is not None:
            self._staging.cancel(slot.upload)
            self._staging.synchronize(slot.upload)
            slot.upload = None

    def fill_rows(self, stored: StoredBank, ids: torch.Tensor, counter: RowCounter, cache: RowCache | None = None) -> bool:
        """Hold a slot for a bank and enqueue, on the compute stream, the copy of the rows that `ids` names.

        Those that are in the bank's cache, if one is given, which is held, come from there. A bank that is in a slot as a
        whole needs no rows. Returns whether there was a slot to take.
        """
        slot, capturing = self.slot_of(stored.bank.index), self.device.is_capturing()
        if slot is not None and capturing and slot.state is SlotState.FILLED:
            # It was sent ahead: its event can't be waited for, and the slot will be taken for other banks.
            self._let_go(slot)
            slot = None
        if slot is None:
            slot = self._slot_for_graphs() if capturing else self._next_slot(keep=())
            if slot is None:
                return False
            if not capturing:
                self._stop_upload(slot)
                compute_stream = self.device.compute_stream()
                self.device.wait(compute_stream, slot.free)
                if slot.was_filled:
                    # Recorded anew, since an interrupt may have come between a copy and its record.
                    self.device.record(slot.ready, self.device.copy_stream())
                    self.device.wait(compute_stream, slot.ready)
                    slot.was_filled = False
            slot.state, slot.bank, slot.has_rows_only = SlotState.HELD, stored.bank.index, True
        if slot.has_rows_only:
            cached = (cache.table, cache.layout, cache.buffer) if cache else None
            slot.found = self._sender.send_to_slot(stored, slot.buffer, ids, counter, cached)
        return True

    def found(self, bank: int) -> Assignment | None:
        """The rows that the call that holds a bank has asked for; None if the bank is in its slot as a whole."""
        slot = self.slot_of(bank)
        return slot.found if slot is not None and slot.has_rows_only else None

    def hold(self, bank: int, layout: BankLayout) -> dict[str, nn.Parameter]:
        """Make the compute stream wait for a bank's bytes and hand out its tensors. `fill` came before.

        Raises:
            KeyError: the bank is in no slot.
            Exception: it could not be read; the next `fill` tries again.
        """
        slot = self.slot_of(bank)
        if slot is None:
            raise KeyError(f"bank {bank} is in no slot")
        if slot.upload is not None:
            self._finish_upload(slot)
        if not slot.has_rows_only:
            self.device.wait(self.device.compute_stream(), slot.ready)
            # Whoever writes next waits for `free`, which is recorded behind this.
            slot.was_filled = False
        slot.state = SlotState.HELD
        return slot.tensors(layout)

    def _finish_upload(self, slot: Slot) -> None:
        assert slot.upload is not None
        try:
            self._staging.wait(slot.upload)
        except BaseException:
            self._let_go(slot)
            raise
        slot.upload = None

    def release(self, bank: int) -> None:
        """The forward that read a bank is enqueued: its slot may be refilled once that has run. Idempotent."""
        slot = self.slot_of(bank)
        if slot is not None and slot.state is SlotState.HELD:
            if not self.device.is_capturing():
                self.device.record(slot.free, self.device.compute_stream())
            # The list of rows is memory of the call's own, which must not outlive it: see [Note: pools of memory].
            slot.state, slot.bank, slot.has_rows_only, slot.found = SlotState.FREE, None, False, None

    def close(self) -> None:
        """Free all slots, after the last copy and kernel that use them have ended. Idempotent."""
        self.shrink(0)

    def _next_slot(self, keep: Collection[int]) -> Slot | None:
        count = len(self._slots)
        for offset in range(count):
            slot = self._slots[(self._step + offset) % count]
            if slot.state is not SlotState.HELD and not slot.is_leased and slot.bank not in keep:
                self._step += offset + 1
                return slot
        return None

    def _slot_for_graphs(self) -> Slot | None:
        """The slot that graphs have, or one that they can have: see [Note: slots and graphs]."""
        for slot in sorted(self._slots, key=lambda slot: not slot.is_leased):
            if slot.state is SlotState.FREE and not slot.was_filled:
                slot.is_leased = True
                return slot
        return None

    def settle(self) -> None:
        """Hold the host until no copy or kernel uses a slot or reads a bank's host memory any more.

        For when memory is about to be freed, or somebody is about to write to a bank.
        """
        if not self._slots:
            return
        for slot in self._slots:
            if slot.upload is not None:
                self._staging.synchronize(slot.upload)
        if any(slot.is_leased for slot in self._slots):
            # Replays of graphs leave no event behind.
            self.device.settle()
        for slot in self._slots:
            self.device.synchronize(slot.free)
        for stream in (self.device.copy_stream(), self.device.compute_stream()):
            event = self.device.new_event()
            self.device.record(event, stream)
            self.device.synchronize(event)
