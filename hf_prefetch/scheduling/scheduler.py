"""PrefetchScheduler: the one object registered on a model. It sees which bank is called and has the next ones on their way.

One call of an experts module, walked:

    acquire(bank)   the bank's copy was enqueued two banks ago; if not, it is enqueued now. The banks after it follow
                    into the slots that are left. The compute stream waits for the bank's *ready event*: a no-op in
                    steady state.
    (the module's own forward runs, its parameters pointing into the slot)
    release(bank)   the slot's *free event* is recorded, and the slot may be refilled.

With 3 or 4 slots bank i+2 is enqueued in `acquire(i)`. With 2 slots its slot is the one that bank i is read from, so it
is enqueued in `release(i)`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ..config import PrefetchConfig
from ..device.rows import has_rows
from ..device.slots import SlotRing
from ..discovery import ExpertBank
from ..memory.ledger import Purpose
from ..memory.store import HostStore
from ..report import Counters, Report
from ..streams import StreamDevice
from ..timeline import Timeline
from .plan import LookaheadOrder
from .policy import LOOKAHEAD, Path, choose_path, depth_in_acquire

__all__ = ["PrefetchScheduler"]


@dataclass(eq=False)
class Lane:
    """What each device has of its own: its slots, and the order of the banks that compute on it.

    `announced` says that the next pass was begun by `begin_pass`, so that what lies in the slots was sent for it.
    """

    device: StreamDevice
    ring: SlotRing
    order: LookaheadOrder
    looks_ahead: bool
    announced: bool = False


class PrefetchScheduler:
    """Prefetches the expert banks of one model. Made by `enable_expert_prefetch`; reached as `model.expert_prefetch`.

    Attributes:
        config: the options it was made with.
        banks: the model's host-resident banks; `resident` is the number of the others.
        store: where their bytes are in host memory.
        lock: held by a hook from `acquire` to `release`, so that threads that share a model take turns.
        finalizer: what happens when the model is deleted without `disable_expert_prefetch`.
    """

    finalizer: weakref.finalize[..., Any]

    def __init__(
        self, config: PrefetchConfig, store: HostStore, devices: dict[ExpertBank, StreamDevice], *, resident: int = 0
    ) -> None:
        self.config = config
        self.resident = resident
        self.banks = tuple(devices)
        self.lock = threading.RLock()
        self.counters = Counters()
        self.store = store
        self._lane_of = dict(zip(self.banks, self._lanes(devices), strict=True))
        self._ahead_of_use: set[int] = set()
        self._computing_since: dict[int, Any] = {}
        self._closed = False

    def _lanes(self, devices: dict[ExpertBank, StreamDevice]) -> Iterable[Lane]:
        lanes: dict[StreamDevice, Lane] = {}
        for device in devices.values():
            if device not in lanes:
                banks = [bank for bank in self.banks if devices[bank] is device]
                ring = SlotRing(device, max(bank.nbytes for bank in banks))
                self.store.ledger.add(Purpose.SLOTS, ring.held)
                order = LookaheadOrder([bank.index for bank in banks])
                lanes[device] = Lane(device, ring, order, device.overlaps)
        return (lanes[device] for device in devices.values())

    # -- the three verbs ------------------------------------------------------------------------------------------

    def prefetch(self, bank: ExpertBank) -> bool:
        """Have a bank's bytes on their way into a slot before anybody asks. Idempotent.

        Returns:
            Whether they are in a slot now, or on their way.
        """
        lane = self._lane_of[bank]
        return self._ready_slots(lane, self.config.slots) and self._fill(lane, bank, ahead=True)

    def acquire(
        self, bank: ExpertBank, routed_ids: int | None = None, ids: torch.Tensor | None = None
    ) -> dict[str, nn.Parameter]:
        """Tensors on the device that hold a bank's bytes once the current stream gets to them.

        Args:
            bank: one of `banks`.
            routed_ids: tokens x top-k of the call; None where unknown, which counts as many.
            ids: the expert ids of the call, if it reads no other rows than theirs. The rows of other experts may then
                hold anything.

        Raises:
            torch.OutOfMemoryError: not even one slot fits on the device.
            RuntimeError: the scheduler is closed, or a CUDA graph is being captured.
        """
        lane = self._lane_of[bank]
        self._check_usable(lane)
        begin = lane.device.mark(lane.device.compute_stream())
        if lane.order.observe(bank.index) and not lane.announced:
            # Weights may have been written to between two passes, in ways that leave no trace.
            lane.ring.forget_what_was_sent_ahead()
        lane.announced = False
        path = choose_path(
            routed_ids,
            bank.num_experts,
            self.config.lookahead_gate,
            can_look_ahead=lane.looks_ahead,
            can_route=ids is not None and has_rows(bank.layout),
        )
        if path is Path.LOOKAHEAD and not self._ready_slots(lane, self.config.slots):
            path = Path.PLAIN
        self._fill_for_use(lane, bank, ids if path is Path.ROUTED else None)
        if path is Path.LOOKAHEAD:
            holds_host = lane.device.holds_host(pinned=self.store[bank].is_pinned)
            self._look_ahead(lane, bank, depth_in_acquire(self.config.slots, holds_host=holds_host))
            self._ahead_of_use.add(bank.index)
        tensors = lane.ring.hold(bank.index, bank.layout)
        end = lane.device.mark(lane.device.compute_stream())
        if lane.ring.timeline:
            lane.ring.timeline.add("wait", bank.name, lane.device, begin, end)
            self._computing_since[bank.index] = end
        self.counters.count_call(path.value, lane.device, begin, end)
        return tensors

    def release(self, bank: ExpertBank) -> None:
        """The kernels that read a bank are enqueued; its slot may be refilled after them. Idempotent."""
        lane = self._lane_of[bank]
        since = self._computing_since.pop(bank.index, None)
        if lane.ring.timeline and since is not None:
            end = lane.device.mark(lane.device.compute_stream())
            lane.ring.timeline.add("compute", bank.name, lane.device, since, end)
        lane.ring.release(bank.index)
        if bank.index in self._ahead_of_use:
            self._ahead_of_use.discard(bank.index)
            if not self._closed:
                self._look_ahead(lane, bank, LOOKAHEAD)

    def break_off(self) -> None:
        """A forward has raised, so this pass is over, and what was sent ahead for it is of no use."""
        self._ahead_of_use.clear()
        for lane in self._lane_of.values():
            lane.ring.forget_what_was_sent_ahead()

    def begin_pass(self, routed_ids: int | None) -> None:
        """A pass has begun and its first layers keep their experts on the device: send what will be needed first.

        Without this the first host-resident bank would only be sent when it is asked for.
        """
        for lane in dict.fromkeys(self._lane_of.values()):
            experts = max(bank.num_experts for bank, other in self._lane_of.items() if other is lane)
            path = choose_path(routed_ids, experts, self.config.lookahead_gate, can_look_ahead=lane.looks_ahead)
            lane.ring.forget_what_was_sent_ahead()
            lane.announced = True
            if path is Path.LOOKAHEAD and not lane.device.is_capturing() and self._ready_slots(lane, self.config.slots):
                upcoming = lane.order.upcoming(LOOKAHEAD)
                for index in upcoming:
                    self._fill(lane, self.store.bank(index), ahead=True, keep=tuple(upcoming))

    # -- how a bank gets into a slot ------------------------------------------------------------------------------

    def _look_ahead(self, lane: Lane, bank: ExpertBank, depth: int) -> None:
        expected = lane.order.ahead(bank.index, depth)
        for index in expected:
            self._fill(lane, self.store.bank(index), ahead=True, keep=(bank.index, *expected))

    def _fill(self, lane: Lane, bank: ExpertBank, *, ahead: bool, keep: tuple[int, ...] = ()) -> bool:
        already = lane.ring.slot_of(bank.index) is not None
        filled = lane.ring.fill(self.store[bank], keep)
        if filled and not already:
            self.counters.count_copy(bank.index, bank.nbytes, ahead=ahead)
        return filled

    def _fill_for_use(self, lane: Lane, bank: ExpertBank, ids: torch.Tensor | None) -> None:
        """Make sure that a bank, or the rows that `ids` names, are in a slot, whatever was expected."""
        lane.ring.forget_if_changed(self.store[bank])
        self.counters.count_use(bank.index, in_slot=lane.ring.slot_of(bank.index) is not None)

        def fill() -> bool:
            if ids is None:
                return self._fill(lane, bank, ahead=False)
            counter = self.counters.rows_of(bank.index, bank.nbytes // bank.num_experts)
            return lane.ring.fill_rows(self.store[bank], ids, counter)

        if fill():
            return
        # No slots yet, or a forward holds every one of them (a bank called from within another one).
        try:
            lane.ring.grow(len(lane.ring) + 1)
        except torch.OutOfMemoryError as error:
            _raise_no_room(lane, bank, error)
        fill()

    def _ready_slots(self, lane: Lane, count: int) -> bool:
        """Allocate a lane's slots if they are not there. Where they don't fit, the lane stops looking ahead for good."""
        if not lane.looks_ahead:
            return False
        if len(lane.ring) >= count:
            return True
        try:
            lane.ring.grow(count)
        except torch.OutOfMemoryError:
            lane.looks_ahead = False
            lane.ring.shrink(1)
            self.counters.fallbacks += 1
            warnings.warn(
                f"hf_prefetch: {count} slots of {lane.ring.slot_nbytes / 2**20:,.0f} MiB do not fit on {lane.device.name}; "
                "prefetching is off and every expert bank is copied when it is needed: slower, with the same output. "
                "To get it back, free device memory or take fewer slots, then call enable_expert_prefetch again.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        return True

    def _check_usable(self, lane: Lane) -> None:
        if self._closed:
            raise RuntimeError(
                "These experts belong to a model whose prefetching has ended: another thread has disabled it, or the model "
                "that enable_expert_prefetch was called on is gone. Keep that object alive while any part of it is used."
            )
        if lane.device.is_capturing():
            raise RuntimeError(
                "A CUDA graph can't be captured over prefetched experts yet: their copies are decided on the host at each "
                "call. Run this part without capture, or call disable_expert_prefetch(model) first."
            )

    # -- reports and the end --------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What happened since the model was enabled, or since `reset`."""
        with self.lock:
            ledger = self.store.ledger
            lanes = dict.fromkeys(self._lane_of.values())
            return self.counters.report(
                slots=self.config.slots,
                banks=len(self.banks),
                resident_banks=self.resident,
                devices=tuple(lane.device.name for lane in lanes),
                looks_ahead=all(lane.looks_ahead for lane in lanes),
                device_bytes=ledger.held(Purpose.SLOTS),
                host_bytes=ledger.held(Purpose.BANKS),
                pinned_bytes=ledger.held(Purpose.PINNED),
            )

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record when each bank is copied, waited for and computed with, while the block runs."""
        timeline, rings = Timeline(), [lane.ring for lane in self._lane_of.values()]
        for ring in rings:
            ring.timeline = timeline
        try:
            yield timeline
        finally:
            for ring in rings:
                ring.timeline = None

    def reset(self) -> None:
        """Set the counters of `report` to zero. What is held in memory stays."""
        with self.lock:
            self.counters = self.counters.zeroed()

    @property
    def has_ended(self) -> bool:
        """Whether `stop` was called: by `disable_expert_prefetch`, or because the model is gone."""
        return self._closed

    def is_in_a_call(self) -> bool:
        """Whether the calling thread is inside a forward of one of the banks' modules."""
        # Another thread's forward holds the lock as well, but that one can be waited for.
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Wait until no copy reads the banks' host memory: for whoever writes to it by other means than `load_state_dict`.

        A forward returns before its copies have ended, and what they carry would be a mixture of old and new weights.
        """
        with self.lock:
            for lane in self._lane_of.values():
                lane.ring.settle()

    def stop(self) -> None:
        """Wait for the last copy and kernel, and free the slots. Idempotent; `acquire` raises from here on."""
        with self.lock:
            self._closed = True
            for lane in self._lane_of.values():
                lane.ring.close()

    def close(self) -> None:
        """`stop`, then end all page locks: what is left to do when the model is gone. Idempotent."""
        self.stop()
        self.store.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy()


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "A model with expert prefetching enabled can't be copied or pickled: its streams, slots and page-locked memory "
        "belong to this process. Call disable_expert_prefetch(model) first, and enable_expert_prefetch on each copy; "
        "model.save_pretrained(...) works while it is enabled."
    )


def _raise_no_room(lane: Lane, bank: ExpertBank, error: Exception) -> NoReturn:
    raise torch.OutOfMemoryError(
        f"{bank.name} needs {bank.nbytes / 2**20:,.0f} MiB on {lane.device.name} for one slot, and there is no room for it. "
        "Free device memory (a shorter prompt, a smaller batch, an offloaded KV cache, other processes) or run the model on "
        "another device with enable_expert_prefetch(model, device=...)."
    ) from error
