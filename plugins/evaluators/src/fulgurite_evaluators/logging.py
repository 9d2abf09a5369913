"""How the results of evaluations in a separate process reach the program's loggers."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import jax
from fulgurite import Record
from fulgurite.plugins import EvaluationResult, RecordDispatcher, RecordKind
from fulgurite_runs import flush_loggers, rewind_loggers


@dataclass(frozen=True)
class EvaluationRun:
    """What loggers are told of an evaluation; `fg.LoggedRun` describes the members."""

    engine: fg.Engine
    run_dir: Any
    manifest: Any
    attempt: int
    step: int
    step_range: fg.StepRange = field(default_factory=lambda: fg.StepRange(0))


class ResultLogger:
    """Passes the results of evaluators to those loggers of an engine that keep what they get: the
    ones that can say how far they have written (hook `flush_logger`).

    Example:
        view = EvaluationRun(engine, run_dir=directory, manifest=None, attempt=1, step=0)
        logger = ResultLogger(view)
        state = logger.log("test", 100, fg.EvaluationResult({"loss": 0.5}))
        logger.close()

    Args:
        run: what the loggers are told when they open.
        state: what `log` returned after the last result that counts: what the loggers wrote later
            is dropped. Empty at the first start.
    """

    def __init__(self, run: EvaluationRun, state: Mapping[str, Any] | None = None) -> None:
        self._plugins = run.engine.plugins
        loggers = self._plugins.hooks.flush_logger.plugins
        self._names = frozenset(logger.name for logger in loggers)
        self._manifest = run.manifest
        self._step = run.step
        self._dispatcher = RecordDispatcher(self._plugins, loggers=self._names)
        self._dispatcher.attempt = run.attempt
        with ExitStack() as stack:
            stack.enter_context(self._plugins.reserve("a standalone evaluation", run.run_dir.path))
            stack.callback(lambda: self._dispatcher.close(self._step))
            if state:
                self._set_host_states(state["host_states"])
                rewind_loggers(self._plugins, run.step, state["positions"])
            self._dispatcher.open(run.step, run=run)
            self._stack = stack.pop_all()

    def log(self, name: str, step: int, result: EvaluationResult) -> dict[str, Any]:
        """Log a result, durably, and return where the loggers are then, as JSON.

        Args:
            name: of the evaluator.
            step: of the checkpoint.
            result: its metrics and media.
        """
        self._step = step
        if self._manifest is not None:
            # Not at the start: a service such as wandb would begin a run without a result.
            self._emit(Record("config", "fulgurite", step, self._manifest, "telemetry"))
            self._manifest = None
        # Exact though it depends on the clock which checkpoints are evaluated: what belongs to no
        # result is dropped at the next start, so that each result is there once.
        self._emit_result("scalars", name, step, result.metrics)
        if result.media:
            self._emit_result("media", name, step, result.media)
        get_positions = flush_loggers(self._plugins, step)
        return {
            "positions": {plugin: get_position() for plugin, get_position in get_positions.items()},
            "host_states": self._get_host_states(),
        }

    def close(self) -> None:
        """Have the loggers write out everything and end."""
        self._stack.close()

    def _emit_result(self, kind: RecordKind, name: str, step: int, values: dict[str, Any]) -> None:
        writable = jax.device_get(self._dispatcher.validate(kind, name, values))
        if writable is not None:
            self._emit(Record(kind, name, step, writable))

    def _emit(self, record: Record) -> None:
        self._dispatcher.enqueue([], lambda: record)

    def _get_host_states(self) -> dict[str, Any]:
        return {
            plugin.name: {"version": plugin.options.state_version, "state": state}
            for plugin, state in self._plugins.hooks.get_host_state.each(self._step)
            if plugin.name in self._names
        }

    def _set_host_states(self, host_states: Mapping[str, Any]) -> None:
        # An entry holds what the hook takes: a state and its version.
        self._plugins.hooks.set_host_state.each(
            self._step, per_plugin=lambda plugin: host_states.get(plugin.name)
        )
