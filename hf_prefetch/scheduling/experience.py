"""Experience: what earlier calls have shown about time, for choosing the way of the next one. Pure: numbers in, numbers out.

Calls are told apart by how many ids they have, in steps of a factor of 1.4. What is not known yet is guessed: rates from what
links and kernels usually do to each other, and the share of the experts that a call uses from published routing.

[Note: the share of the experts that a call uses]
Real routing is far from even: a prompt of 384 tokens uses half of 128 experts where an even one would use all. A call of `n`
ids over `E` experts is taken to use 1 - exp(-c * sqrt(n / E)) of them, with c = 0.35 before anything was seen; that runs
through the middle of what is published. Once calls were seen c follows the ones nearest in size.

[Note: the best of late]
What disturbs a measurement makes it longer: other copies, a kernel's first launch. So of times and rates the best is kept, and
forgotten slowly, in case the machine has become slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Experience"]

# Kernels that read page-locked memory reach this share of what copies reach, until both were measured.
_GATHER_SHARE = 0.9
_CURVE = 0.35
# What a new observation of the experts in use counts beside those before it.
_WEIGHT = 0.3
# How fast the best of late is forgotten, see the note above.
_FORGET = 1.05


def _bucket(ids: int) -> int:
    return round(2 * math.log2(max(ids, 1)))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


@dataclass
class Experience:
    """What was seen on one device.

    Attributes:
        copy_rate: bytes a second of whole banks, None before one was measured.
        gather_rate: bytes a second of single experts.
    """

    copy_rate: float | None = None
    gather_rate: float | None = None
    _shares: dict[int, float] = field(default_factory=dict)
    _kernels: dict[int, float] = field(default_factory=dict)

    def saw_copy(self, nbytes: int, seconds: float) -> None:
        """A whole bank of `nbytes` bytes came over the link."""
        if seconds > 0:
            self.copy_rate = max(nbytes / seconds, (self.copy_rate or 0.0) / _FORGET)

    def saw_gather(self, nbytes: int, seconds: float) -> None:
        """Single experts of `nbytes` bytes altogether came over it."""
        if seconds > 0:
            self.gather_rate = max(nbytes / seconds, (self.gather_rate or 0.0) / _FORGET)

    def saw_experts(self, ids: int, experts: int, used: int) -> None:
        """A call of so many ids has used so many of `experts` experts."""
        bucket = _bucket(ids)
        self._shares[bucket] = _blend(self._shares.get(bucket), used / experts)

    def saw_kernels(self, ids: int, seconds: float) -> None:
        """Between two banks of a pass of such calls the device had work of its own for so long."""
        # Of calls on two streams the later may have come first.
        if seconds > 0:
            bucket = _bucket(ids)
            self._kernels[bucket] = min(seconds, self._kernels.get(bucket, math.inf) * _FORGET)

    def knows(self, ids: int) -> bool:
        """Whether calls of about so many ids were seen."""
        return _bucket(ids) in self._shares

    def share(self, ids: int, experts: int) -> float:
        """The share of `experts` experts that a call of so many ids is expected to use. See the note above."""
        if self.knows(ids):
            return self._shares[_bucket(ids)]
        curve = _CURVE
        if self._shares:
            nearest = min(self._shares, key=lambda bucket: abs(bucket - _bucket(ids)))
            seen = min(self._shares[nearest], 0.999)
            curve = -math.log1p(-seen) / math.sqrt(2 ** (nearest / 2) / experts)
        return 1 - math.exp(-curve * math.sqrt(ids / experts))

    def kernels(self, ids: int) -> float:
        """Seconds between two banks that copies can hide under, in such calls; 0 while that is unknown."""
        return self._kernels.get(_bucket(ids), 0.0)

    def routed_pays(self, ids: int, experts: int, bank_nbytes: int, row_nbytes: int) -> bool:
        """Whether sending the experts that a call uses, after its router, takes less time than whole banks ahead of use.

        Args:
            ids: tokens x top-k of the call.
            experts: experts of the bank.
            bank_nbytes: bytes of the bank.
            row_nbytes: bytes of one expert.
        """
        # While nothing was measured only the ratio counts; kernels are not known then either.
        copy_rate = self.copy_rate or 1.0
        gather_rate = self.gather_rate or _GATHER_SHARE * copy_rate
        if self.copy_rate is None and self.gather_rate is not None:
            copy_rate = self.gather_rate / _GATHER_SHARE
        kernels = self.kernels(ids) if self.copy_rate or self.gather_rate else 0.0
        routed = kernels + self.share(ids, experts) * experts * row_nbytes / gather_rate
        return routed < max(kernels, bank_nbytes / copy_rate)
