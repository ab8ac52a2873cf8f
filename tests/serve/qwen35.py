"""A template with the behaviour of Qwen3.5's, and chats as a server renders and answers them."""

from pathlib import Path
from types import SimpleNamespace

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.api.openai.chat import Chat, Choice, chat_text
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.protocol import ChatCompletionRequest, parse
from dflash_jax.text.renderer import Renderer

TEMPLATE = (Path(__file__).parent.parent / "data" / "templates" / "qwen35_like.jinja").read_text()
THINKS = "if enable_thinking is defined else true"
SMALL = TEMPLATE.replace(THINKS, "if enable_thinking is defined else false")  # 0.8B: off by default
assert SMALL != TEMPLATE
# Qwen3.8's efforts, before what the other templates write.
EFFORTS = (
    "{%- set effort = reasoning_effort | default('xhigh') %}{%- if effort not in ('xhigh', 'medium', 'low') %}"
    "{{- raise_exception('Unexpected reasoning effort ' ~ effort) }}{%- endif %}{{- 'effort: ' ~ effort ~ '\\n' }}"
)
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # reads no lists, knows no variables
HI = [{"role": "user", "content": "Hi"}]
ASKED = "<|im_start|>user\nHi<|im_end|>\n"
OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def state_of(folder: Path, template: str = TEMPLATE, **args) -> SimpleNamespace:
    """What rendering and parsing need of a `ServerState`."""
    flags = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder", "default_chat_template_kwargs": {}}
    return SimpleNamespace(
        renderer=Renderer(folder), args=SimpleNamespace(**flags | args, chat_template=template), model="qwen"
    )


def prompt_of(state, messages=HI, **body) -> str:
    """The text of the prompt that the body of a chat becomes."""
    return chat_text(state, parse(ChatCompletionRequest, {"messages": messages, **body}))


def choice_of(state, **body) -> tuple[Choice, Job]:
    """A choice that waits for its completion, and its job."""
    request = parse(ChatCompletionRequest, {"messages": HI, **body})
    text = chat_text(state, request)
    job = Job("id", ["id"], [state.renderer.tokenizer.encode(text)], [SamplingParams()], None, False)
    return Choice(Chat(state, request, job, text)), job


def delta_of(state, text: str, finish_reason: str | None = "stop") -> CompletionDelta:
    """A delta of a completion that says a text."""
    ids = state.renderer.tokenizer.encode(text)
    return CompletionDelta(0, text, ids, None, [], finish_reason, None, None)


def answer(state, text: str, finish_reason: str = "stop", **body) -> dict:
    """The message of a completion that says a text."""
    return choice_of(state, **body)[0].whole(delta_of(state, text, finish_reason))["message"]
