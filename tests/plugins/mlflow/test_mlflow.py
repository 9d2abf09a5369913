"""MLflow for real, in its store of files: what is there is read back by its client."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.listing import list_runs
from fulgurite_logging import JSONLLogger
from fulgurite_mlflow import MLflowLogger
from fulgurite_mlflow.command import run_mlflow
from fulgurite_mlflow.values import clean_name
from fulgurite_runs import RunDirectory
from fulgurite_testing import check_plugin


class Line(fg.Module):
    """Least squares."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.arange(4.0)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = ((batch @ self.weight - 1) ** 2).mean()
        return fg.Output(loss, metrics={"size[0]": jnp.sum(self.weight**2)})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2)


BATCHES = [
    np.random.default_rng(number).normal(size=(5, 4)).astype(np.float32) for number in range(8)
]


def fit(folder: Path, *plugins: Any, **arguments: Any) -> fg.FitResult:
    engine = fg.Engine(steps=8, run_dir=folder, log_every=2, plugins=plugins, autoload=False)
    return engine.fit(Line, fg.DataSource(BATCHES), **arguments)


class Telling:
    """Tells something in the middle, which is telemetry."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("tell", fg.At(4), lambda run: run.notify("telling", "half"))]


def get_client(store: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store.as_uri())


def read_metrics(store: Path, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each number, by name; repetitions would be there."""
    client = get_client(store)
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }


def open_backend(folder: Path, position: Any = None, step: int = 0) -> Any:
    """A backend of the logger without an engine, whose calls a writer's thread would make."""
    folder.mkdir(exist_ok=True)
    run = SimpleNamespace(
        run_dir=SimpleNamespace(path=folder), step=step, step_range=SimpleNamespace(start=0)
    )
    return MLflowLogger("tests").open_backend(run, position)  # pyright: ignore[reportArgumentType]


