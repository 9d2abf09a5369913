"""What is trained and what a compiled step takes, as tables."""

from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.tree.paths import leaves_with_paths, parse
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ROWS = 24


def model_summary(
    state: fg.TrainState, rows: int = ROWS, rule: fg.UpdateRule | None = None
) -> RenderableType:
    """A table of the modules of a state: parameters, bytes, dtypes, shardings, bytes of the
    optimizer, and whether they are frozen (never updated by `rule`), with totals below. Modules are
    listed as deep as fits into `rows` rows. Only shapes are read."""
    arrays, kept = _arrays(state.module), _arrays(state.opt_state)
    groups = _group_rows(arrays, rows)
    sharded = any(_spec(leaf) != "-" for _, leaf in arrays)
    frozen = set() if rule is None else _frozen(state.module, rule)
    owned = _optimizer_bytes(kept, {path for path, _ in arrays})
    columns = [
        "parameters",
        "bytes",
        "optimizer",
        "dtype",
        *["sharding"] * sharded,
        *["frozen"] * bool(frozen),
    ]
    table = Table("module", box=None, pad_edge=False)
    for name in columns:
        table.add_column(
            name, justify="right" if name in ("parameters", "bytes", "optimizer") else "left"
        )
    for name, members in groups.items():
        leaves, optimizer = [leaf for _, leaf in members], sum(owned[path] for path, _ in members)
        cells = [
            name,
            f"{sum(leaf.size for leaf in leaves):,}",
            _size(sum(map(_bytes, leaves))),
            _size(optimizer),
        ]
        cells.append(_join_names(str(leaf.dtype) for leaf in leaves))
        cells += [_join_names(map(_spec, leaves))] * sharded
        still = [path in frozen for path, _ in members]
        table.add_row(
            *cells, *["yes" if all(still) else "partly" if any(still) else ""] * bool(frozen)
        )
    parameters, size = sum(leaf.size for _, leaf in arrays), sum(_bytes(leaf) for _, leaf in arrays)
    optimizer = sum(_bytes(leaf) for _, leaf in kept)
    plugins = sum(_bytes(leaf) for leaf in jax.tree.leaves(state.plugin_states) if _is_array(leaf))
    total = (
        f"{type(state.module).__name__}: {parameters:,} parameters, {_size(size)}; optimizer "
        f"{_size(optimizer)}"
    )
    if frozen:
        total += f"; frozen {sum(leaf.size for path, leaf in arrays if path in frozen):,}"
    if plugins:
        total += f"; plugins {_size(plugins)}"
    return Group(table, Text(total, "bold"))


def parameter_table(module: Any) -> Table:
    """A table of the arrays of a module, or of another tree: path, shape, dtype, sharding,
    parameters, bytes."""
    table = Table("path", "shape", "dtype", "sharding", box=None, pad_edge=False)
    for name in ("parameters", "bytes"):
        table.add_column(name, justify="right")
    for path, leaf in _arrays(module):
        shape = "×".join(map(str, leaf.shape))
        table.add_row(
            path, shape, str(leaf.dtype), _spec(leaf), f"{leaf.size:,}", _size(_bytes(leaf))
        )
    return table


def costs(name: str, compiled: jax.stages.Compiled, seconds: float) -> Text:
    """A line about an executable: FLOPs of one run, memory besides its arguments, and seconds of
    compilation so far."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    parts = [f"compiled {name}"]
    if cost and cost.get("flops", 0) > 0:
        parts.append(f"{_count(cost['flops'])}FLOP")
    if memory is not None:
        parts.append(
            f"{_size(memory.argument_size_in_bytes)} in, {_size(memory.temp_size_in_bytes)} besides"
        )
    return Text(", ".join([*parts, f"{seconds:.2f} s"]), "dim")


def _group_rows(arrays: list[tuple[str, Any]], rows: int) -> dict[str, list[tuple[str, Any]]]:
    """Arrays by the path of the module that holds them, as deep as gives at most `rows` groups."""
    paths = {path: parse(path) for path, _ in arrays}
    for depth in range(max((len(path) - 1 for path in paths.values()), default=0), 0, -1):
        groups: dict[str, list[tuple[str, Any]]] = {}
        for path, leaf in arrays:
            keys = paths[path]
            groups.setdefault(
                str(type(keys)(keys[: min(depth, len(keys) - 1)])) or path, []
            ).append((path, leaf))
        if len(groups) <= rows or depth == 1:
            return groups
    return {path: [(path, leaf)] for path, leaf in arrays}


def _arrays(tree: Any) -> list[tuple[str, Any]]:
    return [(path, leaf) for path, leaf in leaves_with_paths(tree) if _is_array(leaf)]


def _frozen(module: Any, rule: fg.UpdateRule) -> set[str]:
    """The paths of the floating-point arrays that a rule leaves alone."""
    floating = {
        path
        for path, leaf in _arrays(module)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    }
    return floating - {path for path, yes in leaves_with_paths(rule.trainable_mask(module)) if yes}


def _optimizer_bytes(kept: list[tuple[str, Any]], paths: set[str]) -> dict[str, int]:
    """The bytes that an optimizer keeps for the array at each of `paths`, which is the longest one
    that ends a path."""
    owned = dict.fromkeys(paths, 0)
    for path, leaf in kept:
        ends = [path, *(path[place + 1 :] for place, letter in enumerate(path) if letter == ".")]
        if owner := next((end for end in ends if end in paths), None):
            owned[owner] += _bytes(leaf)
    return owned


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _bytes(leaf: Any) -> int:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return int(jax.random.key_data(leaf).nbytes)
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


def _spec(leaf: Any) -> str:
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return str(tuple(spec)) if spec is not None and any(spec) else "-"


def _join_names(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))


def _size(count: float) -> str:
    return f"{_count(count)}B"


def _count(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.0f} {unit}" if not unit or number >= 100 else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} P"
