"""Decoding steps of the decode benchmark: one token through the model, eagerly or as a replayed CUDA graph.

All arms share one key-value cache of fixed size and its addresses, the same tokens and the same expert ids, so whatever differs
between them is the experts' doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import StaticCache

from bench_models import Subject
from bench_passes import synchronize, timed
from hf_prefetch.routing import RoutingInjection

__all__ = ["Recorder", "Steps"]


class Steps:
    """A prompt and the steps after it.

    Args:
        subject: the model.
        injection: where the expert ids come from.
        batch: sequences.
        prompt: tokens of each.
        steps: tokens that come after it, at most.
    """

    def __init__(self, subject: Subject, injection: RoutingInjection, batch: int, prompt: int, steps: int) -> None:
        self.subject, self.model = subject, subject.model
        self.injection = injection
        self.batch, self.prompt_tokens, self.steps = batch, prompt, steps
        device = subject.device
        generator = torch.Generator().manual_seed(prompt)
        vocabulary = self.model.config.vocab_size
        self._prompt = torch.randint(0, vocabulary, (batch, prompt), generator=generator).to(device)
        self._tokens = torch.randint(0, vocabulary, (steps, batch, 1), generator=generator).to(device)
        self._side: torch.cuda.Stream | None = None
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.cache = StaticCache(config=self.model.config, max_cache_len=prompt + steps + 8)

    @torch.no_grad()
    def begin(self) -> None:
        """Run the prompt, as one call of many tokens."""
        self.cache.reset()
        self.injection.seek(0)
        self._step.zero_()
        self.model.set_experts_implementation("grouped_mm")
        self.model(input_ids=self._prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        # What `generate` does off the CPU.
        self.model.set_experts_implementation("batched_mm")

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """One token of each sequence. Returns the logits (batch, vocabulary)."""
        tokens = self._tokens.index_select(0, self._step).squeeze(0)
        places = (self._step + self.prompt_tokens).expand(self.batch, 1)
        output = self.model(input_ids=tokens, position_ids=places, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self._step.add_(self._one)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def seconds(self, run: Callable[[], Any], count: int) -> list[float]:
        """Times of single steps, the device synchronised at both ends of each."""
        return [timed(self.subject.device, run)[0] for _ in range(count)]

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph of one step. What is warmed up and captured goes through the caches too, so `begin` comes after it."""
        # The same one each time: cuBLAS keeps a workspace for every stream that it has met.
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.step()
        synchronize(self.subject.device)
        return graph


class Recorder:
    """Keeps what every experts module was given and gave, at every step, graphs included.

    Attributes:
        inputs, outputs: (modules, steps, batch, hidden).
    """

    def __init__(self, steps: Steps, count: int) -> None:
        self._steps = steps
        width, experts = steps.model.config.hidden_size, steps.subject.experts
        shape = (len(experts), count, steps.batch, width)
        self.inputs = torch.zeros(shape, dtype=steps.model.dtype, device=steps.subject.device)
        self.outputs = torch.zeros_like(self.inputs)
        self._place = torch.zeros(1, dtype=torch.int64, device=steps.subject.device)
        self._one = torch.ones_like(self._place)
        self._last = len(experts) - 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the next steps are kept, from the first place on."""
        self.rewind()
        modules = self._steps.subject.experts.values()
        handles = [module.register_forward_hook(self._keep(number)) for number, module in enumerate(modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def rewind(self) -> None:
        """The next step is the first."""
        self._place.zero_()

    def _keep(self, number: int) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.shape[0] != self._steps.batch:
                return  # the prompt
            self.inputs[number].index_copy_(0, self._place, args[0].unsqueeze(0))
            self.outputs[number].index_copy_(0, self._place, output.unsqueeze(0))
            if number == self._last:
                self._place.add_(self._one)

        return hook

    def differences(self, other: Recorder) -> dict[str, int]:
        """Calls of modules, those with other inputs than `other` has, and those with other outputs for the same inputs."""
        same_inputs = (self.inputs == other.inputs).all(dim=-1).all(dim=-1)
        same_outputs = (self.outputs == other.outputs).all(dim=-1).all(dim=-1)
        return {
            "calls": same_inputs.numel(),
            "other_inputs": int((~same_inputs).sum()),
            "other_outputs": int((same_inputs & ~same_outputs).sum()),
        }
