"""Kept: the banks that stay in files, because host memory has no room for them, and how each of them is read from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..banks.forms import is_plain
from ..config import PrefetchConfig
from ..memory.deferred import Recipe
from ..memory.disk import FileSource, OnDisk, extents_of
from ..memory.values import Load
from ..memory.written import check_folder, write_bank
from ..scheduling.residency import choose_file_banks

__all__ = ["IN_MEMORY", "Files", "Kept", "check_offloading"]


class Files(Protocol):
    """Which Parameters were not read yet."""

    def recipe(self, parameter: nn.Parameter) -> Recipe | None:
        """How to make one; None for those that hold their value."""

    def keep(self, parameter: nn.Parameter) -> None:
        """It stays in its files."""

    def wants_back(self) -> bool:
        """Whether it shall be read when it is given back."""


class _InMemory:
    """Every Parameter holds its value, but for those that accelerate keeps in files."""

    def recipe(self, parameter: nn.Parameter) -> Recipe | None:
        return getattr(parameter, "recipe", None) if isinstance(parameter, OnDisk) else None

    def keep(self, parameter: nn.Parameter) -> None:
        """There is nobody to tell."""

    def wants_back(self) -> bool:
        return True


IN_MEMORY = _InMemory()


def check_offloading(banks: Sequence[ExpertBank], config: PrefetchConfig, files: Files) -> None:
    """Refuse, before anything is touched, a budget for host memory that could only be kept with a folder to write to.

    Raises:
        ValueError: there is none.
        OSError: nothing can be written there.
    """
    for bank in _beyond(banks, config):
        if extents_of(bank.layout, {name: files.recipe(parameter) for name, parameter in bank.parameters.items()}) is None:
            if config.offload_folder is None:
                raise _no_folder(bank)
            check_folder(Path(config.offload_folder), bank.name, bank.nbytes)
            return


def _beyond(banks: Sequence[ExpertBank], config: PrefetchConfig) -> list[ExpertBank]:
    budget = config.host_budget
    return [] if budget is None else [banks[index] for index in choose_file_banks([bank.nbytes for bank in banks], budget)]


def _no_folder(bank: ExpertBank) -> ValueError:
    return ValueError(
        f"The experts of {bank.name} go beyond host_memory, and can't be read from a checkpoint as they are there (they are in "
        "memory already, or stored in another form or type, or with checksums; those of a model that is enabled anew are read "
        'into memory for it). Give offload_folder="...": a folder on a fast disk, to which they are written once; or load the '
        "model again, with hf_prefetch.from_pretrained(..., host_memory=...)."
    )


class Kept:
    """The banks beyond the budget for host memory.

    Args:
        banks: all that live in host memory or in files, in the order in which they are called.
        config: has the budget, and the folder for what can't be read as it lies in the checkpoint.
        load: writes a Parameter's value to where it goes.
        files: knows what was not read yet.
    """

    def __init__(self, banks: Sequence[ExpertBank], config: PrefetchConfig, load: Load, files: Files) -> None:
        self._folder = None if config.offload_folder is None else Path(config.offload_folder)
        self._load = load
        self._files = files
        self._banks = dict.fromkeys(_beyond(banks, config))
        self.wants_back = files.wants_back
        for bank in self._banks:
            if bank.has_packed:
                raise ValueError(
                    f"The experts of {bank.name} come from a packed checkpoint, and packed experts can't be kept in files, nor "
                    "unpacked (pack=False) without host memory: leave out host_memory, give more of it, or load the ordinary "
                    "checkpoint."
                )
            if not all(isinstance(parameter, nn.Parameter) and is_plain(parameter) for parameter in bank.parameters.values()):
                raise ValueError(
                    f"{bank.name} has quantized weights, which can't be kept in files: leave out host_memory or load "
                    "the model dequantized."
                )

    def __contains__(self, bank: ExpertBank) -> bool:
        return bank in self._banks

    def source(self, bank: ExpertBank) -> FileSource:
        """What reads a bank: from the checkpoint, if it lies there as it is, else from a file of its own that is written now.

        Raises:
            ValueError: it has to be written, and there is no folder for it.
        """
        recipes = {name: self._files.recipe(parameter) for name, parameter in bank.parameters.items()}
        extents = extents_of(bank.layout, recipes)
        if extents is None and self._folder is None:
            raise _no_folder(bank)
        if extents is not None:
            source = FileSource(extents)
        else:
            assert self._folder is not None
            source = write_bank(self._folder, bank.name, bank.layout, recipes, lambda block: self._fill(bank, block))
        for parameter in bank.parameters.values():
            self._files.keep(parameter)
        return source

    def _fill(self, bank: ExpertBank, block: torch.Tensor) -> None:
        for name, view in bank.layout.views(block).items():
            self._load(bank.parameters[name], view)
