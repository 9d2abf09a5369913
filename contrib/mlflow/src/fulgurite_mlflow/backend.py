"""Send records to MLflow. All of it runs on the writer's thread."""

import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import fulgurite as fg
from fulgurite.errors import ConfigurationError

from fulgurite_mlflow.pictures import convert_media
from fulgurite_mlflow.values import (
    clean_name,
    escape_surrogates,
    flatten_configuration,
    flatten_numbers,
)

RUN_FILE = "mlflow.json"
TOKEN_TAG = "fulgurite.token"
"""The tag by which a run is found whose id nobody knows, because its process was killed before
MLflow had answered."""
_MAX_RUN_FILE_SIZE = 10_000
_SEND_INTERVAL = 2.0
"""Seconds for which metrics gather: a request takes milliseconds, whatever is in it."""
# What MLflow takes in one request.
_MAX_METRICS = 1000
_MAX_PARAMETERS = 100

# Unless the user has set them. MLflow itself waits for minutes for a server that is gone, and
# measures itself for its makers; its store of files wants to be asked for.
_ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class RunIdentity:
    """What a run of MLflow is called.

    Attributes:
        experiment: the name of its experiment.
        name: its own name.
        tags: its tags.
        folder: where its id is kept.
        parent_folder: where that of its parent is kept; None without one.
    """

    experiment: str
    name: str
    tags: dict[str, str]
    folder: Path
    parent_folder: Path | None


class RunNote(NamedTuple):
    """What is noted of a run of MLflow in the directory of a run.

    Attributes:
        run_id: its id; None before MLflow has said it.
        token: the value of its tag `TOKEN_TAG`; None of runs that were begun without one.
    """

    run_id: str | None = None
    token: str | None = None


