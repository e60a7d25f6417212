"""The command, as a user meets it: in a process of its own, with its output, its errors and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig

import hf_prefetch
from hf_prefetch import __version__
from hf_prefetch.cli import _streamer, main
from hf_prefetch.command.pretrained import load_model, most_tokens
from hf_prefetch.demo import DEMO_PROMPT as PROMPT
from hf_prefetch.demo import demo_model_path, load_demo_model, load_demo_tokenizer
from hf_prefetch.memory.packing import unpack

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "hf_prefetch"]
ON_CPU = ["--device", "cpu"]
# Logged once where experts travel from the CPU to the CPU.
STAND_IN = "hf_prefetch: this computes on the CPU"


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process whose output is read as it comes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *arguments], env=environment, bufsize=0, **pipes | options)


def finish(process: subprocess.Popen[bytes], text: str = "") -> tuple[int, str, str]:
    """Exit code, and what is still to come on stdout and stderr."""
    out, err = process.communicate(text.encode() or None, timeout=120)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def read_beyond(process: subprocess.Popen[bytes], start: str) -> str:
    """What the process writes until there is more than `start`."""
    assert process.stdout is not None
    text = ""
    while len(text) <= len(start):
        piece = process.stdout.read(64)
        assert piece, finish(process)
        text += piece.decode()
    return text


def complaint(stderr: str) -> str:
    """The one line that an error is."""
    lines = [line for line in stderr.splitlines() if not line.startswith(STAND_IN)]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("hf-prefetch: "), stderr
    return lines[0].removeprefix("hf-prefetch: ")


@pytest.fixture(scope="module")
def expected() -> str:
    """Twenty tokens more, as the model writes them without any of this."""
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True)) + "\n"


# -- what it does -------------------------------------------------------------------------------------------------------


def test_generate_streams_the_models_own_text_and_reports(expected: str) -> None:
    process = start("generate", "demo", "--prompt", PROMPT, "--max-new-tokens", "20", "--report", *ON_CPU)
    first = read_beyond(process, PROMPT)
    assert process.poll() is None, "the first words come while the others are still to be written"
    assert first.startswith(PROMPT)
    assert len(first) < len(expected)
    code, rest, stderr = finish(process)
    assert code == 0, stderr
    assert first + rest == expected
    assert "expert prefetch\n" in stderr
    assert "nothing failed" in stderr


def test_a_prompt_from_stdin_with_prefetching_off(expected: str) -> None:
    process = start(
        *("generate", "demo", "--prompt-file", "-", "--max-new-tokens", "20", "--report"),
        *("--prefetch-experts-slots", "0", *ON_CPU),
    )
    code, stdout, stderr = finish(process, PROMPT)
    assert code == 0, stderr
    assert stdout == expected
    assert stderr == "prefetching is off\n"


def test_a_prompt_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: str) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    arguments = ["generate", "demo", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "20", *ON_CPU]
    assert main([*arguments, "--gpu-memory", "8MiB"]) == 0
    assert capsys.readouterr().out == expected


def test_the_demonstration_model_has_a_prompt_of_its_own(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    assert main(["generate", "demo", "--max-new-tokens", "20", *ON_CPU]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("config", ["{}", "[]"])
def test_a_config_that_names_no_model(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(config)
    folder = str(tmp_path)
    for command in (["generate", folder, "--prompt", "x"], ["bench", folder]):
        assert main([*command, *ON_CPU]) == 1
        assert "config.json has no model_type" in complaint(capsys.readouterr().err)
    (tmp_path / "config.json").write_text("{")
    assert main(["generate", folder, "--prompt", "x", *ON_CPU]) == 1
    assert "not a valid JSON" in complaint(capsys.readouterr().err)


def test_bench_prints_a_table_and_writes_the_numbers(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    lengths = ["--prompt-lengths", "48,12", "--decode-tokens", "2", "--repeats", "1"]
    code, stdout, stderr = finish(start("bench", "demo", *lengths, "--n-cpu-moe", "5", *ON_CPU, "--json", str(out)))
    assert code == 0, stderr
    rows = [line.split() for line in stdout.splitlines() if line.startswith(("off ", "on "))]
    assert [row[:3] for row in rows] == [
        [arm, *what] for arm in ("off", "on") for what in (["prefill", "12"], ["prefill", "48"], ["decode", "12"])
    ]
    assert [row[-1] for row in rows] == ["-", "-", "-", "equal", "equal", "-"]
    assert "4 of 5" in stdout, "all but the first of the five host-resident layers were sent ahead"
    numbers = json.loads(out.read_text())
    points = {(arm["name"], point["what"], point["tokens"]): point for arm in numbers["arms"] for point in arm["points"]}
    assert len(points) == 6
    assert all(point["seconds"] > 0 for point in points.values())
    assert points["on", "prefill", 48]["logits_equal"] is True
    assert points["on", "prefill", 48]["moved_bytes"] >= points["on", "decode", 12]["moved_bytes"] > 0
    assert points["off", "prefill", 48]["moved_bytes"] is None
    assert numbers["options"]["n_cpu_moe"] == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is full")
def test_numbers_that_can_t_be_written_are_printed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt-lengths", "8", "--repeats", "1", "--decode-tokens", "0", "--json", "/dev/full", *ON_CPU]
    assert main(["bench", "demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert "prefill" in printed.out
    assert "'--json': " in printed.err.splitlines()[-1]


def test_text_that_is_no_utf_8_is_refused_with_the_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("caf\udce9"))  # as the C locale reads such a byte
    assert main(["generate", "demo", "--prompt-file", "-", *ON_CPU]) == 2
    assert "'--prompt-file': 'utf-8' codec can't" in complaint(capsys.readouterr().err)


def test_bench_without_slots_measures_one_arm(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-lengths", "8", "--decode-tokens", "0", "--repeats", "1"]
    assert main(["bench", "demo", *lengths, "--prefetch-experts-slots", "0", *ON_CPU]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("off ", "on "))]
    assert len(rows) == 1


def test_a_packed_folder_is_measured_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On it runs as `generate` runs it; off it is unpacked."""
    assert main(["pack", "demo", "--out", str(tmp_path / "packed")]) == 0
    out, lengths = tmp_path / "bench.json", ["--prompt-lengths", "8", "--decode-tokens", "0", "--repeats", "1"]
    moved = {}
    for pack in ([], ["--pack", "True"], ["--pack", "false"]):
        assert main(["bench", str(tmp_path / "packed"), *lengths, *pack, *ON_CPU, "--json", str(out)]) == 0
        assert ("experts packed" in capsys.readouterr().out) == (pack != ["--pack", "false"])
        off, on = json.loads(out.read_text())["arms"]
        assert on["points"][0]["logits_equal"] is True
        assert off["points"][0]["moved_bytes"] is None
        moved[tuple(pack)] = on["points"][0]["moved_bytes"]
    assert moved[()] == moved["--pack", "True"] < 0.85 * moved["--pack", "false"]


