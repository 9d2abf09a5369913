"""Random keys for layers, without a context or a key that is handed down to them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from fulgurite._src.model.context import Context, get_base_key
from fulgurite._src.rng import fold_name
from fulgurite.errors import ModelError


@dataclass
class _RngScope:
    """Where `make_rng` gets its keys from.

    Attributes:
        ctx: the context of the step.
        trace: the trace that the step is in.
        counts: how many keys were drawn, by stream.
    """

    ctx: Context
    trace: Any
    counts: Counter[str] = field(default_factory=Counter)


_scope: ContextVar[_RngScope | None] = ContextVar("fulgurite_rng_scope", default=None)


@contextmanager
def provide_rngs(ctx: Context) -> Iterator[None]:
    """Let `make_rng` draw keys of a step within the block."""
    token = _scope.set(_RngScope(ctx, _get_trace()))
    try:
        yield
    finally:
        _scope.reset(token)


def make_rng(stream: str = "default", *, axis_name: str | None = None) -> Key[Array, ""]:
    """Return a new random key from anywhere in a step, so that layers need no key handed down.

    Each call in a step gives another key: that of the first `ctx.key(stream)`, folded with the
    number of the call. The calls count by stream and in the order in which the step makes them.
    Each evaluation, prediction, phase and microbatch counts from its own begin.

    Under `vmap` the step calls this once, so all examples get one key. With `jax.vmap(...,
    axis_name="batch")` and `make_rng(axis_name="batch")` each gets its own.

    Example:
        class Noisy(eqx.Module):
            def __call__(self, x):
                if not fg.is_training():
                    return x
                return x + 0.1 * jax.random.normal(fg.make_rng(), x.shape)

    Args:
        stream: the name of the stream.
        axis_name: of an enclosing `vmap`, whose index is folded in as well.

    Raises:
        ModelError: it is called outside of a step; or within a `jit`, `scan`, `cond` or
            `checkpoint` inside of one, which JAX traces once and uses again, with the same key:
            draw the key outside and pass it in.
        PluginError: there is no such stream.
    """
    scope = _scope.get()
    if scope is None:
        raise ModelError(
            f"fg.make_rng({stream!r}) is called outside of a step: it works in training_step, "
            "validation_step, predict_step and what they call, when an engine runs them. Elsewhere "
            "call the model within fulgurite_rng.rng_context(key)"
        )
    if _get_trace() is not scope.trace:
        raise ModelError(
            f"fg.make_rng({stream!r}) is called inside a jit, scan, cond, while_loop or checkpoint "
            "within the step. JAX keeps what it has traced there, so that calls would share a key. "
            "Draw the key outside and pass it in:\n"
            f"    key = fg.make_rng({stream!r})\n    y = jax.checkpoint(layer)(x, key)"
        )
    index = scope.counts[stream]
    scope.counts[stream] += 1
    key = fold_name(get_base_key(scope.ctx, stream), "make_rng", index)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    return key


def _get_trace() -> Any:
    """Return the innermost trace that stages operations out; None outside of any.

    `get_opaque_trace_state` would tell those of vmap and grad apart as well, which only pass on an
    operation that does not depend on their arguments. So such an operation shows the trace.
    """
    marker = jax.lax.iota(jnp.int32, 1)
    return getattr(marker, "_trace", None)
