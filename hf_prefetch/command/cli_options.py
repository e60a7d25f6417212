"""Options of the commands. What is wrong with one is found before a model is loaded, and said with its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from ..config import PrefetchConfig
from ..streams import stream_device

__all__ = [
    "Device", "ExpertCache", "GpuMemory", "HostMemory", "ModelName", "NCpuMoe", "OffloadFolder", "Pack", "PinMemory", "Slots",
    "TrustRemoteCode", "bad_option", "config_of", "numbers", "one_line", "path_of", "refusing",
]  # fmt: skip


def one_line(error: Exception) -> str:
    """What an error says."""
    text = error.format_message() if isinstance(error, TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def refusing(*errors: type[Exception], option: str | None = None) -> Iterator[None]:
    """An error inside says that an option is wrong."""
    try:
        yield
    except errors as error:
        raise bad_option(option, one_line(error)) from error


def bad_option(option: str | None, why: str) -> typer.BadParameter:
    """The error that says of an option, by its name, why it can't be."""
    return typer.BadParameter(why, param_hint=None if option is None else [option])


def _check_slots(value: int) -> int:
    with refusing(ValueError):
        return PrefetchConfig(slots=value).slots


def _check_size(parameter: typer.CallbackParam, value: str | None) -> str | None:
    options: dict[str, Any] = {str(parameter.name): value}
    with refusing(ValueError):
        PrefetchConfig(**options)
    return value


def _check_n_cpu_moe(value: int | None) -> int | None:
    with refusing(ValueError):
        return PrefetchConfig(n_cpu_moe=value).n_cpu_moe


def _check_device(value: str | None) -> str | None:
    with refusing(ValueError, RuntimeError):
        try:
            stream_device(value)
        except RuntimeError as error:
            if "device string" in str(error):
                raise ValueError(f"{value!r} is no device; give cpu, cuda or cuda:1, for example") from error
            raise
    return value


def numbers(text: str) -> str:
    """Check a list of numbers of tokens."""
    words = text.split(",")
    if not all(word.strip().removeprefix("-").isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 32,512,2048")
    if any(int(word) < 1 for word in words):
        raise typer.BadParameter(f"{text!r} has a number below 1, and a prompt has one token at least")
    return text


def path_of(text: str | Path) -> Path:
    """The path that an option names. An empty one is an unset variable in a script as a rule, and not the current folder."""
    if not str(text):
        raise typer.BadParameter("the path is empty; the current folder is .")
    return Path(text)


ModelName = Annotated[
    str, typer.Argument(help="A checkpoint folder, a name on the Hub, or 'demo' for the package's own model.")
]
Slots = Annotated[
    int,
    typer.Option(
        "--prefetch-experts-slots",
        callback=_check_slots,
        help="Device buffers that experts rotate through: 2 to 4; 0 is off.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(callback=_check_device, help="Where to compute; the accelerator that torch finds if not given."),
]
NCpuMoe = Annotated[
    int | None,
    typer.Option(
        "--n-cpu-moe",
        callback=_check_n_cpu_moe,
        help="Keep the experts of the first N layers that have some in host memory, the others on the device.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        callback=_check_size,
        help='Device memory for weights, in bytes or as "20GiB": as many layers as fit keep their experts there.',
    ),
]

ExpertCache = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        help='Device memory in which experts stay from token to token, in bytes or as "4GiB", or a share of --gpu-memory, '
        "as 0.5.",
    ),
]


_PACKS = {None: None, "auto": "auto", "true": True, "false": False}


def _check_pack(value: str | None) -> str | None:
    value = None if value is None else value.lower()
    if value not in _PACKS:
        raise typer.BadParameter(f"{value!r} is none of auto, true and false")
    return value


Pack = Annotated[
    str | None,
    typer.Option(
        "--pack",
        callback=_check_pack,
        metavar="[auto|true|false]",
        help="Keep bfloat16 experts in three quarters of their bytes, without the loss of a bit; auto: where it is faster. If "
        "not given they stay as the checkpoint has them.",
    ),
]


PinMemory = Annotated[
    str | None,
    typer.Option(
        "--pin-memory",
        callback=_check_size,
        help='Host memory that may be page-locked, in bytes or as "40GiB"; as much as the experts take if not given, 0: none.',
    ),
]


HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        callback=_check_size,
        help='Host memory for experts, in bytes or as "40GiB": those beyond it stay in the files of the checkpoint and are '
        "read ahead.",
    ),
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option(
        "--offload-folder",
        help="Where experts beyond --host-memory are written that can't be read as they lie there.",
        parser=path_of,
        metavar="PATH",
    ),
]


TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with a model that is not of transformers.")
]


def config_of(slots: int, *, pack: str | None, **options: Any) -> PrefetchConfig:
    """What the options of a command ask for.

    Raises:
        typer.BadParameter: they can't be had together.
    """
    options |= {"pack": _PACKS[pack]}
    named = {"--expert-cache": "expert_cache", "--offload-folder": "offload_folder", "--pack": "pack"}
    with refusing(ValueError, option=next((option for option, name in named.items() if options.get(name)), None)):
        return PrefetchConfig(slots=slots, **options)
