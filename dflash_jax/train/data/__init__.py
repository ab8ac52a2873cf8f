"""Training data of a drafter: prompts, and the target's own responses to them.

`python -m dflash_jax.train.data` makes a folder of shards; `read_shards` reads it, and `read_jsonl` what others made.
"""

from dflash_jax.train.data.shards import Sample, read_jsonl, read_shards

__all__ = ["Sample", "read_jsonl", "read_shards"]
