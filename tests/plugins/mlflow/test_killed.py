"""A run that is killed and resumed has each record at MLflow once."""

import os
import signal
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
from fulgurite_logging import JSONLLogger
from fulgurite_mlflow import MLflowLogger
from fulgurite_runs.json_codec import loads


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch @ self.weight - 1) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Kill:
    def __init__(self, step: int) -> None:
        self.step = step

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_where_renamed(name: str, count: int) -> None:
    """Kill this process where it renames a file to `name` for the `count`-th time, before that."""
    renames: list[Any] = []

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == name:
            renames.append(arguments)
            if len(renames) == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def main(folder: Path, kill: int) -> None:
    """Train for 20 steps, killed at step `kill` unless it is 0; one below zero kills where the id
    of MLflow's run is noted."""
    if kill < 0:
        kill_where_renamed("mlflow.json", -kill)
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    plugins = [
        JSONLLogger(),
        MLflowLogger("tests"),
        Checkpointer(every=4),
        *([Kill(kill)] if kill > 0 else []),
    ]
    engine = fg.Engine(steps=20, run_dir=folder, log_every=1, plugins=plugins, autoload=False)
    engine.fit(Line, fg.ArrayData(x, batch_size=10, shuffle=True), resume="auto")


@pytest.mark.full
def test_a_killed_run_goes_on_with_its_run_and_has_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mlflow.tracking import MlflowClient

    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MLFLOW")}
    for kill in (11, 0):
        subprocess.run([sys.executable, __file__, tmp_path / "run", str(kill)], env=environment)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    lines = [loads(line) for line in (tmp_path / "run" / "records.jsonl").read_bytes().splitlines()]
    for name in ("loss", "batch_loss"):
        expected = [
            (line["step"], line["values"][name]) for line in lines if line["source"] == "train"
        ]
        history = client.get_metric_history(run.info.run_id, f"train/{name}")
        assert [(metric.step, metric.value) for metric in history] == expected
        assert len(expected) == 20


@pytest.mark.slow
@pytest.mark.parametrize("kill", [-1, pytest.param(-2, marks=pytest.mark.slow)])
def test_a_run_killed_before_its_id_is_noted_leaves_no_second_run_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: int
):
    """It is continued where the run had saved a checkpoint by then, and killed where it had not."""
    from mlflow.tracking import MlflowClient

    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MLFLOW")}
    command = [sys.executable, __file__, tmp_path / "run"]
    assert subprocess.run([*command, str(kill)], env=environment).returncode == -signal.SIGKILL
    subprocess.run([*command, "0"], env=environment, check=True)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    statuses = [run.info.status for run in client.search_runs([experiment.experiment_id])]
    assert sorted(statuses) in (["FINISHED"], ["FINISHED", "KILLED"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
