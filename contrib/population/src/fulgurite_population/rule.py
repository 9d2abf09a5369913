"""The update rule of a population: each member is updated by the rule of a run of its own."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError, did_you_mean
from jaxtyping import Array, Bool, PyTree

from fulgurite_population.members import (
    Members,
    average_alive,
    count_examples,
    list_paths,
    make_member_ctx,
    map_members,
)
from fulgurite_population.metrics import describe_members, take_metric


class PopulationUpdate(fg.UpdateRule):
    """Updates every member by the rule within, and freezes members that are not finite.

    Args:
        rule: the rule within, which sees one member.
        hyperparameters: `(members,)` each, by the names of `optax.inject_hyperparams`.
    """

    def __init__(self, rule: fg.UpdateRule, hyperparameters: Mapping[str, Array]) -> None:
        self.rule = rule
        self.hyperparameters = hyperparameters
        # By the identity of the rule within: another object would be another executable.
        self._rewrapped: dict[int, PopulationUpdate] = {}

    def init(self, module: Members) -> PyTree:
        _check_members(module)
        states = map_members(self.rule.init, module.members, exact=False)
        return set_hyperparameters(states, self.hyperparameters, list_paths(module.members))

    def trainable_mask(self, module: Members) -> PyTree[bool]:
        _check_members(module)
        return replace(module, members=self.rule.trainable_mask(module.members), frozen_at=False)

    def list_optimizers(self) -> dict[str, fg.OptimizerSpec]:
        return self.rule.list_optimizers()

    def for_step(self, step: int, step_range: fg.StepRange) -> fg.UpdateRule:
        rule = self.rule.for_step(step, step_range)
        if rule is self.rule:
            return self
        rewrapped = PopulationUpdate(rule, self.hyperparameters)
        return self._rewrapped.setdefault(id(rule), rewrapped)

    def __call__(
        self, forward: Callable[..., fg.Output], state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        module: Members = state.module
        _check_members(module)

        def update(parts: PyTree, key: Any) -> tuple[PyTree, fg.Output]:
            new, output = self.rule(
                forward,
                _put_parts(state.replace(key=key), parts),
                batch,
                make_member_ctx(ctx, key, parts[1]),
            )
            return _get_parts(new), output.replace(model_state=None)

        before = _get_parts(state.replace(module=module.members))
        after, output = module.map(update, _copy_parts(before), module.make_keys())
        is_bad = ~find_finite(before[0], after[0], output)
        frozen_at = jnp.where(module.is_alive & is_bad, state.step + 1, module.frozen_at)
        is_alive = frozen_at < 0
        parts = select_members(is_alive, after, before)
        new = _put_parts(state, parts)
        new = new.replace(module=replace(module, members=new.module, frozen_at=frozen_at))
        return new, self._merge_outputs(module, output, is_alive, new, batch, ctx)

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        module: Members = state.module

        def finalize(parts: PyTree) -> PyTree:
            return _get_parts(self.rule.finalize(_put_parts(state, parts)))

        before = _get_parts(state.replace(module=module.members))
        after = module.map(finalize, _copy_parts(before))
        new = _put_parts(state, select_members(module.is_alive, after, before))
        return new.replace(module=replace(module, members=new.module))

    def _merge_outputs(
        self,
        module: Members,
        output: fg.Output,
        is_alive: Bool[Array, " members"],
        state: fg.TrainState,
        batch: Any,
        ctx: fg.Context,
    ) -> fg.Output:
        """Return one output for all members: what the engine checks and logs is of those alive."""
        assert output.loss is not None  # the engine's forward pass sees to it
        metrics = describe_members(output, is_alive, count_examples(batch, ctx.mask))
        for name, values in output.losses.items():
            if name != "loss":
                metrics |= {f"{name}[{index}]": values[index] for index in range(len(is_alive))}
        num_frozen = jnp.sum(~is_alive, dtype=jnp.float32)
        metrics["frozen"] = fg.metrics.LastValue.from_values(num_frozen)
        gradients = {}
        for name in ("raw_grads", "grads", "updates"):
            zeros = jax.tree.map(jnp.zeros_like, getattr(output, name))
            members = select_members(is_alive, getattr(output, name), zeros)
            gradients[name] = replace(module, members=members, frozen_at=None)
        return output.replace(
            loss=average_alive(output.loss, is_alive),
            losses={name: average_alive(value, is_alive) for name, value in output.losses.items()},
            metrics=metrics,
            media={
                f"{name}[{index}]": take_metric(value, index)
                for name, value in output.media.items()
                for index in range(len(is_alive))
            },
            model_state=state.model_state,
            **gradients,
        )


def find_finite(before: PyTree, after: PyTree, output: fg.Output) -> Bool[Array, " members"]:
    """Return which members had a finite step: loss, gradients, and parameters that were finite.

    Args:
        before: the members before the update.
        after: the members after it.
        output: of the steps, stacked.
    """
    checked = [output.loss, *jax.tree.leaves((output.grads, after))]
    is_finite = _are_all_finite(checked)

    def find_changed() -> Bool[Array, " members"]:
        # A parameter that never was finite, such as a mask of -inf, is no failure.
        flags = [_are_all_finite([output.loss, *jax.tree.leaves(output.grads)])]
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if eqx.is_inexact_array(new):
                flags.append(_are_all_finite([new]) | ~_are_all_finite([old]))
        return jnp.stack(flags).all(axis=0)

    return jax.lax.cond(is_finite.all(), lambda: is_finite, find_changed)


def select_members(is_alive: Bool[Array, " members"], after: PyTree, before: PyTree) -> PyTree:
    """Return `after` for the members that are alive, `before` for the others.

    Args:
        is_alive: which members are alive.
        after: every array has a leading axis of members.
        before: a tree of the same structure.
    """

    def choose(new: Any, old: Any) -> Any:
        if not eqx.is_array(new):
            return new
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            return jax.vmap(jnp.where)(is_alive, new, old)
        return jnp.where(is_alive.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, after, before)


def set_hyperparameters(
    opt_state: PyTree, values: Mapping[str, Array], paths: Collection[str]
) -> PyTree:
    """Return an optimizer state with hyperparameters of each member.

    Args:
        opt_state: with the states of `optax.inject_hyperparams`, stacked over members.
        values: `(members,)` each, by name.
        paths: of the arrays of the module, which may have been meant.

    Raises:
        ConfigurationError: the state has no such hyperparameter, or a schedule computes it.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(opt_state)
    names = [get_hyperparameter(path) or "" for path, _ in leaves]
    scheduled = {get_scheduled(path) for path, _ in leaves}
    for name in values:
        if name in scheduled:
            raise ConfigurationError(
                f"Population: vary has {name!r}, which a schedule computes anew at each step: give "
                "optax.inject_hyperparams a number for it. To scale a schedule, chain "
                "optax.inject_hyperparams(optax.scale)(step_size=1.0) behind the optimizer, and "
                "vary step_size"
            )
        if name not in names:
            raise ConfigurationError(
                f"Population: vary has {name!r}, which is neither the path of an array of the "
                "module nor a hyperparameter in the optimizer's state. "
                f"{did_you_mean(name, {*filter(None, names), *paths})} A hyperparameter is made "
                "by optax.inject_hyperparams(optax.adam)(learning_rate=...). What is no array, "
                "such as a width, cannot be vmapped: use a sweep of several runs"
            )
    replaced = [
        values[name].astype(leaf.dtype) if name in values else leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    return tree.unflatten(replaced)


def get_hyperparameter(path: Sequence[Any]) -> str | None:
    """Return the name of the hyperparameter at a path of an optimizer state; None for others."""
    is_inside = len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams"
    return str(path[-1].key) if is_inside else None


def get_scheduled(path: Sequence[Any]) -> str | None:
    """Return the name of the hyperparameter whose schedule has its state at a path of an optimizer
    state; None for others."""
    for key, next_key in itertools.pairwise(path):
        if getattr(key, "name", None) == "hyperparams_states":
            return str(next_key.key)
    return None


def _check_members(module: Any) -> None:
    """Raise a ModelError if a rule around that of the population has taken the population apart."""
    if not isinstance(module, Members):
        raise ModelError(
            f"Population updates a module of type Members, and a plugin that is listed after it "
            f"wraps its update rule and hands it {type(module).__name__}: list that plugin before "
            "Population"
        )


def _get_parts(state: fg.TrainState) -> PyTree:
    """Return what an update rule may change."""
    return state.module, state.model_state, state.opt_state


def _put_parts(state: fg.TrainState, parts: PyTree) -> fg.TrainState:
    module, model_state, opt_state = parts
    return state.replace(module=module, model_state=model_state, opt_state=opt_state)


def _copy_parts(parts: PyTree) -> PyTree:
    """Return other objects of the same arrays: an `eqx.nn.State` can be used once."""
    return jax.tree.map(lambda leaf: leaf, parts)


def _are_all_finite(leaves: list[Any]) -> Bool[Array, " members"]:
    """Return which members have nothing but finite numbers in these arrays.

    Products with zeros are what CPU backends vectorize.
    """
    rows = [leaf.reshape(len(leaf), -1) for leaf in leaves if eqx.is_inexact_array(leaf)]
    marks = [row @ jnp.zeros(row.shape[1], row.dtype) for row in rows]
    return jnp.stack([jnp.isfinite(mark) for mark in marks]).all(axis=0)
