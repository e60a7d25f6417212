"""What the demonstration model is trained on: the text, its tokenizer, and the batches (see ``train_demo_model.py``).

Each batch mixes two kinds of rows. Text rows are windows of the text with the usual next-token loss. Recall rows are
documents in the form of ``hf_prefetch.demo.recall``: verses, facts among them and questions about the facts; only the
answers count there. Documents start short and grow to the whole row, which lets the model find out how to look things
up. Batch ``i`` depends on the seed and ``i`` alone.

Run as a program, this writes the filler bank of the recall task, ``hf_prefetch/demo/filler.txt``.
"""

from __future__ import annotations

import lzma
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_prefetch.demo import recall  # noqa: E402

TEXT = ROOT / "scripts" / "data" / "demo_text.txt.xz"
FILLER = ROOT / "hf_prefetch" / "demo" / "filler.txt"
END = "<|endoftext|>"
VOCAB = 2048
IGNORE, LM, ANSWER = 0, 1, 2  # what a target counts towards


def read_books() -> list[list[list[str]]]:
    """Return the text as books of chapters of verses."""
    text = re.sub(r"  +", " ", lzma.decompress(TEXT.read_bytes()).decode("ascii"))
    books = re.split(r"^# .*\n\n", text, flags=re.MULTILINE)[1:]
    return [[chapter.split("\n") for chapter in book.strip().split("\n\n")] for book in books]


def split_books(books: list[list[list[str]]]) -> tuple[list[list[list[str]]], list[list[str]]]:
    """Hold out every twentieth chapter: (books to train on, chapters to validate on)."""
    train: list[list[list[str]]] = []
    held_out: list[list[str]] = []
    number = 0
    for book in books:
        kept = []
        for chapter in book:
            (held_out if number % 20 == 10 else kept).append(chapter)
            number += 1
        train.append(kept)
    return train, held_out


