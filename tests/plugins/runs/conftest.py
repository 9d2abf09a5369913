"""Makes `tests/core/models.py` importable by the tests here, which `--import-mode=importlib` does
not do by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))
