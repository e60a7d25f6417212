"""Routing: record which experts a model's tokens are routed to, or decide it for benchmarks and tests.

Both work through forward pre-hooks on the experts modules, ahead of anything that is done to their forward, so they work on
resident models, on those dispatched by accelerate, and with prefetching on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.hooks import RemovableHandle

from .banks.bank import ExpertBank
from .discovery import find_banks

__all__ = ["RoutingInjection", "RoutingTrace", "inject_routing", "record_routing"]

_FORMAT = "hf_prefetch.routing/1"

Change = Callable[[ExpertBank, torch.Tensor], torch.Tensor | None]


@dataclass
class RoutingTrace:
    """The expert ids that banks were called with.

    Attributes:
        model: class of the model.
        num_experts: of each bank, by its name (the path of its module), in the order of the model's banks.
        ids: of each bank, int32 on the CPU, (tokens, top-k): all its calls, one after another.
        calls: of each bank, how many tokens each call had: a prompt's, then 1 for each decoded token of one sequence.
    """

    model: str
    num_experts: dict[str, int]
    ids: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)

    @property
    def banks(self) -> tuple[str, ...]:
        """Names of the banks."""
        return tuple(self.num_experts)

    @property
    def top_k(self) -> dict[str, int]:
        """Ids a token, of each bank that was called."""
        return {name: ids.shape[1] for name, ids in self.ids.items()}

    def split(self, bank: str) -> tuple[torch.Tensor, ...]:
        """The ids of each call of a bank, (tokens of the call, top-k) each."""
        return torch.split(self.ids[bank], self.calls[bank])

    def stacked(self) -> torch.Tensor:
        """The ids of all banks as one int64 tensor, (banks, tokens, top-k).

        Raises:
            ValueError: the banks differ in tokens or top-k, or one was never called.
        """
        shapes = {name: tuple(self.ids[name].shape) if name in self.ids else None for name in self.banks}
        if len(set(shapes.values())) != 1 or None in shapes.values():
            raise ValueError(f"the banks did not see the same tokens, so their ids can't be stacked (tokens, top-k): {shapes}")
        return torch.stack([self.ids[name] for name in self.banks]).long()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: `NAME.ids` and `NAME.calls` of each bank, the rest in its metadata."""
        tensors = {f"{name}.ids": ids.contiguous() for name, ids in self.ids.items()}
        tensors |= {f"{name}.calls": torch.tensor(calls, dtype=torch.int64, device="cpu") for name, calls in self.calls.items()}
        metadata = {"format": _FORMAT, "model": self.model, "num_experts": json.dumps(self.num_experts)}
        # For whoever reads the header only; loading takes it from the shapes.
        metadata["top_k"] = json.dumps(self.top_k)
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read what `save` has written.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"{path} is no routing trace: its format is {metadata.get('format')!r}, not {_FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other iteration
        except SafetensorError as error:
            raise ValueError(f"{path} is no routing trace: {error}") from error
        trace = cls(metadata["model"], json.loads(metadata["num_experts"]))
        called = [name for name in trace.banks if f"{name}.ids" in tensors]
        trace.ids = {name: tensors[f"{name}.ids"] for name in called}
        trace.calls = {name: tensors[f"{name}.calls"].tolist() for name in called}
        return trace


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingTrace]:
    """Record the expert ids of every bank inside; the trace is filled when the context ends, exceptions included.

    Nothing is synchronised: ids are copied on their device, 4 bytes each, and fetched at the end. What a compiled forward or
    a replayed CUDA graph does can't be seen.

    Raises:
        ValueError: the model has no expert banks.
        RuntimeError: a forward inside is captured as a CUDA graph, or does not show its ids.
    """
    banks = find_banks(model).banks
    seen: dict[str, list[torch.Tensor]] = {bank.name: [] for bank in banks}

    def note(bank: ExpertBank, ids: torch.Tensor) -> None:
        if _capturing(ids):
            raise RuntimeError("a CUDA graph is being captured: its replays would not be recorded. Record an eager forward")
        # A copy of its own, also where the dtype is the same: the router's tensor may be reused.
        seen[bank.name].append(ids.detach().reshape(-1, ids.shape[-1]).to(torch.int32, copy=True))

    trace = RoutingTrace(type(model).__name__, {bank.name: bank.num_experts for bank in banks})
    handles = _hook(banks, note)
    try:
        yield trace
    finally:
        _remove(handles)
        for name, parts in seen.items():
            if parts:
                trace.calls[name] = [part.shape[0] for part in parts]
                trace.ids[name] = torch.cat([part.cpu() for part in parts])


