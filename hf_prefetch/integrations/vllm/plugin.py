"""What vLLM calls in each of its processes."""

from __future__ import annotations

import logging

from .versions import SUPPORTED, unsupported

__all__ = ["register"]

_log = logging.getLogger("vllm.hf_prefetch")


def register() -> None:
    """Put our classes in the place of vLLM's experts layers, and of what makes logits. Idempotent.

    Nothing is raised here, where engines that don't ask for prefetching begin as well: where it can't be had, an engine that
    asks for it is told so when its layers are made, or, where vLLM has no such layers, in the log.
    """
    try:
        import vllm
        from vllm.model_executor.custom_op import op_registry_oot

        from .layers import LAYERS
    except ImportError as error:
        _log.warning(
            "hf_prefetch: experts can't be prefetched, whatever additional_config says: this vLLM lacks what that takes (%s). "
            "It works with %s.", error, SUPPORTED,
        )  # fmt: skip
        return
    for ours in LAYERS:
        (theirs,) = ours.__bases__
        taken = op_registry_oot.get(theirs.__name__)
        if taken is None:
            theirs.register_oot(ours)
        elif taken is not ours:
            _log.warning(
                "hf_prefetch: another plugin has put %s in the place of vLLM's %s, so experts may not be prefetched. "
                "VLLM_PLUGINS=hf_prefetch loads this one alone.", taken.__name__, theirs.__name__,
            )  # fmt: skip
    reason = unsupported(vllm.__version__)
    if reason is not None:
        _log.warning("hf_prefetch: %s.", reason)
