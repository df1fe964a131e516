"""Distils a small draft model from a model that edgert runs, for speculative decoding with it.

python samples/distill_draft.py MODEL.gguf [--out draft.gguf] [--minutes 30] [--rows chats.jsonl] [--start draft.gguf]
                                           [--qat]

Needs torch (pip install 'edgert[distill]'). The target writes chats with itself for a third of the time; then a small
Llama of the same vocabulary, or the float draft that --start names, learns the target's probabilities of each token of
the answers. Without a GPU edgert writes, and tells the probabilities; with one transformers does both, which reads the
same file. Rows that are there already (--rows) are used and more are added to them: with --only write and --only learn
several processes share one file, and who learns takes in what is added meanwhile.
What is printed at the end: how many guesses in a row the target would accept, in the first greedy answers of the file,
from which nothing is learned. `edgert quantize draft.gguf` makes it smaller, `-md` takes it. With --qat the draft
learns with its weights rounded as Q4_0 keeps them, of which `edgert quantize --type q4_0 --embedding-type q4_0` then
changes none.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor, nn
from torch.nn import functional

import edgert

OPENERS = (
    *("Write", "Explain", "Describe", "Tell", "List", "How", "What", "Why", "Who", "Can", "I"),
    *("Give", "Summarize", "Translate", "Compare", "Is", "My"),
)
HEATS = 0.0, 0.0, 0.3, 0.8  # temperatures of the answers
Teacher = Callable[[Tensor], Tensor]  # int64 (rows, tokens) -> the target's logits
WIDTH, LAYERS, HEADS, HEADS_KV, HEAD, HIDDEN = 256, 6, 4, 2, 64, 768
LONGEST = 384  # tokens of a row
JOINED = 5  # rows that are read one after another in every fourth step, so that far places are learned too
AT_ONCE, ROOM = 1024, 25 << 20  # chats that a GPU writes at most, and bytes for each
MIN_P = 0.02  # questions leave out what is less likely than this share of the likeliest
BLOCK = 32  # weights of a block of Q4_0
HELD_OUT = 100  # rows


@dataclass
class Row:
    """A chat: ids, of which the first are the prompt's, and the temperature of the answer."""

    ids: list[int]
    n_prompt: int
    heat: float


def on_grid(weight: Tensor) -> Tensor:
    """What Q4_0 keeps of a weight; gradients pass as if it had not been rounded."""
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    lowest, highest = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    extreme = torch.where(-lowest > highest, lowest, highest)
    steps = (blocks * torch.where(extreme == 0, 0, -8 / extreme) + 8.5).floor().clamp(0, 15) - 8
    kept = (steps * (extreme / -8).half()).flatten(-2)
    return kept + (weight - weight.detach())


class Linear(nn.Linear):
    """A product without bias, whose weight is rounded first where `qat` is set."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)
        self.qat = False

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, on_grid(self.weight) if self.qat else self.weight)


class Block(nn.Module):
    """A layer of Llama; tensors carry GGUF's names."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.attn_q, self.attn_output = Linear(WIDTH, HEADS * HEAD), Linear(HEADS * HEAD, WIDTH)
        self.attn_k, self.attn_v = (Linear(WIDTH, HEADS_KV * HEAD) for _ in range(2))
        self.ffn_gate, self.ffn_up = (Linear(WIDTH, HIDDEN) for _ in range(2))
        self.ffn_down = Linear(HIDDEN, WIDTH)

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
    """A small Llama. With `qat` it sees its matrices as Q4_0 keeps them."""

    def __init__(self, n_vocab: int, qat: bool = False) -> None:
        super().__init__()
        self.qat = qat
        self.token_embd = nn.Embedding(n_vocab, WIDTH)
        self.blk = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output_norm = nn.RMSNorm(WIDTH, 1e-5)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        for part in self.modules():
            if isinstance(part, Linear):
                part.qat = qat

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        """int64 (rows, tokens) and bool (rows, tokens) -> logits (places that are real, n_vocab)"""
        powers = torch.arange(0, HEAD, 2, device=ids.device) / HEAD
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 100_000**powers
        table = on_grid(self.token_embd.weight) if self.qat else self.token_embd.weight
        x = functional.embedding(ids, table)
        for block in self.blk:
            x = block(x, angles.cos(), angles.sin())
        return self.output_norm(x[real]) @ table.T

    def start_from(self, path: Path) -> None:
        """Takes the weights of a draft of the same shape."""
        tensors = {tensor.name: tensor for tensor in GGUFReader(str(path)).tensors}
        state = {name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for name, t in tensors.items()}
        self.load_state_dict({name: state[name].reshape(own.shape) for name, own in self.state_dict().items()})


def chats_by_edgert(model: edgert.Model) -> list[Row]:
    """Four chats, whose answers share the engine's steps."""
    begun = []
    for heat in HEATS:
        opener = random.choice(OPENERS)
        rest = model.generate(opener, max_tokens=20, temperature=1.0, stop=["\n", "?"]).text
        messages = [{"role": "user", "content": opener + rest}]
        prompt = model.render(messages)
        room = max(8, LONGEST - len(prompt))
        begun.append((prompt, heat, model.chat(messages, True, temperature=heat, max_tokens=min(room, 160))))
    return [Row((prompt + chat.reply().tokens)[:LONGEST], len(prompt), heat) for prompt, heat, chat in begun]


