"""The staging ring holds the host where it must: each wait of its threads, and for them, is removed in turn and is missed.

What the device waits for, and what waits for the device, is in test_mutations.py.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
import time
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_prefetch.device import staging
from hf_prefetch.device.chunks import Upload
from hf_prefetch.testing import FakeDevice, FakeEvent
from test_mutations import MUTATED, SOURCES, SlowDevice

SOURCE = SOURCES["staging"]
# A read takes so many seconds: longer than whatever does not wait for it.
SLOWLY = 0.05
CHUNK, READ = 256, 64


def holds(node: ast.AST) -> bool:
    """A statement that waits for a thread, or for what it reads."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in ("wait", "wait_for", "result", "join", "shutdown") and "is_stopping" not in ast.unparse(node)


# Not the one that sleeps until there is something to do: without it a thread would look all the time, and nothing else.
LINES = [node.lineno for node in ast.walk(ast.parse(SOURCE)) if holds(node)]


def without(line: int | None) -> Any:
    """The module without the statement in a line."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if holds(node) and node.lineno == line else node

    module: Any = types.ModuleType(MUTATED)
    module.__package__ = staging.__package__
    sys.modules[MUTATED] = module
    try:
        exec(compile(Remove().visit(ast.parse(SOURCE)), f"without line {line}", "exec"), module.__dict__)
    finally:
        del sys.modules[MUTATED]
    module._READ_NBYTES = READ
    return module


class Stored:
    """A bank whose bytes take their time."""

    is_on_disk, is_pinned = True, False

    def __init__(self, nbytes: int, fails: tuple[int, ...] = ()) -> None:
        self.bank = SimpleNamespace(nbytes=nbytes, name="a bank")
        self.reading = 0
        self._fails = fails
        self._lock = threading.Lock()

    def read(self, begin: int, destination: torch.Tensor) -> None:
        """Some of them; those from the wrong places can't be read."""
        if begin in self._fails:
            raise OSError(5, "the disk is gone")
        self._count(1)
        time.sleep(SLOWLY)
        destination.fill_(7)
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.reading += more


def begun(module: Any, device: FakeDevice, stored: Stored, rings: list[Any]) -> tuple[Any, Any]:
    """A ring, which is added to `rings`, and an upload that is sent through it."""
    ring = module.StagingRing(device, stored.bank.nbytes)
    rings.append(ring)
    upload = Upload(stored, device.allocate(stored.bank.nbytes), device.new_event())
    ring.send(upload)
    return ring, upload


def wait_until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.001)
    raise TimeoutError


class Lost(FakeDevice):
    """Can't be waited for by any thread but the main one."""

    def synchronize(self, event: FakeEvent) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is lost")
        super().synchronize(event)


def check(module: Any, rings: list[Any]) -> None:
    """Nothing reads any more, and no thread is left, when the ring says so."""
    # One of a chunk's reads fails while others are under way.
    stored = Stored(CHUNK, fails=(0,))
    ring, upload = begun(module, FakeDevice(), stored, rings)
    with pytest.raises(OSError, match="the disk is gone"):
        ring.wait(upload)
    assert stored.reading == 0
    ring.close()
    # The thread itself fails, at the first chunk that it uses again, while another one is read.
    stored = Stored(4 * CHUNK)
    ring, upload = begun(module, Lost(), stored, rings)
    with pytest.raises(RuntimeError, match="the device is lost"):
        ring.wait(upload)
    assert stored.reading == 0
    ring.close()
    # Nobody wants it any more.
    stored = Stored(4 * CHUNK)
    ring, upload = begun(module, FakeDevice(), stored, rings)
    wait_until(lambda: stored.reading > 0)
    ring.cancel(upload)
    ring.synchronize(upload)
    assert stored.reading == 0
    ring.close()
    # It is closed while its thread enqueues a copy.
    device = SlowDevice("eager")
    device.delay = 4 * SLOWLY
    ring, upload = begun(module, device, Stored(CHUNK), rings)
    assert device.begins.wait(10)
    # Kept, since its threads end with it.
    pool = ring._pool
    threads = [ring._thread, *pool._threads]
    ring.close()
    try:
        assert not any(thread.is_alive() for thread in threads)
        assert (device.pageable_copies, device.registered_bytes) == (0, 0)
    finally:
        threads[0].join()


def test_there_are_lines_to_remove() -> None:
    assert len(LINES) == 6


@pytest.mark.parametrize("line", [None, *LINES], ids=lambda line: line and SOURCE.splitlines()[line - 1].strip())
def test_a_missing_wait_is_noticed(line: int | None) -> None:
    """With all of them everything is right."""
    rings: list[Any] = []
    expected = pytest.raises((AssertionError, pytest.fail.Exception)) if line else contextlib.nullcontext()
    try:
        with expected:
            check(without(line), rings)
    finally:
        for ring in rings:
            # With all of its waits: where one was missed, a ring is still open.
            staging.StagingRing.close(ring)


def test_of_two_threads_one_works_and_both_end() -> None:
    """As there are after an interrupt between a thread's start and the moment at which it is known to have started."""
    device, stored = FakeDevice(), Stored(4 * CHUNK)
    ring, upload = begun(staging, device, stored, [])
    ring.wait(upload)
    first, ring._thread = ring._thread, None
    upload = Upload(stored, device.allocate(stored.bank.nbytes), device.new_event())
    ring.send(upload)
    ring.wait(upload)
    assert ring._thread is not first
    device.finish()
    assert upload.destination.eq(7).all()
    ring.close()
    first.join(10)
    assert not first.is_alive()
