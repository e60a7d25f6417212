"""A small random model of every Mixture-of-Experts architecture in transformers, and what it computes.

    model = build("qwen3_moe")  # random weights, on the CPU, in eval mode
    output = run(model)  # what the model gives for a prompt: logits and, if it generates, tokens

Nothing is downloaded. Which architectures there are depends on the installed transformers: `ARCHITECTURES` holds those that
it has, `ABSENT` the names of the others. A multimodal model is listed as its text tower where transformers has a class for
that alone, unless images reach experts that text does not; towers that other classes wrap are the same towers, and one of
them (`qwen3_moe_in_llava`) stands for all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "ABSENT",
    "ARCHITECTURES",
    "EXPERTS",
    "NEW_TOKENS",
    "Architecture",
    "Output",
    "build",
    "inputs_of",
    "logits_of",
    "run",
]

VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 128, 64, 32, 8, 2
# 2 x 16 tokens, each to one expert at least, are two routed ids per expert and more: a prompt's experts are sent ahead.
BATCH, TOKENS, NEW_TOKENS = 2, 16, 3
# Token ids that mean something; those of text lie between 4 and these.
AUDIO, IMAGE, VIDEO, START, END, OTHER_START, OTHER_END = range(119, 126)

Options = dict[str, Any]
Inputs = Callable[[torch.Generator], Options]


@dataclass(frozen=True)
class Output:
    """What a model computed.

    Attributes:
        logits: of one forward over the prompt, or what the model gives in their place.
        tokens: of one greedy generation; None where a model does not generate.
    """

    logits: torch.Tensor
    tokens: torch.Tensor | None = None

    def equals(self, other: Output) -> bool:
        """The same bits."""
        if self.tokens is None or other.tokens is None:
            return self.tokens is other.tokens and torch.equal(self.logits, other.logits)
        return torch.equal(self.tokens, other.tokens) and torch.equal(self.logits, other.logits)


# -- inputs ----------------------------------------------------------------------------------------------------------


def _ids(generator: torch.Generator, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(4, AUDIO, (BATCH, tokens), generator=generator)


def _text(generator: torch.Generator) -> Options:
    return {"input_ids": _ids(generator)}


def _encoder_decoder(generator: torch.Generator) -> Options:
    return {"input_ids": _ids(generator), "decoder_input_ids": _ids(generator)}


def _embeddings(generator: torch.Generator) -> Options:
    return {"inputs_embeds": torch.randn(BATCH, TOKENS, HIDDEN, generator=generator)}


def _poses(generator: torch.Generator) -> Options:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator), "dataset_index": torch.tensor([0, 2])}


def _images(patch: int, *kinds: str) -> Inputs:
    """Text with an image in each sequence, of 8 x 8 patches of `patch` numbers: 16 tokens. `kinds` are the names of the
    arguments that say which tokens they are."""

    def inputs(generator: torch.Generator) -> Options:
        ids = _ids(generator, 2 * TOKENS)
        ids[:, 3], ids[:, 4:20], ids[:, 20] = START, IMAGE, END
        return {
            "input_ids": ids,
            **dict.fromkeys(kinds, (ids == IMAGE).int()),
            "pixel_values": torch.randn(BATCH * 64, patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, 8, 8]] * BATCH),
        }

    return inputs


@dataclass(frozen=True)
class Architecture:
    """How to make a small model of an architecture, and how to call it.

    Attributes:
        config: name of its configuration class in transformers.
        model: name of its model class.
        options: of the configuration; a dict in it is the configuration of a part.
        inputs: the arguments of a forward, drawn from a generator of random numbers.
        generates: whether it has a `generate`, which takes the same inputs.
        generation: further arguments of that.
    """

    config: str
    model: str
    options: Options
    inputs: Inputs = _text
    generates: bool = True
    generation: Options = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        """Whether the installed transformers has it."""
        return hasattr(transformers, self.config) and hasattr(transformers, self.model)

    def make_config(self) -> PreTrainedConfig:
        return getattr(transformers, self.config)(**copy.deepcopy(self.options))


# -- configurations --------------------------------------------------------------------------------------------------

# fmt: off
# Five layers, of which a leading dense one may be the first: a multiple of no number of slots, or of two and four.
_COMMON: Options = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "moe_intermediate_size": INTERMEDIATE, "num_experts_per_tok": TOP_K, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
# The same where experts take `intermediate_size`.
_NARROW: Options = {**_COMMON, "intermediate_size": INTERMEDIATE}
# How architectures name their numbers.
_LOCAL: Options = {"num_local_experts": EXPERTS}
_NUMBER: Options = {"num_experts": EXPERTS}
_ROUTED: Options = {"n_routed_experts": EXPERTS, "n_shared_experts": 1}
_SHARED: Options = {"shared_expert_intermediate_size": INTERMEDIATE}
_FIRST_DENSE: Options = {"first_k_dense_replace": 1}
_MLPS: Options = {"mlp_layer_types": ["dense"] + ["sparse"] * 4}
_GROUPS: Options = {"n_group": 2, "topk_group": 1}
# Kinds of attention.
_SLIDING: Options = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"], "sliding_window": 16}
_LINEAR_TYPES: Options = {"layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]}
_LINEAR: Options = {
    **_LINEAR_TYPES, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_KIMI: Options = {"linear_head_dim": 16, "linear_num_heads": 4}
_LATENT: Options = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}
_INDEXER: Options = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA: Options = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
_LATENT_MAMBA: Options = {
    **_COMMON, **_ROUTED, **_MAMBA, "moe_shared_expert_intermediate_size": INTERMEDIATE, "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "moe", "attention", "moe", "moe", "moe"], "use_mamba_kernels": False,
}


def _rope(*sections: int, **more: Any) -> Options:
    """Positions in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}}


