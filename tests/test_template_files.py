"""Chat templates of real models, as llama.cpp's sources have them, rendered as Hugging Face renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_template import text, transformers_text

from edgert.errors import RequestError
from edgert.template import ChatTemplate
from edgert.template.fallback import FAMILIES

pytest.importorskip("transformers")

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is the weather in Zürich?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
NEXT = {"role": "user", "content": "And <b>tomorrow</b>?"}
THOUGHT = ANSWER | {"reasoning_content": "Let me see."}
ARGUMENTS = {"city": "Zürich", "days": 2, "flags": {"a": [1, True, None]}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"t": 3}'}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "How many"},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
    }
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "user": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([USER, ANSWER, NEXT], None),
    "system and turns": ([SYSTEM, USER, ANSWER, NEXT], None),
    "thoughts": ([USER, THOUGHT, NEXT], None),
    "tools": ([USER], TOOLS),
    "system and tools": ([SYSTEM, USER], TOOLS),
    "call": ([USER, CALL], TOOLS),
    "result": ([USER, CALL, RESULT], TOOLS),
    "call without content": ([USER, CALL | {"content": None}, RESULT], TOOLS),
    "result and turns": ([SYSTEM, USER, CALL, RESULT, ANSWER, NEXT], TOOLS),
}
# Where transformers fails and edgert renders, and why.
FOR_TOOLS_ALONE = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
)  # they loop over tools that may be None
ARGUMENTS_AS_TEXT = ("meetkai-functionary-medium-v3.2", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B")


def as_openai_sends_them(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of calls are JSON text there."""
    copies = json.loads(json.dumps(messages))
    for message in copies:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return copies


def wanted_text(source: str, name: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str | None:
    """What transformers renders; where it cannot, what it renders when told in the way that the template asks for."""
    kwargs = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    variants = [(messages, tools)]
    if any(message["content"] is None for message in messages):
        variants.append(([message | {"content": message["content"] or ""} for message in messages], tools))
    if name in ARGUMENTS_AS_TEXT:
        variants += [(as_openai_sends_them(given), tools) for given, _ in variants]
    if name in FOR_TOOLS_ALONE and not tools:
        variants.append((messages, []))
    for given, given_tools in variants:
        try:
            rendered = transformers_text(source, given, given_tools, **kwargs)
        except Exception:
            continue
        if given is messages and ("None" in rendered or "\nnull<" in rendered) and len(variants) > 1:
            continue  # it prints Python's or JSON's word for no content
        return rendered
    return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_files_render_as_in_transformers(llama_cpp_source: Path, conversation: str) -> None:
    messages, tools = CONVERSATIONS[conversation]
    paths = sorted((llama_cpp_source / "models" / "templates").glob("*.jinja"))
    assert len(paths) > 50
    rendered = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, bos="<s>", eos="</s>")
        for prompt in (True, False):
            wanted = wanted_text(source, path.stem, messages, tools, prompt)
            if wanted is None:
                with pytest.raises(RequestError):
                    template.render(messages, tools=tools, add_generation_prompt=prompt)
                continue
            ours = text(template, as_openai_sends_them(messages), tools=tools, add_generation_prompt=prompt)
            assert ours == wanted, path.name
            rendered += 1
    assert rendered > 1.8 * len(paths)


# family of fallback.FAMILIES -> a file of it, and what that puts behind the prompt against thinking
LIKE_FILES = {
    "deepseek": ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<think>\n</think>"),
    "granite": ("ibm-granite-granite-4.0", ""),
    "mistral-v7": ("Mistral-Small-3.2-24B-Instruct-2506", ""),
    "chatml": ("Qwen3-Coder", ""),
    "phi3": ("microsoft-Phi-3.5-mini-instruct", ""),
}


@pytest.mark.parametrize("family", LIKE_FILES)
def test_fallbacks_say_what_files_say(llama_cpp_source: Path, family: str) -> None:
    name, end = LIKE_FILES[family]
    source = (llama_cpp_source / "models" / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    messages = CONVERSATIONS["system and turns"][0]
    wanted = wanted_text(source, name, messages, None, True)
    assert wanted is not None
    fallback = ChatTemplate(FAMILIES[family][1], bos="<s>", eos="</s>")
    assert text(fallback, messages) == wanted.removesuffix(end)
