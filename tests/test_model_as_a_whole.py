"""What people do with a model besides calling it: move it, copy it, save and load it, share it, fork it, throw it away."""

from __future__ import annotations

import copy
import fcntl
import gc
import hashlib
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefetch import Report, disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.model.guards import guard
from hf_prefetch.testing import FakeDevice
from models import GATE, Snapshot, bank_bytes, build, experts_of, prompt

LAYERS = 5


@pytest.fixture
def model() -> PreTrainedModel:
    return build("mixtral")


@pytest.fixture
def quick_to_collect() -> Iterator[None]:
    """Everything that exists by now is left out of the collections of a test that makes many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def enabled_on(model: PreTrainedModel, device: Any, slots: int = 3) -> PreTrainedModel:
    return enable_expert_prefetch(model, slots, device=device, progress=False)


def tensors(model: nn.Module) -> dict[str, tuple[int, int, torch.dtype]]:
    """Which object every Parameter is, where its bytes are, and their type."""
    return {name: (id(tensor), tensor.data_ptr(), tensor.dtype) for name, tensor in model.named_parameters()}


def experts_tensors(model: nn.Module) -> dict[str, tuple[int, int, torch.dtype]]:
    return {name: value for name, value in tensors(model).items() if ".experts." in name}


# -- moves --------------------------------------------------------------------------------------------------------

ALLOWED: dict[str, Callable[[nn.Module], Any]] = {
    "to(device)": lambda model: model.to("cpu"),
    "to(torch.device)": lambda model: model.to(torch.device("cpu")),
    "to(dtype)": lambda model: model.to(torch.float32),
    "to(device, dtype)": lambda model: model.to("cpu", torch.float32),
    "to(tensor)": lambda model: model.to(torch.zeros(1)),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
}
REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to(float64)": lambda model: model.to(torch.float64),
    "type": lambda model: model.type(torch.float16),
    "to(meta)": lambda model: model.to("meta"),
    "to_empty(meta)": lambda model: model.to_empty(device="meta"),
}


def pick(choices: dict[str, Callable[[nn.Module], Any]]) -> Any:
    return pytest.mark.parametrize("move", list(choices.values()), ids=list(choices))


@pick(ALLOWED)
def test_moves_to_where_the_model_is(model: PreTrainedModel, move: Callable[[nn.Module], Any]) -> None:
    ids = prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    before = experts_tensors(model)
    for part in (model, model.model, model.model.layers[1], model.model.layers[1].mlp.experts):
        assert move(part) is part
        assert experts_tensors(model) == before
    assert torch.equal(logits(model, ids), expected)


@pick(REFUSED)
def test_other_moves_are_refused_before_anything_is_touched(model: PreTrainedModel, move: Callable[[nn.Module], Any]) -> None:
    ids = prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    before = tensors(model)
    for part in (model, model.model, model.model.layers[1], model.model.layers[1].mlp.experts):
        with pytest.raises(RuntimeError, match=r"can't be (moved|converted) to .*Call disable_expert_prefetch\(model\) first"):
            move(part)
        assert tensors(model) == before
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    move(model)
    assert tensors(model) != before


def test_parts_without_experts_move_freely(model: PreTrainedModel) -> None:
    enabled_on(model, FakeDevice())
    before = experts_tensors(model)
    model.model.layers[0].self_attn.double()
    assert model.model.layers[0].self_attn.q_proj.weight.dtype is torch.float64
    assert experts_tensors(model) == before


def test_a_device_of_its_own(model: PreTrainedModel) -> None:
    """As on a GPU: experts are on the host, everything else is not. `meta` stands for the device that computes."""
    enabled_on(model, FakeDevice())
    elsewhere = torch.device("meta")
    guard(model, model.expert_prefetch, dict.fromkeys(model.expert_prefetch.banks, elsewhere))
    before, experts = tensors(model), experts_tensors(model)
    for move in (lambda: model.cpu(), lambda: model.to("cpu"), lambda: model.float(), lambda: model.model.layers[0].to("cpu")):
        with pytest.raises(RuntimeError, match=r"can't be moved to cpu.*prefetched to meta"):
            move()
        assert tensors(model) == before
    with pytest.raises(RuntimeError, match=r"can't be converted to torch\.float16"):
        model.to(elsewhere, torch.float16)
    assert tensors(model) == before
    model.added = nn.Linear(2, 2)
    model.model.layers[2].mlp.experts.register_buffer("scale", torch.ones(1))
    model.model.layers[2].mlp.experts.gate_up_proj.grad = gradient = torch.ones_like(
        model.model.layers[2].mlp.experts.gate_up_proj
    )
    assert model.to(elsewhere) is model
    assert model.added.weight.is_meta, "what was added on the CPU should move along"
    assert model.model.layers[2].mlp.experts.scale.is_meta
    assert model.lm_head.weight.is_meta
    assert experts_tensors(model) == experts
    assert model.model.layers[2].mlp.experts.gate_up_proj.grad is gradient
    assert list(model.model.layers[2].mlp.experts._parameters) == list(build("mixtral").model.layers[2].mlp.experts._parameters)


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_copies_and_pickles_are_refused(model: PreTrainedModel, duplicate: Callable[[Any], Any]) -> None:
    """Of the model and of every part that holds experts; what holds none can be copied."""
    ids = prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    before = tensors(model)
    for part in (model, model.model, model.model.layers, model.model.layers[1].mlp, model.model.layers[1].mlp.experts):
        with pytest.raises(TypeError, match=r"can't be copied or pickled.*disable_expert_prefetch.*save_pretrained"):
            duplicate(part)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        duplicate(model.expert_prefetch)
    duplicate(model.model.layers[1].self_attn)
    duplicate(model.config)
    assert tensors(model) == before
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(enabled_on(twin, FakeDevice()), ids), expected)
    duplicate(model)


# -- weights ------------------------------------------------------------------------------------------------------


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "200KB"}], ids=["one file", "shards"])
def test_save_pretrained_writes_the_same_bytes(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, ids = build(family, torch.bfloat16), prompt(GATE)

    def saved(name: str) -> Path:
        model.save_pretrained(tmp_path / name, **options)
        return tmp_path / name

    expected = digest(saved("without"))
    assert len(expected) > (4 if options else 2)
    enabled_on(model, FakeDevice())
    assert digest(saved("enabled")) == expected
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert digest(saved("generated")) == expected
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "generated", dtype=torch.bfloat16)
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    disable_expert_prefetch(model)
    assert digest(saved("disabled")) == expected


def test_state_dict_and_named_parameters_are_the_same(model: PreTrainedModel) -> None:
    before, parameters, buffers = Snapshot.of(model), dict(model.named_parameters()), dict(model.named_buffers())
    for enable in (True, False) * 2:
        if enable:
            enabled_on(model, FakeDevice())
            logits(model, prompt(GATE))
        else:
            disable_expert_prefetch(model)
        before.assert_same_values(model)
        assert list(dict(model.named_parameters())) == list(parameters)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
        assert len({tensor.untyped_storage().data_ptr() for tensor in model.parameters()}) == len(parameters)


def other_weights() -> dict[str, torch.Tensor]:
    return build("mixtral", seed=7).state_dict()


@pytest.fixture
def other_logits() -> torch.Tensor:
    return logits(build("mixtral", seed=7), prompt(GATE))


def test_load_state_dict_changes_what_is_computed_next(model: PreTrainedModel, other_logits: torch.Tensor) -> None:
    ids, mine = prompt(GATE), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    before = tensors(model)
    for _ in range(2):
        assert torch.equal(logits(model, ids), expected)
        assert model.load_state_dict(other_weights()).missing_keys == []
        assert tensors(model) == before, "loading copies into host memory"
        assert torch.equal(logits(model, ids), other_logits)
        model.load_state_dict(mine)
    disable_expert_prefetch(model)
    assert torch.equal(logits(model, ids), expected)


def test_weights_written_in_place_are_used(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    enabled_on(model, FakeDevice())
    logits(model, ids)
    with torch.no_grad():
        for experts in experts_of(model).values():
            experts.down_proj.mul_(0.5)
            experts.gate_up_proj.data.add_(0.25)
    actual = logits(model, ids)
    disable_expert_prefetch(model)
    assert torch.equal(actual, logits(model, ids))


def test_weights_that_change_after_a_call_that_broke_off_are_used(other_logits: torch.Tensor) -> None:
    """Its lookahead has left banks in slots that nobody asked for, with the bytes from before."""
    ids, wrong = prompt(GATE), []

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for slots in (2, 3, 4):
        for layer in range(LAYERS):
            model = enabled_on(build("mixtral"), FakeDevice(), slots)
            handle = model.model.layers[layer].mlp.experts.register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                logits(model, ids)
            handle.remove()
            model.load_state_dict(other_weights())
            if not torch.equal(logits(model, ids), other_logits):
                wrong.append((slots, layer))
    assert wrong == []


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _assigned_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(other_weights(), assign=True)


def _new_parameter(model: PreTrainedModel) -> None:
    experts = model.model.layers[2].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * 2)


def _new_data(model: PreTrainedModel) -> None:
    experts = model.model.layers[2].mlp.experts
    experts.down_proj.data = experts.down_proj.data * 2


def _parametrized(model: PreTrainedModel) -> None:
    parametrize.register_parametrization(model.model.layers[2].mlp.experts, "down_proj", Doubled())


@pytest.mark.parametrize("replace", [_assigned_state_dict, _new_parameter, _new_data, _parametrized])
def test_replaced_weights_are_never_ignored(model: PreTrainedModel, replace: Callable[[PreTrainedModel], None]) -> None:
    """The slots would go on getting the old ones, so that is an error until the model has been enabled anew."""
    ids, twin = prompt(GATE), build("mixtral")
    replace(twin)
    expected = logits(twin, ids)
    enabled_on(model, device := FakeDevice())
    logits(model, ids)
    replace(model)
    names = list(model.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layers\.\d\.mlp\.experts\.\w+ was replaced.*Call disable_expert_prefetch"):
            logits(model, ids)
    assert list(model.state_dict()) == names
    disable_expert_prefetch(model)
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model, ids), expected)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    if replace is not _parametrized:
        assert torch.equal(logits(enabled_on(model, FakeDevice()), ids), expected)


def test_train_eval_and_requires_grad(model: PreTrainedModel) -> None:
    enabled_on(model, FakeDevice())
    model.train()
    assert all(module.training for module in model.modules())
    model.eval()
    assert not any(module.training for module in model.modules())
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    logits(model, prompt(GATE))
    disable_expert_prefetch(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    enabled_on(model, FakeDevice())
    model.requires_grad_(True)
    model(prompt(GATE))
    assert all(parameter.requires_grad for parameter in model.parameters())


# -- threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run jobs at once; the first error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed over to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("slots", [2, 3])
def test_two_threads_generate_on_one_model(model: PreTrainedModel, slots: int) -> None:
    prompts = [prompt(GATE, seed=1), prompt(GATE + 5, 2, seed=2)]
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = [model.generate(ids, **options) for ids in prompts]
    enabled_on(model, device := FakeDevice(), slots)

    def generate(number: int) -> Callable[[], None]:
        def job() -> None:
            for _ in range(3):
                assert torch.equal(model.generate(prompts[number], **options), expected[number])

        return job

    in_threads(generate(0), generate(1))
    report = model.expert_prefetch.report()
    assert report.calls == 2 * 3 * 4 * LAYERS
    assert report.device_bytes == device.allocated_bytes


@pytest.mark.usefixtures("switching_often")
def test_reports_while_another_thread_generates(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    enabled_on(model, FakeDevice())
    done, seen = threading.Event(), 0

    def generate() -> None:
        try:
            for _ in range(3):
                assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
        finally:
            done.set()

    def look() -> None:
        nonlocal seen
        while not done.is_set():
            with model.expert_prefetch.lock:
                report = model.expert_prefetch.report()
                model.expert_prefetch.reset()
            assert report.bytes_to_device >= report.copies * bank_bytes(model) // LAYERS
            str(report)
            seen += report.calls

    in_threads(generate, look)
    assert seen + model.expert_prefetch.report().calls == 3 * 8 * LAYERS


# -- the end ------------------------------------------------------------------------------------------------------


def held_by(model: PreTrainedModel) -> list[weakref.ref[Any]]:
    """The arenas, the slots, and who owns them."""
    scheduler = model.expert_prefetch
    arenas = [scheduler.store[bank].arena for bank in scheduler.banks]
    slots = [slot for lane in set(scheduler._lane_of.values()) for slot in lane.ring._slots]
    assert arenas
    assert slots
    return [weakref.ref(held) for held in (model, scheduler, *arenas, *slots)]


def assert_gone(held: list[weakref.ref[Any]], device: FakeDevice) -> None:
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


@pytest.mark.usefixtures("quick_to_collect")
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_deleting_the_model_gives_everything_back(policy: str) -> None:
    device, model = FakeDevice(policy), build("mixtral")
    enabled_on(model, device)
    with device.watching():
        logits(model, prompt(GATE))
    held = held_by(model)
    assert device.registered_bytes > 0
    del model
    assert_gone(held, device)


@pytest.mark.usefixtures("quick_to_collect")
def test_deleting_the_model_after_an_error() -> None:
    device, model = FakeDevice(), build("mixtral")
    enabled_on(model, device)

    def fail(*_: Any) -> None:
        raise ValueError("here")

    logits(model, prompt(GATE))
    model.model.layers[3].mlp.experts.act_fn.register_forward_hook(fail)
    with pytest.raises(ValueError, match="here"):
        logits(model, prompt(GATE))
    held = held_by(model)
    del model
    assert_gone(held, device)


@pytest.mark.usefixtures("quick_to_collect")
def test_a_hook_that_refers_to_the_model_does_not_keep_it() -> None:
    """People close over the model; what lives until the model is gone must not be what keeps it."""
    device, model = FakeDevice(), build("mixtral")
    for module in (model.model.layers[0].mlp.experts, model.model.layers[0]):
        module.register_forward_hook(lambda *_, whole=model: None)
    enabled_on(model, device)
    logits(model, prompt(GATE))
    held = held_by(model)
    del model, module
    assert_gone(held, device)


@pytest.mark.usefixtures("quick_to_collect")
def test_an_experts_module_that_is_the_model_is_not_kept() -> None:
    device, model = FakeDevice(), build("mixtral").model.layers[0].mlp.experts
    enabled_on(model, device)
    with torch.no_grad():
        model(torch.randn(GATE, 64), torch.arange(2 * GATE).reshape(GATE, 2) % 8, torch.rand(GATE, 2))
    held = held_by(model)
    del model
    assert_gone(held, device)


def test_a_part_that_outlives_its_model_says_so() -> None:
    model, ids = build("mixtral"), prompt(GATE)
    part = enabled_on(model, device := FakeDevice()).model
    logits(model, ids)
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    with pytest.raises(RuntimeError, match=r"that enable_expert_prefetch was called on is gone. Keep that object alive"):
        part(ids)


def resources() -> dict[str, int]:
    """What this process holds of the system."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "pages": int(Path("/proc/self/statm").read_text().split()[1]),
        "objects": len(gc.get_objects()),
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.usefixtures("quick_to_collect")
def test_a_hundred_rounds_leave_nothing_behind(model: PreTrainedModel) -> None:
    ids, after = prompt(GATE), {}
    expected = logits(model, ids)
    for number in range(1, 101):
        enabled_on(model, "cpu", 2 + number % 3)
        right = torch.equal(logits(model, ids), expected)
        disable_expert_prefetch(model)
        assert right
        if number in (20, 60, 100):
            gc.collect()
            after[number] = resources()
    growth = {name: after[100][name] - after[20][name] for name in after[20]}
    assert growth["threads"] == growth["files"] == 0, after
    assert growth["mappings"] <= 2, after
    assert growth["objects"] < 100, after
    # One leaked model of these would be 240 pages, eighty of them 19,200.
    assert growth["pages"] < 500, after


