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

LLAMA4 = """
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|header_start|>assistant<|header_end|>\n\n' }}
{%- endif -%}
"""

MISTRAL = """
{{- bos_token -}}
{%- set ns = namespace(before='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set ns.before = ns.before + message['content'] + '\n\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{ message['content'] + eos_token }}
{%- else -%}
{{ '[INST]' + ns.before + message['content'] + '[/INST]' }}
{%- set ns.before = '' -%}
{%- endif -%}
{%- endfor -%}
"""

MISTRAL7 = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
{%- elif message['role'] == 'assistant' -%}
{{ message['content'] + eos_token }}
{%- else -%}
{{ '[INST]' + message['content'] + '[/INST]' }}
{%- endif -%}
{%- endfor -%}
"""

DEEPSEEK = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}
{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- else -%}
{{ '<｜User｜>' + message['content'] }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<｜Assistant｜>' }}
{%- endif -%}
"""

GRANITE = """
{%- for message in messages -%}
{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif -%}
"""

GLM4 = """
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\n' + message['content'] }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>\n' }}
{%- endif -%}
"""

COMMAND_R = """
{{- bos_token -}}
{%- set names = {'system': 'SYSTEM', 'developer': 'SYSTEM', 'assistant': 'CHATBOT'} -%}
{%- for message in messages -%}
{{ '<|START_OF_TURN_TOKEN|><|' + names.get(message['role'], 'USER') + '_TOKEN|>' -}}
{{ message['content'] + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- endif -%}
"""

HARMONY = """
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{ '<|start|>developer<|message|># Instructions\n\n' + message['content'] + '\n\n<|end|>' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}
{%- else -%}
{{ '<|start|>user<|message|>' + message['content'] + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start|>assistant' }}
{%- endif -%}
"""

# name -> (control tokens that must be there, template); the first that fits is taken
FAMILIES: dict[str, tuple[frozenset[str], str]] = {
    "gemma": (frozenset({"<start_of_turn>", "<end_of_turn>"}), GEMMA),
    "llama3": (frozenset({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}), LLAMA3),
    "llama4": (frozenset({"<|header_start|>", "<|header_end|>", "<|eot|>"}), LLAMA4),
    "deepseek": (frozenset({"<｜User｜>", "<｜Assistant｜>"}), DEEPSEEK),
    "granite": (frozenset({"<|start_of_role|>", "<|end_of_role|>"}), GRANITE),
    "command-r": (frozenset({"<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"}), COMMAND_R),
    "mistral-v7": (frozenset({"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"}), MISTRAL7),
    "mistral": (frozenset({"[INST]", "[/INST]"}), MISTRAL),
    "gpt-oss": (frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}), HARMONY),
    "glm4": (frozenset({"[gMASK]", "<sop>", "<|user|>", "<|assistant|>"}), GLM4),
    "chatml": (frozenset({"<|im_start|>", "<|im_end|>"}), CHATML),
    "phi3": (frozenset({"<|user|>", "<|assistant|>", "<|end|>"}), PHI3),
}


def family_of(control_texts: Collection[str]) -> str | None:
    """Which family's markers a vocabulary has; None: no family's."""
    present = frozenset(control_texts)
    return next((name for name, (markers, _) in FAMILIES.items() if markers <= present), None)
