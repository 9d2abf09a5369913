"""Arrays by path, and every call of Orbax, whose names still change."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite.plugins import TreePath as TreePath, leaves_with_paths, parse_path, path_from_keys

from fulgurite_checkpoint.files import DamagedError
from fulgurite_checkpoint.orbax_errors import mute_failed_transfers

Spec = tuple[tuple[int, ...], str]
"""Shape and dtype, as the index holds them."""
Pair = tuple[str | None, str | None]
"""The path of an array of a state, and that in a checkpoint which fills it; None for none."""
_MAX_ROWS = 20
_MAX_NAMES = 4


_TRAINING_FIELDS = ("opt_state", "metric_window", "nonfinite")


def flatten_state(state: fg.TrainState) -> dict[str, Any]:
    """Return the arrays of a state, or their shapes, by path.

    An array of an `eqx.nn.State` has no name of its own, only an index among the others: it is
    named after the layer that owns it, so that another stateful layer does not rename it.
    """
    owners = _list_state_owners(state)
    arrays = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            arrays[_get_name(path_from_keys(keys), owners)] = leaf
    return arrays


def drop_training_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a state, by path, without those that only training needs: of the
    optimizer, of the metric window, and of the check for finite numbers."""
    return {name: array for name, array in arrays.items() if not name.startswith(_TRAINING_FIELDS)}


def drop_unselected(
    arrays: Mapping[str, Any], state: fg.TrainState, selector: fg.Selector
) -> dict[str, Any]:
    """Return the arrays of a state, by path, without those of the module that are not selected.

    Args:
        arrays: by path, as `flatten_state` names them.
        state: the state.
        selector: of arrays of its module.
    """
    flags = state.replace(module=selector(state.module))
    unselected = {path for path, flag in leaves_with_paths(flags) if flag is False}
    return {name: array for name, array in arrays.items() if name not in unselected}


def unflatten_state(template: fg.TrainState, arrays: Mapping[str, Any]) -> fg.TrainState:
    """Return a state with other arrays.

    Args:
        template: the state; what `arrays` lacks stays as in it.
        arrays: arrays by path, as `flatten_state` names them.
    """
    owners = _list_state_owners(template)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: arrays.get(_get_name(path_from_keys(keys), owners), leaf), template
    )


def get_spec(array: Any) -> Spec:
    """Return shape and dtype of an array, as the index holds them."""
    return tuple(array.shape), str(array.dtype)


def start_saving(path: Path, arrays: Mapping[str, jax.Array]) -> Any:
    """Begin to write arrays, which may be overwritten and donated as soon as this returns.

    Args:
        path: a directory, which is created.
        arrays: the arrays by name.

    Returns:
        A handle whose `result()` waits for the end and raises what went wrong.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Where Orbax cannot create its folders in the background, its other threads wait for them for
    # twenty minutes.
    context.asynchronous.create_directories_asynchronously = False
    # Orbax takes no array without elements; its shape is in the index.
    nonempty = {name: array for name, array in arrays.items() if array.size}
    mute_failed_transfers()
    with context:
        return ocp.save_async(_as_epath(path), nonempty)


def check_writable(path: Path) -> None:
    """Raise `CheckpointError` for a local folder below which Orbax loses what it writes.

    It takes the path for a pattern and merges what that matches, and TensorStore takes neither
    backslashes nor names that are not UTF-8.
    """
    if not isinstance(path, Path):
        return
    characters = set(str(path.absolute()))
    unusable = sorted(
        char for char in characters if char in "*?[\\" or "\ud800" <= char <= "\udfff"
    )
    if unusable:
        raise CheckpointError(
            f"{path} has {', '.join(map(ascii, unusable))} in its name, with which Orbax cannot "
            f"write: rename the folder, or choose another one for checkpoints"
        )


def load(path: Path, specs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read arrays.

    Args:
        path: the directory that Orbax wrote.
        specs: shape, dtype and sharding of the arrays to read, by their name in the checkpoint.
            Without a sharding an array goes to the default device.

    Raises:
        DamagedError: an array cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    default_sharding = jnp.zeros(()).sharding
    arrays: dict[str, jax.Array] = {}
    nonempty = {}
    for name, spec in specs.items():
        sharding = getattr(spec, "sharding", None) or default_sharding
        if spec.size:
            nonempty[name] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
        else:
            arrays[name] = jax.device_put(np.zeros(spec.shape, spec.dtype), sharding)
    if not nonempty:
        return arrays
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    mute_failed_transfers()
    try:
        with context:
            loaded: Any = ocp.load(_as_epath(path), nonempty)
    except Exception as error:
        raise DamagedError(f"{path} cannot be read: {error.__cause__ or error}") from error
    for name, spec in nonempty.items():
        # With damaged metadata of arrays, Orbax takes a key for the integers that it consists of.
        if get_spec(loaded[name]) != get_spec(spec):
            raise DamagedError(
                f"{path}: {name} is read as {_format_spec(get_spec(loaded[name]))}, not as "
                f"{_format_spec(get_spec(spec))}"
            )
    return arrays | loaded


def check_stored_dtypes(path: Path, specs: Mapping[str, Any]) -> None:
    """Raise `DamagedError` if an array has another dtype where it is stored than its index says:
    Orbax would cast it without a word.

    Args:
        path: the directory that Orbax wrote.
        specs: shape and dtype of the arrays, by their name in the checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    if not any(spec.size for spec in specs.values()):
        return
    try:
        stored: Any = ocp.metadata(_as_epath(path)).metadata
    except Exception as error:
        raise DamagedError(f"{path} cannot be read: {error.__cause__ or error}") from error
    if not isinstance(stored, Mapping):
        # Orbax has read none, and says so only by a warning in its log.
        raise DamagedError(f"{path} cannot be read: its metadata does not say which arrays it has")
    for name, spec in specs.items():
        dtype = getattr(stored.get(name), "dtype", None)
        is_key = jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
        if spec.size and not is_key and dtype != spec.dtype:
            raise DamagedError(f"{path}: {name} is stored as {dtype}, not as {spec.dtype}")


