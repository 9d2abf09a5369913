"""The command line of Fulgurite: programs with typed arguments, and what is installed."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_cli.compilation_cache import choose_compilation_cache
    from fulgurite_cli.experiment import Experiment, build_experiment, plan_config
    from fulgurite_cli.explanation import explain
    from fulgurite_cli.fit import load_experiment, parse_fit_options
    from fulgurite_cli.mistakes import format_mistake
    from fulgurite_cli.options import IN_USE, print_to_pipe
    from fulgurite_cli.rebuilding import rebuild_experiment
    from fulgurite_cli.running import run
    from fulgurite_cli.secrets import SecretStr
    from fulgurite_cli.start_config import read_start_config
    from fulgurite_cli.sweeping import check_no_secret, note_signals
    from fulgurite_cli.swept import SweptRun

__all__ = [
    "IN_USE",
    "Experiment",
    "SecretStr",
    "SweptRun",
    "build_experiment",
    "check_no_secret",
    "choose_compilation_cache",
    "explain",
    "format_mistake",
    "load_experiment",
    "note_signals",
    "parse_fit_options",
    "plan_config",
    "print_to_pipe",
    "read_start_config",
    "rebuild_experiment",
    "run",
]

# Imported when they are first used: `fulgurite --help` and `fulgurite plugins` import this package,
# and importing jax takes them from 0.1 s to more than a second.
_MODULES = {
    "IN_USE": "fulgurite_cli.options",
    "Experiment": "fulgurite_cli.experiment",
    "SecretStr": "fulgurite_cli.secrets",
    "SweptRun": "fulgurite_cli.swept",
    "build_experiment": "fulgurite_cli.experiment",
    "check_no_secret": "fulgurite_cli.sweeping",
    "choose_compilation_cache": "fulgurite_cli.compilation_cache",
    "explain": "fulgurite_cli.explanation",
    "format_mistake": "fulgurite_cli.mistakes",
    "load_experiment": "fulgurite_cli.fit",
    "note_signals": "fulgurite_cli.sweeping",
    "parse_fit_options": "fulgurite_cli.fit",
    "plan_config": "fulgurite_cli.experiment",
    "print_to_pipe": "fulgurite_cli.options",
    "read_start_config": "fulgurite_cli.start_config",
    "rebuild_experiment": "fulgurite_cli.rebuilding",
    "run": "fulgurite_cli.running",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