def write_filler(size: int = 30_000) -> None:
    """Write the filler bank of the recall task: verses of middling length from all over the held-out chapters."""
    verses = [verse for chapter in split_books(read_books())[1] for verse in chapter if 60 <= len(verse) <= 180]
    step = max(1, sum(map(len, verses)) // size)
    FILLER.write_text("".join(verse + "\n" for verse in verses[::step]), encoding="ascii")


def train_tokenizer(books: list[list[list[str]]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that splits numbers into digits and has one token for each key of the recall task."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drill = [recall.fact_text(key, "0") + "\n" + recall.question_text(key) + "\n\n" for key in recall.KEYS] * 800
    verses = [verse for book in books for chapter in book for verse in chapter]
    tokenizer.train_from_iterator(verses + drill, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=4096
    )
    for key in recall.KEYS:
        assert len(fast(" " + key)["input_ids"]) == 1, key
    return fast


def text_stream(tokenizer: Any, books: list[list[list[str]]]) -> np.ndarray:
    """Return the ids of the books, each ended by the end token."""
    text = END.join("\n\n".join(" ".join(chapter) for chapter in book) for book in books if book) + END
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int16)


class Batches(torch.utils.data.Dataset):
    """The training batches: item ``i`` is (token ids, classes of the tokens as targets), each of rows x (length + 1)."""

    def __init__(self, args: Namespace, tokenizer: Any, books: list[list[list[str]]]) -> None:
        def encode(text: str) -> np.ndarray:
            return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int16)

        self.args = args
        self.stream = text_stream(tokenizer, books)
        self.verses = [encode(" " + verse) for book in books for chapter in book for verse in chapter]
        self.facts = [encode(" " + recall.fact_text(key, "0")) for key in recall.KEYS]
        self.questions = [encode("\n" + recall.question_text(key) + " 0.") for key in recall.KEYS]
        self.break_ = encode("\n\n")
        self.digits = np.array([encode(str(digit))[0] for digit in range(10)])

    def __len__(self) -> int:
        return self.args.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        args = self.args
        rng = np.random.default_rng((args.seed, step))
        width = args.length + 1
        ids = np.zeros((args.rows, width), dtype=np.int16)
        classes = np.full((args.rows, width), LM, dtype=np.uint8)
        longest = int(80 * (args.length / 80) ** min(1.0, (step + 1) / args.ramp))
        for row in range(args.rows):
            if row < args.text_rows:
                start = rng.integers(len(self.stream) - width)
                ids[row] = self.stream[start : start + width]
            else:
                ids[row], classes[row] = self.recall_row(rng, width, longest)
        return torch.from_numpy(ids), torch.from_numpy(classes)

    def recall_row(self, rng: np.random.Generator, width: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Pack recall documents of at most ``longest`` tokens into one row; no key comes twice in a row."""
        keys = list(rng.permutation(len(recall.KEYS)))
        pieces: list[np.ndarray] = []
        classes: list[np.ndarray] = []
        room = width
        while room >= 60 and len(keys) >= 12:
            most = min(longest, room)
            length = most if rng.random() < 0.4 else int(rng.integers(60, most + 1))
            room -= self.document(rng, length, keys, pieces, classes)
        ids = np.zeros(width, dtype=np.int16)
        kinds = np.full(width, IGNORE, dtype=np.uint8)
        joined = np.concatenate(pieces)[:width]
        ids[: len(joined)] = joined
        kinds[: len(joined)] = np.concatenate(classes)[:width]
        return ids, kinds

    def document(
        self,
        rng: np.random.Generator,
        length: int,
        keys: list[int],
        pieces: list[np.ndarray],
        classes: list[np.ndarray],
    ) -> int:
        """Append one document of about ``length`` tokens, with keys taken from ``keys``; return its exact length."""
        count = int(rng.integers(1, min(12, 1 + length // 50) + 1))
        cost = len(self.facts[0]) + len(self.questions[0]) + 6
        filler: list[np.ndarray] = []
        left = length - count * cost
        ordered = rng.random() < 0.5
        number = int(rng.integers(len(self.verses)))
        while left > 0:
            verse = self.verses[number % len(self.verses)]
            if len(verse) > left:
                break
            filler.append(verse)
            left -= len(verse)
            number = number + 1 if ordered else int(rng.integers(len(self.verses)))
        parts = [(float(place), piece, IGNORE) for place, piece in enumerate(filler)]
        questions_last = rng.random() < 0.6
        for _ in range(count):
            key = keys.pop()
            value = self.digits[rng.integers(0, 10, 4)]
            value[0] = self.digits[rng.integers(1, 10)]
            place = rng.random() * len(filler) - 0.5
            later = len(filler) + rng.random() if questions_last else place + rng.random() * (len(filler) - place)
            fact, question = self.facts[key], self.questions[key]
            parts.append((place, np.concatenate([fact[:-2], value, fact[-1:]]), IGNORE))
            parts.append((later, np.concatenate([question[:-2], value, question[-1:]]), ANSWER))
        parts.sort(key=lambda part: part[0])
        total = 0
        for piece, kind in [*((piece, kind) for _, piece, kind in parts), (self.break_, IGNORE)]:
            kinds = np.full(len(piece), IGNORE, dtype=np.uint8)
            if kind == ANSWER:
                kinds[-6:] = ANSWER  # the space, four digits, the full stop
            pieces.append(piece)
            classes.append(kinds)
            total += len(piece)
        return total


def check_rows(args: Namespace, tokenizer: Any, chapters: list[list[str]]) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """Return rows of held-out text and, by length, recall prompts with their answers and the places of the digits."""
    stream = text_stream(tokenizer, [chapters])
    starts = np.arange(args.rows) * args.length % (len(stream) - args.length)
    windows = np.stack([stream[start : start + args.length + 1] for start in starts]).astype(np.int64)
    prompts = {}
    for tokens in (args.length // 2, args.length - 100):
        ids, places = np.zeros((args.rows, args.length), dtype=np.int64), np.zeros((args.rows, 4), dtype=np.int64)
        for row, item in enumerate(recall.make_recall_prompts(args.rows, 999, tokens=tokens, tokenizer=tokenizer)):
            whole = tokenizer(f"{item.prompt} {item.answer}.", add_special_tokens=False)["input_ids"]
            ids[row, : len(whole)], places[row] = whole, np.arange(4) + len(whole) - 5
        prompts[tokens] = torch.from_numpy(ids), torch.from_numpy(places)
    return torch.from_numpy(windows), prompts


if __name__ == "__main__":
    write_filler()