class Backend:
    """A run of MLflow.

    What has arrived cannot be taken back there. A resumed run therefore asks which metrics have
    arrived: it leaves those out, which it computes to the same bits, and sends those of its history
    that are missing.

    Attributes:
        final_status: the status of the run once it is closed.
        num_sent: how many metrics were sent.

    Args:
        identity: what it is called.
        uri: the address of the server or of a folder.
        note: of the run to continue; an empty one for a new run.
        step: the step to continue from.
        history: the records up to that step, some of which may not have arrived.
        replaced: of the run that this one replaces, to be marked as killed.
    """

    def __init__(
        self,
        identity: RunIdentity,
        uri: str,
        note: RunNote,
        step: int,
        history: Sequence[fg.Record] = (),
        replaced: RunNote | None = None,
    ) -> None:
        self.final_status = "FINISHED"
        self.num_sent = 0
        self._identity = identity
        self._uri = uri
        self._note = note
        self._step = step
        self._history = history
        self._replaced = replaced
        self._client: Any = None
        self._metrics: list[Any] = []
        self._last_sent = 0.0
        self._arrived: set[tuple[str, int]] = set()
        self._parameters: set[str] = set()
        # The names of metrics in records, by those at MLflow.
        self._names: dict[str, str] = {}
        self._refused_names: set[str] = set()
        # Those of one step, by the path of their file.
        self._texts: dict[str, list[str]] = {}
        self._text_step = -1

    def write(self, record: fg.Record) -> None:
        """Take one record."""
        self._connect()
        match record.kind:
            case "scalars":
                self._add_metrics(record)
            case "config":
                self._send_configuration(record)
                self._tag_best_checkpoint(record)
            case "text":
                self._send_texts(record)
            case "media":
                self._send_media(record)
        if (
            len(self._metrics) >= _MAX_METRICS
            or time.monotonic() - self._last_sent >= _SEND_INTERVAL
        ):
            self._send_metrics()

    def sync(self) -> None:
        """Send everything."""
        self._connect()
        self._send_metrics()

    def get_position(self) -> Any:
        """Return the id of the run. How far it is complete, MLflow itself is asked."""
        return {"run_id": self._note.run_id}

    def close(self) -> None:
        """Send everything and end the run."""
        if self._client is None:
            return
        self._send_metrics()
        self._client.set_terminated(self._note.run_id, self.final_status)

    def _connect(self) -> None:
        """Begin the run, or continue with it."""
        if self._client is not None:
            return
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        if self._replaced is not None:
            replaced_id = _find_run_id(client, self._replaced, self._identity.experiment)
            if replaced_id is not None:
                _end_replaced_run(client, replaced_id)
        run_id = _find_run_id(client, self._note, self._identity.experiment)
        if run_id is None:
            self._note = RunNote(None, uuid4().hex)
            # First, or nobody would know of the run if this process were killed now.
            _write_note(self._identity.folder, self._note)
            run_id = _create_run(client, self._identity, self._note)
        else:
            self._look_up_arrived(client, run_id)
            client.update_run(run_id, status="RUNNING")
        self._note = RunNote(run_id, self._note.token)
        _write_note(self._identity.folder, self._note)
        self._client = client
        for record in self._history:
            self._add_metrics(record)
        self._history = ()

    def _look_up_arrived(self, client: Any, run_id: str) -> None:
        data = client.get_run(run_id).data
        self._parameters.update(data.params)
        first_step = min([self._step, *(record.step for record in self._history)])
        for name in data.metrics:
            for metric in client.get_metric_history(run_id, name):
                if metric.step >= first_step:
                    self._arrived.add((name, metric.step))

    def _add_metrics(self, record: fg.Record) -> None:
        from mlflow.entities import Metric

        milliseconds = int(1000 * (record.wall_time or time.time()))
        for full_name, value in flatten_numbers(record):
            name = self._name_metric(full_name)
            if (name, record.step) in self._arrived or not self._is_accepted(full_name, name):
                continue
            self._metrics.append(Metric(name, value, milliseconds, record.step))

    def _is_accepted(self, full_name: str, name: str) -> bool:
        """Whether MLflow can show a metric under a name; if it cannot, warn once."""
        if self._names.get(name) == full_name:
            return True
        if full_name in self._refused_names:
            return False
        other_name = self._names.get(name)
        if other_name is None:
            self._names[name] = full_name
            return True
        self._refused_names.add(full_name)
        warnings.warn(
            f"mlflow leaves {full_name!r} out, which it cannot tell from {other_name!r}: rename "
            "one of them",
            stacklevel=2,
        )
        return False

    def _name_metric(self, full_name: str) -> str:
        """Return what a metric is called at MLflow."""
        name = clean_name(full_name)
        if not self._uri.startswith("file:"):
            return name
        # A file for each metric: where there is a file `loss`, there is no folder `loss`.
        source, slash, rest = name.partition("/")
        return f"{source}{slash}{rest.replace('/', '.')}"

    def _send_metrics(self) -> None:
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), _MAX_METRICS):
            part = metrics[start : start + _MAX_METRICS]
            self._client.log_batch(self._note.run_id, metrics=part)
            self.num_sent += len(part)
        self._last_sent = time.monotonic()

    def _send_configuration(self, record: fg.Record) -> None:
        """Send parameters, which never change at MLflow, and everything else as a file."""
        from mlflow.entities import Param

        # A record may hold arrays, which are shown as they print.
        values = json.loads(json.dumps(record.values, default=str))
        self._send_text(f"config/{clean_name(record.source)}.json", json.dumps(values, indent=2))
        # An argument of the program may be called `settings`, too.
        leaves = [
            *flatten_configuration(values.get("settings") or {}, "settings"),
            *flatten_configuration(values.get("configuration") or {}),
        ]
        parameters = {clean_name(name): value for name, value in leaves}
        new = [
            Param(name, value) for name, value in parameters.items() if name not in self._parameters
        ]
        self._parameters.update(parameters)
        for start in range(0, len(new), _MAX_PARAMETERS):
            self._client.log_batch(self._note.run_id, params=new[start : start + _MAX_PARAMETERS])

    def _tag_best_checkpoint(self, record: fg.Record) -> None:
        """Say where the best checkpoint is, and by what, if this is what the record says."""
        best = record.values.get("best")
        if record.source != "checkpoints" or not isinstance(best, dict):
            return
        for name in ("path", "step", "metric", "value"):
            value = escape_surrogates(str(best.get(name)))
            self._client.set_tag(self._note.run_id, f"best_checkpoint.{name}", value)

    def _send_texts(self, record: fg.Record) -> None:
        """Send a file for each text; of several messages of a step, each is a line of one file."""
        if record.step != self._text_step:
            self._texts.clear()
            self._text_step = record.step
        for name, text in record.values.items():
            path = f"{clean_name(f'{record.source}/{name}')}/{record.step:010d}.txt"
            texts = self._texts.setdefault(path, [])
            texts.append(str(text))
            self._send_text(path, "\n".join(texts))

    def _send_media(self, record: fg.Record) -> None:
        """Send files, which replace those that an earlier attempt has sent."""
        for name, value in record.values.items():
            full_name = f"{record.source}/{name}"
            try:
                files = list(convert_media(value))
            # Any exception, because a figure's code is the user's: the rest is shown.
            except Exception as error:
                self._warn_not_shown(full_name, record.step, error)
                continue
            for ending, content in files:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, f"{record.step:010d}{ending}")
                    path.write_bytes(content)
                    self._client.log_artifact(self._note.run_id, str(path), clean_name(full_name))

    def _warn_not_shown(self, full_name: str, step: int, error: Exception) -> None:
        if full_name in self._refused_names:
            return
        self._refused_names.add(full_name)
        warnings.warn(
            f"mlflow leaves {full_name!r} out, of step {step} first: {type(error).__name__}: "
            f"{error}",
            stacklevel=2,
        )

    def _send_text(self, path: str, text: str) -> None:
        """Send a file, which replaces one that an earlier attempt has sent."""
        self._client.log_text(self._note.run_id, escape_surrogates(text), path)


