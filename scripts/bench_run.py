"""The run of the benchmark: one model object through all arms, timed first and then compared with the resident arm."""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import bench_report
from bench_arms import Arm, PinnedBlock, make_arm
from bench_exact import Pass, equality, needed, record
from bench_models import Subject, build, describe_machine, describe_settings

__all__ = ["Bench"]

DECODE = "decode"
# Tokens of the generation that is compared at every experts module.
COMPARED_TOKENS = 3

Json = dict[str, Any]


class Clock(StoppingCriteria):
    """Notes when each token of a generation is there. Never stops it."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.stamps: list[float] = []
        self._synchronize = synchronize

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._synchronize()
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Bench:
    """One run: the options, the model, what the resident arm gave, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: torch.device = options.device
        self.begin = time.perf_counter()
        self.references: dict[str, Pass] = {}
        self.tokens: list[int] | None = None
        self.results: Json = {
            "schema": bench_report.SCHEMA,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "command": options.command,
            "elapsed_seconds": 0.0,
            "machine": describe_machine(self.device),
            "settings": {},
            "model": {},
            "link": {},
            "needed": {},
            "arms": {},
            "checks": [],
        }
        self.subject: Subject  # made by `build`

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything, in order. What fails is noted and the rest goes on."""
        self.build()
        self.measure_link("start")
        for name in self.options.arms:
            if self.out_of_time():
                self.results["arms"][name] = new_arm("skipped", "out of time")
                continue
            self.run_arm(name)
            self.save()
        self.measure_link("end")

    def build(self) -> None:
        """Make the model and describe it."""
        options = self.options
        seconds, self.subject = self.timed(lambda: build(options.model, options.layers, options.checkpoint, self.device))
        self.subject.tidy()
        banks = self.subject.bank_bytes
        config = self.subject.model.config
        self.results["model"] = {
            "name": Path(options.checkpoint).name if options.checkpoint else options.model,
            "class": type(self.subject.model).__name__,
            "random_weights": options.checkpoint is None,
            "layers": config.num_hidden_layers,
            "banks": len(banks),
            "bank_bytes": sum(banks.values()),
            "largest_bank_bytes": max(banks.values()),
            "experts": self.subject.num_experts,
            "experts_per_token": getattr(config, "num_experts_per_tok", None),
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "dtype": str(self.subject.model.dtype).removeprefix("torch."),
            "model_bytes": sum(p.numel() * p.element_size() for p in self.subject.model.parameters()),
            "build_seconds": seconds,
            "checksum": self.subject.checksum(),
        }
        self.results["settings"] = describe_settings(self.subject, options)
        # Everything that is there now stays: collections of what the arms leave need not look at it again.
        gc.freeze()
        kind = self.results["model"]["class"]
        self.say(f"{kind}: {len(banks)} banks, {sum(banks.values()) / 1e9:.2f} GB, in {seconds:.1f} s")

    def measure_link(self, when: str) -> None:
        """Time copies of one bank from page-locked memory."""
        nbytes = self.results["model"]["largest_bank_bytes"]
        block = PinnedBlock(nbytes, self.device)
        try:
            target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            copy = functools.partial(target.copy_, block.bytes, non_blocking=True)
            times = [self.timed(copy)[0] for _ in range(13)][3:]
        finally:
            block.release()
        self.results["link"] |= {"bytes": nbytes, when: times}
        self.say(f"link: {nbytes / statistics.median(times) / 1e9:.1f} GB/s ({when})")

    def run_arm(self, name: str) -> None:
        """Measure one arm, compare it, and leave the model as it was, whatever happens on the way."""
        arm, begin = make_arm(name, self.subject), time.perf_counter()
        result = self.results["arms"][name] = new_arm("running") | {"looks_ahead": arm.looks_ahead}
        self.say(f"{name}: enter")
        try:
            with arm:
                result["enter"] = arm.entered
                self.measure(arm, result)
                self.compare(arm, result)
                result["report"] = arm.report()
            result["weights_unchanged"] = self.subject.checksum() == self.results["model"]["checksum"]
            result["status"] = "ok"
        except Exception as error:  # noqa: BLE001 - the other arms go on, and this error is in the results
            result.update(status="failed", error=one_line(error))
            self.say(f"{name}: {result['error']}")
        except BaseException:
            result.update(status="failed", error="stopped before its end")
            raise
        result["seconds"] = time.perf_counter() - begin
        self.subject.tidy()

    def out_of_time(self) -> bool:
        """Whether nothing new should be started."""
        limit: float = self.options.time_limit
        return 0 < limit < time.perf_counter() - self.begin

    # -- times and memory -------------------------------------------------------------------------------------------

    def measure(self, arm: Arm, result: Json) -> None:
        """Time prefills of all lengths, and decode."""
        options = self.options
        lengths = [n for n in options.slow_lengths if n in options.lengths] if arm.slow else options.lengths
        for length in lengths:
            repeats, warmups = (options.slow_repeats, 1) if arm.slow else (options.repeats, options.warmups)
            prefill = functools.partial(self.prefill, self.prompt(length))
            self.point(arm, result, str(length), length, functools.partial(self.time_prefill, prefill, repeats, warmups))
        tokens = options.slow_decode_tokens if arm.slow else options.decode_tokens
        if tokens:
            time_decode = functools.partial(self.time_decode, result, tokens)
            self.point(arm, result, DECODE, options.decode_prompt, time_decode)

    def point(self, arm: Arm, result: Json, key: str, tokens: int, measure: Callable[[Arm], Json]) -> None:
        """One measurement, with the memory that it took; an error ends it and nothing else."""
        point: Json = {"tokens": tokens}
        result["points"][key] = point
        resident = self.results["arms"].get("resident", {}).get("points", {}).get(key, {})
        if self.out_of_time():
            point["error"] = "skipped: out of time"
        elif "error" in resident and resident is not point:
            point["error"] = "skipped: the resident arm failed here"
        else:
            self.subject.tidy()
            try:
                point |= measure(arm)
                result["points"][key] = point
                self.say(f"{arm.name}: {key}: {statistics.median(point['seconds']):.4f} s")
            except Exception as error:  # noqa: BLE001 - out of memory at one length, say
                point["error"] = one_line(error)
                self.say(f"{arm.name}: {key}: {point['error']}")
        self.save()

    def time_prefill(self, prefill: Callable[[], torch.Tensor], repeats: int, warmups: int, arm: Arm) -> Json:
        """Times of a prefill from an empty cache; the ring is cold, since no pass leaves a bank of the next one behind."""
        for _ in range(warmups):
            prefill()
        before = self.before(arm)
        seconds = [self.timed(prefill)[0] for _ in range(repeats)]
        return {"seconds": seconds} | self.cost(arm, before, repeats)

    def time_decode(self, result: Json, tokens: int, arm: Arm) -> Json:
        """Times between tokens of a generation, as `generate` gives them."""
        self.generate(self.prompt(self.options.decode_prompt), 2)
        before = self.before(arm)
        ids, stamps = self.generate(self.prompt(self.options.decode_prompt), tokens + 1)
        seconds = [end - begin for begin, end in itertools.pairwise(stamps)]
        if arm.name == "resident":
            self.tokens = ids
        if self.tokens is not None:
            # Slow arms generate fewer.
            result["tokens_equal"] = all(itertools.starmap(operator.eq, zip(ids, self.tokens, strict=False)))
        cost = self.cost(arm, before, 1)
        if cost["moved_bytes"] is not None and arm.name != "resident":
            # The prefill of that generation moved the banks once, or less; what is left is the tokens'.
            prefill = self.results["model"]["bank_bytes"]
            cost["moved_bytes"] = max(cost["moved_bytes"] - prefill, 0) // tokens
        return {"seconds": seconds} | cost

    def before(self, arm: Arm) -> tuple[int | None, Json]:
        """Count from here on: the peak of device memory, and what the arm counts."""
        self.subject.tidy()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return arm.moved(), arm.report()

    def cost(self, arm: Arm, before: tuple[int | None, Json], repeats: int) -> Json:
        """What a pass took besides time: bytes over the link, device memory, and what the arm counted."""
        moved, counted = arm.moved(), arm.report()
        cost: Json = {
            "moved_bytes": None if moved is None or before[0] is None else (moved - before[0]) // repeats,
            "peak_bytes": None,
            "reserved_bytes": None,
        }
        if self.device.type == "cuda":
            cost["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            cost["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        grown = {name: value - before[1][name] for name, value in counted.items() if isinstance(value, int | float)}
        # Of one pass; of the whole generation where decode is timed.
        return cost | {"counters": {name: value / repeats for name, value in grown.items() if value}}

    def timed(self, action: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds by the host's clock, the device synchronised at both ends, and the result."""
        self.synchronize()
        begin = time.perf_counter()
        value = action()
        self.synchronize()
        return time.perf_counter() - begin, value

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- what is run ------------------------------------------------------------------------------------------------

    def prompt(self, length: int) -> torch.Tensor:
        """The same random tokens for the same length, whichever arm asks."""
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, self.results["model"]["vocab_size"], (1, length), generator=generator).to(self.device)

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """One forward over a prompt with a new cache. No mask is passed, so attention needs no memory for one."""
        logits: torch.Tensor = self.subject.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].clone()

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and when each of them was there."""
        clock = Clock(self.synchronize)
        output = self.subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return output[0, ids.shape[1] :].tolist(), clock.stamps

    # -- exactness --------------------------------------------------------------------------------------------------

    def compare(self, arm: Arm, result: Json) -> None:
        """Run every compared length once more and hold it against the resident arm; the resident arm against itself."""
        options = self.options
        lengths = [n for n in options.equal_lengths if not arm.slow or n in options.slow_lengths]
        works: dict[str, Callable[[], torch.Tensor]] = {
            str(n): functools.partial(self.prefill, self.prompt(n))
            for n in lengths
            if result["points"].get(str(n), {}).get("seconds")
        }
        if result["points"].get(DECODE, {}).get("seconds"):
            works[DECODE] = self.generated_logits
        for key, work in works.items():
            if self.out_of_time():
                return
            try:
                if arm.name == "resident":
                    self.references[key] = record(self.subject, work).to(torch.device("cpu"))
                    self.results["needed"][key] = needed(self.subject, self.references[key], decode=key == DECODE)
                if key in self.references:
                    result["equality"][key] = equality(self.subject, self.references[key], record(self.subject, work))
                    self.say(f"{arm.name}: {key}: equal: {bench_report.equality_word(result['equality'][key])}")
            except Exception as error:  # noqa: BLE001 - as above
                result["equality"][key] = {"error": one_line(error)}
                self.say(f"{arm.name}: {key}: comparison: {one_line(error)}")
            self.subject.tidy()

    @torch.no_grad()
    def generated_logits(self) -> torch.Tensor:
        """Logits of each step of a short generation."""
        ids = self.prompt(self.options.decode_prompt)
        output = self.subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COMPARED_TOKENS,
            min_new_tokens=COMPARED_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(output.logits)

    # -- output -----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write everything so far; a run that is killed leaves a whole file."""
        self.results["elapsed_seconds"] = time.perf_counter() - self.begin
        bench_report.derive(self.results)
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            draft = self.options.out.with_name(self.options.out.name + ".part")
            draft.write_text(json.dumps(self.results, indent=1) + "\n")
            draft.replace(self.options.out)


def new_arm(status: str, error: str | None = None) -> Json:
    """An arm's results before anything was measured."""
    fresh: Json = {"status": status, "enter": {}, "points": {}, "equality": {}}
    return fresh | ({"error": error} if error else {})


def one_line(error: BaseException) -> str:
    """An error as one line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
