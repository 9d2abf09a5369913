"""Configurations that a run starts from: a file, or the manifest of another run."""

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_config import parse_float
from fulgurite_runs import RunDirectory, check_json_memory, loads

from fulgurite_cli.configuration import KEY

MAX_BYTES = 20_000_000
"""The largest file that is read."""


def read_start_config(options: argparse.Namespace) -> tuple[dict[str, Any] | None, str]:
    """Return the configuration that `--config` or `--from` names, as manifests hold it, and what
    to call it.

    Raises:
        ConfigurationError: the file cannot be read.
        CheckpointError: there is no run.
    """
    if options.from_run is not None:
        return read_run_config(options.from_run), f"--from {options.from_run}"
    if options.config is not None:
        return read_config_file(options.config), f"--config {options.config}"
    return None, ""


def read_run_config(run_dir: str) -> dict[str, Any]:
    """Return the configuration in the manifest of a run.

    Raises:
        CheckpointError: there is no run.
        ConfigurationError: it has no configuration.
    """
    return _get_configuration(RunDirectory(run_dir).read_manifest(), run_dir)


def read_config_file(path: str) -> dict[str, Any]:
    """Return the configuration in a JSON file: what `fulgurite_config.to_json` wrote, the manifest
    of a run, or the arguments of a program by name. Nothing is imported.

    Raises:
        ConfigurationError: the file cannot be read, or is too large.
    """
    file = Path(path)
    if os.path.isdir(path):
        raise ConfigurationError(f"{path} is a directory: give --from {path} if it is a run")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigurationError(
                f"{path} has more than {MAX_BYTES:,} bytes: this is not a configuration"
            )
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        check_json_memory(text)
        form = json.loads(text, parse_float=parse_float, object_pairs_hook=_make_object)
        is_manifest = isinstance(form, dict) and "configuration" in form and "plugins" in form
        if is_manifest:
            form = loads(text)  # as it was written, with NaN and infinities
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 from byte {error.start} on; give a JSON file in UTF-8"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a configuration: {error}; give a JSON file"
        ) from error
    if not isinstance(form, dict):
        raise ConfigurationError(
            f"{path} is not a configuration: it holds {type(form).__name__}, not a JSON object"
        )
    if is_manifest:
        return _get_configuration(form, path)
    return {KEY: text} if any(key.startswith("$") for key in form) else form


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"it has the name {name!r} twice")
    return dict(pairs)


def _get_configuration(manifest: dict[str, Any], place: str) -> dict[str, Any]:
    configuration = manifest.get("configuration")
    if not isinstance(configuration, dict):
        raise ConfigurationError(
            f"the run of {place} has no configuration: it was not started by fulgurite_cli"
        )
    return configuration
