"""Writing what a step needs to be replayed where it was not finite, or something else was seen."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import fulgurite as fg
import jax
from fulgurite.errors import (
    ConfigurationError,
    FulguriteError,
    NonFiniteError,
    check_positive_int,
)
from fulgurite.plugins import (
    BatchItem,
    as_trigger,
    copy_arrays,
    get_device_arrays,
    hide_constructor_frames,
)
from fulgurite_runs import RunPlugin

from fulgurite_replay.capture_files import Captured, remove_oldest, write_capture
from fulgurite_replay.rows import describe_batch, list_examples


@dataclass(frozen=True)
class _Segment:
    """Steps that are made again from one copy of the state.

    Attributes:
        state: the copy.
        start: the number of updates before them.
        items: their batches, in order.
    """

    state: fg.TrainState
    start: int
    items: list[BatchItem] = field(default_factory=list)


@dataclass
class _Memory:
    """What is kept of a fit.

    Attributes:
        segments: the steps since the newest copy, and before them those that ended with a replaced
            state: an action may replace it before the metrics of its step are logged.
        wanted: steps to capture, with the reasons.
    """

    segments: deque[_Segment] = field(default_factory=lambda: deque(maxlen=2))
    wanted: dict[int, str] = field(default_factory=dict)


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class Capture(RunPlugin):
    """Writes batch, keys and state before a step that was not finite into the run's `captures/`, so
    that `fulgurite replay` needs neither the data nor a checkpoint.

    It keeps a copy of the state on the devices, made again where an action replaces the state, and
    the batches since; the steps in between are executed again once one is to be captured. So it
    needs memory for another state, for two where one is replaced, and for the batches of `every`
    steps, and changes no number of the run. On the disk a capture has the size of the state and of
    a batch; a message says how much that is.

    Example:
        from fulgurite_replay import Capture

        def is_spike(metrics):
            return metrics["loss"] > 100

        plugins = [Capture(when=is_spike)]
        engine = fg.Engine(steps=100, log_every=1, run_dir="runs/a", plugins=plugins)

    Args:
        on: `nonfinite` for the step that ends the run with a `NonFiniteError`; None for none.
        when: a function of the metrics of training at a log step, by name, that returns whether
            that step is captured as well; with `log_every=1` it is asked for each step. At most one
            in `every` steps is captured so, the first.
        every: at which steps the state is copied: an interval, or a trigger.
        max_to_keep: how many captures a run has at most; those that were written first go.
    """

    plugin_name = "capture"

    on: Literal["nonfinite"] | None = "nonfinite"
    when: Callable[[Mapping[str, Any]], bool] | None = None
    every: int | fg.Trigger = 50
    max_to_keep: int = 3
    _memory = fg.PerFit(_Memory)

    def __post_init__(self) -> None:
        as_trigger(self.every)
        check_positive_int(self.max_to_keep, "Capture: max_to_keep")
        if self.on not in ("nonfinite", None):
            raise ConfigurationError(f"Capture: on is 'nonfinite' or None, not {self.on!r}")
        if self.on is None and self.when is None:
            raise ConfigurationError("Capture(on=None) captures nothing: give when=")

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Copy the state once everything that may change it at a step has run."""
        trigger = as_trigger(self.every) | fg.AtEnd()
        return [fg.ScheduledAction("copy", trigger, self._renew, stage="save")]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse what cannot be captured; copy the state, and note each batch from here on."""
        if run.engine.fast_dev_run is not None:
            return
        if run.run_dir is None:
            raise ConfigurationError(
                "Capture has no place to write to: give Engine(run_dir=...), or --run"
            )
        if jax.process_count() > 1:
            raise ConfigurationError("Capture is for one process, and this run has several")
        if self.on == "nonfinite" and run.engine.on_nonfinite != "raise":
            raise ConfigurationError(
                "Capture(on='nonfinite') writes the step that ends a run, and with "
                f"on_nonfinite={run.engine.on_nonfinite!r} none does: choose on_nonfinite='raise', "
                "or Capture(on=None, when=...)"
            )
        self._copy(run)
        run.data_iterator.observe(self._note_batch)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Ask `when` about the metrics of training."""
        memory = self._memory
        is_of_training = (record.kind, record.source, record.stream) == (
            "scalars",
            "train",
            "exact",
        )
        if self.when is None or not is_of_training or memory.wanted or not memory.segments:
            return
        if record.step > memory.segments[0].start and self.when(record.values):
            memory.wanted[record.step] = self._get_name()

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Capture the step that was not finite, and what was wanted before."""
        if not self._memory.segments:
            return
        if isinstance(exception, NonFiniteError) and self.on == "nonfinite":
            self._memory.wanted[exception.step] = exception.term
        for text in self._capture(run):
            exception.add_note(text)
        self._forget()

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """Capture what was wanted where a signal ended the run, and drop what is kept."""
        self._capture(run)
        self._forget()

    @fg.hookimpl
    def on_replace_state(self, run: fg.Run) -> None:
        """Copy the state that the steps since the copy do not make; those stay until the next
        copy."""
        if self._memory.segments:
            self._capture_and_tell(run)
            self._copy(run)

    def _renew(self, run: fg.Run) -> None:
        """Capture what was wanted since the copy, and make another one."""
        self._capture_and_tell(run)
        self._copy(run, keeps_previous=False)

    def _capture_and_tell(self, run: fg.Run) -> None:
        for text in self._capture(run):
            run.notify(self.registered_name, text)

    def _copy(self, run: fg.Run, *, keeps_previous: bool = True) -> None:
        if run.run_dir is None:
            return
        # Where a step before this one was not finite, this raises, and what is kept is captured.
        state = copy_arrays(run.state)
        if not keeps_previous:
            self._memory.segments.clear()
        self._memory.segments.append(_Segment(state, run.step))
        self._memory.wanted.clear()

    def _note_batch(self, item: BatchItem) -> None:
        if self._memory.segments:
            self._memory.segments[-1].items.append(item)

    def _forget(self) -> None:
        self._memory.segments.clear()
        self._memory.wanted.clear()

    def _capture(self, run: fg.Run) -> list[str]:
        """Execute the steps since the copy again, and write those that are wanted.

        Returns:
            What was done, a sentence for each.
        """
        return [
            text for segment in self._memory.segments for text in self._capture_in(segment, run)
        ]

    def _capture_in(self, segment: _Segment, run: fg.Run) -> list[str]:
        """Execute the steps of a segment again, up to the last that is wanted, and write those that
        are.

        Args:
            segment: the steps.
            run: the fit.
        """
        state, wanted, step = segment.state, self._memory.wanted, segment.start
        texts = []
        for item in segment.items:
            if step >= max(wanted, default=0):
                break
            step += 1
            batch = fg.ArrayData.gather(get_device_arrays(run.data), item.batch)
            before = state
            state, _ = run.engine.step(copy_arrays(before), batch, step_range=run.step_range)
            if step in wanted:
                captured = Captured(
                    step,
                    wanted[step],
                    run.step_range,
                    batch,
                    before,
                    describe_batch(run, item),
                    tuple(list_examples(run, item)),
                )
                texts.append(self._write(run, captured, state))
        return texts

    def _write(self, run: fg.Run, captured: Captured, after: fg.TrainState) -> str:
        """Write a capture; return what was done, in words.

        Args:
            run: the fit.
            captured: the step.
            after: the state after it, as it was executed again.
        """
        step = captured.step
        if captured.reason != self._get_name() and int(after.nonfinite.step) != step:
            return (
                f"step {step} was not captured: executed again it is finite. Either the data "
                "source writes its next batch into the same arrays, or the program is not "
                "deterministic"
            )
        run.run_dir.assert_locked()
        try:
            path, num_bytes = write_capture(run.run_dir.path, captured)
            remove_oldest(run.run_dir.path, self.max_to_keep)
        except (OSError, FulguriteError) as error:
            run.report_failure(self.registered_name, f"step {step} was not captured", error)
            return f"step {step} was not captured: {error}"
        return (
            f"step {step} ({captured.reason}) was captured for `fulgurite replay`: {path}, "
            f"{num_bytes:,} bytes"
        )

    def _get_name(self) -> str:
        return getattr(self.when, "__name__", "when")
