"""Remedies: what a user can do about a failure, in the words of the interface that the user has called."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OF_MODELS", "Remedies"]


@dataclass(frozen=True)
class Remedies:
    """Parts of messages. Each is a sentence or the end of one.

    Attributes:
        again: how to have slots that did not fit.
        elsewhere: where to run what does not fit at all, after "or".
        cache: which experts can be read from a cache, and what to do about others, after "only".
        ended: why prefetching may have ended, and what to do.
        captured: which calls a graph can be captured over, after "and".
        uncaptured: what to do about others.
        kernel: what to do about a forward that keeps or changes its weights.
        steps: what takes Python out of decoding, where graphs can be captured.
        host: what to do where host memory is short; a sentence.
    """

    again: str
    elsewhere: str
    cache: str
    ended: str
    captured: str
    uncaptured: str
    kernel: str
    steps: str
    host: str


OF_MODELS = Remedies(
    again="free device memory or take fewer slots, then call enable_expert_prefetch again.",
    elsewhere="run the model on another device with enable_expert_prefetch(model, device=...).",
    cache=(
        "experts that transformers runs as batched_mm or grouped_mm can be read from a cache. Call "
        "model.set_experts_implementation('batched_mm'), if the model has it, or leave expert_cache out."
    ),
    ended=(
        "another thread has disabled it, or the model that enable_expert_prefetch was called on is gone. Keep that object "
        "alive while any part of it is used, or call disable_expert_prefetch on the part that is left."
    ),
    captured="one of the experts implementations eager, batched_mm and grouped_mm",
    uncaptured="Run this part without capture, or call disable_expert_prefetch(model) first.",
    kernel=(
        "load the model anew (or call disable_expert_prefetch(model) and reset what the forward keeps among its attributes: it "
        "is of no use) and choose another implementation (set_experts_implementation), or leave prefetching off."
    ),
    steps='generate(cache_implementation="static") compiles a step, and takes Python out of it',
    host=(
        "Free some, or raise the limit on it (ulimit -v, a container's). Or have the experts of some layers in files: "
        'host_memory="40GiB", say, and offload_folder="...", which goes without pack=True; or on the device: gpu_memory.'
    ),
)
