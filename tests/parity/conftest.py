"""The live comparison with transformers runs on demand only: it needs torch, which nothing else here does."""

import importlib.util
import os
import sys
from pathlib import Path

# Scripts are run as files and import each other as top-level modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

if os.environ.get("DFLASH_TEST_PARITY") != "1" or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
