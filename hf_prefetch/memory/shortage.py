"""Shortage: what is said where the system has no more host memory for weights."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..sizes import shown

__all__ = ["HostMemoryError", "memory_for"]

# How torch's allocator begins to say it; it raises a RuntimeError.
_TORCH = "DefaultCPUAllocator"


class HostMemoryError(MemoryError):
    """Says already what it was for."""


@contextmanager
def memory_for(what: str, remedy: str, nbytes: int | None = None) -> Iterator[None]:
    """Inside, host memory is taken for `what`.

    Args:
        remedy: a sentence.
        nbytes: how much, if that is known.

    Raises:
        MemoryError: the system has not so much.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, HostMemoryError) or not _is_shortage(error):
            raise
        size = "" if nbytes is None else f" ({shown(nbytes)})"
        raise HostMemoryError(f"There is no host memory for {what}{size}. {remedy}") from error


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _TORCH in str(error)
