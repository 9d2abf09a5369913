"""The command line of Fulgurite: programs with typed arguments, and what is installed."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_cli.compilation_cache import choose_compilation_cache
    from fulgurite_cli.experiment import Experiment, build_experiment
    from fulgurite_cli.explanation import explain
    from fulgurite_cli.fit import load_experiment
    from fulgurite_cli.mistakes import format_mistake
    from fulgurite_cli.rebuilding import rebuild_experiment
    from fulgurite_cli.running import run
    from fulgurite_cli.secrets import SecretStr

__all__ = [
    "Experiment",
    "SecretStr",
    "build_experiment",
    "choose_compilation_cache",
    "explain",
    "format_mistake",
    "load_experiment",
    "rebuild_experiment",
    "run",
]

# Imported when they are first used: `fulgurite --help` and `fulgurite plugins` import this package,
# and importing jax takes them from 0.1 s to more than a second.
_MODULES = {
    "Experiment": "fulgurite_cli.experiment",
    "SecretStr": "fulgurite_cli.secrets",
    "build_experiment": "fulgurite_cli.experiment",
    "choose_compilation_cache": "fulgurite_cli.compilation_cache",
    "explain": "fulgurite_cli.explanation",
    "format_mistake": "fulgurite_cli.mistakes",
    "load_experiment": "fulgurite_cli.fit",
    "rebuild_experiment": "fulgurite_cli.rebuilding",
    "run": "fulgurite_cli.running",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
