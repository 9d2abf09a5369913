"""`fulgurite mlflow`: sends what MLflow lacks of a run."""

import argparse
import os
import sys
from pathlib import Path

import fulgurite as fg
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite_logging import iter_records
from fulgurite_runs import RunDirectory

from fulgurite_mlflow.backend import Backend, RunIdentity, read_run_id
from fulgurite_mlflow.values import FOLDER, build_uri


def run_mlflow(arguments: list[str]) -> int:
    """Run `fulgurite mlflow RUN`: send the metrics and texts that were recorded while no server
    could be reached.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite mlflow",
        description="Sends what MLflow lacks of a run that was logged with 'jsonl' as well: the "
        "metrics and texts of the time when no server could be reached. What has arrived is not "
        "sent again.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="the server or the folder of MLflow (default: the environment variable "
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
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"sent {sent} values to the run {read_run_id(options.run)} of MLflow")
    return 0


def send_missing(run: Path, tracking_uri: str | None = None, experiment: str = "Default") -> int:
    """Send the metrics and texts that MLflow lacks of a run, and return the number of metrics.

    Args:
        run: the directory of the run, which nobody may be training.
        tracking_uri: the server or the folder of MLflow, as for `MLflowLogger`.
        experiment: the name of the experiment, if MLflow does not know the run yet.

    Raises:
        ConfigurationError: the run has no records, or MLflow cannot be reached.
        CheckpointError: a process is training it.
    """
    from mlflow.exceptions import MlflowException

    directory = RunDirectory(run)
    records = [record for record in iter_records(directory.path) if record.kind != "media"]
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or directory.path.parent / FOLDER
    identity = RunIdentity(experiment, directory.path.name, {}, directory.path, None)
    with directory.lock():
        backend = Backend(identity, build_uri(uri), read_run_id(directory.path), step=0)
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
