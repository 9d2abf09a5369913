"""The module of a population: every array of a model with a leading axis of members."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.plugins import leaves_with_paths
from jaxtyping import Array, Bool, Int, Key, PyTree

from fulgurite_population.metrics import describe_members

PLUGINS_WITHIN = ("backbone_finetuning", "freeze", "lora", "precision", "sam")
"""Plugins whose update rules are of one member, within that of the population: they look at the
arrays of a module, or have a state for each member."""


class Members(fg.Module):
    """Models that are trained side by side; `Population.stack` makes it.

    Example:
        from fulgurite_population import Population

        population = Population(seeds=range(4))
        engine = fg.Engine(steps=100, plugins=[population])
        result = engine.fit(population.stack(Classifier), data)
        third = result.module.take(2)

    Attributes:
        members: the model; every array has a leading axis of members.
        frozen_at: int32 `(members,)`, the step at which each member was not finite, or -1.
        skipped: int32 `(members,)`, the updates that each member has left out, besides those that
            all have.
        seeds: of the members' random keys.
        exact: whether members run one after the other.
    """

    members: PyTree
    frozen_at: Int[Array, " members"]
    skipped: Int[Array, " members"]
    seeds: tuple[int, ...] = eqx.field(static=True)
    exact: bool = eqx.field(static=True)

    @property
    def is_alive(self) -> Bool[Array, " members"]:
        """Which members were finite so far."""
        return self.frozen_at < 0

    def take(self, index: int) -> PyTree:
        """Return one member, a module as the model's own.

        Args:
            index: of the member, from 0.
        """
        check_index(index, len(self.seeds))
        return take_member(self.members, index)

    def make_keys(self) -> Key[Array, " members"]:
        """Return the root key of each member: that of an engine with its seed."""
        return jnp.stack([jax.random.key(seed) for seed in self.seeds])

    def apply_transform(self, transform: Callable[[Any, Any], Any], key: Any) -> "Members":
        """Return the members as a plugin transforms each, with the key of a run of its own."""
        del key
        members = [
            transform(self.take(index), make_init_key(seed))
            for index, seed in enumerate(self.seeds)
        ]
        return replace(self, members=stack_models(members))

    def adapt_plugin_state(self, name: str, plugin_state: Any) -> Any:
        """Return the state of a plugin that acts within a member for each of them."""
        if name not in PLUGINS_WITHIN:
            return plugin_state
        size = len(self.seeds)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), plugin_state)

    def select_model(self, model_state: Any) -> tuple[Any, Any]:
        """Return the first member, with its state."""
        return self.take(0), take_member(model_state, 0)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Raise an error: the plugin's update rule trains each member by its own step."""
        raise ModelError(
            "a population is trained by its plugin: give the same Population(...) to "
            "fg.Engine(plugins=[...]), and train_step of the engine must call the update rule"
        )

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the mean loss of the members that were always finite, and the metrics of each."""

        def evaluate(member: Any, model_state: Any, key: Any) -> fg.Output:
            member_ctx = make_member_ctx(ctx, key, model_state)
            member_ctx = replace(member_ctx, losses={}, loss_weights={})
            output = member.validation_step(batch, member_ctx)
            if not isinstance(output, fg.Output):
                output = fg.Output(output)
            output = output.replace(
                losses=output.losses | (member_ctx.losses or {}),
                loss_weights=output.loss_weights | member_ctx.loss_weights,
                metrics=flatten(output.metrics),
            ).resolve()
            terms = output.losses if output.loss is None else {"loss": output.loss, **output.losses}
            bare_terms = tuple(terms.keys() - output.loss_weights.keys())
            losses = {name: jnp.mean(term) for name, term in terms.items()}
            output = output.replace(loss=sum(losses.values()) if losses else None, losses=losses)
            return output.replace(
                metrics=fg.collect_metrics(output, batch, member_ctx),
                bare_terms=bare_terms if output.weight is None else (),
            )

        outputs = self.map(evaluate, self.members, ctx.model_state, self.make_keys())
        metrics = describe_members(outputs.metrics, self.is_alive)
        # The metrics have the loss; a bare one is there for the engine to try it.
        loss = average_members(outputs.loss, self.is_alive) if outputs.bare_terms else None
        preds = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outputs.preds)
        return fg.Output(loss, metrics=metrics, preds=preds, model_state=ctx.model_state)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        """Return the predictions of each member, with arrays `(batch, members, ...)`."""

        def predict(member: Any, model_state: Any, key: Any) -> Any:
            return member.predict_step(batch, make_member_ctx(ctx, key, model_state))

        preds = self.map(predict, self.members, ctx.model_state, self.make_keys())
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), preds)

    def configure_optimizers(self) -> Any:
        """Return the optimizers of one member."""
        return self.take(0).configure_optimizers()

    def map(self, function: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Return what a function of one member gives, stacked over the members.

        Args:
            function: called with one member's part of each tree; its arrays are stacked.
            trees: every array has a leading axis of members.
        """
        if not self.exact:
            return map_together(function, *trees)
        # Always true, and known to the device alone.
        return map_one_by_one(function, *trees, is_called=self.frozen_at >= -1)


