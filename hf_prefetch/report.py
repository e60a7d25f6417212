"""Counters of what happened, and Report: the same as a frozen value that prints as a table."""

from __future__ import annotations

import html
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .device.rows import RowCounter
from .sizes import shown
from .streams import StreamDevice

__all__ = ["Counters", "Report"]

# Marks are read once their device has passed them; more than this many unread ones are looked through now and then.
_UNREAD_MARKS = 512


# Less than this share of the weights' bytes are held where they are packed; a bank is aligned, and so takes a little more.
_PACKED = 0.98
# Steps of decoding from which on it matters who makes them.
_MANY_STEPS = 32


@dataclass(frozen=True)
class Report:
    """What prefetching did. Prints as a table, in a notebook too.

    Attributes:
        slots: device buffers asked for, on each device.
        unpacks: whether one of them is left out, because calls unpack experts into as much memory.
        banks: expert banks that live in host memory, or in files, as `file_banks` of them do; `resident_banks` are those that
            stay on the device.
        devices: what they compute on.
        calls: calls of experts modules.
        idle_banks: banks that no call has asked for: of a part of the model that was not used, or of modules that are called
            past their forward, whose experts then are on the wrong device.
        lookahead_calls: those big enough for whole banks to be copied ahead.
        routed_calls: those small enough for only the experts in use to be copied.
        cached_calls: those that found their experts in the row caches, or brought them there.
        lookahead_hits: calls whose bank had been sent before it was asked for.
        copies: whole banks sent to the device.
        routed_rows: single experts sent to the device.
        unused_cache: whether a cache was asked for that some experts can't be read from.
        cache_hits: single experts that calls needed and found in the row caches.
        bytes_to_device: the bytes of both.
        unused_copies: banks that were sent ahead and never asked for.
        stall_seconds: time that the device stood still, waiting for experts.
        fallbacks: failures after which a slower way was taken. Choices between ways don't count.
        looks_ahead: whether banks can be sent ahead at all.
        device_bytes: device memory held for slots, and `cache_bytes` for row caches, of `cache_asked`.
        host_bytes: host memory held for banks, and `pinned_bytes` the page-locked part of it.
        file_bytes: bytes of banks that are kept in files.
        weight_bytes: bytes of those banks' weights, which is more where they are packed.
        unpacked_banks: those of which nothing is packed, though that was asked for.
        staging_bytes: host memory held for the chunks through which banks go that are not page-locked.
        staged_bytes: bytes that came through them, which took `staged_seconds` to get there, whatever else happened meanwhile.
        faster_steps: what takes Python out of decoding; None if nothing does.
    """

    slots: int
    unpacks: bool
    banks: int
    file_banks: int
    resident_banks: int
    devices: tuple[str, ...]
    calls: int
    idle_banks: int
    lookahead_calls: int
    routed_calls: int
    cached_calls: int
    lookahead_hits: int
    copies: int
    unused_copies: int
    routed_rows: int
    cache_hits: int
    bytes_to_device: int
    stall_seconds: float
    fallbacks: int
    looks_ahead: bool
    device_bytes: int
    cache_bytes: int
    cache_asked: int
    unused_cache: bool
    host_bytes: int
    pinned_bytes: int
    file_bytes: int
    unpacked_banks: int
    weight_bytes: int
    staging_bytes: int
    staged_bytes: int
    staged_seconds: float
    faster_steps: str | None

    @property
    def is_packed(self) -> bool:
        """Whether banks are held in less than the bytes of their weights."""
        return bool(self.host_bytes) and self.host_bytes + self.file_bytes < _PACKED * self.weight_bytes

    @property
    def hit_rate(self) -> float | None:
        """The share of single experts that were in the row caches when a call needed them; None if none was needed."""
        needed = self.cache_hits + self.routed_rows
        return self.cache_hits / needed if needed else None

    def rows(self) -> list[tuple[str, str, str]]:
        """What the table shows: name, value, and what it means."""
        plain = self.calls - self.lookahead_calls - self.routed_calls - self.cached_calls
        of_calls = f"of {self.lookahead_calls:,} calls of many tokens (prefill)"
        pinned = f"{self.pinned_bytes / self.host_bytes:.0%} of it page-locked" if self.host_bytes else "nothing held"
        if self.is_packed:
            pinned += f"; packed, {shown(self.weight_bytes)} of weights"
        if self.unpacked_banks:
            pinned += f"; {self.unpacked_banks:,} of {self.banks:,} banks are not packed"
        copies = f"{self.copies:,} whole banks ({self.unused_copies:,} unused) and single experts"
        ahead = "looks ahead" if self.looks_ahead else "does not look ahead: plain copies"
        cached = "no row cache: expert_cache= gives one" if self.banks else "nothing to cache"
        if self.cache_asked and self.banks:
            why = "needs batched_mm or grouped_mm experts" if self.unused_cache else "or too small for the experts of one token"
            cached = f"expert_cache is {shown(self.cache_asked)}: not used yet, {why}"
        if self.cache_bytes or self.cached_calls:
            cached = f"whose experts stay on the device: {shown(self.cache_bytes)} of caches"
        rate = f", {self.hit_rate:.0%} of those needed were there" if self.cache_hits and self.hit_rate else ""
        idle = f"; {self.idle_banks:,} were never called" if self.calls and self.idle_banks else ""
        held = f"{shown(self.device_bytes)} on the device"
        if self.unpacks:
            held += f" for {self.slots - 1}; the room of one is left to what calls unpack"
        where = "in host memory"
        if self.file_banks:
            in_memory = self.banks - self.file_banks
            where = f"{in_memory:,} in host memory and {self.file_banks:,} in files" if in_memory else "in files"
        if not self.devices:
            ahead = "nothing to prefetch: all experts stay on the device"
        return [
            ("device", ", ".join(self.devices) or "-", ahead),
            ("expert banks", f"{self.banks:,}", f"{where}, {self.resident_banks:,} more stay on the device{idle}"),
            ("slots", f"{self.slots}", held),
            ("host memory", shown(self.host_bytes), pinned),
            *self._file_rows(),
            ("lookahead hits", f"{self.lookahead_hits:,}", of_calls),
            ("routed calls", f"{self.routed_calls:,}", "of few tokens (decode), which sent the experts that they use"),
            ("cached calls", f"{self.cached_calls:,}", cached),
            ("single experts", f"{self.routed_rows:,}", f"sent for routed and cached calls{rate}"),
            *self._step_rows(),
            ("plain calls", f"{plain:,}", "whose whole bank was sent when it was needed"),
            ("sent to device", shown(self.bytes_to_device), copies),
            ("stall", f"{self.stall_seconds:.3f} s", "in which the device stood waiting for experts"),
            ("fallbacks", f"{self.fallbacks:,}", "failures answered by a slower way" if self.fallbacks else "nothing failed"),
        ]

    def _file_rows(self) -> list[tuple[str, str, str]]:
        rows = []
        if self.file_bytes:
            rows.append(("files", shown(self.file_bytes), "of experts are kept there, and read ahead of use"))
        if self.staged_bytes:
            rate = f", read at {self.staged_bytes / self.staged_seconds / 1e9:,.1f} GB/s" if self.staged_seconds else ""
            what = f"of chunks, by which {shown(self.staged_bytes)} went to the device{rate}"
            rows.append(("staging", shown(self.staging_bytes), what))
        return rows

    def _step_rows(self) -> list[tuple[str, str, str]]:
        # Graphs that are replayed make no calls.
        steps = (self.routed_calls + self.cached_calls) // max(self.banks, 1)
        if self.faster_steps is None or steps < _MANY_STEPS:
            return []
        return [("python steps", f"{steps:,}", f"such calls of all banks: {self.faster_steps}")]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning}" for name, value, meaning in rows]
        rule = "-" * max(map(len, lines))
        return "\n".join(["expert prefetch", rule, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:right'>{html.escape(value)}</td>"
            f"<td style='text-align:left'>{html.escape(meaning)}</td></tr>"
            for name, value, meaning in self.rows()
        )
        return f"<table><caption>expert prefetch</caption><tbody>{cells}</tbody></table>"


@dataclass
class Counters:
    """What the scheduler counts while it works."""

    calls: int = 0
    lookahead_calls: int = 0
    routed_calls: int = 0
    cached_calls: int = 0
    lookahead_hits: int = 0
    copies: int = 0
    bytes_to_device: int = 0
    fallbacks: int = 0
    shrunk: bool = False
    unused_cache: bool = False
    _called: set[int] = field(default_factory=set)
    _stalled: float = 0.0
    _sent_ahead: set[int] = field(default_factory=set)
    _unused: int = 0
    _rows: dict[int, tuple[int, RowCounter]] = field(default_factory=dict)
    _marks: deque[tuple[StreamDevice, Any, Any]] = field(default_factory=deque)

    def reset(self) -> None:
        """Begin at zero, but for what was sent ahead and not used yet."""
        fresh = Counters(shrunk=self.shrunk, unused_cache=self.unused_cache, _sent_ahead=self._sent_ahead, _rows=self._rows)
        for _, counter in self._rows.values():
            counter.reset()
        self.__dict__.update(fresh.__dict__)

    def count_copy(self, bank: int, nbytes: int, *, ahead: bool) -> None:
        """A bank was sent, ahead of use or because it is needed now."""
        self.copies += 1
        self.bytes_to_device += nbytes
        if ahead:
            self._unused += bank in self._sent_ahead
            self._sent_ahead.add(bank)

    def count_use(self, bank: int, *, in_slot: bool) -> None:
        """A bank is needed, and its bytes are in a slot or on their way, or not."""
        if bank in self._sent_ahead:
            self._sent_ahead.discard(bank)
            self.lookahead_hits += in_slot
            self._unused += not in_slot

    def rows_of(self, bank: int, row_nbytes: int, device: StreamDevice) -> RowCounter:
        """The counter of a bank's single rows, each of `row_nbytes` bytes, which go to this device."""
        if bank not in self._rows:
            self._rows[bank] = row_nbytes, RowCounter(device)
        return self._rows[bank][1]

    def count_call(self, bank: int, path: str, device: StreamDevice, begin: Any, end: Any) -> None:
        """A call of a bank's module took a path; between the two marks, if any, its stream could only wait for experts."""
        self.calls += 1
        self._called.add(bank)
        self.lookahead_calls += path == "lookahead"
        self.routed_calls += path == "routed"
        self.cached_calls += path == "cached"
        if begin is not None:
            self._marks.append((device, begin, end))
        if len(self._marks) > _UNREAD_MARKS:
            self._read_marks()

    def _read_marks(self) -> None:
        while self._marks:
            device, begin, end = self._marks[0]
            seconds = device.elapsed(begin, end)
            if seconds is None:
                return
            self._marks.popleft()
            self._stalled += seconds

    def report(self, banks: int, **state: Any) -> Report:
        """The counters so far, of so many banks, and the state of the scheduler given by name, as one value."""
        self._read_marks()
        rows = [(nbytes, *counter.totals()) for nbytes, counter in self._rows.values()]
        return Report(
            banks=banks,
            idle_banks=banks - len(self._called),
            calls=self.calls,
            lookahead_calls=self.lookahead_calls,
            routed_calls=self.routed_calls,
            lookahead_hits=self.lookahead_hits,
            copies=self.copies,
            unused_copies=self._unused,
            cached_calls=self.cached_calls,
            routed_rows=sum(sent for _, _, sent in rows),
            cache_hits=sum(needed - sent for _, needed, sent in rows),
            bytes_to_device=self.bytes_to_device + sum(nbytes * sent for nbytes, _, sent in rows),
            stall_seconds=self._stalled,
            fallbacks=self.fallbacks,
            unused_cache=self.unused_cache,
            **state,
        )
