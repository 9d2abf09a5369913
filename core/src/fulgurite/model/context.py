"""What a step receives besides its batch: keys, mask, model state, and a place for further
losses."""

from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from fulgurite.errors import ModelError, PluginError, did_you_mean
from fulgurite.model.media import MEDIA_ACTION
from fulgurite.rng import RngPhase, RngStreams, fold_name


@dataclass(eq=False, repr=False)
class Context:
    """Made by the engine while a step is traced; valid only there.

    Attributes:
        streams: the engine's streams, over the root key.
        step: int32 scalar, the number of updates completed before this one. Traced.
        training: whether this is a training step. A Python bool.
        model_state: the `eqx.nn.State` of the model, or None.
        mask: bool `(batch,)`, False for padding; None when the source does not pad.
        scope: what is folded into its keys besides stream, step and phase.
        flags: what `due` returns, by name.
        key_step: the step that is folded into its keys, if any.
        at: the number of the step being traced, for notes on errors.
        losses: what `add_loss` collected; None outside of the forward pass.
        slices: the plugins' slices of the state before the step, by name; empty in evaluation.
        own: the slice of the plugin that receives this context; None for others and in evaluation.
    """

    streams: RngStreams
    step: Int[Array, ""]
    _: KW_ONLY
    training: bool
    model_state: eqx.nn.State | None = None
    mask: Bool[Array, " batch"] | None = None
    rng_path: tuple[tuple[str, Any], ...] = ()
    due_flags: dict[str, Bool[Array, ""]] = field(default_factory=dict)
    rng_step: Int[Array, ""] | None = None
    losses: dict[str, Float[Array, ""]] | None = None
    step_number: int | None = None
    plugin_states: dict[str, Any] = field(default_factory=dict)
    plugin_state: Any = None
    _trace: Any = field(
        default_factory=partial(get_opaque_trace_state, convention="nnx"), init=False
    )

    def key(self, stream: str = "default") -> Key[Array, ""]:
        """The key of `stream` at this step. Every call returns the same key: split it to draw more
        than once.

        In evaluation every stream gives a key, specific to that evaluation and batch, so a
        `training_step` can be evaluated unchanged; layers in inference mode ignore it.
        """
        phase: RngPhase = "train" if self.training else "eval"
        key = self.streams.key(stream, phase, self.rng_step)
        if self.training and not self.streams.streams[stream].train:
            raise PluginError(
                f"the random stream {stream!r} is not for training: declare it with train=True"
            )
        for name, index in self.rng_path:
            key = fold_name(key, name) if index is None else fold_name(key, name, index)
        return key

    def keys(self, stream: str, n: int) -> Key[Array, " n"]:
        """`n` keys of `stream` at this step, for example one per example."""
        return jax.random.split(self.key(stream), n)

    def is_due(self, name: str) -> Bool[Array, ""]:
        """Whether the scheduled action `PLUGIN.NAME` runs after this update, or for `"log"`,
        whether the window is
        closed: a traced bool. Put work that is needed only then behind `jax.lax.cond` on it.

        False if only a clock or a request to stop makes the action due, because that becomes known
        later.
        """
        if name not in self.due_flags:
            raise PluginError(
                f"nothing scheduled is called {name!r}. {did_you_mean(name, self.due_flags)}"
            )
        return self.due_flags[name]

    @property
    def media_due(self) -> Bool[Array, ""] | None:
        """Whether the media of this step are shown, a bool as from `due`; None if they never
        are."""
        return self.due_flags.get(MEDIA_ACTION)

    def add_loss(self, name: str, value: Float[Array, "..."]) -> None:
        """Adds a term to the loss from anywhere in the step; an array is averaged. An array of one
        value per example of
        a padded batch is an error: `fg.metrics.Mean.from_values(value, ctx.mask).compute()` leaves
            the padding out.

        A value made inside `vmap`, `scan`, `checkpoint`, `cond`, `grad` or an inner `jit` cannot
        leave it this way: return it from there and add it outside.
        """
        if self.losses is None:
            raise ModelError(
                f"ctx.add_loss({name!r}) has no effect outside the forward pass: add it in "
                f"training_step"
            )
        if not isinstance(name, str) or not eqx.is_array_like(value):
            raise ModelError(
                f"ctx.add_loss({name!r}, {value!r}): give a name and an array or number"
            )
        if name in self.losses:
            raise ModelError(
                f"the loss term {name!r} was added twice in one step; give the second its own name"
            )
        if self.mask is not None and jnp.shape(value)[:1] == self.mask.shape:
            gap = (
                f"ctx.add_loss({name!r}) was given {jnp.shape(value)[0]} values of a padded batch, "
                f"padding and all"
            )
            raise ModelError(
                f"{gap}: average them, as by fg.metrics.Mean.from_values(value, ctx.mask).compute()"
            )
        fix = "".join(letter if letter.isalnum() else "_" for letter in name)
        leak = ModelError(
            f"ctx.add_loss({name!r}) was called inside vmap, scan, checkpoint, cond, grad or jit, "
            f"or with a value made "
            "there, which cannot leave it this way. Return it from the mapped function and add it "
            "outside:\n    "
            f"hidden, {fix} = jax.vmap(f)(x)\n    ctx.add_loss({name!r}, {fix})"
        )
        if self._trace != get_opaque_trace_state(convention="nnx"):
            raise leak
        try:
            self.losses[name] = jnp.mean(value)
        except jax.errors.UnexpectedTracerError as error:
            raise leak from error

    def fork(self, name: str, index: Int[ArrayLike, ""] | None = None, **changes: Any) -> "Context":
        """A context for another forward pass in the step, or for number `index` of several, with
        its own keys and terms; `changes` replace `training`, `model_state` or `mask`."""
        return replace(self, rng_path=(*self.rng_path, (name, index)), losses=None, **changes)

    def for_forward(self) -> "Context":
        """The same context at the current place in the trace, ready to collect loss terms."""
        # A model state can be set once; the train state keeps the one it has.
        return replace(
            self, losses={}, model_state=jax.tree.map(lambda leaf: leaf, self.model_state)
        )

    def for_plugin(self, name: str) -> "Context":
        """The same context with the plugin's own keys and slice."""
        return replace(
            self,
            rng_path=(*self.rng_path, (f"plugin:{name}", None)),
            plugin_state=self.plugin_states.get(name),
        )
