"""Functions of one's own on the devices of a mesh."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, did_you_mean
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree


def parallel(
    fn: Callable[..., Any],
    mesh: Mesh | None,
    *,
    in_axes: int | Sequence[int | None] | Mapping[str, int | None] | None = 0,
    out_axes: int | None = 0,
    mesh_axes: Sequence[str] = ("data",),
    axis_name: str | None = None,
) -> Callable[..., Any]:
    """Return a function, compiled, whose arguments are divided over the devices of a mesh.

    `fn` sees whole arrays, with an axis of examples, and treats each example alike. A number of
    examples that does not divide by the devices is filled up by repeating the last one; what comes
    of these is left out of the result. So `fn` must not sum over examples.

    With `axis_name`, `fn` sees the part of one device, and collectives such as
    `jax.lax.pmean(value, axis_name)` combine those of all. Then the examples must divide by the
    devices.

    Example:
        from fulgurite_sharding import parallel

        embed = parallel(lambda images: images.reshape(len(images), -1) / 255, engine.sharding.mesh)
        vectors = embed(np.zeros((10, 28, 28)))
        mean = parallel(
            lambda x: jax.lax.pmean(x.mean(0), "devices"),
            engine.sharding.mesh,
            axis_name="devices",
            out_axes=None,
        )

    Args:
        fn: a pure function of trees of arrays.
        mesh: that of `engine.sharding.mesh`, or another; None for one device.
        in_axes: for each positional argument, for each parameter by name, or for all, where the
            axis of examples is; None for an argument that every device needs whole. A parameter
            that is not named has it in front. As in `jax.vmap`, -1 is the last axis.
        out_axes: where the axis of examples is in every array of the result, likewise; None for a
            result that is the same on all devices, with `axis_name` only.
        mesh_axes: the axes of the mesh that divide the examples.
        axis_name: by which collectives in `fn` name the devices.

    Raises:
        ConfigurationError: the mesh has no such axis, or `in_axes` does not fit `fn`. When called:
            the arguments do not fit `in_axes`.
        DataError: when called, if the numbers of examples differ, or do not divide by the devices
            where they must, or an array has no such axis.
    """
    _check_out_axes(out_axes, axis_name)
    _check_names(fn, in_axes)
    division = _Division.from_mesh(mesh, mesh_axes, axis_name, out_axes)
    run = _compile(fn, division)

    @wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = _list_axes(fn, in_axes, args, kwargs)
        return division.call(run, axes, args, kwargs)

    return call


@dataclass(frozen=True)
class _Division:
    """How examples are divided over the devices of a mesh.

    Attributes:
        mesh: the mesh; None for one device.
        mesh_axes: the axes of the mesh that divide the examples.
        axis_name: by which collectives name the devices; None without any.
        out_axes: where the axis of examples is in the result; None for none.
    """

    mesh: Mesh | None
    mesh_axes: Sequence[str]
    axis_name: str | None
    out_axes: int | None

    @staticmethod
    def from_mesh(
        mesh: Mesh | None, mesh_axes: Sequence[str], axis_name: str | None, out_axes: int | None
    ) -> "_Division":
        """Return the division by some axes of a mesh; one that is not there is a
        ConfigurationError."""
        missing = [axis for axis in mesh_axes if mesh is not None and axis not in mesh.shape]
        if mesh is not None and missing:
            raise ConfigurationError(
                f"parallel: the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}"
            )
        if axis_name is None:
            return _Division(mesh, mesh_axes, None, out_axes)
        mesh = _name_devices(mesh, mesh_axes, axis_name)
        return _Division(mesh, (axis_name,), axis_name, out_axes)

    @property
    def num_parts(self) -> int:
        """The number of devices that divide the examples."""
        return 1 if self.mesh is None else prod(self.mesh.shape[axis] for axis in self.mesh_axes)

    def make_spec(self, axis: int | None, ndim: int) -> PartitionSpec:
        """Return the spec of an array whose examples are divided along an axis.

        Args:
            axis: where they are; negative to count from the end, None for nowhere.
            ndim: the number of axes of the array.
        """
        if axis is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * (axis % ndim), tuple(self.mesh_axes))

    def make_specs(self, axis: int | None, tree: PyTree) -> PyTree[PartitionSpec]:
        """Return such a spec for each array of a tree."""
        return jax.tree.map(lambda leaf: self.make_spec(axis, jnp.ndim(leaf)), tree)

    def call(
        self,
        run: Callable[..., PyTree],
        axes: Sequence[int | None],
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """Return the result of a compiled function, without what fills up the examples.

        Args:
            run: as `_compile` returns it.
            axes: where the examples are in each argument.
            args: its positional arguments.
            kwargs: the others.
        """
        values = [*args, *kwargs.values()]
        num_examples = _count_examples(values, axes)
        placed = self.place(values, axes, num_examples)
        result = run(tuple(axes), len(args), tuple(kwargs), *placed)
        if num_examples % self.num_parts == 0:
            return result
        axis = self.out_axes or 0
        _check_axis(result, axis, "the result has")
        return jax.tree.map(
            lambda leaf: jax.lax.slice_in_dim(leaf, 0, num_examples, axis=axis), result
        )

    def place(
        self, args: Sequence[PyTree], axes: Sequence[int | None], num_examples: int
    ) -> list[PyTree]:
        """Return arguments, filled up to what divides by the devices, on the mesh.

        Args:
            args: the arguments.
            axes: where the examples are in each.
            num_examples: in all of them.
        """
        missing = -num_examples % self.num_parts
        if missing and self.axis_name is not None:
            raise DataError(
                f"parallel: {num_examples} examples do not divide by {self.num_parts} devices, and "
                f"what fills them up would count in collectives over {self.axis_name!r}: give a "
                "number that does"
            )
        return [self._place(arg, axis, missing) for arg, axis in zip(args, axes, strict=True)]

    def _place(self, arg: PyTree, axis: int | None, missing: int) -> PyTree:
        if axis is not None and missing:
            arg = jax.tree.map(lambda leaf: _repeat_last(leaf, axis, missing), arg)
        mesh = self.mesh
        if mesh is None:
            return arg
        return jax.tree.map(
            lambda leaf: jax.device_put(
                leaf, NamedSharding(mesh, self.make_spec(axis, jnp.ndim(leaf)))
            ),
            arg,
        )


def _compile(fn: Callable[..., Any], division: _Division) -> Callable[..., PyTree]:
    """Return a compiled function of the axes of the arguments, the number of positional ones, the
    names of the others, and the arguments."""

    def call_part(num_args: int, names: tuple[str, ...], *values: PyTree) -> PyTree:
        return fn(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    @partial(jax.jit, static_argnums=(0, 1, 2))
    def run(
        axes: tuple[int | None, ...], num_args: int, names: tuple[str, ...], *values: PyTree
    ) -> PyTree:
        call_here = partial(call_part, num_args, names)
        if division.axis_name is None:
            return call_here(*values)
        out_axis = division.out_axes
        # From the end it is another axis in each array of the result.
        moved_axis = out_axis if out_axis is None or out_axis >= 0 else 0
        mapped = jax.shard_map(
            lambda *values: _move_axis(call_here(*values), out_axis, moved_axis),
            mesh=division.mesh,
            in_specs=tuple(map(division.make_specs, axes, values)),
            out_specs=division.make_spec(moved_axis, (moved_axis or 0) + 1),
        )
        return _move_axis(mapped(*values), moved_axis, out_axis)

    return run


def _check_out_axes(out_axes: int | None, axis_name: str | None) -> None:
    if out_axes is None and axis_name is None:
        raise ConfigurationError(
            "parallel: out_axes is None, and without collectives no result is the same on all "
            "devices: give axis_name= as well"
        )


def _check_names(fn: Callable[..., Any], in_axes: Any) -> None:
    """Raise a ConfigurationError if axes are given for parameters that a function has not."""
    if not isinstance(in_axes, Mapping):
        return
    parameters = inspect.signature(fn).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in in_axes:
        if name not in parameters:
            raise ConfigurationError(
                f"parallel: in_axes names {name!r}, and {fn} has no such parameter. "
                f"{did_you_mean(name, parameters)}"
            )


def _list_axes(
    fn: Callable[..., Any], in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int | None]:
    """Return the axis of examples of each argument, those by keyword last."""
    if isinstance(in_axes, Mapping):
        names = [*_list_positional_names(fn, len(args)), *kwargs]
        return [in_axes.get(name, 0) for name in names]
    if not isinstance(in_axes, Sequence):
        return [in_axes] * (len(args) + len(kwargs))
    if kwargs or len(in_axes) != len(args):
        raise ConfigurationError(
            f"parallel: in_axes has {len(in_axes)} axes for {len(args)} positional arguments and "
            f"{len(kwargs)} by keyword: give one for each, or a dictionary by parameter"
        )
    return list(in_axes)


def _list_positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the parameter of each of `count` positional arguments; that of `*args` repeats."""
    names: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [parameter.name] * (count - len(names))
        names.append(parameter.name)
    return names[:count]