def test_code_that_comes_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs only if that is asked for, and the message says how."""
    folder = tmp_path / "remote"
    shutil.copytree(demo_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n\n\n"
        "class OwnConfig(Qwen3MoeConfig):\n    model_type = 'of_its_own'\n\n\n"
        "class OwnModel(Qwen3MoeForCausalLM):\n    config_class = OwnConfig\n"
    )
    command = ["generate", str(folder), "--prompt", "The", "--max-new-tokens", "2", *ON_CPU]
    assert main(command) == 1
    assert "trust_remote_code" in complaint(capsys.readouterr().err)
    assert main([*command, "--trust-remote-code"]) == 0
    assert capsys.readouterr().out.startswith("The")


# -- what it refuses ----------------------------------------------------------------------------------------------------

GENERATE = ["generate", "demo", "--prompt", "x"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["generate", "./nowhere"], 2, "--prompt", id="no prompt"),
        pytest.param([*GENERATE, "--prompt-file", "-"], 2, "--prompt", id="two prompts"),
        pytest.param(["generate", "demo", "--prompt", ""], 2, "is empty", id="an empty prompt"),
        pytest.param(["generate", "demo", "--prompt-file", "nowhere.txt"], 2, "nowhere.txt", id="no prompt file"),
        pytest.param([*GENERATE, "--prefetch-experts-slots", "1"], 2, "'--prefetch-experts-slots': slots=1", id="one slot"),
        pytest.param([*GENERATE, "--prefetch-experts-slots", "many"], 2, "valid integer", id="slots in words"),
        pytest.param([*GENERATE, "--gpu-memory", "lots"], 2, "'--gpu-memory': gpu_memory='lots' is no size", id="no size"),
        pytest.param([*GENERATE, "--host-memory", "9" * 400 + "GiB"], 2, "GiB' is no size", id="more than a number can be"),
        pytest.param([*GENERATE, "--expert-cache", "9" * 400 + "MiB"], 2, "MiB' is no size", id="such a cache"),
        pytest.param([*GENERATE, "--pin-memory", "-1"], 2, "pin_memory can't be negative", id="less than no memory"),
        pytest.param([*GENERATE, "--gpu-memory", "1KiB", *ON_CPU], 1, "Give at least", id="too little memory"),
        pytest.param([*GENERATE, "--n-cpu-moe", "-1"], 2, "'--n-cpu-moe': n_cpu_moe counts layers", id="fewer than no layers"),
        pytest.param([*GENERATE, "--n-cpu-moe", "1", "--gpu-memory", "1GiB"], 2, "give one of them", id="both"),
        pytest.param([*GENERATE, "--device", "banana"], 2, "'--device': device='banana' is no device", id="no device"),
        pytest.param([*GENERATE, "--device", "xpu:9"], 2, "sees no such device here", id="a device that is not here"),
        pytest.param([*GENERATE, "--max-new-tokens", "0"], 2, "--max-new-tokens", id="no tokens"),
        pytest.param(["generate", "./nowhere", "--prompt", "x"], 1, "no such folder, and no model", id="no folder"),
        pytest.param(["bench", "nobody/nothing"], 1, "nobody/nothing: no such folder, and no model", id="not on the Hub"),
        pytest.param(["bench", str(ROOT)], 1, "without config.json", id="a folder without a model"),
        pytest.param(["bench", "demo", "--prompt-lengths", "8,x"], 2, "'8,x' is no list of numbers", id="no lengths"),
        pytest.param(["bench", "demo", "--prompt-lengths", "8,"], 2, "'8,' is no list of numbers", id="a length is missing"),
        pytest.param(["bench", "demo", "--prompt-lengths", "8,0"], 2, "'8,0' has a number below 1", id="no length"),
        pytest.param(["bench", "demo", "--prompt-lengths", "-3"], 2, "'-3' has a number below 1", id="a negative length"),
        pytest.param(["bench", "demo", "--json", "nowhere/out.json"], 2, "no folder nowhere", id="no folder for --json"),
        pytest.param(["bench", "demo", "--json", "/"], 2, "'--json': / is a folder", id="a folder for --json"),
        pytest.param([*GENERATE[:-1], "caf\udce9"], 2, "'--prompt': 'utf-8' codec can't", id="a prompt that is no text"),
        pytest.param(
            [*GENERATE, "--host-memory", "0", "--offload-folder", "a\0b"],
            2,
            "'--offload-folder': offload",
            id="no folder's name",
        ),
        pytest.param(["pack", "demo", "--out", ""], 2, "'--out': the path is empty", id="an empty --out"),
        pytest.param(["bench", "demo", "--json", ""], 2, "'--json': the path is empty", id="an empty --json"),
        pytest.param(["generate", "demo", "--prompt-file", ""], 2, "'--prompt-file': the path", id="an empty --prompt-file"),
        pytest.param(
            [*GENERATE, "--host-memory", "0", "--offload-folder", ""], 2, "'--offload-folder': the", id="an empty folder"
        ),
        pytest.param([*GENERATE, "--pack", "maybe"], 2, "'--pack': 'maybe' is none of auto, true", id="no way to pack"),
        pytest.param([*GENERATE, "--pack", "true", "--host-memory", "0"], 2, "'--pack': pack=True", id="no memory to pack in"),
        pytest.param(["bench", "demo", "--prompt-lengths", "5000"], 2, "'--prompt-lengths': demo takes", id="a long prompt"),
        pytest.param(["bench"], 2, "model", id="no model"),
        pytest.param(["sing"], 2, "sing", id="no such command"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert words in complaint(printed.err)
    assert not printed.out


def test_without_arguments_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert all(command in printed.out + printed.err for command in ("generate", "bench"))
    assert "hf-prefetch: " not in printed.err


def test_the_help_of_a_size_says_that_it_is_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, sizes in (("generate", 4), ("bench", 3)):
        assert main([command, "--help"]) == 0
        words = " ".join(re.sub(r"[^\w ]", " ", capsys.readouterr().out).split())
        assert words.count("in bytes or as") == sizes


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a command that would fail, too."""
    for arguments in (["--version"], ["--version", "generate"]):
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == (f"hf-prefetch {__version__}\n", "")


