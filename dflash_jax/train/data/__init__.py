"""Training data of a drafter: prompts, and the target's own responses to them.

`python -m dflash_jax.train.data` makes a folder of shards, which `shards.read_shards` reads; `shards.read_jsonl` reads
files made elsewhere.
"""
