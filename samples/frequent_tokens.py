"""Notes in a draft's file which tokens are frequent, so that edgert computes the logits of those alone when it guesses.

    python samples/frequent_tokens.py DRAFT.gguf OUT.gguf --chats CHATS.jsonl [--keep 16384]

A draft's output matrix is most of its work. CHATS has a JSON object in each line, whose "messages" are OpenAI's;
what the assistant says is counted. Replies stay the same: only guesses change.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.source import read_metadata
from edgert.speculation.loading import FREQUENT
from edgert.tokenizer import Tokenizer


def frequent(tokenizer: Tokenizer, n_vocab: int, chats: list[Path], keep: int) -> np.ndarray:
    """int32 (keep or fewer,): the most frequent tokens first; those that end a reply come before all."""
    counts = np.zeros(n_vocab, np.int64)
    for path in chats:
        for line in path.read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["messages"]:
                if message["role"] == "assistant":
                    np.add.at(counts, tokenizer.encode(message["content"]), 1)
    counts[list(tokenizer.end_ids)] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")[:keep]
    return order[counts[order] > 0].astype(np.int32)


@click.command(help=__doc__)
@click.argument("draft", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--chats", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--keep", default=16384, show_default=True)
def main(draft: Path, out: Path, chats: tuple[Path, ...], keep: int) -> None:
    with GGUFFile.open(draft) as file:
        tokenizer = Tokenizer.from_gguf(file)
        found = frequent(tokenizer, len(file.metadata.strings("tokenizer.ggml.tokens")), list(chats), keep)
        metadata = read_metadata(file) | {FREQUENT: Value.array(found)}
        plans = [(name, tensor.shape, tensor.format) for name, tensor in file.tensors.items()]
        with Writer(out, metadata, plans) as writer:
            for name, tensor in file.tensors.items():
                writer.write(name, np.array(tensor.data))
    click.echo(f"{out}: {len(found)} frequent tokens")


if __name__ == "__main__":
    main()
