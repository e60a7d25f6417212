"""Tiny checkpoints that vLLM's CPU build can run: the models of the other tests, with the widths that its kernels want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models import build, build_tokenizer

__all__ = ["FAMILIES", "LAYERS", "write"]

_HEADS: dict[str, Any] = {"head_dim": 32}
# Multi-head latent attention wants DeepSeek's own widths.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
}
# vLLM knows gpt-oss with these embeddings only.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _HEADS,
    "mixtral": _HEADS,
    # Half of its experts is still as wide as the kernels want.
    "gpt_oss": {**_HEADS, "rope_parameters": _YARN, "intermediate_size": 64},
    "deepseek_v2": {**_LATENT, "n_group": 1, "topk_group": 1},
}
FAMILIES = tuple(_CHANGES)
# Layers with experts: more than there are slots, and a multiple of no number of them.
LAYERS = {"qwen3_moe": 7, "mixtral": 5, "gpt_oss": 7, "deepseek_v2": 5}


def write(family: str, folder: Path) -> Path:
    """Save a checkpoint of a family with its tokenizer. Returns the folder."""
    build(family, torch.bfloat16, changes=_CHANGES[family]).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
