"""What is enabled on a model: remembered there, found again, and told from what other models have enabled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from torch import nn

from ..banks.bank import ExpertBank
from ..hooks import detach, hook_of
from ..memory.disk import OnDisk, replace_parameter
from ..ops import schedulers
from ..scheduling.scheduler import PrefetchScheduler
from ..workers import holding
from .guards import unguard
from .packed import unpack_bank
from .undo import Undo

__all__ = ["Enabled", "between_calls", "enabled_on", "forget", "free_orphans", "refuse_foreign", "remember"]

# There is no scheduler where a model could not be enabled, and what had been done by then not be undone.
Enabled = list[tuple[PrefetchScheduler | None, Undo]]

Result = TypeVar("Result")

# Where an enabled model keeps the way back, and whose it is.
_UNDO = "_expert_prefetch_undo"


def remember(model: nn.Module, scheduler: PrefetchScheduler | None, undo: Undo) -> None:
    """What is enabled on a model, and how to undo it."""
    known = {} if scheduler is None else {"expert_prefetch": scheduler}
    model.__dict__.update({**known, _UNDO: (scheduler, undo)})


def forget(model: nn.Module, guarded: Iterable[nn.Module]) -> None:
    """The model is not enabled any more, and nothing guards it and what were its modules. Idempotent."""
    unguard(guarded)
    for name in ("expert_prefetch", _UNDO):
        model.__dict__.pop(name, None)


def _enabled(model: nn.Module) -> Enabled:
    """What is enabled on a model or on parts of it, and how to undo it."""
    return [module.__dict__[_UNDO] for module in model.modules() if _UNDO in module.__dict__]


def enabled_on(model: nn.Module) -> Enabled:
    """What is enabled on a model, for whoever is going to change that.

    Raises:
        RuntimeError: called from inside a forward of its experts.
    """
    enabled = _enabled(model)
    if any(scheduler.is_in_a_call() for scheduler in _schedulers(enabled)):
        raise RuntimeError(
            "Prefetching can't be disabled or enabled anew from inside a forward of the model's experts. Do it when that has "
            "returned."
        )
    return enabled


def _schedulers(enabled: Enabled) -> list[PrefetchScheduler]:
    return [scheduler for scheduler, _ in enabled if scheduler is not None]


def between_calls(model: nn.Module, work: Callable[[Enabled], Result]) -> Result:
    """Do some work with the same, while no call of the model's experts is under way."""
    enabled = enabled_on(model)
    return holding([scheduler.lock for scheduler in _schedulers(enabled)], lambda: work(enabled))


def free_orphans(model: nn.Module) -> None:
    """Parts of an enabled model that outlive it have hooks whose scheduler has ended: they are of no use to anybody. Their
    weights get back into memory as they are: what was packed is unpacked, and what is in files is read."""
    orphans = {module: hook for module in model.modules() if (hook := hook_of(module)) is not None and hook.scheduler.has_ended}
    for module, hook in orphans.items():
        for parameter in hook.bank.parameters.values():
            if isinstance(parameter, OnDisk):
                replace_parameter(parameter, parameter.read())
        unpack_bank(hook.bank)
        detach(module)
    if orphans:
        unguard(model.modules())


def refuse_foreign(model: nn.Module, banks: Collection[ExpertBank]) -> None:
    """Refuse what is prefetched through another object: that would send the old memory of its Parameters."""
    own = _schedulers(_enabled(model))
    others = [scheduler for scheduler in schedulers() if scheduler not in own and not scheduler.has_ended]
    theirs = {id(parameter) for scheduler in others for bank in scheduler.banks for parameter in bank.parameters.values()}
    for bank in banks:
        hooks = [hook for module in bank.modules if (hook := hook_of(module)) is not None]
        shares = any(id(parameter) in theirs for parameter in bank.parameters.values())
        if shares or any(hook.scheduler in others for hook in hooks):
            raise ValueError(
                f"The experts in {bank.name or 'this module'} are already prefetched through another object that holds the "
                f"same {'Parameters' if not hooks else 'modules'}. Call disable_expert_prefetch on that one first."
            )
