"""One arm of bench_vllm.py: an engine in this process, what it is asked, and how long that takes."""

from __future__ import annotations

import argparse
import gc
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench_shapes import SHAPES
from routing_synthetic import PROFILES, RoutingProfile, synthetic_ids

__all__ = ["measure", "prepare"]

_PROFILE = "qwen3-30b-a3b-wide"
# Tokens of decode that are timed, after a prompt, and how many of them where these take longer than so many seconds.
_DECODED, _FEW_DECODED, _LONG_DECODE = 64, 8, 2.0
_DECODE_PROMPT = 256
# Prompts whose answers are compared.
_ANSWERED = (64, 300)
# Seconds that the samples of one kind may take, once there are some.
_LONG = 6.0


class _Bank(NamedTuple):
    """What routing is injected into."""

    index: int
    name: str
    num_experts: int


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write what all arms share: the model's config, and the ids that its layers route to."""
    from transformers import AutoConfig

    shape = SHAPES["tiny" if options.tiny else "qwen3-30b-a3b"]
    layers = {"num_hidden_layers": shape.layers if options.tiny else options.layers}
    widths = {"head_dim": 32} if options.tiny else {}
    config = AutoConfig.for_model(shape.model_type, **{**shape.config, **layers, **widths})
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    profile: str | RoutingProfile = _PROFILE
    if options.tiny:
        profile = RoutingProfile(config.num_experts, config.num_experts_per_tok, tilt=PROFILES["mixtral-8x7b"].tilt)
    # A forward takes as many tokens as a batch has, and never more than there are.
    tokens = max(*options.prompts, options.batch_tokens) + 8 * _DECODED + _DECODE_PROMPT
    torch.save(synthetic_ids(profile, config.num_hidden_layers, tokens), folder / "ids.pt")


