"""Training data of a drafter: prompts, and the target's own responses to them.

`python -m dflash_jax.train.data` makes a folder of shards; `shards.read_shards` reads it, and `shards.read_jsonl` what
others made.
"""
