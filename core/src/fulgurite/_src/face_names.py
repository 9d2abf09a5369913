"""Errors for names that a face does not have: they say where the name is, or what it may be."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from fulgurite.errors import FulguriteError, find_similar_names

_FACES = ("fulgurite", "fulgurite.metrics", "fulgurite.plugins")
_ERRORS = "fulgurite.errors"


def make_getattr(face: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a face, which Python calls for a name that is not there.

    Args:
        face: the name of the module.
    """

    def get_attribute(name: str) -> NoReturn:
        raise AttributeError(f"module {face!r} has no attribute {name!r}{_find_hint(face, name)}")

    return get_attribute


def _find_hint(face: str, name: str) -> str:
    if name.startswith("_"):
        return ""
    if f"{face}.{name}" in _FACES:
        return f" yet: import {face}.{name}"
    faces_by_name = _find_public_names()
    if name in faces_by_name:
        return f": it is {faces_by_name[name]}.{name}"
    similar = [
        f"{faces_by_name[other]}.{other}" for other in find_similar_names(name, faces_by_name)
    ]
    return f". Did you mean {' or '.join(similar)}?" if similar else ""


def _find_public_names() -> dict[str, str]:
    """Return the first face that each public name is in."""
    faces: dict[str, str] = {}
    for face in _FACES:
        for name in import_module(face).__all__:
            faces.setdefault(name, face)
    for name, value in vars(import_module(_ERRORS)).items():
        if _is_error(value):
            faces.setdefault(name, _ERRORS)
    return faces


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, FulguriteError)
