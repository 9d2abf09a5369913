"""The plugin: a mesh, and where batches, parameters, optimizer state and outputs lie on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite.sharding import SINGLE_PROCESS
from jax.sharding import AxisType, Mesh

from fulgurite_sharding.rule_strategy import RuleStrategy, get_optimizer_rules
from fulgurite_sharding.rules import Rule, Rules, ShardBySize
from fulgurite_sharding.sync import CoordinatedSync, check_every

_RULE = "such as (('**.weight', P('model', None)),)"
_EXAMPLES = {"batch": "such as ('data',)", "rules": _RULE, "outputs": _RULE}


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
                    "Sharding: the mesh has axes that are not Auto, under which some Equinox "
                    "layers fail: make it by "
                    "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)"
                )
            return self.mesh
        sizes, count = dict(self.mesh), jax.device_count()
        taken = prod(size for size in sizes.values() if size != -1)
        sizes = {name: count // taken if size == -1 else size for name, size in sizes.items()}
        if prod(sizes.values()) != count:
            raise ConfigurationError(
                f"Sharding: a mesh of {dict(self.mesh)} does not take all {count} devices: sizes "
                f"must multiply to "
                f"{count}, or to a divisor of it beside one axis of size -1. For some of the "
                f"devices give a "
                "jax.sharding.Mesh"
            )
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )

    @fg.hookimpl
    def sharding_strategy(self) -> RuleStrategy:
        """Return the strategy that follows the rules, with the mesh built when the engine is."""
        sync = CoordinatedSync(self.agree_every) if jax.process_count() > 1 else SINGLE_PROCESS
        return RuleStrategy(
            self.devices,
            sync,
            batch=self.batch,
            parameters=self.parameters,
            optimizer=self.optimizer,
            rules=self.rules,
            outputs=self.outputs,
        )

    def _axes_by_use(self) -> dict[str, list[str]]:
        """The axes named by each argument."""
        sizes = {name: getattr(self, name) for name in ("parameters", "optimizer")}
        return {
            "batch": list(self.batch),
            **{name: [size.axis] for name, size in sizes.items() if isinstance(size, ShardBySize)},
            "optimizer (a rule)": sorted(get_optimizer_rules(self.optimizer).axes),
            "rules": sorted(Rules(self.rules, "Sharding(rules=)").axes),
            "outputs": sorted(Rules(self.outputs, "Sharding(outputs=)").axes),
        }


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
            f"Sharding: mesh is {mesh!r}; it must be a jax.sharding.Mesh or sizes by name, such as "
            f"{{'data': -1, "
            "'model': 2}, with at most one -1"
        )
    return list(mesh)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Sequence)
