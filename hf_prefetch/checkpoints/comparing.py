"""What transformers would say of weights if they were loaded as those of a model: which it lacks, and which are left over."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..memory.checkpoint import StoredTensor
from ..memory.deferred import Deferred, NotDeferrableError
from ..memory.loading import Reader
from .deferring import DeferredStep

__all__ = ["unlike"]


def unlike(model: Any, tensors: Mapping[str, torch.Tensor], wanted: Collection[str]) -> tuple[set[str], set[str]]:
    """The names of weights that a model would lack, and of those that nothing in it would hold, if these were loaded for it.

    transformers' own loading says it, which may rename them and leave out what the model's class says it has no use for. No
    value is looked at, and nothing is read or written.

    Args:
        model: of transformers, on whatever device. It is left as it is.
        tensors: what would be loaded, by name.
        wanted: the names of the weights that the model has.
    """
    step = _Comparison(wanted)
    offered = {
        name: Deferred.stored(StoredTensor(Path(name), name, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes), _not_there)
        for name, tensor in tensors.items()
    }
    variant: Any = step.variant(type(model))
    try:
        with _silence():
            _, info = variant.from_pretrained(
                None, config=copy.deepcopy(model.config), state_dict=offered, output_loading_info=True
            )
    except _LackingError as error:
        return error.names, set()
    return set(info["missing_keys"]) & set(wanted), set(info["unexpected_keys"])


class _LackingError(Exception):
    def __init__(self, names: set[str]) -> None:
        super().__init__(sorted(names))
        self.names = names


class _Comparison(DeferredStep):
    """The step of transformers' loading with weights that are in no file. It ends where transformers would make up others."""

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(Reader(False), None, reads=False)
        self._wanted = wanted

    def _run(self, original: Any, model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        info, index = original(model, state_dict, files, load_config, *args, **kwargs)
        misfits = {name for name, *_ in info.mismatched_keys} | set(info.conversion_errors)
        lacking = (set(info.missing_keys) & set(self._wanted)) | misfits
        if lacking:
            raise _LackingError(lacking)
        return info, index


def _not_there(deferred: Deferred) -> torch.Tensor:
    raise NotDeferrableError("a weight that is only compared by name was to be read")


@contextmanager
def _silence() -> Iterator[None]:
    """transformers would warn of what is left over, which is what is asked here, and show a bar."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
