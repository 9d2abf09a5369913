"""Where a run comes from that began in the middle of another one."""

from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError

from fulgurite_runs.json_codec import dumps, loads

_FILE = "origin.json"


def write_origin(run: Path, other: Path, step: int) -> None:
    """Note in the directory of a new run that it began with the state of another one.

    Args:
        run: the directory of the new run, which is made.
        other: that of the other one.
        step: whose state it was.
    """
    run.mkdir(parents=True, exist_ok=True)
    (run / _FILE).write_text(dumps({"run": str(other), "step": step}), encoding="utf-8")


def read_origin(run: Path) -> dict[str, Any]:
    """Return the directory `run` and the `step` of the run with whose state a run began; nothing
    for one that began by itself.

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
