"""Every Mixture-of-Experts architecture in transformers: the same bits with prefetching as without, and it is used.

An architecture that isn't prefetched yet is a strict xfail that says why, so whoever mends it is told to take it out.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import architectures
from architectures import ARCHITECTURES, logits_of, run
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from models import Snapshot, prefetching

pytestmark = pytest.mark.usefixtures("deterministic")

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
SLOTS = (2, 3, 4)
PASSES = 2

# Why an architecture's experts aren't found.
REFUSED = {
    "doge": "its experts are rows of two nn.Embedding, inside a block that routes and holds dense weights as well",
}
# What ran into errors of its own in an older version, prefetched or not: then there is nothing to compare.
MAY_NOT_RUN = ("deepseek_v4", "doge", "qwen3_omni_moe_talker")
# Why tokens take whole banks where the experts that they use would do. All of them read routed rows only (found by filling
# the others with NaN; with finite numbers for llama4), but nothing says so to a reader of the module.
WHOLE_BANKS = {
    "dbrx": "experts of one weight are ranges of rows of a 2-D parameter, in a child of the module that is called with ids",
    "jetmoe": "called with the number of tokens of each expert (a list), not with ids",
    "llama4_text": "called with hidden states only: the inputs of experts that aren't routed are zero, and their rows are read",
    "longcat_flash": "one parameter has rows for identity experts, the other has not, so that a bank has no rows of its own",
    "nllb_moe": "its experts are modules of their own: which are called shows when they are",
    "switch_transformers": "its experts are modules of their own: which are called shows when they are",
}
# Older versions of transformers have others: this one's experts route by themselves.
if hasattr(transformers.models.aria.modeling_aria, "AriaGroupedExpertsGemm"):
    WHOLE_BANKS["aria"] = "called with hidden states and logits; each projection is a module inside, called without ids"
# Blocks of tokens at a time, long enough for whole banks.
BLOCKWISE = ("diffusion_gemma",)


def cases(names: Iterable[str], *refused: dict[str, str]) -> list[object]:
    """Architectures as parameters, those that are known to fail as strict xfails with their reasons."""
    reasons = {name: reason for faults in refused for name, reason in faults.items()}
    raises = {name: ValueError if name in REFUSED else AssertionError for name in reasons}
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, raises=raises[name], reason=reasons[name]))
        if name in reasons
        else name
        for name in names
    ]


@lru_cache(maxsize=1)
def model_of(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    return architectures.build(name, dtype).to(device)


def implementations_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Those that a model can be told to take."""
    return IMPLEMENTATIONS if model._can_set_experts_implementation() else ("its only one",)


