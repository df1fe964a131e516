"""Peak memory of `edgert quantize --fast` on a random sharded checkpoint: at most 3 times the largest tensor + 200 MB.

    python tests/bench/quantizer_memory.py /tmp/3b                    # makes 6.4 GB, then quantizes them
    python tests/bench/quantizer_memory.py /tmp/small --n-embd 512 --n-ff 1536 --n-layer 4 --n-head 8 --n-head-kv 2
    python tests/bench/quantizer_memory.py /tmp/small --max-memory 700MB     # calibrates, measures and compares

The largest tensor is counted in the bytes that it has in the source, bfloat16. The numbers are those of the child
process alone. A folder that holds the checkpoint already is used again.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from edgert.quantize.settings import n_bytes

DRAWN = 1 << 22  # values at a time
SHARD_BYTES = 1 << 30
ALLOWED = 200_000_000
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Shape:
    """A llama whose head is its table of tokens."""

    n_layer: int = 28
    n_embd: int = 3072
    n_ff: int = 8192
    n_head: int = 24
    n_head_kv: int = 8
    n_vocab: int = 128256

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names of Hugging Face's, and shapes."""
        n_kv = self.n_embd // self.n_head * self.n_head_kv
        found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.n_vocab, self.n_embd))]
        for i in range(self.n_layer):
            rows = {
                "self_attn.q_proj": (self.n_embd, self.n_embd),
                "self_attn.k_proj": (n_kv, self.n_embd),
                "self_attn.v_proj": (n_kv, self.n_embd),
                "self_attn.o_proj": (self.n_embd, self.n_embd),
                "mlp.gate_proj": (self.n_ff, self.n_embd),
                "mlp.up_proj": (self.n_ff, self.n_embd),
                "mlp.down_proj": (self.n_embd, self.n_ff),
                "input_layernorm": (self.n_embd,),
                "post_attention_layernorm": (self.n_embd,),
            }
            found += [(f"model.layers.{i}.{name}.weight", shape) for name, shape in rows.items()]
        return [*found, ("model.norm.weight", (self.n_embd,))]

    @property
    def largest(self) -> int:
        """Bytes in bfloat16 of the largest tensor."""
        return max(2 * int(np.prod(shape)) for _, shape in self.tensors)


def write_checkpoint(folder: Path, shape: Shape, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Shards of random bfloat16 with an index, config.json and a byte-level tokenizer; written in a stream."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shards: list[list[tuple[str, tuple[int, ...]]]] = []
    room = 0
    for name, sizes in shape.tensors:
        n_bytes = 2 * int(np.prod(sizes))
        if n_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, sizes))
        room -= n_bytes
    weight_map = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= {name: file for name, _ in tensors}
        header, end = {}, 0
        for name, sizes in tensors:
            start, end = end, end + 2 * int(np.prod(sizes))
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, sizes in tensors:
                left = int(np.prod(sizes))
                while left:
                    n = min(left, DRAWN)
                    out.write(_bfloat16(rng, n))
                    left -= n
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.n_vocab,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    _write_tokenizer(folder, shape.n_vocab)


def _bfloat16(rng: np.random.Generator, n: int) -> NDArray[np.uint16]:
    """Values of both signs in four octaves below 1/16, all bits but the exponent's upper ones random."""
    bits = rng.integers(0, 1 << 16, n, np.uint16)
    bits &= np.uint16(0x81FF)
    bits += np.uint16(120 << 7)
    return bits


def _write_tokenizer(folder: Path, n_vocab: int) -> None:
    """All bytes, one special token, then as many words of two and three bytes as make the vocabulary."""
    from make_random_model import byte_symbols

    symbols = byte_symbols()
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges = []
    special = "<|end_of_text|>"
    left = n_vocab - len(symbols) - 1
    stems = [(a, b) for a in symbols for b in symbols]
    words = [*stems, *((a + b, c) for a, b in stems for c in symbols)]
    for first, second in words[:left]:
        merges.append([first, second])
        vocab[first + second] = len(vocab) + 1
    added = {"id": len(symbols), "content": special, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3_WORDS}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), "utf-8")
    settings = {"bos_token": special, "eos_token": special, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def measure(folder: Path, out: Path, *flags: str) -> tuple[int, float]:
    """Runs `edgert quantize`; its peak of resident memory in bytes, and the seconds that it took."""
    command = [sys.executable, "-c", _CHILD, "quantize", str(folder), "-o", str(out), *flags]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1]), time.monotonic() - start


# ru_maxrss survives exec: a large parent would be counted. Linux keeps a process's own peak as VmHWM.
_CHILD = """
import re, sys
from pathlib import Path
from edgert import cli
code = cli.call(sys.argv[1:])
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
sys.exit(code)
"""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--n-layer", default=28, show_default=True)
@click.option("--n-embd", default=3072, show_default=True)
@click.option("--n-ff", default=8192, show_default=True)
@click.option("--n-head", default=24, show_default=True)
@click.option("--n-head-kv", default=8, show_default=True)
@click.option("--n-vocab", default=128256, show_default=True)
@click.option("--type", "types", default=("q4_k_m",), multiple=True, show_default=True, help="May be given again.")
@click.option("--threads", default=2, show_default=True)
@click.option("--max-memory", help="Calibrate within so much memory, instead of --fast.")
def main(folder: Path, types: tuple[str, ...], threads: int, max_memory: str | None, **sizes: int) -> None:
    shape = Shape(**sizes)
    if not (folder / "tokenizer_config.json").exists():
        start = time.monotonic()
        write_checkpoint(folder, shape)
        click.echo(f"made {folder} in {time.monotonic() - start:.0f} s")
    bound, how = 3 * shape.largest + ALLOWED, ("--fast",)
    if max_memory is not None:
        bound, how = n_bytes(max_memory), ("--max-memory", max_memory, "--tokens", "8192")
    click.echo(f"largest tensor {shape.largest / 1e6:,.0f} MB in the source; allowed {bound / 1e6:,.0f} MB")
    for name in types:
        out = folder / "out.gguf"
        peak, seconds = measure(folder, out, *how, "--type", name, "-t", str(threads))
        verdict = "within" if peak <= bound else "MORE THAN ALLOWED"
        click.echo(
            f"{name}: peak {peak / 1e6:,.0f} MB ({verdict}), {seconds:.1f} s, {out.stat().st_size / 1e6:,.0f} MB"
        )
        out.unlink()


if __name__ == "__main__":
    main()
