"""What quantised weights cost: perplexity of folders of one model, on files of this repository.

    python scripts/weight_formats.py dflash_jax/embedded/target build/int4

One JSON line a folder, with the bytes of its weights. `format_quality.py` measures more, and rounds to nearest only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from dflash_jax import LLM, SamplingParams
from dflash_jax.options.commands import run_command

ROOT = Path(__file__).parents[1]
FILES = (
    "dflash_jax/engine/host/scheduler.py",
    "dflash_jax/state/pages.py",
    "dflash_jax/text/repetition.py",
    "pallas_kernels/registry.py",
    "tests/test_masks.py",
    "scripts/soak_server.py",
)


def perplexity(llm: LLM, length: int) -> float:
    """Perplexity of the first tokens of the files, of which the very first is not scored."""
    prompts = [llm.tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))[:length] for name in FILES]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], scored, use_tqdm=False)
    losses = [
        -entries[token].logprob
        for output, ids in zip(outputs, prompts, strict=True)
        for entries, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    return math.exp(sum(losses) / len(losses))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of the model in several formats")
    parser.add_argument("--dtype", default="float32", help="of the activations and of what is not quantised")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a file that are scored")
    parser.set_defaults(run=run)
    return run_command(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 0.

    Raises:
        DFlashError: a folder cannot be loaded.
    """
    for folder in args.folders:
        scored = perplexity(LLM(folder, dtype=args.dtype, max_num_seqs=4, compile_at_start=False), args.length)
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(json.dumps({"folder": str(folder), "perplexity": round(scored, 4), "bytes": nbytes}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
