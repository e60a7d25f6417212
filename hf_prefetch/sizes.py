"""Sizes in bytes as people read and write them."""

from __future__ import annotations

import re

__all__ = ["at_least", "in_bytes", "shown"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
# What may be written behind a number, in letters of either case, since nobody gives memory in bits.
_WRITTEN = {
    f"{letter}{kind}": base**power for kind, base in (("b", 1000), ("ib", 1024)) for power, letter in enumerate("kmgt", 1)
} | {"b": 1}


def in_bytes(text: str) -> int:
    """The bytes of a size such as "20GiB", "1.5 gb" or "4096".

    Raises:
        ValueError, OverflowError: it is none, or more than a number can be.
    """
    written = text.strip().lower()
    unit = re.search(r"([kmgt]i?)?b$", written)
    return int(float(written[: unit.start()]) * _WRITTEN[unit[0]]) if unit else int(written)


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
