"""ExpertPrefetchHook: points an experts module's parameters at the device for one call, and back again.

An accelerate ModelHook, so that the ecosystem finds it where it looks (`module._hf_hook`). Its work is not in
`pre_forward` and `post_forward`, though: accelerate skips `post_forward` when the forward raises, and what must be
restored then are the module's own weights. `init_hook` wraps the original forward instead, and `detach_hook` unwraps it.
Others may detach and attach the hook again (`add_hook_to_module(append=True)` does); that neither allocates nor frees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import send_to_device
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .banks.bank import ExpertBank
from .banks.forms import can_open, parts_of
from .calls.guarded import GuardedRows, Present
from .calls.remains import kept_views, versions
from .calls.tracing import opaque, traceable
from .discovery import implementation_of, is_decorated, reads_only_routed_rows, takes_other_ids
from .ops import check_not_transformed, refuse_export, refuse_trace
from .scheduling.scheduler import PrefetchScheduler

__all__ = ["ExpertPrefetchHook", "all_or_nothing", "announce", "attach", "detach", "flatten", "hook_of", "put_on"]

# Set on a wrapped forward: what it wraps, and for whom.
_ORIGINAL = "_hf_prefetch_original"
_OWNER = "_hf_prefetch_owner"
# Calls of a module after which it is looked at whether it keeps views of its weights.
_LOOKED_AT = frozenset((1, 2, 4, 8, 16, 32, 64))
# What accelerate keeps on a module that has a hook.
_ACCELERATE = ("_hf_hook", "_old_forward", "forward")


class ExpertPrefetchHook(ModelHook):  # type: ignore[misc]
    """Runs a bank's modules on tensors that the scheduler hands out."""

    def __init__(self, scheduler: PrefetchScheduler, bank: ExpertBank, device: torch.device) -> None:
        self.scheduler = scheduler
        self.bank = bank
        self.device = device
        self._renumbered = False
        # Whether calls of few tokens may get guarded rows, and whether one has worked: see `guarded`.
        self._guards = bank.ids_argument is not None and bank.layout.has_rows and bank.is_plain
        owns = not any("." in name for name in bank.parameters)
        self._guards &= owns
        # An adapter puts the weights inside it aside for each call and back again, which counts as writing.
        self._counts_writes = owns
        self._is_proven = False
        self._guard: Present | None = None
        # What the call that is to show it was given, to be called with once more.
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls = 0
        self._refused: str | None = None

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Wrap the forward that accelerate has just put aside."""
        original: Callable[..., Any] = module.__dict__["_old_forward"]
        wrapped = traceable(self, module, original)
        setattr(wrapped, _ORIGINAL, original)
        setattr(wrapped, _OWNER, self)
        module.__dict__["_old_forward"] = wrapped
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Unwrap it."""
        wrapped = module.__dict__["_old_forward"]
        module.__dict__["_old_forward"] = getattr(wrapped, _ORIGINAL, wrapped)
        return module

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a bank's module: its own forward, on tensors of the device."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            refuse_trace()
        check_not_transformed()
        first = next(iter(args or kwargs.values()), None)
        if isinstance(first, torch.Tensor) and first.device != self.device:
            args, kwargs = send_to_device(args, self.device), send_to_device(kwargs, self.device)
        with self.scheduler.lock:
            # Chosen by the call before it came here: by now the module may be another scheduler's.
            self.scheduler.check_not_ended()
            self._check_weights(module)
            if self._refused is not None:
                raise RuntimeError(self._refused)
            inputs = _tensors(args, kwargs)
            before = versions(inputs)
            try:
                try:
                    return self._attempt(module, forward, args, kwargs)
                except torch.OutOfMemoryError:
                    # If it has changed nothing that it was given, it can be called again.
                    if versions(inputs) != before or not self.scheduler.give_up_cache(self.bank):
                        raise
                except Exception:
                    # It may want memory that can be looked at.
                    if self._guard is None or self._is_proven or self._refused is not None:
                        raise
                    self._guards = False
                    with torch.no_grad():
                        for value, given in self._given:
                            if not torch.equal(value, given):
                                value.copy_(given)
                return self._attempt(module, forward, args, kwargs)
            finally:
                # Nothing that a call has made outlives it: see [Note: pools of memory].
                self._guard, self._given = None, []

    def _attempt(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        restored, self._guard = False, None
        try:
            try:
                count, rows, remaps, guards = self.reads(module, forward, args, kwargs)
                handout = self.scheduler.acquire(self.bank, count, rows, remaps=remaps)
                lent = handout.tensors
                tensors = self._guarded(lent, rows) if guards else lent
                if self._guard is not None and not self._is_proven:
                    self._given = [(value, value.detach().clone()) for value in _tensors(args, kwargs)]
                if handout.ids is not None:
                    args, kwargs = self.bank.with_ids(args, kwargs, handout.ids)
                    self._renumbered = True
                    self.renumber(module, handout.rows)
                parts = lent if self.bank.is_plain else parts_of(lent)
                before = versions(parts.values())
                self.bank.point(module, tensors)
                try:
                    output = self._forward(module, forward, args, kwargs)
                finally:
                    self._check_untouched(module, tensors, parts, before)
                if self._guard is not None:
                    self._guards, self._is_proven = not self._guard.is_whole, True
            except BaseException:
                self.scheduler.break_off()
                raise
            finally:
                self._restore(module)
                restored = True
        finally:
            # Once more, for an interrupt that came before or in the middle of the one above (invariant 4).
            if not restored:
                self._restore(module)
        self._calls += 1
        if self._calls in _LOOKED_AT:
            self._check_kept(module, parts.values())
        return output

    def _guarded(self, tensors: dict[str, nn.Parameter], ids: torch.Tensor | None) -> dict[str, nn.Parameter]:
        """The same, so that it shows which rows are read, if not all of them are there."""
        if ids is None or not self.scheduler.lacks_rows(self.bank):
            return tensors
        self._guard = guard = Present(ids, self.bank.num_experts, lambda: self.scheduler.complete(self.bank))
        return {name: cast(nn.Parameter, GuardedRows(tensor.detach(), guard)) for name, tensor in tensors.items()}

    def _restore(self, module: nn.Module) -> None:
        """Point the module at the host again and let the slot go. Idempotent."""
        self.bank.point(module, self.bank.parameters)
        if self._renumbered:
            self.renumber(module, self.bank.num_experts)
            self._renumbered = False
        self.scheduler.release(self.bank)

    def reads(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int | None, torch.Tensor | None, bool, bool]:
        """What a call reads of its bank, as `PrefetchScheduler.acquire` takes it: `routed_ids`, `ids` and `remaps`.

        And whether it has to show that it reads no other rows than those of the ids.
        """
        ids, implementation = self.bank.ids(args, kwargs), implementation_of(module)
        rows = ids if reads_only_routed_rows(module, forward, implementation) else None
        guards = self._guards and rows is None and not is_decorated(module) and not self.scheduler.is_capturing()
        count = None if ids is None else ids.numel()
        remaps = rows is not None and takes_other_ids(module, implementation, self.bank)
        return count, ids if guards else rows, remaps, guards

    def renumber(self, module: nn.Module, rows: int) -> None:
        """Tell a module how many rows its tensors have. Idempotent."""
        module.__dict__["num_experts"] = rows

    def _check_weights(self, module: nn.Module) -> None:
        """What is sent to the device is what the store holds: weights that live elsewhere by now would be ignored."""
        for name in self.bank.replaced(module) or self.scheduler.store.strays(self.bank):
            if torch.compiler.is_exporting():
                refuse_export()
            raise RuntimeError(
                f"{self.bank.name}.{name} was replaced after expert prefetching was enabled (a new Parameter or .data, "
                "load_state_dict(assign=True), a parametrization, a dispatch), or is replaced for this call (an adapter "
                "that was added since, torch.export, functional_call), so the device would get the old weights. "
                "Call disable_expert_prefetch(model), replace it or add the adapter, and enable it again. "
                "Writing into them (load_state_dict, copy_) works at any time."
            )

    def _check_untouched(
        self, module: nn.Module, tensors: dict[str, nn.Parameter], parts: Mapping[str, torch.Tensor], before: list[int]
    ) -> None:
        """A forward that has changed its weights, or put others in their place, will want to find them so at its next call."""
        for name in self.bank.replaced(module, tensors):
            self._refuse(f"has replaced its own weight {name}", "keeps weights in a form of its own")
        after = versions(parts.values()) if self._counts_writes else before
        if after != before:
            name = next(name for name, old, new in zip(parts, before, after, strict=True) if old != new)
            self._refuse(f"has written into its own weight {name}", "changes weights once and for all")

    def _check_kept(self, module: nn.Module, lent: Iterable[torch.Tensor]) -> None:
        """A forward that keeps views of its weights for its next call would find another layer's there.

        Most make them in their first call, and others soon after. A look takes a millisecond or so.
        """
        for name in kept_views(module, (*lent, *self.scheduler.buffers(self.bank))):
            self._refuse(
                f"keeps a view of its weights in the attribute {name}", "makes it at its first call and reads it later"
            )

    def _refuse(self, what: str, how: str) -> NoReturn:
        """This call and those that follow: what was done is not undone by a forward that does it once."""
        self._refused = (
            f"The forward of {self.bank.name} {what}, as an experts implementation does that {how}. Such experts can't be "
            f"prefetched: {self.scheduler.remedies.kernel}"
        )
        self.scheduler.break_off()
        raise RuntimeError(self._refused)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A slot is refilled long before a backward could read it, so no graph may be built over it.
        with torch.no_grad():
            output = forward(*args, **kwargs)
        inputs = _tensors(args, kwargs)
        # Not only what travels: adapters, or a router in the block that was hooked, would silently get no gradient.
        own = (*self.bank.parameters.values(), *module.parameters())
        watched = [value for value in (*inputs, *own) if value.requires_grad]
        # Whatever a graph holds on to can't be unpacked again.
        watched = [
            nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")) if can_open(value) else value for value in watched
        ]
        if not watched:
            return output
        refuse = functools.partial(_RefuseBackward.apply, self.bank.name)
        return pytree.tree_map_only(torch.Tensor, lambda each: refuse([each], *watched), output)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Those among the arguments of a call."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


class _RefuseBackward(torch.autograd.Function):
    """Identity whose gradient is an error: silence would mean wrong gradients."""

    @staticmethod
    def forward(ctx: Any, name: str, output: list[torch.Tensor], *watched: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        # In a list it is no input, and what is given out no view of one: some blocks write into it.
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"Backward reached the experts of {ctx.name}, which are prefetched: their weights have left the device since the "
            "forward, so there is no gradient through them. Call disable_expert_prefetch(model) before training, or run the "
            "forward under torch.no_grad()."
        )


def announce(scheduler: PrefetchScheduler, first: ExpertBank, handles: list[RemovableHandle]) -> None:
    """Tell the scheduler when a pass begins, if its first layer keeps its experts on the device and so has no hook.

    Host-resident layers behind it are then on their way before they are reached. What undoes it is put into `handles`.
    """
    if not scheduler.banks or first in scheduler.banks:
        return

    @opaque
    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with scheduler.lock:
            if not scheduler.has_ended:
                ids = first.ids(args, kwargs)
                scheduler.begin_pass(None if ids is None else ids.numel())

    def begins_untraced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Compiled code goes without: it costs the first layers some time, and a break of the graph would cost more.
        if not torch.compiler.is_compiling():
            begins(args, kwargs)

    handles.extend(module.register_forward_pre_hook(begins_untraced, with_kwargs=True) for module in first.modules)


def attach(module: nn.Module, hook: ExpertPrefetchHook) -> None:
    """Put the hook on a module, or leave it as it is if there is an error or an interrupt.

    Raises:
        ValueError: the module's experts are prefetched already, through another model object.
    """
    if hook_of(module) is not None:
        raise ValueError(
            f"The experts in {hook.bank.name} are already prefetched through another object that holds the same modules. "
            "Call disable_expert_prefetch on that one first."
        )
    with all_or_nothing(module):
        put_on(module, [hook])


@contextmanager
def all_or_nothing(module: nn.Module) -> Iterator[None]:
    """Leave a module's hooks as they are if there is an error or an interrupt while they are changed."""
    before = {name: module.__dict__[name] for name in _ACCELERATE if name in module.__dict__}
    try:
        yield
    except BaseException:
        for name in _ACCELERATE:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)
        raise


