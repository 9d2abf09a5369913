"""The plugin: streams by name, merged over the defaults."""

from typing import SupportsIndex

import fulgurite as fg
from fulgurite.errors import ConfigurationError, as_int
from fulgurite.rng import make_root_key
from jaxtyping import Array, Key

DEFAULTS = (
    fg.RngStream("params", init=True, train=False, per_step=False),
    fg.RngStream("default"),
    fg.RngStream("dropout"),
)


class Rng:
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
        """
        root = as_int(seed)
        root = make_root_key(root) if isinstance(root, int) else root
        return fg.RngStreams(root, self._streams.values())
