"""Reading checkpoints: the requested one, whole and as it was written, or an error."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite.plugins import BatchIterator, EngineView, RegisteredPlugin, TreePath, find_wholes
from fulgurite_runs import describe_plugins

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.contents import Contents, parse_contents
from fulgurite_checkpoint.files import DamagedError, read_json
from fulgurite_checkpoint.format import Commit, Entry, Monitor, Verify
from fulgurite_checkpoint.matching import Matches, match, pick

T = TypeVar("T")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose small files were read: all that is known before any array is read.

    Attributes:
        path: its directory.
        commit: what `COMMIT` holds.
        manifest: what the run was made of.
        index: what `index.json` holds.
        contents: what its small files say.
    """

    path: Path
    commit: Commit
    manifest: dict[str, Any]
    index: dict[str, Any]
    contents: Contents

    @property
    def specs(self) -> dict[str, arrays.Spec]:
        """Shape and dtype of the arrays, by path."""
        return self.contents.specs

    def find_module_view(self, monitor: Monitor | None) -> str:
        """Return the module view by whose weights this is the best checkpoint.

        Args:
            monitor: the metric and mode by which the best was chosen; None for those of the run.
        """
        monitor = _resolve_monitor(monitor, self.commit)
        source = "" if monitor is None else monitor[0].partition("/")[0]
        return self.contents.module_views.get(source, "current")

    @property
    def logger_positions(self) -> dict[str, Any]:
        """Where the loggers of this process were, by plugin name."""
        positions = self.commit.logger_positions
        return positions[min(jax.process_index(), len(positions) - 1)]