def test_the_interpreter_ends_cleanly_while_enabled(tmp_path: Path) -> None:
    """Nothing is printed but the one line about the CPU, and no bar where nobody would see it."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import atexit, threading, time

            # What is registered first comes last: by then the thread below should have stopped.
            atexit.register(time.sleep, 0.5)

            import torch
            from hf_prefetch import enable_expert_prefetch
            from models import GATE, build, prompt

            model, other = build("mixtral"), build("qwen2_moe")
            enable_expert_prefetch(model, device="cpu")
            with torch.no_grad():
                model(prompt(GATE))
            model.expert_prefetch.report()
            # Another one is still at work in a thread that nobody waits for.
            enable_expert_prefetch(other, slots=2, device="cpu")
            begun = threading.Event()

            def work():
                while True:
                    other.generate(prompt(GATE), max_new_tokens=8)
                    begun.set()

            threading.Thread(target=work, daemon=True).start()
            begun.wait(60)
            print("end")
        """)
    )
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parent.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "end\n"
    lines = ended.stderr.splitlines()
    assert all("this computes on the CPU" in line for line in lines), ended.stderr
    assert len(lines) == 1, "one line, however many models"


# -- other processes ----------------------------------------------------------------------------------------------


class Sums(Dataset[torch.Tensor]):
    """A data set that looks into the model, as one that tokenizes or embeds may."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.experts = list(experts_of(model).values())

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.experts[index].down_proj.detach().sum()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_the_weights_and_harms_nobody(model: PreTrainedModel) -> None:
    ids, device = prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    enabled_on(model, device)
    logits(model, ids)
    locked, held = device.registered_bytes, device.allocated_bytes
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
            # What runs when a child ends must not touch page locks and streams, which are the parent's.
            model.expert_prefetch.finalizer()
            assert (device.registered_bytes, device.allocated_bytes) == (locked, held)
            failed = 0
        finally:
            os._exit(failed)
    assert torch.equal(logits(model, ids), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(logits(model, ids), expected)
    loader = DataLoader(Sums(model), batch_size=1, num_workers=1, multiprocessing_context="fork")
    assert [value.item() for value in loader] == [experts.down_proj.sum().item() for experts in experts_of(model).values()]
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_on_the_cpu(model: PreTrainedModel) -> None:
    """There no device stands in the way of it, and its slots are its own."""
    ids, other = prompt(GATE), prompt(GATE + 3, seed=5)
    expected, theirs = logits(model, ids), logits(model, other)
    enabled_on(model, "cpu")
    logits(model, ids)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            assert all(torch.equal(logits(model, other), theirs) for _ in range(3))
            failed = 0
        finally:
            os._exit(failed)
    assert all(torch.equal(logits(model, ids), expected) for _ in range(3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- what is shown ------------------------------------------------------------------------------------------------


def test_the_report_counts_and_prints_as_a_table(model: PreTrainedModel) -> None:
    ids, bank = prompt(GATE), bank_bytes(model) // LAYERS
    enabled_on(model, device := FakeDevice())
    first = model.expert_prefetch.report()
    assert isinstance(first, Report)
    assert (first.slots, first.banks, first.bytes_to_device, first.lookahead_hits, first.fallbacks) == (3, LAYERS, 0, 0, 0)
    assert (first.stall_seconds, first.device_bytes) == (0, 0)
    assert first.host_bytes == first.pinned_bytes == LAYERS * bank
    logits(model, ids)
    report = model.expert_prefetch.report()
    assert (report.calls, report.copies, report.bytes_to_device) == (LAYERS, LAYERS, LAYERS * bank)
    logits(model, ids[:, :1])
    report = model.expert_prefetch.report()
    assert (report.calls, report.lookahead_calls, report.lookahead_hits) == (2 * LAYERS, LAYERS, LAYERS - 1)
    assert LAYERS * bank < report.bytes_to_device <= 2 * LAYERS * bank
    assert report.device_bytes == device.allocated_bytes == 3 * bank
    assert report.stall_seconds > 0
    for text in (str(report), repr(report), report._repr_html_()):
        for words in ("expert banks", "slots", "host memory", "lookahead hits", "sent to device", "stall", "fallbacks", "fake"):
            assert words in text
    rows = str(report).splitlines()
    assert len(rows) > 8
    assert rows[0] == "expert prefetch"
    assert set(rows[1]) == {"-"}
    ends = {re.match(r"[a-z ]+?  +\S.*?(?=  [a-z0-9])", row).end() for row in rows[2:]}
    assert len(ends) == 1, "values should end in one column"
    table = report._repr_html_()
    assert table.startswith("<table>")
    assert table.count("<tr>") == table.count("</tr>") == len(rows) - 2


def test_reset_zeroes_what_is_counted_and_not_what_is_held(model: PreTrainedModel) -> None:
    ids = prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice())
    logits(model, ids)
    before = model.expert_prefetch.report()
    model.expert_prefetch.reset()
    after = model.expert_prefetch.report()
    counted = ("calls", "lookahead_calls", "lookahead_hits", "copies", "unused_copies", "bytes_to_device", "stall_seconds")
    assert {name: getattr(after, name) for name in (*counted, "fallbacks")} == dict.fromkeys((*counted, "fallbacks"), 0)
    for name in ("slots", "banks", "device_bytes", "host_bytes", "pinned_bytes", "looks_ahead", "devices"):
        assert getattr(after, name) == getattr(before, name) != 0
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == LAYERS


def test_banks_that_are_never_called_are_told(model: PreTrainedModel) -> None:
    """A tower that was not used, or experts that something calls past their forward."""
    enable_expert_prefetch(model, device=FakeDevice())
    report = model.expert_prefetch.report()
    assert report.idle_banks == report.banks
    assert "never called" not in str(report), "nothing was called yet"
    with torch.no_grad():
        model.model.layers[0].mlp(torch.zeros(1, 1, model.config.hidden_size))
        report = model.expert_prefetch.report()
        assert report.idle_banks == report.banks - 1
        assert f"; {report.banks - 1} were never called" in str(report)
        model(prompt(3))
    assert model.expert_prefetch.report().idle_banks == 0
    assert "never called" not in str(model.expert_prefetch.report())
    disable_expert_prefetch(model)


def test_decoding_by_python_is_told_where_something_is_faster(model: PreTrainedModel) -> None:
    """From so many steps on that it matters, and only where graphs can be captured."""
    model.set_experts_implementation("batched_mm")
    for device, told in ((FakeDevice(), True), (FakeDevice(refuse_pinning=True), False)):
        enabled_on(model, device)
        for _ in range(31):
            logits(model, prompt(1))
        assert "python steps" not in str(model.expert_prefetch.report())
        logits(model, prompt(1))
        said = str(model.expert_prefetch.report())
        assert ("python steps" in said) == ('cache_implementation="static"' in said) == told
        scheduler = model.expert_prefetch
        disable_expert_prefetch(model)
        assert "python steps" not in str(scheduler.report())


def test_a_report_outlives_its_model(model: PreTrainedModel) -> None:
    enabled_on(model, FakeDevice())
    scheduler = model.expert_prefetch
    kept, copied = scheduler.report(), copy.deepcopy(scheduler.report())
    disable_expert_prefetch(model)
    assert str(kept) == str(copied)
    assert (scheduler.report().host_bytes, scheduler.report().device_bytes, scheduler.report().pinned_bytes) == (0, 0, 0)
    str(scheduler.report())


@pytest.mark.parametrize(
    ("progress", "terminal", "shown"),
    [(True, False, True), (True, True, True), (None, True, True), (None, False, False), (False, True, False)],
)
def test_a_bar_is_shown_where_somebody_sees_it(
    model: PreTrainedModel, progress: bool | None, terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with open(writing, "w") as stream, open(reading, "rb", buffering=0) as other_end:
        monkeypatch.setattr(sys, "stderr", stream)
        enable_expert_prefetch(model, device=FakeDevice(), progress=progress)
        stream.write("the end\n")
        stream.flush()
        text = b""
        while b"the end" not in text:
            text += other_end.read(4096)
        monkeypatch.undo()
    assert ("experts to host memory" in text.decode()) == shown
    assert shown or text.decode().strip() == "the end"


@pytest.mark.parametrize("progress", [None, True])
def test_without_any_stderr(model: PreTrainedModel, progress: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with a window have none."""
    monkeypatch.setattr(sys, "stderr", None)
    enable_expert_prefetch(model, device=FakeDevice(), progress=progress)
    monkeypatch.undo()
    assert model.expert_prefetch.report().banks == LAYERS


