"""Writing checkpoints: the arrays leave the device at once, everything else happens behind the
training."""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite_runs.json_codec import dumps

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.retention import RetentionPolicy, clear, publish

FAILURES = 3
"""So many failed saves in a row end the run; the message says so in words."""


class SaveError(CheckpointError):
    """Checkpoints repeatedly could not be written. This ends the fit, but what was trained is in
    `result`.

    Attributes:
        result: what `fit` would have returned at that step.
    """

    def __init__(self, message: str, result: fg.FitResult) -> None:
        super().__init__(message)
        self.result = result


@dataclass
class Saver:
    """Writes the checkpoints of one fit below `root`, one at a time.

    A save that fails leaves all older checkpoints as they are. The next one tries again; the third
    failure in a row ends the run.
    """

    root: Path
    policy: RetentionPolicy
    background: bool
    timers: dict[str, float]
    metrics_by_source: dict[str, tuple[int, dict[str, Any]]]
    previous_best: tuple[int, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fulgurite checkpoint")
        self._saving: tuple[Any, Future[None]] | None = None
        self._saved: Any = None
        self._failures, self._told = 0, False

    def note_metrics(self, record: fg.Record) -> None:
        """Notes metrics with the step at which they were measured."""
        at, values = self.metrics_by_source.get(record.source, (None, {}))
        self.metrics_by_source[record.source] = (
            record.step,
            (values if at == record.step else {}) | record.values,
        )

    def save(self, run: fg.Run, *, wait: bool) -> None:
        """Saves the run as it is, unless that was the last thing that was saved. With `wait`, and
        if not in the background, returns when the checkpoint is complete."""
        snapshot = run.snapshot()
        # Of one step there may be two states: before and after what was pending, or an action, at
        # that step.
        content = run.step, run.num_records, snapshot.pending_actions, id(snapshot.state.step)
        while True:
            self.settle(run)
            if content != self._saved:
                self._begin(run, snapshot, content)
            if self.background and not wait:
                return
            self.settle(run)
            if content == self._saved or not wait:
                return

    def settle(self, run: fg.Run) -> None:
        """Waits for the save under way, and tells of its failure."""
        if self._saving is None:
            return
        (content, keep), future = self._saving
        self._saving = None
        try:
            future.result()
        except Exception as error:
            self._note_failure(run, content[0], error)
        else:
            self._saved, self._failures = content, 0
            self._kept = keep  # its id is in the content

    def close(self) -> None:
        """Waits for the save under way and ends the thread; warns if that save failed."""
        self._thread.shutdown()
        if self._saving is not None and (error := self._saving[1].exception()) is not None:
            warnings.warn(_reason(self._saving[0][0][0], error), stacklevel=2)

    def _manifest(self, run: fg.Run) -> dict[str, Any]:
        """What made the state: of one that is saved anew with no step taken, what made it
        before."""
        if self.previous_best is None or self.previous_best[0] != run.step:
            return run.manifest
        settings = {name: run.manifest["settings"][name] for name in ("steps", "epochs")}
        kept = {**run.manifest, **self.previous_best[1], "plugins": run.manifest["plugins"]}
        return {**kept, "settings": {**kept["settings"], **settings}}

    def _begin(self, run: fg.Run, snapshot: fg.Snapshot, content: Any) -> None:
        plugins, step = run.engine.plugins, run.step
        plugins.call("on_save", step, run=run, step=step)
        timers = dict(self.timers)
        for name, seconds in run.timings.seconds.items():
            timers[name] = timers.get(name, 0.0) + seconds
        measured = {
            source: values for source, (at, values) in self.metrics_by_source.items() if at == step
        }
        self._check_best(measured)
        found = arrays.flatten_state(snapshot.state)
        # Renamed when complete: so a `step-N` without COMMIT is damage, and the same step can be
        # saved again while the old checkpoint stays until its successor is there.
        path = format.get_checkpoint_folder(self.root) / f"saving-step-{step}"
        texts = {
            "manifest.json": dumps(self._manifest(run)),
            "index.json": dumps(
                {
                    "arrays": {name: arrays.get_spec(array) for name, array in found.items()},
                    "span": snapshot.step_range.to_json(),
                    "pending": snapshot.pending_actions,
                    "metrics": snapshot.metrics,
                }
            ),
        }
        host = {"host": snapshot.host_states, "position": snapshot.data_position}
        texts = (texts if jax.process_index() == 0 else {}) | {
            f"host-{jax.process_index()}.json": _format_host_state(host)
        }
        best = None if self.policy.monitor is None else (self.policy.monitor, self.policy.mode)
        commit = Commit(step, run.attempt, [], [], measured, best, timers, time.time())
        response, sinks = None, {}
        try:
            if jax.process_index() == 0:
                clear(path)
                path.mkdir(parents=True)
                sinks = _flush_sinks(run)
            response = arrays.save(path / "arrays", found)
        except Exception as error:
            response = Future()
            response.set_exception(error)
        held = (lambda: None) if run.run_dir is None else run.run_dir.assert_locked
        consensus = run.engine.sharding.sync
        job = self._thread.submit(
            _finish, path, texts, response, sinks, commit, self.policy, held, consensus
        )
        self._saving = (content, snapshot.state.step), job

    def _check_best(self, measured: dict[str, dict[str, Any]]) -> None:
        """Warns once if the metric of the best is not among those that its source has just
        measured."""
        source, _, name = (self.policy.monitor or "").partition("/")
        there = measured.get(source, {})
        if there and source != "train" and name not in there and not self._told:
            self._told = True
            gap = (
                f"the best checkpoint is that by {self.policy.monitor!r}, which {source!r} does "
                f"not measure"
            )
            warnings.warn(f"{gap}. {did_you_mean(name, there)}", stacklevel=2)

    def _note_failure(self, run: fg.Run, step: int, error: Exception) -> None:
        self._failures += 1
        reason = _reason(step, error)
        if self._failures == FAILURES:
            raise SaveError(
                f"{reason}. That was the third failure in a row; the older checkpoints in "
                f"{self.root} are as "
                "they were. Make room or choose another directory, and start the run again. What "
                "was trained so far is "
                "in this error's `result`",
                _result(run, reason),
            ) from error
        warnings.warn(
            f"{reason}. Older checkpoints are unchanged; the next save tries again", stacklevel=2
        )
        run.log_text("checkpoints", {"message": reason}, stream="telemetry")


def _reason(step: int, error: BaseException) -> str:
    return f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}"


