"""Complete one prompt on the command line: `python -m dflash_jax.generate --prompt "..."`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from rich.console import Console

from dflash_jax.base.acceptance import histogram_lines, of_engine
from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.llm import LLM
from dflash_jax.loading import find_models, load_llm
from dflash_jax.options.flags import CommandParser, HelpFormatter, add_engine_arguments
from dflash_jax.progress import phase

EMBEDDED_PROMPT = (
    'class Node:\n    """A node of a binary tree."""\n\n    def __init__(self, value, left=None, right=None):\n'
)
WARM_UP_TOKENS = 32  # generated before the clock runs


@dataclass(frozen=True)
class Run:
    """A finished request.

    Attributes:
        output: its last output.
        num_compiles: programs compiled while the clock ran.
    """

    output: RequestOutput
    num_compiles: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens / time from the call to the last token, prefill included."""
        seconds = self.output.metrics.finished_time
        assert seconds is not None
        return len(self.output.outputs[0].token_ids) / seconds


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="python -m dflash_jax.generate",
        description="Complete a prompt. The text is standard output; how fast it was, and how many tokens each round "
        "emitted, is standard error.",
        formatter_class=HelpFormatter,
    )
    add_engine_arguments(parser)
    parser.add_argument("--compare", action="store_true", help="decode again without the drafter, and show both speeds")
    request = parser.add_argument_group("request")
    source = request.add_mutually_exclusive_group()
    source.add_argument("--prompt", default=EMBEDDED_PROMPT, help="text to complete")
    source.add_argument("--prompt-token-ids", type=_token_ids, help="token ids to complete, as 1,2,3; prints ids")
    request.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    request.add_argument("--max-tokens", type=int, default=256, help="most tokens to emit")
    request.add_argument("--min-tokens", type=int, default=0, help="tokens to emit before the end is allowed")
    request.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    request.add_argument("--top-p", type=float, default=1.0, help="probability mass to keep")
    request.add_argument("--top-k", type=int, default=0, help="likeliest tokens to keep; 0 keeps all")
    request.add_argument("--min-p", type=float, default=0.0, help="least probability, relative to the likeliest")
    request.add_argument("--seed", type=int, help="with it, a run can be repeated")
    request.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    request.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    args = parser.parse_args(arguments)
    if args.chat and args.prompt_token_ids is not None:
        parser.error("argument --chat: not allowed with argument --prompt-token-ids")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args, console = parse_args(arguments), Console(stderr=True)
    try:
        params = sampling_params(args)  # before the models, which take long to load
        llm = load(args)
        with phase("warming up") as now:
            prompt = _prompt(args, llm)
            plain_params = replace(params, speculation=False)
            for way in (params, plain_params) if args.compare else (params,):
                if args.compare:
                    llm.compile(prompt, way, within=now.within)
                limit = min(args.max_tokens, WARM_UP_TOKENS)
                llm.generate(prompt, replace(way, max_tokens=limit, min_tokens=min(args.min_tokens, limit)))
        run = generate(llm, prompt, params, show=True, as_text=args.prompt_token_ids is None)
        plain = generate(llm, prompt, plain_params, show=False) if args.compare else None
        console.print(f"\n{summary(run, plain, block=llm.config.num_speculative_tokens + 1)}", highlight=False)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def load(args: argparse.Namespace) -> LLM:
    """Load the models of a command line.

    Raises:
        ConfigError: an option is impossible, or there is no drafter to compare with.
        CheckpointError: a model cannot be loaded.
    """
    llm = load_llm(args, find_models(args))
    if args.compare and not llm.config.num_speculative_tokens:
        raise ConfigError(f"--compare: {args.model} runs without a drafter already; give --draft-model.")
    return llm


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters of a command line.

    Raises:
        RequestError: a value is outside of its range.
    """
    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def generate(llm: LLM, prompt: Prompt, params: SamplingParams, *, show: bool, as_text: bool = True) -> Run:
    """Complete the prompt.

    Args:
        llm: the engine.
        prompt: to complete.
        params: sampling parameters.
        show: write the output to standard output as it comes.
        as_text: write text; else token ids.

    Raises:
        DFlashError: the request cannot be served, or failed.
    """
    before, shown = llm.engine.num_compiles, ""
    for output in llm.stream(prompt, params):
        completion = output.outputs[0]
        if show:
            text = completion.text if as_text else " ".join(map(str, completion.token_ids))
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if show:
        print(flush=True)
    if completion.error is not None:
        raise DFlashError(completion.error)
    return Run(output, llm.engine.num_compiles - before)


def summary(run: Run, plain: Run | None, *, block: int) -> str:
    """Speed, the ratio to plain decoding, mean acceptance length and its histogram, as lines.

    Args:
        run: the request.
        plain: the request without the drafter; None if it was not run.
        block: tokens that a round emits at most.
    """
    metrics, completion = run.output.metrics, run.output.outputs[0]
    lines = [
        f"{len(completion.token_ids)} tokens in {metrics.finished_time:.2f} s: {run.tokens_per_second:.1f} tokens/s "
        f"({completion.finish_reason})"
    ]
    if plain is not None:
        ratio = run.tokens_per_second / plain.tokens_per_second
        is_same = plain.output.outputs[0].token_ids == completion.token_ids
        lines.append(
            f"{ratio:.2f} times plain decoding, which made {'the same' if is_same else 'other'} tokens "
            f"at {plain.tokens_per_second:.1f} tokens/s"
        )
    compiled = run.num_compiles + (plain.num_compiles if plain else 0)
    if compiled:
        lines.append(f"{compiled} programs were compiled while the clock ran: do not trust the speed")
    lengths = metrics.acceptance_lengths
    if lengths:
        lines.append(f"mean acceptance length {metrics.mean_acceptance_length:.2f} tokens over {len(lengths)} rounds")
    if lengths and block > 1:
        counts = of_engine(lengths, sum(metrics.draft_lengths)).histogram or []
        lines += histogram_lines(counts + [0] * (block - len(counts)), first=1)
    return "\n".join(lines)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _prompt(args: argparse.Namespace, llm: LLM) -> Prompt:
    if args.prompt_token_ids is not None:
        return {"prompt_token_ids": args.prompt_token_ids}
    return llm.frontend.chat_prompt([{"role": "user", "content": args.prompt}]) if args.chat else args.prompt


if __name__ == "__main__":
    sys.exit(main())
