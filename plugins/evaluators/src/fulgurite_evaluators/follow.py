"""A process that evaluates the checkpoints of a run while another one trains."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite_runs import RunDirectory
from fulgurite_runs.lock import Lock, read_owner

from fulgurite_evaluators.evaluator import Evaluator
from fulgurite_evaluators.results import FOLDER, EvaluationRecord, Results, commit_of
from fulgurite_evaluators.standalone import LastCheckpoint, Standalone

if TYPE_CHECKING:
    from fulgurite_cli import Experiment

Tell = Callable[[str], None]


class Follower:
    """Runs the standalone evaluators of one group on the checkpoints of a run, one process for each
    group.

    It takes the newest checkpoint first and may skip others, never the last. What was evaluated is
    not evaluated again, in whichever process, unless the checkpoint of that step is another one
    now. Nothing of the run is written but `evaluations/GROUP.jsonl` and the group's lock, and no
    data but that of its evaluators is touched.

    Args:
        experiment: of the program that trains.
        run: its directory, which exists.
        group: of evaluators.
        idle_timeout: seconds without a heartbeat of the trainer after which to give up, if the run
            is not complete.
        tell: is given one line for each result and each failure.

    Raises `ConfigurationError` if no evaluator is of that group.
    """

    def __init__(
        self,
        experiment: "Experiment",
        run: RunDirectory,
        group: str,
        *,
        idle_timeout: float,
        tell: Tell,
    ) -> None:
        self._experiment, self._run, self._group = experiment, run, group
        self._idle_timeout, self._tell = idle_timeout, tell
        if group not in (groups := standalone(experiment.engine)):
            raise ConfigurationError(
                f"no evaluator is of the group {group!r}. {did_you_mean(group, groups)} A "
                f"standalone one is "
                f"Evaluator(..., every=EveryCheckpoint(), group={group!r})"
            )
        self._evaluators = groups[group]
        self._failed: set[tuple[str, int, str]] = set()

    def follow(self) -> bool:
        """Evaluates until the run is complete and its last checkpoint done; gives whether every
        evaluation succeeded.

        Raises `CheckpointError` if another process runs this group, and if the trainer is gone
        before its end.
        """
        poll = min(_get_schedule(evaluator).poll for evaluator in self._evaluators.values())
        with self._held() as results:
            while True:
                # Looked at first: what was complete then has its last checkpoint.
                complete, newest = self._run.is_complete, self._newest()
                due = self._due(results, newest, complete)
                if newest is not None and due:
                    self._evaluate(results, *newest, due)
                elif complete:
                    return not self._failed
                else:
                    self._check_trainer()
                    time.sleep(poll)

    def _newest(self) -> tuple[int, str] | None:
        """Step and hash of the newest checkpoint. One that goes away meanwhile is none."""
        for step, path in reversed(self._run.list_checkpoints()):
            if (commit := commit_of(path)) is not None:
                return step, commit
        return None

    def _due(self, results: Results, newest: tuple[int, str] | None, complete: bool) -> list[str]:
        if newest is None:
            return []
        past = results.done | self._failed
        return [
            name
            for name, evaluator in self._evaluators.items()
            if (name, *newest) not in past
            and (complete or not isinstance(evaluator.every, LastCheckpoint))
        ]

    def _evaluate(self, results: Results, step: int, commit: str, due: list[str]) -> None:
        """Restores a checkpoint once and runs what is due on it."""
        engine = self._experiment.engine
        path = self._run.get_step_directory(step)
        try:
            state = engine.load_weights(
                self._experiment.model, fg.CheckpointRef(self._run.path, step)
            )
        except Exception:
            if commit_of(path) == commit:
                self._fail(step, commit, due, "cannot be restored")
            return  # it was deleted or replaced under our hands: look again
        if commit_of(path) not in (commit, None):
            return
        for name in due:
            try:
                evaluator = self._evaluators[name]
                metrics = evaluator.compute(state, engine, engine.run_evaluator).metrics
            except Exception:
                self._fail(step, commit, [name], "failed")
                continue
            results.append(EvaluationRecord(name, step, commit, metrics))
            self._tell(line(name, step, metrics))

    def _fail(self, step: int, commit: str, names: list[str], what: str) -> None:
        self._failed |= {(name, step, commit) for name in names}
        self._tell(f"{', '.join(names)}  step {step}  {what}:\n{traceback.format_exc()}")

    def _check_trainer(self) -> None:
        owner = self._run.read_owner()
        if owner is None:
            return
        who, beat = owner
        os.utime(
            self._lock
        )  # the time by the clock of the file system, whose other times these are
        idle = self._lock.stat().st_mtime - beat
        if idle > self._idle_timeout:
            raise CheckpointError(
                f"{self._run.path} is not complete, and its trainer ({who}) has shown no sign of "
                f"life for {idle:.0f} "
                "s. Resume the training and start this again; nothing is evaluated twice"
            )

    @property
    def _lock(self) -> Path:
        return self._run.path / FOLDER / f"{self._group}.lock"

    @contextmanager
    def _held(self) -> Iterator[Results]:
        """The results of this group, with nobody else at work on them."""
        self._run.get_folder(FOLDER).mkdir(exist_ok=True)
        former = read_owner(self._lock)
        lock = Lock(self._lock, former[0].attempt + 1 if former else 1)
        try:
            results = Results(self._run, self._group)
            try:
                yield results
            finally:
                results.close()
        finally:
            lock.release()


def find_evaluators(engine: fg.Engine) -> dict[str, Evaluator]:
    """Return the evaluators among the plugins of an engine, by name."""
    plugins = [registered.plugin for registered in engine.plugins.plugins.values()]
    return {plugin.name: plugin for plugin in plugins if isinstance(plugin, Evaluator)}


def standalone(engine: fg.Engine) -> dict[str, dict[str, Evaluator]]:
    """The standalone evaluators of an engine, by group and name."""
    groups: dict[str, dict[str, Evaluator]] = {}
    for name, evaluator in find_evaluators(engine).items():
        if isinstance(evaluator.every, Standalone) and evaluator.group is not None:
            groups.setdefault(evaluator.group, {})[name] = evaluator
    return groups


def _get_schedule(evaluator: Evaluator) -> Standalone:
    assert isinstance(evaluator.every, Standalone)
    return evaluator.every


def line(name: str, step: int, metrics: dict[str, Any]) -> str:
    """A result for people."""
    numbers = [
        f"{key} {value:.6g}"
        for key, value in metrics.items()
        if isinstance(value, bool | int | float)
    ]
    return "  ".join([name, f"step {step}", *numbers])
