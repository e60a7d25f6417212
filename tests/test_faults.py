"""Errors, interrupts, a full device, refused page locks, and a backward: a slower right answer or a clear message."""

from __future__ import annotations

import gc
import linecache
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import hf_prefetch
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.testing import FakeDevice
from models import GATE, Snapshot, bank_bytes, build, experts_of, prompt

LAYERS = 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("mixtral")


@pytest.fixture(autouse=True)
def _disabled_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        disable_expert_prefetch(request.getfixturevalue("model"))


def logits(model: PreTrainedModel, ids: torch.Tensor, device: FakeDevice | None = None) -> torch.Tensor:
    with torch.no_grad(), nullcontext() if device is None else device.watching():
        return model(ids).logits


def enabled_on(model: PreTrainedModel, device: Any, slots: int = 3) -> PreTrainedModel:
    return enable_expert_prefetch(model, slots, device=device, progress=False)


def host_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def assert_host_parameters(model: PreTrainedModel, before: dict[str, nn.Parameter]) -> None:
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert [name for name, parameter in after.items() if parameter is not before[name]] == []


def assert_given_back(device: FakeDevice) -> None:
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


# -- an error inside the experts ----------------------------------------------------------------------------------


class RaiseAt(TorchDispatchMode):
    """Raises an error instead of the n-th operator that runs inside of one module."""

    def __init__(self, module: nn.Module, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error, self.seen = at, error, -1
        self.handles = [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def _enter(self, *_: Any) -> None:
        self.seen = 0

    def _leave(self, *_: Any) -> None:
        self.seen = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.seen >= 0:
            self.seen += 1
            if self.seen >= self.at:
                raise self.error
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*error)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_error_comes_through_and_leaves_the_model_at_work(model: PreTrainedModel, layer: int) -> None:
    """Before the weights are read and after, in prefill and in decode."""
    ids, device = prompt(GATE), FakeDevice(3 + layer)
    error = KeyboardInterrupt("from inside") if layer % 2 else ValueError("from inside")
    for tokens in (ids, ids[:, :1]):
        expected = logits(model, tokens)
        enabled_on(model, device)
        before = host_parameters(model)
        experts = model.model.layers[layer].mlp.experts
        for at in (1, 8, 12):
            raising = RaiseAt(experts, at, error)
            with pytest.raises(type(error)) as caught, torch.no_grad(), device.watching(), raising:
                model(tokens)
            assert caught.value is error
            assert error.__context__ is None
            assert error.__cause__ is None
            assert raising.seen >= at
            # Whoever keeps a traceback keeps what its frames refer to, and that is a slot here.
            del caught
            error.__traceback__ = None
            assert_host_parameters(model, before)
            assert torch.equal(logits(model, tokens, device), expected)
            assert_host_parameters(model, before)
        disable_expert_prefetch(model)
        assert torch.equal(logits(model, tokens), expected)
    assert device.races() == []
    assert_given_back(device)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_error_in_the_activation_or_in_a_hook_comes_through(model: PreTrainedModel, layer: int) -> None:
    ids = prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    before, experts = host_parameters(model), model.model.layers[layer].mlp.experts
    error = RuntimeError("from the activation")

    def fail(*_: Any) -> None:
        raise error

    class Failing(nn.Module):
        forward = fail

    act_fn, experts.act_fn = experts.act_fn, Failing()
    with pytest.raises(RuntimeError) as caught:
        logits(model, ids)
    experts.act_fn = act_fn
    assert caught.value is error
    assert_host_parameters(model, before)
    assert torch.equal(logits(model, ids), expected)
    for register in (experts.register_forward_hook, experts.register_forward_pre_hook):
        handle = register(fail)
        with pytest.raises(RuntimeError) as caught:
            logits(model, ids)
        handle.remove()
        assert caught.value is error
        assert_host_parameters(model, before)
        assert torch.equal(logits(model, ids), expected)


def test_an_error_leaves_every_slot_in_rotation(model: PreTrainedModel) -> None:
    """A slot that stayed held would be missing, and each error would cost one more."""
    ids, device = prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    enabled_on(model, device, 2)
    logits(model, ids)
    held = device.allocated_bytes
    for layer in (0, 2, 4) * 2:
        with (
            pytest.raises(ValueError, match="here"),
            torch.no_grad(),
            RaiseAt(model.model.layers[layer].mlp.experts, 5, ValueError("here")),
        ):
            model(ids)
    assert torch.equal(logits(model, ids), expected)
    assert device.allocated_bytes == held
    model.expert_prefetch.reset()
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().lookahead_hits == LAYERS - 1


# -- an interrupt anywhere ----------------------------------------------------------------------------------------

PACKAGE = str(Path(hf_prefetch.__file__).parent)
# What stands for hardware and drivers is not interrupted: their calls happen or don't.
HARDWARE = str(Path(PACKAGE, "testing"))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the package that a call runs, as Ctrl-C may at any.

    Lines that begin a `try` or a `with` are left out, the latter also when the block is left: Python looks for signals
    when a call returns, never between those and the statements inside.

    Args:
        at: the n-th line; 0 for none, to see which there are.
        begin: name of the function of the package from which on lines count; None for all.
    """

    def __init__(self, at: int = 0, begin: str | None = None) -> None:
        self.at = at
        self.lines: list[str] = []
        self._begin = begin

    def __enter__(self) -> Interrupt:
        # What other tests have left behind must not be finalized, in lines of the package, while lines are counted.
        gc.disable()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        sys.settrace(None)
        gc.enable()
        # One that no test catches would end the whole run of tests, not only its own.
        assert not (self.hit and kind is KeyboardInterrupt), f"nothing caught the interrupt at {self.lines[-1]}"

    @property
    def hit(self) -> bool:
        return 0 < self.at <= len(self.lines)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._begin == frame.f_code.co_name:
            self._begin = None
        file = frame.f_code.co_filename
        ours = file.startswith(PACKAGE) and not file.startswith(HARDWARE)
        return self._line if ours and self._begin is None else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        file, number = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(file, number).lstrip().startswith(("try:", "with ")):
            self.lines.append(f"{Path(file).name}:{number}")
            if len(self.lines) == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def one_of_each(lines: list[str]) -> list[int]:
    """The last but one occurrence of every line, counted from 1."""
    places = defaultdict(list)
    for at, line in enumerate(lines, 1):
        places[line].append(at)
    return sorted(found[-2:][0] for found in places.values())


class ForgivingDevice(FakeDevice):
    """As drivers do, it answers the release of what is not registered with an error code that nobody looks at."""

    def unregister(self, address: int) -> None:
        if self.memory.find(address) is not None:
            super().unregister(address)


@pytest.fixture
def small() -> Iterator[PreTrainedModel]:
    """Three layers, since every line of a whole call is interrupted; and a heap that is quick to collect."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, num_experts_per_tok=2, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    gc.collect()
    gc.freeze()
    yield model
    disable_expert_prefetch(model)
    gc.unfreeze()


def ring_of(model: PreTrainedModel) -> Any:
    (lane,) = set(model.expert_prefetch._lane_of.values())
    return lane.ring


def test_an_interrupt_at_any_line_of_a_call(small: PreTrainedModel) -> None:
    ids, slots = prompt(8) % 64, 2
    expected = logits(small, ids)
    before = host_parameters(small)
    enabled_on(small, "cpu", slots)
    for _ in range(2):
        logits(small, ids)  # the first ones look for kept views
    small.expert_prefetch.report()  # reads the marks so far, which a call does only now and then
    with Interrupt() as trial:
        logits(small, ids)
    assert len(trial.lines) > 200, "the tracer saw too little"
    failures, contexts, missed = [], [], 0
    for at in range(1, len(trial.lines) + 1):
        with Interrupt(at) as interrupt:
            try:
                logits(small, ids)
            except KeyboardInterrupt as error:
                contexts.append(error.__context__)
            else:
                # Which slot a bank is found in, and so how many lines that takes, differs from pass to pass.
                missed += 1
        assert interrupt.hit or missed
        assert_host_parameters(small, before)
        assert not small.expert_prefetch.lock._is_owned(), interrupt.lines[-1]
        if not torch.equal(logits(small, ids), expected) or len(ring_of(small)) != slots:
            failures.append(interrupt.lines[-1])
    assert failures == []
    assert missed < 20
    assert contexts == [None] * (len(trial.lines) - missed), "it comes through as it is"
    disable_expert_prefetch(small)
    assert torch.equal(logits(small, ids), expected)


@pytest.mark.parametrize("tokens", [8, 1], ids=["prefill", "decode"])
def test_an_interrupt_in_the_first_call_and_on_a_device(small: PreTrainedModel, tokens: int) -> None:
    """The call that allocates the slots, on streams that run late; then disabling gives everything back."""
    ids, slots = prompt(tokens) % 64, 2
    before, expected = Snapshot.of(small), logits(small, ids)
    enabled_on(small, FakeDevice(7), slots)
    with Interrupt() as trial:
        logits(small, ids)
    disable_expert_prefetch(small)
    failures = []
    for at in one_of_each(trial.lines):
        device = FakeDevice(7 + at)
        enabled_on(small, device, slots)
        with device.watching(), Interrupt(at) as interrupt, pytest.raises(KeyboardInterrupt):
            logits(small, ids)
        right = torch.equal(logits(small, ids, device), expected)
        honest = small.expert_prefetch.report().device_bytes == device.allocated_bytes
        disable_expert_prefetch(small)
        before.assert_restored(small)
        assert_given_back(device)
        if not (right and honest) or device.races():
            failures.append((interrupt.lines[-1], f"{right=} {honest=}", device.races()))
    assert failures == []


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.raw
def test_an_interrupt_while_a_model_is_enabled_undoes_it(small: PreTrainedModel, resident: bool) -> None:
    model, ids, options = small, prompt(8) % 64, {"slots": 3}
    if resident:
        model = build("mixtral")
        dense = sum(p.numel() for p in model.parameters()) * 4 - bank_bytes(model)
        options = {"slots": 2, "gpu_memory": dense + 9 * bank_bytes(model) // (2 * LAYERS)}
    expected, places = logits(model, ids), {name: hook_names(module) for name, module in model.named_modules()}
    # After the first time experts are in memory of their own, and stay where they are.
    disable_expert_prefetch(enabled_on(model, FakeDevice()))
    before = Snapshot.of(model)
    with Interrupt(begin="_install") as trial:
        enable_expert_prefetch(model, device=FakeDevice(), progress=False, **options)
    assert model.expert_prefetch.report().resident_banks == (2 if resident else 0)
    disable_expert_prefetch(model)
    failures = []
    for at in one_of_each(trial.lines):
        device = ForgivingDevice()
        with Interrupt(at, begin="_install") as interrupt, pytest.raises(KeyboardInterrupt):
            enable_expert_prefetch(model, device=device, progress=False, **options)
        try:
            before.assert_restored(model)
            assert {name: hook_names(module) for name, module in model.named_modules()} == places
            assert torch.equal(logits(model, ids), expected)
            assert_given_back(device)
        except AssertionError as error:
            failures.append((interrupt.lines[-1], str(error)[:300]))
    assert failures == []
    enabled_on(model, device := FakeDevice())
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert_given_back(device)


def test_an_interrupt_while_a_model_is_disabled_does_not_stop_it(small: PreTrainedModel) -> None:
    """Half disabled would be neither: whatever is interrupted is done again, and the rest as well."""
    ids = prompt(8) % 64
    expected = logits(small, ids)
    disable_expert_prefetch(enabled_on(small, FakeDevice()))
    before = Snapshot.of(small)
    enabled_on(small, FakeDevice())
    logits(small, ids)
    with Interrupt(begin="disable_expert_prefetch") as trial:
        disable_expert_prefetch(small)
    failures = []
    for at in one_of_each(trial.lines):
        device = ForgivingDevice()
        enabled_on(small, device)
        logits(small, ids)
        with Interrupt(at, begin="disable_expert_prefetch") as interrupt, pytest.raises(KeyboardInterrupt) as caught:
            disable_expert_prefetch(small)
        assert caught.value.__context__ is None
        del caught
        if "expert_prefetch" in small.__dict__:
            disable_expert_prefetch(small)  # it had not begun
        try:
            before.assert_restored(small)
            assert torch.equal(logits(small, ids), expected)
            assert_given_back(device)
        except AssertionError as error:
            failures.append((interrupt.lines[-1], str(error)[:300]))
    assert failures == []


def hook_names(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


# -- memory that is not there -------------------------------------------------------------------------------------


@contextmanager
def counting_warnings() -> Iterator[list[str]]:
    """The messages of all RuntimeWarnings of the package inside."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.extend(str(item.message) for item in caught if issubclass(item.category, RuntimeWarning))


@pytest.mark.raw
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("slots", [3, 4])
def test_no_room_for_all_slots(model: PreTrainedModel, room: int, slots: int) -> None:
    ids, bank = prompt(GATE), bank_bytes(model) // LAYERS
    expected, one = logits(model, ids), logits(model, ids[:, :1])
    device = FakeDevice(11, memory_limit=room * bank + bank // 2)
    enabled_on(model, device, slots)
    with counting_warnings() as told:
        for _ in range(3):
            assert torch.equal(logits(model, ids, device), expected)
            assert torch.equal(logits(model, ids[:, :1], device), one)
    assert len(told) == 1
    assert f"{slots} slots of" in told[0]
    assert "fewer slots" in told[0]
    assert "same output" in told[0]
    report = model.expert_prefetch.report()
    assert (report.fallbacks, report.looks_ahead, report.lookahead_hits) == (1, False, 0)
    assert report.device_bytes == device.allocated_bytes == bank
    assert report.calls == 6 * LAYERS
    assert report.copies >= 3 * LAYERS
    assert device.races() == []
    disable_expert_prefetch(model)
    assert_given_back(device)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.raw
def test_room_that_comes_back_is_used_after_enabling_again(model: PreTrainedModel) -> None:
    ids, bank = prompt(GATE), bank_bytes(model) // LAYERS
    expected, device = logits(model, ids), FakeDevice(memory_limit=bank)
    enabled_on(model, device)
    with counting_warnings() as told:
        assert torch.equal(logits(model, ids), expected)
    assert len(told) == 1
    device.memory.memory_limit = None
    with counting_warnings() as told:
        enabled_on(model, device)
        assert torch.equal(logits(model, ids), expected)
    assert told == []
    assert model.expert_prefetch.report().lookahead_hits == LAYERS - 1
    assert device.allocated_bytes == 3 * bank


@pytest.mark.raw
@pytest.mark.parametrize("tokens", [GATE, 1], ids=["prefill", "decode"])
def test_no_room_at_all(model: PreTrainedModel, tokens: int) -> None:
    ids, bank = prompt(tokens), bank_bytes(model) // LAYERS
    expected, before = logits(model, ids), host_parameters(model)
    device = FakeDevice(5, memory_limit=bank - 1)
    enabled_on(model, device)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(torch.OutOfMemoryError) as caught:
                logits(model, ids)
        message = str(caught.value)
        for words in ("layers.0.mlp.experts", "fake device", "MiB", "Free device memory", "shorter prompt", "device=..."):
            assert words in message, message
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError), "the device's own words should be there as well"
        assert_host_parameters(model, before)
        assert device.allocated_bytes == model.expert_prefetch.report().device_bytes == 0
    device.memory.memory_limit = None
    assert torch.equal(logits(model, ids, device), expected)
    assert device.races() == []
    disable_expert_prefetch(model)
    assert torch.equal(logits(model, ids), expected)
    assert_given_back(device)


@pytest.mark.raw
@pytest.mark.parametrize("after", range(4))
def test_allocations_that_fail_one_by_one(model: PreTrainedModel, after: int) -> None:
    """Whichever of the slots can't be had."""
    ids, device = prompt(GATE), FakeDevice(2)
    expected = logits(model, ids)
    enabled_on(model, device)
    device.fail_allocations(after)
    with counting_warnings() as told:
        if after == 0:
            with pytest.raises(torch.OutOfMemoryError):
                logits(model, ids)
            device.fail_allocations(None)
        for _ in range(2):
            assert torch.equal(logits(model, ids, device), expected)
    assert len(told) == (1 if after < 3 else 0)
    assert model.expert_prefetch.report().fallbacks == len(told)
    assert device.races() == []


def test_a_full_device_while_enabling_undoes_it() -> None:
    """What is not an expert may not fit either: that happens before the model is enabled at all."""
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)

    def full() -> None:
        raise torch.OutOfMemoryError("no room for the rest of the model")

    device.trim = full  # the last that enabling asks of a device
    with pytest.raises(torch.OutOfMemoryError, match="rest of the model"):
        enabled_on(model, device)
    before.assert_restored(model)
    assert torch.equal(logits(model, ids), expected)
    assert_given_back(device)


def page_rounded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


@pytest.mark.raw
@pytest.mark.parametrize("banks", [0, 2, 4])
def test_page_locks_refused(model: PreTrainedModel, banks: int) -> None:
    """From the start, or when a limit is reached: one warning with the numbers, and the lookahead goes on."""
    ids, bank = prompt(GATE), bank_bytes(model) // LAYERS
    limit = banks * page_rounded(bank)
    device = FakeDevice(13, pin_limit=limit) if banks else FakeDevice(13, refuse_pinning=True)
    expected = logits(model, ids)
    with counting_warnings() as told:
        enabled_on(model, device)
        for _ in range(3):
            assert torch.equal(logits(model, ids, device), expected)
    assert len(told) == 1
    pageable, total = (LAYERS - banks) * bank, LAYERS * bank
    assert f"{pageable / 2**20:,.0f} of {total / 2**20:,.0f} MiB" in told[0]
    assert "ulimit -l" in told[0]
    assert "fake device" in told[0], "it should give the system's reason"
    report = model.expert_prefetch.report()
    assert (report.pinned_bytes, report.host_bytes) == (banks * bank, total)
    assert device.registered_bytes == limit
    assert (report.looks_ahead, report.lookahead_hits, report.fallbacks) == (True, 3 * (LAYERS - 1), 0)
    assert device.pageable_copies == 3 * (LAYERS - banks)
    assert device.races() == []
    disable_expert_prefetch(model)
    assert_given_back(device)
    assert torch.equal(logits(model, ids), expected)


def test_copies_that_hold_the_host_come_after_the_kernels_they_run_beside(model: PreTrainedModel) -> None:
    """Pageable banks are sent ahead in `release`: before the kernels of this layer they would only delay them."""
    ids, device = prompt(GATE), FakeDevice(refuse_pinning=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        enabled_on(model, device)
    logits(model, ids)
    start = len(device.log)
    logits(model, ids, device)
    kinds = [entry.kind for entry in device.log[start:] if entry.kind == "copy" or (entry.kind == "kernel" and entry.reads)]
    first_copies = kinds.index("kernel")
    assert first_copies == 1, f"{first_copies} copies before the first kernel that reads a bank"


# -- gradients ----------------------------------------------------------------------------------------------------

REMEDY = r"experts of model\.layers\.\d\.mlp\.experts.*Call disable_expert_prefetch\(model\) before training"


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.raw
def test_forward_with_grad_enabled(family: str) -> None:
    """`model(**inputs)` in eval mode is ordinary use. Some blocks go on to write into what the experts gave them."""
    model, ids = build(family), prompt(GATE)
    expected = model(input_ids=ids).logits
    assert expected.requires_grad
    enabled_on(model, FakeDevice())
    output = model(input_ids=ids).logits
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match="disable_expert_prefetch"):
        output.sum().backward()
    disable_expert_prefetch(model)
    model(input_ids=ids).logits.sum().backward()


class WritesIntoOutput(nn.Module):
    """A block that adds to its experts' output in place."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = self.experts(hidden, ids, weights)
        output += hidden
        output.mul_(2)
        return output


@pytest.mark.raw
def test_the_output_may_be_written_to(model: PreTrainedModel) -> None:
    block = WritesIntoOutput(build("mixtral").model.layers[0].mlp.experts)
    hidden, ids = torch.randn(GATE, 64), torch.arange(2 * GATE).reshape(GATE, 2) % 8
    weights = torch.rand(GATE, 2)
    expected = block(hidden, ids, weights)
    enabled_on(block, FakeDevice())
    output = block(hidden, ids, weights)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match="disable_expert_prefetch"):
        output.sum().backward()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_backward_through_experts_raises_and_training_works_after_disabling(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    enabled_on(model, FakeDevice())
    with pytest.raises(RuntimeError, match=REMEDY):
        model(input_ids=ids, labels=ids).loss.backward()
    # What is behind the last experts has its gradient by then, and a right one.
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name])
    assert not any(parameter.grad is not None for module in experts_of(model).values() for parameter in module.parameters())
    model.zero_grad()
    disable_expert_prefetch(model)
    model(input_ids=ids, labels=ids).loss.backward()
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    model.zero_grad()


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


@pytest.mark.raw
def test_inputs_that_require_grad(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    with frozen(model):
        embeds = model.get_input_embeddings()(ids).requires_grad_()
        expected = model(inputs_embeds=embeds).logits
        enabled_on(model, FakeDevice())
        output = model(inputs_embeds=embeds).logits
        assert torch.equal(output, expected)
        assert output.requires_grad
        with pytest.raises(RuntimeError, match=REMEDY):
            output.sum().backward()
        with pytest.raises(RuntimeError, match=REMEDY):
            torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)
        assert embeds.grad is None


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


@pytest.mark.raw
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_adapters_before_experts(layer: int) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    model.requires_grad_(False)
    attention = model.model.layers[layer].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    expected = model(ids).logits
    enabled_on(model, FakeDevice())
    output = model(ids).logits
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=rf"experts of model\.layers\.{LAYERS - 1}\.mlp"):
        output.sum().backward()
    assert attention.q_proj.up.grad is None
    disable_expert_prefetch(model)
    model(ids).logits.sum().backward()
    assert attention.q_proj.up.grad.abs().sum() > 0


def test_a_router_that_trains(model: PreTrainedModel) -> None:
    """Its gradient comes through the routing weights alone."""
    ids = prompt(GATE)
    with frozen(model):
        model.model.layers[1].mlp.gate.weight.requires_grad_()
        enabled_on(model, FakeDevice())
        with pytest.raises(RuntimeError, match=REMEDY):
            model(ids).logits.sum().backward()


def test_experts_that_train(model: PreTrainedModel) -> None:
    """Beside a head that has a gradient they would just stay as they are, and nobody would notice."""
    ids = prompt(GATE)
    with frozen(model):
        model.lm_head.weight.requires_grad_()
        for experts in experts_of(model).values():
            experts.requires_grad_()
        enabled_on(model, FakeDevice())
        with pytest.raises(RuntimeError, match=REMEDY):
            model(ids).logits.sum().backward()
        model.lm_head.weight.grad = None


def test_no_graph_keeps_a_slot(model: PreTrainedModel) -> None:
    device = FakeDevice()
    enabled_on(model, device)
    output = model(prompt(GATE)).logits
    assert output.requires_grad
    assert device.allocated_bytes > 0
    disable_expert_prefetch(model)
    assert device.allocated_bytes == 0


@pytest.mark.raw
def test_adapters_behind_all_experts_train_with_right_gradients(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    with frozen(model):
        model.lm_head.weight.requires_grad_()
        model(input_ids=ids, labels=ids).loss.backward()
        expected, model.lm_head.weight.grad = model.lm_head.weight.grad, None
        enabled_on(model, FakeDevice())
        model(input_ids=ids, labels=ids).loss.backward()
        assert torch.equal(model.lm_head.weight.grad, expected)
        model.lm_head.weight.grad = None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_is_raised_where_no_gradient_is_needed(model: PreTrainedModel, mode: Callable[[], Any]) -> None:
    ids = prompt(GATE)
    with frozen(model):
        expected = model(ids).logits
        enabled_on(model, FakeDevice())
        with mode():
            output = model(ids).logits
            assert torch.equal(output, expected)
            assert not output.requires_grad


@pytest.mark.raw
def test_train_mode(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    model.train()
    expected = model(ids).logits
    enabled_on(model, FakeDevice())
    assert torch.equal(model(ids).logits, expected)
    model.eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_enabled_and_disabled_inside_of_a_mode(mode: Callable[[], Any]) -> None:
    """Everything stays an ordinary tensor: the model still trains afterwards."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    with mode():
        enabled_on(model, FakeDevice())
        assert torch.equal(model(ids).logits, expected)
    assert torch.equal(logits(model, ids), expected)
    with mode():
        disable_expert_prefetch(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(gradients(model)) == len(list(model.parameters()))
