"""What the small files of a checkpoint hold: how they are encoded, and how they are read again.

Both stand here so that what is written can be read: before the first checkpoint of a fit is
written, its files are read from the text as a run that resumes would read them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError, PathError
from fulgurite.plugins import SHARED_HOST_STATE, redact_registered_value
from fulgurite_runs import encode_readable, loads

from fulgurite_checkpoint import arrays
from fulgurite_checkpoint.files import DamagedError
from fulgurite_checkpoint.history import decode_history
from fulgurite_checkpoint.validation import (
    check_bool,
    check_data_position,
    check_manifest,
    check_optional_text,
    check_stop,
    check_texts_by_name,
    parse_array_specs,
    parse_data_position,
    parse_host_states,
    parse_metrics,
    parse_pending_actions,
    parse_requested_length,
    parse_step_range,
)


@dataclass(frozen=True)
class Contents:
    """What the small files of a checkpoint say.

    Attributes:
        specs: shape and dtype of the arrays by path.
        module_views: the module view whose weights a source of metrics has measured, by source,
            where it is not the module.
        has_data_restarted: whether its position in the data may count from a resume, at which the
            data began again.
        make_snapshot: makes the snapshot, called with its state.
    """

    specs: dict[str, arrays.Spec]
    module_views: dict[str, str]
    has_data_restarted: bool
    make_snapshot: Callable[[fg.TrainState], fg.Snapshot]


def parse_contents(
    path: Path, step: int, process: int, files: Mapping[str, dict[str, Any]]
) -> Contents:
    """Return what the small files of a checkpoint say.

    Args:
        path: the directory of the checkpoint, for errors.
        step: of the checkpoint.
        process: which read or wrote `host-PROCESS.json`.
        files: the JSON of each file, by name.

    Raises:
        DamagedError: a file holds what is never written there.
    """
    manifest = files["manifest.json"]
    index = files["index.json"]
    host_name = f"host-{process}.json"
    host = files[host_name]
    with _blame(path / "manifest.json"):
        check_manifest(manifest)
        requested_length = parse_requested_length(manifest["settings"])
    with _blame(path / "index.json"):
        specs = parse_array_specs(index["arrays"])
        weights_only = _parse_weights_only(index, specs)
        # Checkpoints of earlier versions do not tell.
        views = check_texts_by_name(index.get("module_views", {}), "module_views")
        has_restarted = check_bool(index.get("data_restarted", True), "data_restarted")
        step_range = parse_step_range(index["step_range"], step)
        pending_actions = parse_pending_actions(index["pending_actions"], step_range, step)
        metrics = parse_metrics(index["metrics"])
        stop_reason = check_optional_text(index.get("stop_reason"), "stop_reason")
        # No run resumes from weights alone, and a mean of them is of no step.
        if not weights_only:
            check_stop(step_range, step, requested_length, stop_reason)
    with _blame(path / host_name):
        data_position = parse_data_position(host["data_position"])
        host_states = parse_host_states(host["host_states"])
        if process == 0 and not weights_only:
            check_data_position(data_position, step_range, step, has_restarted=has_restarted)
    with _blame(path / "history.json"):
        records = decode_history(files["history.json"])
    make_snapshot = partial(
        fg.Snapshot,
        step_range=step_range,
        data_position=data_position,
        pending_actions=pending_actions,
        host_states=host_states,
        metrics=metrics,
        requested_length=requested_length,
        history=records,
        stop_reason=stop_reason,
        data=_describe_data(manifest),
    )
    return Contents(specs, views, has_restarted, make_snapshot)


def _describe_data(manifest: dict[str, Any]) -> str | None:
    """Return the data of a run as its manifest describes it; None if it does not."""
    description = manifest["settings"].get("data")
    return description if isinstance(description, str) else None


def check_contents(path: Path, step: int, texts: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` if the small files of the first process could not be read again.

    Args:
        path: where they are to be written.
        step: of the checkpoint.
        texts: the content of each file by name, without the history, which fits whatever is in it.
    """
    files = {name: loads(text) for name, text in texts.items()}
    files["history.json"] = {"records": []}
    try:
        parse_contents(path, step, 0, files)
    except DamagedError as error:
        raise ConfigurationError(
            f"no run could resume from the checkpoint of step {step}: {error.__cause__}. Correct "
            "the plugin or data source that this comes from"
        ) from error


def make_index(snapshot: fg.Snapshot, arrays_by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `index.json` holds of a snapshot.

    Args:
        snapshot: the snapshot.
        arrays_by_path: those that are saved.
    """
    return {
        "arrays": {name: arrays.get_spec(array) for name, array in arrays_by_path.items()},
        "step_range": snapshot.step_range.to_json(),
        "pending_actions": snapshot.pending_actions,
        "metrics": redact_registered_value(snapshot.metrics),
        "stop_reason": snapshot.stop_reason,
    }


def encode_host(snapshot: fg.Snapshot) -> str:
    """Return the JSON of what belongs to the host.

    Raises:
        ConfigurationError: it cannot be written, or not be read again; it names the plugin, or the
            data source.
    """
    position = snapshot.data_position
    host = {"host_states": snapshot.host_states, "data_position": position}
    try:
        return encode_readable(host, "what plugins and data keep on the host")
    except ConfigurationError:
        # Which of them is it?
        for name, state in snapshot.host_states.items():
            owner = (
                "run.shared"
                if name == SHARED_HOST_STATE
                else f"plugin {name!r}, hook get_host_state"
            )
            _check_part(state, owner)
        _check_part(position, "the data source, get_state")
        raise


def _check_part(part: Any, owner: str) -> None:
    try:
        encode_readable(part, "the state")
    except ConfigurationError as error:
        raise ConfigurationError(f"{owner}: {error}") from error


@contextmanager
def _blame(file: Path) -> Iterator[None]:
    """Turn what a block raises, if a file holds what is never written there, into a `DamagedError`
    that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, PathError) as error:
        raise DamagedError(
            f"{file} was not written by fulgurite-checkpoint: {type(error).__name__}: {error}"
        ) from error


def _parse_weights_only(index: dict[str, Any], specs: dict[str, arrays.Spec]) -> bool:
    weights_only = check_bool(index.get("weights_only", False), "weights_only")
    if weights_only and len(arrays.drop_training_arrays(specs)) < len(specs):
        raise ValueError("weights_only is true, and there are arrays that only training needs")
    return weights_only
