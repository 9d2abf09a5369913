"""Arrays by path, and every call of Orbax, whose names still move."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite.tree.paths import Path as TreePath, from_keys, parse

from fulgurite_checkpoint.format import Damaged

Spec = tuple[tuple[int, ...], str]


def flatten_state(state: "fg.TrainState") -> dict[str, Any]:
    """The arrays of a state, or what stands for them, by path.

    An array of an `eqx.nn.State` has no name of its own, only a place among the others: it is
    called after the layer that owns it, so that another stateful layer does not rename it.
    """
    owners = _owners(state)
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            found[_name(from_keys(keys), owners)] = leaf
    return found


def unflatten_state(state: "fg.TrainState", arrays: Mapping[str, Any]) -> "fg.TrainState":
    """The state with these arrays in their places."""
    owners = _owners(state)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: arrays.get(_name(from_keys(keys), owners), leaf), state
    )


def get_spec(array: Any) -> Spec:
    """Shape and dtype, as they are kept in the index."""
    return tuple(array.shape), str(array.dtype)


def save(path: Path, arrays: Mapping[str, jax.Array]) -> Any:
    """Begins to write arrays to the new directory `path`; they may be overwritten and donated as
    soon as this returns. The answer's `result()` waits for the end and raises what went wrong."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Where Orbax cannot make its folders, its threads would otherwise wait for them for twenty
    # minutes.
    context.asynchronous.create_directories_asynchronously = False
    # Orbax takes no array without elements; its shape is in the index.
    some = {name: array for name, array in arrays.items() if array.size}
    with context:
        return ocp.save_async(_open_arrays(path), some)


def check_writable(path: Path) -> None:
    """Raises a `CheckpointError` for a local folder below which Orbax loses what it writes: it
    takes the path for a pattern and merges what that matches, and TensorStore takes neither
    backslashes nor names that are no UTF-8."""
    text = str(path.absolute()) if isinstance(path, Path) else ""
    if odd := sorted({char for char in text if char in "*?[\\" or "\ud800" <= char <= "\udfff"}):
        told = f"{path} has {', '.join(map(ascii, odd))} in its name, with which Orbax cannot write"
        raise CheckpointError(f"{told}: rename the folder, or choose another place for checkpoints")


def load(path: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the arrays that are `wanted`: by the name that they have in the checkpoint, with shape,
    dtype and sharding. Without a sharding an array goes to the default device."""
    from orbax.checkpoint import v1 as ocp

    here = jnp.zeros(()).sharding
    specs = {
        name: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=getattr(spec, "sharding", None) or here
        )
        for name, spec in wanted.items()
    }
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            some = {name: spec for name, spec in specs.items() if spec.size}
            read: dict[str, jax.Array] = ocp.load(_open_arrays(path), some) if some else {}  # type: ignore[assignment]
    except Exception as error:
        raise Damaged(f"{path} cannot be read: {error.__cause__ or error}") from error
    empty = {name: spec for name, spec in specs.items() if not spec.size}
    return read | {
        name: jax.device_put(np.zeros(spec.shape, spec.dtype), spec.sharding)
        for name, spec in empty.items()
    }


def compare(wanted: Mapping[str, Any], saved: Mapping[str, Spec], where: Path) -> None:
    """Raises a `CheckpointError` that lists every path at which a checkpoint has something else
    than is wanted."""
    rows = []
    for name in sorted({*wanted, *saved}):
        kept = saved.get(name)
        asked = get_spec(wanted[name]) if name in wanted else None
        if kept != asked:
            rows.append(f"  {name}: saved {_format_spec(kept)}, wanted {_format_spec(asked)}")
    if rows:
        more = f"\n  and {len(rows) - 20} more" if len(rows) > 20 else ""
        raise CheckpointError(
            f"{where} does not fit the model, optimizer and plugins:\n"
            + "\n".join(rows[:20])
            + more
            + "\n"
            "Make them as they were, or begin in another run directory with what fits, by "
            "fit(init_from=fg.CheckpointRef(path, map={...}))"
        )


def apply_mapping(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Spec],
    mapping: Mapping[str, str],
    strict: bool,
    where: Path,
) -> dict[str, str]:
    """The names of arrays in a state, each with its name in the checkpoint, for a map of paths to
    paths.

    Raises a `CheckpointError` for a path below which there is nothing and, if `strict`, for an
    array that has no counterpart on the other side.
    """
    taken: dict[str, str] = {}
    for target, source in mapping.items():
        new, old = _names_below(target, wanted), _names_below(source, saved)
        field = target == source and target in fg.TrainState.__dataclass_fields__
        if not (new and old) and not (field and new.keys() == old.keys()):
            side, path, names = (
                ("the new state", target, wanted) if not new else (str(where), source, saved)
            )
            there = ", ".join(sorted({str(TreePath(parse(name)[:2])) for name in names})[:12])
            raise CheckpointError(
                f"init_from: there is no array below {path!r} in {side}. There is: {there}"
            )
        if strict and (odd := sorted(new.keys() ^ old.keys(), key=str)):
            rows = [
                f"  {(new | old)[rest]} is only in {'the new state' if rest in new else where}"
                for rest in odd[:20]
            ]
            raise CheckpointError(
                f"init_from: {target!r} and {source!r} differ; strict=False takes what both have:\n"
                + "\n".join(rows)
            )
        taken |= {new[rest]: old[rest] for rest in new if rest in old}
    return taken


def _names_below(prefix: str, names: Mapping[str, Any]) -> dict[Any, str]:
    start = parse(prefix)
    paths = {name: parse(name) for name in names}
    return {path[len(start) :]: name for name, path in paths.items() if path[: len(start)] == start}


def _owners(state: "fg.TrainState") -> list[str]:
    """The paths of the layers' indices, in the order in which their values are in the model
    state."""
    if state.model_state is None:
        return []
    indices = jax.tree_util.tree_leaves_with_path(state.module, is_leaf=_is_index)
    paths = {leaf.marker: str(from_keys(keys)) for keys, leaf in indices if _is_index(leaf)}
    _, markers = state.model_state.tree_flatten()
    return [paths.get(marker, f"[{place}]") for place, marker in enumerate(markers)]


def _name(path: Any, owners: list[str]) -> str:
    if len(path) > 1 and path[0] == "model_state" and owners:
        owner = owners[path[1]]
        return f"model_state{'' if owner.startswith('[') else '.'}{owner}{_rest(path[2:])}"
    return str(path)


def _rest(path: Any) -> str:
    text = str(TreePath(path))
    return text if not text or text.startswith("[") else f".{text}"


def _is_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _open_arrays(path: Path) -> Any:
    from etils import epath

    return epath.Path(path.absolute() if isinstance(path, Path) else path)


def _format_spec(spec: Spec | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{list(spec[0])}"
