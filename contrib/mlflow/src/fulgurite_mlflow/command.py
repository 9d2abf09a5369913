"""`fulgurite mlflow`: sends what MLflow lacks of a run."""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fulgurite as fg
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import as_printable, redact_shapes
from fulgurite_logging import iter_records, iter_telemetry
from fulgurite_runs import RunDirectory

from fulgurite_mlflow.backend import Backend, RunIdentity, read_note, read_run_id
from fulgurite_mlflow.values import FOLDER, build_uri


def run_mlflow(arguments: list[str]) -> int:
    """Send what MLflow lacks of a run, as after a time without its server.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite mlflow",
        description="Sends what MLflow lacks of a run that was logged with 'jsonl' as well, such "
        "as what was recorded while no server could be reached: metrics, strings, the "
        "configuration "
        "and what else is known of the run, and the tags of the best checkpoint. Metrics that have "
        "arrived are not sent again. Media are not sent: 'jsonl' holds none.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="the server, folder or database of MLflow (default: the environment variable "
        f"MLFLOW_TRACKING_URI, or else {FOLDER} beside the run's directory)",
    )
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        default="Default",
        help="of a run that MLflow knows nothing of yet (default Default)",
    )
    options = parser.parse_args(arguments)
    try:
        sent = send_missing(options.run, options.tracking_uri, options.experiment)
    except (FulguriteError, OSError) as error:
        print(as_printable(f"error: {redact_shapes(str(error))}"), file=sys.stderr)
        return 2
    print(f"sent {sent} values to the run {read_run_id(options.run)} of MLflow")
    return 0


def send_missing(run: Path, tracking_uri: str | None = None, experiment: str = "Default") -> int:
    """Send what MLflow lacks of the records of a run, and return the number of metrics.

    Args:
        run: the directory of the run, which nobody may be training.
        tracking_uri: where MLflow is, as for `MLflowLogger`.
        experiment: the name of the experiment, if MLflow does not know the run yet.

    Raises:
        ConfigurationError: the run has no records, or MLflow cannot be reached.
        CheckpointError: a process is training it.
    """
    from mlflow.exceptions import MlflowException

    directory = RunDirectory(run)
    records = [*iter_records(directory.path), *_iter_first_telemetry(directory.path)]
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or directory.path.parent / FOLDER
    identity = RunIdentity(experiment, directory.path.name, {}, directory.path, None)
    with directory.reserve():
        backend = Backend(identity, build_uri(uri), read_note(directory.path), step=0)
        backend.final_status = "FINISHED" if directory.is_complete else "KILLED"
        try:
            backend.write(fg.Record("config", "fulgurite", 0, directory.read_manifest()))
            for record in records:
                backend.write(record)
            backend.close()
        except MlflowException as error:
            raise ConfigurationError(
                f"{error}\nMLflow does not take the records: start its server, or give "
                "--tracking-uri"
            ) from error
    return backend.num_sent


def _iter_first_telemetry(run: Path) -> Iterator[fg.Record]:
    """Yield the telemetry of a run. Of a number that several attempts have recorded for one step,
    the first stays, as it does when an attempt after another sends it.

    Args:
        run: the directory of the run.
    """
    known: set[tuple[str, str, int]] = set()
    for record in iter_telemetry(run):
        if record.kind != "scalars":
            yield record
            continue
        names = {name: (record.source, name, record.step) for name in record.values}
        values = {name: record.values[name] for name, key in names.items() if key not in known}
        known.update(names.values())
        yield replace(record, values=values)
