"""The demonstration model: what ships, that it writes text, and that it answers from its prompt."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_prefetch.demo import (
    RecallPrompt,
    RecallResult,
    demo_model_path,
    load_demo_model,
    load_demo_tokenizer,
    make_recall_prompts,
    recall_score,
)
from hf_prefetch.demo.recall import KEYS, filler_verses


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_demo_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_demo_model(torch.float32)


def test_it_is_small_enough_to_ship() -> None:
    files = list(Path(demo_model_path()).iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in files
    }
    assert sum(file.stat().st_size for file in files) <= 12_000_000


def test_every_layer_is_a_mixture_of_experts(model: PreTrainedModel) -> None:
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 6
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (16, 4, True)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 4096
    for layer in model.model.layers:
        assert layer.mlp.experts.gate_up_proj.shape == (16, 2 * config.moe_intermediate_size, config.hidden_size)
        assert layer.mlp.experts.down_proj.shape == (16, config.hidden_size, config.moe_intermediate_size)


def test_it_loads_as_it_is_stored() -> None:
    model = load_demo_model()
    assert model.dtype == torch.bfloat16
    assert not model.training


def test_the_tokenizer_gives_back_what_it_is_given(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "And he said, The number of amber is 4821.\n\nSelah: naïve (1611)"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size <= 2048
    assert len(tokenizer("4821")["input_ids"]) == 4
    assert all(len(tokenizer(f" {key}")["input_ids"]) == 1 for key in KEYS)


def test_all_experts_are_used(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = tokenizer(" ".join(filler_verses()[:60]), return_tensors="pt")
    with torch.inference_mode():
        layers = model(input_ids=inputs["input_ids"], output_router_logits=True).router_logits
    assert len(layers) == model.config.num_hidden_layers
    for logits in layers:
        counts = torch.bincount(logits.topk(4).indices.flatten(), minlength=16)
        assert counts.min() > 0.1 * counts.float().mean()


@pytest.mark.parametrize("prompt", ["And it came to pass in those days, that", "The king said unto", "Hear, O my son,"])
def test_it_writes_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    first = model.generate(**inputs, max_new_tokens=80)
    assert torch.equal(first, model.generate(**inputs, max_new_tokens=80))
    words = re.findall(r"[a-z]+", tokenizer.decode(first[0, inputs["input_ids"].shape[1] :]).lower())
    known = set(re.findall(r"[a-z]+", " ".join(filler_verses()).lower()))
    assert len(words) >= 50
    assert sum(word in known for word in words) >= 0.85 * len(words)
    assert len(set(words)) >= 25
    assert len(set(pairwise(words))) >= 40


def test_unseen_text_is_no_surprise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    # Verses out of order are harder than running text, whose perplexity is about 16.
    ids = tokenizer(" ".join(filler_verses()[:60]), return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 3.4


def test_prompts_depend_on_the_seed_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = make_recall_prompts(6, seed=3, tokens=400, tokenizer=tokenizer)
    assert prompts == make_recall_prompts(6, seed=3, tokens=400)
    assert prompts[:4] == make_recall_prompts(4, seed=3, tokens=400, tokenizer=tokenizer)
    assert prompts != make_recall_prompts(6, seed=4, tokens=400, tokenizer=tokenizer)
    assert len({prompt.prompt for prompt in prompts}) == 6


@pytest.mark.parametrize(("tokens", "facts"), [(200, 2), (200, 8), (600, 8), (1000, 16)])
def test_prompts_ask_for_a_fact_that_they_hold(tokenizer: PreTrainedTokenizerBase, tokens: int, facts: int) -> None:
    for item in make_recall_prompts(5, seed=1, tokens=tokens, facts=facts, tokenizer=tokenizer):
        found = dict(re.findall(r"The number of (\w+) is (\d{4})\.", item.prompt))
        question = re.search(r"\nQuestion: what is the number of (\w+)\? Answer:$", item.prompt)
        assert question is not None
        assert len(found) == facts
        assert found[question[1]] == item.answer
        assert tokens - 40 <= len(tokenizer(item.prompt)["input_ids"]) <= tokens


def test_prompts_that_cannot_be_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="too few"):
        make_recall_prompts(1, tokens=60, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="facts"):
        make_recall_prompts(1, facts=0, tokenizer=tokenizer)


def test_it_answers_from_its_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = make_recall_prompts(20, seed=0, tokens=500, tokenizer=tokenizer)
    result = recall_score(model, tokenizer, prompts)
    assert result.total == len(result.answers) == 20
    assert result.correct == sum(a == b.answer for a, b in zip(result.answers, prompts, strict=True))
    assert result.correct >= 19


def test_it_answers_from_a_long_prompt_in_bfloat16(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = make_recall_prompts(2, seed=5, tokens=1000, tokenizer=tokenizer)
    assert recall_score(load_demo_model(), tokenizer, prompts).correct == 2


def test_damage_to_the_experts_shows(tokenizer: PreTrainedTokenizerBase) -> None:
    model = load_demo_model(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[::2] = 0
    prompts = make_recall_prompts(5, seed=0, tokens=300, tokenizer=tokenizer)
    assert recall_score(model, tokenizer, prompts).score < 1


def test_the_score_of_a_result() -> None:
    assert RecallResult(3, 4, ("1", "2", "3", "x")).score == 0.75
    assert RecallResult(0, 0, ()).score == 0
    assert RecallPrompt("a", "b") == RecallPrompt("a", "b")
