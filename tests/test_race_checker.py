"""RaceChecker: logs written by hand, and random ones against an oracle that knows no clocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefetch.testing import HOST, ByteRange, LogEntry, RaceChecker

A = (ByteRange("a", 0, 100),)


def write(stream: str, where: tuple[ByteRange, ...] = A) -> LogEntry:
    return LogEntry("copy" if stream == "copy" else "kernel", stream, writes=where, label="write")


def read(stream: str, where: tuple[ByteRange, ...] = A) -> LogEntry:
    return LogEntry("kernel", stream, reads=where, label="read")


def record(stream: str, event: int) -> LogEntry:
    return LogEntry("record", stream, event)


def wait(stream: str, event: int) -> LogEntry:
    return LogEntry("wait", stream, event)


def synchronize(event: int) -> LogEntry:
    return LogEntry("synchronize", HOST, event)


def kinds(log: Sequence[LogEntry]) -> list[str]:
    return [race.kind for race in RaceChecker().check(log)]


# -- what is ordered ----------------------------------------------------------------------------------------------


def test_one_stream_never_races_with_itself() -> None:
    assert kinds([write("copy"), read("copy"), write("copy")]) == []


def test_two_readers_need_no_order() -> None:
    assert kinds([read("compute"), read("copy"), read("compute")]) == []


def test_neighbouring_bytes_need_no_order() -> None:
    log = [write("copy", (ByteRange("a", 0, 50),)), read("compute", (ByteRange("a", 50, 100),))]
    assert kinds(log) == []
    assert kinds([*log, write("other", (ByteRange("b", 0, 100),))]) == []


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [(write, read, "read after write"), (read, write, "write after read"), (write, write, "write after write")],
)
def test_each_direction_needs_its_wait(first, second, kind) -> None:
    one, two = first("copy"), second("compute")
    assert kinds([one, record("copy", 1), wait("compute", 1), two]) == []
    assert kinds([one, record("copy", 1), two]) == [kind]
    assert kinds([one, record("copy", 1), wait("other", 1), two]) == [kind]


def test_waits_are_transitive() -> None:
    log = [write("x"), record("x", 1), wait("y", 1), record("y", 2), wait("z", 2), read("z")]
    assert kinds(log) == []
    assert kinds([entry for entry in log if entry.event != 1]) == ["read after write"]


def test_host_synchronisation_orders_what_is_enqueued_later_anywhere() -> None:
    log = [write("x"), record("x", 1), synchronize(1), read("y"), write("z")]
    assert kinds(log) == ["write after read"]  # y and z know of x, but not of one another
    assert kinds([*log[:2], read("y")]) == ["read after write"]


def test_host_writes_come_before_what_is_enqueued_later_but_not_after_what_is_enqueued_before() -> None:
    host_write = LogEntry("access", HOST, writes=A)
    assert kinds([host_write, read("copy")]) == []
    assert kinds([read("copy"), host_write]) == ["write after read"]
    assert kinds([read("copy"), record("copy", 1), synchronize(1), host_write]) == []


# -- waits that wait for nothing or for the wrong thing -----------------------------------------------------------


def test_wait_before_the_first_record_is_reported() -> None:
    log = [wait("compute", 7), write("copy"), record("copy", 7)]
    (race,) = RaceChecker().check(log)
    assert (race.kind, race.first, race.second, race.bytes) == ("unrecorded wait", None, 0, None)
    assert "event 7" in str(race)
    assert kinds([synchronize(7)]) == ["unrecorded wait"]


def test_record_that_nobody_waits_for_is_fine() -> None:
    assert kinds([write("copy"), record("copy", 1), record("copy", 1), record("compute", 2)]) == []


def test_stale_record_does_not_order_and_is_named() -> None:
    log = [write("copy"), record("copy", 1), wait("compute", 1), read("compute"), record("compute", 2)]
    log += [wait("copy", 2), write("copy"), wait("compute", 1), read("compute")]  # event 1 was not recorded again
    (race,) = RaceChecker().check(log)
    assert (race.kind, race.first, race.second) == ("read after write", 6, 8)
    assert "stale record" in str(race)
    assert "#1" in race.missing
    assert "#7" in race.missing


def test_wait_covers_the_latest_record_before_it() -> None:
    log = [record("copy", 1), write("copy"), record("copy", 1), wait("compute", 1), read("compute")]
    assert kinds(log) == []
    assert kinds([*log[:2], log[3], log[2], log[4]]) == ["read after write"]


# -- memory that comes and goes -----------------------------------------------------------------------------------


def test_recycled_memory_waits_for_its_allocating_stream() -> None:
    allocate = LogEntry("allocate", "compute", writes=A)
    assert kinds([allocate, write("copy")]) == ["write after write"]
    assert kinds([allocate, record("compute", 1), wait("copy", 1), write("copy")]) == []


def test_free_while_a_copy_is_in_flight() -> None:
    free = LogEntry("free", "compute", writes=A)
    assert kinds([write("copy"), free]) == ["write after write"]
    assert kinds([read("copy"), free]) == ["write after read"]
    assert kinds([write("copy"), record("copy", 1), wait("compute", 1), free]) == []
    assert kinds([write("copy"), record("copy", 1), synchronize(1), free]) == []


def test_use_after_free() -> None:
    free, allocate = LogEntry("free", "compute", writes=A), LogEntry("allocate", "compute", writes=A)
    assert kinds([free, read("compute"), write("compute")]) == ["use after free", "use after free"]
    assert kinds([free, allocate, read("compute")]) == []


def test_unregistering_needs_the_host_to_have_waited() -> None:
    unregister = LogEntry("unregister", HOST, writes=A)
    assert kinds([read("copy"), record("copy", 1), synchronize(1), unregister]) == []
    (race,) = RaceChecker().check([read("copy"), record("copy", 1), unregister])
    assert race.kind == "write after read"
    assert "the host synchronizing with event 1" in race.missing


# -- reports ------------------------------------------------------------------------------------------------------


def test_message_names_bytes_operations_streams_and_the_missing_wait() -> None:
    log = [
        write("copy", (ByteRange("slot 1", 0, 4096),)),
        record("copy", 5),
        read("compute", (ByteRange("slot 1", 64, 128),)),
    ]
    (race,) = RaceChecker().check(log)
    text = str(race)
    for part in ("read after write", "slot 1 bytes [64:128)", "#2 kernel", "#0 copy", "'compute' waiting for event 5"):
        assert part in text, text


def test_one_report_per_pair_over_all_their_bytes() -> None:
    rows = tuple(ByteRange("a", begin, begin + 10) for begin in range(0, 100, 20))
    (race,) = RaceChecker().check([write("copy", rows), read("compute")])
    assert race.bytes == ByteRange("a", 0, 90)


def test_limit_and_assert_clean() -> None:
    log = list(itertools.chain.from_iterable((write("copy"), read("compute")) for _ in range(50)))
    assert len(RaceChecker(limit=7).check(log)) == 7
    with pytest.raises(AssertionError, match=r"99 races in 100 operations"):
        RaceChecker().assert_clean(log)
    RaceChecker().assert_clean(log[:1])


def test_checks_are_independent() -> None:
    checker = RaceChecker()
    checker.check([write("copy")])
    assert checker.check([read("compute")]) == []


def test_long_logs_are_quick() -> None:
    log: list[LogEntry] = []
    for step in range(2500):
        slot = (ByteRange(f"slot {step % 3}", 0, 1000),)
        rows = tuple(ByteRange(f"slot {step % 3}", row, row + 10) for row in range(0, 1000, 100))
        log += [
            wait("copy", step % 3),
            write("copy", slot),
            record("copy", 10 + step % 3),
            wait("compute", 10 + step % 3),
        ]
        log += [read("compute", slot), read("compute", rows), read("compute", slot), record("compute", step % 3)]
    begin = time.perf_counter()
    races = RaceChecker().check(log)
    assert len(log) == 20_000
    assert {race.kind for race in races} == {"unrecorded wait"}
    assert len(races) == 3
    assert time.perf_counter() - begin < 10


# -- against an oracle --------------------------------------------------------------------------------------------


def oracle(log: Sequence[LogEntry]) -> int | None:
    """Where the first race is, by reachability in the graph of all orderings."""
    after: list[set[int]] = []  # per entry, all entries ordered before it
    latest: dict[int, int] = {}
    for index, entry in enumerate(log):
        parents = [i for i, other in enumerate(log[:index]) if other.stream in (entry.stream, HOST)]
        if entry.kind == "record":
            latest[entry.event or 0] = index
        elif entry.kind in ("wait", "synchronize") and (entry.event or 0) in latest:
            parents.append(latest[entry.event or 0])
        after.append(set(parents).union(*(after[parent] for parent in parents)))
        for i, other in enumerate(log[:index]):
            mine, theirs = (*entry.reads, *entry.writes), (*other.reads, *other.writes)
            conflicts = any(
                a.overlaps(b) and (a in entry.writes or b in other.writes) for a, b in itertools.product(mine, theirs)
            )
            if conflicts and i not in after[index]:
                return index
    return None


streams = st.sampled_from(["compute", "copy", "side"])
ranges = st.builds(
    lambda storage, begin, length: (ByteRange(storage, begin, begin + length),),
    st.sampled_from(["a", "b"]),
    st.integers(0, 5),
    st.integers(1, 4),
)
events = st.integers(1, 3)
entries = st.one_of(
    st.builds(read, streams, ranges),
    st.builds(write, streams, ranges),
    st.builds(lambda stream, to, of: LogEntry("kernel", stream, reads=of, writes=to), streams, ranges, ranges),
    st.builds(lambda where: LogEntry("access", HOST, writes=where), ranges),
    st.builds(record, streams, events),
    st.builds(wait, streams, events),
    st.builds(synchronize, events),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(entries, max_size=25))
def test_first_race_is_where_reachability_says(log: list[LogEntry]) -> None:
    races = [race for race in RaceChecker().check(log) if race.kind != "unrecorded wait"]
    assert (races[0].second if races else None) == oracle(log)
