"""Checkpoints that hold weights, or a whole state, written outside of a run."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import format_tree, redact_registered_value
from fulgurite_runs import RunDirectory, describe_model, dumps, encode_readable, expand_path

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.files import write_durably
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.retention import publish


def save_weights(source: fg.FitResult | fg.TrainState, out: str | os.PathLike[str]) -> None:
    """Write the weights of a trained model, its model state and the states of plugins, such as
    averages, as a run directory with one checkpoint.

    It is read as any other: by `fit(init_from=out)`, `engine.evaluate(weights=out)`,
    `engine.load_weights(model, out)` and, with the program that makes such a model and all its
    arguments, by `fulgurite evaluate PROGRAM --run OUT`.

    Args:
        source: what `fit` returned, or a state.
        out: the new directory.

    Raises:
        CheckpointError: `out` exists.

    Example:
        from fulgurite_checkpoint import Checkpointer, save_weights

        save_weights(engine.fit(model, data), "weights")
        other = fg.Engine(steps=10, run_dir="runs/other", plugins=[Checkpointer(10)])
        other.fit(model, data, init_from="weights")
    """
    state = source.state if isinstance(source, fg.FitResult) else source
    step = int(state.step)
    by_path = arrays.drop_training_arrays(arrays.flatten_state(state))
    manifest = {
        "configuration": None,
        "program": None,
        "plugins": [],
        "model": describe_model(format_tree(state.module)),
        "settings": {"steps": None, "epochs": None},
    }
    index = {
        "step_range": fg.StepRange(0, step).to_json(),
        "metrics": redact_registered_value(source.metrics)
        if isinstance(source, fg.FitResult)
        else {},
        "stop_reason": None,
    }
    write_weights(find_new(out), step, by_path, manifest, index)


def find_new(out: str | os.PathLike[str]) -> Path:
    """Return the path of a directory that is to be written, with `~` and variables expanded.

    Args:
        out: as the user gives it.

    Raises:
        CheckpointError: it exists, or cannot be written.
        ConfigurationError: it is not on this machine.
    """
    text = expand_path(out)
    if "://" in text:
        raise ConfigurationError(
            f"{text} is not a folder of this machine: write to one, and copy it there"
        )
    path = Path(text)
    if path.exists():
        raise CheckpointError(f"{path} already exists: choose another path")
    arrays.check_writable(path)
    return path


def write_weights(
    out: Path,
    step: int,
    arrays_by_path: Mapping[str, Any],
    manifest: dict[str, Any],
    index: dict[str, Any],
) -> None:
    """Write a run directory with one checkpoint of weights.

    Args:
        out: the new directory, of `find_new`.
        step: of the checkpoint.
        arrays_by_path: what it holds.
        manifest: of the run that it is of.
        index: of the checkpoint that it is like, if any; what it says of arrays is replaced.
    """
    write_run(out, step, arrays_by_path, manifest, index | {"weights_only": True})


def write_run(
    out: Path,
    step: int,
    arrays_by_path: Mapping[str, Any],
    manifest: dict[str, Any],
    index: dict[str, Any],
) -> None:
    """Write a run directory with one checkpoint; the arguments are those of `write_weights`."""
    directory = RunDirectory(out)
    with directory.lock():
        directory.start_attempt(dumps(manifest))
        _write_checkpoint(out, step, arrays_by_path, manifest, index)
        directory.mark_complete()


def _write_checkpoint(
    out: Path,
    step: int,
    arrays_by_path: Mapping[str, Any],
    manifest: dict[str, Any],
    index: dict[str, Any],
) -> None:
    path = format.get_checkpoint_folder(out) / f"saving-step-{step}"
    path.mkdir(parents=True)
    on_device = {name: jnp.asarray(array) for name, array in arrays_by_path.items()}
    saving = arrays.start_saving(path / "arrays", on_device)
    saving.result()
    specs = {name: arrays.get_spec(array) for name, array in on_device.items()}
    contents = {
        "manifest.json": manifest,
        "index.json": index | {"arrays": specs, "pending_actions": []},
        "history.json": {"records": []},
        "host-0.json": {"host_states": {}, "data_position": None},
    }
    for name, content in contents.items():
        write_durably(path / name, encode_readable(content, name).encode())
    commit = Commit(
        step=step,
        attempt=1,
        hashes=[format.write_hashes(path, 0, 1)],
        logger_positions=[{}],
        metrics={},
        monitor=None,
        timings={},
        wall_time=time.time(),
    )
    format.write_commit(path, commit)
    publish(path, commit)
