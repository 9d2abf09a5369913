"""What decides which examples a pipeline gives, in few words."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fulgurite.errors import ConfigurationError

from fulgurite_data.content import Mark

_MAX_LINE = 100
_MAX_LINES = 8
"""At most, each of `_MAX_LINE` characters: with epoch and batch, a position has less than 1 kB."""


@dataclass(frozen=True)
class Identity:
    """What decides which examples there are.

    Attributes:
        lines: one for each stage, with a hash of what was seen of it. A run resumes with these.
        changing: hashes that also count what may change while a program runs.
        unseen: what could not be looked into, in words.
    """

    lines: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def extend(self, stage: str, mark: Mark) -> "Identity":
        """Return the identity after one more stage.

        Args:
            stage: its line.
            mark: what was seen of it.
        """
        line = f"{stage} {mark.text}" if mark.text else stage
        changing = (mark.whole,) if mark.whole else ()
        unseen = tuple(f"{what} of {stage}" for what in mark.unseen)
        return Identity((*self.lines, line), (*self.changing, *changing), (*self.unseen, *unseen))

    def list_for_file(self) -> tuple[str, ...]:
        """Return the lines that a file of what was found out has, in less than 1 kB."""
        if not self.changing:
            return shorten_identity(self.lines)
        return shorten_identity((*self.lines, f"enclosed {hash_text(' '.join(self.changing))}"))


class PipelineStage:
    """A stage of a pipeline, of examples or of batches, that knows what decides them.

    Attributes:
        length: how many examples or batches there are in an epoch.
        stages: one line for each stage, from the source on.
        before: the stage before; None for a source.
        is_fixed: whether examples are the same in each pass.
        level: how many random stages there are up to this one. Their keys follow from it, so that a
            stage which draws nothing, or comes later, changes no order.
        num_threads: how many threads batches are to be read by; 0 for none.
        num_processes: likewise processes.
        default_threads: how many threads they are read by where nobody says how many.
    """

    length: int
    stages: tuple[str, ...] = ()
    before: "PipelineStage | None" = None
    is_fixed: bool = True
    level: int = 0
    num_threads: int = 0
    num_processes: int = 0
    default_threads: int = 0
    _identity: Identity | None = None

    def follow(self, parent: "PipelineStage", line: str) -> None:
        """Take what is the same as in the stage before.

        Args:
            parent: the stage before.
            line: what describes this one.
        """
        self.is_fixed = parent.is_fixed
        self.level = parent.level
        self.stages = (*parent.stages, line)
        self.before = parent
        self.take_workers(parent)

    def take_workers(self, *parents: "PipelineStage") -> None:
        """Take the workers that earlier stages ask for.

        Args:
            parents: the stages before.

        Raises:
            ConfigurationError: some ask for threads, and others for processes.
        """
        self.num_threads = max(parent.num_threads for parent in parents)
        self.num_processes = max(parent.num_processes for parent in parents)
        self.default_threads = max(parent.default_threads for parent in parents)
        self.check_workers()

    def check_workers(self) -> None:
        """Raise `ConfigurationError` if threads and processes are asked for."""
        if self.num_threads and self.num_processes:
            raise ConfigurationError(
                f"{self.stages[-1]}: this pipeline asks for threads and for processes, and a batch "
                "is read as a whole by one of them: choose one kind"
            )

    def look(self) -> Mark:
        """Return what is seen of this stage besides its line: of content, or of a function."""
        return Mark()

    def identify(self) -> Identity:
        """Return what decides which examples there are. It is found out once, when it is needed."""
        if self._identity is None:
            before = self.before.identify() if self.before else Identity()
            self._identity = before.extend(self.stages[-1], self.look())
        return self._identity


def describe_function(function: Callable[..., Any]) -> str:
    """Return the name of a function, as far as it has one that stays the same."""
    if isinstance(function, partial):
        return f"partial({describe_function(function.func)})"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def shorten_identity(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of stages in less than 1 kB; what is left out counts by its hash.

    Args:
        stages: of a pipeline, from the source on.
    """
    lines = [line if len(line) <= _MAX_LINE else _abbreviate(line) for line in stages]
    if len(lines) > _MAX_LINES:
        middle = lines[_MAX_LINES // 2 : -(_MAX_LINES // 2 - 1)]
        text = f"{len(middle)} stages {hash_text(chr(10).join(middle))}"
        lines = [*lines[: _MAX_LINES // 2], text, *lines[-(_MAX_LINES // 2 - 1) :]]
    return tuple(lines)


def hash_text(text: str) -> str:
    """Return eight characters that differ for other texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _abbreviate(line: str) -> str:
    return f"{line[: _MAX_LINE - 12]}... {hash_text(line)}"
