"""Functions of batches that are part of the compiled step."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
from fulgurite.errors import DataError, check_callable

from fulgurite_data.identity import describe_function


class MapOnDevice(fg.Plugin):
    """Change each batch of training within the compiled step, on the device: for augmentation, or
    for what is smaller before it, such as images of bytes. Evaluations see batches as they are.

    Example:
        from fulgurite_data import MapOnDevice

        def jitter(batch, key):
            noise = 0.1 * jax.random.normal(key, batch["x"].shape)
            return {**batch, "x": batch["x"] + noise}

        engine = fg.Engine(steps=10, plugins=[MapOnDevice(jitter, rng=True)])

    Attributes:
        function: called with a batch; with `rng`, with a random key too. It is traced.
        rng: whether it draws random numbers.
    """

    def __init__(self, function: Callable[..., Any], *, rng: bool = False) -> None:
        check_callable(function, "MapOnDevice: function")
        self.function = function
        self.rng = rng

    @fg.hookimpl
    def transform_batch(self, batch: Any, ctx: fg.Context) -> Any:
        """Return the changed batch."""
        changed = self.function(batch, ctx.key()) if self.rng else self.function(batch)
        if changed is None:
            raise DataError(f"{self!r} returned None: return the changed batch")
        return changed

    def __repr__(self) -> str:
        """Return the call, for the description of a run."""
        return f"MapOnDevice({describe_function(self.function)}{', rng=True' if self.rng else ''})"
