"""What a trial leaves in its run directory: its metrics, and why it ended."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs import dumps, loads, replace_file

FILE = "trial.json"


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended.

    Example:
        from pathlib import Path

        from fulgurite_sweeps import read_result

        result = read_result(Path("runs/sweep/trial-0"))
        if result is not None:
            print(result.step, result.metrics["test/accuracy"])

    Attributes:
        step: its last step.
        metrics: the newest value of each metric that is a number, by `SOURCE/NAME`.
        stop_reason: why it ended before its planned end, or None.
        is_pruned: whether the pruner ended it.
    """

    step: int
    metrics: dict[str, float]
    stop_reason: str | None = None
    is_pruned: bool = False


def write_result(folder: Path, result: TrialResult) -> None:
    """Write how a trial ended, all at once: a process that is killed leaves nothing.

    Args:
        folder: its run directory.
        result: how it ended.
    """
    replace_file(folder / FILE, dumps(asdict(result)))


def read_result(folder: Path) -> TrialResult | None:
    """Return how a trial ended; None if it has not.

    Args:
        folder: its run directory.

    Raises:
        CheckpointError: the file is not one of ours.
    """
    path = folder / FILE
    try:
        fields: Any = loads(path.read_bytes())
        return TrialResult(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as the end of a trial: {error}") from error
