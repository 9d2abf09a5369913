"""Tests for Fulgurite plugins: `check_plugin(MyPlugin)`, and helpers for your own tests."""

__tracebackhide__ = True

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_testing.api import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    """Import the public names when the first one is used: pytest imports this package in every run,
    also of tests that have nothing to do with jax."""
    if not name.startswith("__") and name != "api":
        globals().update({**vars(import_module("fulgurite_testing.api")), **globals()})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'fulgurite_testing' has no attribute {name!r}")