def map_together(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Return what a function of one member gives, stacked over the members.

    Args:
        function: called with one member's part of each tree.
        trees: every array has a leading axis of members; what is not an array is common to all.
    """
    arrays, call, static_results = _split_static(function, trees)
    return eqx.combine(jax.vmap(call)(arrays), static_results[-1])


def map_one_by_one(
    function: Callable[..., Any], *trees: PyTree, is_called: Bool[Array, " members"]
) -> PyTree:
    """Return what `map_together` returns, with the bits of a call for each member alone.

    XLA fuses the body of a loop with what slices its operands, and then rounds differently: a
    clipped gradient differed by 6e-8 from that of a run of its own. A branch is a computation of
    its own, which is compiled as a program of one member is.

    Args:
        function: called with one member's part of each tree.
        trees: every array has a leading axis of members; what is not an array is common to all.
        is_called: true, but not to XLA, which would do away with a branch that is always taken.
    """
    arrays, call, static_results = _split_static(function, trees)

    def call_in_branch(operands: tuple[Bool[Array, ""], PyTree]) -> PyTree:
        flag, member = operands
        spec = jax.eval_shape(call, member)

        def make_zeros(_: PyTree) -> PyTree:
            return jax.tree.map(_make_zeros, spec)

        return jax.lax.cond(flag, call, make_zeros, member)

    results = jax.lax.map(call_in_branch, (is_called, arrays))
    return eqx.combine(results, static_results[-1])


def _split_static(
    function: Callable[..., Any], trees: tuple[PyTree, ...]
) -> tuple[PyTree, Callable[[PyTree], PyTree], list[PyTree]]:
    """Return the arrays of trees, a function of them alone, and the list to which each call of it
    adds what it returns and is not an array."""
    arrays, static = eqx.partition(trees, eqx.is_array)
    static_results = []

    def call(arrays: PyTree) -> PyTree:
        results, static_result = eqx.partition(function(*eqx.combine(arrays, static)), eqx.is_array)
        static_results.append(static_result)
        return results

    return arrays, call, static_results


def _make_zeros(spec: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), spec.shape)
    return jnp.zeros(spec.shape, spec.dtype)


def take_member(tree: PyTree, index: int) -> PyTree:
    """Return one member's part of a tree.

    Args:
        tree: every array has a leading axis of members.
        index: of the member.
    """
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)


def list_paths(members: PyTree) -> list[str]:
    """Return the paths of all arrays of a model."""
    return [path for path, _ in leaves_with_paths(eqx.filter(members, eqx.is_array))]


def stack_models(models: list[Any]) -> Any:
    """Return one model of several, with a leading axis for every array.

    Args:
        models: modules, or pairs of a module and its state.

    Raises:
        ConfigurationError: they differ in more than the numbers in their arrays.
    """
    arrays = [eqx.filter(model, eqx.is_array) for model in models]
    _, static = eqx.partition(models[0], eqx.is_array)
    shapes = [
        (jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)])
        for tree in arrays
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigurationError(
            "the members of a population differ in more than numbers: only what is an array of the "
            "same shape in each can be trained in one program; for other differences, such as a "
            "width, use a sweep of several runs"
        )
    return eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), static)


def make_member_ctx(ctx: fg.Context, key: Any, model_state: Any) -> fg.Context:
    """Return the context of one member: with the keys of a run of its own.

    Args:
        ctx: the context of the step.
        key: the member's root key.
        model_state: the member's `eqx.nn.State`, or None.
    """
    streams = fg.RngStreams(key, ctx.streams.streams.values())
    return replace(ctx, streams=streams, model_state=model_state)


def make_init_key(seed: int) -> Key[Array, ""]:
    """Return the key from which an engine with a seed makes its model."""
    return fg.RngStreams(jax.random.key(seed)).key("params", "init")


def average_members(values: Array, is_counted: Bool[Array, " members"]) -> Array:
    """Return the mean over some members; NaN without any.

    Args:
        values: `(members,)`.
        is_counted: which members count.
    """
    return jnp.sum(jnp.where(is_counted, values, 0)) / jnp.sum(is_counted).astype(values.dtype)


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return what nested dictionaries hold, by names such as `outer/inner`."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": part for key, part in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def check_index(index: int, size: int) -> None:
    """Raise a `ConfigurationError` if there is no member of this index.

    Args:
        index: of the member.
        size: the number of members.
    """
    if not 0 <= index < size:
        raise ConfigurationError(f"there is no member {index}: choose from 0 to {size - 1}")