def _name_devices(mesh: Mesh | None, mesh_axes: Sequence[str], axis_name: str) -> Mesh:
    """Return a mesh of the same devices, on which those that divide the examples are one axis."""
    if mesh is None:
        return Mesh(np.asarray(jax.devices()[:1]), (axis_name,))
    others = [name for name in mesh.axis_names if name not in mesh_axes]
    if axis_name in others:
        raise ConfigurationError(
            f"parallel: axis_name is {axis_name!r}, which is another axis of the mesh: choose "
            "another name"
        )
    order = [mesh.axis_names.index(name) for name in (*mesh_axes, *others)]
    devices = mesh.devices.transpose(order)
    sizes = [mesh.shape[name] for name in others]
    return Mesh(devices.reshape(-1, *sizes), (axis_name, *others))


def _count_examples(args: Sequence[PyTree], axes: Sequence[int | None]) -> int:
    for arg, axis in zip(args, axes, strict=True):
        if axis is not None:
            _check_axis(arg, axis, "the arguments have")
    sizes = {
        jnp.shape(leaf)[axis]
        for arg, axis in zip(args, axes, strict=True)
        if axis is not None
        for leaf in jax.tree.leaves(arg)
    }
    if len(sizes) != 1:
        text = f"{sorted(sizes)} examples" if sizes else "no argument with an axis of examples"
        raise DataError(f"parallel: the arguments have {text}; give all of them equally many")
    return sizes.pop()


def _check_axis(tree: PyTree, axis: int, who_has: str) -> None:
    """Raise a DataError if an array of a tree does not have an axis."""
    for leaf in jax.tree.leaves(tree):
        if not -jnp.ndim(leaf) <= axis < jnp.ndim(leaf):
            raise DataError(
                f"parallel: {who_has} an array of shape {list(jnp.shape(leaf))}, which has no axis "
                f"{axis} of examples: in_axes and out_axes say where it is, and in_axes None for "
                "an argument that has none"
            )


def _move_axis(tree: PyTree, source: int | None, target: int | None) -> PyTree:
    """Return a tree whose arrays have one axis elsewhere."""
    if source is None or target is None or source == target:
        return tree
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, target), tree)


def _repeat_last(leaf: Any, axis: int, count: int) -> Any:
    widths = [(0, 0)] * jnp.ndim(leaf)
    widths[axis] = (0, count)
    return jnp.pad(leaf, widths, mode="edge")
