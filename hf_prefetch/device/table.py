"""RowTable: which expert is in which row of a cache, and which of them is given up next.

All of it lies on the device and is decided there, so nothing waits for the router on the host. `scheduling/replacement.py` says
what a step does, in plain Python; here the same is written with torch's operators, and in `device/kernels.py` as one launch.
All three agree to the last bit of every score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..streams import StreamDevice

__all__ = ["Assignment", "RowTable"]

# Scores below the smallest normal float32 are zero.
SMALLEST = 2.0**-126


@dataclass(frozen=True)
class Assignment:
    """Where a call finds its experts. All tensors are on the device.

    Attributes:
        ids: int64, in the shape of the call's ids: the row of each expert; the number of rows for ids that name none.
        most: how many experts may have to be fetched.
        lists: int64 (2 x most + 1,): how many have to be, these experts, and, from `most + 1` on, the row that each goes to.
    """

    ids: torch.Tensor
    most: int
    lists: torch.Tensor

    def moves(self) -> list[tuple[int, int]]:
        """What has to be fetched: each expert and its row. Waits for the device."""
        count, *lists = self.lists.tolist()
        return list(zip(lists[:count], lists[self.most : self.most + count], strict=True))


class RowTable:
    """The table of one bank's cache.

    Attributes:
        decay: what a call leaves of a score.
        expert_of: int32 (rows,): the expert in each row, -1 for none. Full rows come before empty ones.
        scores: float32 (experts,).
    """

    def __init__(self, device: StreamDevice, experts: int, rows: int, decay: float) -> None:
        self.decay = decay
        block = device.allocate(4 * (rows + experts))
        with torch.inference_mode(False):
            self.expert_of = block[: 4 * rows].view(torch.int32)
            self.scores = block[4 * rows :].view(torch.float32)
        self.nbytes = block.numel()
        self.clear()

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.expert_of.shape[0]

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return self.scores.shape[0]

    def clear(self) -> None:
        """Forget what is in the rows, and what was used."""
        self.expert_of.fill_(-1)
        self.scores.zero_()

    def row_of(self) -> torch.Tensor:
        """int64 (experts + 1,): the row of each expert, -1 for none; the last entry is a place to write what is of no use."""
        rows = torch.full((self.experts + 1,), -1, dtype=torch.int64, device=self.expert_of.device)
        rows.scatter_(0, self._owners(), torch.arange(self.rows, device=rows.device))
        rows[-1:].fill_(-1)
        return rows

    def assign(self, ids: torch.Tensor) -> Assignment:
        """Find a row for every expert that `ids` names: `Replacement.step`. There must not be more of them than rows."""
        flat = self._named(ids)
        needed = torch.zeros(self.experts + 1, dtype=torch.bool, device=flat.device).index_fill_(0, flat, True)[:-1]
        self._score(self.scores.add(needed).mul_(self.decay))
        most = min(flat.numel(), self.rows, self.experts)
        row_of, lists = self._place(needed, most)
        row_of[-1:].fill_(self.rows)
        return Assignment(row_of[flat].view(ids.shape), most, lists)

    def assign_prompt(self, ids: torch.Tensor, kept: float, added: float) -> Assignment:
        """Choose the experts worth keeping after a prompt whose last ids these are: `Replacement.prompt`."""
        flat = self._named(ids)
        counts = torch.zeros(self.experts + 1, dtype=torch.float32, device=flat.device)
        counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
        self._score(self.scores.mul(kept).add_(counts[:-1].mul_(added)))
        best = torch.sort(self.scores, descending=True, stable=True).indices[: self.rows]
        needed = torch.zeros(self.experts, dtype=torch.bool, device=flat.device).index_fill_(0, best, True)
        return Assignment(ids, self.rows, self._place(needed, self.rows)[1])

    def _named(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids in a row, one past the last expert for those that name none."""
        flat = ids.reshape(-1).long()
        return torch.where((flat >= 0) & (flat < self.experts), flat, self.experts)

    def _owners(self) -> torch.Tensor:
        return torch.where(self.expert_of < 0, self.experts, self.expert_of.long())

    def _score(self, scores: torch.Tensor) -> None:
        self.scores.copy_(scores.masked_fill_(scores < SMALLEST, 0.0))

    def _place(self, needed: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the needed experts that have no row one, at most `most`. Returns each expert's row, and lists of what comes."""
        row_of, owners = self.row_of(), self._owners()
        missed = needed & (row_of[:-1] < 0)
        # Rows in the order in which they are taken: empty ones, then those of experts that are not needed, by score.
        taken = torch.cat([self.scores.masked_fill(needed, torch.inf), self.scores.new_full((1,), -torch.inf)])[owners]
        rows = torch.sort(taken, stable=True).indices[:most]
        # Experts that are missed in ascending order, then the others.
        fetched = torch.sort(missed.logical_not().to(torch.int8), stable=True).indices[:most]
        count = missed.sum().view(1)
        comes = torch.arange(most, device=rows.device) < count
        # What does not come is written to where nobody looks.
        row_of.scatter_(0, torch.where(comes, fetched, self.experts), rows)
        owned = torch.cat([self.expert_of, self.expert_of[:1]])
        owned.scatter_(0, torch.where(comes, rows, self.rows), fetched.int())
        self.expert_of.copy_(owned[:-1])
        return row_of, torch.cat([count, fetched, rows])
