"""PrefetchConfig: what a user can choose, checked before anything is touched; the only place with defaults."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from numbers import Integral, Real

from .sizes import in_bytes, shown

__all__ = ["DEFAULT_GATE", "DEFAULT_SLOTS", "MAX_SLOTS", "MIN_SLOTS", "PrefetchConfig"]

MIN_SLOTS = 2
MAX_SLOTS = 4
DEFAULT_SLOTS = 3
DEFAULT_GATE = 2


@dataclass(frozen=True)
class PrefetchConfig:
    """Options of one enabled model.

    Args:
        slots: device buffers that the expert banks rotate through, each as large as the largest bank. 0 is off;
            2 to 4 work; 3 is recommended. One slot could never be refilled while it is read, so nothing would
            overlap; more than four gain nothing over a lookahead of two.
        n_cpu_moe: how many of the first layers that have experts keep them in host memory, the others on the device; None:
            all.
        gpu_memory: device memory for weights (slots, resident experts and everything that is not an expert), in bytes or
            as "20GiB": as many layers as fit keep their experts on the device; None: no layer does. What a run needs
            besides, such as the KV cache, comes on top. At most one of the two can be given.
        expert_cache: device memory in which the experts that decoding uses stay from token to token, in bytes or as "4GiB", or
            as a share of `gpu_memory` such as 0.5; None: no cache. With `gpu_memory` it is part of that budget. Allocated when
            it is first used. A token's experts must fit; half of all experts is a good size.
        lookahead_gate: a call takes the lookahead path from this many routed ids per expert on. Below it most experts are
            unlikely to be used, so a whole-bank copy doesn't pay. With the default it is only where the choice begins, and what
            calls take decides; any other number is kept to.
        pin_memory: host memory that may be page-locked, in bytes or as "40GiB"; None or "auto": all that experts take. Those of
            layers beyond it are copied from pageable memory, which is several times slower.
        host_memory: host memory for experts, in bytes or as "40GiB": those of layers beyond it stay in files and are read
            ahead of use; None: all of them are in memory.
        offload_folder: where experts beyond `host_memory` are written that can't be read from the checkpoint as they lie there.
        pack: keep bfloat16 experts in host memory in three quarters of their bytes, and unpack them on the device; "auto": if
            a short measurement finds that to be faster; None: those of a packed checkpoint, and no others.
        progress: show a progress bar while weights are moved; None shows one only where somebody would see it.

    Raises:
        TypeError: a value of another kind: `slots` is not an integer (a bool or a string is not one), for example.
        ValueError: a value outside its range; the message says why.
    """

    slots: int = DEFAULT_SLOTS
    n_cpu_moe: int | None = None
    gpu_memory: int | str | None = None
    expert_cache: int | str | float | None = None
    lookahead_gate: int = DEFAULT_GATE
    pin_memory: int | str | None = None
    host_memory: int | str | None = None
    offload_folder: str | os.PathLike[str] | None = None
    pack: bool | str | None = None
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
            object.__setattr__(self, "gpu_memory", _size_in_bytes(self.gpu_memory, "gpu_memory"))
        if self.expert_cache is not None:
            object.__setattr__(self, "expert_cache", _size_or_share(self.expert_cache))
        if isinstance(self.expert_cache, float) and self.gpu_memory is None:
            raise ValueError(
                f"expert_cache={self.expert_cache!r} is a share of gpu_memory, which is not given. Give that, or a size in "
                'bytes or as "4GiB".'
            )
        if self.cache_budget and self.device_budget is not None and self.cache_budget >= self.device_budget:
            raise ValueError(
                f"expert_cache ({shown(self.cache_budget)}) is part of gpu_memory ({shown(self.device_budget)}) and must be "
                "smaller."
            )
        if self.pin_memory == "auto":
            object.__setattr__(self, "pin_memory", None)
        if self.pin_memory is not None:
            object.__setattr__(self, "pin_memory", _size_in_bytes(self.pin_memory, "pin_memory", least=0))
        if self.host_memory is not None:
            object.__setattr__(self, "host_memory", _size_in_bytes(self.host_memory, "host_memory", least=0))
            if self.pack is True:
                raise ValueError("pack=True keeps all experts in host memory, so host_memory can't be given with it.")
        if self.offload_folder is not None and not isinstance(self.offload_folder, str | os.PathLike):
            raise TypeError(f"offload_folder must be a path, got {self.offload_folder!r}.")
        if self.offload_folder is not None and not os.fspath(self.offload_folder):
            raise ValueError("offload_folder is empty. Give '.' for the current folder.")
        if self.offload_folder is not None:
            if "\0" in os.fsdecode(self.offload_folder):
                raise ValueError(f"offload_folder is no path: {self.offload_folder!r} has a null character in it.")
            object.__setattr__(self, "offload_folder", os.path.expanduser(os.fsdecode(self.offload_folder)))
        if self.offload_folder is not None and self.host_memory is None:
            raise ValueError("offload_folder is for experts beyond host_memory, which is not given. Give both or none.")
        if self.pack is not None and self.pack != "auto" and not isinstance(self.pack, bool):
            kind = ValueError if isinstance(self.pack, str) else TypeError
            raise kind(f'pack must be True, False, "auto" or None, got {self.pack!r}.')
        if self.progress is not None and not isinstance(self.progress, bool):
            raise TypeError(f"progress must be True, False or None, got {self.progress!r}.")

    @property
    def device_budget(self) -> int | None:
        """`gpu_memory` in bytes."""
        return self.gpu_memory if isinstance(self.gpu_memory, int) else None

    @property
    def pin_budget(self) -> int | None:
        """`pin_memory` in bytes."""
        return self.pin_memory if isinstance(self.pin_memory, int) else None

    @property
    def host_budget(self) -> int | None:
        """`host_memory` in bytes."""
        return self.host_memory if isinstance(self.host_memory, int) else None

    @property
    def cache_budget(self) -> int:
        """`expert_cache` in bytes, 0 for none."""
        if isinstance(self.expert_cache, float):
            return int(self.expert_cache * (self.device_budget or 0))
        return self.expert_cache if isinstance(self.expert_cache, int) else 0


def _size_or_share(value: object) -> int | float:
    """A size in bytes as an int, or a share between 0 and 1 as a float: 0.5, "0.5" or "50%"."""
    text = value.strip() if isinstance(value, str) else ""
    share: float | None = None
    if isinstance(value, Real) and not isinstance(value, Integral):
        share = float(value)
    elif re.fullmatch(r"\d*\.\d+", text):
        share = float(text)
    elif re.fullmatch(r"\d+(\.\d+)? ?%", text):
        share = float(text.rstrip("% ")) / 100
    if share is None:
        return _size_in_bytes(value, "expert_cache", least=0)
    if not 0 < share < 1:
        raise ValueError(f"expert_cache={value!r} is a share of gpu_memory and must lie between 0 and 1.")
    return share


def _size_in_bytes(size: object, name: str, least: int = 1) -> int:
    if isinstance(size, bool) or not isinstance(size, str | Integral):
        share = ", or a share of gpu_memory such as 0.5" if name == "expert_cache" else ""
        kind = type(size).__name__
        raise TypeError(f'{name} must be bytes or a size such as "20GiB"{share}, got {size!r} of type {kind}.')
    try:
        nbytes = in_bytes(size) if isinstance(size, str) else int(size)
        # Shares of it are computed, so a number too large for that is no size, however many digits an int may have.
        float(nbytes)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f'{name}={size!r} is no size: give bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as "20GiB".'
        ) from error
    if nbytes < 0:
        raise ValueError(f"{name} can't be negative, got {size!r}.")
    if nbytes < least:
        raise ValueError(f"{name} must be more than nothing, got {size!r}.")
    return nbytes