@contextmanager
def skipping_what_does_not_run(name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if name in MAY_NOT_RUN:
            pytest.skip(f"{name} does not run in transformers {transformers.__version__}: {error}")
        raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", cases(ARCHITECTURES, REFUSED))
def test_same_bits_and_ahead_of_use(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Logits and generated tokens are the same off, on, again, and off, with each experts implementation.

    All experts are host-resident, banks are sent, some of them ahead of use, nothing fails, and the model is as it was
    afterwards. Which implementation runs in bfloat16, and with how many slots, goes by turns.
    """
    model = model_of(name, dtype, device)
    turn, implementations = list(ARCHITECTURES).index(name), implementations_of(model)
    if dtype is torch.bfloat16:
        implementations = (implementations[turn % len(implementations)],)
    nbytes = sum(parameter.nbytes for parameters in banks_of(model).values() for parameter in parameters)
    for position, implementation in enumerate(implementations):
        if implementation in IMPLEMENTATIONS:
            model.set_experts_implementation(implementation)
        with skipping_what_does_not_run(name):
            expected = run(name, model)
        before, slots = Snapshot.of(model), SLOTS[(turn + position) % len(SLOTS)]
        where = f"{implementation}, {slots} slots"
        with prefetching(model, slots, device) as report:
            # The ring has turned when the second pass begins; with what kernels it is read makes no difference to that.
            for number in range(1 if position else PASSES):
                assert run(name, model).equals(expected), f"{where}: pass {number} differs from the model without prefetching"
            counted = report()
        before.assert_restored(model)
        assert counted.weight_bytes >= nbytes, f"{where}: some experts were left where they are"
        assert counted.bytes_to_device > 0, where
        assert counted.lookahead_hits > 0, where
        assert counted.fallbacks == 0, where
    assert run(name, model).equals(expected), "differs after it was disabled"


_GENERATING = [name for name, architecture in ARCHITECTURES.items() if architecture.generates and name not in BLOCKWISE]


@pytest.mark.parametrize("name", cases(_GENERATING, REFUSED, WHOLE_BANKS))
def test_tokens_send_the_experts_that_they_use(device: torch.device, name: str) -> None:
    """In decode, where a token uses few experts, no whole bank is sent."""
    model = model_of(name, torch.float32, device)
    with prefetching(model, 3, device) as report:
        run(name, model)
        counted = report()
    assert counted.routed_calls > 0
    assert counted.calls == counted.lookahead_calls + counted.routed_calls


@pytest.mark.parametrize("name", cases(_GENERATING, REFUSED))
def test_same_bits_from_a_cache_of_packed_experts(device: torch.device, name: str) -> None:
    """With half of the experts in a row cache, in bfloat16, and packed; those that can't be cached send whole banks."""
    model = model_of(name, torch.bfloat16, device)
    if "batched_mm" in implementations_of(model):
        model.set_experts_implementation("batched_mm")
    with skipping_what_does_not_run(name):
        expected = run(name, model)
    before, banks = Snapshot.of(model), find_banks(model).banks
    rows = [-(-bank.num_experts // 2) * bank.layout.row_nbytes for bank in banks if bank.layout.has_rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        enable_expert_prefetch(model, device=device, expert_cache=sum(rows) or None, pack=True, progress=False)
        for _ in range(2):
            assert run(name, model).equals(expected)
    counted = model.expert_prefetch.report()
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert counted.fallbacks == 0
    if name not in WHOLE_BANKS and "batched_mm" in implementations_of(model):
        assert counted.cached_calls > 0
        assert counted.cache_hits > 0
    assert run(name, model).equals(expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_wrong_experts_show(device: torch.device, name: str) -> None:
    """What the tests above rest on: exchange the experts of one layer and the output differs, whichever layer it is."""
    model = model_of(name, torch.float32, device)
    with skipping_what_does_not_run(name):
        expected = logits_of(name, model)
    banks = banks_of(model)
    assert len(banks) > 2
    for prefix, parameters in banks.items():
        originals = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.roll(1, dims=0)
        changed = logits_of(name, model)
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
        assert not torch.equal(changed, expected), f"{prefix} does not show"


def banks_of(model: PreTrainedModel) -> dict[str, list[torch.nn.Parameter]]:
    """The experts' weights of each layer, found by name and without the package under test."""
    pattern = re.compile(r"^(.*?(?<!shared_)experts|.*?\.mlp(?=\.(?:input|output)_linear)|.*?\.mlp(?=\.\w+_embed))\.")
    found: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = pattern.match(name)
        if match and parameter.dim() > 1 and "router" not in name:
            found.setdefault(match[1], []).append(parameter)
    return found


def test_every_experts_class_is_among_them() -> None:
    """A class of experts that the installed transformers has and none of the models here has an instance of is new: list it."""
    folder = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^(@use_experts_implementation.*\n)?class (\w+?)\(nn\.Module\w*\):", re.MULTILINE)
    there = {
        name
        for file in folder.glob("*/modeling_*.py")
        for decorated, name in pattern.findall(file.read_text(encoding="utf-8"))
        if decorated or name.endswith("Experts")
    }
    with torch.device("meta"):
        models = [getattr(transformers, case.model)(case.make_config()) for case in ARCHITECTURES.values()]
    here = {type(module).__name__ for model in models for module in model.modules()}
    assert there <= here, f"no model has these: {sorted(there - here)}"


def test_the_table_is_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/architectures.md says what is found and done with the transformers that it was written for."""
    root = Path(__file__).resolve().parent.parent
    if f"of transformers {transformers.__version__}" not in (root / "docs" / "architectures.md").read_text():
        pytest.skip("the table is of another version of transformers")
    monkeypatch.syspath_prepend(str(root / "scripts"))
    assert importlib.import_module("list_architectures").main(["--check"]) == 0, capsys.readouterr().out
