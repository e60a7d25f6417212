"""Tiny random Mixture-of-Experts models of the supported families, and what tests need to compare two runs of one.

Nothing is downloaded: configs are written down here and weights are drawn from a seed, large enough that every expert
of every layer shows in the logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hf_prefetch import Report, disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.banks.forms import parts

VOCABULARY = 128
EXPERTS = 8
TOP_K = 2
# The shortest prompt, in tokens, that takes the lookahead path: two routed ids per expert.
GATE = 2 * EXPERTS // TOP_K

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Multi-head latent attention, and a first layer without experts.
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# 5 or 7 layers with experts: a multiple of no number of slots, so the rotation is another one in each pass.
_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_COMMON, num_hidden_layers=5, num_local_experts=EXPERTS, intermediate_size=32),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_COMMON,
        num_hidden_layers=5,
        num_experts=EXPERTS,
        intermediate_size=128,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, num_hidden_layers=7, num_experts=EXPERTS, intermediate_size=128, moe_intermediate_size=32, mlp_only_layers=[]
    ),
    "olmoe": lambda: OlmoeConfig(
        **{**_COMMON, "num_key_value_heads": 4}, num_hidden_layers=5, num_experts=EXPERTS, intermediate_size=32
    ),
    "deepseek_v2": lambda: DeepseekV2Config(**_DEEPSEEK, topk_method="greedy"),
    "deepseek_v3": lambda: DeepseekV3Config(**_DEEPSEEK, n_group=2, topk_group=1),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        num_hidden_layers=7,
        num_local_experts=EXPERTS,
        intermediate_size=32,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
    ),
}
FAMILIES = tuple(_CONFIGS)
# Whether whatever is enabled is packed, see conftest.py.
PACKED = os.environ.get("HF_PREFETCH_TEST_PACKED") == "1"


def build(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, changes: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A model of a family on the CPU, in eval mode, with the same weights for the same seed.

    Where everything is to be packed it is in bfloat16, whatever is asked for: nothing else is packed. `changes` are what its
    config has otherwise.
    """
    dtype = torch.bfloat16 if PACKED else dtype
    config = _CONFIGS[family]()
    config.update(changes or {})
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor, scale: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + mean)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                draw(parameter, 0.1, mean=1.0)
            else:
                draw(parameter, 0.15 if parameter.dim() == 3 else 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                draw(buffer, 0.05)
    # Generation never stops early, so that both runs take the same number of steps.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


def prompt(tokens: int, batch: int = 1, *, seed: int = 1, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (batch, tokens), generator=generator).to(device)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are `w4` to `w127`, padding on the left."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{number}" for number in range(4, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a model by name, found without the package under test."""
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def bank_bytes(model: nn.Module) -> int:
    """The bytes of all experts of a model."""
    parameters = [parameter for module in experts_of(model).values() for parameter in module.parameters()]
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@contextmanager
def prefetching(model: PreTrainedModel, slots: int, device: torch.device) -> Iterator[Callable[[], Report]]:
    """Prefetching is on inside and off afterwards, whatever happens. Gives the function that makes the report."""
    enable_expert_prefetch(model, slots=slots, device=device, progress=False)
    try:
        yield model.expert_prefetch.report
    finally:
        disable_expert_prefetch(model)


@dataclass
class Recording:
    """Inputs and outputs of every call of an experts module, in the order of the calls."""

    calls: list[tuple[str, tuple[torch.Tensor, ...], torch.Tensor]] = field(default_factory=list)

    def assert_equal(self, other: Recording) -> None:
        """The same modules were called in the same order, with the same inputs, and gave the same bits."""
        assert [name for name, _, _ in self.calls] == [name for name, _, _ in other.calls]
        for position, (mine, theirs) in enumerate(zip(self.calls, other.calls, strict=True)):
            where = f"call {position}, {mine[0]}"
            assert all(map(torch.equal, mine[1], theirs[1])), f"{where}: its inputs differ"
            assert torch.equal(mine[2], theirs[2]), f"{where}: same inputs, but its outputs differ"


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record what goes into and comes out of the experts modules inside."""
    record = Recording()

    def keep(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            record.calls.append((name, tuple(value.detach().clone() for value in inputs), output.detach().clone()))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in experts_of(model).items()]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Snapshot:
    """A model as it is: values, dtypes and devices of its state, and how its modules look from outside."""

    state: dict[str, torch.Tensor]
    parameters: dict[str, tuple[int, torch.Size, tuple[int, ...], bool]]
    attributes: dict[str, set[str]]
    forwards: dict[str, Any]
    hooks: dict[str, Any]
    training: dict[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        modules = dict(model.named_modules())
        return cls(
            state={name: tensor.clone() for name, tensor in model.state_dict().items()},
            parameters={
                name: (id(parameter), parameter.shape, parameter.stride(), parameter.requires_grad)
                for name, parameter in model.named_parameters()
            },
            # Compiled code is thrown away with the hooks that it was compiled around.
            attributes={name: set(module.__dict__) - {"_compiled_call"} for name, module in modules.items()},
            forwards={name: module.forward for name, module in modules.items()},
            hooks={name: getattr(module, "_hf_hook", None) for name, module in modules.items()},
            training={name: module.training for name, module in modules.items()},
        )

    def assert_same_values(self, model: nn.Module) -> None:
        """The model's state has the same names, dtypes and values, wherever it is now."""
        state = model.state_dict()
        assert list(state) == list(self.state)
        for name, tensor in state.items():
            assert tensor.dtype == self.state[name].dtype, name
            before = parts("value", self.state[name])
            for part, now in parts("value", tensor).items():
                assert torch.equal(now.cpu(), before[part].cpu()), f"{name} has other values than before"

    def assert_restored(self, model: nn.Module) -> None:
        """The model is as it was: state and devices, Parameters, attributes, forwards and hooks of every module."""
        self.assert_same_values(model)
        for name, tensor in model.state_dict().items():
            assert tensor.device == self.state[name].device, f"{name} is on another device than before"
        now = Snapshot.of(model)
        for aspect in ("parameters", "attributes", "forwards", "hooks", "training"):
            before, after = getattr(self, aspect), getattr(now, aspect)
            changed = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()}
            changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
            assert not changed, f"{aspect} differ from before: {changed}"
