"""The plugin: a mesh, and where batches, parameters, optimizer state and outputs lie on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite.tree.paths import Path, from_keys
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fulgurite_sharding.consensus import CoordinatedSync, check_every
from fulgurite_sharding.rules import Rule, Rules, ShardBySize, axes_of

_RULE = "such as (('**.weight', P('model', None)),)"
_EXAMPLES = {"batch": "such as ('data',)", "rules": _RULE, "outputs": _RULE}


class LeafSharding(NamedTuple):
    """A parameter's shape, how it lies in the state, and how where a step uses it."""

    shape: tuple[int, ...]
    kept: PartitionSpec
    used: PartitionSpec


Known = dict[Path, LeafSharding]
"""Parameters by their paths in the module."""


@dataclass(frozen=True, eq=False)
class Sharding:
    """Trains on a mesh of devices. The step is compiled once for all of them; GSPMD inserts the
    communication.

    Args:
        mesh: sizes by axis name, one of which may be -1 for "all devices that are left"; together
            they take every device. Or a `jax.sharding.Mesh` whose axes are of type Auto.
        batch: the axes that divide the first dimension of every batch array; () keeps batches whole
            on every device.
        parameters: how to divide parameters that no rule matches: `ShardBySize(axis, min_size)`, or
            None to keep them whole on every device. It also divides dimensions that a rule leaves
            whole, unless the rule names no axis at all.
        optimizer: the optimizer state follows its parameters. `ShardBySize` divides it further;
            rules over its own paths (such as `**.mu.**.weight`) take precedence.
        rules: pairs of a path pattern over the module and a `PartitionSpec`; the first that matches
            decides.
        outputs: likewise, over what the module's step returns (`preds.logits`, `metrics.**`), in
            training and evaluation. In evaluation, a batch that does not divide evenly is left
            whole.
        agree_every: with several processes, the number of steps after which they agree on actions
            due by the clock and on requests to stop; see `CoordinatedSync`.

    Raises:
        ConfigurationError: sizes that do not fit the devices, axes that the mesh does not have, a
            rule that does not fit an array.
        PathError: a rule that matches no array.
    """

    plugin_name: ClassVar[str] = "sharding"

    mesh: Mapping[str, int] | Mesh = field(default_factory=lambda: {"data": -1})
    batch: Sequence[str] = ("data",)
    parameters: ShardBySize | None = None
    optimizer: ShardBySize | Sequence[Rule] | None = None
    rules: Sequence[Rule] = ()
    outputs: Sequence[Rule] = ()
    agree_every: int = 50

    def __post_init__(self) -> None:
        for name in ("batch", "rules", "outputs"):
            given = getattr(self, name)
            if not isinstance(given, str) and isinstance(given, Iterable):
                object.__setattr__(
                    self, name, tuple(given)
                )  # an iterator, such as zip(patterns, specs), gives them once
            else:
                raise ConfigurationError(
                    f"Sharding: {name} is {given!r}; it must be a tuple, {_EXAMPLES[name]}"
                )
        if not all(isinstance(axis, str) for axis in self.batch):
            raise ConfigurationError(
                f"Sharding: batch is {self.batch!r}; it must be a tuple of axes, such as ('data',)"
            )
        for name in ("parameters", "optimizer"):
            value = getattr(self, name)
            if (
                value is not None
                and not isinstance(value, ShardBySize)
                and (name == "parameters" or _is_plain(value))
            ):
                raise ConfigurationError(
                    f"Sharding: {name} is {value!r}; it must be ShardBySize(axis, min_size) or None"
                )
        check_every(self.agree_every)
        names = (
            self.mesh.axis_names if isinstance(self.mesh, Mesh) else _check_mesh_sizes(self.mesh)
        )
        for what, axes in self._axes_by_use().items():
            if unknown := sorted(set(axes) - set(names)):
                known = did_you_mean(unknown[0], names)
                raise ConfigurationError(
                    f"Sharding: {what} names the axis {unknown[0]!r} of the mesh. {known}"
                )

    @cached_property
    def devices(self) -> Mesh:
        """The mesh. Its first use starts JAX's backend."""
        if isinstance(self.mesh, Mesh):
            if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
                raise ConfigurationError(
                    "Sharding: the mesh has axes that are not Auto, under which some Equinox layers fail: make it by "
                    "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)"
                )
            return self.mesh
        sizes, count = dict(self.mesh), jax.device_count()
        taken = prod(size for size in sizes.values() if size != -1)
        sizes = {name: count // taken if size == -1 else size for name, size in sizes.items()}
        if prod(sizes.values()) != count:
            raise ConfigurationError(
                f"Sharding: a mesh of {dict(self.mesh)} does not take all {count} devices: sizes must multiply to "
                f"{count}, or to a divisor of it beside one axis of size -1. For some of the devices give a "
                "jax.sharding.Mesh"
            )
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )

    @fg.hookimpl(specname="mesh")
    def give_mesh(self) -> Mesh:
        """The mesh, built when the engine is."""
        return self.devices

    @fg.hookimpl
    def consensus(self) -> fg.ProcessSync | None:
        """How several processes agree."""
        return CoordinatedSync(self.agree_every) if jax.process_count() > 1 else None

    @fg.hookimpl
    def batch_sharding(self, batch: PyTree) -> PyTree[NamedSharding]:
        """Every array of a batch, divided along its first dimension."""
        spec = PartitionSpec(tuple(self.batch)) if self.batch else PartitionSpec()
        return jax.tree.map(
            lambda leaf: self._on_mesh(spec if leaf.ndim else PartitionSpec()), batch
        )

    @fg.hookimpl
    def state_sharding(self, state: fg.TrainState) -> PyTree[NamedSharding | None]:
        """Parameters by rule and size, optimizer state and slices after their parameters, the rest
        whole."""
        known = self._parameters(state.module)

        def place(keys: Any, leaf: Any) -> NamedSharding | None:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return None
            part, *rest = from_keys(keys)
            path = Path(rest)
            if part == "module":
                return self._on_mesh(known[path].kept)
            if part == "opt_state":
                return self._on_mesh(self._optimizer_spec(path, leaf.shape, known))
            return self._on_mesh(
                self._following(path, leaf.shape, known) if part == "plugin_states" else PartitionSpec()
            )

        shardings = jax.tree_util.tree_map_with_path(place, state)
        self._optimizer_rules.check_used(_paths(state.opt_state))
        return shardings

    @fg.hookimpl
    def forward_sharding(self, module: PyTree) -> PyTree[NamedSharding | None]:
        """What is divided by size is gathered where it is used. Left to itself, the compiler may
        gather batches and divide the work by the parts of a parameter instead, which moves
        activations at every layer."""
        if self.parameters is None:
            return None
        known = self._parameters(module)

        def place(keys: Any, leaf: Any) -> NamedSharding | None:
            found = known.get(from_keys(keys))
            return None if found is None or found.kept == found.used else self._on_mesh(found.used)

        return jax.tree_util.tree_map_with_path(place, module)

    @fg.hookimpl
    def output_sharding(self, output: fg.Output) -> PyTree[NamedSharding | None]:
        """What the rules for outputs say; in evaluation where it fits, whose last batch may be of
        any size."""
        rules = Rules(self.outputs, "Sharding(outputs=)", strict=fg.is_training())

        def place(keys: Any, leaf: Any) -> NamedSharding | None:
            # Among the media there are functions, and a metric may be a number of Python.
            spec = (
                rules.spec(from_keys(keys), leaf.shape, self.devices)
                if hasattr(leaf, "shape")
                else None
            )
            return None if spec is None else self._on_mesh(spec)

        return jax.tree_util.tree_map_with_path(place, output) if rules else None

    @property
    def _optimizer_rules(self) -> Rules:
        rules = (
            ()
            if self.optimizer is None or isinstance(self.optimizer, ShardBySize)
            else self.optimizer
        )
        return Rules(rules, "Sharding(optimizer=)")

    def _axes_by_use(self) -> dict[str, list[str]]:
        """The axes named by each argument."""
        sizes = {name: getattr(self, name) for name in ("parameters", "optimizer")}
        return {
            "batch": list(self.batch),
            **{name: [size.axis] for name, size in sizes.items() if isinstance(size, ShardBySize)},
            "optimizer (a rule)": sorted(self._optimizer_rules.axes),
            "rules": sorted(Rules(self.rules, "Sharding(rules=)").axes),
            "outputs": sorted(Rules(self.outputs, "Sharding(outputs=)").axes),
        }

    def _parameters(self, module: PyTree) -> Known:
        rules, known = Rules(self.rules, "Sharding(rules=)"), {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(module):
            if not hasattr(leaf, "shape"):
                continue
            path = from_keys(keys)
            spec = rules.spec(path, leaf.shape, self.devices)
            kept = used = PartitionSpec() if spec is None else spec
            if self.parameters is not None and (spec is None or axes_of(spec)):
                kept = self.parameters.extend(used, leaf.shape, self.devices)
            known[path] = LeafSharding(leaf.shape, kept, used)
        rules.check_used(list(known))
        return known

    def _optimizer_spec(self, path: Path, shape: tuple[int, ...], known: Known) -> PartitionSpec:
        spec = self._optimizer_rules.spec(path, shape, self.devices)
        if spec is None:
            spec = self._following(path, shape, known)
            if isinstance(self.optimizer, ShardBySize):
                spec = self.optimizer.extend(spec, shape, self.devices)
        return spec

    def _following(self, path: Path, shape: tuple[int, ...], known: Known) -> PartitionSpec:
        """The spec of the parameter whose path this one ends with, if they are of one shape; else
        by size alone."""
        for start in range(len(path)):
            found = known.get(Path(path[start:]))
            if found and found.shape == shape:
                return found.kept
        return (
            self.parameters.extend(PartitionSpec(), shape, self.devices)
            if self.parameters
            else PartitionSpec()
        )

    def _on_mesh(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.devices, spec)


class DataParallel(Sharding):
    """Divides batches over all devices; each holds everything else whole."""

    def __init__(self, axis: str = "data", *, agree_every: int = 50) -> None:
        super().__init__(mesh={axis: -1}, batch=(axis,), agree_every=agree_every)


class FSDP(Sharding):
    """Divides batches, parameters and optimizer state over one axis: each parameter with at least
    `min_size` elements along its largest dimension that divides evenly. It is gathered where it is
    used.

    With `rules` and a mesh of more axes it is fully sharded and tensor parallel at once:
    `FSDP(mesh={"data": -1, "model": 2}, rules=[("**.attention.*.weight", P("model", None))])`.
    """

    def __init__(
        self,
        axis: str = "data",
        min_size: int = 2**14,
        *,
        mesh: Mapping[str, int] | Mesh | None = None,
        rules: Sequence[Rule] = (),
        agree_every: int = 50,
    ) -> None:
        super().__init__(
            mesh or {axis: -1},
            (axis,),
            ShardBySize(axis, min_size),
            rules=rules,
            agree_every=agree_every,
        )


class TensorParallel(Sharding):
    """Divides parameters by the rules over the axis "model" of `size` devices (-1: all), and
    batches over the others along "data"."""

    def __init__(self, rules: Sequence[Rule], size: int = -1, *, agree_every: int = 50) -> None:
        mesh = {"data": 1 if size == -1 else -1, "model": size}
        super().__init__(mesh, rules=rules, agree_every=agree_every)


def _check_mesh_sizes(mesh: Any) -> list[str]:
    """The names of a mesh given by sizes."""
    good = isinstance(mesh, Mapping) and mesh and all(isinstance(name, str) for name in mesh)
    sizes = list(mesh.values()) if good else []
    good = (
        good
        and all(type(size) is int and (size > 0 or size == -1) for size in sizes)
        and sizes.count(-1) <= 1
    )
    if not good:
        raise ConfigurationError(
            f"Sharding: mesh is {mesh!r}; it must be a jax.sharding.Mesh or sizes by name, such as {{'data': -1, "
            "'model': 2}, with at most one -1"
        )
    return list(mesh)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Sequence)


def _paths(tree: PyTree) -> list[Path]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [from_keys(keys) for keys, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
