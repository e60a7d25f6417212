"""Tensor parallelism: workers are processes of their own, each with its own shard of every expert."""

from __future__ import annotations

import pytest

from engines import ask, engine
from hf_prefetch.integrations.vllm.layers import worker_report


def test_two_workers(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # For functions that are sent to workers; all of it stays on this machine.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # A core each: vLLM wants a NUMA node each otherwise.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(checkpoint("gpt_oss"), **parallel) as llm:
        expected = ask(llm), ask(llm)
    with engine(checkpoint("gpt_oss"), {"slots": 2, "expert_cache": "200KiB"}, **parallel) as llm:
        assert (ask(llm), ask(llm)) == expected
        reports = llm.collective_rpc(worker_report)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    with engine(checkpoint("gpt_oss"), {"slots": 2}) as llm:
        ask(llm)
        (whole,) = llm.collective_rpc(worker_report)
    assert len(reports) == 2
    for report in reports:
        assert report.cache_hits > 0
        # Biases of w2 are not cut, so it may be a little more than half.
        assert report.host_bytes < 0.55 * whole.host_bytes
