"""Reading a checkpoint into the places where its weights stay.

`Reader` moves bytes from files into tensors on several threads and shows how far it is. `Unread` knows which Parameters of a
model have not been read yet, and reads each of them when somebody says where it goes.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from math import prod
from types import TracebackType

import torch
from torch import nn

from ..banks.forms import is_plain
from ..banks.swapping import swap
from ..progress import byte_progress
from ..workers import Workers
from .checkpoint import StoredTensor, is_unchanged
from .deferred import Deferred, Packed, Piece, Recipe, Stored, pieces, stored_in
from .packing import PackedRows, unpack
from .pinned import Arena

__all__ = ["Reader", "Unread"]

# Enough to reach what memory and fast disks give; each holds at most one piece besides its destination.
THREADS = 8
# Pieces that wait for a thread: few, so that an interrupt has little to wait for.
AHEAD = 4 * THREADS
# Tensors from this size on get pages of their own while they are not read.
_OWN_PAGES = 2**20


class Reader:
    """Reads what recipes say, and shows a progress bar over the bytes of the checkpoint.

    Use it as a context: at the end no thread writes anywhere any more, and the bar is gone.
    """

    def __init__(self, progress: bool | None) -> None:
        self._progress = progress
        self._workers = Workers(THREADS)
        self._bar = byte_progress(0, "loading weights", False)
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._workers.close()
        self._bar.close()

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """Begin to show progress: these are to be read."""
        self._bar.close()
        self._bar = byte_progress(sum(stored.nbytes for stored in tensors), "loading weights", self._progress)

    def still_to_read(self, nbytes: int) -> None:
        """Correct how much is left: so many bytes."""
        self._bar.total = self._bar.n + nbytes
        self._bar.refresh()

    def materialize(self, deferred: Deferred) -> torch.Tensor:
        """What a deferred tensor stands for, as an ordinary tensor in new memory."""
        with torch.inference_mode(False):
            tensor = torch.empty(tuple(deferred.shape), dtype=deferred.dtype, device="cpu")
        self.read(deferred.recipe, tensor)
        return tensor

    def read(self, recipe: Recipe, destination: torch.Tensor) -> None:
        """Make a tensor in `destination`, a tensor on the CPU of its shape and type. Returns when all of it is there.

        Raises:
            OSError, ValueError: a file can't be read, has become shorter or is damaged; the message names the file and the key.
        """
        with torch.inference_mode(False):
            if isinstance(recipe, Packed):
                made = (torch.empty(part.shape, dtype=part.dtype, device="cpu") for part in (recipe.blocks, recipe.escapes))
                blocks, escapes = made
                self.read(Stored(recipe.blocks, blocks.dtype), blocks)
                self.read(Stored(recipe.escapes, escapes.dtype), escapes)
                destination.copy_(unpack(PackedRows(recipe.shape[1:].numel(), blocks, escapes)).view(recipe.shape))
                return
            waiting = pieces(recipe, destination.detach())
            first = next(waiting, None)
            second = next(waiting, None)
            if first is not None and second is None:
                self._count(_read_piece(first))
            elif first is not None and second is not None:
                tasks = (partial(_read_piece, piece) for piece in chain((first, second), waiting))
                # Whatever ends this, nobody writes to the destination after it.
                self._workers.run(tasks, AHEAD, self._count)

    def _count(self, nbytes: int) -> None:
        # Something that is read twice (to compare tied weights) must not lead beyond the end.
        with self._lock:
            self._bar.update(min(nbytes, max(0, (self._bar.total or 0) - self._bar.n)))


def _read_piece(piece: Piece) -> int:
    """Read one piece, on whatever thread. Returns its bytes."""
    destination, stored = piece.destination, piece.source
    direct = destination.dtype == stored.dtype and destination.is_contiguous()
    buffer = destination if direct else torch.empty(destination.shape, dtype=stored.dtype, device="cpu")
    view = memoryview(buffer.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type] # an ndarray is a Buffer
    try:
        with stored.file.open("rb", buffering=0) as stream:
            stream.seek(piece.offset)
            done = 0
            while done < piece.nbytes:
                count = stream.readinto(view[done:])
                if not count:
                    raise ValueError(f"{stored.file} has become shorter while it was read: it ends inside {stored.key!r}.")
                done += count
            # Looked at when all of it has been read: whoever writes changes it before the first byte.
            if stored.state is not None and not is_unchanged(stored.file, stream.fileno(), stored.state):
                raise ValueError(f"{stored.file} was written to or replaced while it was loaded. Load the model again.")
    except OSError as error:
        raise OSError(error.errno, f"{stored} can't be read: {error.strerror or error}") from error
    if piece.checksum is not None and zlib.crc32(view) != piece.checksum:
        raise ValueError(f"{stored} is damaged: its bytes are not those that were written. Download or copy the file again.")
    if not direct:
        destination.copy_(buffer)
    return piece.nbytes


class Unread:
    """The weights of a model that have a place in it, but are still in the files of the checkpoint.

    Every deferred Parameter is replaced by an ordinary one whose memory was not touched yet, so that it takes none. The same
    Parameter in two modules (tied weights) stays the same. One that is packed becomes what `wrap` makes of blocks, escapes and
    its shape, and these two are what is read. Buffers are read at once; they are small.
    """

    def __init__(
        self, model: nn.Module, reader: Reader, wrap: Callable[[torch.Tensor, torch.Tensor, torch.Size], torch.Tensor]
    ) -> None:
        self._reader = reader
        self._wrap = wrap
        self._recipes: dict[int, tuple[torch.Tensor, Recipe]] = {}
        places: dict[int, nn.Parameter] = {}
        kept: list[torch.Tensor] = []  # as long as ids are compared, nothing may get the id of something that is gone
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, Deferred):
                    if id(parameter) not in places:
                        places[id(parameter)] = self._place(parameter)
                        kept.append(parameter)
                    module._parameters[name] = places[id(parameter)]
        self._all = list(places.values())
        self._is_finished = False
        reader.still_to_read(self._left())
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, Deferred):
                    module._buffers[name] = reader.materialize(buffer)
                    _mark(module._buffers[name], buffer)

    def _place(self, deferred: Deferred) -> nn.Parameter:
        recipe = deferred.recipe
        with torch.inference_mode(False):
            if isinstance(recipe, Packed):
                blocks, escapes = (_untouched(part.shape, part.dtype) for part in (recipe.blocks, recipe.escapes))
                for tensor, part in ((blocks, recipe.blocks), (escapes, recipe.escapes)):
                    self._recipes[id(tensor)] = (tensor, Stored(part, part.dtype))
                whole = self._wrap(blocks, escapes, recipe.shape)
            else:
                whole = _untouched(tuple(deferred.shape), deferred.dtype)
            parameter = nn.Parameter(whole, requires_grad=deferred.requires_grad)
        _mark(parameter, deferred)
        if not isinstance(recipe, Packed):
            self._recipes[id(parameter)] = (parameter, recipe)
        return parameter

    def _left(self) -> int:
        return sum(stored.nbytes for _, recipe in self._recipes.values() for stored in stored_in(recipe))

    def __len__(self) -> int:
        return len(self._recipes)

    def load(self, parameter: torch.Tensor, destination: torch.Tensor) -> None:
        """Write a Parameter's value, or that of a part of it, into `destination` (on the CPU, the same shape and type): read if
        it still has to be, else copied. `destination` may be its own memory."""
        found = self._recipes.get(id(parameter))
        if found is not None:
            self._reader.read(found[1], destination)
            del self._recipes[id(parameter)]
        elif destination.data_ptr() != parameter.data_ptr():
            with torch.no_grad():
                destination.copy_(parameter)

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """A Parameter's value, in memory of its own on the CPU."""
        there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        self.load(parameter, there)
        return there

    def recipe(self, parameter: nn.Parameter) -> Recipe | None:
        """How to make a Parameter that was not read yet; None for others."""
        found = self._recipes.get(id(parameter))
        return found[1] if found else None

    def keep(self, parameter: nn.Parameter) -> None:
        """A Parameter stays in its files: don't read it."""
        found = self._recipes.pop(id(parameter), None)
        if found is not None:
            self._reader.still_to_read(self._left())

    def wants_back(self) -> bool:
        """Whether Parameters that stay in files shall be read when they are given back: not if loading was broken off."""
        return self._is_finished

    def load_rest(self) -> None:
        """Read whatever nobody has asked for, where it is. That is the end of loading."""
        for parameter, _ in list(self._recipes.values()):
            self.load(parameter, parameter.data)
        self._all.clear()
        self._is_finished = True

    def abandon(self) -> None:
        """Empty all Parameters that were to be read, those too that have been."""
        for parameter in self._all:
            if is_plain(parameter):
                parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")
            else:
                empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"))
                swap(parameter, empty)
        self._recipes.clear()


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a tensor, of which the system provides nothing before somebody writes there."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _OWN_PAGES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Memory from torch's allocator may be filled with NaN at once (torch.use_deterministic_algorithms).
    return Arena(nbytes, shared=False).block.view(dtype).view(shape)


def _mark(tensor: torch.Tensor | None, deferred: Deferred) -> None:
    """Give a tensor the attributes that transformers has put on the one that it stands for."""
    own = ("recipe", "materialize", "_is_param")
    if tensor is not None:
        tensor.__dict__.update({name: value for name, value in deferred.__dict__.items() if name not in own})
