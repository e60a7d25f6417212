"""LayerHook: runs a `RoutedExperts` layer on tensors that the scheduler hands out, as ExpertPrefetchHook does a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...hooks import ExpertPrefetchHook
from .banks import LayerBank
from .tiles import tiles_of_all_rows

__all__ = ["LayerHook"]


class LayerHook(ExpertPrefetchHook):
    """The same calls as those of the other floor: only how a call shows its experts, and what is renumbered, is vLLM's own."""

    bank: LayerBank
    # Of the weights' bytes, see `StoredBank.version`.
    _version: tuple[int, ...] | None = None

    def forward(self, layer: Any, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a layer.

        Args:
            layer: of the bank.
            original: vLLM's own forward.
            arguments: of `RoutedExperts.forward_modular`, by name.
        """

        def forward(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **others: Any) -> Any:
            with tiles_of_all_rows(layer, x, topk_ids):
                return original(x=x, topk_weights=topk_weights, topk_ids=topk_ids, **others)

        others = dict(arguments)
        positional = (others.pop("x"), others.pop("topk_weights"), others.pop("topk_ids"))
        return self.run(layer, forward, *positional, **others)

    def reads(
        self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int | None, torch.Tensor | None, bool, bool]:
        """All kernels that are let through read the routed rows alone, and need not show it."""
        ids, local = self.bank.ids(args, kwargs), module.expert_map
        assert ids is not None, "a modular kernel is given ids"
        # With expert parallelism ids are global, and this worker has a part of the experts; -1 stands for the others.
        rows = (ids if local is None else local[ids.long()]).long()
        return ids.numel(), rows, self.bank.takes_other_ids, False

    def renumber(self, module: nn.Module, rows: int) -> None:
        """Nothing to tell: ids below the number of rows are good ids, and kernels ask the weights how many they have."""

    def _check_weights(self, module: nn.Module) -> None:
        for name in self.bank.replaced(module) or self.scheduler.store.strays(self.bank):
            raise RuntimeError(
                f"{self.bank.name}.{name} was replaced after its experts had gone to host memory (reload_weights, a weight "
                "transfer), so the device would get the old weights. Weights of an engine with hf_prefetch can't be reloaded: "
                "make a new one."
            )
        version = self.scheduler.store[self.bank].version
        self._version = self._version or version
        if version != self._version:
            # Calls see that, and replayed graphs do not.
            raise RuntimeError(
                f"Weights of {self.bank.name} were written to after its experts had gone to host memory (reload_weights, a "
                "weight transfer). Weights of an engine with hf_prefetch can't be reloaded: make a new one."
            )
