"""Whether packing experts pays on a device. Pure: rates in, a choice out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rates", "packing_pays"]

# What packing has to save of the time on the link: less is within what a measurement varies by.
_WORTH_IT = 0.05
# Bytes of normally distributed weights after packing, as a share of those before.
_SHARE = 0.755


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        link: bytes that are copied to it from the host memory that experts lie in.
        unpack: bytes of weights that come out of the kernel that unpacks them.
    """

    link: float
    unpack: float


def packing_pays(rates: Rates) -> bool:
    """Whether packed weights are there sooner, if they are unpacked after they have come and not meanwhile."""
    raw = 1 / rates.link
    return _SHARE * raw + 1 / rates.unpack <= (1 - _WORTH_IT) * raw
