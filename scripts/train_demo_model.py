"""Train the demonstration model that ships in ``hf_prefetch/demo/model``, tokenizer included.

From the root of the repository, on a data-centre GPU (about two minutes) or, for a small trial, on a CPU::

    python scripts/train_demo_model.py --device cuda --out hf_prefetch/demo/model
    python scripts/train_demo_model.py --evaluate hf_prefetch/demo/model

The second command scores the saved model with transformers' own forward pass and writes its card, ``README.md``.
Everything comes from ``scripts/data/demo_text.txt.xz`` and fixed seeds. ``--minutes`` ends training, the learning
rate's schedule included, by the clock if that comes before ``--steps``.

What the batches hold is in ``demo_data.py``: text, and documents with facts and questions, of which only the answers
count. The model finds out how to look facts up within a thousand steps; with twice the dropout and twice the rows of
text it did not, and stayed at a third of the answers.

Training has a forward pass of its own: with all 16 tiny experts computed for every token and weighted by the router
(zero for those not chosen), a layer is a few matrix products that compile to a handful of kernels. ``check_forward``
compares it with the one of transformers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo_data import ANSWER, LM, ROOT, VOCAB, Batches, check_rows, read_books, split_books, text_stream, train_tokenizer
from hf_prefetch.demo import recall

SETTINGS = {  # name: (default, meaning)
    "seed": (0, "of weights, batches and dropout"),
    "steps": (3600, "optimizer steps"),
    "minutes": (1e9, "end by then, whatever the step"),
    "rows": (32, "rows a batch"),
    "text-rows": (4, "of them, rows of plain text"),
    "length": (1152, "tokens a row"),
    "ramp": (1500, "steps over which recall documents grow"),
    "warmup": (200, "steps over which the learning rate grows"),
    "every": (250, "steps between two looks at the scores"),
    "hidden": (192, "hidden size"),
    "intermediate": (64, "width of an expert"),
    "layers": (7, "layers"),
    "lr": (2e-3, "highest learning rate"),
    "decay": (0.1, "weight decay of matrices"),
    "dropout": (0.1, "of embeddings and of what each block adds"),
    "answer-weight": (2.0, "weight of the answers' loss"),
}


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


def generation_config(end: int) -> GenerationConfig:
    """Decode greedily, but never the same four tokens twice: plain greedy text of so small a model goes in circles."""
    return GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end, do_sample=False, no_repeat_ngram_size=4)


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
    queries = F.rms_norm(F.linear(y, q).view(batch, length, -1, head).float(), width, q_norm, eps).transpose(1, 2)
    keys = F.rms_norm(F.linear(y, k).view(batch, length, -1, head).float(), width, k_norm, eps).transpose(1, 2)
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
    balance = (share * probabilities.mean(dim=0)).sum() * probabilities.shape[1] / top_k  # 1 where all are used alike
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
    windows, prompts = check_rows(args, tokenizer, held_out)

    def run(ids: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            return forward(model, ids, dropout, run_layer)

    @torch.no_grad()
    def check() -> dict[str, float]:
        rows = windows.to(args.device)
        loss = F.cross_entropy(run(rows[:, :-1])[0].flatten(0, 1).float(), rows[:, 1:].flatten())
        result = {"validation_loss": round(loss.item(), 4)}
        for tokens, (prompt_rows, digits) in prompts.items():
            rows, places = prompt_rows.to(args.device), digits.to(args.device)
            right = run(rows)[0].argmax(dim=-1).gather(1, places - 1) == rows.gather(1, places)
            result[f"recall_{tokens}"] = round(right.all(dim=1).float().mean().item(), 4)
        return result

    def save(**facts: Any) -> None:
        copy = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = generation_config(tokenizer.eos_token_id)
        copy.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **facts,
            "settings": {key: value for key, value in vars(args).items() if key.replace("_", "-") in SETTINGS},
        }
        (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    ahead = 8 if args.workers else None
    loader = DataLoader(batches, batch_size=None, num_workers=args.workers, pin_memory=cuda, prefetch_factor=ahead)
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
        text_loss, answer_loss = ((losses * (classes == kind)).sum() / (classes == kind).sum() for kind in (LM, ANSWER))
        loss = text_loss + args.answer_weight * answer_loss + model.config.router_aux_loss_coef * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = step == args.steps or share >= 1
        if step % args.every == 0 or last:
            entry = {
                "step": step,
                "text_loss": round(text_loss.item(), 4),
                "answer_loss": round(answer_loss.item(), 4),
                "balance": round(balance.item(), 4),
                **check(),
            }
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
    stream = torch.from_numpy(text_stream(tokenizer, [split_books(read_books())[1]]).astype("int64"))
    prompts = {
        (tokens, seed): recall.make_recall_prompts(20, seed, tokens=tokens, tokenizer=tokenizer)
        for tokens in (200, 600, 1000)
        for seed in range(3)
    }
    inputs = tokenizer("And it came to pass in those days, that", return_tensors="pt")
    scores, samples = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        name = str(model.dtype).removeprefix("torch.")
        losses = []
        for window in stream.unfold(0, 1025, 1024):
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses.append(F.cross_entropy(logits, window[1:]).item())
        loss = sum(losses) / len(losses)
        right = {key: recall.recall_score(model, tokenizer, value).correct for key, value in prompts.items()}
        cells = [name, f"{loss:.4f}", f"{math.exp(loss):.2f}"]
        cells += [", ".join(str(right[tokens, seed]) for seed in range(3)) for tokens in (200, 600, 1000)]
        scores.append("| " + " | ".join(cells) + " |")
        samples.append(f"{name}:\n\n> {tokenizer.decode(model.generate(**inputs, max_new_tokens=80)[0])}")
        print(scores[-1], flush=True)
    config, last = model.config, record["log"][-1]
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md")
    card = CARD.format(
        parameters=model.num_parameters(),
        config=config,
        last=last,
        record=record,
        size=size,
        scores="\n".join(scores),
        samples="\n\n".join(samples),
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
        options=" ".join(f"--{key.replace('_', '-')} {value}" for key, value in record["settings"].items()),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


CARD = """# Demonstration model

