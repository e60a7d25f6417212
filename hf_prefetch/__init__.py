"""Run Mixture-of-Experts models bigger than the GPU: experts stay in host memory and reach the GPU ahead of use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import disable_expert_prefetch, enable_expert_prefetch
    from .checkpoints.loading import from_pretrained
    from .checkpoints.saving import save_packed
    from .report import Report
    from .scheduling.scheduler import PrefetchScheduler

__all__ = [
    "PrefetchScheduler",
    "Report",
    "__version__",
    "disable_expert_prefetch",
    "enable_expert_prefetch",
    "from_pretrained",
    "save_packed",
]

__version__ = "0.1.0"

# Where each name is. It is imported when somebody asks for it: torch and transformers take seconds, in which the command has to
# end like at any other time.
_PLACES = {
    "PrefetchScheduler": ".scheduling.scheduler",
    "Report": ".report",
    "disable_expert_prefetch": ".api",
    "enable_expert_prefetch": ".api",
    "from_pretrained": ".checkpoints.loading",
    "save_packed": ".checkpoints.saving",
}

if not TYPE_CHECKING:  # else every name would be one of the package's

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_PLACES[name], __name__), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PLACES})
