"""Show what is trained and what a compiled step takes, as tables."""

from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.plugins import count_flops, is_floating_array, leaves_with_paths, parse_path
from jax.extend.core import ClosedJaxpr
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fulgurite_progress.numbers import format_bytes, format_count
from fulgurite_progress.path_cell import PathCell

MAX_ROWS = 24


def model_summary(
    state: fg.TrainState, max_rows: int = MAX_ROWS, update_rule: fg.UpdateRule | None = None
) -> RenderableType:
    """Return a table of the modules of a state: parameters, bytes, dtypes, shardings, bytes of the
    optimizer, and whether they are frozen, with totals below. Only shapes are read.

    Args:
        state: the state, or a tree of its shapes.
        max_rows: modules are listed as deep as fits into that many rows.
        update_rule: what it never updates is frozen.
    """
    arrays = _list_arrays(state.module)
    frozen: set[str] = set() if update_rule is None else _find_frozen(state.module, update_rule)
    optimizer_sizes = _measure_optimizer(state.opt_state, {path for path, _ in arrays})
    has_sharding = any(_format_sharding(leaf) != "-" for _, leaf in arrays)
    table = Table("module", box=None, pad_edge=False)
    for name in ("parameters", "bytes", "optimizer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("dtype")
    if has_sharding:
        table.add_column("sharding")
    if frozen:
        table.add_column("frozen")
    for name, members in _group_by_module(arrays, max_rows).items():
        leaves = [leaf for _, leaf in members]
        cells: list[RenderableType] = [
            PathCell(name),
            f"{sum(leaf.size for leaf in leaves):,}",
            format_bytes(sum(map(_count_bytes, leaves))),
            format_bytes(sum(optimizer_sizes[path] for path, _ in members)),
            _join_unique(str(leaf.dtype) for leaf in leaves),
        ]
        if has_sharding:
            cells.append(_join_unique(map(_format_sharding, leaves)))
        if frozen:
            cells.append(_describe_frozen([path in frozen for path, _ in members]))
        table.add_row(*cells)
    return Group(table, Text(_format_totals(state, frozen), "bold"))


def _format_totals(state: fg.TrainState, frozen: set[str]) -> str:
    arrays = _list_arrays(state.module)
    num_parameters = sum(leaf.size for _, leaf in arrays if is_floating_array(leaf))
    extra = [leaf for _, leaf in arrays if not is_floating_array(leaf)]
    extra += [leaf for _, leaf in _list_arrays(state.model_state)]
    num_extra = sum(leaf.size for leaf in extra)
    optimizer_size = sum(_count_bytes(leaf) for _, leaf in _list_arrays(state.opt_state))
    plugins_size = sum(_count_bytes(leaf) for _, leaf in _list_arrays(state.plugin_states))
    text = (
        f"{type(state.module).__name__}: {num_parameters:,} parameters, "
        f"{format_bytes(sum(_count_bytes(leaf) for _, leaf in arrays))}; "
        f"optimizer {format_bytes(optimizer_size)}"
    )
    if num_extra:
        text += f"; {num_extra:,} other numbers, such as statistics"
    if frozen:
        text += f"; frozen {sum(leaf.size for path, leaf in arrays if path in frozen):,}"
    if plugins_size:
        text += f"; plugins {format_bytes(plugins_size)}"
    return text


def _describe_frozen(is_frozen: list[bool]) -> str:
    if all(is_frozen):
        return "yes"
    return "partly" if any(is_frozen) else ""


def parameter_table(module: Any) -> Table:
    """Return a table of the arrays of a module, or of another tree: path, shape, dtype, sharding,
    parameters, bytes."""
    table = Table("path", "shape", "dtype", "sharding", box=None, pad_edge=False)
    for name in ("parameters", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for path, leaf in _list_arrays(module):
        shape = "×".join(map(str, leaf.shape))
        table.add_row(
            PathCell(path),
            shape,
            str(leaf.dtype),
            _format_sharding(leaf),
            f"{leaf.size:,}",
            format_bytes(_count_bytes(leaf)),
        )
    return table


def format_cost(
    name: str, compiled: jax.stages.Compiled, jaxpr: ClosedJaxpr, seconds: float | None = None
) -> Text:
    """Return a line about an executable: FLOPs of one run on all devices, memory of its arguments
    and besides them on one device, and seconds.

    Args:
        name: what it is called.
        compiled: the executable.
        jaxpr: the program as it was traced.
        seconds: how long it took to compile; None where that was not measured.
    """
    memory = compiled.memory_analysis()
    evaluation = name.removeprefix("evaluate.")
    parts = [f"compiled {name}" if evaluation == name else f"compiled evaluation {evaluation}"]
    flops = count_flops(jaxpr)
    if flops > 0:
        parts.append(f"{format_count(flops)}FLOP")
    if memory is not None:
        parts.append(
            f"{format_bytes(memory.argument_size_in_bytes)} in, "
            f"{format_bytes(memory.temp_size_in_bytes)} besides"
        )
    if seconds is not None:
        parts.append(f"{seconds:.2f} s")
    return Text(", ".join(parts), "dim")


def _group_by_module(
    arrays: list[tuple[str, Any]], max_rows: int
) -> dict[str, list[tuple[str, Any]]]:
    """Return arrays by the path of the module that holds them, as deep as gives at most `max_rows`
    groups."""
    paths = {path: parse_path(path) for path, _ in arrays}
    for depth in range(max((len(path) - 1 for path in paths.values()), default=0), 0, -1):
        groups: dict[str, list[tuple[str, Any]]] = {}
        for path, leaf in arrays:
            keys = paths[path]
            module_keys = type(keys)(keys[: min(depth, len(keys) - 1)])
            groups.setdefault(str(module_keys) or path, []).append((path, leaf))
        if len(groups) <= max_rows or depth == 1:
            return groups
    return {path: [(path, leaf)] for path, leaf in arrays}


def _list_arrays(tree: Any) -> list[tuple[str, Any]]:
    return [(path, leaf) for path, leaf in leaves_with_paths(tree) if _is_array(leaf)]


def _find_frozen(module: Any, update_rule: fg.UpdateRule) -> set[str]:
    """Return the paths of the floating-point arrays that a rule never updates."""
    floating = {
        path
        for path, leaf in _list_arrays(module)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    }
    mask = leaves_with_paths(update_rule.trainable_mask(module))
    return floating - {path for path, is_trainable in mask if is_trainable}


def _measure_optimizer(opt_state: Any, paths: set[str]) -> dict[str, int]:
    """Return the bytes that an optimizer keeps for the array at each of `paths`.

    A path in the optimizer's state ends in that of the array; the longest such end counts.
    """
    sizes = dict.fromkeys(paths, 0)
    for path, leaf in _list_arrays(opt_state):
        dots = [index for index, letter in enumerate(path) if letter == "."]
        for end in (path, *(path[index + 1 :] for index in dots)):
            if end in paths:
                sizes[end] += _count_bytes(leaf)
                break
    return sizes


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _count_bytes(leaf: Any) -> int:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return int(jax.random.key_data(leaf).nbytes)
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


def _format_sharding(leaf: Any) -> str:
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return str(tuple(spec)) if spec is not None and any(spec) else "-"


def _join_unique(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))
