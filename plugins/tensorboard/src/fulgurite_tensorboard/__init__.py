"""Write records of Fulgurite for TensorBoard: `Engine(plugins=["tensorboard"], run_dir=...)`."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

from fulgurite_tensorboard.plugin import TensorBoardLogger

if TYPE_CHECKING:
    from fulgurite_tensorboard.events import EventFile, read_events
    from fulgurite_tensorboard.scalar_writer import TensorBoardWriter

__all__ = ["EventFile", "TensorBoardLogger", "TensorBoardWriter", "read_events"]

# Imported when they are first used: tensorboard and Pillow are imported where a file is opened.
_MODULES = {
    "EventFile": "fulgurite_tensorboard.events",
    "TensorBoardWriter": "fulgurite_tensorboard.scalar_writer",
    "read_events": "fulgurite_tensorboard.events",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
