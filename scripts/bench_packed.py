"""What packing costs on the device, and what it has to come to: measured, and held against bounds."""

from __future__ import annotations

from typing import Any

import torch

from bench_passes import timed

__all__ = ["PACKED", "packed_figures", "unpacking"]

# What is asked of a packed arm, beside the bounds that it shares with the others.
PACKED = {
    "packed, prefill / all weights over the link": 0.80,
    "packed, prefill / raw where it computes longer": 1.0,
    "packed, host RAM after enabling / raw weights": 0.80,
    "packed, enabling / enabling raw": 1.5,
    "packed, unpacking a bank / its copy": 0.08,
}
# Times that a bank is unpacked in one measurement, and measurements.
_TIMES, _REPEATS = 8, 5

Json = dict[str, Any]


def unpacking(scheduler: Any, device: torch.device) -> Json | None:
    """Seconds in which the largest bank is copied to the device and unpacked there, alone; None if no bank is packed.

    `copy` is of all of it from where it lies in host memory; `unpack` is what a call of a whole bank enqueues.
    """
    packed = [bank for bank in scheduler.banks if bank.has_packed]
    if not packed:
        return None
    bank = max(packed, key=lambda bank: bank.nbytes)
    block = scheduler.store[bank].block
    there = torch.empty(block.numel(), dtype=torch.uint8, device=device)
    tensors: Any = bank.layout.views(there)

    def unpack() -> None:
        for _ in range(_TIMES):
            bank.dressed(tensors)

    def copy() -> None:
        there.copy_(block, non_blocking=True)

    found = {}
    for name, action, times in (("copy", copy, 1), ("unpack", unpack, _TIMES)):
        timed(device, action)
        found[name] = [timed(device, action)[0] / times for _ in range(_REPEATS)]
    return {"bytes": bank.nbytes, "weight_bytes": bank.weight_nbytes, **found}


def packed_figures(arm: Json, raw: Json | None) -> dict[str, float]:
    """A packed arm's figures that don't depend on a prompt, by the names of their bounds.

    Args:
        arm: its results.
        raw: those of the arm that is the same but for packing, in the same run; None if there is none.
    """
    enter, found = arm.get("enter") or {}, {}
    if enter.get("experts_host_bytes"):
        ratio = enter["experts_host_bytes"]["after"] / enter["host_weight_bytes"]
        found["packed, host RAM after enabling / raw weights"] = ratio
    raw_seconds = ((raw or {}).get("enter") or {}).get("seconds")
    if raw_seconds and enter.get("seconds"):
        found["packed, enabling / enabling raw"] = enter["seconds"] / raw_seconds
    if enter.get("unpacking"):
        # The best of each: what disturbs a measurement makes it longer.
        found["packed, unpacking a bank / its copy"] = min(enter["unpacking"]["unpack"]) / min(enter["unpacking"]["copy"])
    return found
