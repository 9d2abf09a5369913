"""A run that a decision ends early, and that is interrupted where it ends: what runs at the end of a
run is done by the run that resumes, as by one that nobody interrupts."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from fulgurite_runs import RunDirectory
from fulgurite_stopping import EarlyStopping

pytestmark = pytest.mark.full

ZEROS = [np.zeros(1, np.float32)] * 4


class Valley(fg.Module):
    """A weight that grows by 1 with each update from 0; it is best at 8."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(-self.weight)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"loss": (self.weight - 8) ** 2, "weight": self.weight})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Interrupting:
    """The batches of an evaluation: something happens in the middle of one pass, counted from 1."""

    def __init__(self, happen: Callable[[], None], at_pass: int) -> None:
        self.happen = happen
        self.at_pass = at_pass
        self.passes = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        # The first pass is that of the check before the first step.
        self.passes += 1
        yield np.zeros(1, np.float32)
        if self.passes == 1 + self.at_pass:
            self.happen()
        yield np.zeros(1, np.float32)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise OSError("the disk is gone")


def read_records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "records.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line)).get("stream") != "telemetry"]


def train(run: Path, watched: Any = ZEROS, final: Any = ZEROS) -> fg.FitResult:
    """Evaluated at 4, 8, 12, …: it ends at 16, after two that are worse, with the weight of 8."""

    def note_end(run: fg.Run) -> None:
        run.log_scalars("end", {"weight": float(run.state.module.weight)})

    plugins = [
        Evaluator("val", fg.DataSource(watched, prefetch=0), every=4),
        EarlyStopping("val/loss", patience=2, restore_best=True),
        Evaluator("final", fg.DataSource(final, prefetch=0), every=fg.AtEnd()),
        fg.LambdaPlugin(every={fg.AtEnd(): note_end}),
        JSONLLogger(),
        Checkpointer(every=6),
    ]
    engine = fg.Engine(steps=100, run_dir=run, plugins=plugins, autoload=False, log_every=5)
    return engine.fit(Valley, ZEROS, resume="auto")


@pytest.mark.parametrize(("where", "happen"), [("watched", terminate), ("final", fail)])
def test_what_runs_at_an_early_end_is_done_by_the_run_that_resumes(
    where: str, happen: Callable[[], None], tmp_path: Path
) -> None:
    """Interrupted in the evaluation that makes early stopping end the run, or in the final one."""
    whole = train(tmp_path / "whole")
    assert (int(whole.state.step), float(whole.module.weight)) == (16, 8)
    records = read_records(tmp_path / "whole")
    sources = [record["source"] for record in records if record["step"] == 16]
    assert sources == ["val", "final", "train", "end"]
    assert records[-1]["values"] == {"weight": 8}

    interrupting = {where: Interrupting(happen, 4 if where == "watched" else 1)}
    if happen is fail:
        with pytest.raises(OSError, match="the disk is gone"):
            train(tmp_path / "run", **interrupting)
    else:
        stopped = train(tmp_path / "run", **interrupting)
        assert (stopped.stop_reason, int(stopped.state.step)) == ("SIGTERM", 16)
    assert not RunDirectory(tmp_path / "run").is_complete
    resumed = train(tmp_path / "run")
    assert (int(resumed.state.step), float(resumed.module.weight)) == (16, 8)
    assert resumed.stop_reason == whole.stop_reason
    assert read_records(tmp_path / "run") == records
    assert RunDirectory(tmp_path / "run").is_complete
    # Once more: nothing is done twice.
    train(tmp_path / "run")
    assert read_records(tmp_path / "run") == records