@pytest.mark.parametrize("policy", ["lazy", 4])
def test_loading_weights_waits_for_the_copies_of_the_last_forward(policy: str | int) -> None:
    """A forward returns before its copies have ended; they must not carry what is loaded afterwards."""
    device = FakeDevice(policy)
    model, ids = enabled_on(build("mixtral"), device, 3), prompt(GATE)
    bank = model.expert_prefetch.banks[2]
    old = {name: parameter.detach().clone() for name, parameter in bank.parameters.items()}
    model.expert_prefetch.prefetch(bank)
    model.load_state_dict(other_weights())
    tensors = model.expert_prefetch.acquire(bank).tensors
    device.drain()
    assert all(torch.equal(tensors[name], bank.parameters[name]) for name in old), "the new weights are used"
    assert not any(torch.equal(tensors[name], old[name]) for name in old)
    model.expert_prefetch.release(bank)
    del tensors
    assert device.races() == []
    with device.watching():
        logits(model, ids)
    assert device.races() == []


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_weights_written_without_a_trace_after_a_call_that_broke_off_are_used(slots: int, layer: int) -> None:
    """`.data` tells nobody, so nothing that was sent for a pass outlives it."""
    model, ids = build("mixtral"), prompt(GATE)
    enabled_on(model, FakeDevice(), slots)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[layer].mlp.experts.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids)
    handle.remove()
    for bank in model.expert_prefetch.banks:
        for parameter in bank.parameters.values():
            parameter.data.mul_(2)
    actual = logits(model, ids)
    disable_expert_prefetch(model)
    assert torch.equal(actual, logits(model, ids))


@pytest.mark.parametrize("action", [disable_expert_prefetch, enable_expert_prefetch])
def test_disabling_in_the_middle_of_a_forward_is_refused(action: Any) -> None:
    """The forward would go on with parts of the old state; it goes on as if nothing had been asked."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    enabled_on(model, FakeDevice(), 3)
    refused = []

    def act(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="from inside a forward"):
            action(model)
        refused.append(True)

    handle = model.model.layers[1].mlp.experts.act_fn.register_forward_hook(act)
    assert torch.equal(logits(model, ids), expected)
    handle.remove()
    assert refused
    disable_expert_prefetch(model)
    assert torch.equal(logits(model, ids), expected)