A tiny Mixture-of-Experts language model that ships inside the package ({size:,} bytes with its tokenizer). It continues
English text in the manner of the King James Bible and answers questions about facts in its prompt. It exists to test
and to show the handling of expert weights; nothing that it says means anything.

| | |
| --- | --- |
| architecture | `Qwen3MoeForCausalLM`, {parameters:,} parameters in bfloat16 |
| layers | {config.num_hidden_layers} of hidden size {config.hidden_size}, {config.num_attention_heads} heads of \
{config.head_dim}, {config.num_key_value_heads} key-value heads |
| experts | {config.num_experts} in every layer, top {config.num_experts_per_tok}, intermediate size \
{config.moe_intermediate_size}, normalised routing weights |
| vocabulary | {config.vocab_size} byte-level BPE tokens, each digit one token; embeddings tied |
| text | King James Version (1611) from Debian's `bible-kjv-text`, public domain; see `scripts/data/README.md` |
| licence of the weights | the package's |
| trained | {record[date]} on one {record[machine]}: {record[steps]} steps, {record[tokens]:,} tokens, {record[seconds]} s; \
torch {record[torch]}, transformers {record[transformers]} |
| final losses | text {last[text_loss]} (one batch, with dropout), held-out text {last[validation_loss]} \
(its beginning), answers {last[answer_loss]}, load balance {last[balance]} (1 is even) |
| context | trained on up to {record[settings][length]} tokens, so worse beyond |
| decoding | `generation_config.json` asks for greedy decoding in which no run of four tokens comes twice, as plain \
greedy text soon goes in circles; the recall task switches that off |

Made from the root of the repository by the command below. Where the clock ended the training, another run ends a few
steps earlier or later and gives a model that is as good, not the same bits.

```sh
python scripts/train_demo_model.py --device cuda {options}
```

## Scores

Loss and perplexity are per token on the chapters held out of training (every twentieth), in windows of 1,024 tokens.
Recall is the task of `hf_prefetch.demo.recall`: right answers of 20 with the seeds 0, 1 and 2, by the length of the
prompt in tokens. On a CPU, {versions}.

| dtype | loss | perplexity | recall, 200 | recall, 600 | recall, 1000 |
| --- | --- | --- | --- | --- | --- |
{scores}

Continuations of "And it came to pass in those days, that":

{samples}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "hf_prefetch" / "demo" / "model", help="folder to save to")
    parser.add_argument("--evaluate", type=Path, help="score the model in this folder, write its card, train nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches; changes nothing else")
    for name, (value, text) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    args = parser.parse_args(argv)
    if args.evaluate:
        evaluate(args.evaluate)
    else:
        train(args)


if __name__ == "__main__":
    main()
