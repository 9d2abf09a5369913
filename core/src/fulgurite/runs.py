"""What a run leaves behind: its directory, references to its checkpoints, and what a checkpoint holds."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.triggers import Span

if TYPE_CHECKING:
    from fulgurite.state import TrainState

_STEP = re.compile(r"step-(\d{1,12})")


@dataclass(frozen=True)
class Checkpoint:
    """A reference to a checkpoint, which the active checkpointer resolves.

    Attributes:
        path: of a run directory.
        step: a step, or `latest`, or `best`.
        optional: whether it is fine that there is none.
    """

    path: str | os.PathLike[str]
    step: int | Literal["latest", "best"] = "latest"
    optional: bool = False

    def __post_init__(self) -> None:
        if self.step not in ("latest", "best") and (isinstance(self.step, bool) or not isinstance(self.step, int)):
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


@dataclass(frozen=True)
class RunDirectory:
    """The layout of a run on disk. Everyone may read it; only the run's own process writes.

        attempts/N          one empty file for each start of the run
        checkpoints/step-N  one directory a checkpoint; complete once it holds COMMIT
        COMPLETE            there once the run has reached its planned end
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def complete(self) -> bool:
        """Whether the run has reached its planned end."""
        return (self.path / "COMPLETE").exists()

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        folder = self.path / "attempts"
        return max((int(file.name) for file in folder.iterdir() if file.name.isdecimal()), default=0) if folder.is_dir() else 0

    def committed(self) -> Iterator[tuple[int, Path]]:
        """Steps and directories of the complete checkpoints, oldest first. Links and other names are passed over."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        named = [(int(match[1]), path) for path in found if (match := _STEP.fullmatch(path.name)) and not path.is_symlink()]
        return iter(sorted((step, path) for step, path in named if (path / "COMMIT").is_file()))

    def step_directory(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.checkpoints / f"step-{step}"

    def begin(self) -> int:
        """Makes the directory and notes a new attempt; gives its number, from 1."""
        try:
            (self.path / "attempts").mkdir(parents=True, exist_ok=True)
            while True:
                number = self.attempts + 1
                try:
                    (self.path / "attempts" / str(number)).touch(exist_ok=False)
                    return number
                except FileExistsError:
                    continue
        except OSError as error:
            raise CheckpointError(f"the run directory {self.path} cannot be written: {error}. Choose another one") from error

    def mark_complete(self, complete: bool) -> None:
        """Sets or removes the completion mark."""
        mark = self.path / "COMPLETE"
        if complete:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
