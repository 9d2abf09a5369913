"""The update rule of a population: each member is updated by the rule of a run of its own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ModelError
from jaxtyping import Array, Bool, PyTree

from fulgurite_population.hyperparameters import set_hyperparameters
from fulgurite_population.members import (
    PLUGINS_WITHIN,
    Members,
    average_members,
    list_paths,
    make_member_ctx,
    map_together,
)
from fulgurite_population.metrics import describe_members, select_members, take_metric


class MemberParts(NamedTuple):
    """What the update of a member may change; stacked over members.

    Attributes:
        module: the model.
        model_state: its `eqx.nn.State`, or None.
        opt_state: of the rule within.
        plugin_states: of the plugins that act within a member, by name.
    """

    module: PyTree
    model_state: Any
    opt_state: PyTree
    plugin_states: dict[str, PyTree]


class PopulationUpdate(fg.UpdateRule):
    """Updates every member by the rule within. A member whose step is not finite leaves it out or
    is frozen, as a run of its own leaves it out or ends.

    Args:
        update_rule: the rule within, which sees one member.
        hyperparameters: `(members,)` each, by the names of `optax.inject_hyperparams`.
        on_nonfinite: what the engine does with a step that is not finite.
    """

    # Of each member. What the engine looked at would have to leave the members, too.
    checks_gradients = True

    def __init__(
        self,
        update_rule: fg.UpdateRule,
        hyperparameters: Mapping[str, np.ndarray],
        on_nonfinite: fg.NonFinitePolicy,
    ) -> None:
        self.update_rule = update_rule
        self.needs_mean_loss = update_rule.needs_mean_loss
        self.hyperparameters = hyperparameters
        self.on_nonfinite: fg.NonFinitePolicy = on_nonfinite
        # By the identity of the rule within: another object would be another executable.
        self._rewrapped: dict[int, PopulationUpdate] = {}

    def init(self, module: Members) -> PyTree:
        _check_members(module)
        states = map_together(self.update_rule.init, module.members)
        return set_hyperparameters(states, self.hyperparameters, list_paths(module.members))

    def trainable_mask(self, module: Members) -> PyTree[bool]:
        _check_members(module)
        members = self.update_rule.trainable_mask(module.members)
        return replace(module, members=members, frozen_at=False, skipped=False)

    def list_optimizers(self) -> dict[str, fg.OptimizerSpec]:
        return self.update_rule.list_optimizers()

    def for_step(self, step: int, step_range: fg.StepRange) -> fg.UpdateRule:
        update_rule = self.update_rule.for_step(step, step_range)
        if update_rule is self.update_rule:
            return self
        rewrapped = PopulationUpdate(update_rule, self.hyperparameters, self.on_nonfinite)
        return self._rewrapped.setdefault(id(update_rule), rewrapped)

    def __call__(
        self, forward: Callable[..., fg.Output], state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        module: Members = state.module
        _check_members(module)

        def update(
            parts: MemberParts, key: Any, num_skipped: Any
        ) -> tuple[MemberParts, fg.Output, Any]:
            nonfinite = replace(state.nonfinite, skipped=num_skipped)
            member_state = _put_parts(state.replace(key=key, nonfinite=nonfinite), parts)
            member_ctx = make_member_ctx(ctx, key, parts.model_state)
            member_ctx = replace(member_ctx, plugin_states=member_state.plugin_states)
            new, output = self.update_rule(forward, member_state, batch, member_ctx)
            _check_plugin_states(member_state, new)
            metrics = fg.collect_metrics(output, batch, member_ctx)
            output = output.replace(model_state=None, metrics=metrics)
            if not module.exact:
                return _get_parts(new), output, None
            # The same look as in a run of its own: without it XLA fuses the rest of the step
            # differently, which costs the last bit.
            is_bad, _, _ = nonfinite.check(output, new.module, new.module, is_sharded=False)
            return _get_parts(new), output, is_bad

        before = _get_parts(state.replace(module=module.members))
        # The engine counts the steps that all members leave out.
        num_skipped = state.nonfinite.skipped + module.skipped
        after, output, is_bad = module.map(
            update, _copy_parts(before), module.make_keys(), num_skipped
        )
        if is_bad is None:
            is_bad = ~compute_is_finite(before.module, after.module, output)
        new_module, is_updated = self._judge(module, is_bad, state.step + 1)
        parts = select_members(is_updated, after, before)
        if self.on_nonfinite == "skip":
            # Theirs are the plugins with `kept_on_skip`, such as that of a loss scale.
            parts = parts._replace(plugin_states=after.plugin_states)
        new = _put_parts(state, parts)
        new = new.replace(module=replace(new_module, members=new.module))
        return new, self._merge_outputs(new_module, output, is_updated, new)

    def _judge(
        self, module: Members, is_bad: Bool[Array, " members"], step: Array
    ) -> tuple[Members, Bool[Array, " members"]]:
        """Return the module with what becomes of members that were not finite, and which members
        are updated.

        Args:
            module: before the step.
            is_bad: which members were not finite.
            step: the number of the step.
        """
        if self.on_nonfinite == "ignore":
            return module, module.is_alive
        if self.on_nonfinite == "skip":
            is_skipping = module.is_alive & is_bad
            skipped = module.skipped + is_skipping.astype(jnp.int32)
            return replace(module, skipped=skipped), module.is_alive & ~is_bad
        frozen_at = jnp.where(module.is_alive & is_bad, step, module.frozen_at)
        return replace(module, frozen_at=frozen_at), frozen_at < 0

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        module: Members = state.module

        def finalize(parts: MemberParts) -> MemberParts:
            return _get_parts(self.update_rule.finalize(_put_parts(state, parts)))

        before = _get_parts(state.replace(module=module.members))
        after = module.map(finalize, _copy_parts(before))
        new = _put_parts(state, select_members(module.is_alive, after, before))
        return new.replace(module=replace(module, members=new.module))

    def _merge_outputs(
        self,
        module: Members,
        output: fg.Output,
        is_updated: Bool[Array, " members"],
        state: fg.TrainState,
    ) -> fg.Output:
        """Return one output for all members: what the engine checks and logs is of those that were
        updated.

        Args:
            module: after the step.
            output: of the members, stacked.
            is_updated: which members were updated.
            state: after the step.
        """
        is_measured = is_updated if self.on_nonfinite == "skip" else None
        metrics = describe_members(output.metrics, module.is_alive, is_measured)
        if self.on_nonfinite == "skip":
            num_skipped = state.nonfinite.skipped + module.skipped
            for index in range(len(module.seeds)):
                value = fg.metrics.LastValue.from_values(num_skipped[index])
                metrics[f"skipped_steps[{index}]"] = value
        num_frozen = jnp.sum(~module.is_alive, dtype=jnp.float32)
        metrics["frozen"] = fg.metrics.LastValue.from_values(num_frozen)
        gradients = {}
        for name in ("raw_grads", "grads", "updates"):
            values = getattr(output, name)
            zeros = jax.tree.map(jnp.zeros_like, values)
            members = select_members(is_updated, values, zeros)
            gradients[name] = replace(module, members=members, frozen_at=None, skipped=None)
        loss = None if output.loss is None else average_members(output.loss, is_updated)
        return output.replace(
            loss=loss,
            losses={
                name: average_members(value, is_updated) for name, value in output.losses.items()
            },
            weight=None,
            loss_weights={
                name: average_members(value, is_updated)
                for name, value in output.loss_weights.items()
            },
            is_update=None if output.is_update is None else jnp.any(output.is_update),
            metrics=metrics,
            media={
                f"{name}[{index}]": take_metric(value, index)
                for name, value in output.media.items()
                for index in range(len(module.seeds))
            },
            model_state=state.model_state,
            **gradients,
        )


def compute_is_finite(before: PyTree, after: PyTree, output: fg.Output) -> Bool[Array, " members"]:
    """Return which members had a finite step: losses, gradients, and parameters that were finite.

    Args:
        before: the members before the update.
        after: the members after it.
        output: of the steps, stacked.
    """
    losses = [output.loss] if output.loss is not None else [*output.losses.values()]
    results = [*losses, *jax.tree.leaves(output.grads)]
    is_finite = _are_all_finite([*results, *jax.tree.leaves(after)])

    def find_changed() -> Bool[Array, " members"]:
        # A parameter that never was finite, such as a mask of -inf, is not a failure.
        flags = [_are_all_finite(results)]
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if eqx.is_inexact_array(new):
                flags.append(_are_all_finite([new]) | ~_are_all_finite([old]))
        return jnp.stack(flags).all(axis=0)

    return jax.lax.cond(is_finite.all(), lambda: is_finite, find_changed)


def _check_members(module: Any) -> None:
    """Raise a ModelError if a rule around that of the population has taken the population apart."""
    if not isinstance(module, Members):
        raise ModelError(
            f"Population updates a module of type Members, and a plugin that is listed after it "
            f"wraps its update rule and hands it {type(module).__name__}: list that plugin before "
            "Population"
        )


def _check_plugin_states(before: fg.TrainState, after: fg.TrainState) -> None:
    """Raise a ModelError if the rule within writes a plugin state that members share."""
    for name, plugin_state in after.plugin_states.items():
        if name in PLUGINS_WITHIN or plugin_state is before.plugin_states[name]:
            continue
        raise ModelError(
            f"the update rule of the plugin {name!r} writes its state for each member of a "
            "population, which has one for all: list that plugin after Population"
        )


def _get_parts(state: fg.TrainState) -> MemberParts:
    """Return what an update rule may change."""
    plugin_states = {
        name: plugin_state
        for name, plugin_state in state.plugin_states.items()
        if name in PLUGINS_WITHIN
    }
    return MemberParts(state.module, state.model_state, state.opt_state, plugin_states)


def _put_parts(state: fg.TrainState, parts: MemberParts) -> fg.TrainState:
    return state.replace(
        module=parts.module,
        model_state=parts.model_state,
        opt_state=parts.opt_state,
        plugin_states={**state.plugin_states, **parts.plugin_states},
    )


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
