"""Requests at random, made from the server's own openapi.json: none makes it fail, and answers are as documented."""

import json

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

HI = [{"role": "user", "content": "Hi 日本"}]
PLAIN = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/generate": {"text": "a"},
}
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_in_the_schema_makes_the_server_fail(live, mode):
    schema = schemathesis.openapi.from_url(f"{live.base}/openapi.json").exclude(path_regex="profile")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:
        check_operation(operation, mode)
    live.wait_until(live.is_idle)


def check_operation(operation, mode):
    """Most bodies would be refused for one of their fields; those with a `keep` have but one that is at random."""

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), keep=st.none() | st.integers(0, 1000))
    @hypothesis.settings(
        max_examples=16 if operation.body else 2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def check(case, keep):
        plain = PLAIN.get(operation.path)
        if plain and isinstance(case.body, dict):
            if case.body and keep is not None:
                name = sorted(case.body)[keep % len(case.body)]
                case.body = plain | {name: case.body[name]}
            is_response = operation.path == "/v1/responses"
            lengths = ("max_output_tokens",) if is_response else ("max_tokens", "max_completion_tokens", "min_tokens")
            for name in lengths:  # what is asked for may be large
                if isinstance(case.body.get(name, 0), int):
                    case.body[name] = 2
        answer = case.call(timeout=60)
        assert answer.status_code < 500, (operation.label, case.body, answer.text)
        case.validate_response(answer, checks=CONFORMANCE)
        if answer.status_code >= 400:
            assert json.loads(answer.text)["error"]["message"]

    if mode is GenerationMode.POSITIVE or operation.body:
        check()
