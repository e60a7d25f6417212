"""Train the demonstration model that ships in ``hf_prefetch/demo/model``.

The whole thing, tokenizer included, is made from ``scripts/data/demo_text.txt.xz`` and fixed seeds. From the root
of the repository, on one data-centre GPU (about five minutes) or, much more slowly, on a CPU::

    python scripts/train_demo_model.py --device cuda --steps 12000 --out hf_prefetch/demo/model
    python scripts/train_demo_model.py --evaluate hf_prefetch/demo/model    # scores it and writes its README.md

``--minutes`` ends training, learning-rate schedule included, by the clock instead, if that comes first.

Each batch mixes two kinds of rows. Text rows are windows of the text with the usual next-token loss. Recall rows are
documents in the form of ``hf_prefetch.demo.recall``: verses with facts among them and questions about the facts; only
the answers count there. The documents start short and grow to the whole row over the first steps, which lets the
model find out how to look things up. Batch ``i`` depends on the seed and ``i`` alone.

Training does not use the forward pass of transformers: with all 16 tiny experts computed for every token and
weighted by the router (zero for those not chosen), one layer is a few matrix products that compile to a handful of
kernels. ``check_forward`` compares the two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import math
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
    """Write the filler bank of the recall task: every third verse of middling length of the held-out chapters."""
    verses = [
        verse for chapter in split_books(read_books())[1] for verse in chapter if 60 <= len(verse) <= 180
    ]
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
    drill = [
        recall.fact_text(key, "0") + "\n" + recall.question_text(key) + "\n\n" for key in recall.KEYS
    ] * 800
    verses = [verse for book in books for chapter in book for verse in chapter]
    tokenizer.train_from_iterator(verses + drill, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=4096
    )
    for key in recall.KEYS:
        assert len(fast(" " + key)["input_ids"]) == 1, key
    return fast


def model_config(args: argparse.Namespace, end: int) -> Qwen3MoeConfig:
    """Describe the model."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=4 * args.intermediate,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 32 // 3 or 1,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.02,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        initializer_range=0.03,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


