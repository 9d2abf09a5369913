"""A program that is one of several processes: they are connected before anything of it runs."""

import os
from importlib.metadata import entry_points

from fulgurite.errors import ConfigurationError

VARIABLE = "FULGURITE_DISTRIBUTED"
GROUP = "fulgurite.distributed"


def connect() -> None:
    """Connects this process with the others if the variable FULGURITE_DISTRIBUTED asks for it.
    How is up to the one package that offers a function in the group `fulgurite.distributed`. It
    reads the variable, takes no arguments, and does nothing if the processes are connected
    already."""
    if not os.environ.get(VARIABLE):
        return
    found = list(entry_points(group=GROUP))
    if not found:
        raise ConfigurationError(
            f"{VARIABLE} is set, but nothing connects processes: install fulgurite-sharding"
        )
    if len(found) > 1:
        names = " and ".join(entry.value for entry in found)
        raise ConfigurationError(
            f"{VARIABLE} is set, and {names} each connect processes: uninstall all but one"
        )
    found[0].load()()
