"""hf-prefetch: the command. Each command is a function below; errors are one line, exit codes are the usual ones.

0 means done, 1 that something failed, 2 that the command was called in a way that can't work, 130 that Ctrl-C ended it, 143
that SIGTERM did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from . import __version__
from .command.cli_options import (
    Device,
    ExpertCache,
    GpuMemory,
    HostMemory,
    ModelName,
    NCpuMoe,
    OffloadFolder,
    Pack,
    PinMemory,
    Slots,
    TrustRemoteCode,
    bad_option,
    config_of,
    numbers,
    one_line,
    path_of,
    refusing,
)  # fmt: skip
from .command.pretrained import DEMO, files_of, load_enabled, load_model, load_tokenizer, most_tokens
from .config import DEFAULT_SLOTS
from .demo import DEMO_PROMPT
from .memory.packed_files import is_packed
from .streams import stream_device

__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-prefetch",
    help="Run Mixture-of-Experts models bigger than the GPU: experts stay in host memory and reach the GPU ahead of use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Tokens of the prompt that are decoded along with what follows, so that a space between the two is not lost.
_CONTEXT = 4


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-prefetch {__version__}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# -- commands -----------------------------------------------------------------------------------------------------------


@app.command()
def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=f"for {DEMO}: {DEMO_PROMPT}")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="A file with the text to continue; - is standard input.", parser=path_of, metavar="PATH"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 100,
    prefetch_experts_slots: Slots = DEFAULT_SLOTS,
    device: Device = None,
    n_cpu_moe: NCpuMoe = None,
    gpu_memory: GpuMemory = None,
    expert_cache: ExpertCache = None,
    pin_memory: PinMemory = None,
    host_memory: HostMemory = None,
    offload_folder: OffloadFolder = None,
    pack: Pack = None,
    trust_remote_code: TrustRemoteCode = False,
    report: Annotated[bool, typer.Option("--report", help="Print afterwards what prefetching did.")] = False,
) -> None:
    """Continue a text, printing it as it is written."""
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that can't show a character shows another, rather than losing the text.
        sys.stdout.reconfigure(errors="replace")
    if model == DEMO and prompt is None and prompt_file is None:
        prompt = DEMO_PROMPT
    text = _prompt_text(prompt, prompt_file)
    options = {"n_cpu_moe": n_cpu_moe, "gpu_memory": gpu_memory, "expert_cache": expert_cache, "pin_memory": pin_memory}
    files = {"host_memory": host_memory, "offload_folder": offload_folder}
    config, home = config_of(prefetch_experts_slots, pack=pack, **options, **files), stream_device(device)
    trust = {"trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(model, **trust)
    writer = load_enabled(model, config, home, **trust) if config.slots else load_model(model, **trust).to(home.device)
    inputs = tokenizer(text, return_tensors="pt").to(writer.device)
    if not inputs["input_ids"].numel():
        raise ValueError(f"the tokenizer of {model} makes no tokens of the text; does the folder have the tokenizer's files?")
    _warn_beyond(model, most_tokens(writer.config), inputs["input_ids"].shape[1], max_new_tokens)
    print(text, end="", flush=True)
    with _held_back(), _whole_lines():
        streamer = _streamer(tokenizer, inputs["input_ids"][0].tolist())
        writer.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    if report:
        print(writer.expert_prefetch.report() if config.slots else "prefetching is off", file=sys.stderr)


@app.command()
def bench(
    model: ModelName,
    prompt_lengths: Annotated[
        str, typer.Option(callback=numbers, help="Tokens of the prompts to be measured.")
    ] = "32,512,2048",
    decode_tokens: Annotated[int, typer.Option(min=0, help="Tokens of decode to be measured; 0 leaves it out.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Measured passes of a prompt.")] = 3,
    prefetch_experts_slots: Slots = DEFAULT_SLOTS,
    device: Device = None,
    n_cpu_moe: NCpuMoe = None,
    gpu_memory: GpuMemory = None,
    expert_cache: ExpertCache = None,
    pin_memory: PinMemory = None,
    pack: Pack = None,
    trust_remote_code: TrustRemoteCode = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="A file to write the numbers to as well.", parser=path_of, metavar="PATH"),
    ] = None,
) -> None:
    """Measure a model with prefetching off (if all of it fits on the device) and on: speed, memory and equal logits."""
    from .command.bench import Bench

    options = {"n_cpu_moe": n_cpu_moe, "gpu_memory": gpu_memory, "expert_cache": expert_cache, "pin_memory": pin_memory}
    config, home = config_of(prefetch_experts_slots, pack=pack, **options), stream_device(device)
    if json_file is not None and not json_file.parent.is_dir():
        raise bad_option("--json", f"there is no folder {json_file.parent}")
    if json_file is not None and json_file.is_dir():
        raise bad_option("--json", f"{json_file} is a folder; give the name of a file")
    lengths = sorted({int(word) for word in prompt_lengths.split(",")})
    if config.pack is None and is_packed(Path(model).expanduser()):
        # Off it is measured unpacked, and on as `generate` runs it.
        config = replace(config, pack=True)
    subject = load_model(model, trust_remote_code=trust_remote_code)
    most = most_tokens(subject.config)
    if most is not None and lengths[-1] + decode_tokens > most:
        raise bad_option("--prompt-lengths", f"{model} takes {most:,} tokens at most, prompt and decode together")
    run = Bench(subject, config, home, repeats=repeats)
    run.run(lengths, decode_tokens, _say)
    print(run)
    if json_file is not None:
        with refusing(OSError, option="--json"):
            json_file.write_text(json.dumps(run.as_json(model), indent=1) + "\n", encoding="utf-8")


@app.command()
def pack(
    model: ModelName,
    verify: Annotated[bool, typer.Option("--verify", help="Pack, unpack and compare each expert's weights.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder to write the packed checkpoint to.", parser=path_of, metavar="PATH")
    ] = None,
    device: Device = None,
) -> None:
    """Show what lossless packing makes of a model's bfloat16 experts, prove that every bit comes back, write it to disk."""
    from .checkpoints.saving import pack_checkpoint
    from .command.verification import verify as check

    if not verify and out is None:
        raise bad_option("--out", "give --verify to see what it would do, --out FOLDER to write it, or both")
    home, folder = stream_device(device), files_of(model)
    if verify:
        found = check(folder, model, home.device)
        print(found)
        if found.wrong:
            raise typer.Exit(1)
    if out is not None:
        print(f"{out}: {pack_checkpoint(folder, out, home)}")


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give the text either with --prompt or with --prompt-file")
    if prompt is not None:
        text = prompt
    elif str(prompt_file) == "-":
        if sys.stdin is None:
            raise typer.BadParameter("there is no standard input to read the text from")
        text = sys.stdin.read()
    else:
        assert prompt_file is not None
        with refusing(OSError, UnicodeError, option="--prompt-file"):
            text = prompt_file.read_text(encoding="utf-8-sig")
    if not text:
        raise typer.BadParameter("the text to continue is empty")
    with refusing(UnicodeError, option="--prompt" if prompt is not None else "--prompt-file"):
        text.encode()  # bytes that were no UTF-8 have come as something that no tokenizer takes
    return text


