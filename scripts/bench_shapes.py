"""Shapes of published Mixture-of-Experts models, for building them with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT_LAYERS", "DEMO", "SHAPES", "Shape"]

DEFAULT_LAYERS = 16
# Not a shape: the trained model that ships with the package.
DEMO = "demo"


@dataclass(frozen=True)
class Shape:
    """A published configuration: its model type, what differs from that type's defaults, and how it attends."""

    model_type: str
    config: dict[str, Any]
    layers: int
    attention: str = "sdpa"


def _rope(theta: float) -> dict[str, Any]:
    # Rotary scaling for long contexts is left out: it changes numbers, not time.
    return {"rope_type": "default", "rope_theta": theta}


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e6),
        },
        layers=48,
    ),
    "mixtral-8x7b": Shape(
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e6),
            "sliding_window": None,
        },
        layers=32,
    ),
    # transformers has no SDPA for its attention sinks, so the scores of a long prompt are whole matrices.
    "gpt-oss-20b": Shape(
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": _rope(150000.0),
        },
        layers=24,
        attention="eager",
    ),
    "olmoe": Shape(
        "olmoe",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e4),
        },
        layers=16,
    ),
    "deepseek-v2-lite": Shape(
        "deepseek_v2",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rope_parameters": _rope(1e4),
        },
        layers=27,
    ),
    "tiny": Shape(
        "qwen3_moe",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e4),
        },
        layers=5,
    ),
}