class RoutingInjection:
    """Ids that come from a table, on the device: token after token, the same ones in eager forwards and in replayed graphs.

    A counter on the device says which token is next. A forward of T tokens takes the next T of each bank, and the table
    starts again behind its last token. The ids of all banks of a forward are gathered at once when its first bank is called
    (four small kernels), so the banks after it cost none. Warm up before a capture: the table is copied to a device when
    that device is first met.

    Attributes:
        table: int64 on the CPU, (banks, tokens, top-k).
    """

    def __init__(self, banks: Sequence[ExpertBank], table: torch.Tensor) -> None:
        self.table = _checked(banks, table)
        self._start = 0
        self._lanes: dict[torch.device, _Lane] = {}

    @property
    def tokens(self) -> int:
        """Length of the table."""
        return self.table.shape[1]

    def seek(self, token: int) -> None:
        """The next forward begins with this token of the table. It is enqueued, the host waits for nothing.

        Raises:
            ValueError: the table has no such token.
        """
        if not 0 <= token < self.tokens:
            raise ValueError(f"the table has tokens 0 to {self.tokens - 1}, not {token}")
        self._start = token
        for lane in self._lanes.values():
            lane.seek(token)

    def replace(self, bank: ExpertBank, ids: torch.Tensor) -> torch.Tensor:
        """What a call of `bank` gets instead of `ids`: the same shape, dtype and device.

        Raises:
            ValueError: the call's shape does not fit the table.
            RuntimeError: the device is met for the first time while a CUDA graph is captured.
        """
        tokens, top_k = ids.numel() // ids.shape[-1], ids.shape[-1]
        if top_k != self.table.shape[2]:
            raise ValueError(
                f"{bank.name} routes each token to {top_k} experts, but the table has {self.table.shape[2]} a token"
            )
        if tokens > self.tokens:
            raise ValueError(f"{bank.name} is called with {tokens} tokens, but the table has {self.tokens}")
        if ids.device not in self._lanes:
            if _capturing(ids):
                raise RuntimeError(
                    "run one forward before the CUDA graph is captured: the table of ids is not on the device yet"
                )
            self._lanes[ids.device] = _Lane(self.table, ids.device, self._start)
        return self._lanes[ids.device].take(bank.index, tokens).to(ids.dtype).view(ids.shape)


class _Lane:
    """The table on one device, with the counter of the banks that compute there."""

    def __init__(self, table: torch.Tensor, device: torch.device, start: int) -> None:
        # Ordinary tensors also if the first call runs under inference_mode: later ones may not, and write into them.
        with torch.inference_mode(False):
            self.table = table.to(device)
            self.next = torch.full((1,), start, dtype=torch.int64, device=device)
            self.offsets = torch.arange(table.shape[1], device=device)
        self.taken: set[int] = set()
        self.current = self.table[:, :0]

    def seek(self, token: int) -> None:
        with torch.inference_mode(False):
            self.next.fill_(token)
        self.taken.clear()
        self.current = self.table[:, :0]

    def take(self, bank: int, tokens: int) -> torch.Tensor:
        """The bank's ids of this forward. A forward begins where a bank comes again or the number of tokens changes."""
        if bank in self.taken or tokens != self.current.shape[1]:
            with torch.inference_mode(False):
                places = (self.next + self.offsets[:tokens]).remainder_(self.table.shape[1])
                self.current = self.table.index_select(1, places)
                self.next.add_(tokens)
            self.taken.clear()
        self.taken.add(bank)
        return self.current[bank]


