"""Rows of cells as lines of text, each column as wide as its widest cell."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns"]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for the head and one for each row."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
