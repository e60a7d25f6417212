"""BankLayout: the same bytes and strides wherever a bank lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_prefetch.banks.layout import ALIGNMENT, BankLayout, is_dense

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.int64])
shapes = st.lists(st.integers(1, 5), min_size=2, max_size=3)


@given(st.lists(st.tuples(shapes, dtypes, st.randoms(use_true_random=False)), min_size=1, max_size=5))
def test_tensors_survive_the_block(kinds: list[tuple[list[int], torch.dtype, object]]) -> None:
    """Every tensor, with permuted dimensions too: bytes, shape, stride and alignment."""
    tensors = []
    for number, (shape, dtype, choose) in enumerate(kinds):
        order = list(range(len(shape)))
        choose.shuffle(order)  # type: ignore[attr-defined]
        raw = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        tensors.append((f"t{number}", raw.permute(order)))
    layout = BankLayout.of(tensors)
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(block)
    for name, tensor in tensors:
        views[name].copy_(tensor)
    for name, tensor in tensors:
        assert views[name].shape == tensor.shape
        assert views[name].stride() == tensor.stride()
        same = [part.reshape(-1).view(torch.uint8) for part in (views[name], tensor)]
        assert torch.equal(*same)
    assert all(spec.offset % ALIGNMENT == 0 for spec in layout.specs)
    ends = [spec.offset + spec.nbytes for spec in layout.specs]
    assert all(end <= spec.offset for end, spec in zip(ends, layout.specs[1:], strict=False))
    assert ends[-1] <= layout.nbytes


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(3, 4, 5), True),
        (torch.empty(3, 4, 5).transpose(1, 2), True),
        (torch.empty(1, 4, 5).expand(3, 4, 5), False),
        (torch.empty(3, 4, 5)[:, ::2], False),
        (torch.empty(3, 4, 5)[:, :2], False),
        (torch.empty(3, 1, 5), True),
    ],
)
def test_dense_means_no_gaps_and_no_overlaps(tensor: torch.Tensor, expected: bool) -> None:
    """In whatever order of dimensions."""
    assert is_dense(tensor) is expected
