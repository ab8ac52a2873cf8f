"""Measures what a drafter gains: `python -m dflash_jax.eval acceptance`."""