def test_an_error_leaves_a_process_without_a_traceback() -> None:
    code, stdout, stderr = finish(start("generate", "./nowhere", "--prompt", "x"))
    assert (code, stdout) == (1, "")
    assert complaint(stderr) == "./nowhere: no such folder, and no model of that name on the Hub"


# -- how it ends --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent by POSIX signals")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_it_with_one_line(how: signal.Signals, code: int) -> None:
    process = start("generate", "demo", "--prompt", PROMPT, "--max-new-tokens", "4000", *ON_CPU)
    read_beyond(process, PROMPT)
    process.send_signal(how)
    ended, stdout, stderr = finish(process)
    assert ended == code, stderr
    assert complaint(stderr) == "stopped"
    assert stdout.endswith("\n"), "the message comes on a line of its own"


_SLOW = """
import time

print("importing", flush=True)
try:
    time.sleep(100)
except BaseException as error:
    raise ImportError("could not be initialized") from error
"""


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent by POSIX signals")
@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", "from hf_prefetch.__main__ import main; main()"]])
@pytest.mark.parametrize("library", ["torch", "typer"])
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_like_that_while_libraries_are_imported(
    command: list[str], library: str, how: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Whatever these make of an interrupt."""
    (tmp_path / f"{library}.py").write_text(_SLOW)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "bench", "demo"], env=environment, bufsize=0, **pipes)
    assert process.stdout is not None
    assert process.stdout.read(9) == b"importing"
    process.send_signal(how)
    ended, _, stderr = finish(process)
    assert (ended, stderr) == (code, "hf-prefetch: stopped\n")


def test_the_package_has_its_names() -> None:
    """Each is imported when it is asked for, by star and by completion as well, and there are no others."""
    code = (
        "import sys, hf_prefetch; assert 'torch' not in sys.modules; from hf_prefetch import *; print(save_packed.__module__)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.stdout == "hf_prefetch.checkpoints.saving\n", ended.stderr
    assert set(hf_prefetch.__all__) <= set(dir(hf_prefetch))
    assert all(getattr(hf_prefetch, name) is not None for name in hf_prefetch.__all__)
    with pytest.raises(AttributeError, match="module 'hf_prefetch' has no attribute 'nothing'"):
        hf_prefetch.nothing  # noqa: B018
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'hf-prefetch = "hf_prefetch.__main__:main"' in project


_TERMINATED = """
import os, shutil, signal, sys
import hf_prefetch.memory.packed_files as files
from hf_prefetch.cli import main


def terminated(function):
    def run(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)
    return run


files.save_file, shutil.rmtree = terminated(files.save_file), terminated(shutil.rmtree)
code = main(["pack", "demo", "--out", sys.argv[1], "--device", "cpu"])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
sys.exit(code)
"""


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent by POSIX signals")
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nor does a second one while it is tidied up."""
    command = [sys.executable, "-c", _TERMINATED, str(tmp_path / "new" / "packed")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 143, ended.stderr
    assert complaint(ended.stderr) == "stopped"
    assert not list(tmp_path.iterdir())


def test_a_reader_that_goes_away_ends_it_silently() -> None:
    process = start("generate", "demo", "--prompt", PROMPT, "--max-new-tokens", "4000", *ON_CPU)
    read_beyond(process, PROMPT)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    lines = process.stderr.read().decode().splitlines()
    assert process.wait(timeout=120) != 0
    assert [line for line in lines if not line.startswith(STAND_IN)] == []


def test_the_first_word_keeps_the_space_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokenizers after SentencePiece drop the space of the first token that they decode."""

    class Tokenizer:
        words = ("▁In", "▁the", "▁beginning", ".")

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(self.words[index] for index in ids).replace("▁", " ").removeprefix(" ")

    streamer = _streamer(Tokenizer(), [0])
    streamer.put(torch.tensor([[0]]))
    for token in (1, 2, 3):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert capsys.readouterr().out == " the beginning.\n"


# -- packing ----------------------------------------------------------------------------------------------------------


def test_pack_verify(capsys: pytest.CaptureFixture[str]) -> None:
    """What packing makes of the demonstration model's experts; every bit comes back."""
    assert main(["pack", "demo", "--verify", *ON_CPU]) == 0
    printed = capsys.readouterr()
    rows = {line.split("  ")[0]: line for line in printed.out.splitlines()}
    assert set(rows) == {"experts", "layers", "before", "packed", "written", "escapes", "information", "every bit"}
    # The file has a tensor for each expert and projection; in the model those of a layer are two.
    tensors = [key for key in load_demo_model().state_dict() if ".experts." in key]
    assert f" {len(tensors)} " in rows["experts"]
    assert " 7 of 7 " in rows["layers"]
    assert " yes " in rows["every bit"]
    assert printed.err == ""
    assert printed.out in (ROOT / "docs" / "packing.md").read_text(), "the document shows it"


def test_pack_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to pack, no files, a broken one; and a bit that does not come back is an error."""
    folder = tmp_path / "model"
    load_demo_model(torch.float16).save_pretrained(folder)
    for arguments, code, words in (
        (["pack", "demo"], 2, "--out"),
        (["pack", str(folder), "--verify"], 1, "experts are float16, and only bfloat16 is packed"),
    ):
        assert main([*arguments, *ON_CPU]) == code
        assert words in complaint(capsys.readouterr().err)
    (folder / "model.safetensors").write_bytes(b"nothing")
    assert main(["pack", str(folder), "--verify", *ON_CPU]) == 1
    assert "truncated" in complaint(capsys.readouterr().err)
    (folder / "model.safetensors").unlink()
    assert main(["pack", str(folder), "--verify", *ON_CPU]) == 1
    assert "no safetensors files" in complaint(capsys.readouterr().err)
    monkeypatch.setattr("hf_prefetch.model.packed_weights.unpack", lambda packed: unpack(packed).neg())
    assert main(["pack", "demo", "--verify", *ON_CPU]) == 1
    assert "NOT the same in model.layers.0" in capsys.readouterr().out


# -- found by users ---------------------------------------------------------------------------------------------------


def test_a_truncated_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the file and the tensor, whichever command reads it."""
    load_demo_model().save_pretrained(tmp_path)
    load_demo_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 5000)
    for command in (["generate", str(tmp_path), "--prompt", "x"], ["bench", str(tmp_path)]):
        assert main([*command, *ON_CPU]) == 1
        assert f"{file} is truncated" in complaint(capsys.readouterr().err)


def test_a_checkpoint_with_a_type_that_is_not_read_here_is_left_to_transformers(tmp_path: Path) -> None:
    """Its headers are looked at for what is broken, and this is not."""
    load_demo_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"scales": torch.ones(4).to(torch.float8_e8m0fnu)}
    save_file(weights, file, metadata={"format": "pt"})
    assert torch.equal(load_model(str(tmp_path)).lm_head.weight, load_demo_model().lm_head.weight)


