import sys
from pathlib import Path

# The scripts are run as files, and import each other as such.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
