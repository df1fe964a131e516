"""The document of the routes is true, and nothing that it allows makes the server fail."""

from __future__ import annotations

import pytest
from fake import fake_model, hashed
from harness import Server, line_template, serving

from edgert.model import Model
from edgert.server.app import routes
from edgert.server.openapi import document
from edgert.server.registry import Spec


def test_the_document_is_served(server: Server) -> None:
    status, found = server.get("/openapi.json")
    assert status == 200
    assert found["openapi"].startswith("3.1")
    known = {(route.path.replace(":path", ""), method) for route in routes() for method in route.methods or ()}
    told = {
        (path, method.upper()) for path, methods in found["paths"].items() for method in methods.keys() - {"parameters"}
    }
    assert told <= known
    twins = {"/chat/completions", "/chat/completions/input_tokens", "/completions", "/models", "/v1/health"}
    page = {"/", "/page/{name}", "/favicon.ico", "/openapi.json"}
    assert {path for path, _ in known - told} <= twins | page | {path for path, _ in told}  # and HEAD
    fields = found["components"]["schemas"]["ChatRequest"]["properties"]
    wanted = (
        "messages model temperature top_p max_tokens max_completion_tokens stop seed n stream stream_options logprobs"
    )
    wanted += " top_logprobs logit_bias tools tool_choice parallel_tool_calls response_format presence_penalty user"
    wanted += " frequency_penalty reasoning_effort top_k min_p repeat_penalty grammar cache_prompt chat_template_kwargs"
    wanted += " return_progress timings_per_token keep_alive ignore_eos"
    assert set(wanted.split()) <= set(fields)


@pytest.mark.slow
def test_schemathesis_finds_no_failure() -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    def load(*_: object, **__: object) -> Model:
        model = fake_model(hashed, n_ctx=256)
        model.template = line_template("\n")
        return model

    with serving([Spec("fake", "fake")], load, queue=1000) as server:
        schema = schemathesis.openapi.from_dict(document())
        tried, statuses = 0, set()
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(
                max_examples=40,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def check(case: object) -> None:
                nonlocal tried
                answer = case.call(base_url=server.url)  # type: ignore[attr-defined]
                tried += 1
                statuses.add(answer.status_code)
                assert answer.status_code < 500 or answer.status_code == 501, answer.text[:500]

            check()
        assert tried > 300
        assert {200, 400} <= statuses
        assert server.get("/health")[0] == 200
