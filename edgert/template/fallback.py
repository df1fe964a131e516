"""Templates for files that lost theirs, chosen by the control tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection

CHATML = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

GEMMA = """
{{- bos_token -}}
{%- set ns = namespace(before='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set ns.before = ns.before + message['content'] | trim + '\n\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + ns.before + message['content'] | trim + '<end_of_turn>\n' }}
{%- set ns.before = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\n' }}
{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""

PHI3 = """
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>\n' }}
{%- endif -%}
"""

# name -> (control tokens that must be there, template); the first that fits is taken
FAMILIES: dict[str, tuple[frozenset[str], str]] = {
    "gemma": (frozenset({"<start_of_turn>", "<end_of_turn>"}), GEMMA),
    "llama3": (frozenset({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}), LLAMA3),
    "chatml": (frozenset({"<|im_start|>", "<|im_end|>"}), CHATML),
    "phi3": (frozenset({"<|user|>", "<|assistant|>", "<|end|>"}), PHI3),
}


def family_of(control_texts: Collection[str]) -> str | None:
    """Which family's markers a vocabulary has; None: no family's."""
    present = frozenset(control_texts)
    return next((name for name, (markers, _) in FAMILIES.items() if markers <= present), None)