def test_a_folder_without_a_tokenizer_and_prompts_that_are_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything runs."""
    load_demo_model().save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "hi", *ON_CPU]) == 1
    printed = capsys.readouterr()
    assert "tokenizer" in complaint(printed.err)
    assert printed.out == ""
    assert main(["bench", "demo", "--prompt-lengths", "5000", *ON_CPU]) == 2
    assert "4,096 tokens at most" in complaint(capsys.readouterr().err)
    assert main(["generate", "", "--prompt", "hi", *ON_CPU]) == 1
    assert "name of the model is empty" in complaint(capsys.readouterr().err)


@pytest.mark.parametrize("slots", ["0", "3"])
def test_a_text_that_may_get_longer_than_the_model_takes(
    slots: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so before the text begins, and it is written all the same."""
    command = ["generate", "demo", "--prompt", PROMPT, "--prefetch-experts-slots", slots, *ON_CPU, "--max-new-tokens"]
    tokens = load_demo_tokenizer()(PROMPT, return_tensors="pt")["input_ids"].shape[1]
    said: list[list[str]] = []

    def write(*args: Any, **kwargs: Any) -> None:
        lines = capsys.readouterr().err.splitlines()
        said.append([line for line in lines if not line.startswith(STAND_IN)])

    # A test can't wait for so many tokens.
    monkeypatch.setattr("transformers.GenerationMixin.generate", write)
    assert main([*command, str(4096 - tokens)]) == 0
    new = 4097 - tokens
    assert main([*command, str(new)]) == 0
    comes = f"{tokens} of the prompt and up to {new:,} new ones come to 4,097"
    line = f"hf_prefetch: demo takes 4,096 tokens at most, and {comes}; what is written beyond may make no sense"
    assert said == [[], [line]]


