"""Makes `model_references.py` importable by the tests beside it, which `--import-mode=importlib`
does not do by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
