"""Trained models as folders that another program runs with JAX and NumPy alone."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_export.errors import ExportError, InputError
    from fulgurite_export.exporting import export
    from fulgurite_export.functions import Function
    from fulgurite_export.loading import ExportedFunction, ExportedModel, load
    from fulgurite_export.onnx_format import export_onnx
    from fulgurite_export.requests import call_together, parse_example

__all__ = [
    "ExportError",
    "ExportedFunction",
    "ExportedModel",
    "Function",
    "InputError",
    "call_together",
    "export",
    "export_onnx",
    "load",
    "parse_example",
]

# Imported when they are first used: what loads a folder imports neither Fulgurite nor Equinox.
_MODULES = {
    "ExportError": "fulgurite_export.errors",
    "ExportedFunction": "fulgurite_export.loading",
    "ExportedModel": "fulgurite_export.loading",
    "Function": "fulgurite_export.functions",
    "InputError": "fulgurite_export.errors",
    "call_together": "fulgurite_export.requests",
    "export": "fulgurite_export.exporting",
    "export_onnx": "fulgurite_export.onnx_format",
    "load": "fulgurite_export.loading",
    "parse_example": "fulgurite_export.requests",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
