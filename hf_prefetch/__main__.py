"""The command, from its first moment on: `hf-prefetch`, or `python -m hf_prefetch`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

__all__ = ["main"]

# What ends the command, and what Python does about it by itself.
_ENDINGS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def main() -> int:
    """Run the command with the process's arguments and return its exit code."""
    ours = {number: before for number, before in _ENDINGS.items() if signal.getsignal(number) is before}
    for number in ours:
        signal.signal(number, _stop)
    # It takes seconds. Nothing is there yet that would have to be tidied up.
    from .cli import main as run

    for number, before in ours.items():
        signal.signal(number, before)
    return run()


def _stop(number: int, _: object) -> None:
    """End at once: a library that is being imported may make some other error of an interrupt."""
    with suppress(OSError):
        os.write(2, b"hf-prefetch: stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
