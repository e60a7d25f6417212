"""Which way a call takes. Pure: it may be wrong about time, never about bytes."""

from __future__ import annotations

from enum import Enum

__all__ = ["LOOKAHEAD", "Path", "choose_path", "depth_in_acquire", "is_small"]

# Bank i+2 is copied while bank i computes.
LOOKAHEAD = 2


class Path(Enum):
    """LOOKAHEAD: whole banks are copied ahead of use. ROUTED: the experts that a call uses are copied, after the router.
    CACHED: those of them that are not in the bank's cache are. PLAIN: the whole bank is copied when it is needed.
    """

    LOOKAHEAD = "lookahead"
    ROUTED = "routed"
    CACHED = "cached"
    PLAIN = "plain"


def is_small(routed_ids: int | None, num_experts: int, gate: int) -> bool:
    """Whether a call has so few ids that many experts are unlikely to be used.

    Args:
        routed_ids: tokens x top-k of the call, or None where it is unknown, which counts as many.
        num_experts: experts in the bank.
        gate: routed ids per expert from which on nearly every expert is used, so that whole banks pay.
    """
    return routed_ids is not None and routed_ids < gate * num_experts


def choose_path(*, wants_rows: bool, can_look_ahead: bool, can_route: bool = False, can_cache: bool = False) -> Path:
    """The way of one call.

    Args:
        wants_rows: sending single experts after the router takes less time than whole banks ahead of use.
        can_look_ahead: the device can overlap and has its slots.
        can_route: the call shows its ids, and reads no other rows than those.
        can_cache: besides, the bank's cache has room for all of them, and the forward can be given other ids.
    """
    if can_route and wants_rows:
        return Path.CACHED if can_cache else Path.ROUTED
    return Path.LOOKAHEAD if can_look_ahead and not wants_rows else Path.PLAIN


def depth_in_acquire(slots: int, *, holds_host: bool) -> int:
    """How many banks ahead may be copied before the kernels of the current one are enqueued; `release` does the rest.

    While one slot is read, `slots - 1` are left. A copy that holds the host (from pageable memory, say) is put off
    until the kernels that it should run beside have been enqueued.
    """
    return 0 if holds_host else min(LOOKAHEAD, slots - 1)
