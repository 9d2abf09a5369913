"""What a user wrote and nothing uses: told at the start of a fit."""

from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from fulgurite._src.data.sources import ArrayData, as_data
from fulgurite._src.execution.program import Program
from fulgurite._src.model.module import Module
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import GradientUpdate
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.select import select_from_parts
from fulgurite._src.tree.specs import is_array


def describe_what_has_no_effect(
    services: Services, data: Any, program: Program, state: TrainState
) -> list[str]:
    """Return sentences about what the user wrote and nothing uses.

    Args:
        services: of the engine.
        data: the data source of training.
        program: the training program.
        state: to train from.
    """
    settings = services.settings
    return [
        *describe_hidden_hooks(state.module, services.plugins.hooks),
        *describe_missing_weights(state.module),
        *describe_unused_seed(settings.seed, data),
        *describe_decayed_buffers(program),
        *describe_hidden_nonfinite_transforms(program, settings.on_nonfinite),
    ]


def describe_hidden_hooks(module: Any, hook_names: Iterable[str]) -> list[str]:
    """Return a sentence about methods of a module that have the name of a hook, which only plugins
    have, and that no other method of it mentions.

    Args:
        module: the module.
        hook_names: of all hooks.
    """
    classes = [cls for cls in type(module).__mro__ if cls not in Module.__mro__]
    methods = {name: value for cls in reversed(classes) for name, value in vars(cls).items()}
    functions = [getattr(value, "__wrapped__", value) for value in methods.values()]
    mentioned = {
        name
        for function in functions
        if isinstance(function, FunctionType)
        for name in function.__code__.co_names
    }
    hidden = [
        name
        for name in hook_names
        if callable(methods.get(name)) and not hasattr(Module, name) and name not in mentioned
    ]
    if not hidden:
        return []
    kind = type(module).__name__
    return [
        f"nothing calls {', '.join(f'{kind}.{name}' for name in hidden)}: this is the name of a "
        "hook, which a plugin has and a module does not. Move it to a class with @fg.hookimpl, and "
        "give that to Engine(plugins=[...])"
    ]


def describe_missing_weights(module: Any) -> list[str]:
    """Return a sentence if a module has no arrays, so that no step changes it."""
    if any(map(is_array, jax.tree.leaves(module))):
        return []
    return [f"{type(module).__name__} has no arrays, so nothing is trained"]


def describe_unused_seed(seed: int, data: Any) -> list[str]:
    """Return a sentence if the order of the data does not follow from the seed of the engine.

    Args:
        seed: of the engine; 0 is what it has without any.
        data: the data source.
    """
    source = as_data(data).source
    is_hidden = isinstance(source, ArrayData) and source.shuffle and source.seed not in (None, seed)
    if not is_hidden or not seed:
        return []
    return [
        f"Engine(seed={seed}) does not change the order of the data, because ArrayData("
        f"seed={source.seed}) has its own: leave that out, so that both follow from one"
    ]


def describe_hidden_nonfinite_transforms(program: Program, policy: NonFinitePolicy) -> list[str]:
    """Return a sentence about transformations in an optimizer that are for gradients which are not
    finite, where these never become an update.

    Args:
        program: the training program.
        policy: of the engine.
    """
    if policy == "ignore":
        return []
    opt_state = program.state_spec.opt_state
    if isinstance(program.update_rule, GradientUpdate):
        # What plugins transform comes before the check.
        opt_state = opt_state[1]
    kinds = {optax.ZeroNansState: "zero_nans", optax.ApplyIfFiniteState: "apply_if_finite"}
    names = [name for kind, name in kinds.items() if _contains(opt_state, kind)]
    if not names:
        return []
    verb = "acts" if len(names) == 1 else "act"
    effect = "ends the fit" if policy == "raise" else "is skipped"
    return [
        f"optax.{' and optax.'.join(names)} of the optimizer never {verb}: with "
        f"Engine(on_nonfinite={policy!r}) a step whose gradient is not finite {effect} before. "
        "Give on_nonfinite='ignore' if the optimizer is to deal with it"
    ]


def describe_decayed_buffers(program: Program) -> list[str]:
    """Return a sentence about arrays without a gradient that the optimizer changes nevertheless, as
    weight decay does.

    Args:
        program: the training program.
    """
    update_rule = program.update_rule
    without_gradient = (
        program.list_without_gradient() if isinstance(update_rule, GradientUpdate) else []
    )
    if not without_gradient or not isinstance(update_rule, GradientUpdate):
        return []
    module = program.state_spec.module
    params = eqx.filter(module, update_rule.spec.param_mask(module))
    are_changed = jax.device_get(
        jax.jit(partial(_update_without_gradient, update_rule, module, params))()
    )
    paths = [path for path, _ in leaves_with_paths(params)]
    changed = [
        path
        for path, is_changed in zip(paths, are_changed, strict=True)
        if is_changed and path in without_gradient
    ]
    if not changed:
        return []
    return [
        f"the optimizer changes {', '.join(changed)}, such as by weight decay, although the loss "
        "gives no gradient there. Leave such arrays out: fg.OptimizerSpec(optimizer, params=...), "
        "or a mask of the weight decay"
    ]


def _update_without_gradient(update_rule: GradientUpdate, module: Any, params: Any) -> list[Any]:
    """Return which parameters an optimizer changes if all are ones and have a gradient of zero;
    traced.

    Args:
        update_rule: with the optimizer.
        module: the module, as shapes.
        params: what is updated of it.
    """
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    optimizer = optax.with_extra_args_support(update_rule.spec.optimizer)
    value = jnp.zeros(())

    def count_a_step(leaf: Any) -> Any:
        # The learning rate may begin with zero.
        is_count = jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.integer)
        return leaf + 1 if is_count else leaf

    with select_from_parts(module):
        opt_state = jax.tree.map(count_a_step, optimizer.init(ones))
        updates, _ = optimizer.update(
            zeros, opt_state, ones, value=value, grad=zeros, value_fn=lambda _: value
        )
    leaves = jax.tree.leaves(updates)
    return [jnp.any(jnp.isfinite(leaf) & (leaf != 0)) for leaf in leaves]


def _contains(tree: Any, kind: type) -> bool:
    """Return whether a node of a tree is of exactly this type."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) is kind)
    return any(type(node) is kind for node in nodes)
