"""What all tests share: no network, one thread, a seed, and the devices that a test runs on.

A test that takes `device` runs on the CPU stand-in and, where there is an accelerator, on that as well. One that is marked
`gpu` runs on the accelerator only and is skipped without one.
"""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Has to be there before the first call of cuBLAS, for results that don't depend on what ran before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Iterator

import pytest
import torch

import hf_prefetch.model.homes
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.testing import FakeDevice
from models import PACKED
from threads import all_end

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has started the tests in the background: what they send to themselves and to the command would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """With HF_PREFETCH_TEST_PACKED=1 whatever is enabled is packed, unless a test says otherwise (`make test-packed`)."""
    if not PACKED:
        return
    checked = PrefetchConfig.__post_init__

    def packed(self: PrefetchConfig) -> None:
        object.__setattr__(self, "pack", True if self.pack is None else self.pack)
        checked(self)

    PrefetchConfig.__post_init__ = packed  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is marked `raw` counts bytes, computes in float32, or enables while a graph over the weights is kept."""
    for item in items:
        if PACKED and item.get_closest_marker("raw") is not None:
            item.add_marker(pytest.mark.skip(reason="can't be run with packed weights"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `device` on the CPU and on the accelerator, or, if it is marked `gpu`, on that alone."""
    if "device" not in metafunc.fixturenames:
        return
    needs_accelerator = metafunc.definition.get_closest_marker("gpu") is not None
    available = torch.cuda.is_available()
    devices = [] if needs_accelerator else [pytest.param("cpu", id="cpu")]
    if available or needs_accelerator:
        missing = pytest.mark.skipif(not available, reason="needs an accelerator")
        devices.append(pytest.param("cuda", id="cuda", marks=missing))
    metafunc.parametrize("device", devices, indirect=True, scope="module")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes, with an index: `cuda:0`, not `cuda`."""
    kind = torch.device(request.param)
    return kind if kind.type == "cpu" else torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whatever a test has done to a model, its threads end with it."""
    with all_end():
        yield


@pytest.fixture
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels that give the same bits whatever else is allocated: whole logits may then be compared on an accelerator.

    It also fills memory that is allocated without a value with NaN, so a weight that was read before it had arrived
    shows. Kernels that have no such form only warn.
    """
    if device.type == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device on which dispatched models compute here."""
    device = FakeDevice()
    monkeypatch.setattr(hf_prefetch.model.homes, "stream_device", lambda place: device)
    return device
