"""The recall task: facts scattered through a long prompt, and a question about one of them.

A prompt is a run of filler verses with a few facts between them ("The number of amber is 4821.") and ends in a
question ("Question: what is the number of amber? Answer:"). The values are random, so an answer can only come from
the prompt: the model has to find the fact, perhaps a thousand tokens back, and copy it exactly. Small damage to the
weights that no one would notice in running text shows here as wrong digits.

Everything is a pure function of its arguments: the same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_KEYS = """
amber anchor apple arrow basil basket beaver bottle bronze button candle canyon carpet castle cedar
cherry chimney clover cobalt copper coral cotton crimson crystal daisy desert diamond dolphin eagle
falcon feather fern forest garden ginger glacier granite guitar hammer harbor hazel helmet indigo island
ivory jacket jasper kettle ladder lantern lemon lilac linen lotus magnet mango maple marble meadow
mirror needle nickel olive onyx orange orchid otter palace paper pearl pencil pepper planet quartz
rabbit raven ribbon rocket rose ruby saffron salmon silver spruce sugar temple ticket tiger topaz tulip
tunnel turtle velvet violet walnut window winter zebra
"""
KEYS: tuple[str, ...] = tuple(_KEYS.split())
"""The things that a fact may be about."""


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt that ends in a question, and the exact text of the right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class RecallResult:
    """What a model answered: ``answers[i]`` belongs to the i-th prompt, so two runs compare answer by answer."""

    correct: int
    total: int
    answers: tuple[str, ...]

    @property
    def score(self) -> float:
        """The share of right answers, between 0 and 1."""
        return self.correct / self.total if self.total else 0.0


def fact_text(key: str, value: str) -> str:
    """State that the number of ``key`` is ``value``."""
    return f"The number of {key} is {value}."


def question_text(key: str) -> str:
    """Ask for the number of ``key``; the answer follows after one space and ends in a full stop."""
    return f"Question: what is the number of {key}? Answer:"


def random_value(rng: Any) -> str:
    """Draw a value: four digits, the first not zero. ``rng`` needs only ``random()``."""
    return str(1000 + int(rng.random() * 9000))


@cache
def filler_verses() -> tuple[str, ...]:
    """Return the filler bank, one verse an entry. The model was not trained on these verses."""
    return tuple((Path(__file__).resolve().parent / "filler.txt").read_text(encoding="ascii").splitlines())


def make_recall_prompts(
    n: int = 20,
    seed: int = 0,
    *,
    tokens: int = 600,
    facts: int = 8,
    tokenizer: Any = None,
) -> list[RecallPrompt]:
    """Build ``n`` prompts of at most ``tokens`` tokens (and about as many), each with ``facts`` facts in it.

    ``tokenizer`` counts the tokens; without one the demonstration model's own is loaded. The model was trained
    on prompts of up to about 1,100 tokens.
    """
    if not 1 <= facts <= len(KEYS):
        raise ValueError(f"facts must be between 1 and {len(KEYS)}, not {facts}")
    if tokenizer is None:
        from . import load_demo_tokenizer

        tokenizer = load_demo_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    verses = filler_verses()
    lengths = [count(" " + verse) for verse in verses]
    prompts = []
    for index in range(n):
        rng = random.Random(f"recall {seed} {index}")
        keys = rng.sample(KEYS, facts)
        values = [random_value(rng) for _ in keys]
        asked = rng.randrange(facts)
        statements = [fact_text(key, value) for key, value in zip(keys, values, strict=True)]
        question = "\n" + question_text(keys[asked])
        room = tokens - count(question) - sum(count(" " + statement) for statement in statements)
        if room < 0:
            raise ValueError(f"{tokens} tokens are too few for {facts} facts and a question")
        pieces: list[str] = []
        for number in rng.sample(range(len(verses)), len(verses)):
            if lengths[number] <= room:
                pieces.append(verses[number])
                room -= lengths[number]
        for statement in statements:
            pieces.insert(rng.randint(0, len(pieces)), statement)
        prompts.append(RecallPrompt(" ".join(pieces) + question, values[asked]))
    return prompts


def recall_score(model: Any, tokenizer: Any, prompts: Sequence[RecallPrompt]) -> RecallResult:
    """Let ``model`` answer every prompt by greedy decoding, one prompt at a time, and compare exactly."""
    import torch

    answers = []
    for item in prompts:
        inputs = tokenizer(item.prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
        budget = len(tokenizer(f" {item.answer}.", add_special_tokens=False)["input_ids"])
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=budget,
                do_sample=False,
                no_repeat_ngram_size=0,  # the model's own setting would forbid to repeat the fact
                pad_token_id=tokenizer.pad_token_id,
            )
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.append(text.partition(".")[0].strip())
    correct = sum(answer == item.answer for answer, item in zip(answers, prompts, strict=True))
    return RecallResult(correct, len(prompts), tuple(answers))
