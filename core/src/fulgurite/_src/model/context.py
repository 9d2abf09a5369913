"""What a step receives besides its batch: random keys, mask, model state, further losses."""

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, Real

from fulgurite._src.metrics.basic import Mean
from fulgurite._src.metrics.conversion import split_loss
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.rng import RngPhase, RngStreams, fold_name
from fulgurite.errors import ModelError, PluginError, did_you_mean


@dataclass(eq=False, repr=False)
class Context:
    """What a step receives besides its batch; made by the engine, valid while the step is traced.

    Example:
        class Denoiser(fg.Module):
            net: eqx.nn.MLP

            def training_step(self, batch, ctx):
                noise = 0.1 * jax.random.normal(ctx.key(), batch["x"].shape)
                preds = jax.vmap(self.net)(batch["x"] + noise)
                ctx.add_loss("l2", 1e-4 * jnp.sum(self.net.layers[0].weight ** 2))
                return fg.Output(jnp.mean((preds - batch["x"]) ** 2))

    Attributes:
        streams: the engine's random streams, over the root key.
        step: int32 scalar, the number of updates completed before this one. Traced.
        training: whether this is a training step. A Python bool.
        model_state: the `eqx.nn.State` of the model, or None.
        mask: bool `(batch,)`, False for padding; None when the source does not pad.
        spec: what is static in the batch, of a `fulgurite.Batch`; None for any other batch.
        num_examples: what `fulgurite.Batch` says of the batch; None where its arrays say it.
        rng_path: names and indices that are folded into its keys, besides stream, step and phase.
        due_flags: what `is_due` returns, by name.
        rng_step: the step that is folded into its keys, if any.
        evaluation: the name of the evaluation; None in training.
        optimizer: the name of the only optimizer whose loss this forward pass is for; None where
            it is for all.
        losses: what `add_loss` collected; None outside of the forward pass.
        loss_weights: what each of them is a mean over, where that is known.
        step_number: the number of the step that is traced, for notes on errors.
        plugin_states: the states of plugins before the step, by name; empty in evaluation.
        plugin_state: the state of the plugin that receives this context; None for others and in
            evaluation.
    """

    streams: RngStreams
    step: Int[Array, ""]
    _: KW_ONLY
    training: bool
    model_state: eqx.nn.State | None = None
    mask: Bool[Array, " batch"] | None = None
    spec: Hashable = None
    num_examples: Real[ArrayLike, ""] | None = None
    rng_path: tuple[tuple[str, Any], ...] = ()
    due_flags: dict[str, Bool[Array, ""]] = field(default_factory=dict)
    rng_step: Int[Array, ""] | None = None
    evaluation: str | None = None
    optimizer: str | None = None
    losses: dict[str, Float[Array, ""]] | None = None
    loss_weights: dict[str, Array] = field(default_factory=dict)
    step_number: int | None = None
    plugin_states: dict[str, Any] = field(default_factory=dict)
    plugin_state: Any = None
    _num_calls: Counter[str] = field(default_factory=Counter, init=False)
    _trace: Any = field(
        default_factory=partial(get_opaque_trace_state, convention="nnx"), init=False
    )

    def key(self, stream: str = "default", *, name: str | None = None) -> Key[Array, ""]:
        """Return a key of a random stream at this step.

        Each call returns another key; those after the first are folded with the number of the call.
        The calls count by stream, in the order in which the step makes them, those of `keys` and
        `keys_for` too. Each forward pass, phase, microbatch, evaluation and hook of a plugin counts
        from its own begin. What JAX traces once and runs several times, such as the body of a
        `scan`, gets one key for all of them: split a key outside.

        In evaluation every stream has keys, specific to that evaluation and batch, so a
        `training_step` can be evaluated unchanged; layers in inference mode ignore them.

        Args:
            stream: the name of the stream.
            name: returns the key of this name instead, the same at every call.
        """
        key = get_base_key(self, stream)
        if name is not None:
            return fold_name(key, f"name:{name}")
        index = self._num_calls[stream]
        self._num_calls[stream] += 1
        return key if index == 0 else fold_name(key, "repeated call", index)

    def keys(self, stream: str, n: int) -> Key[Array, " n"]:
        """Return `n` keys of a random stream at this step, for example one per example; others at
        each call.

        Args:
            stream: the name of the stream.
            n: how many.
        """
        return jax.random.split(self.key(stream), n)

    def keys_for(self, streams: Iterable[str]) -> dict[str, Key[Array, ""]]:
        """Return the keys of several random streams at this step, by name, such as for the
        `rngs=` of a model of another library.

        Args:
            streams: their names.
        """
        return {stream: self.key(stream) for stream in streams}

    def is_due(self, name: str) -> Bool[Array, ""]:
        """Return whether a scheduled action runs after this update: a traced bool.

        Put work that is needed only then behind `jax.lax.cond` on it. It is False if only a clock
        or a request to stop makes the action due, because that becomes known later.

        Args:
            name: of the action, `PLUGIN.NAME`; `log` for whether the metric window is closed.
        """
        if name not in self.due_flags:
            raise PluginError(
                f"no scheduled action is called {name!r}. {did_you_mean(name, self.due_flags)}"
            )
        return self.due_flags[name]

    @property
    def media_due(self) -> Bool[Array, ""] | None:
        """Whether the media of this step are shown, a traced bool as of `is_due`; None if they
        never are."""
        return self.due_flags.get(MEDIA_ACTION)

    def add_loss(
        self, name: str, value: Float[Array, "..."] | Mean, *, accumulate: bool = False
    ) -> None:
        """Add a term to the loss from anywhere in the step.

        A value computed inside `vmap`, `scan`, `checkpoint`, `cond`, `grad` or an inner `jit`
        cannot leave it this way: return it from there and add it outside.

        Args:
            name: of the term, as it is logged.
            value: a number, or without `accumulate` an `fg.metrics.Mean`, as of `Output.loss`. Of
                an array the mean is taken, with a warning. One value per example of a padded batch
                is an error:
                `fg.metrics.Mean.from_values(value, ctx.mask)` leaves the padding out.
            accumulate: whether the value is added to those of the same name, as of a layer that is
                called several times. Their sum counts as a bare number.

        Raises:
            ModelError: the term has no such name or value, was added already without `accumulate`,
                or is added outside of the forward pass.
        """
        if self.losses is None:
            raise ModelError(
                f"ctx.add_loss({name!r}) has no effect outside the forward pass: add it in "
                "training_step"
            )
        if accumulate and isinstance(value, Mean):
            raise ModelError(
                f"ctx.add_loss({name!r}, accumulate=True) adds up numbers, and means over "
                "different values have no sum that is a mean: give each a name of its own, or add "
                "up mean.compute(), which counts as a mean over the examples"
            )
        value, weight = split_loss(name, value)
        if not isinstance(name, str) or not eqx.is_array_like(value):
            raise ModelError(
                f"ctx.add_loss({name!r}, {value!r}): pass a name and an array or number"
            )
        if name in self.losses and not accumulate:
            raise ModelError(
                f"the loss term {name!r} was added twice in one step: give the second its own "
                "name, or add up all of them with accumulate=True"
            )
        if self._trace != get_opaque_trace_state(convention="nnx"):
            raise _make_leak_error(name)
        try:
            # An operation also on a number: by it JAX notices a value that leaked.
            term = jnp.mean(average_loss(name, jnp.asarray(value), self.mask))
            self.losses[name] = self.losses[name] + term if name in self.losses else term
            if weight is not None and not accumulate:
                self.loss_weights[name] = weight
        except jax.errors.UnexpectedTracerError as error:
            raise _make_leak_error(name) from error

    def fork(self, name: str, index: Int[ArrayLike, ""] | None = None, **changes: Any) -> "Context":
        """Return a context for another forward pass in the step, with its own keys and terms.

        Args:
            name: of the pass; it is folded into the keys.
            index: the number of the pass, if there are several of this name.
            changes: replace `training`, `model_state`, `mask`, `num_examples` or `optimizer`.
                `update_rule(forward, state, ...)` reads the model state of its `state` anyway; a
                forward pass of your own reads that of its context, which is the one from before
                the step unless you pass `model_state=state.model_state`.
        """
        return replace(
            self,
            rng_path=(*self.rng_path, (name, index)),
            losses=None,
            loss_weights={},
            **changes,
        )

    def for_forward(self) -> "Context":
        """Return this context for the present level of tracing, ready to collect loss terms."""
        # An `eqx.nn.State` can be updated once; the train state keeps the one that it has.
        model_state = jax.tree.map(lambda leaf: leaf, self.model_state)
        return replace(self, losses={}, loss_weights={}, model_state=model_state)

    def for_plugin(self, name: str) -> "Context":
        """Return this context with the keys and the state of a plugin."""
        return replace(
            self,
            rng_path=(*self.rng_path, (f"plugin:{name}", None)),
            plugin_state=self.plugin_states.get(name),
        )


