#!/usr/bin/env python3
"""The main job on real text: one model, prefetching off and on, and every bit compared.

    python scripts/demo.py [--slots 3] [--new-tokens 100] [--device cuda]

Runs the demonstration model that ships with the package on the accelerator, or on the CPU where there is none:
a continuation with all weights resident, the same with its experts in host memory, the logits of a prompt and the
tokens of the continuation compared for equality, and the recall task in both arms. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.demo import DEMO_PROMPT, load_demo_model, load_demo_tokenizer, make_recall_prompts, recall_score


def heading(text: str) -> None:
    """A line that separates one part of the output from the next."""
    print(f"\n== {text} " + "=" * max(0, 90 - len(text)))


class Arm:
    """What one way of running the model gave."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> None:
        self.name = name
        prompts = make_recall_prompts(20, seed=0, tokens=600, tokenizer=tokenizer)
        inputs = tokenizer(DEMO_PROMPT, return_tensors="pt").to(model.device)
        long = tokenizer(prompts[0].prompt, return_tensors="pt").to(model.device)
        assert isinstance(model, GenerationMixin)
        with torch.inference_mode():
            self.logits = model(**long).logits
            begin = time.perf_counter()
            self.tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
            self.text = tokenizer.decode(self.tokens[0], skip_special_tokens=True)
            self.seconds = time.perf_counter() - begin
            self.recall = recall_score(model, tokenizer, prompts)
        print(f"{name}: {new_tokens} tokens in {self.seconds:.2f} s, recall {self.recall.correct}/{self.recall.total}")


def main() -> int:
    """Run both arms and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--device", default=None, help="the accelerator that torch finds, or the CPU, if not given")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    # Kernels whose bits depend on what else is allocated would hide what is compared here.
    torch.use_deterministic_algorithms(True, warn_only=True)

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(options.device) if options.device else accelerator or torch.device("cpu")
    tokenizer, model = load_demo_tokenizer(), load_demo_model()
    model.to(device)
    heading(f"{type(model).__name__}, {model.num_parameters():,} parameters in {model.dtype}, on {device}")
    off = Arm("prefetching off", model, tokenizer, options.new_tokens)
    enable_expert_prefetch(model, slots=options.slots)
    on = Arm("prefetching on ", model, tokenizer, options.new_tokens)
    report = model.expert_prefetch.report()
    disable_expert_prefetch(model)

    heading("the continuation, with prefetching on")
    print(on.text)
    heading("what prefetching did")
    print(report)
    heading("checks")
    checks = {
        "the logits of a 600-token prompt are equal, bit for bit": torch.equal(off.logits, on.logits),
        "the tokens of the continuation are equal": torch.equal(off.tokens, on.tokens),
        f"recall with prefetching off: {off.recall.correct}/{off.recall.total}": off.recall.correct == off.recall.total,
        f"recall with prefetching on: {on.recall.correct}/{on.recall.total}": on.recall.correct == on.recall.total,
        "both arms gave the same answers": off.recall.answers == on.recall.answers,
        f"experts arrived ahead of use ({report.lookahead_hits:,} times)": report.lookahead_hits > 0,
        "nothing failed": report.fallbacks == 0,
    }
    for check, passed in checks.items():
        print(f"{'PASS' if passed else 'FAIL'}  {check}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