def _warn_beyond(name: str, most: int | None, prompt: int, new: int) -> None:
    """Say so where a text may get longer than a model is made for, and no more than that: some write on well enough."""
    if most is not None and prompt + new > most:
        comes = f"{prompt:,} of the prompt and up to {new:,} new ones come to {prompt + new:,}"
        said = f"hf_prefetch: {name} takes {most:,} tokens at most, and {comes}; what is written beyond may make no sense"
        _show_warning(said, UserWarning)


def _streamer(tokenizer: Any, prompt: list[int]) -> Any:
    """Prints tokens as they come, decoded as what follows the prompt: some tokenizers drop the space before a first word."""
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.token_cache = prompt[-_CONTEXT:]
    streamer.print_len = len(tokenizer.decode(streamer.token_cache, skip_special_tokens=True))
    return streamer


@contextmanager
def _held_back() -> Iterator[None]:
    """Warnings from inside come when it has ended, and not in the middle of a text that is being written."""
    held: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as held:
            yield
    finally:
        for each in held:
            _show_warning(each.message, each.category)


@contextmanager
def _whole_lines() -> Iterator[None]:
    """End the line of a text that breaks off, so that the message comes on one of its own."""
    try:
        yield
    except BrokenPipeError:
        raise
    except BaseException:
        print(flush=True)
        raise


def _say(text: str) -> None:
    """Progress, where somebody sees it."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# -- the end ------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (the process's own if None) and return its exit code."""
    with warnings.catch_warnings(), _terminable() as received:
        warnings.showwarning = _show_warning
        return _one_line_errors(lambda: app(arguments, standalone_mode=False, prog_name="hf-prefetch"), received)


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Inside SIGTERM does what Ctrl-C does, so that everything is tidied up. Whether it came is in the list, as its number."""
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        # `timeout` sends it twice, and tidying up must not be interrupted.
        if not received:
            received.append(number)
            raise KeyboardInterrupt

    # Whoever has other plans with it keeps to them, and only the main thread may have any.
    is_free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield received
    finally:
        if is_free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Ours in a line of its own; others', which are about code that the user doesn't have, not at all."""
    text = " ".join(str(message).split())
    if text.startswith("hf_prefetch: ") and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _one_line_errors(command: Callable[[], object], received: Sequence[int]) -> int:
    try:
        result = command()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        result = 130
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter's own last flush must not fail as well.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TyperException as error:
        # Help that was asked for by giving no arguments has been printed already.
        return _complain(one_line(error), error.exit_code) if error.format_message() else error.exit_code
    except (OSError, ValueError, TypeError, RuntimeError, ImportError, MemoryError) as error:
        return _complain(one_line(error), 1)
    except Exception as error:  # noqa: BLE001 - libraries have errors of their own, and a user wants none of their frames
        return _complain(f"{type(error).__name__}: {one_line(error)}", 1)
    if result == 130:
        return _complain("stopped", 128 + received[0] if received else 130)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    with suppress(BrokenPipeError, AttributeError):
        sys.stdout.flush()
    print(f"hf-prefetch: {message}", file=sys.stderr)
    return code
