"""Executing steps of a run again, from its checkpoints, without changing its directory."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, DataError
from fulgurite.plugins import RegisteredPlugin, get_split
from fulgurite_checkpoint import Checkpointer, list_own, resolve_root
from fulgurite_runs import RunDirectory, describe_plugins, read_origin

from fulgurite_replay.attempts import Span, list_spans
from fulgurite_replay.digests import StateDigest
from fulgurite_replay.observing import Looker, Observer, StoppedError
from fulgurite_replay.skipping import SkippedBatches, read_skipped

NEVER = 10**11
"""A step that no run has."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A run that was recorded, and the program that made it.

    Example:
        from fulgurite_checkpoint import Checkpointer
        from fulgurite_replay import Recorded, verify

        engine = fg.Engine(steps=20, run_dir="runs/a", plugins=[Checkpointer(every=10), "jsonl"])
        engine.fit(model, data)
        print(verify(Recorded(engine, model, data, "runs/a")))

    Attributes:
        engine: the engine of the run, or one that was made by the same program.
        model: the model, as `Engine.fit` got it.
        data: the data, likewise.
        path: the directory of the run. Nothing is written there.
    """

    engine: fg.Engine
    model: Any
    data: Any
    path: str | Path

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.path)

    @property
    def checkpoint_root(self) -> Path:
        """The directory, perhaps a remote one, that holds the folder with the run's checkpoints."""
        checkpointer = _find_checkpointer(self.engine)
        if checkpointer is None or checkpointer.directory is None:
            return self.directory.path
        return resolve_root(checkpointer.directory)

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Return steps and directories of the run's complete checkpoints, oldest first.

        Raises:
            CheckpointError: there are some of another run.
        """
        return list_own(self.checkpoint_root, self.directory)

    @property
    def skipped_batches(self) -> tuple[int, ...]:
        """The batches of the data that the run leaves out, counted over all epochs from 1; a fork
        may."""
        return read_skipped(self.directory.path)

    @property
    def run_data(self) -> Any:
        """The data as the run reads it."""
        skipped = self.skipped_batches
        return SkippedBatches(self.data, skipped) if skipped else self.data

    @property
    def restarts_data(self) -> bool:
        """Whether the data begins again where a run resumes, so that steps after a checkpoint get
        other batches than they did."""
        data = get_split(self.data, "train")
        return isinstance(data, fg.DataSource) and data.resume == "restart"

    def list_resumable_steps(self) -> list[int]:
        """Return the steps of the checkpoints from which a run can be continued, oldest first."""
        checkpointer = _find_checkpointer(self.engine)
        if checkpointer is not None and checkpointer.weights_only:
            return []
        return [step for step, _ in self.list_checkpoints()]

    def find_start(self, step: int) -> int | None:
        """Return the step from which the run is trained again up to a step: that of the newest
        checkpoint that is not after it; None for the begin of the run, also where the data could
        not continue from a checkpoint.

        Raises:
            CheckpointError: it is the begin, and the run is a fork, which began with the state of
                another run; or checkpoints of another run are among those of this one.
        """
        origin = read_origin(self.directory.path)
        if self.restarts_data:
            if origin:
                raise CheckpointError(
                    f"{self.path} is a fork of {origin.get('run')}, and its data begins again "
                    "where a run resumes (DataSource(resume='restart')): its steps cannot be made "
                    "again. Train with Capture() to replay a step without the data"
                )
            return None
        steps = [saved for saved in self.list_resumable_steps() if saved <= step]
        if origin and not steps:
            others = "".join(f" --skip-batch {number}" for number in self.skipped_batches)
            raise CheckpointError(
                f"{self.path} is a fork of {origin.get('run')}, with whose state of step "
                f"{origin.get('step')} it began, and has no checkpoint up to step {step} from "
                "which its steps could be made again. Choose a later one, or fork that run again: "
                f"fulgurite fork {origin.get('run')} --step {origin.get('step')}{others}"
            )
        return max(steps, default=None)


def train_again(
    recorded: Recorded,
    start: int | None,
    observer: Observer,
    save_in: Path | None = None,
    on_nonfinite: str | None = None,
) -> int:
    """Train from a checkpoint of a run on, as the run did, and write nothing that stays; return the
    step at which that ended.

    Plugins that only write or show are left out; all others take part, so that every number is
    that of the run. Where the run was made longer or shorter, the steps before that are trained
    with the length that it had.

    Args:
        recorded: the run.
        start: the step of the checkpoint; None for the begin of the run.
        observer: looks at the fit, and may stop it.
        save_in: a new run directory, if the observer saves.
        on_nonfinite: as of `Engine`; None for what the run did.
    """
    resume = None
    if start is not None:
        resume = fg.CheckpointRef(recorded.checkpoint_root, start)
    *earlier, newest = _list_spans(recorded, start, observer.stop)
    with tempfile.TemporaryDirectory(prefix="fulgurite-replay-") as folder:
        for number, span in enumerate(earlier):
            assert span.stop is not None
            part = observer.make_part(span.stop)
            saved_in = Path(folder) / str(number)
            end = _train_span(recorded, span, resume, part, saved_in, on_nonfinite)
            if end < span.stop:
                return end
            resume = fg.CheckpointRef(saved_in, span.stop)
        return _train_span(recorded, newest, resume, observer, save_in, on_nonfinite)


def _list_spans(recorded: Recorded, start: int | None, stop: int | None) -> list[Span]:
    """Return the spans that hold steps of a run; at least one.

    Args:
        recorded: the run.
        start: the number of updates before the first step; None for the begin of the run.
        stop: that of the last one; None for the end of the run.
    """
    settings = recorded.engine.services.settings
    length = {"steps": settings.steps, "epochs": settings.epochs}
    spans = list_spans(recorded.directory, by_attempt=recorded.restarts_data)
    spans = spans or [Span(0, None, length)]
    later = [span for span in spans if span.stop is None or span.stop > (start or 0)]
    return [later[0], *(span for span in later[1:] if stop is None or span.start < stop)]


def _train_span(
    recorded: Recorded,
    span: Span,
    resume: fg.CheckpointRef | None,
    observer: Observer,
    save_in: Path | None,
    on_nonfinite: str | None,
) -> int:
    """Train steps of one planned length, and return the step at which that ended."""
    settings: dict[str, Any] = {**span.length}
    if on_nonfinite is not None:
        settings["on_nonfinite"] = on_nonfinite
    with _make_engine(recorded.engine, settings, observer, save_in) as engine:
        try:
            result = engine.fit(recorded.model, recorded.run_data, resume=resume)
        except StoppedError:
            assert observer.stop is not None
            return observer.stop
        except DataError as error:
            start = 0 if resume is None else resume.step
            error.add_note(
                f"the run is trained again from step {start} on, and needs the data from "
                "there. Where it cannot be read twice, train with Capture(): a replay of what that "
                "has written needs no data"
            )
            raise
        return int(result.state.step)


class _Reader(Checkpointer):
    """A checkpointer that reads and does not save."""

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        """Save nothing: the checkpoints of the run are there already."""


@contextmanager
def _make_engine(
    engine: fg.Engine,
    changed_settings: Mapping[str, Any],
    observer: Observer,
    save_in: Path | None,
) -> Iterator[fg.Engine]:
    """Yield an engine that trains as another one does, observed, with a temporary directory.

    Args:
        engine: the other one.
        changed_settings: those that are not as of the other one.
        observer: a plugin more.
        save_in: a directory that stays, in which the observer saves.
    """
    settings = engine.services.settings
    arguments = {field.name: getattr(settings, field.name) for field in fields(settings)}
    arguments |= changed_settings
    kind = _Reader if save_in is None else Checkpointer
    plugins = [_take_part(plugin, kind) for plugin in _list_needed_plugins(engine)]
    if _find_checkpointer(engine) is None:
        # Something must open the directory, and there may be checkpoints from before.
        plugins.append(kind(every=fg.At(NEVER), on_exception=False))
    digests = [index for index, plugin in enumerate(plugins) if isinstance(plugin, StateDigest)]
    plugins.insert(digests[0] if digests else len(plugins), Looker(observer.look_at))
    with tempfile.TemporaryDirectory(prefix="fulgurite-replay-") as folder:
        copy = object.__new__(type(engine))
        fg.Engine.__init__(
            copy,
            **arguments,
            plugins=[*plugins, observer],
            autoload=False,
            run_dir=str(save_in or folder),
        )
        # What a subclass keeps for its steps.
        for name, value in vars(engine).items():
            if name not in vars(copy):
                setattr(copy, name, value)
        copy.config = engine.config
        copy.program_file = engine.program_file
        yield copy


def _list_needed_plugins(engine: fg.Engine) -> list[RegisteredPlugin]:
    """Return the plugins of an engine without those that only write or show something."""
    decisive = {plugin["name"] for plugin in describe_plugins(engine.plugins) if plugin["decisive"]}
    needed = []
    for plugin in engine.plugins.plugins.values():
        names = engine.plugins.get_hook_names(plugin)
        kinds = {engine.plugins.hooks[name].metadata.kind for name in names}
        is_checkpointer = "restore_checkpoint" in names
        is_silent = "logger" not in kinds and plugin.activation != "autoload"
        if plugin.activation != "core" and (
            plugin.name in decisive or is_checkpointer or is_silent
        ):
            needed.append(plugin)
    return needed


def _take_part(plugin: RegisteredPlugin, kind: type[Checkpointer]) -> Any:
    """Return what takes part in the place of a plugin of the run: of a checkpointer one that has
    the same options, and saves nothing on the way.

    Args:
        plugin: the plugin.
        kind: what a checkpointer becomes.
    """
    checkpointer = plugin.plugin
    if not isinstance(checkpointer, Checkpointer):
        return checkpointer
    options = {field.name: getattr(checkpointer, field.name) for field in fields(Checkpointer)}
    options |= {"directory": None, "every": fg.At(NEVER), "on_exception": False}
    # A part of a run has no best checkpoint, and is continued from what it saves.
    options |= {"monitor": None, "mode": None, "better": None, "weights_only": False}
    return kind(**options)


def _find_checkpointer(engine: fg.Engine) -> Checkpointer | None:
    for plugin in engine.plugins.plugins.values():
        if isinstance(plugin.plugin, Checkpointer):
            return plugin.plugin
    return None


def find_last_step(recorded: Recorded) -> int:
    """Return the newest step of which a run has a checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    steps = [step for step, _ in recorded.list_checkpoints()]
    if not steps:
        raise CheckpointError(
            f"{recorded.checkpoint_root} holds no checkpoint: name the last step to execute"
        )
    return steps[-1]


def check_is_resumable(engine: fg.Engine) -> None:
    """Raise `ConfigurationError` if the program has no plugin that reads checkpoints."""
    if _find_checkpointer(engine) is None:
        raise ConfigurationError(
            "the program has no Checkpointer, and a run that begins in the middle of another one "
            "needs it: fg.Engine(plugins=[Checkpointer(every=...)])"
        )
