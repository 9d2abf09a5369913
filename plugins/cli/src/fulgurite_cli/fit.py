"""The command `fulgurite fit`, and how a program is loaded from its file."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fulgurite.errors import ConfigurationError, ProcessError

from fulgurite_cli.experiment import Experiment, run
from fulgurite_cli.processes import connect_processes


def load_experiment(path: str) -> Callable[..., Experiment]:
    """Return the function `experiment` of the file `path`, the only file that is imported.

    Raises:
        ConfigurationError: there is no such file, or it defines no such function.
    """
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"there is no Python file {path}")
    sys.path.insert(0, str(file.resolve().parent))  # modules beside the program can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    experiment = getattr(module, "experiment", None)
    if not callable(experiment):
        raise ConfigurationError(
            f"{path} defines no function `experiment` that returns an Experiment of fulgurite_cli"
        )
    return cast(Any, experiment)


def run_fit(arguments: list[str]) -> int:
    """Train the experiment of a file: `fulgurite fit PROGRAM ...`."""
    parser = argparse.ArgumentParser(
        "fulgurite fit", usage="fulgurite fit PROGRAM [name=value ...] [--run DIR]"
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a Python file that defines `experiment`"
    )
    path = parser.parse_args(arguments[:1]).program
    try:
        connect_processes()
        experiment = load_experiment(path)
    except (ConfigurationError, ProcessError) as error:
        parser.exit(2, f"error: {error}\n")
    run(experiment, arguments[1:], program=f"fulgurite fit {path}")
    return 0
