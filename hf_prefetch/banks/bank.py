"""ExpertBank: the weights of one layer's experts, and the modules that hold and read them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .attributes import place_of
from .forms import can_open, is_plain, opened, parts_of
from .layout import BankLayout

__all__ = ["ExpertBank"]


@dataclass(frozen=True, eq=False)
class ExpertBank:
    """The weights of one experts module, or of several modules that share the same Parameters.

    [Note: owners and holders]
    A *holder* is a module whose forward reads the bank: hooks go there. Its weights are its own Parameters, or those of modules
    inside it, their *owners*: a list of experts, say, over which a block loops. They are named as in a state dict of the
    holder: `gate_up_proj`, or `experts.3.up.weight`. What an owner keeps among its attributes is named by the way there:
    `experts.gate_up_proj.storage.data`.

    Attributes:
        index: position among the model's banks, in the order of `named_modules`.
        name: path of the module that the experts are in.
        holders: every module that holds it, in weak references: whoever keeps a bank must not keep its model.
        parameters: the Parameters that travel, by name, or tensors in their place. While the bank is prefetched they stay
            the same objects; what they point at is host memory.
        num_experts: how many experts there are.
        ids_argument: name and position of the expert ids among the arguments of `forward`; None where it isn't given any.
        has_beside: whether a holder has tensors among its attributes that belong to experts by their numbers and stay there.
        layout: where each parameter, or each part of one, lies in the bank's block of bytes.
    """

    index: int
    name: str
    holders: tuple[weakref.ref[nn.Module], ...]
    parameters: dict[str, nn.Parameter]
    num_experts: int
    ids_argument: tuple[str, int] | None
    layout: BankLayout
    has_beside: bool = False
    # Of each holder, of which there are few. Weak on both sides: a module owns its own weights as a rule.
    _places: list[tuple[weakref.ref[nn.Module], list[tuple[weakref.ref[nn.Module], str, str]]]] = field(
        default_factory=list, repr=False
    )

    @property
    def nbytes(self) -> int:
        """Size of the block that travels, in bytes."""
        return self.layout.nbytes

    @property
    def weight_nbytes(self) -> int:
        """Bytes of its weights as a model computes with them."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters.values())

    @cached_property
    def is_plain(self) -> bool:
        """Whether each Parameter is one tensor, as most are."""
        return all(map(is_plain, self.parameters.values()))

    @cached_property
    def has_packed(self) -> bool:
        """Whether some of what travels has to be opened before anything computes with it."""
        return any(map(can_open, self.parameters.values()))

    @cached_property
    def opens(self) -> bool:
        """Whether what is computed with is made anew for each call, so that the memory that it came in is free at once."""
        plain = sum(self.parameters[name].numel() * self.parameters[name].element_size() for name in self._plain_names)
        wrapped = (parameter for name, parameter in self.parameters.items() if name not in self._plain_names)
        return not self.is_plain and all(map(can_open, wrapped)) and plain <= self.nbytes // 16

    @cached_property
    def _plain_names(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self.parameters.items() if is_plain(parameter))

    def parts(self) -> Mapping[str, torch.Tensor]:
        """What the Parameters are made of, named as in the layout."""
        return self.parameters if self.is_plain else parts_of(self.parameters)

    def dressed(self, tensors: dict[str, nn.Parameter], found: Any = None) -> dict[str, nn.Parameter]:
        """Parameters to compute with, made of these tensors, which are named as in the layout.

        They may have another number of rows. `found` are those that the call reads (an `Assignment`), if it says so.
        """
        if self.is_plain:
            return tensors
        dressed = {name: opened(name, parameter, tensors, found) for name, parameter in self.parameters.items()}
        if self.opens:
            # Nothing of what is handed out may lie in the memory that these tensors came in.
            dressed |= {name: nn.Parameter(dressed[name].clone(), requires_grad=False) for name in self._plain_names}
        return dressed

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every holder that is still there."""
        return tuple(module for holder in self.holders if (module := holder()) is not None)

    @property
    def owners(self) -> tuple[nn.Module, ...]:
        """Every module that has some of the Parameters as its own."""
        return tuple(dict.fromkeys(owner for module in self.modules for owner, _, _ in self.places(module)))

    def places(self, module: nn.Module) -> list[tuple[nn.Module, str, str]]:
        """Where a holder's weights are: owner, name of the weight there, name in the bank."""
        return [(owner, own, name) for refers, own, name in self._places_in(module) if (owner := refers()) is not None]

    def _places_in(self, module: nn.Module) -> list[tuple[weakref.ref[nn.Module], str, str]]:
        for holder, places in self._places:
            if holder() is module:
                return places
        owners = ((_owner_of(module, name), name) for name in self.parameters)
        places = [(weakref.ref(owner), own, name) for (owner, own), name in owners]
        self._places.append((weakref.ref(module), places))
        return places

    def point(self, module: nn.Module, tensors: dict[str, nn.Parameter]) -> None:
        """Make a holder read these tensors."""
        # Here and below: several times a call, so nothing is asked for that is known.
        for refers, own, name in self._places_in(module):
            if (owner := refers()) is not None:
                values, key = owner._parameters, own
                if own not in values:
                    values, key = place_of(owner, own)
                values[key] = tensors[name]

    def replaced(self, module: nn.Module, tensors: dict[str, nn.Parameter] | None = None) -> list[str]:
        """Names of a holder's weights that are not these tensors; the bank's Parameters, if none are given.

        Of tensors that are given a view that is all of one is that one: kernels put it in its place to be sure of its type.
        """
        expected, replaced = self.parameters if tensors is None else tensors, []
        for refers, own, name in self._places_in(module):
            if (owner := refers()) is not None:
                values, key = owner._parameters, own
                if own not in values:
                    values, key = place_of(owner, own)
                now = values.get(key)
                if now is not expected[name] and (tensors is None or not _is_all_of(now, expected[name])):
                    replaced.append(name)
        return replaced

    def rebind(self) -> None:
        """Look the Parameters up again: accelerate puts new ones in place when it attaches or detaches a hook."""
        for owner, own, name in self.places(self.modules[0]):
            values, key = place_of(owner, own)
            parameter = values.get(key)
            assert parameter is not None, f"{self.name}.{name} is gone"
            # A view would keep what it is a view of, wherever it points.
            is_view = not isinstance(parameter, nn.Parameter) and parameter._is_view()
            self.parameters[name] = parameter.data if is_view else parameter
        for module in self.modules:
            self.point(module, self.parameters)

    def ids(self, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
        """The expert ids of a call (tokens x top-k), or None where the call does not show them."""
        if self.ids_argument is None:
            return None
        name, position = self.ids_argument
        ids = args[position] if len(args) > position else kwargs.get(name)
        return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None

    def with_ids(
        self, args: tuple[object, ...], kwargs: dict[str, object], ids: torch.Tensor
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a call that shows its ids, with others in their place."""
        assert self.ids_argument is not None, "it shows its ids"
        name, position = self.ids_argument
        if len(args) > position:
            return (*args[:position], ids, *args[position + 1 :]), kwargs
        return args, kwargs | {name: ids}


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module inside that has a weight as its own, and how it is named there."""
    while (inner := module._modules.get(name.partition(".")[0])) is not None:
        module, name = inner, name.partition(".")[2]
    return module, name


def _is_all_of(view: object, tensor: torch.Tensor) -> bool:
    """Whether one tensor reads the same bytes as another, as the same values in the same places."""
    if type(view) not in (torch.Tensor, nn.Parameter) or not is_plain(tensor):
        return False
    assert isinstance(view, torch.Tensor)
    looks = [(each.data_ptr(), each.dtype, each.shape, each.stride(), each.device) for each in (view, tensor)]
    return looks[0] == looks[1]
