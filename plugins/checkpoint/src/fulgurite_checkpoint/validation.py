"""What the small files of a checkpoint may hold: types and ranges of every value that is read, and
which of them fit together.

Hashes tell damage from what was written, and nothing else: whoever writes a file can write its
hash. A value that this plugin would not have written is damage, too, and an earlier checkpoint is
used.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import fulgurite as fg
import jax
import numpy as np
from fulgurite.metrics import Mode
from fulgurite.plugins import (
    BoundAction,
    TrainingLength,
    is_exact,
    is_real_dtype,
)

_LARGEST_COUNT = 2**31
_LARGEST_DIMENSION = 2**48
_LARGEST_SECONDS = 1e12
_SHA256 = re.compile("[0-9a-f]{64}")


def check_count(value: Any, name: str, *, smallest: int = 0, largest: int = _LARGEST_COUNT) -> int:
    """Return a number of steps, batches or the like.

    Args:
        value: as it was read.
        name: of the field, for errors.
        smallest: that it may be.
        largest: that it is less than.

    Raises:
        ValueError: it is not one.
    """
    if type(value) is not int or not smallest <= value < largest:
        power = largest.bit_length() - 1
        raise ValueError(
            f"{name} is {value!r}; it must be an integer from {smallest} to 2**{power}"
        )
    return value


def check_optional_count(value: Any, name: str) -> int | None:
    """Return a positive number of steps or epochs, or None; the arguments are those of
    `check_count`."""
    return None if value is None else check_count(value, name, smallest=1)


def check_bool(value: Any, name: str) -> bool:
    """Return True or False; raise `ValueError` for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.100}; it must be true or false")
    return value


def check_text(value: Any, name: str) -> str:
    """Return a string; raise `ValueError` if it is not one."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a string")
    return value


def check_optional_text(value: Any, name: str) -> str | None:
    """Return a string or None; raise `ValueError` if it is neither."""
    return None if value is None else check_text(value, name)


def check_object(value: Any, name: str) -> dict[str, Any]:
    """Return a dictionary; raise `ValueError` if it is not one."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.100}; it must be an object")
    return value


def check_texts_by_name(value: Any, name: str) -> dict[str, str]:
    """Return a dictionary of strings; raise `ValueError` if it is not one."""
    for key, text in check_object(value, name).items():
        check_text(text, f"{name}.{key}")
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
    if stop is not None and stop < step:
        raise ValueError(f"step_range.stop is {stop}, before step {step}")
    if epoch_ends != sorted(set(epoch_ends)):
        raise ValueError("step_range.epoch_ends do not grow")
    if epoch_ends and not start < epoch_ends[0] <= epoch_ends[-1] <= step:
        raise ValueError(
            f"step_range.epoch_ends are {epoch_ends}; they must be later than step {start}, where "
            f"the fit began, and not later than step {step}"
        )
    return fg.StepRange(start, stop, tuple(epoch_ends))


def check_stop(
    step_range: fg.StepRange,
    step: int,
    length: TrainingLength,
    stop_reason: str | None,
) -> None:
    """Raise `ValueError` if a fit would not end where its range says.

    Args:
        step_range: of the fit.
        step: that of the checkpoint.
        length: how long the fit was to train.
        stop_reason: why an action has ended it at this step, or None.
    """
    steps, epochs = length
    if (steps is None) == (epochs is None):
        raise ValueError(f"settings.steps is {steps} and settings.epochs is {epochs}; set one")
    if stop_reason is not None:
        is_right = step_range.stop == step
    elif steps is not None:
        is_right = step_range.stop == step_range.start + steps
    else:
        is_right = epochs is not None and _is_guess(step_range, step, epochs)
    if not is_right:
        length_text = f"{epochs} epochs" if steps is None else f"{steps} steps"
        raise ValueError(
            f"step_range.stop is {step_range.stop} at step {step}, where a fit of {length_text} "
            f"from step {step_range.start} ends elsewhere; stop_reason is {stop_reason!r:.100}"
        )


