"""Which experts the tokens of a benchmark are routed to.

Routers of random weights send all tokens of a long prompt to a few experts. So ids come from synthetic routing, calibrated to
published models, and are put behind the routers; a trained model keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bench_models import Subject
from hf_prefetch.banks.bank import ExpertBank
from hf_prefetch.discovery import find_banks
from hf_prefetch.routing import RoutingInjection, inject_routing
from routing_synthetic import PROFILES, RoutingProfile, synthetic_ids

__all__ = ["Routing", "profile_of"]


def profile_of(subject: Subject, name: str) -> str | RoutingProfile:
    """The profile of that name, or where there is none a plain one for the model's shape."""
    return name if name in PROFILES else RoutingProfile(subject.num_experts, subject.model.config.num_experts_per_tok)


class Routing:
    """Has every pass of a model routed alike, whichever arm it is in.

    Args:
        subject: the model.
        profile: what its routing is to look like; None leaves it to its routers.
        tokens: of the longest pass.
    """

    def __init__(self, subject: Subject, profile: str | RoutingProfile | None, tokens: int) -> None:
        self._injection: RoutingInjection | None = None
        self._is_on = True
        self._hooks = ExitStack()
        if profile is not None:
            ids = synthetic_ids(profile, len(subject.experts), tokens)
            self._injection = RoutingInjection(find_banks(subject.model).banks, ids)
            self._hooks.enter_context(inject_routing(subject.model, self._replace))

    def _replace(self, bank: ExpertBank, ids: torch.Tensor) -> torch.Tensor:
        assert self._injection is not None, "it is what makes the hooks"
        return self._injection.replace(bank, ids) if self._is_on else ids

    def begin(self) -> None:
        """The next forward begins with the first token."""
        if self._injection is not None:
            self._injection.seek(0)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, modules are called with ids that were routed already."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def close(self) -> None:
        """Leave it to the model's routers again. Idempotent."""
        self._hooks.close()
