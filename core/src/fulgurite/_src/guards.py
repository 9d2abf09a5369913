"""Attributes of a class that its subclasses cannot overwrite by accident."""

from collections.abc import Collection
from typing import Any

from fulgurite.errors import ConfigurationError


def check_no_class_attributes(cls: type, names: Collection[str]) -> None:
    """Raise a `ConfigurationError` for what a subclass defines and no instance would ever show.

    Args:
        cls: the subclass.
        names: of the attributes that the constructor of its base sets.
    """
    hidden = sorted(vars(cls).keys() & names)
    if hidden:
        raise ConfigurationError(
            f"{cls.__name__}.{hidden[0]} is hidden: the engine's constructor sets an attribute of "
            "this name. Give yours another name; a setting is an argument of the constructor"
        )


def check_assignment(owner: Any, name: str, value: Any, names: Collection[str]) -> None:
    """Raise a `ConfigurationError` if an attribute that is set once is set again, or if what is set
    hides a method.

    Args:
        owner: the object.
        name: of the attribute.
        value: its new value.
        names: of the attributes that its constructor alone sets.
    """
    cls = type(owner)
    if name in names and name in vars(owner):
        raise ConfigurationError(
            f"{cls.__name__}: the attribute {name!r} is the engine's own, which its constructor "
            f"alone sets. Give yours another name, such as 'my_{name}'; a setting is an argument "
            "of the constructor"
        )
    is_method = callable(getattr(cls, name, None))
    if is_method and not callable(value):
        raise ConfigurationError(
            f"{cls.__name__}: the attribute {name!r} would hide the method {name}(). Give it "
            f"another name, such as 'my_{name}'"
        )
