"""What a program is built from: update rule, module and state, shardings, metrics of a step."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jaxtyping import Array, Key

from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import AccumulatedMetric
from fulgurite._src.model.module import (
    Module,
    OptimizerSpec,
    as_optimizer_specs,
    get_method,
    is_floating_array,
)
from fulgurite._src.plugins.answers import check_not_among, record_answers
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.rng import fold_name, make_root_key
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.initializer import call_by_operations
from fulgurite._src.training.metric_window import MetricWindow
from fulgurite._src.training.nonfinite import NonFiniteTracker
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import ModelInit, TrainState
from fulgurite._src.training.update import GradientUpdate, UpdateRule, check_can_rewrap
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import (
    check_same_structure,
    copy_arrays,
    format_tree,
    is_array,
    put_constant,
)
from fulgurite._src.tree.typecheck import check_module_fields, check_static_fields
from fulgurite.errors import ModelError, PluginError

# What JAX raises where Python needs the value of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_HOW_WITHOUT_VALUES = (
    "Arrays have no values there, because one program serves all modules of a kind: make a number "
    "such as a learning rate a Python number or a static field, eqx.field(static=True); an "
    "optimizer that needs the initial weights can keep the params of its init in its state"
)


class WindowSpec(NamedTuple):
    """The metrics of training steps, as `jax.ShapeDtypeStruct`s.

    Attributes:
        metrics: of all steps.
        optional: the names of those that batches of some structures do not have.
    """

    metrics: MetricAccumulator
    optional: tuple[str, ...]


class ConfiguredRule(NamedTuple):
    """The update rule of a program, with the optimizers that were configured for it.

    Attributes:
        update_rule: how a batch becomes an update.
        origin: who configured its optimizers, in words for errors.
    """

    update_rule: UpdateRule
    origin: str


def build_update_rule(services: Services, model_init: ModelInit) -> ConfiguredRule:
    """Return the update rule for a module, with the optimizers and wrappers of plugins, and who
    configured its optimizers.

    Args:
        services: of the engine.
        model_init: where the module comes from.

    Raises:
        ModelError: there is nothing to train, or an optimizer needs values that are not there.
        PluginError: the optimizers need the update rule of a plugin.
    """
    rules: list[ConfiguredRule] = []

    # Traced arrays are arrays to `eqx.is_array`, which masks of weight decay go by, and shapes are
    # not: with shapes, such a mask was False everywhere. What is computed without the module is
    # computed at once, so that an optimizer may keep it. The rule leaves the trace through the
    # list, because it is not an array.
    def build(arrays: Any) -> None:
        module, _ = build_module(services.plugins, model_init, arrays, jax.random.key(0))
        with jax.ensure_compile_time_eval():
            rules.append(_build_update_rule_for(services, module))

    jax.eval_shape(build, model_init.arrays)
    return rules[0]


def _build_update_rule_for(services: Services, module: Any) -> ConfiguredRule:
    get_method(module, "training_step")
    optimizers, origin = _get_optimizers(services, module)
    hooks = services.plugins.hooks
    answer = hooks.make_update_rule.ask(module=module, optimizers=optimizers)
    if answer is not None:
        _, update_rule = answer
    else:
        first = next(iter(optimizers.values()))
        if len(optimizers) != 1 or type(first) is not OptimizerSpec:
            raise PluginError(
                f"the optimizers {', '.join(optimizers)} need an update rule of a plugin: add "
                "MultiOptimizer() of fulgurite-optimizers to the plugins, or give one "
                "fg.OptimizerSpec"
            )
        update_rule = GradientUpdate(first)
    policy = services.settings.on_nonfinite
    update_rule = hooks.wrap_update_rule.fold(
        "update_rule", update_rule, accept=_accept_rule, module=module, on_nonfinite=policy
    )
    _check_trainable(services, module, update_rule)
    return ConfiguredRule(update_rule, origin)


def _accept_rule(plugin: RegisteredPlugin, update_rule: UpdateRule | None) -> UpdateRule | None:
    if update_rule is not None:
        check_can_rewrap(update_rule)
    return update_rule


def _check_trainable(services: Services, module: Any, update_rule: UpdateRule) -> None:
    """Raise `ModelError` if a module has arrays, and none that a gradient could change."""
    leaves = leaves_with_paths(module)
    has_floats = any(is_floating_array(leaf) for _, leaf in leaves)
    # The rule of a plugin may train others, and the `train_step` of a subclass anything.
    is_trained = any(jax.tree.leaves(update_rule.trainable_mask(module)))
    if has_floats or is_trained or services.custom_train_step is not None:
        return
    arrays = [f"{path} is {format_tree(leaf)}" for path, leaf in leaves if is_array(leaf)]
    if arrays:
        raise ModelError(
            f"{type(module).__name__} has no array of floating-point numbers, so there is "
            f"nothing to train: {', '.join(arrays)}. Make the weights arrays of floats, such "
            "as jnp.zeros(4)"
        )


def _get_optimizers(services: Services, module: Any) -> tuple[dict[str, OptimizerSpec], str]:
    """Return the optimizers of a plugin or of the module, after the gradient transformations of
    plugins, and who configured them."""
    origin = source = f"{type(module).__name__}.configure_optimizers"
    try:
        answer = services.plugins.hooks.configure_optimizers.ask(module=module)
        if answer is None:
            configured = get_method(module, "configure_optimizers")(module)
        else:
            plugin, configured = answer
            source = f"hook configure_optimizers of {plugin.name}"
            origin += f", or the {source},"
    except _NEEDS_VALUES as error:
        raise ModelError(
            f"{origin} asked for the value of an array of the module. {_HOW_WITHOUT_VALUES}"
        ) from error
    optimizers = dict(as_optimizer_specs(configured, source))
    for name, optimizer in optimizers.items():
        transform = _get_gradient_transform(services, module, name)
        optimizers[name] = replace(optimizer, gradient_transform=transform)
    return optimizers, origin


def _get_gradient_transform(
    services: Services, module: Any, optimizer: str
) -> optax.GradientTransformation:
    # Only where a plugin takes it: JAX compiles what makes a key, and once more for these values
    # within a trace.
    def get_arguments(plugin: RegisteredPlugin) -> dict[str, Any]:
        root = fold_name(make_root_key(services.settings.seed), f"optimizer:{optimizer}")
        return {"key": fold_name(root, f"plugin:{plugin.name}")}

    return services.plugins.hooks.gradient_transform.chain(
        per_plugin=get_arguments, module=module, optimizer=optimizer
    )


def init_train_state(
    plugins: PluginManager,
    update_rule: UpdateRule,
    window: WindowSpec,
    model_init: ModelInit,
    arrays: Any,
    key: Key[Array, ""],
    params_key: Key[Array, ""],
) -> TrainState:
    """Return a new train state. Traced, or made operation by operation.

    Args:
        plugins: of the engine.
        update_rule: initializes the optimizer state.
        window: the metrics of its window.
        model_init: where the module comes from.
        arrays: of its model.
        key: the root key.
        params_key: for a model that is yet to be made.
    """
    module, model_state = build_module(plugins, model_init, arrays, params_key)
    check_module_fields(module)
    check_static_fields(module)
    return TrainState(
        step=put_constant(np.int32(0)),
        module=module,
        model_state=model_state,
        opt_state=copy_arrays(call_by_operations(update_rule.init, module)),
        key=key,
        metric_window=MetricWindow.zeros(*window),
        nonfinite=NonFiniteTracker.init(module),
        plugin_states=init_plugin_states(plugins, module, model_state, key),
    )


def trace_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], origin: str
) -> tuple[ClosedJaxpr, Any]:
    """Return the program of a function, and its result with `jax.ShapeDtypeStruct`s for arrays.

    Args:
        function: of trees of arrays and of anything else.
        arguments: with arrays, or with specs of them.
        origin: who configured the optimizers, for errors.

    Raises:
        PluginError: a hook returned an array of another trace, one that is over.
        ModelError: the update rule holds an array of the module that it was built for, which
            is such an array.
    """
    with record_answers() as answers:
        program, arrays, static = eqx.filter_make_jaxpr(function)(*arguments)
    held = [const for const in program.consts if isinstance(const, Tracer)]
    if held:
        check_not_among(held, answers)
        raise ModelError(
            f"{origin} gave an optimizer an array of the module, or one "
            f"computed from it, {format_tree(held[0])}. {_HOW_WITHOUT_VALUES}"
        )
    return program, eqx.combine(arrays, static)


def unite_metric_specs(specs: Iterable[MetricAccumulator]) -> WindowSpec:
    """Return the metrics of steps on batches of several structures together.

    Args:
        specs: the metrics of a step on each structure.

    Raises:
        ModelError: two structures have a metric of one name and of different kinds.
    """
    united: dict[str, AccumulatedMetric] = {}
    names_by_structure = []
    for structure_metrics in specs:
        metrics = structure_metrics.by_name
        names_by_structure.append(metrics.keys())
        for name, spec in metrics.items():
            check_same_structure(
                united.setdefault(name, spec),
                spec,
                f"the metric {name!r} on batches of another structure",
            )
    in_all = set.intersection(*map(set, names_by_structure))
    optional = sorted(united.keys() - in_all)
    return WindowSpec(MetricAccumulator.from_metrics(united), tuple(optional))


def build_module(
    plugins: PluginManager, model_init: ModelInit, arrays: Any, key: Key[Array, ""]
) -> tuple[Any, eqx.nn.State | None]:
    """Return the module as plugins transform it, and its state. Traced.

    Args:
        plugins: of the engine.
        model_init: where the module comes from.
        arrays: of its model.
        key: for a model that is yet to be made, and for what plugins add to it.
    """
    module, model_state = model_init.build(arrays, key)

    def transform(module: Any, key: Key[Array, ""]) -> Any:
        def get_key(plugin: RegisteredPlugin) -> dict[str, Any]:
            return {"key": fold_name(key, f"transform_module:{plugin.name}")}

        return plugins.hooks.transform_module.fold("module", module, per_plugin=get_key)

    if isinstance(module, Module):
        module = module.apply_transform(transform, key)
    else:
        module = transform(module, key)
    return module, model_state


def init_plugin_states(
    plugins: PluginManager, module: Any, model_state: Any, key: Key[Array, ""]
) -> dict[str, Any]:
    """Return the state of each plugin that has one, by the plugin's name. Traced.

    Args:
        plugins: of the engine.
        module: the module.
        model_state: its `eqx.nn.State`, or None.
        key: the root key.

    Raises:
        PluginError: a plugin's state holds something that is not an array.
    """
    answers = plugins.hooks.init_plugin_state.each(
        per_plugin=lambda plugin: {"key": fold_name(key, f"plugin:{plugin.name}")},
        module=module,
        model_state=model_state,
    )
    plugin_states = {}
    for plugin, plugin_state in answers:
        name = plugin.name
        if isinstance(module, Module):
            plugin_state = module.adapt_plugin_state(name, plugin_state)
        for path, leaf in leaves_with_paths(plugin_state):
            if not is_array(leaf):
                where = path or "it"
                raise PluginError(
                    f"plugin {name!r}, hook init_plugin_state: {where} is {leaf!r}; a plugin's "
                    "state holds nothing but arrays: turn numbers into arrays, and leave others "
                    "out with eqx.filter(tree, eqx.is_array)"
                )
        if plugin_state is not None:
            plugin_states[name] = plugin_state
    return copy_arrays(plugin_states)


def get_state_shardings(
    plugins: PluginManager, sharding: ShardingStrategy, spec: TrainState
) -> list[NamedSharding] | None:
    """Return a sharding for each array of a train state, in the order of its leaves.

    Args:
        plugins: of the engine, each of which may say where its own state lies.
        sharding: says where everything else lies.
        spec: the state, with `jax.ShapeDtypeStruct`s for arrays.

    Returns:
        The shardings; None where the state is not sharded.

    Raises:
        PluginError: the strategy did not return one for each array.
    """
    shardings = sharding.shard_state(spec)
    if shardings is None:
        return None
    answers = plugins.hooks.plugin_state_sharding.each(
        per_plugin=lambda plugin: {"plugin_state": spec.plugin_states.get(plugin.name)},
        mesh=sharding.mesh,
    )
    for plugin, answer in answers:
        if answer is not None:
            plugin_states = {**shardings.plugin_states, plugin.name: answer}
            shardings = shardings.replace(plugin_states=plugin_states)
    leaves = jax.tree.leaves(shardings)
    arrays = [leaf for leaf in jax.tree.leaves(spec) if isinstance(leaf, jax.ShapeDtypeStruct)]
    are_named = all(isinstance(leaf, NamedSharding) for leaf in leaves)
    if len(leaves) != len(arrays) or not are_named:
        raise PluginError(
            f"shard_state of {sharding.name} must return a NamedSharding for each of the "
            f"{len(arrays)} arrays of the state and None for its other leaves; it returned "
            f"{len(leaves)} leaves"
        )
    return leaves


def with_shardings(spec: TrainState, shardings: list[Any]) -> TrainState:
    """Return the spec of a state with a sharding for each array.

    Args:
        spec: a state of `jax.ShapeDtypeStruct`s.
        shardings: of its arrays, in the order of the leaves.
    """
    remaining = iter(shardings)

    def add_sharding(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=next(remaining))
        return leaf

    return jax.tree.map(add_sharding, spec)
