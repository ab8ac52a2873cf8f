"""Complete one prompt on the command line: `python -m dflash_jax.generate --prompt "..."`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from dflash_jax.config.engine import DTYPES, KV_CACHE_DTYPES
from dflash_jax.core import Prompt, RequestOutput, SamplingParams
from dflash_jax.errors import DFlashError
from dflash_jax.llm import LLM

EMBEDDED_PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n"
BAR_WIDTH = 40  # characters of the longest bar


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.generate",
        description="Complete a prompt, then print tokens/s and how many tokens each round emitted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder or Hugging Face Hub id; without it, the embedded pair is served")
    model.add_argument("--draft-model", help="the same of its DFlash drafter; without it, one token a pass")
    model.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of parameters and activations")
    model.add_argument("--kv-cache-dtype", default="auto", choices=["auto", *KV_CACHE_DTYPES], help="of stored K and V")
    model.add_argument(
        "--draft-kv-cache-dtype", default="auto", choices=["auto", *KV_CACHE_DTYPES], help="the same of the drafter's"
    )
    model.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share the model")
    model.add_argument("--max-model-len", type=int, help="tokens of prompt and completion")
    model.add_argument(
        "--num-speculative-tokens", type=int, help="drafts verified each round; without it, as many as pay"
    )
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
    args = parse_args(arguments)
    try:
        llm = LLM(
            args.model,
            args.draft_model,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            draft_kv_cache_dtype=args.draft_kv_cache_dtype,
            tensor_parallel_size=args.tensor_parallel_size,
            max_model_len=args.max_model_len,
            num_speculative_tokens=args.num_speculative_tokens,
        )
        params = SamplingParams(
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
        prompt = _prompt(args, llm)
        _warm_up(llm, prompt, params)
        started = time.perf_counter()
        output = _print_stream(llm, prompt, params, as_text=args.prompt_token_ids is None)
        print(f"\n\n{summary(output, time.perf_counter() - started)}")
        if output.outputs[0].error is not None:
            raise DFlashError(output.outputs[0].error)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def summary(output: RequestOutput, seconds: float) -> str:
    """Speed, mean acceptance length and its histogram."""
    tokens = len(output.outputs[0].token_ids)
    lengths = output.metrics.acceptance_lengths
    lines = [f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s ({output.outputs[0].finish_reason})"]
    if lengths:
        mean = output.metrics.mean_acceptance_length
        lines.append(f"mean acceptance length {mean:.2f} tokens over {len(lengths)} rounds")
        rounds = Counter(lengths)
        for length in range(1, max(lengths) + 1):
            bar = "#" * round(BAR_WIDTH * rounds[length] / max(rounds.values()))
            lines.append(f"{length:4d} {bar:{BAR_WIDTH}} {rounds[length]}")
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


def _warm_up(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Compile the steps, so that the speed printed is the speed of generation."""
    outputs = llm.stream(prompt, params)  # which refuses a bad prompt
    print("compiling ...", end="\r", file=sys.stderr, flush=True)
    for output in outputs:
        if output.metrics.acceptance_lengths:
            break
    print("             ", end="\r", file=sys.stderr, flush=True)


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams, *, as_text: bool) -> RequestOutput:
    """Print what comes as it comes: text or ids."""
    shown = ""
    for output in llm.stream(prompt, params):
        completion = output.outputs[0]
        text = completion.text if as_text else " ".join(map(str, completion.token_ids))
        print(text[len(shown) :], end="", flush=True)
        shown = text
    return output


if __name__ == "__main__":
    sys.exit(main())
