"""The package's own arms: all experts in host memory, a share of them, or as many as a memory budget leaves no room for."""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bench_arm import Arm
from bench_host import HostMemory, PinnedBlock
from bench_models import Subject
from bench_packed import unpacking
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch

__all__ = ["Prefetch", "Way"]

_NAME = re.compile(r"prefetch-([2-4])(\+pack)?(?:@(?:(\d+(?:\.\d+)?)%|(\d+(?:\.\d+)? ?[KMGT]i?B)))?")


@dataclass(frozen=True)
class Way:
    """What the name of an arm says: `prefetch-3`, `prefetch-3+pack`, `prefetch-3@25%` or `prefetch-3@20GiB`.

    Attributes:
        slots: device buffers.
        pack: whether experts are kept packed.
        share: percentage of the layers whose experts are in host memory.
        budget: device memory for weights.
    """

    slots: int
    share: float | None = None
    budget: str | None = None
    pack: bool = False

    @classmethod
    def named(cls, name: str) -> Way | None:
        """The way that a name stands for, if it is such a name."""
        match = _NAME.fullmatch(name)
        if match is None or float(match[3] or 0) > 100:
            return None
        return cls(int(match[1]), None if match[3] is None else float(match[3]), match[4], pack=match[2] is not None)


class Prefetch(Arm):
    """This package through its public functions.

    All experts at once are taken from host memory, as they are after loading a checkpoint, or from the device if
    `start` says so; a share is taken from the device, where the others stay. With a budget everything begins in host
    memory, and from before anything is enabled to the end of the timed passes the device has no more than `cap` bytes.
    """

    looks_ahead = True

    def __init__(self, name: str, subject: Subject, way: Way, *, start: Literal["host", "device"], cap: int | None) -> None:
        super().__init__(name, subject)
        self.way = way
        alone = way.slots == 3 and way.share is None
        self._starts_on_host = way.budget is not None or (alone and start == "host")
        self._cap = cap if way.budget is not None else None
        self.rank = "share" if way.share is not None else "main" if way.slots == 3 or way.budget else "side"

    def enter(self) -> dict[str, Any]:
        subject, way = self.subject, self.way
        if self._starts_on_host:
            subject.place_experts(torch.device("cpu"))
        if subject.device.type == "cuda":
            # What the first copy and the first registration of a process set up is not the experts' cost.
            PinnedBlock(1 << 20, subject.device).release()
            torch.cuda.reset_peak_memory_stats(subject.device)
        self._limit_device(self._cap)
        layers = None if way.share is None else round(way.share / 100 * len(subject.experts))
        seconds, held = [0.0], subject.host_bytes

        def enable() -> None:
            begin = time.perf_counter()
            enable_expert_prefetch(
                subject.model,
                slots=way.slots,
                device=subject.device,
                n_cpu_moe=layers,
                gpu_memory=way.budget,
                pack=way.pack,
                progress=False,
            )
            seconds[0] = time.perf_counter() - begin

        host = HostMemory.during(enable)
        rest = host["before"] - held if host["before"] is not None else None
        kept = {bank.name for bank in subject.model.expert_prefetch.banks}
        return {
            "slots": way.slots,
            "share": None if way.share is None else way.share / 100,
            "gpu_memory": way.budget,
            "cap_bytes": self._cap if subject.device.type == "cuda" else None,
            "reserved_bytes": torch.cuda.max_memory_reserved(subject.device) if subject.device.type == "cuda" else None,
            "host_banks": [index for index, name in enumerate(subject.experts) if name in kept],
            "host_bank_bytes": subject.model.expert_prefetch.report().host_bytes,
            "host_weight_bytes": subject.model.expert_prefetch.report().weight_bytes,
            "held_before_bytes": held,
            "seconds": seconds[0],
            "gb_per_s": sum(subject.bank_bytes.values()) / seconds[0] / 1e9,
            "host_bytes": host,
            "unpacking": unpacking(subject.model.expert_prefetch, subject.device) if way.pack else None,
            "experts_host_bytes": None if rest is None else {key: (host[key] or 0) - rest for key in ("peak", "after")},
        }

    def relax(self) -> None:
        """What is compared is recorded on the device, and a user needs no room for that."""
        super().relax()
        if self._cap is not None:
            self._limit_device(None)

    def leave(self) -> None:
        self.relax()
        disable_expert_prefetch(self.subject.model)

    def moved(self) -> int:
        return int(self.subject.model.expert_prefetch.report().bytes_to_device)

    def report(self) -> dict[str, Any]:
        return dataclasses.asdict(self.subject.model.expert_prefetch.report())

    def _limit_device(self, nbytes: int | None) -> None:
        """Have torch's allocator refuse whatever goes beyond `nbytes`; None: beyond the device."""
        device = self.subject.device
        if device.type == "cuda" and (nbytes is not None or self._cap is not None):
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (nbytes or total) / total), device)
