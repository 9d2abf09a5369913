"""The loggers of an engine, for a loop of one's own over `Engine.step`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, StateError
from fulgurite.plugins import EngineView, RecordDispatcher, RecordKind, hide_constructor_frames
from fulgurite_runs import (
    MANIFEST_SETTINGS,
    RunDirectory,
    describe_plugins,
    dumps,
    flush_loggers,
    get_run_directory,
    rewind_loggers,
)


@dataclass(frozen=True)
class _LoopView:
    """What loggers see of a loop; `fg.LoggedRun` describes the members."""

    engine: EngineView
    run_dir: RunDirectory | None
    manifest: Any
    attempt: int
    step: int
    step_range: fg.StepRange


@hide_constructor_frames
class LoopLogger(AbstractContextManager["LoopLogger", None]):
    """Passes records to the loggers among the plugins of an engine, in a loop over `Engine.step`.

    Within the block the run directory of the engine, if it has one, is locked, as during a fit.

    Example:
        from fulgurite_logging import LoopLogger

        engine = fg.Engine(steps=100, run_dir="runs/loop", plugins=["jsonl"])
        state = engine.init_state(model, data)
        with LoopLogger(engine) as log:
            for step, batch in enumerate(engine.iter_batches(data), 1):
                state, output = engine.step(state, batch)
                if step % 50 == 0:
                    state = log.metrics(state)
                    log.scalars("test", engine.evaluate(state, data), step)

    Attributes:
        history: the scalars so far.

    Args:
        engine: whose loggers get the records.
        step: the number of updates before the loop.
        positions: what `flush` returned at that step: what the loggers wrote later is dropped.
            Without them a loop from step 0 begins a new log, and sets an earlier one aside; any
            other keeps it.
    """

    def __init__(
        self, engine: fg.Engine, *, step: int = 0, positions: Mapping[str, Any] | None = None
    ) -> None:
        self._engine = engine
        self._step = step
        self._positions = positions
        self._dispatcher: RecordDispatcher | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "LoopLogger":
        if self._dispatcher is not None:
            raise StateError("this LoopLogger was used already: make another one")
        if jax.process_count() > 1:
            raise ConfigurationError(
                "LoopLogger is for one process: with several, train by fit, or log in a plugin"
            )
        engine = self._engine
        manifest = {
            "configuration": engine.config,
            "settings": {
                "steps": engine.steps,
                "epochs": engine.epochs,
                **{name: getattr(engine, name) for name in MANIFEST_SETTINGS},
            },
            "plugins": describe_plugins(engine.plugins),
            "program": None,
            "model": [],
        }
        with ExitStack() as stack:
            stack.enter_context(engine.plugins.reserve("a LoopLogger", engine.run_dir))
            directory = get_run_directory(engine)
            attempt = 1
            if directory is not None:
                stack.enter_context(directory.lock())
                attempt = self._start_attempt(directory, dumps(manifest))
            dispatcher = RecordDispatcher(engine.plugins)
            dispatcher.attempt = attempt
            stack.callback(lambda: dispatcher.close(self._step))
            rewind_loggers(engine.plugins, self._step, self._positions or {})
            step_range = fg.StepRange(0 if self._positions is not None else self._step)
            view = _LoopView(engine, directory, manifest, attempt, self._step, step_range)
            dispatcher.open(self._step, run=view)
            self._stack = stack.pop_all()
        self._dispatcher = dispatcher
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def history(self) -> fg.History:
        """The scalars that were logged in this block."""
        return self._get_dispatcher().history

    def metrics(self, state: fg.TrainState) -> fg.TrainState:
        """Log the metrics of the steps since the last call, as `fit` does at a log step, and return
        the state to continue with, in which the next step begins a new window.

        Waits for the device.

        Args:
            state: what `Engine.step` returned.

        Raises:
            NonFiniteError: a step was not finite.
        """
        self._engine.check_finite(state)
        values = state.metric_window.read()
        if self._engine.on_nonfinite == "skip":
            values["skipped_steps"] = int(state.nonfinite.skipped)
        self.scalars("train", values, int(state.step))
        return state.replace(metric_window=state.metric_window.close())

    def scalars(self, source: str, values: dict[str, Any], step: int) -> None:
        """Log numbers.

        Args:
            source: where they come from: `train`, the name of an evaluation.
            values: numbers, or arrays of numbers, by name. Those on the device are waited for.
            step: the number of updates.
        """
        self._emit("scalars", source, values, step)

    def media(self, source: str, values: dict[str, Any], step: int) -> None:
        """Log images, histograms and the like, of `fulgurite_logging.media`; the arguments are
        those of `scalars`."""
        self._emit("media", source, values, step)

    def text(self, source: str, values: dict[str, Any], step: int) -> None:
        """Log texts; the arguments are those of `scalars`."""
        self._emit("text", source, values, step)

    def flush(self) -> dict[str, Any]:
        """Wait until everything is on disk, and return where the loggers are, as JSON, to be saved
        with the state of the loop."""
        self._get_dispatcher()
        positions = flush_loggers(self._engine.plugins, self._step)
        return {name: get_position() for name, get_position in positions.items()}

    def _start_attempt(self, directory: RunDirectory, manifest: str) -> int:
        """Note a new attempt, and set the records of a loop aside that this one does not continue;
        return its number.

        Args:
            directory: of the run, locked.
            manifest: of the attempt, as JSON.
        """
        checkpoints = directory.list_checkpoints()
        if checkpoints and checkpoints[-1][0] > self._step:
            raise CheckpointError(
                f"{directory.path} holds checkpoints of a fit, the newest of step "
                f"{checkpoints[-1][0]}: choose another run directory"
            )
        continues = self._step > 0 or self._positions is not None
        return directory.start_attempt(manifest, self._step if continues else None)

    def _emit(self, kind: RecordKind, source: str, values: dict[str, Any], step: int) -> None:
        dispatcher = self._get_dispatcher()
        if step < self._step:
            raise StateError(
                f"a record of step {step} comes after one of step {self._step}: log in the order "
                "of steps"
            )
        self._step = step
        dispatcher.emit(kind, source, values, step, "exact")
        dispatcher.flush(wait=True)

    def _get_dispatcher(self) -> RecordDispatcher:
        if self._dispatcher is None:
            raise StateError("a LoopLogger logs within its block: with LoopLogger(engine) as log:")
        return self._dispatcher
