"""PrefetchConfig: what a user can choose, checked before anything is touched; the only place with defaults."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from accelerate.utils import convert_file_size_to_int

__all__ = ["DEFAULT_SLOTS", "MAX_SLOTS", "MIN_SLOTS", "PrefetchConfig"]

MIN_SLOTS = 2
MAX_SLOTS = 4
DEFAULT_SLOTS = 3


@dataclass(frozen=True)
class PrefetchConfig:
    """Options of one enabled model.

    Args:
        slots: device buffers that the expert banks rotate through, each as large as the largest bank. 0 is off;
            2 to 4 work; 3 is recommended. One slot could never be refilled while it is read, so nothing would
            overlap; more than four gain nothing over a lookahead of two.
        n_cpu_moe: how many of the first layers keep their experts in host memory, the others on the device; None: all.
        gpu_memory: device memory for weights (slots, resident experts and everything that is not an expert), in bytes or
            as "20GiB": as many layers as fit keep their experts on the device; None: no layer does. What a run needs
            besides, such as the KV cache, comes on top. At most one of the two can be given.
        lookahead_gate: a call takes the lookahead path from this many routed ids per expert on. Below it most
            experts are unlikely to be needed soon enough for a whole-bank copy to pay.
        progress: show a progress bar while weights are moved; None shows one only where somebody would see it.

    Raises:
        TypeError: `slots` is not an integer (a bool or a string is not one), or `progress` is not a bool.
        ValueError: a value outside its range; the message says why.
    """

    slots: int = DEFAULT_SLOTS
    n_cpu_moe: int | None = None
    gpu_memory: int | str | None = None
    lookahead_gate: int = 2
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "lookahead_gate", "n_cpu_moe"):
            value = getattr(self, name)
            if name == "n_cpu_moe" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
            object.__setattr__(self, name, int(value))
        if self.slots == 1:
            raise ValueError(
                "slots=1 makes no sense: the only slot would be refilled while the layer that reads it still "
                "computes, so no copy could overlap. Use slots=3 (recommended), 2 or 4, or slots=0 to switch it off."
            )
        if self.slots != 0 and not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            raise ValueError(
                f"slots must be 0 (off) or {MIN_SLOTS} to {MAX_SLOTS}, got {self.slots}: the lookahead is two "
                f"expert banks, so more than {MAX_SLOTS} slots would only hold device memory. "
                f"{DEFAULT_SLOTS} is recommended."
            )
        if self.lookahead_gate < 0:
            raise ValueError(f"lookahead_gate counts routed ids per expert and can't be negative, got {self.lookahead_gate}.")
        if self.n_cpu_moe is not None and self.n_cpu_moe < 0:
            raise ValueError(f"n_cpu_moe counts layers and can't be negative, got {self.n_cpu_moe}.")
        if self.n_cpu_moe is not None and self.gpu_memory is not None:
            raise ValueError("n_cpu_moe and gpu_memory both decide what stays on the device; give one of them.")
        if self.gpu_memory is not None:
            object.__setattr__(self, "gpu_memory", _size_in_bytes(self.gpu_memory))
        if self.progress is not None and not isinstance(self.progress, bool):
            raise TypeError(f"progress must be True, False or None, got {self.progress!r}.")

    @property
    def device_budget(self) -> int | None:
        """`gpu_memory` in bytes."""
        return self.gpu_memory if isinstance(self.gpu_memory, int) else None


def _size_in_bytes(size: object) -> int:
    if (isinstance(size, Integral) and not isinstance(size, bool)) or (isinstance(size, str) and size.strip().isdecimal()):
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'gpu_memory must be bytes or a size such as "20GiB", got {size!r} of type {type(size).__name__}.')
    try:
        nbytes = int(convert_file_size_to_int(size))
    except ValueError as error:
        raise ValueError(
            f'gpu_memory={size!r} is no size: give bytes, or a number with KB, MB, GB, KiB, MiB or GiB, such as "20GiB".'
        ) from error
    if nbytes <= 0:
        raise ValueError(f"gpu_memory must be more than nothing, got {size!r}.")
    return nbytes