def _is_guess(step_range: fg.StepRange, step: int, epochs: int) -> bool:
    """Return whether a fit of that many epochs takes the end of its range for its end at `step`:
    each epoch counts as long as the one before it, or as longer once it has turned out to be."""
    stop = step_range.stop
    if not step_range.epoch_ends:
        # The length of the first epoch is known to its data alone.
        return stop is None or stop == step + 1 or (stop - step_range.start) % epochs == 0
    *_, before, last = (step_range.start, *step_range.epoch_ends)
    guess = last + max(epochs - len(step_range.epoch_ends), 0) * (last - before)
    return stop == guess or (guess <= step and stop == step + 1)


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


def check_data_position(
    position: Mapping[str, Any] | None,
    step_range: fg.StepRange,
    step: int,
    *,
    has_restarted: bool,
) -> None:
    """Raise `ValueError` if a position in the data is not that after the steps of a fit, each of
    which takes one batch.

    Args:
        position: of the first process; that of another one may have epochs of its own.
        step_range: of the fit.
        step: that of the checkpoint.
        has_restarted: whether the data may have started over at a resume, so that the position
            counts from there.
    """
    if position is None:
        if step > step_range.start:
            raise ValueError(
                f"data_position is null; it must be that after the {step - step_range.start} "
                f"batches of the steps from {step_range.start} to {step}"
            )
        return
    num_ended = len(step_range.epoch_ends)
    num_batches = step - max(step_range.start, *step_range.epoch_ends, 0)
    epoch = position["epoch"]
    batch = position["batch"]
    is_right = epoch == num_ended and batch == num_batches
    if has_restarted:
        is_before_first_end = epoch == 0 and batch <= num_batches
        is_right = is_before_first_end or (epoch <= num_ended and batch == num_batches)
    if not is_right:
        raise ValueError(
            f"data_position is epoch {epoch}, batch {batch}; after the steps from "
            f"{step_range.start} to {step} it must be epoch {num_ended}, batch {num_batches}"
        )


def parse_pending_actions(value: Any, step_range: fg.StepRange, step: int) -> tuple[str, ...]:
    """Return the names of pending actions.

    Args:
        value: as it was read.
        step_range: of the fit.
        step: that of the checkpoint.

    Raises:
        ValueError: they are not such.
    """
    names = tuple(
        check_text(name, "pending_actions") for name in check_list(value, "pending_actions")
    )
    if len(set(names)) < len(names):
        raise ValueError(f"pending_actions names an action twice: {', '.join(names)}")
    # The engine's own action for `on_epoch_end`: whatever the program, it is due at epoch ends.
    if "epoch_end" in names and step not in step_range.epoch_ends:
        raise ValueError(f"pending_actions has 'epoch_end', and no epoch ends at {step}")
    return names


