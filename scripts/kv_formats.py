"""What keys and values in fewer bits cost: perplexity of the embedded target and drafts it accepts, for each format.

    python -m scripts.kv_formats

The text are files of this repository, scored as prompts of `--length` tokens; then the first `--prompt` tokens of each
are continued greedily, with the embedded drafter, whose context has the same format. One JSON line a format.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.options.dtypes import KV_CACHE_DTYPES

ROOT = Path(__file__).parent.parent
FILES = (
    "dflash_jax/engine/host/scheduler.py",
    "dflash_jax/state/pages.py",
    "dflash_jax/text/repetition.py",
    "pallas_kernels/registry.py",
    "tests/test_masks.py",
    "scripts/soak_server.py",
)


def texts(llm: LLM, length: int) -> list[list[int]]:
    """The first tokens of each file."""
    return [llm.tokenizer.encode((ROOT / name).read_text())[:length] for name in FILES]


def perplexity(llm: LLM, length: int) -> float:
    """Perplexity of the files, whose first token is not scored."""
    prompts = texts(llm, length)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], scored, use_tqdm=False)
    losses = [
        -entries[token].logprob
        for output, ids in zip(outputs, prompts, strict=True)
        for entries, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    return math.exp(sum(losses) / len(losses))


def acceptance(llm: LLM, prompt: int, tokens: int) -> float:
    """Tokens a round, where the files are continued greedily."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in texts(llm, prompt)]
    lengths = [n for out in llm.generate(prompts, params, use_tqdm=False) for n in out.metrics.acceptance_lengths]
    return sum(lengths) / len(lengths)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    formats = ["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int4_had"]
    parser.add_argument("--kv-cache-dtype", nargs="+", default=formats, choices=list(KV_CACHE_DTYPES))
    parser.add_argument("--length", type=int, default=1024, help="tokens of a file that are scored")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a file that are continued")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a continuation")
    args = parser.parse_args()
    for dtype in args.kv_cache_dtype:
        llm = LLM(kv_cache_dtype=dtype, max_num_seqs=4, num_speculative_tokens=7, compile_at_start=False)
        row = {
            "kv_cache_dtype": dtype,
            "perplexity": round(perplexity(llm, args.length), 4),
            "acceptance_length": round(acceptance(llm, args.prompt, args.tokens), 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
