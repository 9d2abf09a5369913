"""The command `fulgurite`. Nothing heavy is imported before it is needed."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

GROUP = "fulgurite.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """`fulgurite fit PROGRAM ...`, `fulgurite plugins`, and what packages add in the group `fulgurite.commands`: functions
    `command(arguments: list[str]) -> int`, imported when called."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"fit": _fit, "plugins": _plugins}
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    parser = argparse.ArgumentParser("fulgurite", description="Trains Equinox models on JAX, with plugins.")
    parser.add_argument("--version", action="version", version=f"fulgurite {version('fulgurite')}")
    parser.add_argument("command", choices=[*commands, *added], help="what to do; COMMAND --help tells more")
    if not arguments:
        parser.print_help()
        return 0
    command = parser.parse_args(arguments[:1]).command
    return (commands.get(command) or added[command].load())(arguments[1:]) or 0


def load_experiment(path: str) -> Callable[..., Any]:
    """The function `experiment` of the file `path`, the only file that is imported."""
    from fulgurite.errors import ConfigurationError

    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"there is no file {path}")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not callable(experiment := getattr(module, "experiment", None)):
        raise ConfigurationError(f"{path} defines no function `experiment` that returns fg.Experiment(...)")
    return experiment


def _fit(arguments: list[str]) -> int:
    from fulgurite.errors import ConfigurationError
    from fulgurite.experiment import main as run

    if not arguments or arguments[0].startswith("-"):
        print("usage: fulgurite fit PROGRAM [name=value ...] [--run DIR]", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        experiment = load_experiment(arguments[0])
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run(experiment, arguments[1:])
    return 0


def _plugins(arguments: list[str]) -> int:
    """Lists what is installed, without importing any of it."""
    from fulgurite.discovery import installed

    parser = argparse.ArgumentParser("fulgurite plugins", description="Lists the installed plugins.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    rows = [
        {"name": one.name, "distribution": one.distribution, "autoload": one.autoload, "object": one.entry.value}
        for entries in installed().values()
        for one in entries
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("No plugins are installed. Try: pip install fulgurite-rng")
    for row in rows if not options.json else ():
        print(f"{row['name']:16} {row['distribution']:32} {'autoload' if row['autoload'] else '':10} {row['object']}")
    return 0