def chats_on_gpu(model: edgert.Model, target: nn.Module) -> list[Row]:
    """AT_ONCE chats, or as many as there is memory for; questions too are the target's, half of them in full."""

    def rendered(text: str) -> list[int]:
        return model.render([{"role": "user", "content": text}])

    one, other = rendered("A")[::-1], rendered("B")[::-1]
    after = next(i for i in range(len(one)) if one[i] != other[i])  # tokens that follow a question
    target.set_attn_implementation("grouped")
    torch.cuda.empty_cache()
    count = max(1, min(AT_ONCE, torch.cuda.mem_get_info()[0] // ROOM))
    prompts = [rendered(opener) for opener in (*OPENERS, *[""] * len(OPENERS))]
    heads = random.choices(prompts, k=count)
    ends = set(model.tokenizer.end_ids)
    questions = continued(target, [head[:-after] for head in heads], [1.0] * count, 48, ends, MIN_P)
    asked = []
    for head, question in zip(heads, questions, strict=True):
        words = question[:-1] if question and question[-1] in ends else question
        asked.append([*head[:-after], *words, *head[-after:]])
    heats = [random.choice(HEATS) for _ in asked]
    answers = continued(target, asked, heats, LONGEST - max(map(len, asked)), ends)
    target.set_attn_implementation("sdpa")
    return [Row(a + b, len(a), heat) for a, b, heat in zip(asked, answers, heats, strict=True)]


@torch.no_grad()
def continued(
    target: nn.Module,
    prompts: list[list[int]],
    heats: Sequence[float],
    most: int,
    ends: set[int],
    min_p: float = 0.0,
) -> list[list[int]]:
    """What the target says after each prompt, up to `most` tokens or one of `ends`, which is the last then."""
    device = next(target.parameters()).device
    width = max(map(len, prompts))
    fresh = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[int(width - len(prompt) <= i) for i in range(width)] for prompt in prompts], device=device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cold = torch.tensor([1 / max(heat, 0.01) for heat in heats], device=device)[:, None]
    last, cache, steps = torch.tensor(sorted(ends), device=device), None, []
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(most):
        found = target(
            fresh,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = found.past_key_values
        logits = found.logits[:, -1].float() * cold
        if min_p:
            logits[logits < logits.amax(-1, keepdim=True) + math.log(min_p)] = -torch.inf
        logits -= torch.empty_like(logits).exponential_().log_()  # the largest is now a sample
        fresh = logits.argmax(-1, keepdim=True)
        steps.append(fresh)
        running &= ~torch.isin(fresh[:, 0], last)
        if step % 32 == 31 and not running.any():
            break
        mask = torch.cat([mask, torch.ones_like(fresh)], 1)
        places = places[:, -1:] + 1
    rows = torch.cat(steps, 1).tolist()
    stops = (next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows)
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Attention of transformers' signature that reads each key once for all heads that share it, unlike SDPA."""
    rows, heads, tokens, size = query.shape
    if mask is None:
        mask = query.new_ones(tokens, key.shape[2], dtype=torch.bool).tril(key.shape[2] - tokens)
    grouped = query.reshape(rows, key.shape[1], -1, size)
    scores = (grouped @ key.transpose(-1, -2)).view(rows, heads, tokens, -1) * scaling
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1, torch.float32).to(value.dtype)
    mixed = weights.view(rows, key.shape[1], -1, key.shape[2]) @ value
    return mixed.view(rows, heads, tokens, size).transpose(1, 2), None


class Rows:
    """Chats, and the file that keeps them, to which other processes may add; `held_out` are its first greedy ones."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._read = path, 0
        self.learned: list[Row] = []
        self.held_out: list[Row] = []
        self.refresh()

    def refresh(self) -> None:
        """Takes in what has been added to the file."""
        if self.path and self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]  # the last line may not be all there yet
            self._read += len(text)
            self._take([Row(**json.loads(line)) for line in text.splitlines()])

    def add(self, rows: list[Row]) -> None:
        if not self.path:
            self._take(rows)
            return
        text = "".join(f"{json.dumps(asdict(row))}\n" for row in rows)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, text.encode())  # in one piece, whoever else writes
        finally:
            os.close(file)
        self.refresh()

    def _take(self, rows: list[Row]) -> None:
        for row in rows:
            few = len(self.held_out) < min(HELD_OUT, 1 + (len(self.learned) + len(self.held_out)) // 10)
            (self.held_out if row.heat == 0 and few else self.learned).append(row)

    def __len__(self) -> int:
        return len(self.learned)


def read_target(path: Path, device: str) -> nn.Module:
    """The target in transformers."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)
    options = {"gguf_file": path.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # without it newer versions keep the weights packed, which is slower
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).to(device)


def batch_of(lines: Sequence[Sequence[Row]], device: str) -> tuple[Tensor, Tensor]:
    """Ids of each line's rows, filled up with zeros, and the places after which a token of an answer comes."""
    ids = [torch.tensor([token for row in line for token in row.ids]) for line in lines]
    real = [
        torch.tensor([row.n_prompt - 1 <= i < len(row.ids) - 1 for row in line for i in range(len(row.ids))])
        for line in lines
    ]
    filled = nn.utils.rnn.pad_sequence
    return filled(ids, batch_first=True).to(device), filled(real, batch_first=True).to(device)


def learn(draft: Draft, teacher: Teacher, rows: Rows, minutes: float, rate: float, device: str) -> None:
    """Moves the draft's probabilities towards the target's: KL(target || draft) over the whole vocabulary."""
    optimiser = torch.optim.AdamW(draft.parameters(), rate, (0.9, 0.98), weight_decay=0.05)
    began, step, size = time.monotonic(), 0, 2 if device == "cpu" else 48
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        picked = random.sample(rows.learned, min(size, len(rows)))
        count = max(1, len(picked) // JOINED) if step % 4 == 3 else len(picked)
        ids, real = batch_of([picked[i::count][:JOINED] for i in range(count)], device)
        with torch.no_grad():
            wanted = teacher(ids)[real].float().log_softmax(-1)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            guessed = draft(ids, real)
        loss = functional.kl_div(guessed.float().log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 200) * (0.01 + 0.99 * math.cos(math.pi / 2 * share) ** 2)
        optimiser.step()
        if step % 100 == 0:
            rows.refresh()
            print(f"step {step:6}  {100 * share:3.0f} %  KL {loss.item():.3f}  {len(rows):,} rows", flush=True)
        step += 1


@torch.no_grad()
def accepted(draft: Draft, teacher: Teacher, rows: list[Row], device: str) -> Iterator[str]:
    """Guesses of some lengths: how many in a row are the target's likeliest ones, on average, in these answers."""
    hits = []
    for row in rows:
        ids, real = batch_of([[row]], device)
        hits.append((draft(ids, real).argmax(-1) == teacher(ids)[real].argmax(-1)).tolist())
    for length in (4, 6, 8):
        rounds = right = 0
        for same in hits:
            at = 0
            while at < len(same):
                part = same[at : at + length]
                run = next((i for i, hit in enumerate(part) if not hit), len(part))
                rounds, right, at = rounds + 1, right + run, at + run + 1
        yield f"guesses of {length}: {right / max(rounds, 1):.2f} accepted"


def save(draft: Draft, target: Path, out: Path) -> None:
    """Writes the draft as a GGUF file with the target's vocabulary: bf16, or float32 where that alone keeps a grid."""
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
        data = tensor.float().cpu()
        if data.dim() == 1 or draft.qat:
            writer.add_tensor(name, (data if data.dim() == 1 else on_grid(data)).numpy())
        else:
            bits = data.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(name, bits, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("draft.gguf"))
    parser.add_argument("--rows", type=Path, help="chats, one JSON object a line")
    parser.add_argument("--start", type=Path, help="a float draft of the same shape, to go on with")
    parser.add_argument("--qat", action="store_true", help="learn with weights rounded as Q4_0 keeps them")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", choices=("write", "learn"), help="write chats, or learn from those that are there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.only and not args.rows:
        parser.error("--only needs --rows: the file that is shared")
    torch.seed()  # several processes shall not draw the same
    rows, device = Rows(args.rows), args.device
    share = {"write": 1.0, "learn": 0.0, None: 1 / 3}[args.only]
    with edgert.load(args.model, n_ctx=2048, backend="cpu") as model:
        target = None if device == "cpu" else read_target(args.model, device)
        until = time.monotonic() + 60 * args.minutes * share
        while args.only != "learn" and (time.monotonic() < until or len(rows) < 8):
            rows.add(chats_by_edgert(model) if target is None else chats_on_gpu(model, target))
            print(f"{len(rows):,} rows", flush=True)
        if args.only == "write":
            return

        def teacher(ids: Tensor) -> Tensor:
            if target is not None:
                return target(ids).logits
            return torch.stack([torch.from_numpy(model.logits(row.tolist())) for row in ids])

        while len(rows) < 8:
            time.sleep(1)
            rows.refresh()
        print(f"{sum(len(row.ids) for row in rows.learned):,} tokens in {len(rows):,} rows", flush=True)
        draft = Draft(model.n_vocab, args.qat).to(device)
        if args.start:
            draft.start_from(args.start)
            print("before:", *accepted(draft, teacher, rows.held_out, device), sep="\n", flush=True)
        learn(draft, teacher, rows, args.minutes * (1 - share), 5e-4 if args.start else 2e-3, device)
        save(draft, args.model, args.out)
        print(f"wrote {args.out}: {args.out.stat().st_size / 1e6:.0f} MB", flush=True)
        print("after:", *accepted(draft, teacher, rows.held_out, device), sep="\n", flush=True)


if __name__ == "__main__":
    main()
