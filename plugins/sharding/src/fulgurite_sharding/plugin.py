"""The plugin: a mesh, and where batches, parameters, optimizer state and outputs lie on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    as_int,
    did_you_mean,
    set_ints,
)
from fulgurite.plugins import SINGLE_PROCESS, hide_constructor_frames
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fulgurite_sharding.batches import is_in_process_order
from fulgurite_sharding.distributed import get_client, is_connected
from fulgurite_sharding.peers import describe_lost_peer
from fulgurite_sharding.rule_strategy import RuleStrategy, get_optimizer_rules
from fulgurite_sharding.rules import Rule, Rules, ShardBySize
from fulgurite_sharding.sync import CoordinatedSync, check_agree_every

_RULE = "such as (('**.weight', P('model', None)),)"
_EXAMPLES = {"batch": "such as ('data',)", "rules": _RULE, "outputs": _RULE}


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class Sharding(fg.Plugin):
    """Trains on a mesh of devices.

    The step is compiled once for all of them; GSPMD inserts the communication.

    Example:
        from fulgurite_sharding import Sharding
        from jax.sharding import PartitionSpec as P

        rules = [("**.up.weight", P("model", None))]
        plugin = Sharding({"data": -1, "model": 2}, rules=rules)

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

    plugin_name = "sharding"

    mesh: Mapping[str, int] | Mesh = field(default_factory=lambda: {"data": -1})
    batch: Sequence[str] = ("data",)
    parameters: ShardBySize | None = None
    optimizer: ShardBySize | Sequence[Rule] | None = None
    rules: Sequence[Rule] = ()
    outputs: Sequence[Rule] = ()
    agree_every: int = 50

    def __post_init__(self) -> None:
        for name in ("batch", "rules", "outputs"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ConfigurationError(
                    f"Sharding: {name} is {value!r}; it must be a tuple, {_EXAMPLES[name]}"
                )
            # An iterator, such as zip(patterns, specs), gives them once.
            object.__setattr__(self, name, tuple(value))
        if not all(isinstance(axis, str) for axis in self.batch):
            raise ConfigurationError(
                f"Sharding: batch is {self.batch!r}; it must be a tuple of axes, such as ('data',)"
            )
        for name in ("parameters", "optimizer"):
            value = getattr(self, name)
            may_be_rules = name == "optimizer" and _is_sequence(value)
            if not isinstance(value, ShardBySize | None) and not may_be_rules:
                raise ConfigurationError(
                    f"Sharding: {name} is {value!r}; it must be ShardBySize(axis, min_size) or None"
                )
        set_ints(self, "agree_every")
        if isinstance(self.mesh, Mapping):
            mesh = {axis: as_int(size) for axis, size in self.mesh.items()}
            object.__setattr__(self, "mesh", mesh)
        check_agree_every(self.agree_every)
        self._check_axes()

    @cached_property
    def device_mesh(self) -> Mesh:
        """The mesh as an object. Its first use starts JAX's backend."""
        if isinstance(self.mesh, Mesh):
            if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
                raise ConfigurationError(
                    "Sharding: the mesh has axes that are not Auto, under which some Equinox "
                    "layers fail: make it by jax.make_mesh(..., "
                    "axis_types=(jax.sharding.AxisType.Auto,) * n)"
                )
            return self.mesh
        num_devices = jax.device_count()
        fixed_size = prod(size for size in self.mesh.values() if size != -1)
        sizes = {
            name: num_devices // fixed_size if size == -1 else size
            for name, size in self.mesh.items()
        }
        if prod(sizes.values()) != num_devices:
            raise ConfigurationError(
                f"Sharding: a mesh of {dict(self.mesh)} does not take all {num_devices} devices: "
                f"sizes must multiply to {num_devices}, or to a divisor of it beside one axis of "
                "size -1. For some of the devices give a jax.sharding.Mesh"
            )
        axis_types = tuple(AxisType.Auto for _ in sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)
        if is_in_process_order(NamedSharding(mesh, PartitionSpec(tuple(self.batch)))):
            return mesh
        # JAX follows the network of TPUs. Then examples would be in another order than on one
        # device, because each process reads rows that follow each other.
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        return Mesh(np.reshape(devices, mesh.axis_sizes), mesh.axis_names, axis_types=axis_types)

    @fg.hookimpl
    def sharding_strategy(self) -> RuleStrategy:
        """Return the strategy that follows the rules, with the mesh built when the engine is."""
        sync = CoordinatedSync(self.agree_every) if jax.process_count() > 1 else SINGLE_PROCESS
        return RuleStrategy(
            self.device_mesh,
            sync,
            batch=self.batch,
            parameters=self.parameters,
            optimizer=self.optimizer,
            rules=self.rules,
            outputs=self.outputs,
        )

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Tell the user of parameters that are whole although they were to be divided."""
        if self.parameters is None:
            return
        message = self.sharding_strategy().describe_undivided(run.state.module)
        if message is not None:
            run.notify("sharding", message)

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Note on an error of several processes which of them has ended."""
        is_connected_error = is_connected() and isinstance(exception, jax.errors.JaxRuntimeError)
        lost = describe_lost_peer(get_client(), exception) if is_connected_error else None
        if lost is not None:
            exception.add_note(
                f"{lost}: process {jax.process_index()} cannot continue alone, so look at the "
                "output of that one"
            )

    def _check_axes(self) -> None:
        """Raise a ConfigurationError unless the mesh has every axis that an argument names."""
        if isinstance(self.mesh, Mesh):
            names = list(self.mesh.axis_names)
        else:
            names = _check_mesh_sizes(self.mesh)
        for argument, axes in self._get_axes_by_argument().items():
            unknown = sorted(set(axes) - set(names))
            if unknown:
                raise ConfigurationError(
                    f"Sharding: {argument} names the axis {unknown[0]!r} of the mesh. "
                    f"{did_you_mean(unknown[0], names)}"
                )

    def _get_axes_by_argument(self) -> dict[str, list[str]]:
        """Return the axes that each argument names."""
        by_size = {"parameters": self.parameters, "optimizer": self.optimizer}
        size_axes = {
            name: [size.axis] for name, size in by_size.items() if isinstance(size, ShardBySize)
        }
        return {
            "batch": list(self.batch),
            **size_axes,
            "optimizer (a rule)": sorted(get_optimizer_rules(self.optimizer).axes),
            "rules": sorted(Rules(self.rules, "Sharding(rules=)").axes),
            "outputs": sorted(Rules(self.outputs, "Sharding(outputs=)").axes),
        }


@hide_constructor_frames
class DataParallel(Sharding):
    """Divides batches over all devices; each holds everything else whole.

    Example:
        from fulgurite_sharding import DataParallel

        engine = fg.Engine(steps=1_000, plugins=[DataParallel()])

    Args:
        axis: the name of the axis of the mesh.
        agree_every: see `Sharding`.
    """

    def __init__(self, axis: str = "data", *, agree_every: int = 50) -> None:
        super().__init__(mesh={axis: -1}, batch=(axis,), agree_every=agree_every)


@hide_constructor_frames
class FSDP(Sharding):
    """Divides batches, parameters and optimizer state over one axis.

    A parameter is divided along its largest dimension that divides evenly, and gathered where it is
    used. With `rules` and a mesh of more axes this is fully sharded and tensor parallel at once.

    Example:
        from fulgurite_sharding import FSDP
        from jax.sharding import PartitionSpec as P

        rules = [("**.attention.*.weight", P("model", None))]
        plugin = FSDP(mesh={"data": -1, "model": 2}, rules=rules)

    Args:
        axis: the name of the axis.
        min_size: parameters with fewer elements stay whole.
        mesh: see `Sharding`; by default `axis` has all devices.
        rules: see `Sharding`.
        agree_every: see `Sharding`.
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
            {axis: -1} if mesh is None else mesh,
            (axis,),
            ShardBySize(axis, min_size),
            rules=rules,
            agree_every=agree_every,
        )


@hide_constructor_frames
class TensorParallel(Sharding):
    """Divides parameters by rules over the axis "model", and batches over the axis "data".

    Example:
        from fulgurite_sharding import TensorParallel
        from jax.sharding import PartitionSpec as P

        plugin = TensorParallel([("**.up.weight", P("model", None))], size=2)

    Args:
        rules: see `Sharding`.
        size: the number of devices along "model", -1 for all; "data" has the others.
        agree_every: see `Sharding`.
    """

    def __init__(self, rules: Sequence[Rule], size: int = -1, *, agree_every: int = 50) -> None:
        data_size = 1 if size == -1 else -1
        mesh = {"data": data_size, "model": size}
        super().__init__(mesh, rules=rules, agree_every=agree_every)


def _check_mesh_sizes(mesh: Any) -> list[str]:
    """Return the names of the axes of a mesh that is given by sizes, after checking it."""
    if not _has_valid_sizes(mesh):
        raise ConfigurationError(
            f"Sharding: mesh is {mesh!r}; it must be a jax.sharding.Mesh or sizes by name, such as "
            "{'data': -1, 'model': 2}, with at most one -1"
        )
    return list(mesh)


def _has_valid_sizes(mesh: Any) -> bool:
    if not isinstance(mesh, Mapping) or not mesh:
        return False
    sizes = list(mesh.values())
    are_named = all(isinstance(name, str) for name in mesh)
    are_sizes = all(type(size) is int and (size > 0 or size == -1) for size in sizes)
    return are_named and are_sizes and sizes.count(-1) <= 1


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
