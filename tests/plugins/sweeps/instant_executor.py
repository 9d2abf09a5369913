"""An executor whose trials have ended as soon as they are started: what a sweep does about them is
tested without processes."""

from collections.abc import Callable
from pathlib import Path

from fulgurite_sweeps import Executor, Job, TrialResult
from fulgurite_sweeps.results import write_result

PROGRAM = Path(__file__).with_name("quadratic.py")


class EndedJob:
    """A job that has ended with an exit code."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code

    def stop(self, number: int) -> None:
        """There is nothing to stop."""


class InstantExecutor(Executor):
    """Computes the metrics of a trial from its overrides, in this process.

    Args:
        compute: returns the metrics of some arguments by name; an exit code for a trial that fails.
        num_slots: how many trials there are at a time.
    """

    def __init__(
        self, compute: Callable[[dict[str, str]], dict[str, float] | int], num_slots: int = 1
    ) -> None:
        self.num_slots = num_slots
        self.jobs: list[Job] = []
        self._compute = compute

    def start(self, job: Job) -> EndedJob:
        self.jobs.append(job)
        overrides = [word for word in job.command[6:] if "=" in word]
        outcome = self._compute(dict(word.split("=", 1) for word in overrides))
        if isinstance(outcome, int):
            return EndedJob(outcome)
        folder = Path(job.command[job.command.index("--run") + 1])
        folder.mkdir()
        (folder / "COMPLETE").touch()
        write_result(folder, TrialResult(8, outcome))
        return EndedJob(0)

    def list_arguments(self) -> list[tuple[str, ...]]:
        """Return the overrides of each trial that was started."""
        return [tuple(word for word in job.command[6:] if "=" in word) for job in self.jobs]


def compute_quadratic(arguments: dict[str, str]) -> dict[str, float]:
    """Return what `quadratic.py` measures after its 8 steps, by the formula."""
    return {"test/loss": 4.5 * (1 - float(arguments["lr"])) ** 16}
