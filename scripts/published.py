"""A benchmark file as documents show it: how it is read, and what its arms are called there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["HEADLINE", "IMAGES", "MAIN_ARM", "arm_title", "image_name", "machine_line", "model_line", "read"]

SCHEMA = 1
# The arm that stands for the package, and the prompt that bars are drawn for.
MAIN_ARM = "prefetch-3"
HEADLINE = 8192
# What is drawn of a file.
IMAGES = ("prefill", "bars", "share")

Json = dict[str, Any]

_TITLES = {
    "resident": "all on the GPU",
    "pinned-serial": "pinned, no overlap",
    "accelerate": "accelerate",
    "diffusers": "diffusers, experts only",
    "diffusers-whole": "diffusers, whole model",
}


def read(path: Path) -> Json:
    """The results in a file that scripts/bench.py has written.

    Raises:
        ValueError: it holds something else.
    """
    try:
        results: Json = json.loads(path.read_text(encoding="utf-8"))
        if results["schema"] == SCHEMA and results["model"]:
            return results
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} was not written by scripts/bench.py: {type(error).__name__}: {error}") from error
    raise ValueError(f"{path.name}: expected schema {SCHEMA} and a model that was measured, got schema {results['schema']}")


def arm_title(name: str) -> str:
    """What an arm is called: `prefetch-3+pack@50%` is "prefetch, 3 slots, packed, 50% in host memory"."""
    match = re.fullmatch(r"prefetch-(\d)(\+pack)?(?:@(.+))?", name)
    if match is None:
        return _TITLES.get(name, name)
    packed, part = ", packed" if match[2] else "", match[3]
    kept = "" if part is None else f", {part} in host memory" if part.endswith("%") else f", {part} of GPU memory"
    return f"prefetch, {match[1]} slots{packed}{kept}"


def model_line(results: Json) -> str:
    """Model, layers and bytes."""
    model = results["model"]
    return f"{model['name']}, {model['layers']} layers, {model['dtype']}, {size(model['bank_bytes'], 1)} of experts"


def size(nbytes: int, digits: int = 3) -> str:
    """In GB, with so many digits behind the point; in MB where there is less than one."""
    return f"{nbytes / 1e9:,.{digits}f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def machine_line(results: Json) -> str:
    """Machine, link and versions."""
    machine, link = results["machine"], results["link"]
    rate = f", {link['gb_per_s']:.1f} GB/s from page-locked memory" if link.get("gb_per_s") else ""
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{machine['name']}{rate}; {versions}, hf_prefetch {machine['hf_prefetch']}"


def image_name(stem: str, image: str) -> str:
    """File name of one of the images drawn of `stem`.json."""
    return f"{stem}-{image}.png"
