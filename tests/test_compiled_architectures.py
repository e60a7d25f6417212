"""Every architecture that transformers compiles generates the same over a static cache by compiled steps, off and on.

The "eager" backend runs the traced operators as they are, so logits are comparable too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel

import architectures
from architectures import ARCHITECTURES, NEW_TOKENS
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from models import Snapshot
from test_architectures import _GENERATING, MAY_NOT_RUN, REFUSED, WHOLE_BANKS

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiles(name: str) -> bool:
    """Whether transformers would compile its decoding steps: read from its class, since building them all takes long."""
    model = getattr(architectures.transformers, ARCHITECTURES[name].model)
    return bool(model._can_compile_fullgraph)


@torch.no_grad()
def generation(name: str, model: PreTrainedModel, *, compiled: bool = True) -> list[torch.Tensor]:
    """Tokens and logits of a greedy generation whose steps after the first are compiled, unless they shall not be."""
    compilation = CompileConfig(backend="eager", mode=None)
    compilation._compile_all_devices = True  # not only on accelerators
    inputs = architectures.inputs_of(name, model)
    inputs.pop("decoder_input_ids", None)
    torch.manual_seed(1)
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static",
        compile_config=compilation, disable_compile=not compiled,
        output_logits=True, return_dict_in_generate=True, **ARCHITECTURES[name].generation,
    )  # fmt: skip
    return [output.sequences, *output.logits]


@pytest.mark.parametrize("name", [name for name in _GENERATING if compiles(name) and name not in (*REFUSED, *MAY_NOT_RUN)])
def test_same_bits_from_compiled_steps(name: str) -> None:
    """With half of the experts in a row cache, where the architecture's experts can be cached."""
    model = architectures.build(name)
    caches = model._can_set_experts_implementation()
    if caches:
        model.set_experts_implementation("batched_mm")
    expected = generation(name, model)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    before, banks = Snapshot.of(model), find_banks(model).banks
    cacheable = [bank for bank in banks if bank.layout.has_rows]
    rows = max((-(-bank.num_experts // 2) for bank in cacheable), default=0)  # the same number of every bank
    budget = rows * sum(bank.layout.row_nbytes for bank in cacheable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        enable_expert_prefetch(model, device="cpu", expert_cache=budget or None, progress=False)
        generation(name, model, compiled=False)
        uncompiled = model.expert_prefetch.report()
        model.expert_prefetch.reset()
        assert all(map(torch.equal, generation(name, model), expected))
    counted = model.expert_prefetch.report()
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert counted.calls == uncompiled.calls, "some calls went past the hook"
    assert counted.lookahead_hits > 0
    assert counted.fallbacks == 0
    if caches and name not in WHOLE_BANKS:
        assert counted.cached_calls == uncompiled.cached_calls > 0
