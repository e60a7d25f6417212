"""hf-prefetch: the command. Each command is a function below; errors are one line, exit codes are the usual ones.

0 means done, 1 that something failed, 2 that the command was called in a way that can't work, 130 that Ctrl-C ended it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from .api import enable_expert_prefetch
from .config import DEFAULT_SLOTS, PrefetchConfig
from .streams import stream_device

__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-prefetch",
    help="Run Mixture-of-Experts models bigger than the GPU: experts stay in host memory and reach the GPU ahead of use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelName = Annotated[
    str, typer.Argument(help="A checkpoint folder, a name on the Hub, or 'demo' for the package's own model.")
]
Slots = Annotated[
    int, typer.Option("--prefetch-experts-slots", help="Device buffers that experts rotate through: 2 to 4; 0 is off.")
]
Device = Annotated[str | None, typer.Option(help="Where to compute; the accelerator that torch finds if not given.")]
NCpuMoe = Annotated[
    int | None,
    typer.Option("--n-cpu-moe", help="Keep the experts of the first N layers in host memory, the others on the device."),
]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", help='Device memory for weights, as "20GiB": as many layers as fit keep their experts there.'),
]


@app.callback()
def _commands() -> None:
    """Keep `generate` a word of its own even while it is the only command."""


@app.command()
def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the text to continue; - is standard input.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 100,
    prefetch_experts_slots: Slots = DEFAULT_SLOTS,
    device: Device = None,
    n_cpu_moe: NCpuMoe = None,
    gpu_memory: GpuMemory = None,
    report: Annotated[bool, typer.Option("--report", help="Print afterwards what prefetching did.")] = False,
) -> None:
    """Continue a text, printing it as it is written."""
    text = _prompt_text(prompt, prompt_file)
    # What is wrong with the options should not take the loading of a model to be found.
    config = PrefetchConfig(slots=prefetch_experts_slots, n_cpu_moe=n_cpu_moe, gpu_memory=gpu_memory)
    home = stream_device(device)
    writer, tokenizer = _load(model)
    from transformers import TextStreamer

    if config.slots:
        enable_expert_prefetch(writer, config.slots, device=home, n_cpu_moe=n_cpu_moe, gpu_memory=gpu_memory)
    else:
        writer.to(home.device)
    inputs = tokenizer(text, return_tensors="pt").to(writer.device)
    print(text, end="", flush=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    writer.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    if report:
        print(writer.expert_prefetch.report() if config.slots else "prefetching is off", file=sys.stderr)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give the text either with --prompt or with --prompt-file")
    if prompt is not None:
        text = prompt
    elif str(prompt_file) == "-":
        text = sys.stdin.read()
    else:
        assert prompt_file is not None
        text = prompt_file.read_text(encoding="utf-8")
    if not text:
        raise typer.BadParameter("the text to continue is empty")
    return text


def _load(name: str) -> tuple[Any, Any]:
    """A model on the CPU and its tokenizer; transformers types neither in a way that could be used."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from .demo import demo_model_path

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = demo_model_path() if name == "demo" else name
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto"), AutoTokenizer.from_pretrained(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (the process's own if None) and return its exit code."""
    return _one_line_errors(lambda: app(arguments, standalone_mode=False, prog_name="hf-prefetch"))


def _one_line_errors(command: Callable[[], object]) -> int:
    try:
        result = command()
    except (typer.Abort, KeyboardInterrupt):
        return _complain("stopped", 130)
    except TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        return _complain(" ".join(str(error).split()) or type(error).__name__, 1)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"hf-prefetch: {message}", file=sys.stderr)
    return code
