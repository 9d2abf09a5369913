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

__all__ = [
    "ExportError",
    "ExportedFunction",
    "ExportedModel",
    "Function",
    "InputError",
    "export",
    "export_onnx",
    "load",
]

# Imported when they are first used: what loads a folder imports neither Fulgurite nor Equinox.
_MODULES = {
    "ExportError": "fulgurite_export.errors",
    "ExportedFunction": "fulgurite_export.loading",
    "ExportedModel": "fulgurite_export.loading",
    "Function": "fulgurite_export.functions",
    "InputError": "fulgurite_export.errors",
    "export": "fulgurite_export.exporting",
    "export_onnx": "fulgurite_export.onnx_format",
    "load": "fulgurite_export.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
