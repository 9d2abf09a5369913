"""What the small files of a checkpoint may hold: types and ranges of every value that is read.

Hashes tell damage from what was written, and nothing else: whoever writes a file can write its
hash. A value that this plugin would not have written is damage, too, and an earlier checkpoint is
used.
"""

import re
from collections.abc import Mapping
from typing import Any

import fulgurite as fg

_LARGEST_COUNT = 2**31
_SHA256 = re.compile("[0-9a-f]{64}")


def check_count(value: Any, name: str, *, smallest: int = 0) -> int:
    """Return a number of steps, batches or the like.

    Args:
        value: as it was read.
        name: of the field, for errors.
        smallest: that it may be.

    Raises:
        ValueError: it is not one.
    """
    if type(value) is not int or not smallest <= value < _LARGEST_COUNT:
        raise ValueError(f"{name} is {value!r}; it must be an integer from {smallest} to 2**31")
    return value


def check_optional_count(value: Any, name: str) -> int | None:
    """Return a positive number of steps or epochs, or None; the arguments are those of
    `check_count`."""
    return None if value is None else check_count(value, name, smallest=1)


def check_text(value: Any, name: str) -> str:
    """Return a text; raise `ValueError` if it is not one."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a string")
    return value


def check_optional_text(value: Any, name: str) -> str | None:
    """Return a text or None; raise `ValueError` if it is neither."""
    return None if value is None else check_text(value, name)


def check_object(value: Any, name: str) -> dict[str, Any]:
    """Return a dictionary; raise `ValueError` if it is not one."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.100}; it must be an object")
    return value


def check_list(value: Any, name: str) -> list[Any]:
    """Return a list; raise `ValueError` if it is not one."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r:.100}; it must be a list")
    return value


def parse_step_range(value: Any, step: int) -> fg.StepRange:
    """Return the range of the fit that a checkpoint belongs to.

    Args:
        value: as it was read.
        step: that of the checkpoint, which must be in it.

    Raises:
        ValueError: it is not one.
    """
    content = check_object(value, "step_range")
    start = check_count(content["start"], "step_range.start")
    stop = content["stop"]
    if stop is not None:
        check_count(stop, "step_range.stop", smallest=start)
    epoch_ends = [
        check_count(end, "step_range.epoch_ends", smallest=1)
        for end in check_list(content["epoch_ends"], "step_range.epoch_ends")
    ]
    if start > step:
        raise ValueError(f"step_range.start is {start}, after step {step}")
    if epoch_ends != sorted(set(epoch_ends)):
        raise ValueError("step_range.epoch_ends do not grow")
    return fg.StepRange(start, stop, tuple(epoch_ends))


def parse_data_position(value: Any) -> dict[str, Any] | None:
    """Return a position in the data, or None; raise `ValueError` if it is neither.

    The state of a source, which the source alone knows, is left as it is.
    """
    if value is None:
        return None
    position = check_object(value, "data_position")
    check_count(position["epoch"], "data_position.epoch")
    check_count(position["batch"], "data_position.batch")
    return position


def parse_host_states(value: Any) -> dict[str, Any]:
    """Return the states of plugins on the host, by name; raise `ValueError` if they are not."""
    states = check_object(value, "host_states")
    for name, state in states.items():
        if state is None:
            continue
        if not {"state", "version"} <= check_object(state, name).keys():
            raise ValueError(f"host_states.{name} lacks its state or its version")
        if type(state["version"]) is not int:
            raise ValueError(f"host_states.{name}.version is {state['version']!r:.100}")
    return states


def parse_metrics(value: Any) -> dict[str, dict[str, Any]]:
    """Return metrics by source and name; raise `ValueError` if they are not such."""
    return {
        source: check_object(metrics, f"metrics.{source}")
        for source, metrics in check_object(value, "metrics").items()
    }


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the description of a run is not such."""
    for section in ("configuration", "versions", "devices"):
        if manifest.get(section) is not None:
            check_object(manifest[section], section)
    for line in check_list(manifest["model"], "model"):
        check_text(line, "model")
    for plugin in check_list(manifest["plugins"], "plugins"):
        check_object(plugin, "plugins")
        for name in ("name", "distribution", "version"):
            check_text(plugin[name], f"plugins.{name}")
        if not isinstance(plugin["decisive"], bool):
            raise ValueError(f"plugins.decisive is {plugin['decisive']!r:.100}")
        check_object(plugin["settings"], "plugins.settings")


def parse_requested_length(settings: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the steps and epochs of a fit, one of them None; raise `ValueError` if they are not
    such."""
    steps = check_optional_count(settings["steps"], "settings.steps")
    epochs = check_optional_count(settings["epochs"], "settings.epochs")
    return steps, epochs


def parse_array_specs(value: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each array, by path; raise `ValueError` if they are not such."""
    specs = {}
    for name, spec in check_object(value, "arrays").items():
        shape, dtype = spec
        sizes = [check_count(size, f"arrays.{name}") for size in check_list(shape, name)]
        specs[name] = tuple(sizes), check_text(dtype, f"arrays.{name}")
    return specs


def check_commit_fields(content: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a field of a `COMMIT` holds what this plugin does not write there."""
    check_count(content["step"], "step")
    check_count(content["attempt"], "attempt")
    hashes = check_list(content["hashes"], "hashes")
    positions = check_list(content["logger_positions"], "logger_positions")
    if not hashes or not all(isinstance(item, str) and _SHA256.fullmatch(item) for item in hashes):
        raise ValueError("hashes must be those of one or more processes")
    if len(positions) != len(hashes):
        raise ValueError(f"{len(positions)} logger_positions of {len(hashes)} processes")
    for position in positions:
        check_object(position, "logger_positions")
    parse_metrics(content["metrics"])
    for name, seconds in check_object(content["timings"], "timings").items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"timings.{name} is {seconds!r}; it must be a number")
    wall_time = content["wall_time"]
    if isinstance(wall_time, bool) or not isinstance(wall_time, int | float):
        raise ValueError(f"wall_time is {wall_time!r}; it must be a number")
    monitor = content["monitor"]
    is_pair = isinstance(monitor, list) and len(monitor) == 2
    if monitor is not None and not (is_pair and all(isinstance(part, str) for part in monitor)):
        raise ValueError(f"monitor is {monitor!r}; it must be a metric and a mode")