def check_same_specs(needed: Mapping[str, Any], saved: Mapping[str, Spec], source: Path) -> None:
    """Raise a `CheckpointError` that lists every path at which a checkpoint has another shape or
    dtype than is needed.

    Args:
        needed: arrays or shapes by path.
        saved: what the checkpoint has, by path.
        source: the checkpoint.
    """
    rows = [
        format_difference(name, saved.get(name), needed.get(name))
        for name in sorted({*needed, *saved})
        if name not in needed or get_spec(needed[name]) != saved.get(name)
    ]
    if rows:
        raise CheckpointError(
            f"{source} does not fit the model, optimizer and plugins:\n{join_rows(rows)}\n"
            "Make them as they were, or begin in another run directory with what fits, by "
            "fit(init_from=fg.CheckpointRef(path, strict=False))"
        )


def format_difference(name: str, saved: Spec | None, needed: Any) -> str:
    """Return a row that says how an array was saved, and how it is needed.

    Args:
        name: its path.
        saved: as the checkpoint has it; None if it has not.
        needed: an array or shape; None if there is none.
    """
    needed_spec = None if needed is None else get_spec(needed)
    return f"  {name}: saved {_format_spec(saved)}, wanted {_format_spec(needed_spec)}"


def join_rows(rows: list[str]) -> str:
    """Return the first rows, one a line, and how many more there are."""
    listed = "\n".join(rows[:_MAX_ROWS])
    return listed if len(rows) <= _MAX_ROWS else f"{listed}\n  and {len(rows) - _MAX_ROWS} more"


def apply_mapping(
    needed: Mapping[str, Any],
    saved: Mapping[str, Spec],
    mapping: Mapping[str, str],
    strict: bool,
    source: Path,
) -> list[Pair]:
    """Return the paths of the arrays of a state that a map names, each with its counterpart in the
    checkpoint.

    Args:
        needed: the arrays of the state by path.
        saved: those of the checkpoint by path.
        mapping: paths in the state, each with a path in the checkpoint.
        strict: whether every array below the paths must have its counterpart.
        source: the checkpoint.

    Raises:
        CheckpointError: there is nothing below a path, or nothing in common below a pair of them;
            or, if `strict`, an array has no counterpart on the other side.
    """
    pairs: list[Pair] = []
    mapping = {**mapping, **_map_model_state(needed, saved, mapping, strict, source)}
    for target_path, source_path in mapping.items():
        targets = _find_below(target_path, needed)
        sources = _find_below(source_path, saved)
        # A part of the state, such as the model state, may hold no array on both sides, or, of
        # another model, on one.
        is_field = target_path == source_path and target_path in fg.TrainState.__dataclass_fields__
        may_be_empty = is_field and (not strict or targets.keys() == sources.keys())
        if not targets and not may_be_empty:
            raise CheckpointError(_format_nothing_below(target_path, "the new state", needed))
        if not sources and not may_be_empty:
            raise CheckpointError(_format_nothing_below(source_path, str(source), saved))
        unpaired = sorted(targets.keys() ^ sources.keys(), key=str)
        if strict and unpaired:
            rows = [
                f"  {targets[path]} is only in the new state"
                if path in targets
                else f"  {sources[path]} is only in {source}"
                for path in unpaired[:_MAX_ROWS]
            ]
            raise CheckpointError(
                f"init_from: {target_path!r} and {source_path!r} differ; strict=False takes what "
                "both have:\n" + "\n".join(rows)
            )
        is_nothing_in_common = unpaired and not targets.keys() & sources.keys()
        if is_nothing_in_common and targets and sources:
            raise CheckpointError(
                f"init_from: {target_path!r} of the new state and {source_path!r} of {source} have "
                f"no array in common. Only in the new state: {_format_few(targets.values())}; only "
                f"in the checkpoint: {_format_few(sources.values())}. Use the plugins that the "
                "saved model was made with, such as adapters of the same names at the same layers, "
                "or name other paths in CheckpointRef(map=...)"
            )
        paths = sorted({*targets, *sources}, key=str)
        pairs += [(targets.get(path), sources.get(path)) for path in paths]
    return pairs


