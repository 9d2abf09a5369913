"""The plugin: streams by name, merged over the defaults."""

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from jaxtyping import Array, Key

DEFAULTS = (
    fg.RngStream("params", init=True, per_step=False),
    fg.RngStream("default", train=True),
    fg.RngStream("dropout", train=True),
)


class Rng:
    """Adds random streams to an engine, or replaces defaults of the same name.

    Without arguments it gives the defaults: `params` (for initializing modules; the same at every
    step), `default` and `dropout` (training only). A key depends only on the seed, the stream's
    name, the step and the phase, so adding a stream changes no other, and the bits of `default` are
    those of an engine without this plugin.

    Example:
        from fulgurite_rng import Rng

        noise = fg.RngStream("noise", train=True, eval=True)
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
                    f"Rng takes streams, such as Rng(RngStream('noise', train=True)), not "
                    f"{stream!r}"
                )
        names = [stream.name for stream in streams]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(f"Rng is given two streams called {twice[0]!r}")
        self._streams = {stream.name: stream for stream in (*DEFAULTS, *streams)}

    @fg.hookimpl
    def register_rng_streams(self) -> list[fg.RngStream]:
        """The defaults and the streams that were given."""
        return list(self._streams.values())

    def streams(self, seed: int | Key[Array, ""]) -> fg.RngStreams:
        """The streams over a seed or root key, for use outside an engine:
        `rng.streams(0).train_keys(step)`.

        The keys are those of an engine with that seed. The step may be traced.
        """
        root = jax.random.key(seed) if isinstance(seed, int) else seed
        return fg.RngStreams(root, self._streams.values())
