"""Run Mixture-of-Experts models bigger than the GPU: experts stay in host memory and reach the GPU ahead of use."""

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
