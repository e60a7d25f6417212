"""Which versions of vLLM are supported."""

from __future__ import annotations

import re

__all__ = ["NEWEST", "OLDEST", "SUPPORTED", "unsupported"]

# (major, minor), both included.
OLDEST, NEWEST = (0, 26), (0, 33)
SUPPORTED = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def unsupported(version: str) -> str | None:
    """Why prefetching can't be had with a version of vLLM, if so."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    remedy = f"pip install '{SUPPORTED}', or leave hf_prefetch out of additional_config"
    return f"this version of hf_prefetch works with {SUPPORTED}, and this is vLLM {version}: {remedy}"
