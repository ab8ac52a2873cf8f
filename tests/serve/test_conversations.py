"""Conversations with a hybrid target and its drafter, as agents have them: each turn computes what is new in it."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_jax.weights.folder import PAIRS
from tests.serve.live import Live, serving
from tests.serve.qwen35 import TEMPLATE

LONGEST = 16384  # tokens
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command in a shell, in the folder of the project.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SYSTEM = " ".join(f"Rule {i}: answer number {i * i} is never given twice." for i in range(110))
# Beside what the model says, a turn has its own question, its marks, which the pair's tokenizer takes apart, and a page
# that is not full: some 120 tokens in all.
LEAST_CACHED = 0.95
FLAGS = ("--max-num-seqs=1", "--enable-prompt-tokens-details", "--num-speculative-tokens=5", "--generation-config=vllm")
WORDS = (" self", " name", " value", " path", " data", " index", " result", " key")
KEEPS = {"enable_thinking": False, "preserve_thinking": True}  # what was said stays in the prompt as it was said


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    """Flags of the hybrid pair that ships, given a chat template: it answers in Python, whatever it is asked."""
    folder = Path(shutil.copytree(PAIRS["embedded-hybrid"], tmp_path_factory.mktemp("hybrid") / "pair"))
    for name in ("target", "draft"):
        config = json.loads((folder / name / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
        (folder / name / "config.json").write_text(json.dumps(config))
    options = json.loads((folder / "target" / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(options))
    return f"--model={folder / 'target'}", f"--draft-model={folder / 'draft'}"


def says(turn: int, tokens: int) -> dict:
    """A grammar for what the model says: words of its choice, in a call of the tool in every second turn.

    Each is one token of the pair's, so that the next turn's prompt is cut into the tokens that the model has said.
    """
    said = f"the({'|'.join(WORDS)}){{{tokens}}}[.]"
    call = rf"<tool_call>\n<function=run>\n<parameter=command>\n{said}\n</parameter>\n</function>\n</tool_call>"
    return {"structured_outputs": {"regex": said if turn % 2 else call}}


def follow_up(message: dict, turn: int) -> dict:
    """What comes after the model's message: the result of its call, or the user's next question."""
    for call in message.get("tool_calls") or ():
        return {"role": "tool", "tool_call_id": call["id"], "content": f"exit status {turn}"}
    return {"role": "user", "content": f"And number {turn}?"}


def ask(live: Live, messages: list[dict], turn: int, tokens: int, **options) -> tuple[dict, dict]:
    """The model's message and the usage."""
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "chat_template_kwargs": KEEPS}
    status, answer = live.post("/v1/chat/completions", body | says(turn, tokens) | options)
    assert status == 200, answer
    return answer["choices"][0]["message"], answer["usage"]


def converse(live: Live, turns: int, tokens: int, check) -> None:
    """Have a conversation; `check(turn, messages, message)` looks at every answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Begin."}]
    for turn in range(turns):
        message, usage = ask(live, messages, turn, tokens)
        assert bool(message.get("tool_calls")) == (turn % 2 == 0)
        assert usage["completion_tokens"] >= tokens
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn:
            assert cached >= LEAST_CACHED * usage["prompt_tokens"], (turn, cached, usage)
        check(turn, messages, message)
        messages += [message, follow_up(message, turn)]


def words(message: dict) -> str:
    """What the model chose to say."""
    calls = message.get("tool_calls")
    return json.loads(calls[0]["function"]["arguments"])["command"] if calls else message["content"]


@pytest.mark.long
def test_a_turn_computes_what_is_new_and_answers_as_if_it_had_computed_all(pair, tmp_path: Path):
    with serving(tmp_path, *FLAGS, "--max-model-len=4096", model=pair) as live:

        def check(turn, messages, message):
            assert len(set(words(message))) > 5
            if turn == 2:  # of a prompt whose state was restored and carried on twice
                again, usage = ask(live, messages, turn, 40, cache_salt="nobody else's")
                assert usage["prompt_tokens_details"]["cached_tokens"] == 0
                assert words(again) == words(message)

        converse(live, 3, 40, check)
        assert live.metric("spec_decode_num_drafts_total") > 0


@pytest.mark.long
def test_twenty_turns_of_an_agent(pair, tmp_path: Path):
    """200 tokens a turn, against a server without a prefix cache."""
    (tmp_path / "plain").mkdir()
    without = (*FLAGS, "--no-enable-prefix-caching")
    with serving(tmp_path, *FLAGS, model=pair) as live, serving(tmp_path / "plain", *without, model=pair) as plain:

        def check(turn, messages, message):
            again, usage = ask(plain, messages, turn, 200)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert words(again) == words(message)

        converse(live, 20, 200, check)
