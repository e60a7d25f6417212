"""Watcher: sees what the host computes on buffers of a fake device, while it computes it.

[Note: what the host computes]
On the CPU a module's forward runs at once, in the caller's thread. On a device it would have been enqueued on the
compute stream. So an operator that touches a buffer counts as a kernel enqueued on the compute stream and forced at
once: what stands before it on that stream runs first, and through waits what that depends on; nothing else has to have
happened. An operator that touches page-locked host memory only is the host's own doing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .log import ByteRange

if TYPE_CHECKING:
    from .fake_device import FakeDevice

__all__ = ["Watcher"]

# These take a tensor for its shape, dtype or device and never look at its bytes.
_LOOKS_ONLY_AT_METADATA = frozenset(
    {
        "detach_",
        "empty_like",
        "full_like",
        "is_pinned",
        "is_same_size",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "record_stream",
        "resize_",
        "set_",
        "zeros_like",
    }
)


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operator on a buffer of `device` goes through `FakeDevice.computing`.

    Views cost nothing and are not logged. An operator counts as reading each of its inputs from the first byte to the
    last, also where it picks rows. Operators of other libraries (`torch.library.custom_op`) count as a whole, and
    what they do inside is watched too; kernels that don't go through torch's dispatcher are not seen and have to say
    what they touch through `FakeDevice.computing`.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._device.is_running or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        traits = _traits(func)
        run: Callable[[], Any] = functools.partial(func, *args, **kwargs)
        if traits.foreign:
            run = functools.partial(self._run_watched, func, args, kwargs)
        if traits.metadata_only:
            return run()
        reads, writes = self._ranges(func, traits, args, kwargs)
        if not reads and not writes:
            return run()
        if traits.may_be_view:
            # It is a view or a copy depending on strides: taken apart, it shows which.
            with self:
                return func.decompose(*args, **kwargs)
        with self._device.computing(reads, writes, str(func).removeprefix("aten.")):
            return run()

    def _run_watched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Calling it would come back here: its CPU kernel is entered directly, with the watcher on.
        with self:
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)

    def _ranges(
        self, func: OpOverload, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[ByteRange], list[ByteRange]]:
        reads: list[ByteRange] = []
        writes: list[ByteRange] = []
        named = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            target = writes if name in traits.written else reads
            for tensor in _tensors(value):
                touched = self._device.range_of(tensor)
                if touched is not None:
                    target.append(touched)
        return reads, writes


class _Traits:
    """What the schema of an operator says about it."""

    def __init__(self, func: OpOverload) -> None:
        composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        self.foreign = func.namespace not in ("aten", "prim", "prims")
        self.may_be_view = func.is_view and composite
        self.metadata_only = (
            (func.is_view and not composite)
            or torch.Tag.inplace_view in func.tags
            or func._schema.name.removeprefix("aten::") in _LOOKS_ONLY_AT_METADATA
        )
        # Arguments that it writes to, by position and by name, whichever way they are passed.
        self.written: set[int | str] = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.update((position, argument.name))


@functools.cache
def _traits(func: OpOverload) -> _Traits:
    return _Traits(func)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
