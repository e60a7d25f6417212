"""Prompts of the decode benchmark: one length at a time, by the way that the package chooses and by each way alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench_models import Subject
from bench_passes import timed
from hf_prefetch.routing import RoutingInjection
from hf_prefetch.scheduling.observer import Observer

__all__ = ["Ways"]

# Never chosen, and always: what a gate of routed ids per expert must be for that.
GATES = {"lookahead-only": 0, "routed-only": 1 << 40}

Json = dict[str, Any]


class Ways:
    """What the prompts of one run have in common.

    Args:
        subject: a model with prefetching on.
        injection: where the expert ids come from.
        report: gives what is counted so far.
        cost: makes of that, before some passes, and their number what one of them took.
    """

    def __init__(
        self, subject: Subject, injection: RoutingInjection, report: Callable[[], Any], cost: Callable[[Any, int], Json]
    ) -> None:
        self._subject, self._injection, self._report, self._cost = subject, injection, report, cost
        self._scheduler = subject.model.expert_prefetch
        self._own = self._scheduler.config
        self._configs = {"policy": self._own} | {
            way: dataclasses.replace(self._own, lookahead_gate=gate) for way, gate in GATES.items()
        }
        self._lanes = list({id(lane): lane for lane in self._scheduler._lane_of.values()}.values())
        # What is chosen rests on what this way alone has shown, as it does for a user.
        self._observers = {way: [Observer(lane.device) for lane in self._lanes] for way in self._configs}

    @torch.no_grad()
    def measure(self, length: int, warmups: int, repeats: int) -> dict[str, Json]:
        """Passes from an empty key-value cache, each way in turn: what befalls the machine meanwhile befalls all alike."""
        model = self._subject.model
        model.set_experts_implementation("grouped_mm")
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(self._subject.device)
        points: dict[str, Json] = {way: {"seconds": []} for way in self._configs}

        def run() -> None:
            self._injection.seek(0)
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

        try:
            for turn in range(warmups + repeats):
                for way, config in self._configs.items():
                    self._scheduler.config = config
                    for lane, observer in zip(self._lanes, self._observers[way], strict=True):
                        lane.observer = observer
                    before = self._report()
                    seconds, _ = timed(self._subject.device, run)
                    if turn >= warmups:
                        points[way]["seconds"].append(seconds)
                        points[way] |= self._cost(before, 1)
        finally:
            self._scheduler.config = self._own
        return points
