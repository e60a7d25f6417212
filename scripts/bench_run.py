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

import bench_report
from bench_arm import Arm
from bench_arms import make_arm
from bench_exact import Pass, equality, needed, record
from bench_host import PinnedBlock
from bench_models import Subject, build, describe_machine, describe_settings
from bench_passes import Passes, timed
from bench_recall import Recall
from bench_routing import Routing, profile_of
from bench_shapes import DEMO
from bench_table import equality_word
from routing_synthetic import PROFILES

__all__ = ["Bench"]

DECODE = "decode"
# Tokens of the generation that is compared at every experts module.
COMPARED_TOKENS = 3

Json = dict[str, Any]


class Bench:
    """One run: the options, the model, what the resident arm gave, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: torch.device = options.device
        self.begin = time.perf_counter()
        self.references: dict[str, Pass] = {}
        self.tokens: list[int] | None = None
        self.recall: Recall | None = None
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
        # Made by `build`.
        self.subject: Subject
        self.passes: Passes
        self.routing: Routing

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
        # Machines whose memory grows as it is used tell how much they have only now.
        self.results["machine"] |= describe_machine(self.device)

    def build(self) -> None:
        """Make the model and describe it."""
        options = self.options
        make = functools.partial(build, options.model, options.layers, options.checkpoint, self.device)
        seconds, self.subject = timed(self.device, make)
        profile = options.routing or (None if options.checkpoint else options.model)
        longest = max(*options.lengths, options.decode_prompt + options.decode_tokens + 2)
        self.routing = Routing(self.subject, profile and profile_of(self.subject, profile), longest)
        self.passes = Passes(self.subject, self.routing.begin)
        if "resident" in options.arms:
            self.subject.home = self.device
        self.subject.place_experts(self.subject.home)
        banks = self.subject.bank_bytes
        config = self.subject.model.config
        self.results["model"] = {
            "name": Path(options.checkpoint).name if options.checkpoint and options.model != DEMO else options.model,
            "class": type(self.subject.model).__name__,
            "random_weights": options.checkpoint is None,
            "routing": profile and (profile if profile in PROFILES else "default"),
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
        if options.model == DEMO and options.recall_prompts:
            self.recall = Recall(options.recall_prompts)
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
            times = [timed(self.device, copy)[0] for _ in range(13)][3:]
        finally:
            block.release()
        self.results["link"] |= {"bytes": nbytes, when: times}
        self.say(f"link: {nbytes / statistics.median(times) / 1e9:.1f} GB/s ({when})")

    def run_arm(self, name: str) -> None:
        """Measure one arm, compare it, and leave the model as it was, whatever happens on the way."""
        arm, begin = make_arm(name, self.subject, self.options), time.perf_counter()
        missing = arm.missing()
        if missing is not None:
            self.results["arms"][name] = new_arm("not installed", missing)
            self.say(f"{name}: {missing}")
            return
        result = self.results["arms"][name] = new_arm("running") | {"looks_ahead": arm.looks_ahead}
        self.say(f"{name}: enter")
        try:
            with arm:
                result["enter"] = arm.entered
                self.measure(arm, result)
                if self.recall is not None and arm.decodes:
                    result["recall"] = self.recall.score(self.subject.model)
                arm.relax()
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
        """Time prefills and decode, as much of them as an arm of this rank gets."""
        options = self.options
        side = (options.side_repeats, options.warmups, options.side_decode_tokens)
        lengths, (repeats, warmups, tokens) = {
            "main": (options.lengths, (options.repeats, options.warmups, options.decode_tokens)),
            "share": (options.share_lengths, side),
            "side": (options.side_lengths, side),
            "slow": (options.slow_lengths, (options.slow_repeats, 1, options.slow_decode_tokens)),
        }[arm.rank]
        for length in filter(options.lengths.__contains__, lengths):
            prefill = functools.partial(self.passes.prefill, self.passes.prompt(length))
            self.point(arm, result, str(length), length, functools.partial(self.time_prefill, prefill, repeats, warmups))
        if tokens and arm.decodes:
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
        seconds = [timed(self.device, prefill)[0] for _ in range(repeats)]
        return {"seconds": seconds} | self.cost(arm, before, repeats)

    def time_decode(self, result: Json, tokens: int, arm: Arm) -> Json:
        """Times between tokens of a generation, as `generate` gives them."""
        prompt = self.passes.prompt(self.options.decode_prompt)
        self.passes.generate(prompt, 2)
        before = self.before(arm)
        ids, stamps = self.passes.generate(prompt, tokens + 1)
        seconds = [end - begin for begin, end in itertools.pairwise(stamps)]
        if arm.name == "resident":
            self.tokens = ids
        if self.tokens is not None:
            # Slow arms generate fewer.
            result["tokens_equal"] = all(itertools.starmap(operator.eq, zip(ids, self.tokens, strict=False)))
        cost = self.cost(arm, before, 1)
        if cost["moved_bytes"] is not None and arm.name != "resident":
            # The prefill of that generation moved the banks once, or less; what is left is the tokens'.
            prefill = bench_report.host_bank_bytes(self.results, arm.name)
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

    # -- exactness --------------------------------------------------------------------------------------------------

    def compare(self, arm: Arm, result: Json) -> None:
        """Run every compared length once more and hold it against the resident arm; the resident arm against itself."""
        options = self.options
        works: dict[str, Callable[[], torch.Tensor]] = {
            str(n): functools.partial(self.passes.prefill, self.passes.prompt(n))
            for n in options.equal_lengths
            if result["points"].get(str(n), {}).get("seconds")
        }
        if result["points"].get(DECODE, {}).get("seconds"):
            prompt = self.passes.prompt(options.decode_prompt)
            works[DECODE] = functools.partial(self.passes.generated_logits, prompt, COMPARED_TOKENS)
        for key, work in works.items():
            if self.out_of_time():
                return
            try:
                if arm.name == "resident":
                    self.references[key] = record(self.subject, work).to(torch.device("cpu"))
                    self.results["needed"][key] = needed(self.subject, self.references[key], decode=key == DECODE)
                if key in self.references:
                    observed = record(self.subject, work)
                    with self.routing.off():
                        result["equality"][key] = equality(self.subject, self.references[key], observed)
                    self.say(f"{arm.name}: {key}: equal: {equality_word(result['equality'][key])}")
            except Exception as error:  # noqa: BLE001 - as above
                result["equality"][key] = {"error": one_line(error)}
                self.say(f"{arm.name}: {key}: comparison: {one_line(error)}")
            self.subject.tidy()

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
