import sys
from pathlib import Path

# Scripts are run as files and import each other as top-level modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
