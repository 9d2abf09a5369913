"""What is trained and what a compiled step takes, as tables."""

from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.paths import leaves_with_paths, parse
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ROWS = 24


def summary(state: fg.TrainState, rows: int = ROWS) -> RenderableType:
    """A table of the modules of a state: parameters, bytes, dtypes, shardings, bytes of the optimizer; below it the
    totals. Modules are listed as deep as fits into `rows` rows. Only shapes are looked at."""
    arrays = [(path, leaf) for path, leaf in leaves_with_paths(state.module) if _is_array(leaf)]
    kept = [(path, leaf) for path, leaf in leaves_with_paths(state.opt_state) if _is_array(leaf)]
    groups = _grouped(arrays, rows)
    sharded = any(_spec(leaf) != "-" for _, leaf in arrays)
    columns = ["parameters", "bytes", "optimizer", "dtype", *["sharding"] * sharded]
    table = Table("module", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("parameters", "bytes", "optimizer") else "left")
    owned = 0
    for name, members in groups.items():
        optimizer = sum(
            _bytes(leaf) for path, leaf in kept if any(path.endswith(f".{one}") or path == one for one, _ in members)
        )
        owned += optimizer
        leaves = [leaf for _, leaf in members]
        cells = [name, f"{sum(leaf.size for leaf in leaves):,}", _size(sum(map(_bytes, leaves))), _size(optimizer)]
        cells.append(_several(str(leaf.dtype) for leaf in leaves))
        table.add_row(*cells, *[_several(map(_spec, leaves))] * sharded)
    parameters, size = sum(leaf.size for _, leaf in arrays), sum(_bytes(leaf) for _, leaf in arrays)
    optimizer = sum(_bytes(leaf) for _, leaf in kept)
    plugins = sum(_bytes(leaf) for leaf in jax.tree.leaves(state.plugins) if _is_array(leaf))
    total = f"{type(state.module).__name__}: {parameters:,} parameters, {_size(size)}; optimizer {_size(optimizer)}"
    if plugins:
        total += f"; plugins {_size(plugins)}"
    return Group(table, Text(total, "bold"))


def costs(name: str, compiled: jax.stages.Compiled, seconds: float) -> Text:
    """A line about an executable: FLOPs of one run, memory besides its arguments, and seconds of compilation so far."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    parts = [f"compiled {name}"]
    if cost and cost.get("flops", 0) > 0:
        parts.append(f"{_count(cost['flops'])}FLOP")
    if memory is not None:
        parts.append(f"{_size(memory.argument_size_in_bytes)} in, {_size(memory.temp_size_in_bytes)} besides")
    return Text(", ".join([*parts, f"{seconds:.2f} s"]), "dim")


def _grouped(arrays: list[tuple[str, Any]], rows: int) -> dict[str, list[tuple[str, Any]]]:
    """Arrays by the path of the module that holds them, as deep as gives at most `rows` groups."""
    paths = {path: parse(path) for path, _ in arrays}
    for depth in range(max((len(path) - 1 for path in paths.values()), default=0), 0, -1):
        groups: dict[str, list[tuple[str, Any]]] = {}
        for path, leaf in arrays:
            keys = paths[path]
            groups.setdefault(str(type(keys)(keys[: min(depth, len(keys) - 1)])) or path, []).append((path, leaf))
        if len(groups) <= rows or depth == 1:
            return groups
    return {path: [(path, leaf)] for path, leaf in arrays}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _bytes(leaf: Any) -> int:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return int(jax.random.key_data(leaf).nbytes)
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


def _spec(leaf: Any) -> str:
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return str(tuple(spec)) if spec is not None and any(spec) else "-"


def _several(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))


def _size(count: float) -> str:
    return f"{_count(count)}B"


def _count(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.0f} {unit}" if not unit or number >= 100 else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} P"
