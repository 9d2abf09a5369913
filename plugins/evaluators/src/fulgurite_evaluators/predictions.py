"""Predictions in files: NumPy archives or JSON lines, written completely or not at all."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal
from zipfile import ZipFile

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError, check_one_of
from fulgurite.plugins import as_trigger, hide_constructor_frames, leaves_with_paths
from fulgurite_runs import RunPlugin, dumps, sync_folder

FORMATS = ("npz", "jsonl")
ROOT = "preds"
"""What predictions are called that are one array."""

AppendPredictions = Callable[[Any], None]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@contextmanager
def open_predictions(path: Path) -> Iterator[AppendPredictions]:
    """Give a function that takes the predictions of each batch; the file is there at the end of the
    block, if nothing fails in it.

    A file `.npz` holds an array for each path in the predictions, over all examples, and is
    collected in memory; numbers of a dtype that NumPy does not know, such as bfloat16, are float32
    there. A file `.jsonl` holds a line for each example, with the same paths, and is
    written batch by batch.

    Args:
        path: the file; what is there already is replaced.

    Raises:
        ConfigurationError: it has another suffix.
        ModelError: predictions that are not alike in all batches are to become one array.
    """
    suffix = path.suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise ConfigurationError(
            f"{path}: predictions are written as .npz (arrays) or .jsonl (a line for each example)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(partial_path, "wb") as file:
            batches: list[dict[str, np.ndarray]] = []

            def append(preds: Any) -> None:
                arrays = {name or ROOT: np.asarray(leaf) for name, leaf in leaves_with_paths(preds)}
                if suffix == "npz":
                    batches.append(arrays)
                else:
                    file.writelines(_format_lines(arrays))

            yield append
            if suffix == "npz":
                _write_archive(file, _concatenate(batches, path))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)
        sync_folder(path.parent)
    finally:
        partial_path.unlink(missing_ok=True)


def _concatenate(batches: list[dict[str, np.ndarray]], path: Path) -> dict[str, np.ndarray]:
    """Return the predictions for all examples, by name.

    Args:
        batches: those of each batch.
        path: of the file, for errors.
    """
    whole: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        if not all(name in batch for batch in batches):
            raise ModelError(
                f"{path}: some batches have predictions {name!r} and others have none: give the "
                "same for every batch, or write a file .jsonl"
            )
        parts = [batch[name] for batch in batches]
        shapes = sorted({str(list(part.shape[1:])) for part in parts})
        if len(shapes) > 1:
            raise ModelError(
                f"{path}: the predictions {name!r} of an example are arrays of the shapes "
                f"{' and '.join(shapes)}: pad them to one, or write a file .jsonl"
            )
        whole[name] = _as_numpy_dtype(np.concatenate(parts))
    return whole


def _as_numpy_dtype(array: np.ndarray) -> np.ndarray:
    """Return an array that `np.load` can read: of bfloat16 and the like, which NumPy itself does
    not know, the same numbers in a wider dtype."""
    if array.dtype.isbuiltin == 1:
        return array
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float32)
    return array.astype(np.int16)


def _write_archive(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """Write what `np.savez` does, of which some names are arguments."""
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _format_lines(arrays: dict[str, np.ndarray]) -> Iterator[bytes]:
    num_examples = len(next(iter(arrays.values())))
    for index in range(num_examples):
        example = {name: array[index].tolist() for name, array in arrays.items()}
        yield f"{dumps(example)}\n".encode()


@hide_constructor_frames
@dataclass(eq=False)
class PredictionWriter(RunPlugin):
    """Writes the predictions for some data into the run's directory.

    The file is `predictions/NAME-STEP.npz`, or `.jsonl`. With several processes each writes its own
    part, `NAME-STEP.P-of-N.npz`.

    Example:
        from fulgurite_evaluators import PredictionWriter

        writer = PredictionWriter("test", data, every=fg.AtEnd(), format="jsonl")
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=[writer])

    Attributes:
        name: begins the names of the files.
        data: any data source; one epoch of it is predicted.
        every: a trigger, or an interval in steps.
        format: `npz` or `jsonl`, see `open_predictions`.
        module_view: `current`, or the name of a module that another plugin derives from the state.
    """

    plugin_name = "predictions"

    name: str
    data: Any
    every: fg.Trigger | int = field(default_factory=fg.AtEnd)
    format: Literal["npz", "jsonl"] = "npz"
    module_view: str = "current"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"PredictionWriter({self.name!r}): a name is letters, digits and . _ -, because it "
                "names files"
            )
        check_one_of(self.format, FORMATS, f"PredictionWriter({self.name!r}): format")
        self.every = as_trigger(self.every)

    @property
    def instance(self) -> str:
        """The name, by which the engine tells writers apart."""
        return self.name

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Return when it writes."""
        return [fg.ScheduledAction("write", self.every, self._write)]

    def _write(self, run: fg.Run) -> None:
        if run.run_dir is None:
            if run.engine.fast_dev_run is not None:
                return
            raise ConfigurationError(
                "PredictionWriter writes into the run's directory: give Engine(run_dir=...)"
            )
        part = f".{jax.process_index()}-of-{jax.process_count()}"
        part = part if jax.process_count() > 1 else ""
        file_name = f"{self.name}-{run.step}{part}.{self.format}"
        state = run.engine.apply_module_view(run.state, self.module_view)
        run.run_dir.assert_locked()
        with open_predictions(run.run_dir.path / "predictions" / file_name) as append:
            run.engine.predict(state, self.data, callback=append)