def test_a_prompt_longer_than_the_model_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: str) -> None:
    """The text goes on as it would."""
    folder = tmp_path / "short"
    shutil.copytree(demo_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "20", *ON_CPU]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert "takes 8 tokens at most" in printed.err


def test_not_every_config_says_how_much_a_model_takes() -> None:
    assert most_tokens(LlamaConfig(max_position_embeddings=2048)) == 2048
    assert most_tokens(PreTrainedConfig()) is None


def test_a_warning_is_one_line() -> None:
    """Without a line of the package's source."""
    code, _, err = finish(
        start("generate", "demo", "--prompt", "hi", "--max-new-tokens", "2", "--expert-cache", "1KiB", *ON_CPU)
    )
    assert code == 0
    (line,) = [line for line in err.splitlines() if not line.startswith(STAND_IN)]
    assert line.startswith("hf_prefetch: expert_cache is 1.00 KiB")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_warning_comes_when_the_text_has_ended(stopped: bool) -> None:
    """Both go to one terminal or file as a rule. Nor is the warning lost if the text is broken off."""
    length = "4000" if stopped else "3"
    arguments = ["--prompt", PROMPT, "--max-new-tokens", length, "--expert-cache", "1KiB", *ON_CPU]
    process = start("generate", "demo", *arguments, stderr=subprocess.STDOUT)
    text = ""
    if stopped:
        while PROMPT not in text or len(text.partition(PROMPT)[2]) < 40:
            assert process.stdout is not None
            text += process.stdout.read(64).decode()
        process.send_signal(signal.SIGINT)
    code, rest, _ = finish(process)
    lines = (text + rest).splitlines()
    assert code == (130 if stopped else 0), lines
    said = [line for line in lines if "expert_cache is" in line]
    assert len(said) == 1
    assert said[0].startswith("hf_prefetch: ")
    assert lines.index(said[0]) > max(number for number, line in enumerate(lines) if PROMPT in line)
    assert lines[-2 if stopped else -1] == said[0]
