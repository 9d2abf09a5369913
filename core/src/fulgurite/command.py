"""The command `fulgurite`. Nothing heavy is imported before it is needed."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError, ProcessError, error_context
from fulgurite.processes import connect

GROUP = "fulgurite.commands"
OWN = [
    EntryPoint("fit", "fulgurite.command:fit", GROUP),
    EntryPoint("plugins", "fulgurite.listing:plugins", GROUP),
]


def main(argv: Sequence[str] | None = None) -> int:
    """`fulgurite fit PROGRAM ...`, `fulgurite plugins`, and what packages add in the group
    `fulgurite.commands`:
    functions `command(arguments: list[str]) -> int`, imported when called."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, list[EntryPoint]] = {}
    for entry in (*OWN, *entry_points(group=GROUP)):
        commands.setdefault(entry.name, []).append(entry)
    parser = argparse.ArgumentParser(
        "fulgurite", description="Trains Equinox models on JAX, with plugins."
    )
    parser.add_argument("--version", action="version", version=f"fulgurite {version('fulgurite')}")
    parser.add_argument(
        "command", choices=list(commands), help="what to do; COMMAND --help says more"
    )
    if not arguments:
        parser.print_help()
        return 0
    entry, *others = commands[parser.parse_args(arguments[:1]).command]
    if others:
        told = f"{_source(others[0])} adds a command {entry.name!r}, which already exists: uninstall one of them"
        parser.exit(2, f"error: {told}\n")
    with error_context(lambda: f"command {entry.name!r} ({_source(entry)})"):
        return entry.load()(arguments[1:]) or 0


def _source(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def load_experiment(path: str) -> Callable[..., Any]:
    """The function `experiment` of the file `path`, the only file that is imported."""
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"there is no Python file {path}")
    sys.path.insert(0, str(file.resolve().parent))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(experiment := getattr(module, "experiment", None)):
        raise ConfigurationError(
            f"{path} defines no function `experiment` that returns fg.Experiment(...)"
        )
    return experiment


def fit(arguments: list[str]) -> int:
    """`fulgurite fit PROGRAM ...`: trains the experiment of a file."""
    parser = argparse.ArgumentParser(
        "fulgurite fit", usage="fulgurite fit PROGRAM [name=value ...] [--run DIR]"
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a Python file that defines `experiment`"
    )
    path = parser.parse_args(arguments[:1]).program
    try:
        connect()
        experiment = load_experiment(path)
    except (ConfigurationError, ProcessError) as error:
        parser.exit(2, f"error: {error}\n")
    from fulgurite.experiment import main as run

    run(experiment, arguments[1:], program=f"fulgurite fit {path}")
    return 0
