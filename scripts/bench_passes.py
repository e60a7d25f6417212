"""What is timed and compared: prefills and generations of the same random prompts, whichever arm asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from bench_models import Subject

__all__ = ["Passes", "synchronize", "timed"]


def synchronize(device: torch.device) -> None:
    """Wait for everything that was given to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds by the host's clock, the device synchronised at both ends, and the result."""
    synchronize(device)
    begin = time.perf_counter()
    value = action()
    synchronize(device)
    return time.perf_counter() - begin, value


class Clock(StoppingCriteria):
    """Notes when each token of a generation is there. Never stops it."""

    def __init__(self, device: torch.device) -> None:
        self.stamps: list[float] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(self._device)
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Passes:
    """Runs the model; `begin` is called before each pass."""

    def __init__(self, subject: Subject, begin: Callable[[], None] = lambda: None) -> None:
        self._subject = subject
        self._begin = begin

    def prompt(self, length: int) -> torch.Tensor:
        """The same random tokens for the same length."""
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, self._subject.model.config.vocab_size, (1, length), generator=generator)
        return ids.to(self._subject.device)

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """One forward over a prompt with a new cache. No mask is passed, so attention needs no memory for one."""
        self._begin()
        logits: torch.Tensor = self._subject.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].clone()

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, tokens: int, **more: Any) -> tuple[list[int], list[float]]:
        """Greedy tokens, and when each of them was there. `more` are other options of the model's `generate`."""
        clock = Clock(self._subject.device)
        output = self._generate(ids, tokens, stopping_criteria=StoppingCriteriaList([clock]), **more)
        return output[0, ids.shape[1] :].tolist(), clock.stamps

    @torch.no_grad()
    def generated_logits(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """Logits of each step of a generation."""
        output = self._generate(ids, tokens, output_logits=True, return_dict_in_generate=True)
        return torch.stack(output.logits)

    def _generate(self, ids: torch.Tensor, tokens: int, **more: Any) -> Any:
        count = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        mask = torch.ones_like(ids)
        self._begin()
        return self._subject.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **count, **more)