@contextmanager
def inject_routing(
    model: nn.Module, source: RoutingTrace | torch.Tensor | Callable[[ExpertBank, torch.Tensor], torch.Tensor]
) -> Iterator[RoutingInjection | None]:
    """Inside, experts modules get other expert ids than the router's; the routing weights stay the router's.

    Args:
        model: resident, dispatched by accelerate, or with prefetching on.
        source: a recorded trace of the same banks; or a table of ids, (banks, tokens, top-k), in the order of `find_banks`;
            or a function that is given a bank and the router's ids and returns ids of the same shape, dtype and device. A
            function may hand out a tensor that its owner writes into between replays of a CUDA graph.

    Yields:
        The injection, whose `seek` chooses the next token of the table; None if `source` is a function.

    Raises:
        TypeError: the source is none of these.
        ValueError: the model has no expert banks, or the source does not fit them: here where that shows, else in the call.
        RuntimeError: a call does not show its ids.
    """
    banks = find_banks(model).banks
    if not isinstance(source, RoutingTrace | torch.Tensor) and not callable(source):
        raise TypeError(f"ids come from a RoutingTrace, a tensor or a function, not from a {type(source).__name__}")
    if isinstance(source, RoutingTrace):
        _check_names(banks, source)
        source = source.stacked()
    injection = RoutingInjection(banks, source) if isinstance(source, torch.Tensor) else None
    change: Change = injection.replace if injection is not None else _same_form(source)  # type: ignore[arg-type]
    handles = _hook(banks, change)
    try:
        yield injection
    finally:
        _remove(handles)


def _hook(banks: Sequence[ExpertBank], change: Change) -> list[RemovableHandle]:
    """Give `change` the ids of every call, and the call what it returns, unless that is None."""

    def before(bank: ExpertBank) -> Callable[..., tuple[Any, Any] | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            ids = bank.ids(args, kwargs)
            if ids is None:
                raise RuntimeError(f"a call of {bank.name} does not show its expert ids")
            changed = change(bank, ids)
            return None if changed is None else bank.with_ids(args, kwargs, changed)

        return hook

    return [
        module.register_forward_pre_hook(before(bank), with_kwargs=True, prepend=True)
        for bank in banks
        for module in bank.modules
    ]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _capturing(ids: torch.Tensor) -> bool:
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _same_form(function: Change) -> Change:
    def change(bank: ExpertBank, ids: torch.Tensor) -> torch.Tensor:
        changed = function(bank, ids)
        if not isinstance(changed, torch.Tensor):
            raise ValueError(f"the ids injected into {bank.name} are a {type(changed).__name__}, not a tensor")
        wrong = [form for form in ("shape", "dtype", "device") if getattr(changed, form) != getattr(ids, form)]
        if wrong:
            told = ", ".join(f"{form} {getattr(changed, form)} instead of {getattr(ids, form)}" for form in wrong)
            raise ValueError(f"the ids injected into {bank.name} have {told}")
        return changed

    return change


def _check_names(banks: Sequence[ExpertBank], trace: RoutingTrace) -> None:
    here = {bank.name: bank.num_experts for bank in banks}
    if here != trace.num_experts:
        differing = sorted(set(here.items()) ^ set(trace.num_experts.items()))
        raise ValueError(
            f"the trace is of other expert banks ({trace.model}, {len(trace.banks)} banks) than this model's {len(here)}; "
            f"in one but not in the other (name, experts): {', '.join(map(str, differing[:4]))}"
        )


def _checked(banks: Sequence[ExpertBank], table: torch.Tensor) -> torch.Tensor:
    """The table as int64 on the CPU, if it fits the banks."""
    if table.dim() != 3 or table.shape[0] != len(banks) or not table.numel():
        raise ValueError(f"ids must be (banks, tokens, top-k) for {len(banks)} banks, not {tuple(table.shape)}")
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise ValueError(f"ids must be integers, not {table.dtype}")
    table = table.detach().to("cpu", torch.int64)
    for bank, ids in zip(banks, table, strict=True):
        # The number of experts itself is what expert parallelism gives ids that live elsewhere.
        if ids.min() < 0 or ids.max() > bank.num_experts:
            raise ValueError(f"{bank.name} has {bank.num_experts} experts, but the ids are {ids.min()} to {ids.max()}")
    return table
