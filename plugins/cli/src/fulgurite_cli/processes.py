"""A program that is one of several processes: they are connected before anything of it runs."""

import importlib
import importlib.util
import os

from fulgurite.errors import ConfigurationError

VARIABLE = "FULGURITE_DISTRIBUTED"


def connect_processes() -> None:
    """Connect this process with the others if the variable FULGURITE_DISTRIBUTED asks for it.

    `fulgurite_sharding.initialize_distributed` reads the variable, and does nothing if the
    processes are connected already.

    Raises:
        ConfigurationError: the variable is set, and fulgurite-sharding is not installed.
        ProcessError: not all processes arrived in time.
    """
    if not os.environ.get(VARIABLE):
        return
    if importlib.util.find_spec("fulgurite_sharding") is None:
        raise ConfigurationError(
            f"{VARIABLE} is set, but nothing connects the processes: install fulgurite-sharding, "
            f"or unset {VARIABLE}"
        )
    importlib.import_module("fulgurite_sharding").initialize_distributed()
