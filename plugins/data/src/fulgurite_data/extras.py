"""Libraries that only some sources need."""

from importlib import import_module
from types import ModuleType

from fulgurite.errors import ConfigurationError


def import_extra(module: str, extra: str) -> ModuleType:
    """Return a module of a library that comes with an extra of this distribution.

    Args:
        module: its name.
        extra: the name of the extra.

    Raises:
        ConfigurationError: the library is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{module} is missing ({error}): install it, as with 'fulgurite-data[{extra}]'"
        ) from error
