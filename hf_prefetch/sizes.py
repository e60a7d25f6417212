"""Sizes in bytes as people read them."""

from __future__ import annotations

__all__ = ["at_least", "shown"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def shown(nbytes: int) -> str:
    """`1.25 MiB`."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{max(nbytes, 0)} B"


def at_least(nbytes: int) -> str:
    """A size that can be given as an option and is no smaller: `2MiB`."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS[1:] if nbytes >= 4 * scale), ("KiB", 2**10))
    return f"{-(-nbytes // scale)}{unit}"
