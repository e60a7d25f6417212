"""Which banks stay on the device and which live in host memory. Pure: sizes in, choices out."""

from __future__ import annotations

from collections.abc import Sequence

from ..sizes import shown

__all__ = ["NoRoomError", "cache_rows", "choose_file_banks", "choose_host_banks", "first_banks", "spread"]


class NoRoomError(ValueError):
    """A memory budget too small for even the slots."""


def first_banks(count: int, banks: int) -> list[int]:
    """The first `count` of `banks` banks, or all of them: what llama.cpp's --n-cpu-moe keeps on the host."""
    return list(range(min(count, banks)))


def cache_rows(row_sizes: Sequence[int], budget: int) -> int:
    """How many experts of each bank fit into `budget` bytes together, if each bank keeps as many.

    Args:
        row_sizes: bytes of one expert of each bank.
        budget: bytes.
    """
    return budget // sum(row_sizes) if row_sizes else 0


def spread(count: int, banks: int) -> list[int]:
    """`count` of `banks` positions, as evenly as they go, but never the first one unless all are taken.

    The copies of host-resident banks then run beside the resident layers between them, and the first copy beside the
    first layer.
    """
    if count == banks:
        return list(range(banks))
    return [1 + (2 * number + 1) * (banks - 1) // (2 * count) for number in range(count)]


def choose_file_banks(sizes: Sequence[int], budget: int) -> list[int]:
    """As few banks in files as a budget of host memory allows, as evenly between the others as they go.

    What is read for them can then take the time of the copies in between.

    Args:
        sizes: bytes of each bank, in the order in which they are called.
        budget: host memory for the others, in bytes.
    """
    for count in range(len(sizes)):
        chosen = spread(count, len(sizes))
        if sum(sizes) - sum(sizes[index] for index in chosen) <= budget:
            return chosen
    return list(range(len(sizes)))


def choose_host_banks(sizes: Sequence[int], budget: int, slots: int) -> list[int]:
    """As few banks in host memory as a budget allows; the others stay on the device.

    Args:
        sizes: bytes of each bank, in the order in which they are called.
        budget: device memory for resident banks and slots together, in bytes.
        slots: how many slots there will be, each as large as the largest host-resident bank; none if all banks fit.

    Raises:
        NoRoomError: not even the slots fit. The message gives the sizes.
    """
    for count in range(len(sizes) + 1):
        host = spread(count, len(sizes))
        resident = sum(sizes) - sum(sizes[index] for index in host)
        if resident + slots * max((sizes[index] for index in host), default=0) <= budget:
            return host
    needed = slots * max(sizes)
    raise NoRoomError(
        f"{shown(budget)} are left for experts, but {slots} slots of the largest layer's experts take {shown(needed)}"
    )
