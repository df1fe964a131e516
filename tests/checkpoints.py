"""Tiny random checkpoints in Hugging Face's format, made by transformers, with real small tokenizers.

Sizes are odd on purpose (no multiple of 256, heads in groups, head_dim that is not n_embd / n_head), norms differ
from 1 and biases from 0, so that what a conversion forgets changes the logits.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_configs import CONFIGS, MIXTURES, NORMS, SEEING, SIZES

CORPUS = """
The lighthouse keeper counted the ships that passed before the storm, and wrote each name in a book. In the morning
the sea was calm again, and only one of them had come back to the harbour. She asked the captain what he had seen;
he said: "Nothing but water, and a light that went out at 3:45." Then they counted 12 crates, 340 barrels and 1 dog.
def count(ships): return sum(1 for ship in ships if ship.name)  # what the keeper did, and what the others did not
I'll say that we've seen it, they're sure it's there; you'd think he'd know, but I'm not the one who can't tell.
"""
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def make_model(name: str, tied: bool = False, seed: int = 1, **changes: Any) -> Any:
    """A random transformers model of CONFIGS, MIXTURES or SEEING in float32, whose logits are of the order of 1.

    changes:  other values of the config
    """
    torch = pytest.importorskip("torch", reason="transformers makes the checkpoints: pip install torch")
    transformers = pytest.importorskip("transformers", reason="it makes the checkpoints")
    class_name, options = (CONFIGS | MIXTURES | SEEING)[name]
    model_class = getattr(transformers, class_name)
    settings = {**SIZES, "tie_word_embeddings": tied, "attn_implementation": "eager", **options, **changes}
    if vision := settings.pop("vision_config", None):
        settings = {"text_config": settings, "vision_config": vision, "tie_word_embeddings": tied}
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(NORMS):
                parameter += torch.randn_like(parameter) * 0.2
            elif key.endswith("o_proj.bias") and name not in MIXTURES:
                parameter.zero_()  # edgert has none there; llama checkpoints made from Qwen have zeros
            elif key.endswith(("bias", "sinks")):
                parameter += torch.randn_like(parameter) * 0.5
            else:
                n_inputs = parameter.shape[-2 if name == "gpt-oss" and "experts" in key else -1]
                parameter.normal_(0, 1.5 / n_inputs**0.5)
            if name.startswith("gemma4") and key.endswith("q_norm.weight"):
                parameter *= 0.3  # there attention has no other scale
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.fill_(0.5 + torch.rand(()))
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model


def logits_of(model: Any, tokens: list[int]) -> Any:
    """transformers' logits, float32 (n, n_vocab): the answer that it gives twice, on one thread.

    A judge must agree with itself: torch's logits were once off by 1e-4 at late positions, for a reason not found.
    """
    import torch

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    answers: list[np.ndarray] = []
    try:
        for _ in range(5):
            with torch.no_grad():
                answers.append(model(torch.tensor(tokens)[None]).logits[0].float().numpy())
            apart = [np.abs(answers[-1] - other).max() for other in answers[:-1]]
            if min(apart, default=np.inf) <= 1e-5 * np.abs(answers[-1]).max():
                return answers[-1]
    finally:
        torch.set_num_threads(n_threads)
    raise AssertionError(f"torch computes other logits each time: they differ by {apart}")


def write_checkpoint(
    folder: Path,
    name: str = "llama",
    *,
    tied: bool = False,
    dtype: str = "float32",
    shard_size: str | None = None,
    tokenizer: str | None = None,
    **changes: Any,
) -> Any:
    """Saves a random model of CONFIGS as transformers does, and a tokenizer; returns the model.

    shard_size:  as "100KB", to save several files and an index
    tokenizer:   a name of TOKENIZERS; None: the family's habit
    """
    model = make_model(name, tied, **changes)
    import torch

    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, **({} if shard_size is None else {"max_shard_size": shard_size}))
    habit = "gemma" if name.startswith("gemma") else name.partition("-")[0]
    write_tokenizer(folder, tokenizer or (habit if habit in TOKENIZERS else "qwen2"))
    return model


TOKENIZERS = ("llama", "qwen2", "qwen3", "smollm", "gemma", "mistral")


def write_tokenizer(folder: Path, name: str, n_vocab: int = 384) -> None:
    """tokenizer.json and tokenizer_config.json of one of TOKENIZERS."""
    if name in ("gemma", "mistral"):
        document, settings = _byte_fallback(n_vocab, gemma=name == "gemma")
    else:
        document, settings = _byte_level(n_vocab, name)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), "utf-8")


def _byte_level(n_vocab: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + ("{1,3}" if name == "llama" else "")
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps = [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - 10,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens(["<tool>", "two words"])
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if name == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    elif name.startswith("qwen"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return json.loads(tokenizer.to_str()), settings


def pieces_of(n_vocab: int) -> list[tuple[str, float, int]]:
    """A SentencePiece BPE vocabulary trained on CORPUS: (piece, score, type), fewer than n_vocab."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 262 - 8, show_progress=False)
    tokenizer.train_from_iterator([CORPUS.replace("\n", " ")], trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    learned = [text for text, _ in vocab if len(text) > 1]
    letters = [text for text, _ in vocab if len(text) == 1]
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    pieces = [(text, 0.0, 2 if text == "<unk>" else 3) for text in control]
    pieces += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
    return pieces + [(text, -float(i), 1) for i, text in enumerate([*learned, *letters])]


def _byte_fallback(n_vocab: int, gemma: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    pieces = pieces_of(n_vocab)
    ids = {text: i for i, (text, _, _) in enumerate(pieces)}
    merges = []
    for text, _, kind in pieces:
        if kind == 1:
            splits = [(text[:i], text[i:]) for i in range(1, len(text))]
            merges += [list(split) for split in splits if split[0] in ids and split[1] in ids]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"<bos>": {"id": "<bos>", "ids": [ids["<bos>"]], "tokens": ["<bos>"]}}
    added = [(text, i, True) for i, (text, _, kind) in enumerate(pieces) if kind in (2, 3)]
    added += [("<tool>", len(pieces), False), ("▁▁▁▁", len(pieces) + 1, False)][: 2 if gemma else 1]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            | {"id": i, "content": content, "special": is_special, "normalized": "▁" in content}
            for content, i, is_special in added
        ],
        "normalizer": replace if gemma else {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text[0]],
            "pair": [bos, text[0], bos, text[1]],
            "special_tokens": special,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }
    settings = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
        "<end_of_turn>\n{% endfor %}",
        "tokenizer_class": "GemmaTokenizer" if gemma else "LlamaTokenizer",
    }
    return document, settings


def sentencepiece_model(n_vocab: int, add_space_prefix: bool, kind: int = 2) -> bytes:
    """The same vocabulary as tokenizer.model: a protocol buffer written by hand.

    kind:  trainer_spec.model_type, 2 for BPE
    """

    def field(number: int, data: bytes) -> bytes:
        return _varint(number << 3 | 2) + _varint(len(data)) + data

    model = b""
    for text, score, type in pieces_of(n_vocab):
        piece = field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        model += field(1, piece + (b"\x18" + _varint(type) if type != 1 else b""))
    model += field(2, b"\x18" + _varint(kind) + b"\x20" + _varint(n_vocab) + _varint(35 << 3) + b"\1")
    return model + field(3, field(1, b"identity") + b"\x18" + _varint(add_space_prefix))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