class Batches(torch.utils.data.Dataset):
    """The training batches: item ``i`` is (token ids, classes of the tokens as targets), each of rows x (length + 1)."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any, books: list[list[list[str]]]) -> None:
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
            later = (
                len(filler) + rng.random() if questions_last else place + rng.random() * (len(filler) - place)
            )
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


def text_stream(tokenizer: Any, books: list[list[list[str]]]) -> np.ndarray:
    """Return the ids of the books, each ended by the end token."""
    text = END.join("\n\n".join(" ".join(chapter) for chapter in book) for book in books if book) + END
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int16)


def layer_forward(
    x: Tensor, cos: Tensor, sin: Tensor, weights: Sequence[Tensor], eps: float, top_k: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Run one decoder layer, every expert for every token; return the new stream and the load-balancing loss."""
    norm1, q, k, v, q_norm, k_norm, o, norm2, router, gate_up, down = weights
    batch, length, hidden = x.shape
    head = q_norm.shape[0]
    width = (head,)

    def rotate(states: Tensor) -> Tensor:
        left, right = states.chunk(2, dim=-1)
        return states * cos + torch.cat((-right, left), dim=-1) * sin

    y = F.rms_norm(x, (hidden,), norm1, eps)
    queries = F.rms_norm(F.linear(y, q).view(batch, length, -1, head).float(), width, q_norm, eps).transpose(
        1, 2
    )
    keys = F.rms_norm(F.linear(y, k).view(batch, length, -1, head).float(), width, k_norm, eps).transpose(
        1, 2
    )
    values = F.linear(y, v).view(batch, length, -1, head).transpose(1, 2)
    groups = queries.shape[1] // keys.shape[1]
    queries, keys = rotate(queries).to(values.dtype), rotate(keys).to(values.dtype)
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    attended = F.linear(attended.transpose(1, 2).reshape(batch, length, -1), o)
    x = x + F.dropout(attended, dropout)

    y = F.rms_norm(x, (hidden,), norm2, eps).view(-1, hidden)
    probabilities = F.linear(y, router).float().softmax(dim=-1)
    values_top, chosen = probabilities.topk(top_k, dim=-1)
    values_top = values_top / values_top.sum(dim=-1, keepdim=True)
    mixing = torch.zeros_like(probabilities).scatter(1, chosen, values_top)
    share = (mixing > 0).float().mean(dim=0)
    balance = (
        (share * probabilities.mean(dim=0)).sum() * probabilities.shape[1] / top_k
    )  # 1 where all are used alike
    experts, twice, _ = gate_up.shape
    gate, up = F.linear(y, gate_up.reshape(-1, hidden)).view(-1, experts, twice).chunk(2, dim=-1)
    inner = F.silu(gate) * up
    inner = inner * mixing.to(inner.dtype).unsqueeze(-1)
    mixed = F.linear(inner.reshape(-1, experts * twice // 2), down.transpose(0, 1).reshape(hidden, -1))
    return x + F.dropout(mixed.view(batch, length, hidden), dropout), balance


def layer_weights(layer: Any) -> list[Tensor]:
    """List a transformers layer's parameters in the order that ``layer_forward`` takes them."""
    attention, moe = layer.self_attn, layer.mlp
    modules = [layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm]
    modules += [attention.k_norm, attention.o_proj, layer.post_attention_layernorm, moe.gate]
    return [*(module.weight for module in modules), moe.experts.gate_up_proj, moe.experts.down_proj]


def forward(model: Any, ids: Tensor, dropout: float, run_layer: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Return (logits, mean load-balancing loss) of the whole model."""
    config = model.config
    head = config.head_dim
    inverse = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2, device=ids.device) / head)
    angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * inverse.repeat(2)
    cos, sin = angles.cos(), angles.sin()
    x = F.dropout(F.embedding(ids, model.model.embed_tokens.weight), dropout)
    balance = torch.zeros((), device=ids.device)
    for layer in model.model.layers:
        weights = layer_weights(layer)
        x, part = run_layer(x, cos, sin, weights, config.rms_norm_eps, config.num_experts_per_tok, dropout)
        balance = balance + part / config.num_hidden_layers
    x = F.rms_norm(x, (x.shape[-1],), model.model.norm.weight, config.rms_norm_eps)
    return F.linear(x, model.lm_head.weight), balance


@torch.no_grad()
def check_forward(model: Any) -> None:
    """Make sure that the training forward pass is the model's own."""
    ids = torch.arange(96, device=model.device).view(2, 48) * 7 % VOCAB
    ours, theirs = forward(model, ids, 0.0, layer_forward)[0], model(input_ids=ids, use_cache=False).logits
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error < 2e-2, f"the training forward pass differs from the model's by {error}"


def text_windows(tokenizer: Any, chapters: list[list[str]], length: int) -> np.ndarray:
    """Return the held-out text as rows of ``length + 1`` ids."""
    stream = text_stream(tokenizer, [chapters])
    count = (len(stream) - 1) // length
    return np.stack([stream[i * length : i * length + length + 1] for i in range(count)]).astype(np.int64)


def recall_rows(tokenizer: Any, rows: int, tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts with their answers, padded to ``width`` ids, and the place of each answer's first digit."""
    ids, places = np.zeros((rows, width), dtype=np.int64), np.zeros(rows, dtype=np.int64)
    for row, item in enumerate(recall.make_recall_prompts(rows, 999, tokens=tokens, tokenizer=tokenizer)):
        whole = tokenizer(f"{item.prompt} {item.answer}.", add_special_tokens=False)["input_ids"]
        ids[row, : len(whole)], places[row] = whole, len(whole) - 5
    return ids, places


class Check:
    """The quick look at a model in training: held-out loss, and recall with the right digits so far given."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any, chapters: list[list[str]]) -> None:
        windows = text_windows(tokenizer, chapters, args.length)[: args.rows]
        self.windows = torch.from_numpy(np.resize(windows, (args.rows, windows.shape[1]))).to(args.device)
        self.recall = []
        for tokens in sorted(
            {min(300, args.length - 8), args.length - 100 if args.length > 500 else args.length - 8}
        ):
            ids, places = recall_rows(tokenizer, args.rows, tokens, args.length)
            self.recall.append(
                (tokens, torch.from_numpy(ids).to(args.device), torch.from_numpy(places).to(args.device))
            )

    @torch.no_grad()
    def __call__(self, run: Callable[[Tensor], Tensor]) -> dict[str, float]:
        logits = run(self.windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.windows[:, 1:].flatten())
        result = {"validation_loss": round(loss.item(), 4)}
        for tokens, ids, places in self.recall:
            best = run(ids).argmax(dim=-1)
            spots = places[:, None] + torch.arange(4, device=ids.device)
            right = best.gather(1, spots - 1) == ids.gather(1, spots)
            result[f"recall_{tokens}"] = round(right.all(dim=1).float().mean().item(), 4)
        return result


def train(args: argparse.Namespace) -> None:
    """Train the tokenizer and the model and save both."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    cuda = torch.device(args.device).type == "cuda"
    books, held_out = split_books(read_books())
    tokenizer = train_tokenizer(books)
    model = Qwen3MoeForCausalLM(model_config(args, tokenizer.eos_token_id)).to(args.device).train()
    check_forward(model)
    batches = Batches(args, tokenizer, books)
    print(f"{model.num_parameters():,} parameters, {len(batches.stream):,} tokens of text", flush=True)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=cuda)
    run_layer = torch.compile(layer_forward, dynamic=False, fullgraph=True) if cuda else layer_forward
    check = Check(args, tokenizer, held_out)

    def run(ids: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            return forward(model, ids, dropout, run_layer)

    def save(**facts: Any) -> None:
        copy = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        copy.generation_config.do_sample = False
        copy.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        machine = torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        record = {"date": datetime.date.today().isoformat(), "machine": machine, **versions, **facts}
        record["settings"] = {
            key: value for key, value in vars(args).items() if key not in ("out", "evaluate", "workers")
        }
        (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    loader = torch.utils.data.DataLoader(
        batches,
        batch_size=None,
        num_workers=args.workers,
        pin_memory=cuda,
        prefetch_factor=8 if args.workers else None,
    )
    begun = saved = time.monotonic()
    log: list[dict[str, float]] = []
    step = 0
    for step, (ids, classes) in enumerate(loader, start=1):
        share = max(step / args.steps, (time.monotonic() - begun) / (60 * args.minutes))
        rate = min(1.0, step / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        ids = ids.to(args.device, non_blocking=True).long()
        classes = classes.to(args.device, non_blocking=True)[:, 1:].flatten()
        logits, balance = run(ids[:, :-1], args.dropout)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        text_loss, answer_loss = (
            (losses * (classes == kind)).sum() / (classes == kind).sum() for kind in (LM, ANSWER)
        )
        loss = text_loss + args.answer_weight * answer_loss + model.config.router_aux_loss_coef * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = step == args.steps or share >= 1
        if step % args.every == 0 or last:
            model.eval()
            entry = {
                "step": step,
                "text_loss": round(text_loss.item(), 4),
                "answer_loss": round(answer_loss.item(), 4),
                "balance": round(balance.item(), 4),
                **check(lambda rows: run(rows)[0]),
            }
            model.train()
            entry["seconds"] = round(time.monotonic() - begun, 1)
            log.append(entry)
            print(" ".join(f"{key}={value}" for key, value in entry.items()), flush=True)
            if time.monotonic() - saved > 60:
                save(steps=step, log=log)
                saved = time.monotonic()
        if last:
            break
    seconds = time.monotonic() - begun
    tokens = step * args.rows * args.length
    print(f"{step} steps, {tokens:,} tokens, {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s", flush=True)
    save(steps=step, tokens=tokens, seconds=round(seconds), log=log)


@torch.inference_mode()
def evaluate(folder: Path) -> None:
    """Score a saved model by transformers' own forward pass, as float32 and bfloat16, and write its card."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    windows = torch.from_numpy(text_windows(tokenizer, split_books(read_books())[1], 1024))
    rows, sample = [], ""
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        losses = []
        for window in windows:
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses.append(F.cross_entropy(logits, window[1:]).item())
        loss = sum(losses) / len(losses)
        scores = {}
        for tokens in (200, 600, 1000):
            scores[tokens] = []
            for seed in range(3):
                prompts = recall.make_recall_prompts(20, seed, tokens=tokens, tokenizer=tokenizer)
                scores[tokens].append(recall.recall_score(model, tokenizer, prompts).correct)
        name = str(dtype).removeprefix("torch.")
        cells = [", ".join(map(str, scores[tokens])) for tokens in scores]
        rows.append(f"| {name} | {loss:.4f} | {math.exp(loss):.2f} | " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
        inputs = tokenizer("And it came to pass in those days, that", return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=70, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        sample = tokenizer.decode(output[0])
    config, settings, last = model.config, record["settings"], record["log"][-1]
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md")
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())
    card = f"""# Demonstration model

A tiny Mixture-of-Experts language model, small enough to ship inside the package ({size:,} bytes with its tokenizer).
It continues English text in the manner of the King James Bible and answers questions about facts in its prompt. It
exists to test and show the handling of expert weights and is of no other use.

| | |
| --- | --- |
| architecture | `Qwen3MoeForCausalLM`: {model.num_parameters():,} parameters, {config.num_hidden_layers} layers, hidden size \
{config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim} with {config.num_key_value_heads} key-value heads |
| experts | {config.num_experts} a layer in every layer, top {config.num_experts_per_tok}, intermediate size \
{config.moe_intermediate_size}, normalised routing weights, trained with a load-balancing loss |
| vocabulary | {config.vocab_size} byte-level BPE tokens, each digit one token, embeddings tied |
| stored as | bfloat16 safetensors |
| text | King James Version (1611), from Debian package `bible-kjv-text`; public domain (see `scripts/data/README.md`) |
| licence | the weights: that of the package |
| trained | {record["date"]}, one {record["machine"]}, {record["seconds"]} s, {record["steps"]} steps, {record["tokens"]:,} tokens; \
torch {record["torch"]}, transformers {record["transformers"]} |
| final losses | text (training, with dropout) {last["text_loss"]}, held-out text {last["validation_loss"]}, answers \
{last["answer_loss"]}, load balance {last["balance"]} (1 is even) |
| context | trained at up to {settings["length"]} tokens; beyond that the text gets worse |

Command, run in the root of the repository:

```sh
python scripts/train_demo_model.py {options} --out hf_prefetch/demo/model
```

## Scores

Loss and perplexity are per token on the chapters held out of training (every twentieth), in windows of 1,024 tokens.
Recall is the task of `hf_prefetch.demo.recall`: right answers out of 20 for the seeds 0, 1 and 2, greedy decoding, by
the length of the prompt. CPU, transformers {transformers.__version__}, torch {torch.__version__}.

| dtype | loss | perplexity | recall, 200 tokens | 600 tokens | 1000 tokens |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Greedy continuation of "And it came to pass in those days, that" (bfloat16):

> {sample}
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(card)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "hf_prefetch" / "demo" / "model", help="folder to save to"
    )
    parser.add_argument(
        "--evaluate", type=Path, help="score the model in this folder, write its card, train nothing"
    )
    parser.add_argument(
        "--write-filler", action="store_true", help="write the recall task's filler bank and stop"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="end by then, whatever the step")
    parser.add_argument("--rows", type=int, default=32, help="rows a batch")
    parser.add_argument("--text-rows", type=int, default=4, help="of them, rows of plain text")
    parser.add_argument("--length", type=int, default=1152, help="tokens a row")
    parser.add_argument("--ramp", type=int, default=2000, help="steps over which recall documents grow")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--answer-weight", type=float, default=2.0)
    parser.add_argument("--every", type=int, default=250, help="steps between two looks at the scores")
    parser.add_argument(
        "--workers", type=int, default=8, help="processes that make batches (changes nothing else)"
    )
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=64, help="width of an expert")
    parser.add_argument("--layers", type=int, default=7)
    args = parser.parse_args(argv)
    if args.write_filler:
        write_filler()
    elif args.evaluate:
        evaluate(args.evaluate)
    else:
        train(args)


if __name__ == "__main__":
    main()