# Towers for images.
_VISION: Options = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": HIDDEN, "num_position_embeddings": 64,
}
_SMALL_VISION: Options = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}
_GEMMA_VISION: Options = {**_SMALL_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
_SAM: Options = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 64, "downsample_channels": [16, 32],
}
_SAW: Options = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}
_SEES: Options = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END,
    "video_start_token_id": OTHER_START, "video_end_token_id": OTHER_END,
}
# Towers that are listed more than once.
_DOTS3: Options = {
    **_COMMON, **_LATENT, **_INDEXER, **_ROUTED, **_MLPS, "shared_experts_intermediate_size": INTERMEDIATE, "head_dim": 24,
    "sliding_window": 16, "layer_types": ["indexed_attention", "sliding_attention"] * 2 + ["indexed_attention"],
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
}
_INKLING: Options = {
    **_COMMON, **_ROUTED, "n_shared_experts": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16, "sliding_window_size": 16, "d_rel": 4, "rel_extent": 64, "unpadded_vocab_size": VOCABULARY,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2 + ["hybrid_sliding"],
}


def _causal(prefix: str, *options: Options, **more: Any) -> Architecture:
    merged = {name: value for part in (*options, more) for name, value in part.items()}
    return Architecture(f"{prefix}Config", f"{prefix}ForCausalLM", merged)


def _tower(prefix: str, *options: Options, **more: Any) -> Architecture:
    """The text tower of a multimodal model, alone."""
    merged = {name: value for part in (*options, more) for name, value in part.items()}
    return Architecture(f"{prefix}TextConfig", f"{prefix}ForCausalLM", merged)


def _multimodal(prefix: str, options: Options, inputs: Inputs = _text) -> Architecture:
    return Architecture(f"{prefix}Config", f"{prefix}ForConditionalGeneration", options, inputs)


