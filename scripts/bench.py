"""Measure prefill, decode, memory and exactness of ways to run a Mixture-of-Experts model whose experts are off the GPU.

From the root of the repository, on a machine with one GPU::

    PYTHONPATH=. python scripts/bench.py --model qwen3-30b-a3b --layers 16 --out bench.json

One model object goes through all arms, so all of them compute with the same weights. Each arm is timed first, medians
over repeats with the device synchronised at both ends, and then compared with the resident arm in passes of their own:
every argument and every output of every experts module must be equal bit for bit, and so must the logits. The file is
written again after every measurement. ``--show bench.json`` prints the table of an earlier run.

Without a GPU, ``--device cpu --model tiny`` goes the same way on the CPU stand-in.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# Read when the library is first used: a fixed workspace, so that its sums don't depend on what ran before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import accelerate
import torch
import transformers
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

import bench_report
import hf_prefetch
from bench_arms import Arm, PinnedBlock, check_names, make_arm
from bench_models import DEFAULT_LAYERS, SHAPES, Subject, build

ARMS = "resident,prefetch-3,prefetch-2,prefetch-4,pinned-serial,accelerate"
DECODE = "decode"
# Tokens of the generation that is compared at every experts module.
COMPARED_TOKENS = 3

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an experts module: where, with which tensors, and what came out."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor

    def to(self, device: torch.device) -> Call:
        """The same on another device."""
        return Call(self.name, tuple(tensor.to(device) for tensor in self.inputs), self.output.to(device))


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one forward, or one generation, did at every experts module, and its logits at the end."""

    calls: tuple[Call, ...]
    logits: torch.Tensor

    def to(self, device: torch.device) -> Pass:
        """The same on another device."""
        return Pass(tuple(call.to(device) for call in self.calls), self.logits.to(device))


