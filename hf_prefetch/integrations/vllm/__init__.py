"""Expert prefetching in vLLM: a plugin that `additional_config={"hf_prefetch": {...}}` switches on.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It puts a class of ours in the place of
vLLM's `RoutedExperts`, by vLLM's own way of doing so; nothing of vLLM is patched. An engine without the option gets layers that
do what vLLM's own do.
"""

from __future__ import annotations

from .plugin import register
from .versions import SUPPORTED

__all__ = ["SUPPORTED", "register"]
