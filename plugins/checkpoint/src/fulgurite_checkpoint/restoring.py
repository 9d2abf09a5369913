"""Reading checkpoints: the one that is meant, whole and as it was written, or an error."""

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fulgurite as fg
import jax
from fulgurite.data.iterator import BatchIterator
from fulgurite.errors import CheckpointError, PathError
from fulgurite.fit.run import EngineView
from fulgurite.tree.paths import Path as TreePath
from fulgurite_runs.json_codec import dumps
from fulgurite_runs.manifest import describe_plugins

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.format import Commit, Damaged, Entry, Verify

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """A checkpoint whose small files were read: all that is known before any array is touched.

    Attributes:
        manifest: what the run was made of.
        index: what `index.json` holds.
        saved: shape and dtype of the arrays by path.
        without_state: the snapshot, but for its state.
    """

    path: Path
    commit: Commit
    manifest: dict[str, Any]
    index: dict[str, Any]
    saved: dict[str, arrays.Spec]
    without_state: Callable[[fg.TrainState], fg.Snapshot]

    @property
    def positions(self) -> dict[str, Any]:
        """Where this process's sinks were, by plugin name."""
        return self.commit.positions[min(jax.process_index(), len(self.commit.positions) - 1)]


def find_newest(root: Path, use: Callable[[Entry], T]) -> T | None:
    """What `use` makes of the newest checkpoint of the run at `root` that is not damaged; None if
    there is none at all.

    For each one that is damaged there is a warning, which names the one that is taken instead. If
    all are, that is an error.
    """
    found = format.list_entries(root)
    damaged: list[str] = []
    for entry in reversed(found):
        try:
            result = use(entry)
        except Damaged as error:
            damaged.append(f"the checkpoint of step {entry.step} is damaged: {error}")
            continue
        for one in damaged:
            warnings.warn(f"{one}. The one of step {entry.step} is used instead", stacklevel=2)
        return result
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {root} can be read: {'; '.join(damaged)}. Start afresh with "
            f"fit(resume='never')"
        )
    return None


def find_checkpoint(root: Path, step: int | str, best: tuple[str, str] | None) -> Entry:
    """The checkpoint of a step, or the best by a metric: that of the reader, else that of the
    run."""
    found = format.list_entries(root)
    complete = [entry for entry in found if entry.commit]
    if step == "best":
        metric, mode = (
            best
            or (complete[-1].commit.best if complete and complete[-1].commit else None)
            or (None, "max")
        )
        if metric is None:
            raise CheckpointError(
                f"the best checkpoint of {root} by which metric? Give "
                f"Checkpointer(monitor='test/loss')"
            )
        if (entry := format.find_best(complete, metric, mode)) is not None:
            return entry
        have = sorted(
            {
                f"{source}/{name}"
                for one in complete
                if one.commit
                for source in one.commit.metrics
                for name in one.commit.metrics[source]
            }
        )
        if metric in have:
            raise CheckpointError(
                f"the metric {metric!r} is NaN, or no number, in every checkpoint of {root}"
            )
        raise CheckpointError(
            f"no checkpoint of {root} has the metric {metric!r}, measured at its own step. There "
            f"is: "
            f"{', '.join(have) or 'none'}. Evaluate at the steps that are saved"
        )
    for entry in found:
        if entry.step == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in complete) or "none"
    raise CheckpointError(f"there is no checkpoint of step {step} in {root}. There is: {steps}")


def check_processes(kept: Read, feed: BatchIterator) -> None:
    """Raises `CheckpointError` if the place in the data is that of one process among another number
    of them."""
    then, now = len(kept.commit.hashes), jax.process_count()
    if then != now and not feed.is_shared:
        raise CheckpointError(
            f"{kept.path} was saved by {then} processes, each with its own place in the data, and "
            f"this run has {now}: "
            f"start {then} of them, or use fg.ArrayData, whose place does not depend on their "
            f"number"
        )


def read_checkpoint(entry: Entry, verify: Verify) -> Read:
    """The small files of a checkpoint, verified."""
    if entry.commit is None:
        raise Damaged(entry.damage or f"{entry.path} has no COMMIT")
    path, commit = entry.path, entry.commit
    try:
        format.verify(path, commit, "size" if verify == "none" else verify, format.SMALL)
        own = f"host-{min(jax.process_index(), len(commit.hashes) - 1)}.json"
        manifest, index, host = (
            format.read_json(path / name) for name in ("manifest.json", "index.json", own)
        )
        for one in manifest["plugins"]:
            _texts(one["name"], one["distribution"], one["version"])
        _texts(*manifest["model"], *index["arrays"], *index["pending"])
        without_state = partial(
            fg.Snapshot,
            step_range=fg.StepRange.from_json(index["span"]),
            data_position=host["position"],
            pending_actions=tuple(index["pending"]),
            host_states=dict(host["host"]),
            metrics=dict(index["metrics"]),
            requested_length=(manifest["settings"]["steps"], manifest["settings"]["epochs"]),
        )
        saved = {
            name: (tuple(map(int, shape)), str(dtype))
            for name, (shape, dtype) in index["arrays"].items()
        }
        return Read(path, commit, manifest, index, saved, without_state)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, PathError) as error:
        raise Damaged(
            f"{path} holds what no checkpoint of ours does: {type(error).__name__}: {error}"
        ) from error