def find_newest(root: Path, read: Callable[[Entry], T]) -> T | None:
    """Return what `read` makes of the newest checkpoint that is not damaged; None if there is none
    at all.

    For each one that is damaged there is a warning, which names the one that is used instead.

    Args:
        root: of the run.
        read: raises `DamagedError` for a damaged checkpoint.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    reasons: list[str] = []
    for entry in reversed(format.list_entries(root)):
        try:
            result = read(entry)
        except DamagedError as error:
            reasons.append(f"the checkpoint of step {entry.step} is damaged: {error}")
            continue
        for reason in reasons:
            warnings.warn(f"{reason}. The one of step {entry.step} is used instead", stacklevel=2)
        return result
    if reasons:
        raise CheckpointError(
            f"no checkpoint of {root} can be read: {'; '.join(reasons)}. Start afresh with "
            f"fit(resume='never')"
        )
    return None


def find_checkpoint(root: Path, step: int | str, monitor: Monitor | None) -> Entry:
    """Return the checkpoint of a step, or the best one.

    Args:
        root: of the run.
        step: a step, or "best".
        monitor: the metric and mode by which the best is chosen; None for those of the run.

    Raises:
        CheckpointError: there is none, or nobody knows which is the best.
    """
    entries = format.list_entries(root)
    complete = [entry for entry in entries if entry.commit]
    if step == "best":
        damaged = [entry for entry in entries if entry.commit is None]
        if damaged:
            raise CheckpointError(
                f"the best checkpoint of {root} is not known, because that of step "
                f"{damaged[0].step} is damaged: {damaged[0].damage}. Remove it, or give a step"
            )
        return _find_best(root, complete, monitor)
    for entry in entries:
        if entry.step == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in complete) or "none"
    raise CheckpointError(f"there is no checkpoint of step {step} in {root}. There is: {steps}")


def _resolve_monitor(monitor: Monitor | None, commit: Commit) -> Monitor | None:
    """Return by what the best of a run is chosen: as its newest commit says, unless a program names
    a metric and a mode. What a comparison chose is recorded, or the run had none."""
    if monitor is None or monitor[1] is None:
        return commit.monitor or monitor
    return monitor


def _find_best(root: Path, entries: list[Entry], monitor: Monitor | None) -> Entry:
    commits = [entry.commit for entry in entries if entry.commit]
    if commits:
        monitor = _resolve_monitor(monitor, commits[-1])
    if monitor is None:
        raise CheckpointError(
            f"the best checkpoint of {root} by which metric? Its run had no monitor: give a step "
            "or 'latest', or, to an engine that reads it, Checkpointer(monitor='test/loss')"
        )
    metric, mode = monitor
    best = format.find_best(entries, metric, mode)
    if best is not None:
        return best
    if mode is None and commits and commits[-1].better is None:
        raise CheckpointError(
            f"no comparison has chosen among the checkpoints of {root}: give mode= instead of "
            "better=, or a step"
        )
    if mode is None and commits and commits[-1].best is not None:
        raise CheckpointError(
            f"the best checkpoint of {root} is that of step {commits[-1].best}, which is gone: put "
            "it back, or give a step"
        )
    measured_names = {
        f"{source}/{name}"
        for commit in commits
        for source, values in commit.metrics.items()
        for name in values
    }
    if metric in measured_names:
        raise CheckpointError(
            f"the metric {metric!r} is not a finite number in any checkpoint of {root}: choose "
            f"another monitor or a step"
        )
    raise CheckpointError(
        f"no checkpoint of {root} has the metric {metric!r}, measured at its own step. There is: "
        f"{', '.join(sorted(measured_names)) or 'none'}. Evaluate at the steps that are saved"
    )


def check_num_processes(checkpoint: SavedCheckpoint, data_iterator: BatchIterator) -> None:
    """Raise `CheckpointError` if each process has a position in the data, and there were another
    number of them.

    Args:
        checkpoint: that the run resumes from.
        data_iterator: where its batches come from.
    """
    num_saved = len(checkpoint.commit.hashes)
    if num_saved != jax.process_count() and not data_iterator.is_shared:
        raise CheckpointError(
            f"{checkpoint.path} was saved by {num_saved} processes, each with its own position in "
            f"the data, and this run has {jax.process_count()}: start {num_saved} of them, or use "
            f"fg.ArrayData, whose position does not depend on their number"
        )


def read_checkpoint(entry: Entry, verify: Verify) -> SavedCheckpoint:
    """Return a checkpoint whose small files were read and verified.

    Args:
        entry: the checkpoint.
        verify: how files are compared with their hashes; `size` for these where it is `none`.

    Raises:
        DamagedError: it has changed since it was written.
    """
    path = entry.path
    commit = entry.commit
    if commit is None:
        raise DamagedError(entry.damage or f"{path} has no COMMIT")
    process = min(jax.process_index(), len(commit.hashes) - 1)
    try:
        format.verify_files(
            path, commit, "size" if verify == "none" else verify, format.SMALL_FILES
        )
        files = {
            name: read_json(path / name)
            for name in ("manifest.json", "index.json", f"host-{process}.json", "history.json")
        }
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    contents = parse_contents(path, commit.step, process, files)
    return SavedCheckpoint(path, commit, files["manifest.json"], files["index.json"], contents)


def restore_whole(
    checkpoint: SavedCheckpoint,
    template: fg.TrainState,
    engine: EngineView,
    announce: Callable[[fg.Snapshot], None],
    verify: Verify,
    on_missing_plugin: str,
) -> fg.Snapshot:
    """Return the snapshot in a checkpoint.

    Args:
        checkpoint: the checkpoint.
        template: shapes of the state that the engine needs.
        engine: the engine that resumes.
        announce: as of the hook `restore_checkpoint`.
        verify: how files are compared with their hashes.
        on_missing_plugin: `error`, `warn` or `ignore`; see `check_plugins`.
    """
    if checkpoint.index.get("weights_only", False):
        raise CheckpointError(
            f"{checkpoint.path} holds weights alone, without the state of the optimizer: training "
            f"cannot resume from it. Begin a run from the weights with "
            f"fit(init_from={str(checkpoint.path.parent.parent)!r}, resume='never')"
        )
    if checkpoint.index.get("state_only", False):
        raise CheckpointError(
            f"{checkpoint.path} holds the state of a loop of one's own, without the position in "
            "the data: continue with fit(state=restore_state(path, like=state)), or give "
            f"fit(init_from={str(checkpoint.path.parent.parent)!r}, resume='never') for the weights"
        )
    active = describe_plugins(engine.plugins)
    changes = check_plugins(checkpoint, active, on_missing_plugin)
    needed = {
        name: leaf
        for name, leaf in arrays.flatten_state(template).items()
        if not name.startswith(tuple(changes.added))
    }
    saved = {
        name: spec
        for name, spec in checkpoint.specs.items()
        if not name.startswith(tuple(changes.removed))
    }
    arrays.check_same_specs(needed, saved, checkpoint.path)
    make_snapshot = checkpoint.contents.make_snapshot
    announce(make_snapshot(template.replace(step=np.int32(checkpoint.commit.step))))
    loaded = load_verified(checkpoint, needed, verify)
    state_step = int(loaded["step"])
    if state_step != checkpoint.commit.step:
        raise DamagedError(
            f"{checkpoint.path} is of step {checkpoint.commit.step}, and its array `step` is "
            f"{state_step}"
        )
    return make_snapshot(arrays.unflatten_state(template, loaded))


def check_logger_positions(checkpoint: SavedCheckpoint, engine: EngineView) -> None:
    """Raise `DamagedError` if a logger of the run cannot go back to where it was.

    Args:
        checkpoint: of the same run.
        engine: the engine that resumes.
    """
    positions = checkpoint.logger_positions
    step = checkpoint.commit.step

    def get_position(logger: RegisteredPlugin) -> dict[str, Any] | None:
        return {"position": positions[logger.name]} if logger.name in positions else None

    @contextmanager
    def convert_error(logger: RegisteredPlugin) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise DamagedError(
                f"{checkpoint.path / 'COMMIT'}, or what it tells of, has changed: "
                f"logger_positions.{logger.name}: {error}"
            ) from error

    engine.plugins.hooks.check_logger_position.each(
        step, per_plugin=get_position, guard=convert_error, step=step, engine=engine
    )


def restore_part(
    checkpoint: SavedCheckpoint,
    template: fg.TrainState,
    reference: fg.CheckpointRef,
    verify: Verify,
) -> fg.Snapshot:
    """Return a snapshot whose state is a template with the arrays that a map names.

    Args:
        checkpoint: the checkpoint.
        template: shapes of a state.
        reference: has the map.
        verify: how files are compared with their hashes.
    """
    needed = arrays.flatten_state(template)
    saved = checkpoint.specs
    pairs = arrays.apply_mapping(
        needed, saved, reference.map or {}, reference.strict, checkpoint.path
    )
    matches = match(needed, saved, pairs, find_wholes(template))
    if reference.strict:
        _check_matches(matches, reference, checkpoint.path)
    wants_module = any(target and target.startswith("module") for target, _ in pairs)
    if wants_module and not any(name.startswith("module") for name in matches.names):
        raise CheckpointError(
            f"nothing of {checkpoint.path} fits the model:\n{arrays.join_rows(matches.rest)}\n"
            "Give the model that was saved, or name other paths in CheckpointRef(map=...)"
        )
    loaded = load_verified(checkpoint, matches.specs, verify)
    parts = pick(matches, needed, loaded, checkpoint.path)
    if matches.rest or (matches.cast and reference.dtype is None):
        warnings.warn(
            f"{checkpoint.path} fits the model in part: {matches.describe()}", stacklevel=2
        )
    return checkpoint.contents.make_snapshot(arrays.unflatten_state(template, parts))


def _check_matches(matches: Matches, reference: fg.CheckpointRef, path: Path) -> None:
    """Raise `CheckpointError` if a pair of arrays differs in shape, or in its dtype where the
    reference does not ask for that of the model.

    Args:
        matches: the pairs.
        reference: to the checkpoint.
        path: of the checkpoint.
    """
    rows = matches.rest if reference.dtype == "match" else matches.differences
    if not rows:
        return
    hint = (
        "fg.CheckpointRef(path, strict=False) takes what fits"
        if matches.rest
        else "fg.CheckpointRef(path, dtype='match') casts them"
    )
    raise CheckpointError(
        f"{path} does not fit the model:\n{arrays.join_rows(rows)}\nGive the model and plugins "
        f"that it was saved with; {hint}"
    )


@dataclass(frozen=True)
class PluginStateChanges:
    """Which plugin states exist on one side alone.

    Attributes:
        added: paths of those that only the new state has.
        removed: paths of those that only the checkpoint has.
    """

    added: list[str]
    removed: list[str]


def check_plugins(
    checkpoint: SavedCheckpoint, active: list[dict[str, Any]], on_missing_plugin: str
) -> PluginStateChanges:
    """Compare the plugins of a checkpoint with those that are active.

    One that owns state or takes part in the step must be on both sides.

    Args:
        checkpoint: the checkpoint.
        active: the active plugins, as in a manifest.
        on_missing_plugin: what to do otherwise: `error`, `warn` or `ignore`.

    Raises:
        CheckpointError: they differ, and that is to be an error.
    """
    saved = checkpoint.manifest["plugins"]
    active_names = {plugin["name"] for plugin in active}
    saved_names = {plugin["name"] for plugin in saved}
    removed = [
        plugin for plugin in saved if plugin["decisive"] and plugin["name"] not in active_names
    ]
    added = [
        plugin for plugin in active if plugin["decisive"] and plugin["name"] not in saved_names
    ]
    rows = [
        f"{_format_plugin(plugin)} was active when it was saved and is not now: "
        f"{_format_install(plugin)}add it to the plugins"
        for plugin in removed
    ]
    rows += [
        f"{_format_plugin(plugin)} is active now and was not when it was saved: leave it out"
        # What follows a colon tells instances apart, which have been given one by one.
        + (f" with '-{plugin['name']}'" if ":" not in plugin["name"] else "")
        for plugin in added
    ]
    if rows and on_missing_plugin == "error":
        raise CheckpointError(
            f"{checkpoint.path} was saved with other plugins:\n  " + "\n  ".join(rows) + "\n"
            "To resume anyway, without exactness: Checkpointer(on_missing_plugin='warn')"
        )
    if rows and on_missing_plugin == "warn":
        warnings.warn(
            f"{checkpoint.path} was saved with other plugins: {'; '.join(rows)}", stacklevel=2
        )
    return PluginStateChanges(
        [_get_state_path(plugin) for plugin in added],
        [_get_state_path(plugin) for plugin in removed],
    )


def _format_plugin(plugin: dict[str, Any]) -> str:
    return f"plugin {plugin['name']!r} ({plugin['distribution']} {plugin['version']})"


def _format_install(plugin: dict[str, Any]) -> str:
    # A plugin of the program itself is in no distribution.
    if plugin["distribution"] == "module":
        return ""
    return f"pip install {plugin['distribution']}, and "


def load_verified(
    checkpoint: SavedCheckpoint, specs: dict[str, Any], verify: Verify
) -> dict[str, jax.Array]:
    """Return arrays of a checkpoint, whose files are compared with their hashes first.

    Args:
        checkpoint: the checkpoint.
        specs: what to read, as of `arrays.load`.
        verify: how the files are compared.
    """
    try:
        if verify != "none":
            format.verify_files(checkpoint.path, checkpoint.commit, verify)
        if verify == "full":
            arrays.check_stored_dtypes(checkpoint.path / "arrays", specs)
        return arrays.load(checkpoint.path / "arrays", specs)
    except OSError as error:
        raise DamagedError(f"{checkpoint.path} cannot be read: {error}") from error


def _get_state_path(plugin: dict[str, Any]) -> str:
    return str(TreePath(("plugin_states", plugin["name"])))