class Recorder:
    """Keeps copies of what goes into and comes out of every experts module.

    The copies stay on the device: a host that waited for each of them would hide missing waits between streams.
    """

    def __init__(self, subject: Subject) -> None:
        self.calls: list[Call] = []
        self._subject = subject
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for name, module in self._subject.experts.items():
            self._handles.append(module.register_forward_hook(functools.partial(self._keep, name)))
        return self

    def _keep(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inputs = tuple(value.clone() for value in args if isinstance(value, torch.Tensor))
        self.calls.append(Call(name, inputs, output.clone()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()


class Clock(StoppingCriteria):  # type: ignore[misc]
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
        self.subject: Subject

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
            checksum = self.subject.checksum()
            known = self.results["model"].setdefault("checksum", checksum)
            result["weights_unchanged"] = checksum == known
            result["status"] = "ok"
        except Exception as error:  # noqa: BLE001 - the other arms go on, and this error is in the results
            result.update(status="failed", error=one_line(error))
            self.say(f"{name}: {result['error']}")
        result["seconds"] = time.perf_counter() - begin
        self.subject.tidy()

    def out_of_time(self) -> bool:
        """Whether nothing new should be started."""
        return 0 < self.options.time_limit < time.perf_counter() - self.begin

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
        self.reset_peak()
        moved = arm.moved()
        seconds = [self.timed(prefill)[0] for _ in range(repeats)]
        return {"seconds": seconds} | self.cost(arm, moved, repeats)

    def time_decode(self, result: Json, tokens: int, arm: Arm) -> Json:
        """Times between tokens of a generation, as `generate` gives them."""
        self.generate(self.prompt(self.options.decode_prompt), 2)
        self.reset_peak()
        moved = arm.moved()
        ids, stamps = self.generate(self.prompt(self.options.decode_prompt), tokens + 1)
        seconds = [after - before for before, after in itertools.pairwise(stamps)]
        if arm.name == "resident":
            self.tokens = ids
        if self.tokens is not None:
            result["tokens_equal"] = ids == self.tokens[: len(ids)]
        cost = self.cost(arm, moved, 1)
        if cost["moved_bytes"] is not None and arm.name != "resident":
            # The prefill of that generation moved the banks once, or less; what is left is the tokens'.
            prefill = self.results["model"]["bank_bytes"]
            cost["moved_bytes"] = max(cost["moved_bytes"] - prefill, 0) // tokens
        return {"seconds": seconds} | cost

    def cost(self, arm: Arm, moved: int | None, repeats: int) -> Json:
        """What a pass took besides time: bytes over the link, and the most device memory at a time."""
        after, memory = arm.moved(), {"peak_bytes": None, "reserved_bytes": None}
        if self.device.type == "cuda":
            memory["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            memory["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return {"moved_bytes": None if moved is None or after is None else (after - moved) // repeats} | memory

    def reset_peak(self) -> None:
        """Count the peak from here on."""
        self.subject.tidy()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

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
        return self.subject.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].clone()

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
                    self.references[key] = self.record(work).to(torch.device("cpu"))
                    self.results["needed"][key] = self.needed(self.references[key], key)
                if key in self.references:
                    result["equality"][key] = self.equality(self.references[key], self.record(work))
                    self.say(f"{arm.name}: {key}: equal: {bench_report.equality_word(result['equality'][key])}")
            except Exception as error:  # noqa: BLE001 - as above
                result["equality"][key] = {"error": one_line(error)}
                self.say(f"{arm.name}: {key}: comparison: {one_line(error)}")
            self.subject.tidy()

    def record(self, work: Callable[[], torch.Tensor]) -> Pass:
        """Run something and keep what every experts module did."""
        with Recorder(self.subject) as recorder:
            logits = work()
        self.synchronize()
        return Pass(tuple(recorder.calls), logits)

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

    @torch.no_grad()
    def equality(self, reference: Pass, observed: Pass) -> Json:
        """Compare two passes call by call. Where inputs differ already (attention may), the module is run on the others."""
        same_calls = [call.name for call in reference.calls] == [call.name for call in observed.calls]
        inputs, outputs, replayed, first = 0, 0, 0, None if same_calls else "the calls"
        for there, here in zip(reference.calls, observed.calls, strict=False):
            expected = there.to(self.device)
            same_inputs = len(expected.inputs) == len(here.inputs) and all(map(torch.equal, expected.inputs, here.inputs))
            output = here.output
            if not same_inputs:
                output = self.subject.experts[there.name](*expected.inputs)
                replayed += 1
            same_output = torch.equal(expected.output, output)
            inputs, outputs = inputs + same_inputs, outputs + same_output
            if not same_output and first is None:
                first = there.name
        return {
            "calls": len(reference.calls),
            "inputs_equal": inputs,
            "outputs_equal": outputs,
            "replayed": replayed,
            "experts_equal": first is None,
            "first_difference": first,
            "logits_equal": torch.equal(reference.logits.to(self.device), observed.logits),
        }

    def needed(self, reference: Pass, key: str) -> Json:
        """What a pass cannot do without: the rows of the experts that it routes to. In a generation: per decoded token."""
        calls = reference.calls
        if key == DECODE:
            calls = tuple(call for call in calls if call.inputs[0].shape[0] == 1)
        rows = bytes_of_rows = 0
        banks = self.subject.bank_bytes
        for call in calls:
            ids = next((tensor for tensor in call.inputs if not tensor.is_floating_point()), None)
            if ids is not None:
                distinct = int(ids.unique().numel())
                rows += distinct
                bytes_of_rows += distinct * banks[call.name] // self.subject.num_experts
        steps = len(calls) / len(banks) if key == DECODE else 1
        return {"distinct_rows": rows / steps, "rows_bytes": bytes_of_rows / steps}

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


def describe_machine(device: torch.device) -> Json:
    """What the numbers were measured on."""
    memory = Path("/proc/meminfo")
    total = int(memory.read_text().split()[1]) * 1024 if memory.exists() else None
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "device": device.type,
        "name": cuda.name if cuda else "CPU stand-in",
        "device_bytes": cuda.total_memory if cuda else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hf_prefetch": hf_prefetch.__version__,
    }


def describe_settings(subject: Subject, options: argparse.Namespace) -> Json:
    """Everything that may decide about a last bit or a millisecond."""
    config = subject.model.config
    backends = ("flash", "mem_efficient", "math", "cudnn")
    return {
        "attention": config._attn_implementation,
        "experts_prefill": config._experts_implementation,
        "experts_decode": "batched_mm" if subject.device.type != "cpu" else config._experts_implementation,
        "cache": "DynamicCache, a new one in each pass",
        "grad_mode": "no_grad",
        "logits": "last position",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdp_backends": [name for name in backends if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "threads": torch.get_num_threads(),
        "seed": 0,
        "warmups": options.warmups,
        "repeats": options.repeats,
        "slow_repeats": options.slow_repeats,
        "decode_prompt": options.decode_prompt,
    }


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line and refuse what can't work before anything is built."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    numbers = functools.partial(_numbers, parser)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen3-30b-a3b", help="shape of a model with random weights")
    parser.add_argument("--layers", type=int, help=f"decoder layers of it (default: all, at most {DEFAULT_LAYERS})")
    parser.add_argument("--checkpoint", help="a folder or Hub name to load instead")
    parser.add_argument("--arms", default=ARMS, help="in this order, but the resident one first")
    parser.add_argument("--lengths", type=numbers, default="32,200,2048,8192,32768", help="prompt lengths, in tokens")
    parser.add_argument("--slow-lengths", type=numbers, default="200,8192", help="those that slow arms (accelerate) get")
    parser.add_argument("--equal-lengths", type=numbers, default="200,2048,8192", help="those compared at every module")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of a length")
    parser.add_argument("--slow-repeats", type=int, default=3, help="the same for slow arms")
    parser.add_argument("--warmups", type=int, default=2, help="passes before those; slow arms get one")
    parser.add_argument("--decode-tokens", type=int, default=8, help="timed tokens; 0 leaves decode out")
    parser.add_argument("--slow-decode-tokens", type=int, default=3, help="the same for slow arms")
    parser.add_argument("--decode-prompt", type=int, default=200, help="prompt length before them")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; the GPU if there is one")
    parser.add_argument("--threads", type=int, help="threads of torch on the host")
    parser.add_argument("--time-limit", type=float, default=0, help="seconds after which nothing new is started; 0 is none")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--show", type=Path, help="print the table of a JSON file and do nothing else")
    options = parser.parse_args(arguments)
    try:
        options.arms = check_names([name.strip() for name in options.arms.split(",") if name.strip()])
    except ValueError as error:
        parser.error(str(error))
    if min(options.repeats, options.slow_repeats) < 1:
        parser.error("--repeats and --slow-repeats must be at least 1")
    if options.checkpoint and options.layers:
        parser.error("--layers cuts a random model; a checkpoint has the layers it has")
    options.equal_lengths = [length for length in options.equal_lengths if length in options.lengths]
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.device.type == "cuda" and options.device.index is None:
        options.device = torch.device("cuda", torch.cuda.current_device())
    options.command = _command(arguments)
    return options


def _numbers(parser: argparse.ArgumentParser, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        parser.error(f"{text!r} is not a list of numbers such as 200,8192")
    if any(number < 1 for number in numbers):
        parser.error(f"lengths must be positive, got {text!r}")
    return numbers


def _command(arguments: Sequence[str]) -> str:
    """The command line without the paths of this machine."""
    shown = [Path(word).name if "/" in word else word for word in arguments]
    return " ".join(["bench.py", *shown])


def _stop(*_: Any) -> NoReturn:
    sys.exit("stopped")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; the table comes last, also after an interruption."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.show is not None:
        print(bench_report.table(bench_report.derive(json.loads(options.show.read_text()))))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    signal.signal(signal.SIGTERM, _stop)
    bench = Bench(options)
    try:
        bench.run()
    finally:
        if bench.results["model"]:
            bench.save()
            print(bench_report.table(bench.results), flush=True)


if __name__ == "__main__":
    main()
