"""Store the weights of a drafter in fp8, half the size of those that `python -m dflash_jax.train` writes, to ship it.

    python scripts/quantize_drafter.py build/draft dflash_jax/drafters/smollm2-135m-instruct

Projections become float8_e4m3 with a scale for each row, in the form of compressed-tensors, which vLLM loads; norms
stay bfloat16. Our engine widens the weights at load. Drafts change slightly, outputs never.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp

from dflash_jax.spec import draft_config, read_json
from dflash_jax.weights.drafter import fc_inputs
from dflash_jax.weights.export import save_model
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.safetensors import SINGLE_NAME


def quantize(source: Path, out: Path) -> int:
    """Write the drafter in `source` to `out` with fp8 projections; returns the size of its weights in bytes.

    Raises:
        ConfigError: the configuration is not that of a drafter.
        CheckpointError: a file or tensor is missing or damaged.
    """
    path = source / "config.json"
    raw = read_json(path)
    config = draft_config(raw, str(path), fc_inputs=fc_inputs(source))
    save_model(out, raw, config, load_params(source, config, jnp.float32), "fp8_e4m3")
    return (out / SINGLE_NAME).stat().st_size


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of the drafter")
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args(arguments)
    print(f"{quantize(args.source, args.out):,} bytes in {args.out}")


if __name__ == "__main__":
    main()
