"""A call on a cache takes the tiles that the whole bank would have got."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe import get_config
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

from hf_prefetch.integrations.vllm.tiles import tiles_of_all_rows

_EXPERTS, _HIDDEN, _WIDTH, _TOP_K = 128, 64, 32, 2


def _layer(rows: int, kernel: str = "TritonExperts") -> Any:
    kind = type(kernel, (), {"block_shape": None, "quant_config": SimpleNamespace(config_name=lambda dtype: None)})
    return SimpleNamespace(
        local_num_experts=_EXPERTS,
        w13_weight=torch.empty(rows, 2 * _WIDTH, _HIDDEN),
        w2_weight=torch.empty(rows, _HIDDEN, _WIDTH),
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kind())),
    )


def _tiles(rows: int, tokens: int) -> dict[str, int]:
    return try_get_optimal_moe_config((rows, 2 * _WIDTH, _HIDDEN), (rows, _HIDDEN, _WIDTH), _TOP_K, None, tokens)


def _call(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(tokens, _HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, _TOP_K, dtype=torch.int32)


def test_fewer_rows_do_not_change_tiles() -> None:
    tokens = next(count for count in (1, 4, 16, 64, 256, 1024, 8192, 16384) if _tiles(4, count) != _tiles(_EXPERTS, count))
    with tiles_of_all_rows(_layer(4), *_call(tokens)):
        assert _tiles(4, tokens) == get_config()
        inside = get_config()
    assert get_config() is None
    assert inside == _tiles(_EXPERTS, tokens)


@pytest.mark.parametrize("layer", [_layer(_EXPERTS), _layer(4, "CPUUnquantizedExperts")], ids=["all rows", "no tiles"])
def test_other_calls_are_left_alone(layer) -> None:
    with tiles_of_all_rows(layer, *_call(4)):
        assert get_config() is None


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), tiles_of_all_rows(_layer(4), *_call(4)):
        raise ZeroDivisionError
    assert get_config() is None