def get_base_key(ctx: Context, stream: str) -> Key[Array, ""]:
    """Return the key from which all keys of a stream at this step are folded, that of the first
    call of `Context.key`.

    Args:
        ctx: the context of the step.
        stream: the name of the stream.

    Raises:
        PluginError: there is no such stream in this phase.
    """
    phase: RngPhase = "train" if ctx.training else "eval"
    key = ctx.streams.key(stream, phase, ctx.rng_step)
    if ctx.training and not ctx.streams.streams[stream].train:
        raise PluginError(
            f"the random stream {stream!r} is not for training: declare it with train=True"
        )
    for name, index in ctx.rng_path:
        key = fold_name(key, name) if index is None else fold_name(key, name, index)
    return key


def average_loss(name: str, value: Array, mask: Bool[Array, " batch"] | None) -> Array:
    """Return a loss as one number: of an array the mean, with a warning.

    Args:
        name: of the term.
        value: of any shape.
        mask: of the batch, or None.

    Raises:
        ModelError: there is one value per example of a padded batch, so that the padding would
            count.
    """
    if value.shape == ():
        return value
    hint = "average them, as by fg.metrics.Mean.from_values(value, ctx.mask)"
    if mask is not None and value.shape[:1] == mask.shape:
        raise ModelError(
            f"the loss term {name!r} has {value.shape[0]} values of a padded batch, including the "
            f"padding: {hint}"
        )
    warnings.warn(
        f"the loss term {name!r} has the shape {value.shape}, and its mean is taken: if that is "
        "not what it should be, return one number",
        stacklevel=2,
    )
    return jnp.mean(value)


def _make_leak_error(name: str) -> ModelError:
    variable = "".join(letter if letter.isalnum() else "_" for letter in name)
    return ModelError(
        f"ctx.add_loss({name!r}) was called inside vmap, scan, checkpoint, cond, grad or jit, or "
        "with a value computed there, which cannot leave it this way. Return it from the mapped "
        "function and add it outside:\n    "
        f"hidden, {variable} = jax.vmap(f)(x)\n    ctx.add_loss({name!r}, {variable})"
    )
