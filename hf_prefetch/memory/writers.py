"""Who writes to a folder: one at a time, among processes and among the threads of one."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

__all__ = ["hold", "is_at"]

try:
    import fcntl
except ImportError:  # Windows has no such thing
    fcntl = None  # type: ignore[assignment]

# How often a folder is looked at again that was removed between two looks.
_TRIES = 8


def hold(folder: Path) -> ExitStack:
    """Make a folder, if it is not there, and hold it until what is returned is closed, or the process ends in any way.

    Where the system can't lock folders nothing is held.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: it can't be made.
    """
    for tries_left in reversed(range(_TRIES)):
        folder.mkdir(parents=True, exist_ok=True)
        held = ExitStack()
        if fcntl is None:
            break
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held.close()
            raise BlockingIOError(
                f"Another process, or another thread of this one, is writing to {folder}. Wait until it has ended, or give "
                "another folder."
            ) from error
        except FileNotFoundError:
            continue
        except OSError:  # some file systems that are shared over a network
            break
        # A child that was forked meanwhile has the descriptor as well, and may outlive the writing.
        held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        if is_at(descriptor, folder) or not tries_left:
            break
        held.close()
    return held


def is_at(descriptor: int, folder: Path) -> bool:
    """Whether it is this folder, or file, that was opened: somebody else may have removed it before it was held."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
