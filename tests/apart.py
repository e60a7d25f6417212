"""Checks in a process of their own: Triton decides when it is imported whether it compiles or interprets."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["run_apart"]


def run_apart(program: str, *arguments: str, says: str, **environment: str) -> None:
    """Run a program, which must print what it says and nothing else."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout == f"{says}\n", result.stderr[-4000:]
