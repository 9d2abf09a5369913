"""Where a run comes from that began in the middle of another one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError

from fulgurite_runs.json_codec import dumps, loads

_FILE = "origin.json"


def make_origin(other: Path, step: int, skipped: Sequence[int] = ()) -> dict[str, Any]:
    """Return what is noted of a run that began with the state of another one.

    Args:
        other: the directory of the other one.
        step: whose state it was.
        skipped: the batches of the data that the new run leaves out, counted over all epochs from
            1: the steps of the other one, unless that leaves some out itself.
    """
    origin: dict[str, Any] = {"run": str(other), "step": step}
    return origin | {"skipped_batches": list(skipped)} if skipped else origin


def write_origin(run: Path, other: Path, step: int, skipped: Sequence[int] = ()) -> None:
    """Note in the directory of a new run that it began with the state of another one.

    Args:
        run: the directory of the new run, which is made.
        other: as of `make_origin`.
        step: likewise.
        skipped: likewise.
    """
    run.mkdir(parents=True, exist_ok=True)
    text = dumps(make_origin(other, step, skipped))
    (run / _FILE).write_text(text, encoding="utf-8")


def read_origin(run: Path) -> dict[str, Any]:
    """Return the directory `run` and the `step` of the run with whose state a run began, and the
    `skipped_batches` if it leaves any out; nothing for one that began by itself.

    Raises:
        CheckpointError: what is written there is not an object of JSON.
    """
    path = run / _FILE
    if not path.is_file():
        return {}
    try:
        origin = loads(path.read_bytes())
        if not isinstance(origin, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Restore the file, or remove it"
        ) from error
    return origin
