"""Errors of transformers' loading, in words that name the file or the format and say what would do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["FROM_HUB", "explain_json", "explain_quantized", "explained", "method_of"]

_REMEDY = (
    "Load a checkpoint that is not quantized, or one in a format that transformers can turn back into plain weights: "
    "quantization_config=...(dequantize=True)."
)
# What says where a config or a checkpoint is on the Hub.
FROM_HUB = ("revision", "subfolder", "cache_dir", "token", "trust_remote_code")


def explain_json(name: str | os.PathLike[str], error: json.JSONDecodeError) -> None:
    """Say which file of a folder is no JSON."""
    for file in sorted(Path(name).glob("*.json")):
        if error.doc == file.read_text(encoding="utf-8", errors="replace"):
            raise ValueError(f"{file} can't be read: it is no JSON ({error}). Download or copy it again.") from error


def method_of(quantization: Any) -> str:
    """The name of a quantization, given its config."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    return str(getattr(method, "value", method))


def explain_quantized(name: str | os.PathLike[str], kwargs: dict[str, Any], error: Exception) -> None:
    """Say it if a checkpoint could not be loaded because it is quantized."""
    from transformers import AutoConfig

    given = {key: kwargs[key] for key in FROM_HUB if key in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, str | os.PathLike):
        try:
            config = AutoConfig.from_pretrained(config or name, **given)
        except (OSError, ValueError):
            return
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is not None:
        raise RuntimeError(
            f"{name} is quantized ({method_of(quantization)}), and transformers can't load it here: {error} {_REMEDY}"
        ) from error


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """An error about a quantized model says that it is one."""
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    try:
        yield
    except ValueError as error:
        if quantization is None or getattr(model, "hf_quantizer", None) is None:
            raise
        raise ValueError(f"The checkpoint is quantized ({method_of(quantization)}). {error} {_REMEDY}") from error
