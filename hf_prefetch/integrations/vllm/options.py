"""Options: what `additional_config={"hf_prefetch": {...}}` asks for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ...config import PrefetchConfig

__all__ = ["KEY", "OPTIONS", "options_of"]

KEY = "hf_prefetch"
# Of PrefetchConfig's fields those that mean the same here: the others are of transformers' loading, or for experiments.
OPTIONS = ("slots", "n_cpu_moe", "gpu_memory", "expert_cache", "pin_memory", "pack")


def options_of(additional_config: object) -> PrefetchConfig | None:
    """What an engine's `additional_config` asks for; None if it doesn't ask for prefetching, or for `slots=0`.

    Raises:
        TypeError, ValueError: it asks for something that there isn't. The message names the option and says what would do.
    """
    asked = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise TypeError(
            f'additional_config["{KEY}"] must be a dict of options such as {{"slots": 3}}, got {asked!r} of type '
            f"{type(asked).__name__}."
        )
    unknown = [str(name) for name in asked if name not in OPTIONS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], OPTIONS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f'additional_config["{KEY}"] has no option {", ".join(unknown)}.{meant} The options are {", ".join(OPTIONS)}.'
        )
    try:
        config = PrefetchConfig(**asked, progress=None)
    except (TypeError, ValueError) as error:
        raise type(error)(f'additional_config["{KEY}"]: {error}') from error
    return config if config.slots else None