_ALL: dict[str, Architecture] = {
    # Decoders.
    "afmoe": _causal("Afmoe", _COMMON, _NUMBER, _SLIDING, num_dense_layers=1, num_shared_experts=1),
    "axk1": _causal("AXK1", _COMMON, _LATENT, _ROUTED, _GROUPS, _MLPS),
    "axk2": _causal("AXK2", _COMMON, _LATENT, _INDEXER, _ROUTED, _GROUPS, _MLPS),
    "bailing_hybrid": _causal(
        "BailingHybrid", _COMMON, _LATENT, _GROUPS, _LOCAL, _MLPS, layer_group_size=2, head_dim=16, n_shared_experts=1
    ),
    "beam": _causal("Beam", _COMMON, _SLIDING, _MLPS, _GROUPS, _NUMBER),
    "cohere2_moe": _causal("Cohere2Moe", _NARROW, _NUMBER, _SLIDING, _MLPS),
    "dbrx": Architecture("DbrxConfig", "DbrxForCausalLM", {
        "d_model": HIDDEN, "n_heads": 4, "n_layers": 5, "max_seq_len": 256, "vocab_size": VOCABULARY, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": INTERMEDIATE, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    }),
    "deepseek_v2": _causal("DeepseekV2", _COMMON, _LATENT, _ROUTED, _FIRST_DENSE, topk_method="greedy"),
    "deepseek_v3": _causal("DeepseekV3", _COMMON, _LATENT, _ROUTED, _GROUPS, _FIRST_DENSE),
    "deepseek_v32": _causal("DeepseekV32", _COMMON, _LATENT, _INDEXER, _ROUTED, _GROUPS, _MLPS),
    # Experts of its first layers are chosen by token id.
    "deepseek_v4": _causal(
        "DeepseekV4", _COMMON, _ROUTED, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_groups=2,
        o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=8, hc_mult=2, sliding_window=8,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, num_nextn_predict_layers=0,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        + ["sliding_attention"] * 2,
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3,
    ),
    # Its experts are rows of embeddings.
    "doge": _causal("Doge", _COMMON, is_moe=True, num_experts=16, num_experts_per_tok=4),
    "dots1": _causal("Dots1", _COMMON, _ROUTED, _FIRST_DENSE),
    "dots3_note_text": _tower("Dots3Note", _DOTS3),
    "ernie4_5_moe": _causal(
        "Ernie4_5_Moe", _COMMON, moe_k=TOP_K, moe_num_experts=EXPERTS, moe_num_shared_experts=1, moe_layer_start_index=1
    ),
    "exaone_moe": _causal("ExaoneMoe", _COMMON, _NUMBER, _SLIDING, _MLPS, num_shared_experts=1, sliding_window_pattern=2),
    "flex_olmo": _causal("FlexOlmo", _NARROW, _NUMBER),
    "flint": _causal("Flint", _COMMON, _NUMBER, _SHARED, _SLIDING, mlp_only_layers=[0]),
    "gemma4_text": _tower(
        "Gemma4", _COMMON, _NUMBER, _SLIDING, enable_moe_block=True, top_k_experts=TOP_K, global_head_dim=16,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    ),
    "glm4_moe": _causal("Glm4Moe", _COMMON, _ROUTED, _FIRST_DENSE),
    "glm4_moe_lite": _causal("Glm4MoeLite", _COMMON, _LATENT, _ROUTED, _MLPS),
    "glm_moe_dsa": _causal("GlmMoeDsa", _COMMON, _LATENT, _ROUTED, _INDEXER, _MLPS),
    "gpt_oss": _causal("GptOss", _NARROW, _LOCAL, _SLIDING),
    "granitemoe": _causal("GraniteMoe", _NARROW, _LOCAL),
    "granitemoe_swa": _causal("GraniteMoeSWA", _NARROW, _LOCAL, _SLIDING, shared_intermediate_size=INTERMEDIATE),
    "granitemoehybrid": _causal(
        "GraniteMoeHybrid", _NARROW, _LOCAL, shared_intermediate_size=INTERMEDIATE, mamba_n_heads=8, mamba_d_head=16,
        mamba_d_state=16, mamba_chunk_size=16, layer_types=["mamba", "attention", "mamba", "attention", "mamba"],
    ),
    "granitemoeshared": _causal("GraniteMoeShared", _NARROW, _LOCAL, shared_intermediate_size=INTERMEDIATE),
    "hunyuan_v1_moe": _causal("HunYuanMoEV1", _NARROW, _NUMBER, moe_topk=TOP_K),
    "hy_v3": _causal("HYV3", _COMMON, _NUMBER, _MLPS, num_shared_experts=1),
    "hy_v4": _causal("HYV4", _COMMON, _LATENT, _INDEXER, _ROUTED, _MLPS, hc_mult=2),
    # Beside the routed experts stands a stack of shared ones, which every token takes.
    "inkling_text": _tower("Inkling", _INKLING),
    "inkling2_text": _tower("Inkling2", _INKLING, n_layers_per_attn_res_block=2),
    # Passes some layers twice.
    "inkling2_loop_text": _tower(
        "Inkling2Loop", _INKLING, num_hidden_layers=6, layer_types=None, n_layers_per_attn_res_block=2,
        loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=2, loop_gate_rank=8,
    ),
    "jamba": _causal(
        "Jamba", _NARROW, _NUMBER, num_hidden_layers=6, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False,
    ),
    "jetmoe": _causal("JetMoe", _NARROW, _LOCAL, kv_channels=16),
    "kimi_linear": _causal("KimiLinear", _COMMON, _LATENT, _LOCAL, _MLPS, _LINEAR_TYPES, _KIMI, n_shared_experts=1),
    "kolibri1": _causal("Kolibri1", _COMMON, _SLIDING, _LOCAL, _SHARED),
    "laguna": _causal(
        "Laguna", _COMMON, _NUMBER, _SHARED, _MLPS, layer_types=["full_attention"] * 5, num_attention_heads_per_layer=[4] * 5
    ),
    "lara_mini": _causal(
        "LaraMini", _COMMON, _NUMBER, _SHARED, _LINEAR, sliding_window=16,
        layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"],
    ),
    "lfm2_moe": _causal(
        "Lfm2Moe", _COMMON, _NUMBER, num_dense_layers=1, layer_types=["conv", "full_attention"] * 2 + ["conv"]
    ),
    # Every expert gets every token, most of them times zero.
    "llama4_text": Architecture("Llama4TextConfig", "Llama4ForCausalLM", {
        **_NARROW, **_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 2 * HIDDEN, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 32,
    }),
    # Some experts are the identity and have no weights.
    "longcat_flash": _causal(
        "LongcatFlash", _COMMON, _LATENT, num_layers=3, num_hidden_layers=6, ffn_hidden_size=2 * HIDDEN, moe_topk=TOP_K,
        n_routed_experts=EXPERTS, zero_expert_num=4, expert_ffn_hidden_size=INTERMEDIATE,
    ),
    "mellum": _causal("Mellum", _COMMON, _NUMBER, _LOCAL, _SLIDING, _MLPS),
    "mimo_v2_flash": _causal("MiMoV2Flash", _COMMON, _SLIDING, _MLPS, n_routed_experts=EXPERTS, v_head_dim=16),
    "minimax": _causal("MiniMax", _NARROW, _LOCAL, _LINEAR_TYPES, block_size=16),
    "minimax_m2": _causal("MiniMaxM2", _NARROW, _LOCAL, rotary_dim=8),
    "minimax_m3_vl_text": Architecture("MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", {
        **_NARROW, **_LOCAL, **_MLPS, "dense_intermediate_size": 2 * HIDDEN, "shared_intermediate_size": INTERMEDIATE,
        "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 4,
        "layer_types": ["full_attention"] * 5,
    }),
    "mistral4": _causal("Mistral4", _COMMON, _LATENT, _ROUTED, _FIRST_DENSE),
    "mixtral": _causal("Mixtral", _NARROW, _LOCAL),
    # Its experts have no gate, and in the second case work in a smaller space.
    "nemotron_h": _causal("NemotronH", _LATENT_MAMBA),
    "nemotron_h_latent": _causal("NemotronH", _LATENT_MAMBA, moe_latent_size=16),
    "olmoe": _causal("Olmoe", _NARROW, _NUMBER),
    "phimoe": _causal("Phimoe", _NARROW, _LOCAL),
    "qwen2_moe": _causal("Qwen2Moe", _COMMON, _NUMBER, _SHARED),
    "qwen3_5_moe_text": _tower("Qwen3_5Moe", _COMMON, _NUMBER, _SHARED, _LINEAR),
    "qwen3_moe": _causal("Qwen3Moe", _COMMON, _NUMBER, mlp_only_layers=[1]),
    "qwen3_next": _causal("Qwen3Next", _COMMON, _NUMBER, _SHARED, _LINEAR),
    "qwen4_exp_text": _tower(
        "Qwen4Exp", _COMMON, _NUMBER, _SHARED, _LINEAR, _rope(2, 3, 3), hc_lowrank=16, hc_count=2, indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4,
    ),
    # Configurations whose models are other architectures' classes.
    "sarvam_mla": Architecture("SarvamMLAConfig", "DeepseekV3ForCausalLM", {**_COMMON, **_LATENT, **_ROUTED, **_FIRST_DENSE}),
    "sarvam_moe": Architecture("SarvamMoEConfig", "Glm4MoeForCausalLM", {**_COMMON, **_ROUTED, **_FIRST_DENSE}),
    "solar_open": _causal("SolarOpen", _COMMON, _ROUTED),
    "zaya": _causal("Zaya", _COMMON, _NUMBER, num_experts_per_tok=1, router_hidden_size=32),

    # Encoders and decoders. The last one refines a block of tokens at a time, and its two halves hold the same Parameters.
    "nllb_moe": Architecture("NllbMoeConfig", "NllbMoeForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": INTERMEDIATE,
        "decoder_ffn_dim": INTERMEDIATE, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 2,
        "decoder_sparse_step": 2, "num_experts": EXPERTS, "expert_capacity": 64, "max_position_embeddings": 256,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    }, _encoder_decoder),
    "switch_transformers": Architecture("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 16, "d_ff": INTERMEDIATE, "num_layers": 4, "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_heads": 4, "num_experts": EXPERTS,
        "expert_capacity": 64, "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
    }, _encoder_decoder),
    "diffusion_gemma": Architecture("DiffusionGemmaConfig", "DiffusionGemmaForBlockDiffusion", {
        "text_config": {
            **_COMMON, **_NUMBER, "top_k_experts": TOP_K, "global_head_dim": 16, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        },
        "vision_config": _GEMMA_VISION, "image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END,
        "canvas_length": TOKENS,
    }, _encoder_decoder, generation={"max_denoising_steps": 3}),

    # Without generation.
    "openai_privacy_filter": Architecture(
        "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification", {**_NARROW, **_LOCAL}, generates=False
    ),
    "vitpose_backbone": Architecture("VitPoseBackboneConfig", "VitPoseBackbone", {
        "image_size": [32, 32], "patch_size": [8, 8], "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_experts": 3, "part_features": 8,
    }, _poses, generates=False),

    # Multimodal.
    "aria": _multimodal("Aria", {
        "text_config": {
            **_NARROW, "model_type": "aria_text", "moe_num_experts": EXPERTS, "moe_topk": TOP_K, "moe_num_shared_experts": 1,
        },
        "vision_config": {**_SMALL_VISION, "model_type": "idefics3_vision"}, "image_token_index": IMAGE,
        "projector_patch_to_query_dict": {16: 4},
    }),
    "deepseek_ocr2": _multimodal("DeepseekOcr2", {
        "text_config": {**_COMMON, **_ROUTED, **_MLPS}, "image_token_id": IMAGE,
        "vision_config": {"sam_config": _SAM, "encoder_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 8,
        }},
    }),
    # The image tower has experts too, of another number in its first layer.
    "dots3_note": _multimodal("Dots3Note", {
        "text_config": _DOTS3, "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 8,
            "moe_intermediate_size": INTERMEDIATE, "adapter_in_dim": 32, "adapter_out_dim": HIDDEN,
            "pyramid_num_routed": [-1, 4, 8, 8],
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": HIDDEN, "feature_size": 16,
        },
    }, _images(3 * 8 * 8)),
    # Two banks a layer, of different sizes: one for text, one for what is seen.
    "ernie4_5_vl_moe": _multimodal("Ernie4_5_VLMoe", {
        "text_config": {
            **_COMMON, **_rope(2, 2, 4), "moe_intermediate_size": [INTERMEDIATE, 16], "moe_num_experts": EXPERTS,
            "moe_k": TOP_K, "moe_num_shared_experts": 1,
        },
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}, **_SEES,
    }, _images(3 * 8 * 8, "mm_token_type_ids", "moe_mm_token_type_ids")),
    "glm4v_moe": _multimodal("Glm4vMoe", {
        "text_config": {**_COMMON, **_ROUTED, **_FIRST_DENSE, **_rope(1, 1, 2, partial_rotary_factor=0.5)},
        "vision_config": {**_VISION, "image_size": 32}, **_SEES,
    }, _images(3 * 2 * 8 * 8, "mm_token_type_ids")),
    "glm5_next": _multimodal("Glm5Next", {
        "text_config": {
            **_COMMON, **_LATENT, **_ROUTED, **_INDEXER, **_MLPS, **_KIMI, "qk_rope_head_dim": 0, "head_dim": 0,
            "layer_types": ["linear_attention"] * 4 + ["deepseek_sparse_attention"],
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 32, "patch_size": 8, "out_hidden_size": HIDDEN,
            "intermediate_size": 64, "projection_intermediate_size": 64,
        },
        "image_token_id": IMAGE, "video_token_id": VIDEO,
    }),
    "hy_v4_vl": _multimodal("HYV4VL", {
        "text_config": {**_COMMON, **_LATENT, **_INDEXER, **_ROUTED, **_MLPS, **_rope(2, 1, 1), "hc_mult": 2},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "out_hidden_size": HIDDEN, "patch_size": 8, "max_image_size": 64,
        },
        "image_token_id": IMAGE, "video_token_id": VIDEO,
    }),
    "mistral_large4": _multimodal("MistralLarge4", {
        "text_config": {**_COMMON, **_LATENT, **_ROUTED, **_INDEXER, **_MLPS, "index_skip_topk_offset": 1},
        "vision_config": {**_SMALL_VISION, "model_type": "pixtral"}, "image_token_index": IMAGE,
    }),
    # A norm inside the experts module belongs to no expert.
    "muse_spark": _multimodal("MuseSpark", {
        "text_config": {**_COMMON, **_LOCAL, **_MLPS, "moe_hidden_size": 32, "sliding_window": 16},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8,
            "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16,
        },
        "audio_config": {
            "patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2, "out_hidden_size": HIDDEN,
        },
        "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "out_hidden_size": HIDDEN,
        "projector_hidden_size": 32,
    }),
    "qwen3_5_moe": _multimodal("Qwen3_5Moe", {
        "text_config": {**_COMMON, **_NUMBER, **_SHARED, **_LINEAR}, "vision_config": _VISION, **_SAW,
    }),
    "qwen3_moe_in_llava": _multimodal("Llava", {
        "text_config": {**_COMMON, **_NUMBER, "model_type": "qwen3_moe"},
        "vision_config": {**_SMALL_VISION, "model_type": "siglip_vision_model"}, "image_token_index": IMAGE,
        "vision_feature_select_strategy": "full",
    }),
    "qwen3_omni_moe_thinker": _multimodal("Qwen3OmniMoeThinker", {
        "text_config": {**_COMMON, **_NUMBER, **_rope(2, 3, 3)}, "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
        "audio_config": {
            "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8,
            "output_dim": HIDDEN, "downsample_hidden_size": 8,
        },
        **_SAW, "audio_token_id": AUDIO, "audio_start_token_id": OTHER_START,
    }),
    "qwen3_omni_moe_talker": Architecture("Qwen3OmniMoeTalkerConfig", "Qwen3OmniMoeTalkerForConditionalGeneration", {
        "text_config": {**_COMMON, **_NUMBER, **_SHARED, **_rope(2, 3, 3)}, "thinker_hidden_size": HIDDEN, "num_code_groups": 4,
        "code_predictor_config": {**_COMMON, "num_hidden_layers": 1, "num_code_groups": 4}, "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
    }, _embeddings, generates=False),
    "qwen3_vl_moe": _multimodal("Qwen3VLMoe", {
        "text_config": {**_COMMON, **_NUMBER, **_rope(2, 3, 3)}, "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
        **_SAW,
    }, _images(3 * 2 * 8 * 8, "mm_token_type_ids")),
    # Layers clamp what their experts compute at limits of their own.
    "step3p7": _multimodal("Step3p7", {
        "text_config": {
            **_COMMON, **_LOCAL, **_MLPS, "n_routed_experts": EXPERTS, "share_expert_dim": INTERMEDIATE, "sliding_window": 16,
            "swiglu_limits": [None, 0.5, None, 0.0, 1.0],
        },
        "vision_config": _SMALL_VISION, "image_token_id": IMAGE,
    }),
    "unlimited_ocr": _multimodal("UnlimitedOcr", {
        "text_config": {**_COMMON, **_ROUTED, **_MLPS, "sliding_window": 32},
        "vision_config": {"sam_config": _SAM, "encoder_config": _SMALL_VISION}, "image_token_id": IMAGE,
    }),
}
# fmt: on
ARCHITECTURES = {name: architecture for name, architecture in _ALL.items() if architecture.exists}
ABSENT = tuple(name for name in _ALL if name not in ARCHITECTURES)