def hook_of(module: nn.Module) -> ExpertPrefetchHook | None:
    """Our hook on a module: alone, chained with others, or below one that replaced it."""
    for place in ("_old_forward", "forward"):
        owner = getattr(module.__dict__.get(place), _OWNER, None)
        if owner is not None:
            return owner  # type: ignore[no-any-return]
    return None


def detach(module: nn.Module) -> None:
    """Take our hook off, whatever others have done to the module since, and leave theirs in place. Idempotent."""
    if hook_of(module) is None:
        return
    others = [hook for hook in flatten(module.__dict__.get("_hf_hook")) if not isinstance(hook, ExpertPrefetchHook)]
    with all_or_nothing(module):
        remove_hook_from_module(module)
        module.forward = getattr(module.forward, _ORIGINAL, module.forward)
        if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
            del module.forward
        put_on(module, others)


def put_on(module: nn.Module, hooks: Iterable[ModelHook]) -> None:
    """Add hooks to a module, after those that it has."""
    for hook in hooks:
        add_hook_to_module(module, hook, append=True)


def flatten(hook: ModelHook | None) -> list[ModelHook]:
    """A hook as the list of hooks that it chains, in the order in which they run."""
    if isinstance(hook, SequentialHook):
        return [inner for outer in hook.hooks for inner in flatten(outer)]
    return [] if hook is None else [hook]
