"""What holds for every test: the CPU, compiled programs kept between runs, and types checked while the tests run."""

import os
from pathlib import Path

from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulgurite" / "tests"

# Set before jax is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Installed before any of the packages is imported: whatever is annotated is checked, arrays for shape and dtype. An int
# is a float, as it is for type checkers; `Self` is beyond a checker that sees one method at a time.
PACKAGES = [path.parent.name for kind in ("core", "plugins/*") for path in ROOT.glob(f"{kind}/src/*/__init__.py")]
CONFIGURATION = "is_pep484_tower=True, hint_overrides=beartype.FrozenDict({beartype.typing.Self: object})"
install_import_hook(PACKAGES, f"beartype.beartype(conf=beartype.BeartypeConf({CONFIGURATION}))")

settings.register_profile("fulgurite", deadline=None)
settings.load_profile("fulgurite")
