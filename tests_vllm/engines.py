"""Engines in the process of the test, what is asked of them, and what their experts layers gave."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from hf_prefetch.integrations.vllm.layers import Stand, stands_of

__all__ = ["Answer", "ask", "engine", "layers_of", "outputs_of", "stands"]

# Prompts of several lengths: whole banks, single experts, and both in one batch. A batch has room for a part of the first one.
PROMPTS = tuple(
    [4 + (seed + 7 * place) % 120 for place in range(length)] for seed, length in ((1, 90), (2, 3), (3, 17), (4, 1))
)
BATCH_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """Token ids and the log-probabilities of the whole vocabulary at each, of every sequence."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[tuple[tuple[int, float], ...], ...], ...]


@contextmanager
def engine(folder: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Iterator[LLM]:
    """An engine; with these options for the plugin, if any are given."""
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": BATCH_TOKENS,
        "max_logprobs": -1,
        "dtype": "bfloat16",
        "additional_config": {} if options is None else {"hf_prefetch": options},
    }
    llm = LLM(str(folder), **(settings | arguments))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def ask(llm: LLM, prompts: tuple[list[int], ...] = PROMPTS, **sampling: Any) -> Answer:
    """Greedy answers of 8 tokens, unless something else is asked for."""
    settings = {"max_tokens": 8, "temperature": 0.0, "logprobs": -1, "detokenize": False, "ignore_eos": True}
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    results = llm.generate(asked, SamplingParams(**(settings | sampling)), use_tqdm=False)
    sequences = [sequence for result in results for sequence in result.outputs]
    return Answer(
        tokens=tuple(tuple(sequence.token_ids) for sequence in sequences),
        logprobs=tuple(
            tuple(tuple(sorted((token, value.logprob) for token, value in step.items())) for step in sequence.logprobs)
            for sequence in sequences
        ),
    )


def stands(llm: LLM) -> list[Stand]:
    """What stands before the experts layers of an engine that prefetches."""
    (found,) = llm.collective_rpc(lambda worker: stands_of(worker.model_runner.vllm_config))
    return found


def layers_of(llm: LLM) -> list[Any]:
    """The experts layers of an engine."""

    def find(worker: Any) -> list[Any]:
        config = worker.model_runner.vllm_config.compilation_config
        return [config.static_forward_context[name].routed_experts for name in config.static_all_moe_layers]

    (found,) = llm.collective_rpc(find)
    return found


@contextmanager
def outputs_of(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """What the experts layers of an engine give from here on, call by call."""
    seen: list[torch.Tensor] = []
    before = {layer: layer.forward_modular for layer in layers_of(llm)}

    def watched(layer: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = before[layer](*args, **kwargs)
            seen.append(output.clone())
            return output

        return forward

    for layer in before:
        layer.forward_modular = watched(layer)
    try:
        yield seen
    finally:
        for layer, forward in before.items():
            layer.forward_modular = forward
