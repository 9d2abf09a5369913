"""A store that does not answer stops neither training nor checkpoints, and loses nothing."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_mlflow import MLflowLogger
from mlflow.tracking import MlflowClient

DATABASE = "mlflow.db"


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch @ self.weight - 1) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class LockedDatabase:
    """A database that answers nobody from a step on, until the fit has ended and every checkpoint
    is there."""

    before = ("mlflow",)

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.step = step
        self.checkpoints: set[str] = set()
        self.connection = sqlite3.connect(folder.parent / DATABASE, timeout=60)
        if step == 0:
            self.lock()

    def lock(self) -> None:
        self.connection.execute("BEGIN EXCLUSIVE")

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        if self.step == 0:
            return []
        return [fg.ScheduledAction("lock", fg.At(self.step), lambda run: self.lock())]

    @fg.hookimpl
    def close_logger(self) -> None:
        self.checkpoints = {path.name for path in self.folder.glob("checkpoints/step-*")}
        self.connection.rollback()


def kill(run: fg.Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, *plugins: Any, steps: int = 20, log_every: int = 1) -> fg.FitResult:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    logger = MLflowLogger("tests", tracking_uri=get_uri(folder.parent))
    engine = fg.Engine(
        steps=steps,
        run_dir=folder,
        log_every=log_every,
        plugins=[logger, Checkpointer(every=4), *plugins],
        autoload=False,
    )
    return engine.fit(Line, fg.ArrayData(x, batch_size=10, shuffle=True), resume="auto")


def get_uri(folder: Path) -> str:
    return f"sqlite:///{folder / DATABASE}?timeout=20"


def create_database(folder: Path) -> MlflowClient:
    client = MlflowClient(get_uri(folder))
    client.create_experiment("tests")
    return client


def read_losses(client: MlflowClient) -> list[tuple[int, float]]:
    """Step and value of each loss that has arrived; repetitions would be there."""
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return [(metric.step, metric.value) for metric in history]


def list_losses(result: fg.FitResult) -> list[tuple[int, float]]:
    return [*zip(result.history.steps("train/loss"), result.history["train/loss"], strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("step", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_training_and_checkpoints_wait_for_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    monkeypatch.chdir(tmp_path)  # where MLflow puts the files of a database
    client = create_database(tmp_path)
    database = LockedDatabase(tmp_path / "run", step)
    result = fit(tmp_path / "run", database)
    assert not result.failures
    assert "step-20" in database.checkpoints
    assert read_losses(client) == list_losses(result)


@pytest.mark.full
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_what_had_not_arrived_before_a_kill_is_sent_by_the_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    monkeypatch.chdir(tmp_path)
    client = create_database(tmp_path)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MLFLOW")}
    subprocess.run([sys.executable, __file__, tmp_path / "run", str(step)], env=environment)
    # The save of step 12 has waited for that of step 8.
    assert (tmp_path / "run/checkpoints/step-8").is_dir()
    result = fit(tmp_path / "run")
    assert read_losses(client) == list_losses(result)
    assert len(result.history["train/loss"]) == 20


@pytest.mark.full
def test_a_full_queue_ends_the_logger_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MLflowLogger, "queue_size", 3)
    create_database(tmp_path)
    database = LockedDatabase(tmp_path / "run", 0)
    with pytest.warns(UserWarning, match="3 records wait for the server, which is slower"):
        result = fit(tmp_path / "run", database)
    assert set(result.failures) == {"mlflow"}
    assert "step-20" in database.checkpoints


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    killer = fg.LambdaPlugin(every={13: kill})
    fit(folder, LockedDatabase(folder, int(sys.argv[2])), killer)
