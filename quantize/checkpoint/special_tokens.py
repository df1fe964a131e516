"""Special ids, what is put around a text, and chat templates, from the files that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgert.quantize.checkpoint.config import load_json
from edgert.quantize.gguf_value import Value

# transformers' name -> GGUF's (the spelling of the third is GGUF's own)
_KINDS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
_END_OF_MESSAGE = ("<|eom_id|>",)
# Of several tokens that end an answer, those that end a turn.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<turn|>", "<|endofturn|>")


def special_keys(
    folder: Path,
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    settings: dict[str, Any],
    ids: dict[str, int],
    n_vocab: int,
    notices: list[str],
) -> dict[str, Value]:
    """Keys of special tokens and chat templates.

    config:     config.json;  tokenizer: tokenizer.json;  settings: tokenizer_config.json
    ids:        text -> id of all tokens
    """
    named = _named_ids(config, {**load_json(folder / "special_tokens_map.json"), **settings}, ids)
    for kind, id in list(named.items()):
        if not 0 <= id < n_vocab:
            notices.append(f"the {kind} token has the id {id}, beyond the {n_vocab:,} tokens, and is left out")
            del named[kind]
    generation = load_json(folder / "generation_config.json")
    named |= _further_ends(named, generation.get("eos_token_id", config.get("eos_token_id")), ids, n_vocab)
    around = _put_around(tokenizer, settings, named, ids)
    if (tokenizer.get("model") or {}).get("type") == "WordPiece":
        around = {}  # runtimes put the first and the separator around a text whatever the file says
        if "cls" in named:
            named["bos"] = named["cls"]
    keys = {f"tokenizer.ggml.{_KINDS.get(kind, kind)}_token_id": Value.u32(id) for kind, id in named.items()}
    for kind, adds in around.items():
        keys[f"tokenizer.ggml.add_{kind}_token"] = Value.boolean(adds)
    return keys | _templates(folder, settings)


def _named_ids(config: dict[str, Any], settings: dict[str, Any], ids: dict[str, int]) -> dict[str, int]:
    """By the tokenizer's own settings, else by config.json."""
    named = {}
    for kind in _KINDS:
        entry = settings.get(f"{kind}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str) and text in ids:
            named[kind] = ids[text]
        else:
            id = config.get(f"{kind}_token_id")
            id = id[0] if isinstance(id, list) and id else id
            if type(id) is int and id >= 0:  # -1 and null mean none
                named[kind] = id
    return named


def _further_ends(named: dict[str, int], ends: Any, ids: dict[str, int], n_vocab: int) -> dict[str, int]:
    """GGUF names one token for the end of a text, one for a turn's and one for a message's."""
    known = {named.get("eos"), named.get("bos")}  # a config's untouched default may call the begin an end
    ends = ends if isinstance(ends, list) else [ends]
    others = [id for id in ends if type(id) is int and 0 <= id < n_vocab and id not in known]
    messages = {ids.get(text) for text in _END_OF_MESSAGE}
    turns = {ids.get(text) for text in _END_OF_TURN}
    found = {}
    if of_message := [id for id in others if id in messages]:
        found["eom"] = of_message[0]
    if of_turn := sorted((id for id in others if id not in messages), key=lambda id: id not in turns):
        found["eot" if "eos" in named else "eos"] = of_turn[0]
    return found


def _put_around(
    tokenizer: dict[str, Any], settings: dict[str, Any], named: dict[str, int], ids: dict[str, int]
) -> dict[str, bool]:
    """Whether the begin and end tokens are put around a text: by the post-processor, else by the settings."""
    adds: dict[str, bool] = {}
    processor = tokenizer.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "ByteLevel":
            adds = {"bos": False, "eos": False} | adds
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            adds = {"bos": True, "eos": True}
        if step.get("type") == "TemplateProcessing":
            parts = [part.get("SpecialToken", {}).get("id") for part in step.get("single", [])]  # None: the text
            if None in parts:
                text = parts.index(None)
                adds["bos"] = named.get("bos") in {ids.get(part) for part in parts[:text]}
                adds["eos"] = named.get("eos") in {ids.get(part) for part in parts[text + 1 :]}
    for kind in ("bos", "eos"):
        setting = settings.get(f"add_{kind}_token")
        if isinstance(setting, bool):
            adds.setdefault(kind, setting)
    if tokenizer and not processor:  # nothing is put around, whatever a runtime's own habit
        adds.setdefault("bos", False)
    return {kind: adds[kind] for kind in ("bos", "eos") if kind in adds and (kind in named or not adds[kind])}


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, Value]:
    """The default chat template, and others by name. A file of its own wins, as in transformers."""
    templates: dict[str, str] = {}
    stored = settings.get("chat_template")
    if stored is None:
        stored = load_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    keys = {}
    if others := sorted(set(templates) - {"default"}):
        keys["tokenizer.chat_templates"] = Value.strings(others)
        keys |= {f"tokenizer.chat_template.{name}": Value.string(templates[name]) for name in others}
    if "default" in templates:
        keys["tokenizer.chat_template"] = Value.string(templates["default"])
    return keys


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return file.read()
