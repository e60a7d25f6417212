"""Threads that read: results, errors, and an end after which nothing is written, whenever Ctrl-C comes."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_prefetch import workers as workers_module
from hf_prefetch.workers import Workers

ROUNDS = 400


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()
    assert not workers._alive


def test_every_result_is_noted_once(workers: Workers) -> None:
    """Of more tasks than are sent ahead, from several callers at once."""
    noted: list[list[int]] = [[], [], []]

    def call(number: int) -> None:
        workers.run((partial(int, number * 1000 + task) for task in range(200)), 8, noted[number].append)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for number in range(3):
        assert sorted(noted[number]) == [number * 1000 + task for task in range(200)]
    workers.run((), 8, noted[0].append)
    assert len(noted[0]) == 200


def test_nothing_runs_after_an_error(workers: Workers) -> None:
    """What was begun is waited for, what was not begun is left, and the next call works."""
    running, begun = [0], []

    def slowly(task: int) -> int:
        begun.append(task)
        running[0] += 1
        time.sleep(0.01)
        running[0] -= 1
        if task == 5:
            raise OSError(5, "the disk is gone")
        return task

    with pytest.raises(OSError, match="the disk is gone"):
        workers.run((partial(slowly, task) for task in range(100)), 16, lambda _: None)
    assert running == [0]
    count = len(begun)
    assert count < 40
    time.sleep(0.03)
    assert len(begun) == count
    results: list[int] = []
    workers.run((partial(int, task) for task in range(10)), 4, results.append)
    assert sorted(results) == list(range(10))


def test_the_error_of_whoever_makes_the_tasks_or_notes_results_comes_through(workers: Workers) -> None:
    def tasks() -> Iterator[partial[int]]:
        yield partial(int, 1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        workers.run(tasks(), 4, lambda _: None)
    with pytest.raises(ZeroDivisionError):
        workers.run([partial(int, 0)], 4, lambda result: 1 // result)


def test_a_map_keeps_the_order(workers: Workers) -> None:
    def slower_at_first(number: int) -> int:
        time.sleep(0.002 if number < 4 else 0)
        return number * number

    assert workers.map(slower_at_first, range(50)) == [number * number for number in range(50)]
    with pytest.raises(ZeroDivisionError):
        workers.map(lambda number: 1 // number, range(3))


def test_what_is_submitted_is_waited_for() -> None:
    """Also where nobody asks for its result."""
    done = []

    def slowly(number: int) -> int:
        time.sleep(0.02)
        done.append(number)
        return number

    with Workers(1) as workers:
        first, second = (workers.submit(partial(slowly, number)) for number in (1, 2))
        assert first() == 1
    assert done == [1, 2]
    assert second() == 2

    def break_off() -> None:
        with Workers(2) as workers:
            workers.submit(partial(slowly, 3))
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        break_off()
    assert done == [1, 2, 3]
    with Workers(1) as workers, pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0)()


@pytest.mark.parametrize("given", [1, 3])
def test_fewer_threads_do_the_same(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [workers_module.start_new_thread] * given

    def start(*args: Any) -> Any:
        if not left:
            raise RuntimeError("can't start new thread")
        return left.pop()(*args)

    monkeypatch.setattr(workers_module, "start_new_thread", start)
    with Workers(8) as workers:
        assert workers.map(lambda number: number + 1, range(100)) == [*range(1, 101)]
        assert workers.map(lambda number: number + 1, range(100)) == [*range(1, 101)]
        assert len(workers._alive) == given
    assert not workers._alive


def test_no_thread_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers_module, "start_new_thread", start)
    with Workers(8) as workers, pytest.raises(RuntimeError, match=r"no thread .*ulimit"):
        workers.map(str, range(3))


def test_it_ends_once() -> None:
    workers = Workers(2)
    workers.run([partial(int, 1)], 4, lambda _: None)
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="have ended"):
        workers.run([partial(int, 1)], 4, lambda _: None)


def _all_threads_end() -> None:
    """One that was just started may need a moment for it."""
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) == 1:
            return
        time.sleep(0.01)
    raise AssertionError("a thread is left")


def _interrupted_over_and_over() -> None:
    """In a child. At the end of each round nothing runs any more, and all threads are gone."""
    choose, status, interrupted = random.Random(3), 1, 0
    try:
        # A Ctrl-C that comes in a callback of the garbage collector is lost.
        gc.disable()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for _ in range(ROUNDS):
            running: set[int] = set()

            def write(task: int, running: set[int] = running) -> int:
                running.add(task)
                time.sleep(0.0002)
                running.discard(task)
                return task

            workers = Workers(8)
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.001, 0.01))
                try:
                    workers.run((partial(write, task) for task in range(20_000)), 32, lambda _: None)
                finally:
                    assert not running
            except KeyboardInterrupt:
                interrupted += 1
            workers.close()
            _all_threads_end()
        assert interrupted > 0.9 * ROUNDS, interrupted
        status = 0
    except BaseException:  # noqa: BLE001 - nobody is above this
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="forks, and reads /proc")
def test_an_interrupt_at_any_moment_ends_it() -> None:
    """See [Note: Ctrl-C and locks] in workers.py."""
    child = os.fork()
    if child == 0:
        _interrupted_over_and_over()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("it hangs")
