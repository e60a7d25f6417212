"""bench: a user's own model, measured without prefetching (where it fits on the device) and with it.

What is reported are medians, the device synchronised at both ends. Prompts are random tokens, the same in both arms. The
logits of every prompt are compared in a pass of their own, under settings that make kernels repeatable, because what else
lies in device memory may otherwise change the last bit of a sum outside the experts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__
from .api import disable_expert_prefetch, enable_expert_prefetch
from .config import PrefetchConfig
from .report import Report
from .streams import StreamDevice

__all__ = ["Arm", "Bench", "Point"]

GIB = 2**30
# Of the device's free memory, what a resident model may take, so that activations and the KV cache have room.
_RESIDENT_SHARE = 0.9


@dataclass(frozen=True)
class Point:
    """One measurement: a prefill of `tokens`, or a token of decode after a prompt of so many.

    Attributes:
        seconds: the median.
        link_gb_per_s: experts sent to the device in that time; None where nothing is sent.
        hits, lookups: calls whose experts had been sent ahead, of those that look ahead.
        peak_bytes: of device memory; None on the CPU.
        logits_equal: whether they are, bit for bit, what the other arm gave; None if that didn't run.
        error: why there is no measurement.
    """

    what: str
    tokens: int
    seconds: float | None = None
    link_gb_per_s: float | None = None
    hits: int | None = None
    lookups: int | None = None
    peak_bytes: int | None = None
    logits_equal: bool | None = None
    error: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the prompt, or of decode."""
        return None if self.seconds is None else (1 if self.what == "decode" else self.tokens) / self.seconds


@dataclass
class Arm:
    """One way of running the model: "off" is resident, "on" prefetches."""

    name: str
    skipped: str | None = None
    points: list[Point] = field(default_factory=list)
    report: Report | None = None


class Bench:
    """Measures one model in two arms; `run` fills `arms` and leaves the model on the CPU as it was."""

    def __init__(self, model: Any, config: PrefetchConfig, home: StreamDevice, *, repeats: int = 3) -> None:
        self.model = model
        self.config = config
        self.home = home
        self.device = home.device
        self.repeats = repeats
        self.arms: list[Arm] = []
        self._logits: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, lengths: Sequence[int], decode_tokens: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Measure both arms: prefills of `lengths`, and decode after the shortest of them, if `decode_tokens` is not 0."""
        off = Arm("off", skipped=self._does_not_fit())
        self.arms = [off]
        if off.skipped is None:
            try:
                self.model.to(self.device)
                self._measure(off, lengths, decode_tokens, say)
            except torch.OutOfMemoryError:
                off.skipped = f"there was no room for it on {self.home.name}"
            finally:
                self.model.to("cpu")
                self.home.trim()
        if not self.config.slots:
            return
        self.arms.append(on := Arm("on"))
        options = {"n_cpu_moe": self.config.n_cpu_moe, "gpu_memory": self.config.gpu_memory, "progress": self.config.progress}
        enable_expert_prefetch(self.model, self.config.slots, device=self.home, **options)
        try:
            self._measure(on, lengths, decode_tokens, say)
            on.report = self.model.expert_prefetch.report()
        finally:
            disable_expert_prefetch(self.model)

    def _does_not_fit(self) -> str | None:
        if self.device.type == "cpu":
            return None
        needed = _bytes_of(self.model)
        free = int(torch.accelerator.get_memory_info(self.device)[0])
        if needed <= free * _RESIDENT_SHARE:
            return None
        return f"the model's {needed / GIB:,.1f} GiB don't fit into the {free / GIB:,.1f} GiB that are free on {self.home.name}"

    def _measure(self, arm: Arm, lengths: Sequence[int], decode_tokens: int, say: Callable[[str], None]) -> None:
        works: list[tuple[str, int, Callable[[], Any]]] = [("prefill", length, self._time_prefill) for length in lengths]
        if decode_tokens:
            works.append(("decode", min(lengths), lambda prompt: self._time_decode(prompt, decode_tokens)))
        for what, length, work in works:
            say(f"{arm.name}: {what}, {length:,} tokens")
            try:
                point = self._point(what, length, work)
            except torch.OutOfMemoryError:
                point = Point(what, length, error="out of device memory")
            arm.points.append(point)
            self.home.trim()

    def _point(self, what: str, length: int, work: Callable[[torch.Tensor], tuple[list[float], Report | None]]) -> Point:
        generator = torch.Generator().manual_seed(length)
        prompt = torch.randint(0, self.model.config.vocab_size, (1, length), generator=generator).to(self.device)
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        times, report = work(prompt)
        seconds, peak = statistics.median(times), None
        if self.device.type != "cpu":
            peak = int(torch.accelerator.max_memory_allocated(self.device))
        point = Point(what, length, seconds=seconds, peak_bytes=peak)
        if report is not None:
            moved = report.bytes_to_device / len(times)
            point = replace(
                point,
                link_gb_per_s=moved / seconds / 1e9 if moved else None,
                hits=report.lookahead_hits // len(times),
                lookups=report.lookahead_calls // len(times),
            )
        if what == "decode":
            return point
        with _repeatable():
            logits = self._prefill(prompt).cpu()
        other = self._logits.setdefault((what, length), logits)
        return replace(point, logits_equal=None if other is logits else torch.equal(other, logits))

    def _time_prefill(self, prompt: torch.Tensor) -> tuple[list[float], Report | None]:
        self._prefill(prompt)
        self._start_counting()
        return [self._timed(lambda: self._prefill(prompt)) for _ in range(self.repeats)], self._counted()

    @torch.no_grad()
    def _prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def _time_decode(self, prompt: torch.Tensor, tokens: int) -> tuple[list[float], Report | None]:
        """Times between the tokens of one generation; what its prompt moved is not counted."""
        stamps: list[float] = []

        class Clock(transformers.StoppingCriteria):
            def __call__(inner, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: N805
                self._synchronize()
                stamps.append(time.perf_counter())
                if len(stamps) == 1:
                    self._start_counting()
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
        return [end - begin for begin, end in itertools.pairwise(stamps)], self._counted()

    def _start_counting(self) -> None:
        if hasattr(self.model, "expert_prefetch"):
            self.model.expert_prefetch.reset()

    def _counted(self) -> Report | None:
        report: Report | None = self.model.expert_prefetch.report() if hasattr(self.model, "expert_prefetch") else None
        return report

    def _timed(self, action: Callable[[], Any]) -> float:
        self._synchronize()
        begin = time.perf_counter()
        action()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def as_json(self, name: str) -> dict[str, Any]:
        """Everything that was measured. `name`: what to call the model; of a path only the last part is kept."""
        versions = {"hf_prefetch": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return {
            "model": Path(name).name,
            "class": type(self.model).__name__,
            "model_bytes": _bytes_of(self.model),
            "device": self.home.name,
            "versions": versions,
            "options": asdict(self.config),
            "arms": [asdict(arm) for arm in self.arms],
        }
