"""The strategy of the plugin `Sharding`: rules over paths, sizes, and what follows parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import fulgurite as fg
import jax
from fulgurite.plugins import TreePath, path_from_keys
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fulgurite_sharding.rules import Rule, Rules, ShardBySize, get_axes
from fulgurite_sharding.strategy import MeshStrategy


class ParamSharding(NamedTuple):
    """A parameter's shape, its spec in the state, and its spec where a step uses it."""

    shape: tuple[int, ...]
    stored: PartitionSpec
    used: PartitionSpec


ParamShardings = dict[TreePath, ParamSharding]
"""Parameters by their paths in the module."""


class RuleStrategy(MeshStrategy):
    """Divides parameters by rules and by size, and what belongs to them likewise.

    Args:
        mesh: the devices.
        sync: how several processes agree.
        batch: the axes that divide the first dimension of every batch array.
        parameters: how to divide parameters that no rule matches.
        optimizer: a further division of the optimizer state, or rules over its paths.
        rules: over the paths of the module.
        outputs: rules over the paths of what a step returns.
    """

    def __init__(
        self,
        mesh: Mesh,
        sync: fg.ProcessSync,
        *,
        batch: Sequence[str],
        parameters: ShardBySize | None,
        optimizer: ShardBySize | Sequence[Rule] | None,
        rules: Sequence[Rule],
        outputs: Sequence[Rule],
    ) -> None:
        super().__init__(mesh, sync)
        self._batch = tuple(batch)
        self._parameters = parameters
        self._optimizer_size = optimizer if isinstance(optimizer, ShardBySize) else None
        self._optimizer_rules = get_optimizer_rules(optimizer)
        self._rules = rules
        self._outputs = outputs

    @property
    def batch_sharding(self) -> NamedSharding:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sharding of every array of a batch that has examples."""
        spec = PartitionSpec(self._batch) if self._batch else PartitionSpec()
        return self._make_sharding(spec)

    def get_batch_shardings(self, batch: PyTree) -> PyTree[NamedSharding]:
        """Divide every array of a batch along its first dimension."""
        return jax.tree.map(
            lambda leaf: self.batch_sharding if leaf.ndim else self._make_sharding(PartitionSpec()),
            batch,
        )

    def get_state_shardings(self, state: fg.TrainState) -> PyTree[NamedSharding | None]:
        """Divide parameters by rule and size, optimizer state and the states of plugins after their
        parameters; the rest is whole."""
        params = self._get_param_shardings(state.module)

        def get_sharding(keys: Any, leaf: Any) -> NamedSharding | None:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return None
            part, *rest = path_from_keys(keys)
            path = TreePath(rest)
            if part == "module":
                return self._make_sharding(params[path].stored)
            if part == "opt_state":
                return self._make_sharding(self._get_optimizer_spec(path, leaf.shape, params))
            if part == "plugin_states":
                return self._make_sharding(self._get_following_spec(path, leaf.shape, params))
            return self._make_sharding(PartitionSpec())

        shardings = jax.tree_util.tree_map_with_path(get_sharding, state)
        self._optimizer_rules.check_used(_get_array_paths(state.opt_state))
        return shardings

    def get_param_shardings(self, module: PyTree) -> PyTree[NamedSharding | None] | None:
        """Gather what is divided by size where it is used.

        Left to itself, the compiler may gather batches and divide the work by the parts of a
        parameter instead, which moves activations at every layer.
        """
        if self._parameters is None:
            return None
        params = self._get_param_shardings(module)

        def get_sharding(keys: Any, leaf: Any) -> NamedSharding | None:
            param = params.get(path_from_keys(keys))
            if param is None or param.stored == param.used:
                return None
            return self._make_sharding(param.used)

        return jax.tree_util.tree_map_with_path(get_sharding, module)

    def get_output_shardings(self, output: fg.Output) -> PyTree[NamedSharding | None] | None:
        """Place outputs by their rules; in evaluation where it fits, whose last batch may be of any
        size."""
        rules = Rules(self._outputs, "Sharding(outputs=)", strict=fg.is_training())
        if not rules:
            return None

        def get_sharding(keys: Any, leaf: Any) -> NamedSharding | None:
            # Among the media there are functions, and a metric may be a number of Python.
            if not hasattr(leaf, "shape"):
                return None
            spec = rules.get_spec(path_from_keys(keys), leaf.shape, self.mesh)
            return None if spec is None else self._make_sharding(spec)

        return jax.tree_util.tree_map_with_path(get_sharding, output)

    def describe_undivided(self, module: PyTree) -> str | None:
        """Return a sentence about parameters that are whole on every device although they were to
        be divided by size; None if there are none.

        Args:
            module: the module.
        """
        by_size = self._parameters
        if by_size is None:
            return None
        rules = Rules(self._rules, "Sharding(rules=)")
        params = {
            path: param
            for path, param in self._get_param_shardings(module).items()
            if rules.get_spec(path, param.shape, self.mesh) is None
        }
        whole = {path: param for path, param in params.items() if not get_axes(param.stored)}
        large = [path for path, param in whole.items() if by_size.is_large(param.shape)]
        num_parts = self.mesh.shape[by_size.axis]
        if large:
            shapes = ", ".join(f"{path} {whole[path].shape}" for path in large)
            return (
                f"whole on every device, because no dimension divides by the {num_parts} parts of "
                f"the axis {by_size.axis!r}: {shapes}. Pad them to a multiple of that, or leave "
                "them as they are"
            )
        if num_parts > 1 and params and len(whole) == len(params):
            return (
                f"no parameter is divided over the axis {by_size.axis!r}, because each has fewer "
                f"elements than min_size={by_size.min_size}. Give a smaller min_size, or "
                "DataParallel() for a model that fits each device"
            )
        return None

    def _get_param_shardings(self, module: PyTree) -> ParamShardings:
        rules = Rules(self._rules, "Sharding(rules=)")
        params: ParamShardings = {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(module):
            if not hasattr(leaf, "shape"):
                continue
            path = path_from_keys(keys)
            spec = rules.get_spec(path, leaf.shape, self.mesh)
            used = PartitionSpec() if spec is None else spec
            stored = used
            if self._parameters is not None and (spec is None or get_axes(spec)):
                stored = self._parameters.extend(used, leaf.shape, self.mesh)
            params[path] = ParamSharding(leaf.shape, stored, used)
        rules.check_used(list(params))
        return params

    def _get_optimizer_spec(
        self, path: TreePath, shape: tuple[int, ...], params: ParamShardings
    ) -> PartitionSpec:
        spec = self._optimizer_rules.get_spec(path, shape, self.mesh)
        if spec is not None:
            return spec
        spec = self._get_following_spec(path, shape, params)
        if self._optimizer_size is not None:
            spec = self._optimizer_size.extend(spec, shape, self.mesh)
        return spec

    def _get_following_spec(
        self, path: TreePath, shape: tuple[int, ...], params: ParamShardings
    ) -> PartitionSpec:
        """Return the spec of the parameter whose path this one ends with, if they are of one shape;
        else one by size alone."""
        for start in range(len(path)):
            param = params.get(TreePath(path[start:]))
            if param is not None and param.shape == shape:
                return param.stored
        if self._parameters is None:
            return PartitionSpec()
        return self._parameters.extend(PartitionSpec(), shape, self.mesh)

    def _make_sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def get_optimizer_rules(optimizer: ShardBySize | Sequence[Rule] | None) -> Rules:
    """Return the rules over the paths of the optimizer state, of which there may be none."""
    if optimizer is None or isinstance(optimizer, ShardBySize):
        return Rules((), "Sharding(optimizer=)")
    return Rules(optimizer, "Sharding(optimizer=)")


def _get_array_paths(tree: PyTree) -> list[TreePath]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [path_from_keys(keys) for keys, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
