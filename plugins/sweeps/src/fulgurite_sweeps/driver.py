"""The driver of a sweep: it asks for trials, starts them, and tells the journal how they ended."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fulgurite_cli import IN_USE, note_signals
from fulgurite_runs import Lock
from optuna.trial import FrozenTrial, TrialState

from fulgurite_sweeps.attributes import ABANDONED, ERROR, FIXED, METRICS, START, STEP
from fulgurite_sweeps.executors import Executor, Job, RunningJob
from fulgurite_sweeps.failures import describe_code, describe_failure
from fulgurite_sweeps.journal import Journal, SweepDirectory
from fulgurite_sweeps.methods import GRID, make_sampler
from fulgurite_sweeps.objectives import Objective
from fulgurite_sweeps.plan import Plan
from fulgurite_sweeps.program import Program
from fulgurite_sweeps.results import TrialResult, read_result
from fulgurite_sweeps.space import Space
from fulgurite_sweeps.trial import TrialSettings, describe_variables

_POLL = 0.05
"""Seconds between two looks whether a trial has ended."""
_LOOK = 1.0
"""Seconds between two looks whether another driver has left a trial."""


@dataclass
class _ActiveTrial:
    """A trial that runs here.

    Attributes:
        number: of the trial.
        lock: keeps other drivers from it.
        job: its process.
        log_size: how much it had printed before this start, in bytes.
        num_retries: how often it may still be started again.
    """

    number: int
    lock: Lock
    job: RunningJob
    log_size: int
    num_retries: int


class Driver:
    """Runs the trials of a sweep. It keeps nothing that is not on disk as well: it may be killed at
    any moment, and there may be several.

    Args:
        directory: of the sweep.
        journal: its memory.
        program: what is trained.
        space: what is searched.
        objectives: what is looked for.
        plan: how.
        executor: where the trials run.
        tell: gets a line for each thing that happens.
    """

    def __init__(
        self,
        directory: SweepDirectory,
        journal: Journal,
        program: Program,
        space: Space,
        objectives: list[Objective],
        plan: Plan,
        executor: Executor,
        tell: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._program = program
        self._space = space
        self._objectives = objectives
        self._plan = plan
        self._executor = executor
        self._tell = tell
        self._active: list[_ActiveTrial] = []
        self._next_look = 0.0
        self._waits_for: list[int] = []

    def run(self) -> list[int]:
        """Run trials until there are as many as planned; return the signals that ended it.

        A signal is handed to the trials, which save and end; the next driver resumes them.
        """
        self._check_samples()
        num_handled = 0
        is_open = self._executor.open(self._directory.path, self._tell)
        with is_open, _note_signals() as received, self._leaving_on_error():
            while True:
                new = received[num_handled:]  # more may arrive while these are handed on
                num_handled += len(new)
                for number in new:
                    for active in self._active:
                        active.job.stop(number)
                self._collect(is_stopping=bool(received))
                is_over = not received and self._fill()
                if not self._active and (received or is_over):
                    return received
                time.sleep(_POLL)

    def _check_samples(self) -> None:
        """Let the executor refuse trials that it cannot run, before the first of them."""
        points = self._space.list_samples()
        jobs = [self._make_job(0, self._space.build_overrides(point)) for point in points]
        self._executor.check(jobs)

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """If the block fails, leave the trials to whoever drives the sweep next, which may be this
        process: they save and end."""
        try:
            yield
        except BaseException:
            for active in self._active:
                active.job.stop(signal.SIGTERM)
                active.lock.release()
            raise

    def _fill(self) -> bool:
        """Start trials while there is room; return whether none is left, here or elsewhere."""
        if len(self._active) >= self._executor.num_slots or time.monotonic() < self._next_look:
            return False
        while len(self._active) < self._executor.num_slots:
            claimed = self._take_next()
            if claimed is None:
                self._next_look = time.monotonic() + _LOOK
                return self._is_over()
            try:
                self._begin(*claimed)
            except BaseException:
                _, lock, _ = claimed
                lock.release()
                raise
        return False

    def _is_over(self) -> bool:
        """Return whether no trial runs that this driver waits for; tell once which ones another
        driver has."""
        if self._active:
            return False
        others = [trial.number for trial in self._list_running()]
        names = ", ".join(f"trial-{number}" for number in others)
        # A trial whose driver was killed is still saving, and can be taken over in a moment.
        if not self._plan.should_wait and all(map(self._directory.is_in_use, others)):
            if others:
                self._tell(f"nothing is left to start; another driver has {names}")
            return True
        if others and others != self._waits_for:
            self._waits_for = others
            self._tell(f"waiting for trials of another driver: {names}")
        return not others

    def _take_next(self) -> tuple[FrozenTrial, Lock, bool] | None:
        """Return a trial that is ours now, and whether it had been started; None if there is none.

        First come those whose driver is gone, then those in line, then what the sampler chooses.
        """
        with self._directory.lock():
            for trial in self._list_running():
                lock = self._claim(trial.number)
                if lock is None:
                    continue
                if self._space.is_point(trial.params):
                    return trial, lock, True
                self._abandon(trial)
                lock.release()
            return self._ask()

    def _claim(self, number: int) -> Lock | None:
        """Return the lock of a trial that runs nowhere, and has not ended since it was listed."""
        if any(active.number == number for active in self._active):
            return None
        lock = self._directory.claim(number)
        if lock is not None and self._journal.get_trial(number).state.is_finished():
            lock.release()
            return None
        return lock

    def _abandon(self, trial: FrozenTrial) -> None:
        """End a trial whose driver was killed before all its values were known. It does not count,
        and if it was in line, it is put there again."""
        point = trial.system_attrs.get(FIXED)
        if point is not None and not self._is_in_line(point):
            self._journal.study.enqueue_trial(point)
        self._journal.set_attribute(trial.number, ABANDONED, True)
        self._journal.study.tell(trial.number, state=TrialState.FAIL)

    def _is_in_line(self, point: dict[str, Any]) -> bool:
        waiting = self._list_trials(TrialState.WAITING)
        return any(trial.system_attrs.get(FIXED) == point for trial in waiting)

    def _ask(self) -> tuple[FrozenTrial, Lock, bool] | None:
        """Return a new trial, unless there are as many as planned."""
        trials = self._list_trials()
        counted = [trial for trial in trials if ABANDONED not in trial.user_attrs]
        waiting = [trial for trial in counted if trial.state == TrialState.WAITING]
        if len(counted) - len(waiting) >= self._plan.num_trials:
            return None
        sampler = self._plan.sampler
        if sampler == GRID and not waiting:
            return None
        # Optuna gives the first in line, or else a new one.
        number = min((trial.number for trial in waiting), default=len(trials))
        self._directory.check_unbegun(number)
        if isinstance(sampler, str):
            sampler = make_sampler(sampler, self._plan.seed, number)
        self._journal.study.sampler = sampler
        new_trial = self._journal.study.ask()
        assert new_trial.number == number
        self._space.suggest(new_trial)
        lock = self._directory.claim(number)
        assert lock is not None  # whoever asks has the lock of the sweep
        return self._journal.get_trial(number), lock, False

    def _list_running(self) -> list[FrozenTrial]:
        """Return the trials that have begun and not ended, of those that this driver may run."""
        running = self._list_trials(TrialState.RUNNING)
        return [trial for trial in running if self._plan.only in (None, trial.number)]

    def _list_trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._journal.study.get_trials(deepcopy=False, states=states or None)

    def _begin(self, trial: FrozenTrial, lock: Lock, is_resumed: bool) -> None:
        """Start a trial, unless it ended just before its driver was killed.

        Args:
            trial: it.
            lock: keeps other drivers from it.
            is_resumed: whether it had been started.
        """
        result = self._read_result(trial.number) if is_resumed else None
        if result is not None:
            self._finish(trial.number, result)
            lock.release()
            return
        if START not in trial.user_attrs:
            start = {
                "program": self._program.path,
                "fit_options": list(self._program.fit_options),
            }
            self._journal.set_attribute(trial.number, START, start)
        overrides = self._space.build_overrides(trial.params)
        verb = "resuming" if is_resumed else "starting"
        self._tell(f"{verb} trial-{trial.number}: {' '.join(overrides)}")
        self._start(trial.number, lock, self._plan.num_retries)

    def _start(self, number: int, lock: Lock, num_retries: int) -> None:
        """Start the process of a trial.

        Args:
            number: of the trial.
            lock: keeps other drivers from it.
            num_retries: how often it may be started again.
        """
        overrides = self._space.build_overrides(self._journal.get_trial(number).params)
        job = self._make_job(number, overrides)
        log_size = job.log.stat().st_size if job.log.exists() else 0
        started = self._executor.start(job)
        self._active.append(_ActiveTrial(number, lock, started, log_size, num_retries))

    def _make_job(self, number: int, overrides: list[str]) -> Job:
        """Return what an executor starts for a trial.

        Args:
            number: of the trial.
            overrides: its arguments.
        """
        run_dir = self._directory.get_run(number).path
        metrics = [goal.metric for goal in (*self._objectives, *self._plan.constraints)]
        settings = TrialSettings(str(self._directory.path), number, metrics, self._plan.pruner)
        return Job(
            number,
            self._program.build_command(overrides, run_dir),
            describe_variables(settings),
            self._directory.get_log(number),
            run_dir,
            tuple(overrides),
        )

    def _collect(self, is_stopping: bool) -> None:
        """Tell the journal of trials that have ended.

        Args:
            is_stopping: whether they were asked to save and end.
        """
        for active in list(self._active):
            code = active.job.poll()
            if code is None:
                continue
            self._active.remove(active)
            self._next_look = 0.0
            result = self._read_result(active.number)
            if result is not None:
                self._finish(active.number, result)
            elif is_stopping:
                self._tell(f"trial-{active.number} is saved as far as it got")
            elif self._should_retry(active, code):
                self._tell(f"trial-{active.number} was cut off ({describe_code(code)}): resuming")
                self._start(active.number, active.lock, active.num_retries - 1)
                continue
            else:
                log = self._directory.get_log(active.number)
                self._fail(active.number, describe_failure(log, active.log_size, code))
            active.lock.release()

    def _should_retry(self, active: _ActiveTrial, code: int) -> bool:
        """Return whether a trial is started again: its process was killed, or it found that an
        earlier one, which was about to end, still had its directory."""
        may_succeed = code < 0 or code in (self._program.preempted_exit_code, IN_USE)
        return active.num_retries > 0 and may_succeed

    def _read_result(self, number: int) -> TrialResult | None:
        """Return how a trial ended; None if it did not reach its end."""
        run = self._directory.get_run(number)
        return read_result(run.path) if run.is_complete else None

    def _finish(self, number: int, result: TrialResult) -> None:
        """Tell the journal how a trial ended.

        Args:
            number: of the trial.
            result: how.
        """
        self._journal.set_attribute(number, METRICS, _as_json(result.metrics))
        self._journal.set_attribute(number, STEP, result.step)
        if result.is_pruned:
            self._journal.study.tell(number, state=TrialState.PRUNED)
            self._tell(f"trial-{number} was {result.stop_reason or f'pruned at {result.step}'}")
            return
        for metric in (goal.metric for goal in (*self._objectives, *self._plan.constraints)):
            if math.isnan(result.metrics.get(metric, math.nan)):
                what = "is NaN" if metric in result.metrics else "was not measured"
                self._fail(number, f"{metric} {what} by step {result.step}")
                return
        for constraint in self._plan.constraints:
            excess = constraint.measure_excess(result.metrics[constraint.metric])
            self._journal.set_constraint(number, str(constraint), excess)
        values = [result.metrics[metric] for metric, _ in self._objectives]
        self._journal.study.tell(number, values)
        texts = [
            f"{metric}={value:.6g}"
            for (metric, _), value in zip(self._objectives, values, strict=True)
        ]
        self._tell(f"trial-{number} has ended: {', '.join(texts)}")

    def _fail(self, number: int, message: str) -> None:
        self._journal.set_attribute(number, ERROR, message)
        self._journal.study.tell(number, state=TrialState.FAIL)
        self._tell(f"trial-{number} failed: {message}")


def _as_json(metrics: dict[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON, which has no NaN and no infinities."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


@contextmanager
def _note_signals() -> Iterator[list[int]]:
    """As `note_signals`; outside of the main thread nothing is noted."""
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    with note_signals() as received:
        yield received