def read_run_id(folder: Path) -> str | None:
    """Return the id of the run of MLflow that was noted in a run's directory; None if none was.

    Raises:
        ConfigurationError: the file is not one that this plugin writes.
    """
    return read_note(folder).run_id


def read_note(folder: Path) -> RunNote:
    """Return what is noted of the run of MLflow in a run's directory; an empty note if nothing is.

    Raises:
        ConfigurationError: the file is not one that this plugin writes.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return RunNote()
    try:
        # As bytes, and no more than this plugin ever writes.
        with path.open("rb") as file:
            form = json.loads(file.read(_MAX_RUN_FILE_SIZE))
        values = (form.get("run_id"), form.get("token"))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; remove it, and the run begins a new run of MLflow"
        ) from error
    # They become parts of paths, addresses and queries.
    return RunNote(
        *(value if isinstance(value, str) and value.isalnum() else None for value in values)
    )


def forget_run(folder: Path) -> RunNote:
    """Return what was noted of the run of MLflow in a run's directory, and remove the note: the
    directory is now that of another run."""
    note = read_note(folder)
    (folder / RUN_FILE).unlink(missing_ok=True)
    return note


def _write_note(folder: Path, note: RunNote) -> None:
    temporary_path = folder / f".{RUN_FILE}.new"
    with temporary_path.open("w") as file:
        file.write(json.dumps(note._asdict()) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary_path.replace(folder / RUN_FILE)


def _find_run_id(client: Any, note: RunNote, experiment_name: str) -> str | None:
    """Return the id of a run of MLflow; None if MLflow knows of none.

    Args:
        client: of MLflow.
        note: what is noted of the run.
        experiment_name: of its experiment.
    """
    if note.run_id is not None or note.token is None:
        return note.run_id
    experiment = client.get_experiment_by_name(experiment_name)
    if experiment is None:
        return None
    condition = f"tags.`{TOKEN_TAG}` = '{note.token}'"
    runs = client.search_runs([experiment.experiment_id], condition, max_results=1)
    return runs[0].info.run_id if runs else None


def _create_run(client: Any, identity: RunIdentity, note: RunNote) -> str:
    tags = identity.tags | {TOKEN_TAG: str(note.token)}
    if identity.parent_folder is not None:
        parent_id = read_run_id(identity.parent_folder)
        if parent_id is not None:
            tags["mlflow.parentRunId"] = parent_id
    run = client.create_run(
        _find_or_create_experiment(client, identity.experiment), tags=tags, run_name=identity.name
    )
    return run.info.run_id


def _find_or_create_experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            # Another run has created it in the meantime.
            experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id


def _end_replaced_run(client: Any, run_id: str) -> None:
    """Mark the run that an earlier attempt has begun, and that this one does not continue, as
    killed, unless it has ended or is gone."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return
    if run.info.status == "RUNNING":
        client.set_terminated(run_id, "KILLED")
