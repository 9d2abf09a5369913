"""Note what a run spends its time on, over all its attempts."""

import threading
import time
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames
from fulgurite_runs import RunPlugin, find_beginning

from fulgurite_monitor.arguments import check_seconds
from fulgurite_monitor.buckets import Classifier
from fulgurite_monitor.ledger import (
    AttemptFile,
    AttemptTimes,
    add_up,
    list_attempts,
    read_attempt,
)

JOIN_SECONDS = 5.0
LOG_SECONDS = 1.0
"""Between two records, where log steps come faster."""
NOTE_SECONDS = 0.1
"""Between two notes, likewise."""


@hide_constructor_frames
@dataclass(eq=False)
class Goodput(RunPlugin):
    """Note where the time of a run goes, over all its attempts, and log it at log steps.

    The wall time of a run is from the begin of its first attempt, which is that of its process, to
    the last sign of life of the newest. Of it, *goodput* is the share of `steps`: the time in which
    steps were trained that the run has kept. The rest are the buckets `start` (imports, tracing,
    making the state), `compile`, `data` (waiting for batches), `evaluation`, `save`, `restore`,
    `lost` (steps that were trained and lost by a crash), `down` (from the last sign of life to the
    next start) and `other`, such as plugins. The telemetry of the source `goodput` has `goodput`
    and `BUCKET_seconds`, at the first log step of each second and at the last step.

    With a run directory, a thread notes this in `goodput/ATTEMPT` there, every `interval` seconds
    and at log steps: `read_goodput` reads it. How long a run that was killed had been stepping is
    known to that interval.

    Example:
        from fulgurite_monitor import Goodput

        engine = fg.Engine(steps=100, run_dir="runs/a", plugins=[Goodput(), "jsonl"])

    Attributes:
        interval: seconds from one note to the next.
    """

    plugin_name = "goodput"

    interval: float = 5.0
    _clock = fg.PerFit["_Clock | None"](lambda: None)
    _noter = fg.PerFit["_Noter | None"](lambda: None)

    def __post_init__(self) -> None:
        check_seconds(self.interval, "Goodput: interval")

    @fg.hookimpl
    def around_fit(self, timings: fg.Timings) -> None:
        """Note when the attempt began."""
        self._clock = _Clock(timings)

    @fg.hookimpl
    def register_actions(self, log_trigger: fg.Trigger | None) -> list[fg.ScheduledAction]:
        """Log with the engine."""
        if log_trigger is None:
            return []
        return [fg.ScheduledAction("log", "log", self.log, stage="act")]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Read what is noted of earlier attempts, and begin to note."""
        assert self._clock is not None
        if jax.process_index() == 0:
            earlier = self._read_earlier(run)
            self._noter = _Noter(run, self._clock, self.interval, earlier)

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        """Note for the last time."""
        self._stop(run)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """Note for the last time."""
        self._stop(run)

    def log(self, run: fg.Run) -> None:
        """Log the sum over all attempts so far."""
        noter = self._noter
        if noter is None:
            return
        self._report(run, noter)
        now = perf_counter()
        is_last = run.step == run.step_range.stop
        if now < noter.next_note and not is_last:
            return
        noter.next_note = now + NOTE_SECONDS
        noter.book()
        if now < noter.next_log and not is_last:
            return
        noter.next_log = now + LOG_SECONDS
        report = add_up([*noter.earlier, noter.read_times()])
        values = {f"{bucket}_seconds": value for bucket, value in report.seconds.items()}
        values |= {"goodput": report.goodput, "wall_seconds": report.wall}
        run.log_scalars(self.registered_name, values, stream="telemetry")

    def _read_earlier(self, run: fg.Run) -> list[AttemptTimes]:
        """Return what is noted of earlier attempts, without those whose file is damaged, which are
        told."""
        if run.run_dir is None:
            return []
        earlier = []
        for path in list_attempts(run.run_dir.path):
            try:
                times = read_attempt(path)
            except ConfigurationError as error:
                what = f"the time of attempt {path.name} is left out"
                run.report_failure(self.registered_name, what, error)
                continue
            if times is not None:
                earlier.append(times)
        return earlier

    def _report(self, run: fg.Run, noter: "_Noter") -> None:
        """Tell once why nothing is noted any more.

        Args:
            run: the run.
            noter: of it.
        """
        error, noter.error = noter.error, None
        if error is not None:
            run.report_failure(self.registered_name, "the times of the run cannot be noted", error)

    def _stop(self, run: fg.Run) -> None:
        noter, self._noter = self._noter, None
        if noter is not None:
            noter.stop()
            self._report(run, noter)


class _Clock:
    """How long ago an attempt began.

    Attributes:
        began: when it began, in seconds since 1970.
        before_fit: seconds between that and the fit.

    Args:
        timings: of the fit.
    """

    def __init__(self, timings: fg.Timings) -> None:
        self._fit_began = perf_counter()
        self.began = find_beginning(timings)
        self.before_fit = max(0.0, time.time() - self.began)

    @property
    def elapsed(self) -> float:
        """Seconds since then."""
        return perf_counter() - self._fit_began + self.before_fit


class _Noter:
    """Notes the times of an attempt on a thread, in the run directory if there is one.

    Attributes:
        earlier: what is noted of earlier attempts.
        error: why nothing is noted any more, or None.
        next_note: when the thread may note the times again, where log steps come fast.
        next_log: when the next record may be logged.

    Args:
        run: the run.
        clock: of the attempt.
        interval: seconds from one note to the next.
        earlier: what is noted of earlier attempts.
    """

    def __init__(
        self, run: fg.Run, clock: _Clock, interval: float, earlier: list[AttemptTimes]
    ) -> None:
        self.error: Exception | None = None
        self.next_note = 0.0
        self.next_log = 0.0
        self._run = run
        self._clock = clock
        self._interval = interval
        self._start_step = run.step
        self._is_fresh = run.resume == "never"
        self._classifier = Classifier(run.engine.actions)
        self._has_file = run.run_dir is not None
        self.earlier = earlier
        self._unbooked = 0.0
        self._wanted = threading.Event()
        self._ending = threading.Event()
        self.book()
        self._thread = threading.Thread(target=self._note, name="fulgurite goodput", daemon=True)
        if self._has_file:
            self._thread.start()

    def book(self) -> None:
        """Note that all time so far is in the timings of the run, at a point between two steps; the
        thread writes it soon."""
        totals = self._classifier.add_up(self._run.timings.seconds)
        self._unbooked = max(
            0.0, self._clock.elapsed - self._clock.before_fit - sum(totals.values())
        )
        self._wanted.set()

    def read_times(self) -> AttemptTimes:
        """Return what the attempt spent its time on until now. Any thread may call it."""
        clock, run = self._clock, self._run
        elapsed = clock.elapsed
        seconds = self._classifier.add_up(run.timings.seconds)
        seconds["start"] += clock.before_fit
        seconds["other"] += self._unbooked
        # The seconds of what is active now are added to the timings when it ends.
        active_names = list(run.timings.active_names)
        current = self._classifier.get_bucket(active_names[-1]) if active_names else "steps"
        seconds[current] += max(0.0, elapsed - sum(seconds.values()))
        return AttemptTimes(
            run.attempt,
            self._is_fresh,
            self._start_step,
            run.step,
            clock.began,
            clock.began + elapsed,
            seconds,
        )

    def stop(self) -> None:
        """Note for the last time. A disk that hangs is left."""
        self.book()
        self._ending.set()
        self._wanted.set()
        if self._has_file:
            self._thread.join(JOIN_SECONDS)

    def _note(self) -> None:
        try:
            with closing(AttemptFile(self._run.run_dir.path, self._run.attempt)) as file:
                is_last = False
                while not is_last:
                    self._wanted.wait(self._interval)
                    self._wanted.clear()
                    is_last = self._ending.is_set()
                    self._run.run_dir.assert_locked(within=1.0)
                    file.write(self.read_times())
        except Exception as error:
            self.error = error
