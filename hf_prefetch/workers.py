"""Workers: threads that run tasks for a caller whom Ctrl-C may interrupt at any moment.

[Note: Ctrl-C and locks]
Python raises KeyboardInterrupt in the main thread between any two of its instructions, and so inside of what `threading` and
`concurrent.futures` lock with, which is written in Python. Such a lock is then taken, nobody is there to give it back, and the
next thread that needs it waits for ever: of 600 interrupts of a `concurrent.futures.wait` over 32 futures three ended so. Here
the main thread uses nothing but locks and queues that are written in C, whose calls are done or not begun, and starts threads
by `_thread`, since `threading.Thread.start` waits for the thread with such a lock. For the same reason several locks are held
by `holding`: a context that is written in Python, as `contextlib`'s are, can be interrupted while nobody knows that it has one.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Workers", "holding"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def holding(locks: Sequence[AbstractContextManager[Any]], work: Callable[[], Result]) -> Result:
    """Do some work with all of these locks, taken in their order and given back whatever happens."""
    if not locks:
        return work()
    with locks[0]:
        return holding(locks[1:], work)


@dataclass(eq=False)
class _Batch:
    """Tasks that belong together, and what those came to that have ended: a result, or an error."""

    is_cancelled: bool = False
    ended: SimpleQueue[tuple[Any, BaseException | None]] = field(default_factory=SimpleQueue)

    def next_result(self) -> Any:
        """Of the next one that ends. Raises its error."""
        result, error = self.ended.get()
        if error is not None:
            try:
                raise error
            finally:
                # It refers to this frame, and so to whatever the tasks write to.
                del error
        return result


@dataclass(eq=False)
class _Task:
    """Holds `lock` while it runs, and doesn't begin once its batch is cancelled."""

    run: Callable[[], Any]
    batch: _Batch
    lock: threading.Lock = field(default_factory=threading.Lock)


class Workers:
    """Threads, started when they are first needed. Use it as a context: at the end nothing runs any more.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._alive: set[int] = set()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._gone: SimpleQueue[None] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = 0
        self._is_closed = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, tasks: Iterable[Callable[[], Result]], ahead: int, note: Callable[[Result], object]) -> None:
        """Run tasks, `ahead` of them at once or waiting, and `note` what each returns. At the end, whatever it is, none runs.

        Raises:
            Exception: what a task has raised; those after it are left.
            RuntimeError: the threads have ended.
        """
        self._start()
        batch, waiting = _Batch(), iter(tasks)
        sent: list[_Task] = []
        open_tasks = 0
        try:
            while True:
                while open_tasks < ahead and (run := next(waiting, None)) is not None:
                    sent.append(_Task(run, batch))
                    self._tasks.put(sent[-1])
                    open_tasks += 1
                if not open_tasks:
                    return
                result = batch.next_result()
                open_tasks -= 1
                note(result)
        finally:
            batch.is_cancelled = True
            for task in sent:
                with task.lock:
                    pass

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """What a function returns for each item, in their order. Raises as `run` does."""
        results: dict[int, Result] = {}

        def numbered(number: int, item: Item) -> tuple[int, Result]:
            return number, function(item)

        def note(result: tuple[int, Result]) -> None:
            results[result[0]] = result[1]

        self.run((partial(numbered, number, item) for number, item in enumerate(items)), 4 * self._count, note)
        return [results[number] for number in range(len(results))]

    def submit(self, task: Callable[[], Result]) -> Callable[[], Result]:
        """Have a task run. Returns a function that waits for it, once, and returns or raises what it does.

        Raises:
            RuntimeError: the threads have ended.
        """
        self._start()
        batch = _Batch()
        self._tasks.put(_Task(task, batch))
        return batch.next_result

    def close(self) -> None:
        """Wait for what was submitted, and end the threads. Idempotent."""
        self._is_closed = True
        self._tasks.put(None)
        while self._alive:
            self._gone.get()

    def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError("These threads have ended: nothing can be read or written by them any more.")
        with self._starting:
            while self._started < self._count:
                try:
                    start_new_thread(self._work, ())
                except RuntimeError as error:
                    if not self._started:
                        raise RuntimeError(
                            "There is no thread to read, write or copy weights with. Raise the limit on them (ulimit -u, "
                            "a container's) or on memory (ulimit -v)."
                        ) from error
                    # Those that are there do the same, slower.
                    self._count = self._started
                    return
                self._begun.get()
                self._started += 1

    def _work(self) -> None:
        me = threading.get_ident()
        self._alive.add(me)
        self._begun.put(None)
        while (task := self._tasks.get()) is not None:
            result, error = None, None
            with task.lock:
                if not task.batch.is_cancelled:
                    try:
                        result = task.run()
                    except BaseException as caught:  # noqa: BLE001 - it is raised where the batch is waited for
                        error = caught
            task.batch.ended.put((result, error))
            # Nothing of it may be kept until there is another one.
            del task, result, error
        # For the next one: there may be more than were counted, if an interrupt came in a start.
        self._tasks.put(None)
        self._alive.discard(me)
        self._gone.put(None)
