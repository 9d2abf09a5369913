"""Which numbers of a tree of metrics are merged as one vector, and what keeps them together."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fulgurite._src.metrics.accumulator import MetricAccumulator, group_alike
from fulgurite._src.tree.vectors import join_scalars, split_into_scalars


def find_columns(tree: Any) -> list[list[int]]:
    """Return which leaves of a tree are merged as one vector, a list of their indices for each
    vector. Packed side by side, that vector never needs to be taken apart.

    Args:
        tree: with accumulators, of arrays or of specs.
    """

    def is_accumulator(node: Any) -> bool:
        return isinstance(node, MetricAccumulator)

    treedef = jax.tree.structure(tree)
    indices = treedef.unflatten(range(treedef.num_leaves))
    nodes = jax.tree.leaves(tree, is_leaf=is_accumulator)
    index_nodes = jax.tree.leaves(indices, is_leaf=is_accumulator)
    columns: list[list[int]] = []
    for node, index_node in zip(nodes, index_nodes, strict=True):
        if not is_accumulator(node):
            continue
        for names in group_alike(node.metrics, node.metrics):
            rows = [jax.tree.leaves(index_node.metrics[name]) for name in names]
            columns += map(list, zip(*rows, strict=True))
    return columns


def select_tree(condition: Bool[Array, ""], tree: Any, other: Any) -> Any:
    """Return a tree where the condition is true, and another one elsewhere; traced. Numbers that
    are merged as one vector are selected as one.

    Args:
        condition: which one.
        tree: of arrays.
        other: of the same structure.
    """
    leaves, treedef = jax.tree.flatten(tree)
    others = jax.tree.leaves(other)
    selected: dict[int, Array] = {}
    for column in find_columns(tree):
        vectors = [join_scalars([values[index] for index in column]) for values in (leaves, others)]
        numbers = split_into_scalars(jnp.where(condition, *vectors))
        selected.update(zip(column, numbers, strict=True))
    for index in {*range(len(leaves))} - selected.keys():
        selected[index] = jnp.where(condition, leaves[index], others[index])
    return treedef.unflatten([selected[index] for index in range(len(leaves))])
