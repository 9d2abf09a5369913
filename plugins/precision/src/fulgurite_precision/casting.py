"""Casting of modules, batches and outputs."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite import Selector
from fulgurite.plugins import apply_model
from jaxtyping import PyTree


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """Return a tree whose real floating-point arrays have a dtype; all else is as it was.

    Args:
        tree: any tree. Random keys, integers and labels are left alone.
        dtype: the dtype.
    """
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def cast_like(tree: PyTree, template: PyTree) -> PyTree:
    """Return a tree whose arrays have the dtypes of another tree of the same structure.

    Args:
        tree: the tree; returned as it is if its structure is another.
        template: has the dtypes.
    """
    if jax.tree.structure(tree) != jax.tree.structure(template):
        return tree
    return jax.tree.map(
        lambda leaf, old: leaf.astype(old.dtype) if is_float(leaf) else leaf, tree, template
    )


def is_float(leaf: Any) -> bool:
    """Return whether a leaf is an array of real floating-point numbers."""
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.floating)


def cast_module(module: PyTree, dtype: Any, exclude: Selector | None) -> PyTree:
    """Return a module that computes in a dtype.

    A layer whose floating-point arrays are all excluded computes in their dtype: its inputs are
    cast to it and its outputs back. So does every `eqx.nn.BatchNorm`, whose statistics need it.

    Args:
        module: the module.
        dtype: in which it computes.
        exclude: what is left as it is.
    """
    flags = jax.tree.map(lambda _: False, module) if exclude is None else exclude(module)

    def cast(node: Any, flag: PyTree) -> Any:
        if isinstance(node, eqx.nn.BatchNorm) or _is_excluded_layer(node, flag):
            return _keep_precision(node)
        if isinstance(node, eqx.Module):
            return _map_fields(node, flag)
        return node.astype(dtype) if is_float(node) and not flag else node

    def is_layer(node: Any) -> bool:
        return isinstance(node, eqx.Module)

    def _map_fields(node: Any, flag: Any) -> Any:
        children, structure = jax.tree.flatten(
            node, is_leaf=lambda child: child is not node and is_layer(child)
        )
        flag_children = structure.flatten_up_to(flag)
        return structure.unflatten(list(map(cast, children, flag_children)))

    return jax.tree.map(cast, module, flags, is_leaf=is_layer)


def cast_params(module: PyTree, dtype: Any, exclude: Selector | None) -> PyTree:
    """Return a module whose parameters have a dtype, but for those of `eqx.nn.BatchNorm` and what
    is excluded.

    Args:
        module: the module.
        dtype: of its parameters.
        exclude: what is left as it is.
    """
    flags = jax.tree.map(lambda _: False, module) if exclude is None else exclude(module)

    def is_batch_norm(node: Any) -> bool:
        return isinstance(node, eqx.nn.BatchNorm)

    def cast(node: Any, flag: PyTree) -> Any:
        is_kept = is_batch_norm(node) or not is_float(node) or flag
        return node if is_kept else node.astype(dtype)

    return jax.tree.map(cast, module, flags, is_leaf=is_batch_norm)


def _is_excluded_layer(node: Any, flags: PyTree) -> bool:
    """Return whether a node is a layer of which all floating-point arrays are excluded."""
    if not isinstance(node, eqx.Module) or not callable(node):
        return False
    leaves = zip(jax.tree.leaves(node), jax.tree.leaves(flags), strict=True)
    float_flags = [flag for leaf, flag in leaves if is_float(leaf)]
    return bool(float_flags) and all(float_flags)


def _keep_precision(layer: Any) -> Any:
    """Return a layer that computes in the dtype of its own arrays."""
    precise = copy.copy(layer)
    object.__setattr__(precise, "__class__", _make_class(type(layer)))
    return precise


@cache
def _make_class(cls: type) -> type:
    """Return a subclass of a layer that casts what it gets and returns."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = np.result_type(
            *[leaf.dtype for leaf in jax.tree.leaves(self) if is_float(leaf)] or [np.float32]
        )
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_float(leaf)]
        # The first argument says what the layers around this one compute in; a state has its own.
        outer_dtype = inputs[0].dtype if inputs else dtype
        args, kwargs = jax.tree.map(
            lambda leaf: (
                leaf.astype(dtype) if is_float(leaf) and leaf.dtype == outer_dtype else leaf
            ),
            (args, kwargs),
        )
        outputs = cls.__call__(self, *args, **kwargs)
        if (
            isinstance(outputs, tuple)
            and len(outputs) == 2
            and isinstance(outputs[1], eqx.nn.State)
        ):
            return cast_floats(outputs[0], outer_dtype), outputs[1]
        return cast_floats(outputs, outer_dtype)

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__})


def cast_task(
    task: fg.Task,
    dtype: Any,
    cast_batch: Callable[[Any], Any],
    output: Any,
    exclude: Selector | None,
) -> fg.Task:
    """Return a task whose model computes in a dtype, and whose loss does not.

    Args:
        task: the task.
        dtype: in which its model computes.
        cast_batch: returns the batch as the model gets it.
        output: the dtype of the predictions that loss and metrics get.
        exclude: what of the task is left as it is.
    """
    forward = task.forward or apply_model

    def forward_in_dtype(model: Any, batch: Any, ctx: fg.Context) -> Any:
        result = forward(model, cast_batch(batch), ctx)
        if isinstance(result, fg.Output):
            return result.replace(preds=cast_floats(result.preds, output))
        return cast_floats(result, output)

    casted = cast_module(task, dtype, exclude)
    object.__setattr__(casted, "forward", forward_in_dtype)
    return casted


def cast_output(result: Any, dtype: Any, model_state: Any) -> Any:
    """Return what a step returned, with floating-point arrays of a dtype.

    Args:
        result: an `fg.Output`, a bare loss, or predictions.
        dtype: of losses and predictions.
        model_state: whose dtypes the new model state gets.
    """
    if not isinstance(result, fg.Output):
        return cast_floats(result, dtype)
    new_state = result.model_state
    return result.replace(
        loss=cast_floats(result.loss, dtype),
        losses=cast_floats(result.losses, dtype),
        preds=cast_floats(result.preds, dtype),
        model_state=None if new_state is None else cast_like(new_state, model_state),
    )