def log(backend: Any, *steps: int, **values: Any) -> None:
    for step in steps:
        backend.write(fg.Record("scalars", "train", step, values or {"loss": step / 2}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client of a test may come first
    return tmp_path / "run"


@pytest.mark.full
def test_history_parameters_and_status_are_at_mlflow(folder: Path):
    logger = MLflowLogger("tests", tags={"data": "v2"})
    history = fit(folder, logger).history
    assert logger.run_id is not None
    client = get_client(folder.parent / "mlruns")
    run = client.get_run(logger.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "tests"
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.tags["data"] == "v2" and run.data.params["settings.steps"] == "8"
    metrics = read_metrics(folder.parent / "mlruns", logger.run_id)
    assert metrics["train/loss"] == [
        *zip(history.steps("train/loss"), history["train/loss"], strict=True)
    ]
    assert "train/size_0_" in metrics  # MLflow refuses brackets
    token = run.data.tags["fulgurite.token"]
    note = json.loads((folder / "mlflow.json").read_text())
    assert note == {"run_id": logger.run_id, "token": token}


@pytest.mark.parametrize("arrived", [4, 6, 10])
def test_resumed_run_sends_what_is_missing_and_nothing_twice(folder: Path, arrived: int):
    first = open_backend(folder)
    log(first, *range(2, arrived + 1, 2))
    first.sync()  # and the process is killed
    resumed = open_backend(folder, first.get_position(), step=4)
    log(resumed, 6, 8, 10)
    resumed.close()
    assert resumed.get_position() == first.get_position()
    metrics = read_metrics(folder.parent / "mlruns", first.get_position()["run_id"])
    assert metrics == {"train/loss": [(step, step / 2) for step in (2, 4, 6, 8, 10)]}


def test_a_run_whose_id_was_not_noted_is_found_by_its_tag(folder: Path):
    """As after a kill between MLflow's answer and the note of it."""
    first = open_backend(folder)
    log(first, 1)
    first.sync()
    note = json.loads((folder / "mlflow.json").read_text())
    (folder / "mlflow.json").write_text(json.dumps(note | {"run_id": None}))
    second = open_backend(folder, {"run_id": None}, step=1)
    log(second, 1, 2)
    second.close()
    assert second.get_position() == {"run_id": note["run_id"]}
    (experiment,) = get_client(folder.parent / "mlruns").search_experiments(
        filter_string="name = 'tests'"
    )
    runs = get_client(folder.parent / "mlruns").search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [note["run_id"]]
    metrics = read_metrics(folder.parent / "mlruns", note["run_id"])
    assert metrics["train/loss"] == [(1, 0.5), (2, 1.0)]


@pytest.mark.full
def test_what_is_sent_later_leaves_a_killed_run_killed(folder: Path):
    fit(folder, JSONLLogger(), Checkpointer(every=2))
    (folder / "COMPLETE").unlink()
    owner = json.loads((folder / "lock").read_text()) | {"ended": False, "pid": 2**22 + 5}
    (folder / "lock").write_text(json.dumps(owner))
    os.utime(folder / "lock", (1e9, 1e9))
    assert run_mlflow([str(folder)]) == 0
    (row,) = list_runs(folder)
    assert (row.state, row.attempts) == ("killed", 1)
    assert json.loads((folder / "lock").read_text()) == owner
    assert (folder / "lock").stat().st_mtime == 1e9


def test_a_run_that_starts_anew_has_a_run_of_its_own(folder: Path):
    first = open_backend(folder)
    first.sync()  # and the process is killed before its first checkpoint
    second = open_backend(folder)
    second.close()  # before a record came: nothing has begun
    second.sync()
    second.close()
    first_id, second_id = (backend.get_position()["run_id"] for backend in (first, second))
    client = get_client(folder.parent / "mlruns")
    assert client.get_run(first_id).info.status == "KILLED"
    assert client.get_run(second_id).info.status == "FINISHED"
    third = open_backend(folder)  # and it is killed when it has a checkpoint, but no answer yet
    resumed = open_backend(folder, third.get_position(), step=4)
    resumed.sync()
    assert resumed.get_position()["run_id"] not in (first_id, second_id)


def test_names_that_mlflow_cannot_tell_apart_are_left_out_with_one_warning(folder: Path):
    backend = open_backend(folder)
    log(backend, 1, 2, **{"a[0]": 1.0, "/../b c": 2.0, "each": np.arange(2), "text": "no number"})
    with pytest.warns(UserWarning, match=r"'train/a\(0\)' out.*'train/a\[0\]'") as caught:
        log(backend, 1, 2, **{"a(0)": 3.0})
    assert len(caught) == 1
    # In a store of files a metric is a file, and no folder of others.
    log(backend, 1, each=1.0)
    backend.close()
    metrics = read_metrics(folder.parent / "mlruns", backend.get_position()["run_id"])
    assert metrics == {
        "train/a_0_": [(1, 1.0), (2, 1.0)],
        "train/_._.b c": [(1, 2.0), (2, 2.0)],
        "train/each": [(1, 1.0)],
        "train/each.0": [(1, 0.0), (2, 0.0)],
        "train/each.1": [(1, 1.0), (2, 1.0)],
    }


def test_parameters_stay_as_they_were_first_and_texts_are_files(folder: Path):
    backend = open_backend(folder)
    # A file name of another encoding, as Python holds it.
    configuration = {"lr": 0.5, "plugins": [{"every": 3}], "settings": "small", "file": "a\udce9"}
    values = {"configuration": configuration, "settings": {"steps": 8}}
    backend.write(fg.Record("config", "fulgurite", 0, values))
    backend.write(fg.Record("text", "note", 2, {"said": "so"}))
    backend.write(fg.Record("text", "note", 2, {"said": "a\udce9"}))
    backend.write(fg.Record("text", "note", 4, {"said": "more"}))
    backend.close()
    resumed = open_backend(folder, backend.get_position(), step=2)
    values["configuration"]["lr"] = 0.1
    resumed.write(fg.Record("config", "fulgurite", 2, values))
    resumed.close()
    client = get_client(folder.parent / "mlruns")
    run = client.get_run(backend.get_position()["run_id"])
    assert run.data.params == {
        "lr": "0.5",
        "plugins.0.every": "3",
        "settings": "small",
        "settings.steps": "8",
        "file": "a\\udce9",
    }
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (artifacts / "note/said/0000000002.txt").read_text() == "so\na\\udce9"
    assert (artifacts / "note/said/0000000004.txt").read_text() == "more"
    assert json.loads((artifacts / "config/fulgurite.json").read_text()) == values


@pytest.mark.parametrize("number", range(7))
def test_long_names_are_names_that_mlflow_takes(number: int):
    from mlflow.utils.validation import _validate_metric_name

    name = clean_name("train/" + "é" * 120 + "a" * number + "/../b")
    _validate_metric_name(name)
    assert len(name.encode()) <= 250


def test_integers_beyond_all_floats_are_infinite(folder: Path):
    backend = open_backend(folder)
    log(backend, 1, huge=10**400, negative=-(10**400))
    backend.close()
    metrics = read_metrics(folder.parent / "mlruns", backend.get_position()["run_id"])
    assert metrics == {"train/huge": [(1, np.inf)], "train/negative": [(1, -np.inf)]}


@pytest.mark.full
def test_a_run_that_a_signal_stops_is_killed(folder: Path):
    interrupt = fg.LambdaPlugin(every={fg.At(4): lambda run: os.kill(os.getpid(), signal.SIGTERM)})
    logger = MLflowLogger("tests")
    assert fit(folder, logger, interrupt).stop_reason == "SIGTERM"
    fg.forget_stop_request()
    run = get_client(folder.parent / "mlruns").get_run(logger.run_id)
    assert run.info.status == "KILLED"


@pytest.mark.parametrize("position", [{"run_id": "../x"}, {"run_id": 3}, "a/b", [1]])
def test_a_position_that_is_no_id_is_refused(folder: Path, position: Any):
    with pytest.raises(CheckpointError, match="not one that this plugin writes"):
        open_backend(folder, position)


@pytest.mark.parametrize("arguments", [{"experiment": ""}, {"tags": ["a"]}])
def test_bad_arguments(arguments: Any):
    with pytest.raises(ConfigurationError, match="MLflowLogger: "):
        MLflowLogger(**arguments)


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_dead_server_does_not_stop_training(
    folder: Path, is_silent: bool, monkeypatch: pytest.MonkeyPatch
):
    """Neither one that refuses connections nor one that never answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if is_silent:
            server.listen()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.warns(UserWarning, match="mlflow") as caught:
            result = fit(folder, MLflowLogger(tracking_uri=uri))
    assert len(caught) == 1 and set(result.failures) == {"mlflow"}
    assert len(result.history["train/loss"]) == 4


@pytest.mark.full
def test_records_of_the_time_without_a_server_are_sent_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of a run that never reached one, and of one that lost it in the middle; each once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    dead = ["--tracking-uri", "http://127.0.0.1:1"]
    with pytest.warns(UserWarning, match="mlflow"):
        plugins = [JSONLLogger(), Checkpointer(every=2, monitor="train/loss"), Telling()]
        history = fit(folder, MLflowLogger(tracking_uri=dead[1]), *plugins).history
    assert run_mlflow([str(folder), *dead]) == 2
    assert "start its server" in capsys.readouterr().err
    assert run_mlflow([str(folder), "--experiment", "late"]) == 0
    store = folder.parent / "mlruns"
    ((number, run_id),) = re.findall(
        "sent ([0-9]+) values to the run ([0-9a-f]+)", capsys.readouterr().out
    )
    expected = [*zip(history.steps("train/loss"), history["train/loss"], strict=True)]
    metrics = read_metrics(store, run_id)
    assert metrics["train/loss"] == expected
    assert len(metrics["train/steps_per_second"]) > 0
    assert int(number) == sum(map(len, metrics.values()))
    run = get_client(store).get_run(run_id)
    assert (run.info.status, run.data.params["settings.steps"]) == ("FINISHED", "8")
    assert run.data.tags["best_checkpoint.metric"] == "train/loss"
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "config/checkpoints.json").read_text())["best"]["step"] == int(
        run.data.tags["best_checkpoint.step"]
    )
    assert (artifacts / "telling/message/0000000004.txt").read_text() == "half"
    assert run_mlflow([str(folder)]) == 0
    assert "sent 0 values" in capsys.readouterr().out
    assert read_metrics(store, run_id)["train/loss"] == expected


@pytest.mark.full
def test_the_command_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run_mlflow([str(folder)]) == 2
    assert "logged with 'jsonl'" in capsys.readouterr().err
    fit(folder, JSONLLogger())
    with RunDirectory(folder).lock():
        program = f"from fulgurite_mlflow.command import run_mlflow; run_mlflow([{str(folder)!r}])"
        command = [sys.executable, "-c", program]
        answer = subprocess.run(command, capture_output=True, text=True)
    assert "is in use" in answer.stderr and "Traceback" not in answer.stderr
    assert not (folder.parent / "mlruns").exists()


def test_telemetry_of_several_attempts_is_sent_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    fit(folder, JSONLLogger())
    lines = [
        {"kind": "scalars", "source": "t", "step": step, "values": {"x": value}, "attempt": attempt}
        for attempt, step, value in [(1, 2, 0.5), (1, 4, 0.25), (2, 4, 0.75), (2, 6, 1.0)]
    ]
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_mlflow([str(folder)]) == 0
    (run_id,) = re.findall("values to the run ([0-9a-f]+)", capsys.readouterr().out)
    metrics = read_metrics(folder.parent / "mlruns", run_id)
    assert metrics["t/x"] == [(2, 0.5), (4, 0.25), (6, 1.0)]


@pytest.mark.full
def test_a_database_is_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(folder.parent)  # where MLflow puts the files of a database
    uri = f"sqlite:///{folder.parent / 'mlflow.db'}"
    MlflowClient(uri).search_experiments()  # makes the tables, which may take longer than a fit
    logger = MLflowLogger("tests", tracking_uri=uri)
    history = fit(folder, logger).history
    run_id = str(logger.run_id)
    sent = MlflowClient(uri).get_metric_history(run_id, "train/loss")
    assert [metric.value for metric in sent] == list(history["train/loss"])


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("sqlite:///mlflow.db", r"needs sqlalchemy, .* pip install 'fulgurite-mlflow\[sqlite\]'"),
        ("mysql+pymysql://user:secret@host/db", r"a store in mysql needs sqlalchemy"),
        ("ftp://host/mlruns", "begins with ftp:, which MLflow does not know; give the path"),
    ],
)
def test_an_address_that_cannot_be_used_is_an_error_before_the_first_step(
    folder: Path, uri: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # as if it were not installed
    with pytest.raises(ConfigurationError, match=message) as caught:
        fit(folder, MLflowLogger(tracking_uri=uri))
    assert "secret" not in str(caught.value)
    (folder / "records.jsonl").write_text("")
    assert run_mlflow([str(folder), "--tracking-uri", uri]) == 2


@pytest.mark.full
def test_the_best_checkpoint_is_a_tag(folder: Path):
    logger = MLflowLogger("tests")
    fit(folder, logger, Checkpointer(every=2, monitor="train/loss"))
    tags = get_client(folder.parent / "mlruns").get_run(str(logger.run_id)).data.tags
    steps = {path.name for path in (folder / "checkpoints").iterdir()}
    best = Path(tags["best_checkpoint.path"])
    assert best.name in steps and best.parent == folder / "checkpoints"
    assert best.name == f"step-{tags['best_checkpoint.step']}"
    assert tags["best_checkpoint.metric"] == "train/loss"
    assert float(tags["best_checkpoint.value"]) > 0


@pytest.mark.full
def test_conformance():
    check_plugin(lambda: MLflowLogger("tests"), bad_arguments=[{"tags": 3}])


@pytest.mark.full
def test_importing_the_package_does_not_import_mlflow():
    program = "import fulgurite_mlflow, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
