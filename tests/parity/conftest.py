"""The live comparison with transformers runs on demand only: it needs torch, which nothing else here does."""

import importlib.util
import os

if os.environ.get("DFLASH_TEST_PARITY") != "1" or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
