"""Tiny checkpoints that vLLM's CPU build can run: the models of the other tests, with the widths that its kernels want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models import build, build_tokenizer

__all__ = ["DENSE", "FAMILIES", "LAYERS", "write"]

# No family of models with experts.
DENSE = "dense"

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
    """Save a checkpoint of a family, or of a model without experts, with its tokenizer. Returns the folder."""
    model = _dense() if family == DENSE else build(family, torch.bfloat16, changes=_CHANGES[family])
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def _dense() -> Qwen3ForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, **_HEADS}
    widths = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return Qwen3ForCausalLM(Qwen3Config(**widths, **heads, tie_word_embeddings=False)).to(torch.bfloat16)