def build(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> PreTrainedModel:
    """A model of an architecture on the CPU, in eval mode, with the same weights for the same seed.

    Weights are drawn anew, large enough that a wrong expert shows: some classes leave theirs zero or uninitialised.
    """
    architecture = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = getattr(transformers, architecture.model)(architecture.make_config()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("tid2eid"):
                buffer.copy_(torch.randint(0, EXPERTS, buffer.shape, generator=generator))
    # As `from_pretrained` loads it: some parts of some models don't work in anything but float32.
    whole = re.compile("|".join(rf"(^|\.){part}($|\.)" for part in model._keep_in_fp32_modules_strict or ()) or "(?!)")
    for parameter_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not whole.search(parameter_name):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    return model


@torch.no_grad()
def logits_of(name: str, model: nn.Module) -> torch.Tensor:
    """What one forward over the prompt gives: logits, or the last map of features."""
    output = model(**inputs_of(name, model))
    return output.logits if "logits" in output else output.feature_maps[-1]


@torch.no_grad()
def run(name: str, model: nn.Module) -> Output:
    """What a model of an architecture computes for its prompt: one forward and, where it has that, a greedy generation."""
    architecture, inputs = ARCHITECTURES[name], inputs_of(name, model)
    logits = logits_of(name, model)
    if not architecture.generates:
        return Output(logits)
    inputs.pop("decoder_input_ids", None)
    torch.manual_seed(1)  # for those that begin with noise
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    tokens = model.generate(**inputs, **length, do_sample=False, **architecture.generation)
    return Output(logits, getattr(tokens, "sequences", tokens))


def inputs_of(name: str, model: nn.Module) -> Options:
    """The arguments of a forward, in the dtype and on the device of a model."""
    inputs = ARCHITECTURES[name].inputs(torch.Generator().manual_seed(1))
    dtypes = {key: model.dtype if value.is_floating_point() else value.dtype for key, value in inputs.items()}
    return {key: value.to(model.device, dtypes[key]) for key, value in inputs.items()}
