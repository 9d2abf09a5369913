"""Fulgurite: a small engine that compiles and runs training steps, and plugins for everything else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """The public names come with the first one that is used, so that the command `fulgurite` starts without jax."""
    if not name.startswith("__") and name != "api":
        globals().update({**vars(import_module("fulgurite.api")), **globals()})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'fulgurite' has no attribute {name!r}")