def measure(options: argparse.Namespace) -> None:
    """Run one arm, and write what there is into its file each time that there is more of it."""
    import vllm
    from vllm import LLM

    result: dict[str, Any] = {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "samples": {}}

    def note(**found: Any) -> None:
        result.update(found)
        whole = options.out.with_suffix(".part")
        whole.write_text(json.dumps(result))
        whole.replace(options.out)

    begin = time.monotonic()
    if options.arm.startswith("prefetch"):
        # Where the package is not installed vLLM does not find its entry point.
        from hf_prefetch.integrations.vllm import register

        register()
    injection = _Injection(torch.load(options.folder / "ids.pt"))
    _register_loader(injection)
    llm = LLM(**_arguments(options))
    note(start=time.monotonic() - begin, expert_bytes=injection.expert_bytes)
    if torch.cuda.is_available():
        note(device=torch.cuda.get_device_name(), link=_link())
    note(passes={f"prefill {length}": -(-length // options.batch_tokens) for length in options.prompts})
    asked = _Asked(llm, injection, quick=options.smoke)

    def sample(kind: str, once: Callable[[], float]) -> None:
        note(samples=result["samples"] | {kind: _sampled(once, options.samples)})

    for batch in (1, 8):
        asked.warm_up_decode(batch)
        sample(f"decode x{batch}", lambda batch=batch: asked.decode(batch))
    note(answers=asked.answers())
    if options.arm == "resident":
        note(again=asked.answers())
    for length in options.prompts:
        for _ in range(1 if options.smoke else 2):
            asked.prefill(length)
        sample(f"prefill {length}", lambda length=length: asked.prefill(length))
    if options.arm.startswith("prefetch"):
        note(report=str(asked.report()))
    if torch.cuda.is_available():
        note(peak_bytes=torch.cuda.max_memory_allocated())


def _sampled(once: Callable[[], float], count: int) -> list[float]:
    """So many samples, or fewer, but at least three, where they take long."""
    begin, samples = time.monotonic(), list[float]()
    while len(samples) < count and (len(samples) < 3 or time.monotonic() - begin < _LONG):
        samples.append(once())
    return samples


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Of an engine: those that all arms share, and the arm's own."""
    on_gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": str(options.folder),
        "skip_tokenizer_init": True,
        "load_format": "bench",
        "dtype": "bfloat16",
        "max_model_len": max(*options.prompts, _ANSWERED[-1]) + 128,
        "max_num_batched_tokens": options.batch_tokens,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "enforce_eager": options.eager or not on_gpu,
    }
    if on_gpu:
        cache = 2**28 if options.tiny else 4 * 2**30
        arguments |= {"attention_backend": "TRITON_ATTN", "moe_backend": "triton", "kv_cache_memory_bytes": cache}
        if not options.eager:
            mode = {} if options.compile else {"mode": 0}
            graphs = {"cudagraph_mode": options.graphs, "cudagraph_capture_sizes": [1, 8]}
            arguments["compilation_config"] = mode | graphs
    return arguments | _of_arm(options.arm, options)


def _of_arm(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "resident":
        return {}
    if name == "uva":
        # More than all experts take.
        return {"cpu_offload_gb": 2 * options.layers, "cpu_offload_params": {"experts"}}
    if name == "offload-prefetch":
        group = {"offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 1}
        return {"offload_backend": "prefetch", "offload_params": {"experts"}, **group}
    way, *extras = name.split("+")
    if not way.startswith("prefetch-") or not set(extras) <= {"cache", "pack"}:
        raise ValueError(f"there is no arm {name}")
    asked: dict[str, Any] = {"slots": int(way.removeprefix("prefetch-")), "pack": "pack" in extras}
    if "cache" in extras:
        asked["expert_cache"] = _half_of_the_experts(options)
    return {"additional_config": {"hf_prefetch": asked}}


def _half_of_the_experts(options: argparse.Namespace) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.folder)
    row = 3 * config.hidden_size * config.moe_intermediate_size * 2
    # Rows begin at multiples of 256 bytes in each tensor.
    return config.num_hidden_layers * (config.num_experts // 2 * row + 4096)


def _register_loader(injection: _Injection) -> None:
    """Have vLLM fill weights with random values that depend on their names alone, and route as the injection says."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("bench")
    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill all weights on the fastest device that there is."""
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            generator = torch.Generator(device)
            for name, parameter in model.named_parameters():
                # Where experts are held differs from arm to arm, and with it nothing of this.
                generator.manual_seed(zlib.crc32(name.encode()))
                for part in parameter.data.unbind() if parameter.dim() == 3 else (parameter.data,):
                    value = torch.empty(part.shape, dtype=part.dtype, device=device)
                    value.normal_(0.0, 0.02, generator=generator)
                    part.copy_(value + 1 if part.dim() == 1 and "norm" in name else value)
            injection.put_into(model)


class _Injection:
    """Puts ids from a table in the place of those that a model's routers find."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.expert_bytes = 0

    def put_into(self, model: torch.nn.Module) -> None:
        """Wrap each layer's router."""
        from hf_prefetch.routing import RoutingInjection

        runners = [module for module in model.modules() if hasattr(module, "routed_experts") and hasattr(module, "router")]
        banks = [
            _Bank(index, runner.layer_name, runner.routed_experts.global_num_experts) for index, runner in enumerate(runners)
        ]
        self._injection = RoutingInjection(banks, self._table)  # type: ignore[arg-type]
        for bank, runner in zip(banks, runners, strict=True):
            runner.router.select_experts = self._wrapped(bank, runner.router.select_experts)
            for name in ("w13_weight", "w2_weight"):
                weight = getattr(runner.routed_experts, name)
                self.expert_bytes += weight.numel() * weight.element_size()

    def _wrapped(self, bank: _Bank, select: Callable[..., Any]) -> Callable[..., Any]:
        def select_experts(*args: Any, **kwargs: Any) -> Any:
            weights, ids = select(*args, **kwargs)
            return weights, self._injection.replace(bank, ids)  # type: ignore[arg-type]

        return select_experts

    def begin(self) -> None:
        """The next forward begins with the table's first token."""
        self._injection.seek(0)


class _Asked:
    """What an engine is asked, with the routing that belongs to it."""

    def __init__(self, llm: Any, injection: _Injection, *, quick: bool) -> None:
        self._quick = quick
        self._llm = llm
        self._injection = injection
        self._decoded: dict[int, int] = {}

    def _generate(self, lengths: list[int], tokens: int, **sampling: Any) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        settings = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        prompts = [
            {"prompt_token_ids": [(17 * place + 31 * number) % 251 + 1 for place in range(length)]}
            for number, length in enumerate(lengths)
        ]
        self._injection.begin()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        results = self._llm.generate(prompts, settings, use_tqdm=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin, results

    def warm_up_decode(self, batch: int) -> None:
        """Once, so that what is timed has been compiled and learned; and see how many tokens are enough to be timed."""
        self._decoded[batch] = _FEW_DECODED
        self.decode(batch)
        if not self._quick and self.decode(batch) * _DECODED < _LONG_DECODE:
            self._decoded[batch] = _DECODED
            self.decode(batch)

    def prefill(self, length: int) -> float:
        """Seconds to the first token."""
        return self._generate([length], 1)[0]

    def decode(self, batch: int) -> float:
        """Seconds from token to token."""
        lengths, tokens = [_DECODE_PROMPT // batch] * batch, self._decoded[batch]
        first, _ = self._generate(lengths, 1)
        all_of_them, _ = self._generate(lengths, 1 + tokens)
        return (all_of_them - first) / tokens

    def answers(self) -> list[dict[str, Any]]:
        """Tokens and log-probabilities of a few prompts."""
        found = []
        for lengths in (*([length] for length in _ANSWERED), [16] * 8):
            _, results = self._generate(lengths, 16, logprobs=1)
            for result in results:
                (sequence,) = result.outputs
                steps = zip(sequence.token_ids, sequence.logprobs, strict=True)
                found.append({"tokens": list(sequence.token_ids), "logprobs": [step[token].logprob for token, step in steps]})
        return found

    def report(self) -> Any:
        """What prefetching has done."""
        from hf_prefetch.integrations.vllm.layers import worker_report

        (found,) = self._llm.collective_rpc(worker_report)
        return found


def _link() -> float:
    """Bytes a second of copies from page-locked memory, the best of some."""
    host = torch.empty(512 * 2**20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.numel() / (time.perf_counter() - begin))
    return best
