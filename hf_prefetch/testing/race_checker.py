"""RaceChecker: finds accesses that nothing orders, from the log of one run, whichever way that run happened to go.

[Note: vector clocks]
Every stream, and the host, counts what it does. Its clock says how much of every other stream's work is known to have
ended before whatever it does next. A record copies the clock of its stream into the event; a wait takes the event's
clock over into the waiting stream; a synchronize takes it over into the host. Whatever is enqueued comes after all
that the host knew by then. An access is ordered after an earlier one if the clock of its stream covers it. So one run
shows every missing wait, although the run itself may have come out right.

Records that nobody ever waits for are fine: they cost nothing and may serve a later use.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .log import HOST, ByteRange, LogEntry

__all__ = ["Race", "RaceChecker"]

RaceKind = Literal["read after write", "write after read", "write after write", "use after free", "unrecorded wait"]


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses without an order, or a wait that waits for nothing.

    Attributes:
        kind: what should have been ordered. Freeing and allocating count as writes.
        bytes: the bytes concerned; None for an unrecorded wait.
        first: number in the log of the earlier of the two; None for an unrecorded wait.
        second: number in the log of the later one.
        what: both operations in words.
        missing: what would put it right.
    """

    kind: RaceKind
    bytes: ByteRange | None
    first: int | None
    second: int
    what: str
    missing: str

    def __str__(self) -> str:
        where = f" on {self.bytes}" if self.bytes is not None else ""
        return f"{self.kind}{where}: {self.what}. {self.missing}"


class RaceChecker:
    """Checks logs; keeps nothing between two of them.

    Args:
        limit: stop after so many races. A program that lacks one wait may race in every layer.
    """

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit

    def check(self, log: Sequence[LogEntry]) -> list[Race]:
        """All races of a log that starts with the device's first operation, in the order of their later halves."""
        walk = _Walk(log)
        for index, entry in enumerate(log):
            walk.step(index, entry)
            if len(walk.races) >= self.limit:
                break
        return walk.races[: self.limit]

    def assert_clean(self, log: Sequence[LogEntry]) -> None:
        """The same for tests.

        Raises:
            AssertionError: there is a race; the message shows the first few.
        """
        races = self.check(log)
        if races:
            shown = "\n".join(f"  {race}" for race in races[:5])
            more = f"\n  and {len(races) - 5} more" if len(races) > 5 else ""
            raise AssertionError(f"{len(races)} races in {len(log)} operations:\n{shown}{more}")


class _Access(NamedTuple):
    """Entry `place` of the log, which was number `time` on its stream."""

    stream: str
    time: int
    place: int


class _Record(NamedTuple):
    """What an event stands for: the clock of its stream at entry `place` of the log."""

    clock: dict[str, int]
    stream: str
    place: int


@dataclass(slots=True)
class _Piece:
    """Bytes with one history: the last write, and of each stream the last read since."""

    begin: int
    end: int
    write: _Access | None = None
    reads: dict[str, _Access] = field(default_factory=dict)

    def cut(self, at: int) -> _Piece:
        """Keep what lies before `at` and return the rest."""
        rest = _Piece(at, self.end, self.write, dict(self.reads))
        self.end = at
        return rest


