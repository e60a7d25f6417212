"""Write docs/architectures.md: every Mixture-of-Experts architecture in transformers, and what of it is prefetched.

    PYTHONPATH=.:tests python scripts/list_architectures.py            # write it
    PYTHONPATH=.:tests python scripts/list_architectures.py --check    # exit with 1 if it is not current

Each row is measured: a small random model of the architecture (tests/architectures.py) runs without and with prefetching. The
exceptions are those that tests/test_architectures.py expects, with its reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

import test_architectures
from architectures import ABSENT, ARCHITECTURES, build, run
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.banks.bank import ExpertBank
from hf_prefetch.discovery import find_banks

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end -->"
HEAD = ("architecture", "class", "experts", "prompt", "token", "left resident")


def row(name: str) -> tuple[str, ...]:
    """What was found and done: the cells of a row."""
    torch.manual_seed(0)
    model = build(name)
    kind = ARCHITECTURES[name].model
    if name in test_architectures.REFUSED:
        return name, kind, "-", "-", "-", f"all: {test_architectures.REFUSED[name]}"
    expected, found = run(name, model), find_banks(model)
    enable_expert_prefetch(model, progress=False)
    try:
        same, report = run(name, model).equals(expected), model.expert_prefetch.report()
    finally:
        disable_expert_prefetch(model)
    if not same or report.fallbacks or not report.lookahead_hits:
        raise AssertionError(f"{name}: output equal: {same}; {report}")
    kinds = sorted({_kind(bank) for bank in found.banks})
    token = "single experts" if report.routed_calls else "whole layers"
    if not ARCHITECTURES[name].generates:
        token = "-"
    left = "; ".join(sorted({f"{refusal.module}: {refusal.reason}" for refusal in found.refusals}))
    return name, kind, f"{len(found.banks)} x {', '.join(kinds)}", "ahead of use", token, left or "-"


def _kind(bank: ExpertBank) -> str:
    if any("." in key for key in bank.parameters):
        return "a list"
    if bank.ids_argument is None:
        return "stacked, called without ids"
    return "stacked" if bank.layout.stacked else "stacked, some without weights"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def table(names: Sequence[str]) -> str:
    """The rows of some architectures, as Markdown."""
    with _quiet():
        rows = [row(name) for name in names]
    cells = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the document, or say whether it is current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    about = f"{len(ARCHITECTURES)} architectures of transformers {transformers.__version__}"
    about += f"; absent there: {', '.join(ABSENT)}" if ABSENT else ""
    new = f"{before}{BEGIN}{about}.\n\n{table(list(ARCHITECTURES))}\n{END}{after}"
    if new == text:
        return 0
    if options.check:
        print("docs/architectures.md: not current; run PYTHONPATH=.:tests python scripts/list_architectures.py")
        return 1
    DOCUMENT.write_text(new, encoding="utf-8")
    print("docs/architectures.md: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
