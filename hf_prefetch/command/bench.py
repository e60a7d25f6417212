"""Bench: a user's own model, measured without prefetching (where it fits on the device) and with it.

What is reported are medians, the device synchronised at both ends. Prompts are random tokens, the same in both arms. The
logits of every prompt are compared in a pass of their own, under settings that make kernels repeatable, because what else
lies in device memory may otherwise change the last bit of a sum outside the experts.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers import __version__ as transformers_version

from .. import __version__
from ..api import disable_expert_prefetch, enable
from ..config import PrefetchConfig
from ..report import Report
from ..streams import StreamDevice

__all__ = ["Arm", "Bench", "Point"]

GIB = 2**30
# Of the device's free memory, what a resident model may take, so that activations and the KV cache have room.
_RESIDENT_SHARE = 0.9


@dataclass
class Point:
    """The prefill of a prompt of `tokens`, or the decode of one token after it.

    Attributes:
        seconds: the median, and `moved_bytes` what was sent to the device in that time; None without prefetching.
        hits, lookups: calls of one pass whose experts had been sent ahead, of those that look ahead.
        peak_bytes: of device memory; None on the CPU.
        logits_equal: whether they are, bit for bit, what the other arm gave; None if that one has none.
        error: why there is no measurement.
    """

    what: str
    tokens: int
    seconds: float | None = None
    moved_bytes: int | None = None
    hits: int | None = None
    lookups: int | None = None
    peak_bytes: int | None = None
    logits_equal: bool | None = None
    error: str | None = None

    def cells(self, arm: str) -> list[str]:
        """The row of a table."""
        if self.seconds is None:
            return [arm, self.what, f"{self.tokens:,}", self.error or "not measured"]
        tokens = 1 if self.what == "decode" else self.tokens
        rate = f"{self.moved_bytes / self.seconds / 1e9:.2f}" if self.moved_bytes else "-"
        ahead = f"{self.hits} of {self.lookups}" if self.lookups else "-"
        peak = "-" if self.peak_bytes is None else f"{self.peak_bytes / GIB:.2f}"
        equal = {None: "-", True: "equal", False: "DIFFER"}[self.logits_equal]
        seconds, speed = f"{self.seconds:.4f}", f"{tokens / self.seconds:,.1f}"
        return [arm, self.what, f"{self.tokens:,}", seconds, speed, rate, ahead, peak, equal]


_HEAD = ["arm", "phase", "prompt", "seconds", "tokens/s", "link GB/s", "sent ahead", "peak GiB", "logits"]


@dataclass
class Arm:
    """One way of running the model: "off" is resident, "on" prefetches."""

    name: str
    skipped: str | None = None
    points: list[Point] = field(default_factory=list)
    report: Report | None = None


class Clock(StoppingCriteria):
    """Notes when each token of a generation is there. Never stops it."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._note()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Bench:
    """Measures one model in two arms. `run` fills `arms` and leaves the model on the CPU, as it was."""

    def __init__(self, model: Any, config: PrefetchConfig, home: StreamDevice, *, repeats: int = 3) -> None:
        # Read when cuBLAS is first used: a fixed workspace, so that its sums don't depend on what ran before.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.model = model
        self.config = config
        self.home = home
        self.repeats = repeats
        self.arms: list[Arm] = []
        self._logits: dict[int, torch.Tensor] = {}

    def run(self, lengths: Sequence[int], decode_tokens: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Measure prefills of `lengths`, and `decode_tokens` of decode (0 leaves it out) after the shortest of them."""
        off = Arm("off", skipped=self._does_not_fit())
        self.arms = [off]
        if off.skipped is None:
            try:
                self.model.to(self.home.device)
                self._measure(off, lengths, decode_tokens, say)
            except torch.OutOfMemoryError:
                off.skipped = f"no room for the whole model on {self.home.name}"
            finally:
                self.model.to("cpu")
                self.home.trim()
        if not self.config.slots:
            return
        self.arms.append(on := Arm("on"))
        enable(self.model, self.config, self.home)
        try:
            self._measure(on, lengths, decode_tokens, say)
            on.report = self._report()
        finally:
            disable_expert_prefetch(self.model)

    def _does_not_fit(self) -> str | None:
        needed, memory = _bytes_of(self.model), self._ask_device("mem_get_info")
        if memory is None or needed <= memory[0] * _RESIDENT_SHARE:
            return None
        return f"the model takes {needed / GIB:,.1f} GiB and {memory[0] / GIB:,.1f} GiB are free on {self.home.name}"

    def _measure(self, arm: Arm, lengths: Sequence[int], decode_tokens: int, say: Callable[[str], None]) -> None:
        works = [Point("prefill", length) for length in lengths] + [Point("decode", min(lengths))] * bool(decode_tokens)
        for point in works:
            say(f"{arm.name}: {point.what}, {point.tokens:,} tokens")
            arm.points.append(point)
            try:
                self._measure_point(point, decode_tokens)
            except torch.OutOfMemoryError:
                point.error = "out of device memory"
            self.home.trim()

    def _measure_point(self, point: Point, decode_tokens: int) -> None:
        torch.manual_seed(point.tokens)
        vocabulary = self.model.config.get_text_config().vocab_size
        prompt = torch.randint(0, vocabulary, (1, point.tokens), dtype=torch.int64, device="cpu").to(self.home.device)
        if point.what == "prefill":
            self._prefill(prompt)
        self._ask_device("reset_peak_memory_stats")
        times, before, after = self._decode(prompt, decode_tokens) if point.what == "decode" else self._prefills(prompt)
        if before is not None and after is not None:
            point.moved_bytes = (after.bytes_to_device - before.bytes_to_device) // len(times)
            point.hits = (after.lookahead_hits - before.lookahead_hits) // len(times)
            point.lookups = (after.lookahead_calls - before.lookahead_calls) // len(times)
        point.peak_bytes = self._ask_device("max_memory_allocated")
        if point.what == "prefill":
            with _repeatable():
                logits = self._prefill(prompt).cpu()
            other = self._logits.setdefault(point.tokens, logits)
            point.logits_equal = None if other is logits else torch.equal(other, logits)
        point.seconds = statistics.median(times)

    @torch.no_grad()
    def _prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def _prefills(self, prompt: torch.Tensor) -> tuple[list[float], Report | None, Report | None]:
        before, times = self._report(), []
        for _ in range(self.repeats):
            begin = self._now()
            self._prefill(prompt)
            times.append(self._now() - begin)
        return times, before, self._report()

    def _decode(self, prompt: torch.Tensor, tokens: int) -> tuple[list[float], Report | None, Report | None]:
        """Times between the tokens of one generation, and what was counted after the first of them and after the last."""
        notes: list[tuple[float, Report | None]] = []
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Clock(lambda: notes.append((self._now(), self._report())))]),
        )
        times = [end - begin for (begin, _), (end, _) in itertools.pairwise(notes)]
        return times, notes[0][1], notes[-1][1]

    def _report(self) -> Report | None:
        scheduler = getattr(self.model, "expert_prefetch", None)
        return None if scheduler is None else scheduler.report()

    def _ask_device(self, question: str) -> Any:
        """What the device's own part of torch answers; None where it has no such function, as on the CPU."""
        ask = getattr(torch.get_device_module(self.home.device), question, None)
        return None if ask is None else ask(self.home.device)

    def _now(self) -> float:
        if self.home.device.type != "cpu":
            torch.accelerator.synchronize(self.home.device)
        return time.perf_counter()

    def __str__(self) -> str:
        rows = [_HEAD] + [point.cells(arm.name) for arm in self.arms for point in arm.points]
        widths = [max(len(row[column]) for row in rows if len(row) == len(_HEAD)) for column in range(len(_HEAD))]
        cells = (zip(row, "<<>>>>>>>", widths, strict=False) for row in rows)
        head, *body = ["  ".join(f"{cell:{side}{width}}" for cell, side, width in row) for row in cells]
        what, size = type(self.model).__name__, _bytes_of(self.model) / GIB
        reports = (arm.report for arm in self.arms if arm.report is not None)
        packed = ", experts packed" if any(report.is_packed for report in reports) else ""
        about = f"{what}, {size:,.2f} GiB, on {self.home.name}; slots when on: {self.config.slots}{packed}"
        skipped = [f"{arm.name}: skipped, {arm.skipped}" for arm in self.arms if arm.skipped]
        return "\n".join([about, "", head, "-" * len(head), *body, *skipped])

    def as_json(self, name: str) -> dict[str, Any]:
        """Everything that was measured. `name`: what to call the model; of a path only the last part is kept."""
        return {
            "model": Path(name).name,
            "class": type(self.model).__name__,
            "model_bytes": _bytes_of(self.model),
            "device": self.home.name,
            "versions": {"hf_prefetch": __version__, "torch": torch.__version__, "transformers": transformers_version},
            "options": asdict(self.config),
            "arms": [asdict(arm) for arm in self.arms],
        }


def _bytes_of(model: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def _repeatable() -> Iterator[None]:
    """Kernels that give the same bits whatever ran before, where there are such."""
    before, only_warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warned)