class _History:
    """What happened to the bytes of one storage."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []  # sorted, without overlaps; bytes never touched are in none
        self.freed: int | None = None

    def pieces(self, begin: int, end: int) -> list[_Piece]:
        """The pieces that make up a range, cut to fit and made where there are none."""
        start, stop = self._span(begin, end)
        found: list[_Piece] = []
        at = begin
        for piece in self._pieces[start:stop]:
            if at < piece.begin:
                found.append(_Piece(at, piece.begin))
            found.append(piece)
            at = piece.end
        if at < end:
            found.append(_Piece(at, end))
        self._pieces[start:stop] = found
        return found

    def merge(self, begin: int, end: int, write: _Access) -> None:
        """A write gives a range one history again."""
        start, stop = self._span(begin, end)
        self._pieces[start:stop] = [_Piece(begin, end, write)]

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        # Which pieces lie in a range, after those that cross its ends were cut there.
        for at in (begin, end):
            index = bisect.bisect_right(self._pieces, at, key=lambda piece: piece.begin) - 1
            if index >= 0 and self._pieces[index].begin < at < self._pieces[index].end:
                self._pieces.insert(index + 1, self._pieces[index].cut(at))
        start = bisect.bisect_left(self._pieces, begin, key=lambda piece: piece.begin)
        return start, bisect.bisect_left(self._pieces, end, key=lambda piece: piece.begin)


class _Walk:
    """One pass over one log."""

    def __init__(self, log: Sequence[LogEntry]) -> None:
        self.races: list[Race] = []
        self._log = log
        self._clocks: dict[str, dict[str, int]] = {HOST: {HOST: 0}}
        self._records: dict[int, _Record] = {}
        self._waits: dict[tuple[str, str], tuple[int, _Record]] = {}
        self._histories: dict[str, _History] = {}

    def step(self, index: int, entry: LogEntry) -> None:
        clock = self._clocks.setdefault(entry.stream, {})
        # Whatever is enqueued comes after all that the host knows.
        _join(clock, self._clocks[HOST])
        clock[entry.stream] = clock.get(entry.stream, 0) + 1
        if entry.kind == "record":
            assert entry.event is not None
            self._records[entry.event] = _Record(dict(clock), entry.stream, index)
        elif entry.kind in ("wait", "synchronize"):
            self._wait(index, entry, clock)
        access = _Access(entry.stream, clock[entry.stream], index)
        found: dict[tuple[RaceKind, int], list[ByteRange]] = {}
        for touched in entry.reads:
            self._read(touched, access, found)
        for touched in entry.writes:
            self._write(entry, touched, access, found)
        for (kind, first), ranges in found.items():
            self._report(kind, _hull(ranges), first, index)

    def _wait(self, index: int, entry: LogEntry, clock: dict[str, int]) -> None:
        record = None if entry.event is None else self._records.get(entry.event)
        if record is None:
            what = f"#{index} {entry} comes before any record of that event, so it waits for nothing"
            missing = f"Missing: a record of event {entry.event} before #{index}."
            self.races.append(Race("unrecorded wait", None, None, index, what, missing))
            return
        _join(clock, record.clock)
        self._waits[entry.stream, record.stream] = (index, record)

    def _read(self, touched: ByteRange, access: _Access, found: dict[tuple[RaceKind, int], list[ByteRange]]) -> None:
        history = self._histories.setdefault(touched.storage, _History())
        if history.freed is not None:
            found.setdefault(("use after free", history.freed), []).append(touched)
            return
        for piece in history.pieces(touched.begin, touched.end):
            where = ByteRange(touched.storage, piece.begin, piece.end)
            if piece.write is not None and not self._ordered(piece.write, access):
                found.setdefault(("read after write", piece.write.place), []).append(where)
            piece.reads[access.stream] = access

    def _write(
        self,
        entry: LogEntry,
        touched: ByteRange,
        access: _Access,
        found: dict[tuple[RaceKind, int], list[ByteRange]],
    ) -> None:
        history = self._histories.setdefault(touched.storage, _History())
        if entry.kind == "allocate":
            history.freed = None
        if history.freed is not None:
            found.setdefault(("use after free", history.freed), []).append(touched)
            return
        for piece in history.pieces(touched.begin, touched.end):
            where = ByteRange(touched.storage, piece.begin, piece.end)
            if piece.write is not None and not self._ordered(piece.write, access):
                found.setdefault(("write after write", piece.write.place), []).append(where)
            for read in piece.reads.values():
                if not self._ordered(read, access):
                    found.setdefault(("write after read", read.place), []).append(where)
        history.merge(touched.begin, touched.end, access)
        if entry.kind in ("free", "unregister"):
            history.freed = access.place

    def _ordered(self, first: _Access, second: _Access) -> bool:
        return self._clocks[second.stream].get(first.stream, 0) >= first.time

    def _report(self, kind: RaceKind, touched: ByteRange, first: int, second: int) -> None:
        one, two = self._log[first], self._log[second]
        if kind == "use after free":
            what = f"#{second} {two} touches what #{first} {one} gave back"
            self.races.append(Race(kind, touched, first, second, what, "Missing: an allocation in between."))
            return
        late, early = kind.split(" after ")
        done = {"read": "reads", "write": "writes"}
        what = f"nothing orders #{second} {two}, which {done[late]} it, after #{first} {one}, which {done[early]} it"
        self.races.append(Race(kind, touched, first, second, what, self._missing(first, second)))

    def _missing(self, first: int, second: int) -> str:
        source, target = self._log[first].stream, self._log[second].stream
        actor = "the host synchronizing" if target == HOST else f"{target!r} waiting"
        covering = [f"event {event}" for event, record in self._records.items() if self._covers(record, first)]
        of = f" with {covering[0]}" if covering and target == HOST else f" for {covering[0]}" if covering else ""
        if covering:
            text = f"Missing: {actor}{of}, or for another record on {source!r} after #{first}, before #{second}."
        else:
            text = f"Missing: a record on {source!r} after #{first}, and {actor} for it before #{second}."
        last = self._waits.get((target, source))
        if last is not None:
            wait, record = last
            text += f" The last wait of {target!r} for {source!r}, #{wait}, covers no more than record #{record.place}"
            text += ", which is too early: a stale record." if record.place < first else "."
        return text

    def _covers(self, record: _Record, first: int) -> bool:
        return record.stream == self._log[first].stream and record.place > first


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


def _hull(ranges: Iterable[ByteRange]) -> ByteRange:
    """One range around ranges of one storage."""
    listed = list(ranges)
    return ByteRange(listed[0].storage, min(r.begin for r in listed), max(r.end for r in listed))
