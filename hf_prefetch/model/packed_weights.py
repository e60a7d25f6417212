"""PackedWeights: a stack of matrices that is kept packed, and reads and writes like any other tensor.

While a bank is packed, its Parameters are wrappers around what `memory/packing.py` makes of them: blocks and escapes, each with
a row for every expert. These travel like the parts of any other wrapper (`forms`), and are unpacked on the device for the call
that reads them: only the experts that it uses, if it says which these are. Whoever else reads such a Parameter, in host memory,
gets the weights as they were, unpacked for that one operation. Who takes a view holds all of them unpacked for as long as it
lives, and what is written there is packed at once, as what is written into the Parameter itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from ..device.rows import triton_is_there
from ..device.table import Assignment
from ..memory.packing import PackedRows, pack, unpack
from ..memory.read_only import OpenedView, mapped, written_by

__all__ = ["PackedWeights"]

_OWN_GRAD: Any = torch.Tensor.grad
_OWN_DATA: Any = torch.Tensor.data
_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _Shared:
    """What all that stand for the same packed weights have together: these weights unpacked, while there are views of them."""

    def __init__(self) -> None:
        self.whole: Callable[[], torch.Tensor | None] = lambda: None


class PackedWeights(torch.Tensor):
    """Bfloat16 (experts, ...), contiguous, packed.

    Attributes:
        blocks, escapes: see `PackedRows`; each expert is a row.
    """

    # Attributes that are not its user's.
    OWN = frozenset(("blocks", "escapes", "_shared", "_aside"))

    blocks: torch.Tensor
    escapes: torch.Tensor
    _shared: _Shared
    _aside: nn.Parameter | None = None

    @staticmethod
    def __new__(cls: type[PackedWeights], blocks: torch.Tensor, escapes: torch.Tensor, size: torch.Size) -> PackedWeights:
        made: PackedWeights = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16, device=blocks.device)
        made.blocks, made.escapes, made._shared = blocks, escapes, _Shared()
        # An error, where DLPack or an extension would take a null pointer for the weights.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["blocks", "escapes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: None, size: torch.Size, stride: Any) -> PackedWeights:
        return PackedWeights(inner["blocks"], inner["escapes"], size)

    @staticmethod
    def opened(inner: Mapping[str, torch.Tensor], size: torch.Size, found: Assignment | None) -> torch.Tensor:
        """The weights as one tensor of this size, for a call that reads the rows that were found, or all.

        The other rows hold anything, and may have come as anything: nothing of them is looked at.
        """
        packed = PackedRows(size[1:].numel(), inner["blocks"], inner["escapes"])
        whole = torch.empty(size, dtype=torch.bfloat16, device=packed.blocks.device)
        rows = whole.view(size[0], -1)
        if whole.is_cuda and triton_is_there():
            from ..device.unpacking import unpack_rows

            unpack_rows(packed, rows, found)
        elif found is None:
            rows.copy_(unpack(packed))
        else:
            chosen = torch.tensor([row for row, _ in found.moves()], dtype=torch.int64, device=whole.device)
            rows[chosen] = unpack(PackedRows(packed.weights, packed.blocks[chosen], packed.escapes[chosen]))
        return whole

    @property
    def rows(self) -> PackedRows:
        """The experts as rows."""
        return PackedRows(self.shape[1:].numel(), self.blocks, self.escapes)

    def unpacked(self) -> torch.Tensor:
        """The weights as an ordinary tensor."""
        return PackedWeights.opened({"blocks": self.blocks, "escapes": self.escapes}, self.shape, None)

    def write(self, values: torch.Tensor) -> None:
        """Pack other values in the place of these. They are repeated as `copy_` does.

        Raises:
            RuntimeError: they have more escapes than there is room for; then nothing was written.
        """
        whole = self._shared.whole()
        try:
            values = values.to(self.blocks.device, torch.bfloat16).expand(self.shape).contiguous()
            packed = pack(values.view(self.shape[0], -1))
            if packed.escapes.shape[1] > self.escapes.shape[1]:
                raise RuntimeError(
                    f"These weights can't be written over packed ones: they need room for {packed.escapes.shape[1] - 1} "
                    f"weights that are kept whole, and there is room for {self.escapes.shape[1] - 1}. Call "
                    "disable_expert_prefetch(model), write them, and enable it again."
                )
        except BaseException:
            if whole is not None:
                whole.copy_(self.unpacked())
            raise
        self.blocks.copy_(packed.blocks)
        self.escapes.zero_()
        self.escapes[:, : packed.escapes.shape[1]] = packed.escapes
        if whole is not None and whole.data_ptr() != values.data_ptr():
            whole.copy_(values)
        # What was sent before is not current any more.
        torch.autograd.graph.increment_version(self)

    def whole(self) -> torch.Tensor:
        """The weights unpacked, once for all who hold views of them."""
        whole = self._shared.whole()
        if whole is None:
            with torch.inference_mode(False), torch.no_grad():
                whole = self.unpacked()
            self._shared.whole = weakref.ref(whole)
        return whole

    # -- what an ordinary Parameter has besides its values ------------------------------------------------------------

    @property
    def ordinary(self) -> nn.Parameter:
        """The Parameter that this is when it is unpacked: keeps the gradient and its hooks, and no weights meanwhile."""
        if self._aside is None:
            with torch.inference_mode(False):
                self.put_aside(nn.Parameter(torch.empty((), dtype=torch.bfloat16, device="cpu")))
        assert self._aside is not None, "it was put there"
        self._aside.requires_grad_(self.requires_grad)
        own = _OWN_GRAD.__get__(self)
        if own is not None:
            # A backward has left it here; hooks see it now.
            _OWN_GRAD.__set__(self, None)
            torch.autograd.backward(self._aside, own)
        return self._aside

    def put_aside(self, ordinary: nn.Parameter) -> None:
        """Keep this one, without its weights, for the time when these are unpacked."""
        with torch.inference_mode(False):
            # Of the same shape, as its gradient has to be.
            ordinary.data = torch.empty((), dtype=torch.bfloat16, device="cpu").expand(self.shape)
        self._aside = ordinary

    @property
    def grad(self) -> torch.Tensor | None:
        """That of the ordinary Parameter."""
        return None if self._aside is None and _OWN_GRAD.__get__(self) is None else self.ordinary.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _OWN_GRAD.__set__(self, None)
        self.ordinary.grad = value

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        """For gradients, which the ordinary Parameter gets."""
        return self.ordinary.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """For gradients, which the ordinary Parameter gets."""
        return self.ordinary.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> torch.Tensor:
        """The same packed weights, without a gradient."""
        return cast(torch.Tensor, _OWN_DATA.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `weights.data += delta` has written what it assigns.
        if not isinstance(value, PackedWeights) or value._shared is not self._shared:
            raise RuntimeError(
                "Packed weights can't be replaced by assigning to .data. Write into them: weights.data.copy_(values), "
                "weights.data.add_(delta). Or call disable_expert_prefetch(model) first."
            )

    def data_ptr(self) -> int:
        """There is no memory with the weights as they are.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "Packed weights have no memory that could be read as bfloat16. Take model.state_dict(), or a copy: weights.clone()."
        )

    def storage(self) -> Any:
        """As `data_ptr`: safetensors asks for this."""
        self.data_ptr()

    def share_memory_(self) -> Any:
        """As `data_ptr`: there is nothing that could be shared."""
        self.data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        """As `data_ptr`."""
        self.data_ptr()

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.unpacked().tolist()

    def numpy(self, **options: Any) -> Any:
        """As of any tensor: numpy has no bfloat16, and torch's own error says so."""
        return self.unpacked().numpy(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary one."""
        memo[id(self)] = copied = self._copied()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary one is pickled."""
        return self._copied().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> torch.Tensor:
        values = self.unpacked()
        return nn.Parameter(values, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _DETACH:
            other = PackedWeights(args[0].blocks, args[0].escapes, args[0].shape)
            other._shared = args[0]._shared
            return other
        if function is torch.ops.aten.copy_.default and isinstance(args[0], PackedWeights):
            args[0].write(_read(args[1]))
            return args[0]
        return _run(function, args, kwargs or {})


class UnpackedView(OpenedView):
    """A view of packed weights that were unpacked for it. What is written into it is packed.

    Attributes:
        origin: the packed weights.
        whole: all of them, unpacked.
    """

    origin: PackedWeights
    whole: torch.Tensor

    @staticmethod
    def __new__(cls: type[UnpackedView], view: torch.Tensor, origin: PackedWeights, whole: torch.Tensor) -> UnpackedView:
        made: UnpackedView = torch.Tensor._make_subclass(cls, view)
        made.origin, made.whole = origin, whole
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def _read(value: Any) -> Any:
    if isinstance(value, PackedWeights):
        return value.unpacked()
    return value.plain() if isinstance(value, UnpackedView) else value


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on unpacked weights. What it has written is packed, and what aliases them is a view of them."""
    written = {id(value): value for value in written_by(function, args, kwargs)}
    into_views = any(isinstance(value, UnpackedView) for value in written.values())
    used: dict[int, tuple[PackedWeights, torch.Tensor]] = {}
    changed: dict[int, tuple[PackedWeights, torch.Tensor]] = {}
    aliases: list[tuple[torch.Tensor, PackedWeights]] = []

    def opened(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, PackedWeights):
            place, origin, whole = id(value._shared), value, value.whole()
            inner = whole.detach()
            aliases.append((inner, value))
        elif isinstance(value, UnpackedView):
            place, origin, whole = id(value.origin._shared), value.origin, value.whole
            # Its own shape may change, so it takes part itself.
            inner = value if into_views else value.plain()
        else:
            return value
        used[place] = origin, whole
        if id(value) in written:
            changed[place] = origin, whole if isinstance(value, UnpackedView) else inner
        return inner

    def dressed(value: torch.Tensor) -> torch.Tensor:
        for inner, packed in aliases:
            if value is inner:
                return packed
        for packed, whole in used.values():
            if not isinstance(value, UnpackedView) and torch._C._is_alias_of(value, whole):  # type: ignore[attr-defined]
                return UnpackedView(value, packed, whole)
        return value

    inner, named = mapped(opened, args), {name: mapped(opened, value) for name, value in kwargs.items()}
    with torch._C._DisableTorchDispatch() if into_views else nullcontext():
        result = function(*inner, **named)
    for inner, packed in aliases:
        if id(packed) in written and (inner.shape, inner.stride()) != (packed.shape, packed.stride()):
            raise RuntimeError(f"{function} gives packed weights another shape. Call disable_expert_prefetch(model) first.")
    for packed, values in changed.values():
        packed.write(values)
    return mapped(dressed, result)
