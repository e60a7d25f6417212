"""The threads of staging rings that are at work: a test that leaves some behind is the one that is told, and no other."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

# Seconds that threads have to end, whose ring was collected and didn't wait for them.
PATIENCE = 5

_left_by_others: WeakSet[threading.Thread] = WeakSet()


def staging_threads() -> list[threading.Thread]:
    """Those that were started since the current test began."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hf_prefetch_staging")]
    return [thread for thread in threads if thread not in _left_by_others]


@contextmanager
def all_end() -> Iterator[None]:
    """Whatever is done inside, its threads end with it.

    Raises:
        AssertionError: some are left. They aren't counted any more: what comes next begins without any.
    """
    yield
    if not staging_threads():
        return
    gc.collect()
    end = time.monotonic() + PATIENCE
    while staging_threads() and time.monotonic() < end:
        time.sleep(0.01)
    left = staging_threads()
    _left_by_others.update(left)
    assert not left, f"left behind: {sorted(thread.name for thread in left)}"
