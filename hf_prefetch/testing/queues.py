"""Queues: one FIFO of operations per stream, and the rules by which their heads may run.

[Note: what can run]
An operation waits for the ones before it on its own stream and, if it is a wait, for one record elsewhere. That
record is captured when the wait is enqueued, as CUDA does it: so every dependency points to something enqueued
earlier, and no sequence of enqueues can build a cycle. A cycle needs an operation that turns back to the host while
it runs (a kernel that synchronises with work behind itself); `DeadlockError` says so instead of hanging.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .log import ByteRange

if TYPE_CHECKING:
    from .policies import Policy

__all__ = ["DeadlockError", "FakeEvent", "FakeMark", "FakeStream", "Operation", "Queues", "quietly"]


class DeadlockError(RuntimeError):
    """Something is waited for that can only happen after the waiting has ended."""


class State(enum.Enum):
    """Where an operation stands; it only ever moves downwards in this list."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Operation:
    """One entry of a stream's queue.

    Attributes:
        kind: the `LogEntry.kind` that it belongs to. A copy has two operations: its first and its second half.
        stream: the queue it stands in.
        label: a few words for people.
        run: what it does; dropped once it has run, with all the memory that it holds on to.
        after: the record that a wait has captured; None for everything else, and for a wait without any record.
        deferred: a kernel given as a function: an eager policy leaves it until somebody needs it.
        reads, writes: what it touches.
    """

    kind: str
    stream: FakeStream
    label: str = ""
    run: Callable[[], None] | None = None
    after: Operation | None = None
    deferred: bool = False
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    state: State = State.PENDING

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def ready(self) -> bool:
        """Whether it could run now, given that it is the head of its queue."""
        return self.state is State.PENDING and (self.after is None or self.after.done)

    def __str__(self) -> str:
        return f"{self.kind}{f' ({self.label})' if self.label else ''} on {self.stream.name!r}"


@dataclass(eq=False, slots=True)
class FakeStream:
    """A queue of operations that run one after the other."""

    name: str
    queue: deque[Operation] = field(default_factory=deque)

    def __repr__(self) -> str:
        return f"FakeStream({self.name!r}, {len(self.queue)} pending)"


@dataclass(eq=False, slots=True)
class FakeEvent:
    """An event: its latest record, or None while it was never recorded."""

    id: int
    latest: Operation | None = None

    def __repr__(self) -> str:
        state = "never recorded" if self.latest is None else self.latest.state.value
        return f"FakeEvent({self.id}, {state})"


@dataclass(eq=False, slots=True)
class FakeMark:
    """A point in time on a stream, in seconds; None until the stream has got there."""

    time: float | None = None


class Queues:
    """All streams of one device.

    Args:
        policy: decides what runs when nobody forces anything.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steps = 0
        """How many operations have run: a clock without jitter."""
        self._streams: dict[str, FakeStream] = {}
        self._depth = 0
        self._thread = 0

    @property
    def running(self) -> bool:
        """Whether this thread is running an operation right now, so that what happens is its doing and not the program's."""
        return self._depth > 0 and self._thread == threading.get_ident()

    def stream(self, name: str) -> FakeStream:
        """The stream of that name, made on first use."""
        if name not in self._streams:
            self._streams[name] = FakeStream(name)
        return self._streams[name]

    def streams(self) -> list[FakeStream]:
        """All streams that were asked for."""
        return list(self._streams.values())

    def pending(self) -> Iterator[Operation]:
        """Everything that has not run to its end, stream by stream."""
        for stream in self._streams.values():
            yield from stream.queue

    def runnable(self) -> list[Operation]:
        """The heads that could run now."""
        return [stream.queue[0] for stream in self._streams.values() if stream.queue and stream.queue[0].ready]

    def enqueue(self, operation: Operation) -> None:
        """Append to the operation's stream, then give the policy its turn."""
        operation.stream.queue.append(operation)
        self.progress()

    def progress(self) -> None:
        """Let the policy run as much as it likes."""
        if self.running:
            return  # nothing starts on its own in the middle of an operation
        while candidates := self.runnable():
            choice = self.policy.choose(candidates)
            if choice is None:
                return
            self._run(candidates[choice])

    def run_until(self, target: Operation) -> None:
        """Run `target`, what stands before it, and what they wait for elsewhere; nothing else.

        Raises:
            DeadlockError: one of them waits for `target` in turn, or for an operation that is running now.
        """
        # A stack of our own: a lazy program of a few hundred layers would be too deep for Python's.
        wanted = [target]
        on_stack = {id(target)}
        while wanted:
            if wanted[-1].done:
                on_stack.discard(id(wanted.pop()))
                continue
            head = wanted[-1].stream.queue[0]
            if head.state is State.RUNNING:
                raise DeadlockError(self._explain(wanted, f"{head}, which is running and can't end before this call"))
            blocker = head.after
            if blocker is None or blocker.done:
                self._run(head)
            elif id(blocker) in on_stack:
                raise DeadlockError(self._explain(wanted, f"{blocker} again: a cycle"))
            else:
                wanted.append(blocker)
                on_stack.add(id(blocker))

    def drain(self, stream: FakeStream) -> None:
        """Run `stream` to its end, and elsewhere only what it waits for."""
        if stream.queue:
            self.run_until(stream.queue[-1])

    def finish(self) -> None:
        """Run everything, in an order that the policy chooses.

        Raises:
            DeadlockError: operations are left and none of them can run.
        """
        while any(stream.queue for stream in self._streams.values()):
            candidates = self.runnable()
            if not candidates:
                heads = [str(stream.queue[0]) for stream in self._streams.values() if stream.queue]
                raise DeadlockError(f"none of the streams can go on: {'; '.join(heads)}")
            self._run(candidates[self.policy.force(candidates)])

    def _run(self, operation: Operation) -> None:
        operation.state = State.RUNNING
        self._thread = threading.get_ident()
        self._depth += 1
        try:
            if operation.run is not None:
                operation.run()
        finally:
            # Also when it failed: an operation must not run twice. The error reaches whoever forced it.
            self._depth -= 1
            self.steps += 1
            operation.state = State.DONE
            operation.run = operation.after = None
            operation.stream.queue.popleft()

    @staticmethod
    def _explain(wanted: list[Operation], last: str) -> str:
        chain = [str(operation) for operation in wanted]
        shown = chain if len(chain) <= 8 else [*chain[:4], f"... {len(chain) - 8} more ...", *chain[-4:]]
        return f"deadlock: waiting for {', which waits for '.join([*shown, last])}"


def quietly(function: Callable[[], object], inference: bool = False) -> Callable[[], None]:
    """`function` under the modes of its launch, not of whoever happens to force it."""

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            function()

    return run
