"""The OpenAI server, started for real, with the plugin as vLLM finds it: by its entry point, in each process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from engines import PROMPTS, ask, engine

_PATIENCE = 180.0
_ARGUMENTS = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "48")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address and its log."""
    folder, log = tmp_path_factory.mktemp("metrics"), tmp_path_factory.mktemp("log") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"hf_prefetch": {"slots": 3, "expert_cache": "400KiB"}}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint("qwen3_moe")), *_ARGUMENTS]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--additional-config", json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"PROMETHEUS_MULTIPROC_DIR": str(folder), "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-4000:])


def test_the_server_answers_what_an_engine_without_the_plugin_does(server, checkpoint) -> None:
    address, log = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    asked = {"max_tokens": 8, "temperature": 0.0, "logprobs": 5, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answers = [client.completions.create(model="tiny", prompt=prompt, **asked).choices[0] for prompt in PROMPTS]
    with engine(checkpoint("qwen3_moe")) as llm:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            expected = ask(llm, (prompt,))
            assert tuple(answer.token_ids) == expected.tokens[0]
            of = [dict(step)[token] for step, token in zip(expected.logprobs[0], expected.tokens[0], strict=True)]
            assert answer.logprobs.token_logprobs == of
    assert "the experts of 7 layers are in host memory" in log.read_text()


def test_its_metrics_are_among_vllms(server) -> None:
    address, _ = server
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("hf_prefetch_")}
    assert values['hf_prefetch_calls_total{path="lookahead"}'] > 0
    assert values['hf_prefetch_calls_total{path="cached"}'] > 0
    assert values["hf_prefetch_lookahead_hits_total"] > 0
    assert values["hf_prefetch_fallbacks_total"] == 0
    assert values["hf_prefetch_host_bytes"] > 0
    assert any(line.startswith("vllm:") for line in lines)
