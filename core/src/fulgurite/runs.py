"""What a run leaves behind: its directory, references to its checkpoints, and what a checkpoint holds."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.triggers import Span

if TYPE_CHECKING:
    from fulgurite.state import TrainState

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Checkpoint:
    """A reference to a checkpoint of the run in directory `path`, which the active checkpointer resolves; with
    `optional` it is fine that there is none."""

    path: str | os.PathLike[str]
    step: int | Literal["latest", "best"] = "latest"
    optional: bool = False

    def __post_init__(self) -> None:
        if self.step not in ("latest", "best") and type(self.step) is not int:
            raise ConfigurationError(f"Checkpoint: step is {self.step!r}; it must be a step, 'latest' or 'best'")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to go on from where it was.

    Attributes:
        state: the train state.
        span: of the fit that it belongs to.
        position: of the data, after the batch of the last update.
        pending: the actions that were due at this step and did not come to an end.
        host: what plugins keep on the host: `{"version": int, "state": JSON}` by plugin name.
        metrics: the newest metrics by source.
    """

    state: "TrainState"
    span: Span
    position: Any
    pending: tuple[str, ...] = ()
    host: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)


class RunDirectory:
    """The layout of a run on disk. Everyone may read it; only the run's own process writes.

    attempts/N          an empty file for each start of the run
    checkpoints/step-N  a checkpoint, complete once it holds COMMIT
    COMPLETE            there once the run has reached its planned end
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def complete(self) -> bool:
        """Whether the run has reached its planned end."""
        return (self.path / "COMPLETE").exists()

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max((int(file.name) for file in self._in("attempts") if file.name.isdecimal()), default=0)

    def committed(self) -> list[tuple[int, Path]]:
        """Steps and directories of the complete checkpoints, oldest first. Links and other names are passed over."""
        named = [(_STEP.fullmatch(path.name), path) for path in self._in("checkpoints") if not path.is_symlink()]
        return sorted((int(match[1]), path) for match, path in named if match and (path / "COMMIT").is_file())

    def step_directory(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.path / "checkpoints" / f"step-{step}"

    def begin(self) -> int:
        """Makes the directory, notes a new attempt and removes the completion mark; gives the attempt's number, from
        1."""
        try:
            (self.path / "attempts").mkdir(parents=True, exist_ok=True)
            number = self.attempts + 1
            (self.path / "attempts" / str(number)).touch(exist_ok=False)
            (self.path / "COMPLETE").unlink(missing_ok=True)
            return number
        except OSError as error:
            raise CheckpointError(
                f"the run directory {self.path} cannot be written: {error}. Choose another one"
            ) from error

    def mark_complete(self) -> None:
        """Notes that the run has reached its planned end."""
        (self.path / "COMPLETE").touch()

    def _in(self, folder: str) -> list[Path]:
        return list((self.path / folder).iterdir()) if (self.path / folder).is_dir() else []
