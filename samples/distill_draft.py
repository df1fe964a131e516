"""Distils a small draft model from a model that edgert runs, for speculative decoding with it.

python samples/distill_draft.py MODEL.gguf [--out draft.gguf] [--minutes 30] [--rows chats.jsonl]

Needs torch (pip install 'edgert[distill]'). The target writes chats with itself in edgert for a third of the time;
then a small Llama of the same vocabulary learns the target's probabilities of each next token. Rows that are there
already (--rows) are used and more are added to them, so that writing and learning may happen on two machines. The
target's probabilities come from edgert on the CPU, or with a GPU from transformers, which reads the same file.
What is printed at the end: how many guesses in a row the target would accept. `edgert quantize draft.gguf` makes it
smaller, `-md` takes it.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor, nn
from torch.nn import functional

import edgert

OPENERS = (
    *("Write", "Explain", "Describe", "Tell", "List", "How", "What", "Why", "Who", "Can", "I"),
    *("Give", "Summarize", "Translate", "Compare", "Is", "My"),
)
Teacher = Callable[[Tensor], Tensor]  # int64 (rows, tokens) -> the target's logits
WIDTH, LAYERS, HEADS, HEADS_KV, HEAD, HIDDEN = 256, 6, 4, 2, 64, 768
LONGEST = 384  # tokens of a row


class Block(nn.Module):
    """A layer of Llama; tensors carry GGUF's names."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.attn_q, self.attn_output = nn.Linear(WIDTH, HEADS * HEAD, False), nn.Linear(HEADS * HEAD, WIDTH, False)
        self.attn_k, self.attn_v = (nn.Linear(WIDTH, HEADS_KV * HEAD, False) for _ in range(2))
        self.ffn_gate, self.ffn_up = (nn.Linear(WIDTH, HIDDEN, False) for _ in range(2))
        self.ffn_down = nn.Linear(HIDDEN, WIDTH, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attn_norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.attn_q, self.attn_k, self.attn_v)
        )  # (rows, heads, tokens, HEAD)
        mixed = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring columns turned by their angles, as GGUF's Llama does."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


class Draft(nn.Module):
    def __init__(self, n_vocab: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(n_vocab, WIDTH)
        self.blk = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output_norm = nn.RMSNorm(WIDTH, 1e-5)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 (rows, tokens) -> logits (rows, tokens, n_vocab)"""
        powers = torch.arange(0, HEAD, 2, device=ids.device) / HEAD
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 100_000**powers
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, angles.cos(), angles.sin())
        return self.output_norm(x) @ self.token_embd.weight.T


def write_rows(model: edgert.Model, rows: list[list[int]], until: float) -> None:
    """Adds rows of ids, chats that the model holds with itself, until the time is up."""
    while time.monotonic() < until or len(rows) < 8:
        chats = []
        for _ in range(4):  # four answers share the engine's steps
            opener = random.choice(OPENERS)
            rest = model.generate(opener, max_tokens=20, temperature=1.0, stop=["\n", "?"]).text
            messages = [{"role": "user", "content": opener + rest}]
            prompt = model.render(messages)
            heat = random.choice([0.0, 0.3, 0.8, 0.8])
            room = max(8, LONGEST - len(prompt))
            chats.append((prompt, model.chat(messages, True, temperature=heat, max_tokens=min(room, 160))))
        rows += [(prompt + chat.reply().tokens)[:LONGEST] for prompt, chat in chats]


def teacher_of(path: Path, model: edgert.Model, device: str) -> Teacher:
    """The target in the engine at hand."""
    if device == "cpu":
        return lambda ids: torch.stack([torch.from_numpy(model.logits(row.tolist())) for row in ids])
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).to(device)
    return lambda ids: target(ids).logits


def batch_of(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Ids filled up with zeros, and which of them are real."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
    real = torch.tensor([[i < len(row) for i in range(length)] for row in rows], device=device)
    return ids, real


def learn(draft: Draft, teacher: Teacher, rows: list[list[int]], minutes: float, device: str) -> None:
    """Moves the draft's probabilities towards the target's: KL(target || draft) over the whole vocabulary."""
    optimiser = torch.optim.AdamW(draft.parameters(), 2e-3, (0.9, 0.98), weight_decay=0.05)
    began, step, size = time.monotonic(), 0, 2 if device == "cpu" else 48
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        ids, real = batch_of(random.sample(rows, min(size, len(rows))), device)
        with torch.no_grad():
            wanted = teacher(ids)[real].float().log_softmax(-1)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            guessed = draft(ids)[real]
        loss = functional.kl_div(guessed.float().log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 200) * (0.01 + 0.99 * math.cos(math.pi / 2 * share) ** 2)
        optimiser.step()
        if step % 100 == 0:
            print(f"step {step:6}  {100 * share:3.0f} %  KL {loss.item():.3f}", flush=True)
        step += 1


@torch.no_grad()
def accepted(draft: Draft, teacher: Teacher, rows: list[list[int]], length: int, device: str) -> float:
    """Guesses of `length` tokens: how many in a row are the target's likeliest ones, on average."""
    rounds = right = 0
    for row in rows:
        ids = torch.tensor([row], device=device)
        same = (draft(ids).argmax(-1) == teacher(ids).argmax(-1))[0].tolist()
        at = 0
        while at < len(same):
            run = next((i for i, hit in enumerate(same[at : at + length]) if not hit), len(same[at : at + length]))
            rounds, right, at = rounds + 1, right + run, at + run + 1
    return right / max(rounds, 1)


def save(draft: Draft, target: Path, out: Path) -> None:
    """Writes the draft as a float GGUF file with the target's vocabulary."""
    writer = GGUFWriter(str(out), "llama")
    for name, field in GGUFReader(str(target)).fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            element = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, element)
    writer.add_name(f"Draft of {target.stem}")
    writer.add_context_length(2048)
    writer.add_vocab_size(draft.token_embd.num_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, tensor in draft.state_dict().items():
        writer.add_tensor(name, tensor.float().cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("draft.gguf"))
    parser.add_argument("--rows", type=Path, help="rows of ids, one JSON list a line")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows and args.rows.exists() else []
    with edgert.load(args.model, n_ctx=1024) as model:
        write_rows(model, rows, time.monotonic() + 20 * args.minutes)
        if args.rows:
            args.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        held_out = rows[:: max(10, len(rows) // 50)]
        rows = [row for row in rows if row not in held_out]
        print(f"{sum(map(len, rows)):,} tokens in {len(rows):,} rows", flush=True)
        draft = Draft(model.n_vocab).to(args.device)
        teacher = teacher_of(args.model, model, args.device)
        learn(draft, teacher, rows, args.minutes * 2 / 3, args.device)
        for length in (4, 6, 8):
            print(f"guesses of {length}: {accepted(draft, teacher, held_out, length, args.device):.2f} accepted")
    save(draft, args.model, args.out)
    print(f"wrote {args.out}: {args.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