def list_unexpected_actions(
    names: Iterable[str], actions: Sequence[BoundAction], step_range: fg.StepRange, step: int
) -> list[str]:
    """Return why pending actions are not those that this program would leave pending.

    The program may be another one than that which saved: only its user knows.

    Args:
        names: of the pending actions.
        actions: of the program.
        step_range: of the fit.
        step: that of the checkpoint.
    """
    by_name = {action.name: action for action in actions}
    reasons = []
    for name in names:
        action = by_name.get(name)
        if action is None:
            reasons.append(f"{name}, which no plugin schedules")
        elif is_exact(action.trigger) and action.trigger.next(step - 1, step_range) != step:
            reasons.append(f"{name}, which is not due at step {step}")
    return reasons


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
    metrics_by_source = check_object(value, "metrics")
    for source, metrics in metrics_by_source.items():
        for name, metric in check_object(metrics, f"metrics.{source}").items():
            is_number = isinstance(metric, bool | int | float)
            is_array = isinstance(metric, jax.Array | np.ndarray | np.generic)
            if not is_number and not (is_array and is_real_dtype(metric.dtype)):
                raise ValueError(
                    f"metrics.{source}.{name} is {metric!r:.100}, which is not a number"
                )
    return metrics_by_source


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the description of a run is not such."""
    for section in ("configuration", "versions", "devices"):
        if manifest.get(section) is not None:
            check_object(manifest[section], section)
    if manifest.get("hyperparameters") is not None:
        check_hyperparameters(manifest["hyperparameters"])
    for line in check_list(manifest["model"], "model"):
        check_text(line, "model")
    for plugin in check_list(manifest["plugins"], "plugins"):
        check_object(plugin, "plugins")
        for name in ("name", "distribution", "version"):
            check_text(plugin[name], f"plugins.{name}")
        check_bool(plugin["decisive"], "plugins.decisive")
        check_object(plugin["settings"], "plugins.settings")


def check_hyperparameters(section: Any) -> None:
    """Raise `ValueError` if it is not what a manifest says of hyperparameters."""
    check_object(section, "hyperparameters")
    for name, value in check_object(section["program"], "hyperparameters.program").items():
        _check_hyperparameter(value, f"hyperparameters.program.{name}")
    for path, entry in check_object(section["state"], "hyperparameters.state").items():
        check_object(entry, f"hyperparameters.state.{path}")
        if entry.keys() != {"value", "program"}:
            raise ValueError(f"hyperparameters.state.{path} has {sorted(entry)}")
        for kind, value in entry.items():
            _check_hyperparameter(value, f"hyperparameters.state.{path}.{kind}")


def _check_hyperparameter(value: Any, name: str) -> None:
    """Raise `ValueError` unless it is a number, a string that stands for one, or a list of them."""
    if isinstance(value, list):
        for item in value:
            _check_hyperparameter(item, name)
    elif not isinstance(value, bool | int | float | str | None):
        raise ValueError(f"{name} is {value!r}")


def parse_requested_length(settings: Mapping[str, Any]) -> TrainingLength:
    """Return how long a fit was to train; raise `ValueError` if it is not such."""
    check_object(settings, "settings")
    steps = check_optional_count(settings["steps"], "settings.steps")
    epochs = check_optional_count(settings["epochs"], "settings.epochs")
    return TrainingLength(steps, epochs)


def parse_array_specs(value: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each array, by path; raise `ValueError` if they are not such."""
    specs = {}
    for name, spec in check_object(value, "arrays").items():
        shape, dtype = spec
        sizes = [
            check_count(size, f"arrays.{name}", largest=_LARGEST_DIMENSION)
            for size in check_list(shape, name)
        ]
        specs[name] = tuple(sizes), check_text(dtype, f"arrays.{name}")
    return specs


def check_commit_fields(content: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a field of a `COMMIT` holds what this plugin does not write there."""
    check_count(content["step"], "step")
    check_count(content["attempt"], "attempt", smallest=1)
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
        _check_seconds(seconds, f"timings.{name}")
    _check_seconds(content["wall_time"], "wall_time")
    check_optional_text(content.get("run"), "run")
    monitor = content["monitor"]
    is_pair = isinstance(monitor, list) and len(monitor) == 2
    is_valid = is_pair and isinstance(monitor[0], str) and monitor[1] in (None, *get_args(Mode))
    if monitor is not None and not is_valid:
        raise ValueError(f"monitor is {monitor!r}; it must be a metric and a mode")
    if content.get("better") is not None:
        check_text(content["better"], "better")
    if content.get("best") is not None:
        check_count(content["best"], "best")
    for name in check_list(content.get("telemetry", []), "telemetry"):
        check_text(name, "telemetry")


def _check_seconds(seconds: Any, name: str) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not abs(seconds) <= _LARGEST_SECONDS:
        raise ValueError(f"{name} is {seconds!r:.100}; it must be a number of seconds")