def _result(run: fg.Run, reason: str) -> fg.FitResult:
    """What was trained, also without a checkpoint of it."""
    state, failed, stopped = (
        run.state,
        {"checkpoints": reason},
        run.stop_reason or "the checkpoints cannot be written",
    )
    return fg.FitResult(
        state.module,
        state.model_state,
        state,
        run.history,
        run.metrics,
        run.timings,
        stopped,
        failed,
        [reason],
    )


def _format_host_state(host: dict[str, Any]) -> str:
    """The JSON of what belongs to the host; what is none names its plugin."""
    try:
        return dumps(host)
    except ConfigurationError as error:
        for name, kept in host["host"].items():
            try:
                dumps(kept)
            except ConfigurationError as cause:
                raise ConfigurationError(
                    f"plugin {name!r}, hook get_host_state: {cause}"
                ) from error
        raise


def _flush_sinks(run: fg.Run) -> dict[str, Callable[[], Any]]:
    """Has every sink make its records durable; by name, what waits for its position."""
    asked: dict[str, Callable[[], Any]] = {}
    for hook in run.engine.plugins.implementations("flush_logger"):
        try:
            future = hook(run.step, step=run.step)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        asked[hook.plugin.name] = partial(_position, hook.plugin, future)
    return asked


def _position(sink: Any, future: Any) -> Any:
    """Where a sink is. What went wrong is told and stands in the place of that, unless the sink is
    required: a log that cannot be written ends no training."""
    try:
        if not isinstance(future, Future):
            raise TypeError(f"hook durable gives a concurrent.futures.Future, not {future!r}")
        position = future.result()
        dumps(position)
        return position
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        told = f"sink {sink.name!r} ({sink.distribution}) cannot say where its records end"
        if getattr(sink.plugin, "required", False):
            raise CheckpointError(f"{told}: {reason}") from error
        warnings.warn(
            f"{told}, so that a resumed run may lose or repeat some: {reason}", stacklevel=1
        )
        return {"failed": reason}


def _finish(
    path: Path,
    texts: dict[str, str],
    response: Any,
    sinks: dict[str, Callable[[], Any]],
    commit: Commit,
    policy: RetentionPolicy,
    held: Callable[[], None],
    consensus: fg.ProcessSync,
) -> None:
    """Everything after the arrays have left the device; `COMMIT` only when all of it is on the
    disk, and only if this process still has the run, as `held` tells.

    A process that fails says so to the others, which would wait for it.
    """
    first = jax.process_index() == 0
    part: list[Any] = [None, {}]
    with _Shared(consensus, "checkpoint written") as shared:
        response.result()
        for name, text in texts.items():
            (path / name).write_bytes(text.encode())
        part[1] = {name: position() for name, position in sinks.items()}
        part[0] = format.write_hashes(path, jax.process_index(), jax.process_count())
        shared.value = part
    with _Shared(consensus, "checkpoint complete"):
        if first:
            digests, positions = zip(*shared.values, strict=True)
            held()
            format.write_commit(
                path, replace(commit, hashes=list(digests), positions=list(positions))
            )
            publish(path, commit)
    if first:
        try:
            policy.apply(path.parent.parent)
        except OSError as error:
            warnings.warn(
                f"an old checkpoint in {path.parent} could not be removed: {error}", stacklevel=1
            )


class _Shared:
    """A block that all processes enter. `values` are what each of them made there; if one fails,
    all do."""

    def __init__(self, consensus: fg.ProcessSync, name: str) -> None:
        self.value: Any = None
        self.values: list[Any] = []
        self._gather = partial(consensus.all_gather, name)

    def __enter__(self) -> "_Shared":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        failure = None if error is None else f"{type(error).__name__}: {error}"
        parts = self._gather([failure, self.value])
        self.values = [value for _, value in parts]
        failed = [
            f"process {process}: {failure}" for process, (failure, _) in enumerate(parts) if failure
        ]
        if failed and error is None:
            raise CheckpointError("; ".join(failed))
