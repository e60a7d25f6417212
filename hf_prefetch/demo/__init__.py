"""A tiny trained Mixture-of-Experts language model that ships with the package.

The model is a ``Qwen3MoeForCausalLM`` of about five million parameters. It writes text in the manner of the
King James Bible and answers questions about facts given earlier in its prompt (see :mod:`.recall`), so a change
in how its weights are moved or computed shows in what it says. ``model/README.md`` beside this file is its card.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recall import RecallPrompt, RecallResult, make_recall_prompts, recall_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEMO_PROMPT",
    "RecallPrompt",
    "RecallResult",
    "demo_model_path",
    "load_demo_model",
    "load_demo_tokenizer",
    "make_recall_prompts",
    "recall_score",
]

# A beginning that the model has a lot to say to.
DEMO_PROMPT = "And it came to pass in those days, that"


def demo_model_path() -> str:
    """Return the folder that holds the model, to be passed to any ``from_pretrained``."""
    return str(Path(__file__).resolve().parent / "model")


def load_demo_model(dtype: Any = "auto", **kwargs: Any) -> PreTrainedModel:
    """Load the model in evaluation mode.

    ``dtype`` "auto" keeps the bfloat16 of the checkpoint. Further arguments go to
    ``AutoModelForCausalLM.from_pretrained``.
    """
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype, **kwargs)
    return model  # in evaluation mode, as from_pretrained leaves it


def load_demo_tokenizer() -> PreTrainedTokenizerBase:
    """Load the model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())
