"""PrefetchScheduler: the one object registered on a model. It sees which bank is called and has the next ones on their way.

One call of an experts module, walked:

    acquire(bank)   the bank's copy was enqueued two banks ago; if not, it is enqueued now. The compute stream waits for
                    the bank's *ready event*: a no-op in steady state. The banks after it follow into the slots that
                    are left.
    (the module's own forward runs, its parameters pointing into the slot)
    release(bank)   the slot's *free event* is recorded, and the slot may be refilled.

With 3 or 4 slots bank i+2 is enqueued in `acquire(i)`. With 2 slots its slot is the one that bank i is read from, so it
is enqueued in `release(i)`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..banks.bank import ExpertBank
from ..config import PrefetchConfig
from ..memory.ledger import Purpose
from ..memory.store import HostStore
from ..report import Counters, Report
from ..streams import StreamDevice
from ..timeline import Timeline
from .lane import Handout, Lane, make_lanes
from .policy import Path, choose_path
from .refusals import NeverCopied
from .remedies import OF_MODELS, Remedies
from .reporting import make_report

__all__ = ["PrefetchScheduler"]


class PrefetchScheduler(NeverCopied):
    """Prefetches the expert banks of one model. Made by `enable_expert_prefetch`; reached as `model.expert_prefetch`.

    Attributes:
        config: the options it was made with.
        banks: the model's host-resident banks; `resident` is the number of the others.
        store: where their bytes are in host memory.
        remedies: what to tell users.
        lock: held by a hook from `acquire` to `release`, so that threads that share a model take turns.
        is_new: whether `begin_anew` was never called, or a graph was captured since.
        finalizer: what happens when the model is deleted without `disable_expert_prefetch`.
    """

    finalizer: weakref.finalize[..., Any]

    def __init__(
        self,
        config: PrefetchConfig,
        store: HostStore,
        devices: dict[ExpertBank, StreamDevice],
        *,
        resident: int = 0,
        remedies: Remedies = OF_MODELS,
    ) -> None:
        self.config = config
        self.remedies = remedies
        self.resident = resident
        self.banks = tuple(devices)
        self.lock = threading.RLock()
        self.counters = Counters()
        self.store = store
        self._lane_of = make_lanes(devices, store, self.counters, config, remedies)
        self._lanes = tuple(dict.fromkeys(self._lane_of.values()))
        self._ahead_of_use: set[int] = set()
        self._computing_since: dict[int, Any] = {}
        self._closed = False
        self._in_compiled_code = False
        self._is_leased = False
        self.is_new = True

    def __repr__(self) -> str:
        return f"<expert prefetching: {len(self.banks)} layers, {self.config.slots} slots; report() says what it did>"

    # -- the three verbs ------------------------------------------------------------------------------------------

    def prefetch(self, bank: ExpertBank) -> bool:
        """Have a bank's bytes on their way into a slot before anybody asks. Idempotent.

        Returns:
            Whether they are in a slot now, or on their way.
        """
        self.check_not_ended()
        lane = self._lane_of[bank]
        return lane.has_slots() and lane.send(bank, ahead=True)

    def acquire(
        self, bank: ExpertBank, routed_ids: int | None = None, ids: torch.Tensor | None = None, *, remaps: bool = False
    ) -> Handout:
        """Tensors on the device that hold a bank's bytes once the current stream gets to them.

        Args:
            bank: one of `banks`.
            routed_ids: tokens x top-k of the call; None where unknown, which counts as many.
            ids: the expert ids of the call (tokens x top-k), if it reads no other rows than theirs. The rows of other experts
                may then hold anything.
            remaps: whether the forward may be given other ids, and tensors with fewer rows.

        Raises:
            torch.OutOfMemoryError: not even one slot fits on the device.
            RuntimeError: the scheduler is closed, or a CUDA graph is being captured that can't be.
        """
        lane = self._lane_of[bank]
        capturing = lane.device.is_capturing()
        self._check_usable(bank, capturing=capturing, can_route=ids is not None)
        begin = None if capturing else lane.device.mark(lane.device.compute_stream())
        if lane.order.observe(bank.index):
            if not lane.announced:
                # Weights may have been written to between two passes, in ways that leave no trace.
                lane.ring.forget_what_was_sent_ahead()
            if not capturing:
                lane.begin_pass()
        lane.announced = False
        if ids is not None:
            lane.budget.check(bank, ids)
        path = self._path(lane, bank, routed_ids, ids, remaps=remaps, capturing=capturing)
        if path is Path.CACHED and ids is not None:
            handout = lane.hand_out_cache(bank, ids)
        else:
            lane.use_slot(bank, ids if path is Path.ROUTED else None)
            handout = lane.hand_out_slot(bank, ids, routed=path is Path.ROUTED)
            if path is Path.LOOKAHEAD:
                lane.look_ahead(bank, in_acquire=True)
                self._ahead_of_use.add(bank.index)
        end = None if capturing else lane.device.mark(lane.device.compute_stream())
        if not capturing:
            lane.note_call(bank, routed_ids, begin, end)
        if lane.ring.timeline and begin is not None:
            lane.ring.timeline.add("wait", bank.name, lane.device, begin, end)
            self._computing_since[bank.index] = end
        self.counters.count_call(bank.index, path.value, lane.device, begin, end)
        self._is_leased |= capturing and not self._in_compiled_code
        # What runs before a capture is made up as well.
        self.is_new |= capturing
        return handout

    def release(self, bank: ExpertBank) -> None:
        """The kernels that read a bank are enqueued; its slot may be refilled after them. Idempotent."""
        lane = self._lane_of[bank]
        since = self._computing_since.pop(bank.index, None)
        if lane.ring.timeline and since is not None:
            end = lane.device.mark(lane.device.compute_stream())
            lane.ring.timeline.add("compute", bank.name, lane.device, since, end)
        lane.release(bank)
        if bank.index in self._ahead_of_use:
            self._ahead_of_use.discard(bank.index)
            if not self._closed:
                lane.look_ahead(bank, in_acquire=False)

    def lacks_rows(self, bank: ExpertBank) -> bool:
        """Whether what was handed out of a bank is no more than the rows of the call."""
        slot = self._lane_of[bank].ring.slot_of(bank.index)
        return slot is not None and slot.has_rows_only

    def buffers(self, bank: ExpertBank) -> list[torch.Tensor]:
        """The device memory out of which a bank's tensors are handed out: slots and caches."""
        lane = self._lane_of[bank]
        return [*lane.ring.buffers, *lane.caches.buffers]

    def complete(self, bank: ExpertBank) -> None:
        """Bring the other rows of a bank that was handed out to their places."""
        self._lane_of[bank].send(bank, ahead=False)
        self.counters.count_copy(bank.index, bank.nbytes, ahead=False)

    def break_off(self) -> None:
        """A forward has raised, so this pass is over, and what was sent ahead for it is of no use."""
        self._ahead_of_use.clear()
        for lane in self._lanes:
            lane.ring.forget_what_was_sent_ahead()

    def give_up_cache(self, bank: ExpertBank) -> bool:
        """A forward has run out of device memory: make the row caches smaller. Returns whether that gave memory back."""
        return self._lane_of[bank].budget.give_up()

    def begin_pass(self, routed_ids: int | None) -> None:
        """A pass has begun and its first layers keep their experts on the device: send what will be needed first.

        Without this the first host-resident bank would only be sent when it is asked for.
        """
        for lane in self._lanes:
            if lane.device.is_capturing():
                continue
            first = self.store.bank(lane.order.upcoming(1)[0])
            few = lane.wants_rows(first, routed_ids, self.config.lookahead_gate, can_route=first.layout.has_rows)
            lane.ring.forget_what_was_sent_ahead()
            lane.announced = True
            if choose_path(wants_rows=few, can_look_ahead=lane.looks_ahead) is Path.LOOKAHEAD and lane.has_slots():
                lane.send_first()

    def _path(
        self, lane: Lane, bank: ExpertBank, routed_ids: int | None, ids: torch.Tensor | None, *, remaps: bool, capturing: bool
    ) -> Path:
        """The way of this call, and what it needs on the device made ready."""
        can_route = ids is not None and bank.layout.has_rows
        path = choose_path(
            # What is decided on the host for one prompt can't be replayed for another: a graph gets the experts it routes to.
            wants_rows=capturing or lane.wants_rows(bank, routed_ids, self.config.lookahead_gate, can_route=can_route),
            can_look_ahead=lane.looks_ahead,
            can_route=can_route,
            can_cache=remaps and routed_ids is not None and lane.caches.fits(routed_ids, bank.num_experts),
        )
        if path is Path.CACHED and lane.budget.cache_of(bank) is None:
            return Path.ROUTED
        if path is Path.ROUTED and not remaps and not self.counters.cached_calls:
            lane.budget.say_unused(bank)
        if path is Path.LOOKAHEAD and not lane.has_slots():
            return Path.PLAIN
        return path

    def check_not_ended(self) -> None:
        """Raise a RuntimeError if `stop` was called."""
        if self._closed:
            raise RuntimeError(f"These experts belong to a model whose prefetching has ended: {self.remedies.ended}")

    def _check_usable(self, bank: ExpertBank, *, capturing: bool, can_route: bool) -> None:
        self.check_not_ended()
        if capturing and not (can_route and self._lane_of[bank].can_be_captured(bank)):
            raise RuntimeError(
                f"A CUDA graph can't be captured over the experts of {bank.name}: that takes page-locked host memory, Triton, "
                f"and {self.remedies.captured}. {self.remedies.uncaptured}"
            )

    # -- reports and the end --------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What happened since the model was enabled, or since `reset`."""
        with self.lock:
            return make_report(self.config, self.store, self.counters, self._lane_of, self.remedies, resident=self.resident)

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record when each bank is copied, waited for and computed with, while the block runs.

        Raises:
            RuntimeError: a timeline is being recorded already.
        """
        timeline, rings = Timeline(), [lane.ring for lane in self._lanes]
        if any(ring.timeline is not None for ring in rings):
            raise RuntimeError("A timeline of this model is being recorded already: one block can't be inside another.")
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
            self.counters.reset()

    def begin_anew(self) -> None:
        """Forget what calls have shown about time and routing, and set the counters to zero: they were no calls of use."""
        with self.lock:
            self.is_new = False
            for lane in self._lanes:
                lane.begin_anew()
            self.counters.reset()

    def reserve(self) -> None:
        """Allocate slots and caches now, as far as there is room, and not at their first use: others may take what is left."""
        with self.lock:
            self.check_not_ended()
            for bank, lane in self._lane_of.items():
                lane.has_slots()
                if bank.layout.has_rows:
                    lane.budget.cache_of(bank)

    def can_be_captured(self, bank: ExpertBank) -> bool:
        """Whether CUDA graphs can be captured over a bank, by calls that show their ids."""
        return self._lane_of[bank].can_be_captured(bank)

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
            for lane in self._lanes:
                lane.settle()

    @contextmanager
    def in_compiled_code(self) -> Iterator[None]:
        """A call comes from compiled code: graphs that are captured meanwhile can't be replayed once the hooks are gone."""
        with self.lock:
            before, self._in_compiled_code = self._in_compiled_code, True
            try:
                yield
            finally:
                self._in_compiled_code = before

    @property
    def is_leased(self) -> bool:
        """Whether somebody has captured a CUDA graph that knows addresses of this scheduler's memory."""
        return self._is_leased

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream of one of the devices."""
        return any(lane.device.is_capturing() for lane in self._lanes)

    def runs_here(self) -> bool:
        """Whether the current thread is one that the scheduler has started."""
        return any(lane.staging.runs_here() for lane in self._lanes)

    def stop(self) -> None:
        """Wait for the last copy and kernel, and free the slots and caches. Idempotent; `acquire` raises from here on.

        Where somebody has captured a graph over them, that may be replayed at any time: then they stay until `close`.
        """
        with self.lock:
            if self._is_leased and not self._closed:
                self.store.keep_locked()
                held = self.store.ledger.held(Purpose.SLOTS) + self.store.ledger.held(Purpose.CACHES)
                warnings.warn(
                    "hf_prefetch: a CUDA graph was captured over this model's experts and can still be replayed, so "
                    f"{held / 2**20:,.0f} MiB on the device and the experts' page-locked memory stay as they are until the "
                    "model is deleted.",
                    stacklevel=2,
                )
            self._closed = True
            if not self._is_leased:
                self._free()
            for lane in self._lanes:
                # Graphs read page-locked memory only.
                lane.staging.close()

    def close(self) -> None:
        """`stop`, then end all page locks: what is left to do when the model is gone. Idempotent."""
        with self.lock:
            self._closed = True
            self._free()
            self.store.close()

    def _free(self) -> None:
        for lane in self._lanes:
            lane.close()
