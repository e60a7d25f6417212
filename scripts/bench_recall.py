"""The recall task in every arm: does the trained demonstration model still find the facts that are in its prompt?"""

from __future__ import annotations

import time
from typing import Any

from hf_prefetch.demo import load_demo_tokenizer, make_recall_prompts, recall_score

__all__ = ["Recall"]


class Recall:
    """The prompts, made once."""

    def __init__(self, prompts: int) -> None:
        self._tokenizer = load_demo_tokenizer()
        self._prompts = make_recall_prompts(prompts, seed=0, tokens=600, tokenizer=self._tokenizer)

    def score(self, model: Any) -> dict[str, Any]:
        """Right answers, all answers, and the time that they took."""
        begin = time.perf_counter()
        result = recall_score(model, self._tokenizer, self._prompts)
        seconds = time.perf_counter() - begin
        return {"correct": result.correct, "total": result.total, "answers": list(result.answers), "seconds": seconds}
