"""`edgert tokenize`: the tokens of a text."""

from __future__ import annotations

import json
import sys

import click

from edgert import store
from edgert.cli.flags import flag, json_flag
from edgert.cli.loading import model_path
from edgert.cli.text import TEXT, decoded
from edgert.cli.verb import verb


@verb()
@flag("-m", "--model", metavar="MODEL", help="A model, or a vocabulary-only GGUF file; without it, smollm2.")
@click.option("-p", "--prompt", type=TEXT, help="The text; without it, standard input is read.")
@click.option(
    "--no-special",
    is_flag=True,
    help="Put no begin token first, and leave names of control tokens in the text what they are: text.",
)
@json_flag
def command(model: str | None, prompt: str | None, no_special: bool, as_json: bool) -> None:
    """Prints the token ids of a text, one line.

    As llama-tokenize does, the begin token comes first where the model wants one, and names of control tokens
    such as <|im_end|> become these tokens; --no-special turns both off, and that is how edgert treats what
    users type. --json adds the text of each token, and its bytes where they are not UTF-8 alone.
    """
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.tokenizer import Tokenizer

    with GGUFFile.open(model_path(model)) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = decoded(sys.stdin.buffer.read(), "Standard input") if prompt is None else prompt
    ids = tokenizer.encode(text, add_special=not no_special, parse_special=not no_special)
    if not as_json:
        click.echo(" ".join(map(str, ids)))
        return
    tokens = []
    for token in ids:
        piece = tokenizer.piece(token)
        try:
            tokens.append({"id": token, "piece": piece.decode()})
        except UnicodeDecodeError:
            tokens.append({"id": token, "piece": list(piece)})
    facts = {"model": model or store.DEFAULT, "n_tokens": len(ids), "tokens": tokens}
    click.echo(json.dumps(facts, ensure_ascii=False))
