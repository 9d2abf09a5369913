"""The plugin: streams by name, merged over the defaults; and keys outside of an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, as_int
from fulgurite.plugins import hide_constructor_frames, make_root_key, provide_rngs
from jaxtyping import Array, Int, Key

DEFAULTS = (
    fg.RngStream("params", init=True, train=False, per_step=False),
    fg.RngStream("default"),
    fg.RngStream("dropout"),
)


@hide_constructor_frames
class Rng(fg.Plugin):
    """Adds random streams to an engine, or replaces defaults of the same name.

    Without arguments it gives the defaults: `params` (for initializing modules; the same at every
    step), `default` and `dropout` (training only). A key depends only on the seed, the stream's
    name, the step and the phase, so adding a stream changes no other, and the bits of `default` are
    those of an engine without this plugin.

    Example:
        from fulgurite_rng import Rng

        noise = fg.RngStream("noise", eval=True)
        engine = fg.Engine(steps=1000, plugins=[Rng(noise)])

    Args:
        streams: to add, or to use instead of a default of the same name.
    """

    plugin_name = "rng"
    provides = ("rng",)

    def __init__(self, *streams: fg.RngStream) -> None:
        for stream in streams:
            if not isinstance(stream, fg.RngStream):
                raise ConfigurationError(
                    f"Rng takes streams, such as Rng(RngStream('noise')), not {stream!r}"
                )
        names = [stream.name for stream in streams]
        duplicates = [name for name in names if names.count(name) > 1]
        if duplicates:
            raise ConfigurationError(f"Rng is given two streams called {duplicates[0]!r}")
        self._streams = {stream.name: stream for stream in (*DEFAULTS, *streams)}

    @fg.hookimpl
    def register_rng_streams(self) -> list[fg.RngStream]:
        """Return the defaults and the streams of this plugin."""
        return list(self._streams.values())

    def make_streams(self, seed: SupportsIndex | Key[Array, ""]) -> fg.RngStreams:
        """Return the streams over a root key, for use outside an engine.

        The keys are those of an engine with that seed; a step may be traced.

        Example:
            keys = Rng().make_streams(0).train_keys(7)

        Args:
            seed: a seed, or the root key itself.

        Raises:
            ConfigurationError: `seed` is neither.
        """
        return fg.RngStreams(_as_root_key("Rng.make_streams", seed), self._streams.values())


@contextmanager
def rng_context(
    seed: SupportsIndex | Key[Array, ""],
    *streams: fg.RngStream,
    step: SupportsIndex | Int[Array, ""] | None = None,
) -> Iterator[fg.Context]:
    """Let layers draw keys by `fg.make_rng` in the block, without an engine.

    The keys are those of a step of an engine with that seed and `Rng(*streams)`, or of an
    evaluation within `fg.training_mode(False)`. Under a `jit` of your own enter it inside of the
    function and hand the key in, so that each call has other keys.

    Example:
        from fulgurite_rng import Dropout, rng_context

        layers = eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=jax.random.key(0)), Dropout(0.5)])
        with rng_context(jax.random.key(1)):
            outputs = jax.vmap(layers)(jnp.ones((8, 4)))
        with fg.training_mode(False, layers) as evaluated:
            outputs = jax.vmap(evaluated)(jnp.ones((8, 4)))

    Args:
        seed: a seed, or a key of `jax.random.key`.
        streams: to add, or to use instead of a default of the same name.
        step: folded into the keys, as an engine does; None to fold in none.

    Raises:
        ConfigurationError: `seed` is neither, or `step` is not the number of a step.
    """
    root = _as_root_key("rng_context", seed)
    step = None if step is None else _as_step(step)
    context = fg.Context(
        Rng(*streams).make_streams(root),
        jnp.int32(0) if step is None else step,
        training=fg.is_training(),
        rng_step=step,
    )
    with provide_rngs(context):
        yield context


def _as_root_key(where: str, seed: Any) -> Key[Array, ""]:
    """Return the root key of a seed, or the key that it is.

    Args:
        where: what has it as an argument.
        seed: a seed, or a key.

    Raises:
        ConfigurationError: it is neither.
    """
    number = as_int(seed)
    if type(number) is int and 0 <= number < 2**63:
        return make_root_key(number)
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    if not is_key or jnp.shape(seed) != ():
        raise ConfigurationError(
            f"{where}: {seed!r} is neither a seed nor one key: give an integer from 0 or "
            "jax.random.key(0)"
        )
    return seed


def _as_step(step: Any) -> Int[Array, ""]:
    """Return a step as an array; raise `ConfigurationError` unless it is an integer from 0."""
    step = as_int(step)
    is_number = type(step) is int and 0 <= step < 2**31
    is_array = isinstance(step, jax.Array) and jnp.issubdtype(step.dtype, jnp.integer)
    if not is_number and not (is_array and jnp.shape(step) == ()):
        raise ConfigurationError(
            f"rng_context: step is {step!r}; give the number of updates before it, from 0 to "
            "2**31 - 1"
        )
    return jnp.asarray(step, jnp.int32)
