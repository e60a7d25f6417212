"""Every kernel compiles for GPUs, on a machine that has none: what the interpreter lets through may still be no program."""

from __future__ import annotations

import pytest

from apart import run_apart

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_prefetch.device import kernels, unpacking

target = GPUTarget("cuda", int(sys.argv[1]), 32)
FORMS = [
    (kernels._assign, {"ids": "*i64", "new_ids": "*i64", "lists": "*i64", "most": "i32", "totals": "*i64", "expert_of": "*i32",
                       "scores": "*fp32", "number": "i32", "total": "i32", "rows": "i32", "decay": "fp32"},
     [{"PADDED": padded, "CHUNK": 32} for padded in (32, 128, 512)]),
    (kernels._list, {"ids": "*i64", "lists": "*i64", "most": "i32", "totals": "*i64", "expert_of": "*i32", "number": "i32",
                     "total": "i32", "rows": "i32"}, [{"PADDED": padded, "CHUNK": 32} for padded in (32, 512)]),
    (kernels._mark, {"ids": "*i64", "marks": "*i64", "count": "i32", "total": "i32"}, [{"SPAN": kernels._WORDS}]),
    (kernels._gather, {"lists": "*i64", "most": "i32", "host": "*u8", "cached": "*u8", "destination": "*u8", "tensors": "*i64"},
     [{"TO_ROWS": to_rows, "WORDS": kernels._WORDS} for to_rows in (True, False)]),
    (unpacking._unpack, {"blocks": "*i16", "escapes": "*i64", "destination": "*i32", "lists": "*i64", "per_row": "i32",
                         "width": "i32", "words": "i32"},
     [{"LISTED": listed, "BLOCKS": blocks, "CHUNK": unpacking._CHUNK} for listed in (True, False) for blocks in (1, 4)]),
]
for kernel, arguments, constants in FORMS:
    for constant in constants:
        signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constant), target=target)
        assert compiled.asm["ptx"], kernel
    # Integers that are 1 are constants to the compiler, which the interpreter does not have either: one expert, one block.
    constant |= {name: 1 for name, kind in arguments.items() if kind == "i32"}
    signature = {name: "constexpr" if name in constant else arguments[name] for name in kernel.arg_names}
    compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constant), target=target)
    assert compiled.asm["ptx"], kernel
print("compiled")
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int) -> None:
    """For Ampere and Hopper, with all constants that are in use."""
    pytest.importorskip("triton")
    run_apart(PROGRAM, str(capability), says="compiled", TRITON_INTERPRET="0")
