"""Lane: what each device has of its own, and how a bank's experts get into its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..config import DEFAULT_GATE, PrefetchConfig
from ..device.rows import RowCounter, RowSender
from ..device.slots import SlotRing
from ..device.staging import StagingRing
from ..memory.ledger import Purpose
from ..memory.store import HostStore
from ..report import Counters
from ..streams import StreamDevice
from .budget import CacheBudget
from .observer import Observer
from .plan import LookaheadOrder
from .policy import LOOKAHEAD, depth_in_acquire, is_small
from .refusals import raise_no_room, raise_not_warm
from .remedies import Remedies
from .replacement import Replacement

__all__ = ["LEAST_MEASURED", "Handout", "Lane", "make_lanes"]

# Banks of fewer bytes take less time on the way than it takes to launch their copies.
LEAST_MEASURED = 8 * 2**20


@dataclass(frozen=True)
class Handout:
    """What a forward runs on.

    Attributes:
        tensors: the module's parameters on the device, by name.
        ids: the ids to call it with, where they differ from its own: the tensors have another row for each expert then.
        rows: how many rows the tensors have.
    """

    tensors: dict[str, nn.Parameter]
    ids: torch.Tensor | None
    rows: int


class Lane:
    """One device's slots, caches, and the order of the banks that compute on it.

    Args:
        device: the device.
        banks: the banks that compute there.
        store: where their bytes are.
        counters: what is counted.
        slots: how many slots there are to be.
        cache_budget: device memory for the row caches, in bytes.
        remedies: what to tell users.

    Attributes:
        budget: decides which banks have row caches; `caches` are those that there are.
        slots: how many there are to be.
        opens: whether a slot is free as soon as a bank has been handed out, since what calls compute with is made of it.
        looks_ahead: whether banks are sent ahead. Ends for good where the slots don't fit.
        announced: whether the next pass was begun by `begin_pass`, so that what lies in the slots was sent for it.
    """

    def __init__(
        self,
        device: StreamDevice,
        banks: Sequence[ExpertBank],
        store: HostStore,
        counters: Counters,
        *,
        slots: int,
        cache_budget: int,
        remedies: Remedies,
    ) -> None:
        self.device = device
        # Where calls compute with memory of their own, that takes the place of one slot: none is ever read for long.
        self.opens = all(bank.opens for bank in banks)
        self.slots = slots - self.opens
        self._remedies = remedies
        self.looks_ahead = device.overlaps
        self.announced = False
        self.observer = Observer(device)
        self._wants_rows: dict[int, bool] = {}
        self._sender = sender = RowSender(device)
        self.replacement = Replacement()
        self.order = LookaheadOrder([bank.index for bank in banks])
        largest = max(bank.nbytes for bank in banks)
        self.staging = StagingRing(device, largest)
        self.ring = SlotRing(device, largest, sender, self.staging)
        decay = self.replacement.decay
        self.budget = CacheBudget(device, banks, store, counters, sender, decay, nbytes=cache_budget, remedies=remedies)
        self.caches = self.budget.caches
        store.ledger.add(Purpose.SLOTS, self.ring.held)
        store.ledger.add(Purpose.CACHES, self.caches.held)
        store.ledger.add(Purpose.STAGING, self.staging.held)
        self._store = store
        self._counters = counters
        self._counted = RowCounter(device)
        for bank in banks:
            # Here and not at their first use, which may be in a graph that is captured.
            if bank.layout.has_rows and sender.has_kernels(store[bank]):
                sender.prepare(store[bank])
                self._counter(bank).tensor()

    # -- whole banks, in slots ------------------------------------------------------------------------------------

    def send(self, bank: ExpertBank, *, ahead: bool, keep: tuple[int, ...] = ()) -> bool:
        """Have a whole bank in a slot or on its way there. Returns whether there was a slot to take."""
        already = self.ring.slot_of(bank.index) is not None
        filled = self.ring.fill(self._store[bank], keep, self.observer.note_copy if self._is_measured(bank) else None)
        if filled and not already:
            self._counters.count_copy(bank.index, bank.nbytes, ahead=ahead)
        return filled

    def look_ahead(self, bank: ExpertBank, *, in_acquire: bool) -> None:
        """Send the banks that are expected after this one, as many as there are slots for at this moment."""
        expected = self.order.ahead(bank.index, LOOKAHEAD)
        if in_acquire:
            holds_host = any(self.ring.holds_host(self._store[self._store.bank(index)]) for index in expected)
            expected = expected[: depth_in_acquire(self.slots + self.opens, holds_host=holds_host)]
        for index in expected:
            self.send(self._store.bank(index), ahead=True, keep=(bank.index, *expected))

    def send_first(self) -> None:
        """A pass is about to begin: send the banks that it needs first."""
        upcoming = self.order.upcoming(LOOKAHEAD)
        for index in upcoming:
            self.send(self._store.bank(index), ahead=True, keep=tuple(upcoming))

    def has_slots(self) -> bool:
        """Allocate the slots if they are not there. Where they don't fit, the lane stops looking ahead for good."""
        if not self.looks_ahead:
            return False
        while len(self.ring) < self.slots:
            if not self._grow() and not self.budget.give_up():
                self._stop_looking_ahead()
                return False
        return True

    def _grow(self) -> bool:
        try:
            self.ring.grow(self.slots)
        except torch.OutOfMemoryError:
            return False
        return True

    def _stop_looking_ahead(self) -> None:
        self.looks_ahead = False
        self.ring.shrink(1)
        self._counters.fallbacks += 1
        warnings.warn(
            f"hf_prefetch: {self.slots} slots of {self.ring.slot_nbytes / 2**20:,.0f} MiB do not fit on {self.device.name};"
            " prefetching is off and every expert bank is copied when it is needed: slower, with the same output. "
            f"To get it back, {self._remedies.again}",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- one call -------------------------------------------------------------------------------------------------

    def use_slot(self, bank: ExpertBank, ids: torch.Tensor | None) -> None:
        """Make sure that a bank, or the rows that `ids` names, are in a slot, whatever was expected."""
        stored = self._store[bank]
        self.ring.forget_if_changed(stored)
        self._counters.count_use(bank.index, in_slot=self.ring.slot_of(bank.index) is not None)

        def fill() -> bool:
            if ids is None:
                return self.send(bank, ahead=False)
            cache = self.caches.hold(stored) if self.caches.of(bank.index) is not None else None
            return self._watched(bank, ids, lambda: self.ring.fill_rows(stored, ids, self._counter(bank), cache))

        if fill():
            return
        if self.device.is_capturing():
            raise_not_warm(bank)
        # No slots yet, or a forward holds every one of them (a bank called from within another one).
        try:
            self.ring.grow(len(self.ring) + 1)
        except torch.OutOfMemoryError as error:
            raise_no_room(self.device, bank, self._remedies, error)
        fill()

    def wants_rows(self, bank: ExpertBank, routed_ids: int | None, gate: int, *, can_route: bool) -> bool:
        """Whether a call should get single experts after its router instead of whole banks ahead of use.

        That is measured where kernels send them and their bytes decide. Elsewhere it is a matter of how many ids there are. All
        calls of a size in a pass get the same answer.
        """
        few = is_small(routed_ids, bank.num_experts, gate)
        if routed_ids is None or gate != DEFAULT_GATE or not can_route or not self._is_measured(bank):
            return few
        if routed_ids not in self._wants_rows:
            row_nbytes = bank.layout.row_nbytes
            pays = self.observer.experience.routed_pays(routed_ids, bank.num_experts, bank.nbytes, row_nbytes)
            self._wants_rows[routed_ids] = pays
        return self._wants_rows[routed_ids]

    def _count_experts(self, bank: ExpertBank, ids: torch.Tensor) -> None:
        """A call gets whole banks: see how many of their experts it uses, in case single ones would have been less."""
        if self._is_measured(bank) and self.observer.wants(ids.numel()):
            totals = self._counted.tensor()

            def count() -> None:
                self._sender.count(bank.num_experts, ids, totals)

            self.observer.note_experts(totals, count, ids.numel(), bank.num_experts, 0)

    def note_call(self, bank: ExpertBank, routed_ids: int | None, begin: Any, end: Any) -> None:
        """Between the two marks a call waited for its experts."""
        if routed_ids is not None and self._is_measured(bank):
            self.observer.note_call(routed_ids, begin, end)

    def _watched(self, bank: ExpertBank, ids: torch.Tensor, fill: Callable[[], bool]) -> bool:
        """Enqueue the copies of single experts, and note what they take."""
        if self.device.is_capturing() or not self._is_measured(bank) or not self.observer.wants(ids.numel()):
            return fill()
        filled = [False]

        def count() -> None:
            filled[0] = fill()

        totals = self._counter(bank).tensor()
        self.observer.note_experts(totals, count, ids.numel(), bank.num_experts, bank.layout.row_nbytes)
        return filled[0]

    def _is_measured(self, bank: ExpertBank) -> bool:
        """Whether a bank's bytes decide about time, and kernels send its experts, so that nothing waits for the router."""
        return bank.nbytes >= LEAST_MEASURED and self._sender.has_kernels(self._store[bank])

    def hand_out_slot(self, bank: ExpertBank, ids: torch.Tensor | None, *, routed: bool) -> Handout:
        """Make the compute stream wait for a bank's slot; `use_slot` came before, with the ids if the call is routed."""
        found = None
        if routed and ids is not None and bank.has_packed:
            # Listed already, unless the whole bank was there.
            found = self.ring.found(bank.index) or self._sender.distinct(ids, bank.num_experts)
        tensors = bank.dressed(self.ring.hold(bank.index, bank.layout), found)
        if not routed and ids is not None and bank.layout.has_rows:
            self._keep_from_slot(bank, ids)
            self._count_experts(bank, ids)
        if self.opens:
            # What was handed out is memory of the call's own: the slot that it was made of may be refilled.
            self.ring.release(bank.index)
        return Handout(tensors, None, bank.num_experts)

    def hand_out_cache(self, bank: ExpertBank, ids: torch.Tensor) -> Handout:
        """Bring what a call uses into the bank's cache; `budget.cache_of` has said that there is one."""
        stored = self._store[bank]
        cache = self.caches.hold(stored)
        rows = self.caches.fetch(stored, ids, self._counter(bank))
        found = self._sender.distinct(rows, cache.table.rows) if bank.has_packed else None
        return Handout(bank.dressed(cache.tensors, found), rows, cache.table.rows)

    def _keep_from_slot(self, bank: ExpertBank, ids: torch.Tensor) -> None:
        """A prompt has its whole bank in a slot: keep what it uses most in the bank's cache, at no cost to the link."""
        if self.budget.cache_of(bank) is not None:
            stored = self._store[bank]
            slot = self.ring.slot_of(bank.index)
            assert slot is not None, "a slot was handed out"
            self.caches.hold(stored)
            weights = self.replacement.weights(max(ids.shape[0], 1))
            self.caches.keep(stored, slot.buffer, ids[-self.replacement.window :], weights)

    def begin_pass(self) -> None:
        """A pass begins: learn from the ones before."""
        self._wants_rows.clear()
        self.observer.begin_pass()
        self.budget.begin_pass()

    def begin_anew(self) -> None:
        """Forget what calls have shown."""
        self.observer = Observer(self.device)
        self._wants_rows.clear()

    def can_be_captured(self, bank: ExpertBank) -> bool:
        """Whether a graph can send a bank's experts: page-locked memory, and nothing for the host to decide."""
        stored = self._store[bank]
        return bank.layout.has_rows and stored.is_pinned and not self._sender.decides_on_host(stored)

    def release(self, bank: ExpertBank) -> None:
        """The kernels that read a bank are enqueued. Idempotent."""
        self.ring.release(bank.index)
        self.caches.release(bank.index)

    def settle(self) -> None:
        """Hold the host until nothing reads host memory, and forget what was read: it may be about to change."""
        self.ring.settle()
        self.caches.forget()

    def close(self) -> None:
        """Free what is held on the device. Idempotent."""
        self.ring.close()
        self.caches.close()
        self.staging.close()

    def _counter(self, bank: ExpertBank) -> RowCounter:
        return self._counters.rows_of(bank.index, bank.layout.row_nbytes, self.device)


def make_lanes(
    devices: dict[ExpertBank, StreamDevice], store: HostStore, counters: Counters, config: PrefetchConfig, remedies: Remedies
) -> dict[ExpertBank, Lane]:
    """A lane for each of the devices that banks compute on. Returns each bank's."""
    lanes: dict[StreamDevice, Lane] = {}
    for device in devices.values():
        if device not in lanes:
            banks = [bank for bank, other in devices.items() if other is device]
            sizes: Any = {"slots": config.slots, "cache_budget": config.cache_budget}
            lanes[device] = Lane(device, banks, store, counters, **sizes, remedies=remedies)
    return {bank: lanes[device] for bank, device in devices.items()}