def restore_whole(
    kept: Read, like: fg.TrainState, engine: EngineView, verify: Verify, missing: str
) -> fg.Snapshot:
    """The snapshot in a checkpoint, for an engine whose states are like `like`."""
    slices = check_plugins(kept, describe_plugins(engine.plugins), missing)
    wanted = {
        name: leaf
        for name, leaf in arrays.flatten_state(like).items()
        if not name.startswith(tuple(slices.added))
    }
    saved = {
        name: spec for name, spec in kept.saved.items() if not name.startswith(tuple(slices.gone))
    }
    arrays.compare(wanted, saved, kept.path)
    return kept.without_state(arrays.unflatten_state(like, _load_checked(kept, wanted, verify)))


def restore_part(
    kept: Read, like: fg.TrainState, reference: fg.CheckpointRef, verify: Verify
) -> fg.Snapshot:
    """`like` with the arrays that the reference's map names."""
    wanted, saved = arrays.flatten_state(like), kept.saved
    taken = arrays.apply_mapping(wanted, saved, reference.map or {}, reference.strict, kept.path)
    arrays.compare(
        {new: wanted[new] for new in taken},
        {new: saved[old] for new, old in taken.items()},
        kept.path,
    )
    loaded = _load_checked(kept, {old: wanted[new] for new, old in taken.items()}, verify)
    return kept.without_state(
        arrays.unflatten_state(like, {new: loaded[old] for new, old in taken.items()})
    )


@dataclass(frozen=True)
class PluginStateChanges:
    """The paths below which there are arrays of plugins that are there on one side alone."""

    added: list[str]
    gone: list[str]


def check_plugins(kept: Read, active: list[dict[str, Any]], missing: str) -> PluginStateChanges:
    """Compares the plugins of a checkpoint with those that are `active`, as in a manifest.

    One that owns state or takes part in the step must be on both sides; otherwise that is an error
    or, if `missing` says so, a warning or nothing.
    """
    then = {one["name"]: one for one in kept.manifest["plugins"] if one["decisive"]}
    now = {one["name"]: one for one in active if one["decisive"]}
    there = {one["name"] for one in active}
    gone, added = (
        [one for one in then if one not in there],
        [one for one in now if one not in {p["name"] for p in kept.manifest["plugins"]}],
    )
    told = [
        f"plugin {name!r} ({then[name]['distribution']} {then[name]['version']}) was active when "
        f"it was saved and is "
        f"not now: {_source(then[name])}add it to the plugins"
        for name in gone
    ] + [
        f"plugin {name!r} ({now[name]['distribution']} {now[name]['version']}) is active now and "
        f"was not when it was "
        f"saved: leave it out with '-{name}'"
        for name in added
    ]
    if told and missing == "error":
        raise CheckpointError(
            f"{kept.path} was saved with other plugins:\n  " + "\n  ".join(told) + "\n"
            "To resume anyway, without exactness: Checkpointer(on_missing_plugin='warn')"
        )
    if told and missing == "warn":
        warnings.warn(f"{kept.path} was saved with other plugins: {'; '.join(told)}", stacklevel=2)
    return PluginStateChanges(list(map(_slice, added)), list(map(_slice, gone)))


def _source(plugin: dict[str, Any]) -> str:
    """What to do first to have a plugin of a manifest; one of a program's own is in no
    distribution."""
    return (
        "" if plugin["distribution"] == "module" else f"pip install {plugin['distribution']}, and "
    )


def describe_differences(kept: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """What makes a resumed run differ from an uninterrupted one, as far as the manifests tell."""
    rows = []
    for part in ("configuration", "settings", "versions", "devices"):
        rows += _changes(kept.get(part) or {}, manifest[part] or {})
    before = {one["name"]: one for one in kept["plugins"]}
    for one in manifest["plugins"]:
        if one["decisive"] and (then := before.get(one["name"])):
            rows += [f"{one['name']}: {row}" for row in _changes(then["settings"], one["settings"])]
    lines = difflib.unified_diff(kept.get("model", []), manifest["model"], lineterm="", n=0)
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return rows + (
        [f"the model: {' '.join(' '.join(line.split()) for line in changed[:8])}"]
        if changed
        else []
    )


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is told as another value; how long a run is to be may change."""
    return [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*then, *now} - {"steps", "epochs"})
        if dumps(then.get(name)) != dumps(now.get(name))
    ]


def _load_checked(kept: Read, wanted: dict[str, Any], verify: Verify) -> dict[str, jax.Array]:
    try:
        if verify != "none":
            format.verify(kept.path, kept.commit, verify)
        return arrays.load(kept.path / "arrays", wanted)
    except OSError as error:
        raise Damaged(f"{kept.path} cannot be read: {error}") from error


def _texts(*values: Any) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a name that is no text")


def _slice(name: str) -> str:
    return str(TreePath(("plugin_states", name)))
