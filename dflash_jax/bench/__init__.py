"""`python -m dflash_jax.bench`: load generators for servers and for the engine in process, with one shape of result."""
