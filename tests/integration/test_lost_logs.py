"""Files of loggers that are deleted while a run trains, or that something else has taken the place of:
the run stays one that can be resumed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import CSVLogger, JSONLLogger
from fulgurite_tensorboard import TensorBoardLogger, read_events

ZEROS = [np.zeros(1, np.float32)]
FILES = {
    JSONLLogger: "records.jsonl",
    CSVLogger: "records.csv",
    TensorBoardLogger: "tensorboard/*/events.*",
}


class Counting(fg.Module):
    """A weight that every update makes smaller by 1, from 0."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class At:
    """An action at one step, before the checkpoint of that step."""

    def __init__(self, step: int, action: Callable[[fg.Run], Any]) -> None:
        self.step = step
        self.action = action

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("act", fg.At(self.step), self.action)]


def fit(run: Path, steps: int, *plugins: Any, resume: Any = None) -> fg.FitResult:
    """Trains with a record and a checkpoint at every second step."""
    plugins = (Checkpointer(2, max_to_keep=None), *plugins)
    engine = fg.Engine(run_dir=run, steps=steps, log_every=2, plugins=plugins, autoload=False)
    return engine.fit(Counting, ZEROS, resume=resume)


def read_steps(run: Path, logger: type) -> list[int]:
    """Return the steps of the losses in the files of a logger, read without it but for events."""
    if logger is JSONLLogger:
        lines = map(json.loads, (run / "records.jsonl").read_text().splitlines())
        return [line["step"] for line in lines if line["source"] == "train"]
    if logger is CSVLogger:
        rows = (run / "records.csv").read_text().splitlines()[1:]
        return [int(row.partition(",")[0]) for row in rows]
    paths = sorted((run / "tensorboard" / "train").glob("events.*"))
    events = [event for path in paths for _, event in read_events(path)]
    return [event.step for event in events for value in event.summary.value if value.tag == "loss"]


@pytest.mark.variants("full")
@pytest.mark.parametrize("logger", FILES)
@pytest.mark.parametrize("step", [3, 6], ids=["before further records", "after the last record"])
def test_a_run_whose_log_was_deleted_resumes_and_says_that_records_are_missing(
    tmp_path: Path, logger: Any, step: int
) -> None:
    def delete(run: fg.Run) -> None:
        deleting.flush_logger(run.step).result(60)
        for path in tmp_path.glob(FILES[logger]):
            path.unlink()

    deleting = logger()
    with pytest.warns(UserWarning, match="failed and gets no more records"):
        result = fit(tmp_path, 6, deleting, At(step, delete))
    name = logger.plugin_name
    assert "was deleted or replaced while it was written to" in result.failures[name]
    resumed = fit(tmp_path, 10, logger(), resume="auto")
    assert float(resumed.module.weight) == -10
    reason = f"{name} failed before the checkpoint of step 6: records are missing."
    assert [message for message in resumed.messages if message.startswith(reason)]
    assert read_steps(tmp_path, logger) == [8, 10]


@pytest.mark.variants("full")
@pytest.mark.parametrize("logger", FILES)
def test_a_log_that_was_deleted_after_its_run_can_be_left_behind(
    tmp_path: Path, logger: Any
) -> None:
    """As the error says: the files are put back, or the run continues in another directory."""
    fit(tmp_path / "run", 4, logger())
    for path in (tmp_path / "run").glob(FILES[logger]):
        path.rename(path.with_name("moved"))
    with pytest.raises(CheckpointError, match=r"[Pp]ut .* back, or resume in another directory"):
        fit(tmp_path / "run", 6, logger(), resume="auto")
    elsewhere = tmp_path / "elsewhere"
    resumed = fit(elsewhere, 6, logger(), resume=fg.CheckpointRef(tmp_path / "run"))
    assert (float(resumed.module.weight), read_steps(elsewhere, logger)) == (-6, [6])


@pytest.mark.full
@pytest.mark.parametrize("logger", [JSONLLogger, CSVLogger])
def test_a_pipe_in_place_of_a_log_is_not_waited_for(tmp_path: Path, logger: Any) -> None:
    fit(tmp_path, 4, logger())
    (tmp_path / FILES[logger]).rename(tmp_path / "moved")
    os.mkfifo(tmp_path / FILES[logger])
    with pytest.raises(CheckpointError, match=rf"{FILES[logger]} cannot be read"):
        fit(tmp_path, 6, logger(), resume="auto")
    (tmp_path / "moved").rename(tmp_path / FILES[logger])
    fit(tmp_path, 6, logger(), resume="auto")
    assert read_steps(tmp_path, logger) == [2, 4, 6]
