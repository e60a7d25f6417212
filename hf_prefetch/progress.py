"""A progress bar over bytes, where somebody would see one."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

__all__ = ["byte_progress"]


def byte_progress(total: int, what: str, show: bool | None) -> Any:
    """A tqdm bar of `total` bytes. `show=None`: in a terminal and in a notebook, not in a pipe or a log."""
    # A program without a console has no stderr at all.
    seen = sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())
    visible = seen if show is None else show and sys.stderr is not None
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not visible, leave=False)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    kernel = shell.get_ipython() if shell is not None else None
    return kernel is not None and "IPKernelApp" in kernel.config
