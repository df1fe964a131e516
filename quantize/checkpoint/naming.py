"""What a checkpoint calls the tensors of its text model, and what else it may hold."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families.family import Family

_PREFIXES = (
    *("bert.encoder.", "encoder.", "bert.", "roberta.encoder.", "roberta.", "model.language_model."),
    *("language_model.model.", "language_model.", "model.text_model.", "thinker.model.", "thinker."),
    *("model.", "transformer.", "gpt_neox.", ""),
)
_TABLE = "token_embd.weight"
# What a checkpoint may hold besides the weights of the text model.
_SKIPPED = (
    (r".*\.rotary_emb\.inv_freq|rotary_emb\.inv_freq", "a buffer that follows from config.json"),
    (r".*\.(self_attn|attn|attention)\.(masked_)?bias", "a mask that follows from the positions"),
    (r"((ro)?berta?\.)?(pooler|cls)\..*", "of the parts that guess words and pairs of sentences"),
    (r"((ro)?berta?\.)?embeddings\.position_ids", "a buffer that counts"),
    (
        r"((model|thinker)\.)?(vision_tower|vision_model|embed_vision|visual)\..*",
        "of the part that sees pictures",
    ),
    (r"((model|thinker)\.)?(audio_tower|embed_audio)\..*", "of the part that hears"),
    (r"(model\.)?multi_modal_projector\..*", "of the part that joins others to the text model"),
    (r"(talker|token2wav)\..*", "of the part that speaks"),
    (r"(model\.)?mtp(_\w+)?\..*", "of the part that guesses tokens ahead"),
)
_AHEAD = "of a layer that guesses tokens ahead"
_ELSEWHERE = "of another part than the text model"


class Naming:
    """GGUF names of a checkpoint's tensors, or why one is left out.

    names:  of all tensors of the checkpoint
    """

    def __init__(self, config: Config, family: Family, names: Iterable[str]) -> None:
        self._family = family
        n_layer = config.get("num_hidden_layers")
        n_ahead = config.get("num_nextn_predict_layers", 0)
        sizes = (n_layer, n_ahead)
        self._ahead = range(n_layer, n_layer + n_ahead) if all(type(size) is int for size in sizes) else range(0)
        self._text: str | None = None
        if config.is_part:
            self._text = next((prefix for name in names if (prefix := self._of_table(name)) is not None), None)

    def _of_table(self, name: str) -> str | None:
        """Under what the text model stands, by the name of its table of tokens; None for another tensor's name."""
        prefixes = (prefix for prefix in _PREFIXES if name.startswith(prefix))
        return next((p for p in prefixes if self._family.target(name.removeprefix(p), None) == _TABLE), None)

    def target(self, name: str) -> str | None:
        """The GGUF name; None for a tensor that the family does not have."""
        for prefix in _PREFIXES:
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            layer = re.fullmatch(r"(?:layers?|h)\.(\d{1,6})\.(.+)", rest)
            if layer and self._text not in (None, prefix):
                continue
            target = self._family.target(layer[2], int(layer[1])) if layer else self._family.target(rest, None)
            if target:
                return target
        return None

    def reason(self, name: str) -> str | None:
        """Why a tensor is left out; None: it is part of the text model, or no one knows what it is."""
        found = next((why for pattern, why in _SKIPPED if re.fullmatch(pattern, name)), None)
        if found:
            return found
        layer = re.search(r"\.layers?\.(\d{1,6})\.", f".{name}")
        if layer and int(layer[1]) in self._ahead:
            return _AHEAD
        outside = self._text is not None and not name.startswith(self._text)
        return _ELSEWHERE if outside and self.target(name) is None else None