def _map_model_state(
    needed: Mapping[str, Any],
    saved: Mapping[str, Spec],
    mapping: Mapping[str, str],
    strict: bool,
    source: Path,
) -> dict[str, str]:
    """Return the paths of the model state of those modules that a map names, such as the statistics
    of their BatchNorm layers, each with its path in the checkpoint; the arguments are those of
    `apply_mapping`.

    Weights without the statistics that belong to them make a model that is wrong and does not say
    so.
    """
    if any(path.startswith("model_state") for path in mapping):
        return {}
    added = {}
    for target_path, source_path in mapping.items():
        if not target_path.startswith("module") or not source_path.startswith("module"):
            continue
        target_state = target_path.replace("module", "model_state", 1)
        source_state = source_path.replace("module", "model_state", 1)
        if not _find_below(target_state, needed):
            continue
        if _find_below(source_state, saved):
            added[target_state] = source_state
            continue
        text = (
            f"init_from: {target_path!r} of the new state has model state, such as batch "
            f"statistics, and {source_path!r} of {source} has none"
        )
        if strict:
            raise CheckpointError(f"{text}; strict=False leaves it as it is initialized")
        warnings.warn(f"{text}: it stays as it is initialized", stacklevel=2)
    return added


def _format_nothing_below(path: str, side: str, names: Mapping[str, Any]) -> str:
    tops = sorted({str(TreePath(parse_path(name)[:2])) for name in names})
    return (
        f"init_from: there is no array below {path!r} in {side}. There is: {', '.join(tops[:12])}"
    )


def _format_few(names: Iterable[str]) -> str:
    """Return the first names of arrays, and that there are more."""
    ordered = sorted(names)
    return ", ".join(ordered[:_MAX_NAMES]) + (", ..." if len(ordered) > _MAX_NAMES else "")


def _find_below(prefix: str, names: Mapping[str, Any]) -> dict[Any, str]:
    """Return the names below a path, each by the rest of its path."""
    start = parse_path(prefix)
    paths = {name: parse_path(name) for name in names}
    return {path[len(start) :]: name for name, path in paths.items() if path[: len(start)] == start}


def _list_state_owners(state: fg.TrainState) -> list[str]:
    """Return the paths of the layers' indices, in the order in which their values are in the model
    state."""
    if state.model_state is None:
        return []
    leaves = jax.tree_util.tree_leaves_with_path(state.module, is_leaf=_is_state_index)
    paths = {
        leaf.marker: str(path_from_keys(keys)) for keys, leaf in leaves if _is_state_index(leaf)
    }
    _, markers = state.model_state.tree_flatten()
    return [paths.get(marker, f"[{index}]") for index, marker in enumerate(markers)]


def _get_name(path: Any, owners: list[str]) -> str:
    if len(path) <= 1 or path[0] != "model_state" or not owners:
        return str(path)
    return _join("model_state", owners[path[1]], str(TreePath(path[2:])))


def _join(*parts: str) -> str:
    text = ""
    for part in parts:
        separator = "." if text and part and not part.startswith("[") else ""
        text += separator + part
    return text


def _is_state_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _as_epath(path: Path) -> Any:
    from etils import epath

    return epath.Path(path.absolute() if isinstance(path, Path) else path)


def _format_spec(spec: Spec | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{list(spec[0])}"
