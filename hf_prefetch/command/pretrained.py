"""Loading what a user has named on the command line: a folder, a model on the Hub, or the package's own model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..checkpoints import loading
from ..config import PrefetchConfig
from ..demo import demo_model_path
from ..memory.checkpoint import UnknownDtypeError, read_headers
from ..memory.packed_files import is_packed
from ..model.homes import Device

__all__ = ["DEMO", "files_of", "load_enabled", "load_model", "load_tokenizer", "most_tokens"]

# The name of the demonstration model.
DEMO = "demo"

Loaded = TypeVar("Loaded")


def load_model(name: str, **options: Any) -> Any:
    """A model on the CPU, in the dtype of its checkpoint; `options` are transformers' own.

    Raises:
        FileNotFoundError: nothing of this name is here or on the Hub; the message says which.
    """
    from transformers import AutoModelForCausalLM

    def load(path: str) -> Any:
        if is_packed(Path(path)):
            return loading.load_unpacked(path, dtype="auto", **options)
        # Whatever is broken is named here with its file; transformers' own errors don't.
        with suppress(UnknownDtypeError):
            read_headers(sorted(Path(path).glob("*.safetensors")))
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)

    return _load(name, load)


def load_enabled(name: str, config: PrefetchConfig, device: Device, **options: Any) -> Any:
    """The same with prefetching on: what `from_pretrained` gives, read straight to where it stays.

    Raises:
        FileNotFoundError: as above.
        ValueError, RuntimeError: as `from_pretrained`.
    """
    return _load(name, lambda path: loading.load_enabled(path, config, device, dtype="auto", **options))


def load_tokenizer(name: str, **options: Any) -> Any:
    """The tokenizer of a model. Raises what `load_model` raises, and sooner."""
    from transformers import AutoTokenizer

    return _load(name, lambda path: AutoTokenizer.from_pretrained(path, **options))


def files_of(name: str) -> Path:
    """The folder with a model's files, downloaded if they have to be. Raises what `load_model` raises."""

    def folder(path: str) -> Path:
        return Path(path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))

    return _load(name, folder, names_a_model=False)


def most_tokens(config: Any) -> int | None:
    """How many tokens a model takes, prompt and new ones together, as its config has it; None if it doesn't say."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def _load(name: str, load: Callable[[str], Loaded], *, names_a_model: bool = True) -> Loaded:
    """`names_a_model`: whether its config has to say what model it is of; files can be looked at without."""
    if not name.strip():
        raise FileNotFoundError("the name of the model is empty")
    path = Path(demo_model_path() if name == DEMO else name).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            what = "a folder without config.json" if path.is_dir() else "a file"
            raise FileNotFoundError(f"{name} is {what}; give the folder that holds a checkpoint")
        if names_a_model and not _names_a_model(path / "config.json"):
            raise ValueError(f"{path / 'config.json'} has no model_type, so nobody knows what model it is of")
        _say_less()
        return load(str(path))
    try:
        validate_repo_id(name)
        _say_less()
        return load(name)
    except (OSError, ValueError) as error:
        _explain(name, error)


def _names_a_model(config: Path) -> bool:
    """Whether a config says what it is of. What can't be read has an error of its own."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(found, dict) and any(found.get(key) for key in ("model_type", "auto_map", "architectures"))


def _explain(name: str, error: Exception) -> NoReturn:
    """Say of a name that is no folder here what became of it on the Hub; what is clear already passes through."""
    reasons = _chain(error)
    if any(isinstance(reason, GatedRepoError) for reason in reasons):
        raise error
    if any(isinstance(reason, HFValidationError | RepositoryNotFoundError) for reason in reasons):
        raise FileNotFoundError(f"{name}: no such folder, and no model of that name on the Hub") from error
    if any(isinstance(reason, LocalEntryNotFoundError) for reason in reasons):
        raise FileNotFoundError(
            f"{name}: no such folder, and no model of that name among those downloaded; the Hub can't be reached"
        ) from error
    raise error


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and those that it was raised from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _say_less() -> None:
    """What transformers and the Hub's client have to say while loading goes to a terminal or nowhere."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
