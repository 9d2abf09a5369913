"""Show in the terminal what a run is doing; active once it is installed."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

from fulgurite_progress.plugin import ProgressBar

if TYPE_CHECKING:
    from fulgurite_progress.summary import model_summary, parameter_table
    from fulgurite_progress.times import timing_table

__all__ = ["ProgressBar", "model_summary", "parameter_table", "timing_table"]

# Imported when they are first used: each `Engine` imports this package, and only a fit needs rich.
_MODULES = {
    "model_summary": "fulgurite_progress.summary",
    "parameter_table": "fulgurite_progress.summary",
    "timing_table": "fulgurite_progress.times",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
