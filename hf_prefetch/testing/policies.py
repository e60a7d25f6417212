"""Policy: which of the operations that could run now do so, and when.

Each extreme alone misses a class of races. Eager copies early, so a missing *free* wait shows (the copy overwrites
what a kernel has still to read); lazy copies late, so a missing *ready* wait shows (the kernel reads what was there
before). Random and chosen policies find what lies between: torn copies, stale records, three streams at once.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .queues import Operation

__all__ = ["Chosen", "Eager", "Lazy", "Policy", "PolicyLike", "Seeded", "as_policy"]


class Policy(ABC):
    """Asked after each enqueue, and around each operation that the host computes itself."""

    @abstractmethod
    def choose(self, runnable: Sequence[Operation]) -> int | None:
        """The index of the operation to run next, or None to leave it at that. `runnable` is not empty."""

    def force(self, runnable: Sequence[Operation]) -> int:
        """The same when everything has to be run to its end and None is no answer."""
        choice = self.choose(runnable)
        return 0 if choice is None else choice


class Eager(Policy):
    """Every stream runs as far as it can, at once; only deferred kernels stay until somebody needs them.

    A kernel that ran at once would be done before the next copy could hurt it, and no missing wait would ever show.
    """

    def choose(self, runnable: Sequence[Operation]) -> int | None:
        return next((index for index, operation in enumerate(runnable) if not operation.deferred), None)


class Lazy(Policy):
    """Nothing runs until it is forced; then kernels go first and copies last."""

    def choose(self, runnable: Sequence[Operation]) -> int | None:
        return None

    def force(self, runnable: Sequence[Operation]) -> int:
        return next((index for index, operation in enumerate(runnable) if operation.kind != "copy"), 0)


class Seeded(Policy):
    """A random number of operations from random streams; the same seed makes the same choices.

    Args:
        source: a seed or a generator of its own.
    """

    def __init__(self, source: int | random.Random = 0) -> None:
        self._random = source if isinstance(source, random.Random) else random.Random(source)

    def choose(self, runnable: Sequence[Operation]) -> int | None:
        # One step costs one coin, so long runs are possible and stopping at once is the likeliest.
        return None if self._random.random() < 0.5 else self.force(runnable)

    def force(self, runnable: Sequence[Operation]) -> int:
        return self._random.randrange(len(runnable))


class Chosen(Policy):
    """Somebody else decides: a function of the runnable operations, a hypothesis strategy, a script.

    Args:
        chooser: gets the runnable operations as a list and returns an index into it, or None.

    Raises:
        IndexError: (when asked) the function named an operation that is not there.
    """

    def __init__(self, chooser: Callable[[list[Operation]], int | None]) -> None:
        self._chooser = chooser

    def choose(self, runnable: Sequence[Operation]) -> int | None:
        choice = self._chooser(list(runnable))
        if choice is not None and not 0 <= choice < len(runnable):
            raise IndexError(f"the policy chose operation {choice} of {len(runnable)} runnable ones.")
        return choice


PolicyLike: TypeAlias = "Policy | str | int | random.Random | Callable[[list[Operation]], int | None]"


def as_policy(policy: PolicyLike) -> Policy:
    """The `Policy` for what a caller wrote: "eager", "lazy", a seed, a generator, a function, or one ready-made.

    Raises:
        ValueError: a name that no policy has.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        named: dict[str, type[Policy]] = {"eager": Eager, "lazy": Lazy}
        if policy not in named:
            raise ValueError(f"policy={policy!r} is unknown: use 'eager', 'lazy', a seed, or a function.")
        return named[policy]()
    if isinstance(policy, (int, random.Random)):
        return Seeded(policy)
    return Chosen(policy)
