"""Counters of prefetching beside vLLM's own, for Prometheus.

vLLM shows at /metrics what its API server's process has counted, and what all processes have if PROMETHEUS_MULTIPROC_DIR is set
before it starts: prefetching is done by workers, processes of their own. A CUDA graph that is replayed counts nothing.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from ...memory.ledger import Purpose
from ...scheduling.scheduler import PrefetchScheduler

__all__ = ["publish"]

_HELD = {
    "device": ("Device memory held for slots and caches", (Purpose.SLOTS, Purpose.CACHES)),
    "host": ("Host memory that holds experts", (Purpose.BANKS,)),
    "pinned": ("Page-locked part of the host memory that holds experts", (Purpose.PINNED,)),
}


def publish(scheduler: PrefetchScheduler) -> None:
    """Bring the process's metrics up to what a scheduler has counted. Takes microseconds; waits for nothing."""
    _metrics().update(scheduler)


@cache
def _metrics() -> _Metrics:
    # A registry is process-wide, and takes each name once.
    return _Metrics()


class _Metrics:
    """The metrics of one process, summed over its engines."""

    def __init__(self) -> None:
        # A dependency of vLLM's.
        from prometheus_client import Counter, Gauge

        self._calls = Counter("hf_prefetch_calls", "Calls of experts layers, by the way that experts took", ["path"])
        self._hits = Counter("hf_prefetch_lookahead_hits", "Calls whose experts had been sent before they were asked for")
        self._bytes = Counter("hf_prefetch_whole_banks_bytes", "Bytes sent to the device as whole layers' experts")
        self._fallbacks = Counter("hf_prefetch_fallbacks", "Failures after which a slower way was taken")
        self._held = {
            name: Gauge(f"hf_prefetch_{name}_bytes", told, multiprocess_mode="livesum") for name, (told, _) in _HELD.items()
        }
        self._published: weakref.WeakKeyDictionary[PrefetchScheduler, dict[str, int]] = weakref.WeakKeyDictionary()

    def update(self, scheduler: PrefetchScheduler) -> None:
        """Add what a scheduler has counted since it was here last."""
        counters = scheduler.counters
        ways = {"lookahead": counters.lookahead_calls, "routed": counters.routed_calls, "cached": counters.cached_calls}
        now = ways | {
            "plain": counters.calls - sum(ways.values()),
            "hits": counters.lookahead_hits,
            "bytes": counters.bytes_to_device,
            "fallbacks": counters.fallbacks,
        }
        before = self._published.get(scheduler, {})
        targets: dict[str, Any] = {path: self._calls.labels(path) for path in (*ways, "plain")}
        targets |= {"hits": self._hits, "bytes": self._bytes, "fallbacks": self._fallbacks}
        for name, value in now.items():
            known = before.get(name, 0)
            # Less than before: it was reset.
            targets[name].inc(value - known if value >= known else value)
        self._published[scheduler] = now
        ledgers = [known.store.ledger for known in self._published]
        for name, (_, purposes) in _HELD.items():
            self._held[name].set(sum(ledger.held(purpose) for ledger in ledgers for purpose in purposes))
