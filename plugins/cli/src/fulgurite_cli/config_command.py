"""The command `fulgurite config diff`: what differs between the configurations of two runs."""

import argparse
import json
import os
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import as_printable
from fulgurite_config import ConfigError, diff

from fulgurite_cli.configuration import is_configuration, read_config
from fulgurite_cli.mistakes import format_mistake
from fulgurite_cli.options import print_to_pipe
from fulgurite_cli.start_config import read_config_file, read_run_config


def run_config(arguments: list[str]) -> int:
    """Show what differs between two configurations.

    The command `fulgurite config diff RUN RUN`; its exit code is 1 if there is a difference.
    """
    parser = argparse.ArgumentParser(
        "fulgurite config", description="Shows what differs between two configurations."
    )
    parser.add_argument("action", choices=["diff"])
    parser.add_argument("first", metavar="RUN", help="a run directory, or a JSON file")
    parser.add_argument("second", metavar="RUN", help="another")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    try:
        differences = find_differences(_read(options.first), _read(options.second))
    except (CheckpointError, ConfigError, ConfigurationError) as error:
        parser.exit(2, format_mistake(error))
    if options.json:
        print_to_pipe(json.dumps(differences, indent=1))
        return 1 if differences else 0
    for path, (old, new) in differences.items():
        print_to_pipe(as_printable(f"{path}: {_format(old)} -> {_format(new)}"))
    return 1 if differences else 0


def find_differences(
    first: dict[str, Any], second: dict[str, Any]
) -> dict[str, tuple[str | None, str | None]]:
    """Return what differs between two configurations as manifests hold them.

    Args:
        first: a configuration.
        second: another.

    Returns:
        For each path or argument the two values as JSON; None where there is none.

    Raises:
        ConfigurationError: only one is of a program that returns a configuration.
    """
    kinds = [is_configuration(config) for config in (first, second)]
    if all(kinds):
        return diff(read_config(first), read_config(second))
    if any(kinds):
        raise ConfigurationError(
            "one is a whole configuration, and the other holds arguments or a part of the values: "
            "give two runs of one program, or two files that fulgurite_config.to_json wrote"
        )
    names = dict.fromkeys([*first, *second])
    texts = {
        name: tuple(
            json.dumps(config[name], ensure_ascii=False) if name in config else None
            for config in (first, second)
        )
        for name in names
    }
    return {name: (old, new) for name, (old, new) in texts.items() if old != new}


def _read(place: str) -> dict[str, Any]:
    return read_run_config(place) if os.path.isdir(place) else read_config_file(place)


def _format(text: str | None) -> str:
    return "(nothing)" if text is None else text
