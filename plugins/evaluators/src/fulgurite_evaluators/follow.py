"""A process that evaluates the checkpoints of a run while another one trains."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite.plugins import redact_registered_value, split_invalid_names
from fulgurite_runs import (
    EvaluationDirectory,
    Lock,
    RunDirectory,
    hash_commit,
    read_owner,
    supersede,
)

from fulgurite_evaluators.evaluator import Evaluator, find_evaluators
from fulgurite_evaluators.logging import EvaluationRun, ResultLogger
from fulgurite_evaluators.results import FOLDER, EvaluationRecord, ResultWriter
from fulgurite_evaluators.standalone import LastCheckpoint, Standalone

if TYPE_CHECKING:
    from fulgurite_cli import Experiment


class Follower:
    """Runs the standalone evaluators of one group on the checkpoints of a run, in one process for
    each group.

    It takes the newest checkpoint first and may skip others, never the last. What was evaluated is
    not evaluated again, in whichever process, unless the checkpoint of that step is another one
    now. Loggers that keep what they get write it to `evaluations/GROUP`. Nothing else of the run is
    written but `evaluations/GROUP.jsonl` and the group's lock, and no data but that of its
    evaluators is touched.

    Example:

        follower = Follower(experiment, run, "side", idle_timeout=120.0, print_line=print)
        has_succeeded = follower.follow()

    Args:
        experiment: of the program that trains.
        run: its directory, which exists.
        group: of evaluators.
        idle_timeout: seconds without a heartbeat of the trainer after which to give up, if the run
            is not complete.
        print_line: called with one line for each result and each failure.

    Raises:
        ConfigurationError: no evaluator is of that group.
    """

    def __init__(
        self,
        experiment: "Experiment",
        run: RunDirectory,
        group: str,
        *,
        idle_timeout: float,
        print_line: Callable[[str], None],
    ) -> None:
        groups = group_standalone_evaluators(experiment.engine)
        if group not in groups:
            raise ConfigurationError(
                f"no evaluator is in the group {group!r}. {did_you_mean(group, groups)} A "
                f"standalone one is Evaluator(..., every=EveryCheckpoint(), group={group!r})"
            )
        self._experiment = experiment
        self._run = run
        self._group = group
        self._idle_timeout = idle_timeout
        self._print_line = print_line
        self._evaluators = groups[group]
        self._poll = min(_get_schedule(evaluator).poll for evaluator in self._evaluators.values())
        self._failures: set[tuple[str, int, str]] = set()

    def follow(self) -> bool:
        """Evaluate until the run is complete and its last checkpoint is done.

        Returns:
            Whether every evaluation succeeded.

        Raises:
            CheckpointError: another process runs this group, or the trainer is gone before its end.
        """
        with self._open_results() as (results, logger):
            while True:
                # Before the checkpoints: what is complete now has its last one.
                is_complete = self._run.is_complete
                newest = self._find_newest_checkpoint()
                due = self._find_due(results, newest, is_complete)
                if newest is not None and due:
                    self._evaluate(results, logger, *newest, due)
                elif is_complete:
                    return not self._failures
                else:
                    self._check_trainer()
                    time.sleep(self._poll)

    def _find_newest_checkpoint(self) -> tuple[int, str] | None:
        """Return step and commit of the newest checkpoint that is not just being deleted."""
        for step, path in reversed(self._run.list_checkpoints()):
            commit = hash_commit(path)
            if commit is not None:
                return step, commit
        return None

    def _find_due(
        self, results: ResultWriter, newest: tuple[int, str] | None, is_complete: bool
    ) -> list[str]:
        """Return the evaluators that have still to run on the newest checkpoint, by name."""
        if newest is None:
            return []
        past = results.done | self._failures
        due = []
        for name, evaluator in self._evaluators.items():
            waits_for_end = isinstance(evaluator.every, LastCheckpoint) and not is_complete
            if (name, *newest) not in past and not waits_for_end:
                due.append(name)
        return due

    def _evaluate(
        self, results: ResultWriter, logger: ResultLogger, step: int, commit: str, names: list[str]
    ) -> None:
        """Restore a checkpoint once and run these evaluators on it.

        Args:
            results: where the results are noted, which is when they count.
            logger: passes them to the loggers before that.
            step: of the checkpoint.
            commit: the SHA-256 of its `COMMIT`.
            names: of the evaluators.
        """
        engine = self._experiment.engine
        path = self._run.get_step_directory(step)
        try:
            state = engine.load_weights(
                self._experiment.model, fg.CheckpointRef(self._run.path, step)
            )
        except Exception:
            if hash_commit(path) == commit:
                self._note_failure(step, commit, names, "cannot be restored")
            # Otherwise it was deleted or replaced while it was read: look again.
            return
        if hash_commit(path) not in (commit, None):
            return
        for name in names:
            evaluator = self._evaluators[name]
            try:
                result = evaluator.compute(state, engine, engine.run_evaluation)
            except Exception:
                self._note_failure(step, commit, [name], "failed")
                continue
            logger_state = logger.log(name, step, result)
            metrics, _ = split_invalid_names(result.metrics)
            record = EvaluationRecord(name, step, commit, redact_registered_value(metrics))
            results.append(record, logger_state)
            self._print_line(format_result(name, step, result.metrics))

    def _note_failure(self, step: int, commit: str, names: list[str], what: str) -> None:
        self._failures |= {(name, step, commit) for name in names}
        self._print_line(f"{', '.join(names)}  step {step}  {what}:\n{traceback.format_exc()}")

    def _check_trainer(self) -> None:
        """Raise `CheckpointError` if the trainer has shown no sign of life for too long."""
        heartbeat = self._run.read_owner()
        if heartbeat is None:
            return
        owner, last_beat = heartbeat
        # The time by the clock of the file system, by which the heartbeat is measured as well.
        os.utime(self._lock_path)
        idle_seconds = self._lock_path.stat().st_mtime - last_beat
        if idle_seconds > self._idle_timeout:
            raise CheckpointError(
                f"{self._run.path} is not complete, and its trainer ({owner}) has shown no sign of "
                f"life for {idle_seconds:.0f} s. Resume the training and start this again; nothing "
                "is evaluated twice"
            )

    @property
    def _lock_path(self) -> Path:
        return self._run.path / FOLDER / f"{self._group}.lock"

    @contextmanager
    def _open_results(self) -> Iterator[tuple[ResultWriter, ResultLogger]]:
        """Open the results and the loggers of this group, and hold its lock meanwhile."""
        self._run.get_folder(FOLDER).mkdir(exist_ok=True)
        heartbeat = read_owner(self._lock_path)
        attempt = 1
        if heartbeat is not None:
            former_owner, _ = heartbeat
            attempt = former_owner.attempt + 1
        with (
            Lock(self._lock_path, attempt) as lock,
            closing(ResultWriter(self._run, self._group)) as results,
        ):
            directory = EvaluationDirectory(self._run, self._group, lock)
            with closing(self._open_loggers(results, directory)) as logger:
                yield results, logger

    def _open_loggers(self, results: ResultWriter, directory: EvaluationDirectory) -> ResultLogger:
        """Have the loggers continue after the last result that counts."""
        if not results.logger_state and directory.path.exists():
            # Of a process that was killed before its first result counted.
            supersede(directory.path.parent, [directory.path])
        directory.path.mkdir(exist_ok=True)
        run = EvaluationRun(
            engine=self._experiment.engine,
            run_dir=directory,
            manifest=self._run.read_manifest(),
            attempt=directory.lock.attempt,
            step=results.last_step,
        )
        return ResultLogger(run, results.logger_state)


def group_standalone_evaluators(engine: fg.Engine) -> dict[str, dict[str, Evaluator]]:
    """Return the standalone evaluators of an engine, by group and name."""
    groups: dict[str, dict[str, Evaluator]] = {}
    for name, evaluator in find_evaluators(engine).items():
        if isinstance(evaluator.every, Standalone) and evaluator.group is not None:
            groups.setdefault(evaluator.group, {})[name] = evaluator
    return groups


def format_result(name: str, step: int, metrics: dict[str, Any]) -> str:
    """Return a result as a line for people: the metrics that are single numbers.

    Args:
        name: of the evaluator.
        step: of the checkpoint.
        metrics: by name.
    """
    numbers = [
        f"{key} {value:.6g}"
        for key, value in metrics.items()
        if isinstance(value, bool | int | float)
    ]
    return "  ".join([name, f"step {step}", *numbers])


def _get_schedule(evaluator: Evaluator) -> Standalone:
    assert isinstance(evaluator.every, Standalone)
    return evaluator.every
