"""Pictures, histograms and texts whose values are keys."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
from fulgurite.plugins import hide_constructor_frames
from fulgurite_logging import media

from fulgurite_keys.fields import Keyed, make_call_scope
from fulgurite_keys.scope import Key, Scope


@dataclass(frozen=True)
class Summary(Keyed):
    """What is shown of a key. A subclass adds keys and settings, and `draw`.

    Example:
        import dataclasses

        from fulgurite_keys import Key, Summary
        from fulgurite_logging import media

        @dataclasses.dataclass(frozen=True)
        class Difference(Summary):
            first: Key
            second: Key

            def draw(self, first, second):
                return media.Images.from_pixels(abs(first - second))
    """

    def draw(self, *values: Any, **named: Any) -> fg.Media:
        """Return what is shown, from what the keys find, by field; traced."""
        raise NotImplementedError(f"{type(self).__name__} has no draw: define it")

    def evaluate(self, scope: Scope) -> fg.Media:
        """Return what is shown of a batch."""
        return self.draw(**self.resolve(scope))

    def __call__(self, preds: Any, batch: Any) -> fg.Media:
        """Return what is shown, as an evaluator calls it, with keys in `batch` and `preds` only."""
        return self.evaluate(make_call_scope(preds, batch))


@hide_constructor_frames
@dataclass(frozen=True)
class Images(Summary):
    """Pictures, as `fulgurite_logging.media.Images`.

    Example:
        from fulgurite_keys import Images

        Images("batch.image[:8]")

    Attributes:
        pixels: the key of `(n, height, width, channels)`, or with the channels left out.
        shape: `(height, width, channels)`, if the pictures are flat.
    """

    pixels: Key
    shape: tuple[int, int, int] | None = None

    def draw(self, pixels: Any) -> fg.Media:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.shape is not None:
            pixels = pixels.reshape(-1, *self.shape)
        if pixels.ndim == 3:
            pixels = pixels[..., None]
        return media.Images.from_pixels(pixels)


@hide_constructor_frames
@dataclass(frozen=True)
class Histogram(Summary):
    """How numbers are distributed, as `fulgurite_logging.media.Histogram`; of a tree, all its
    numbers together.

    Example:
        from fulgurite_keys import Histogram

        Histogram("interms.encoder")
        Histogram("module.**.weight", bins=32)
        Histogram("grads")
    """

    values: Key
    bins: int = 64

    def draw(self, values: Any) -> fg.Media:  # pyright: ignore[reportIncompatibleMethodOverride]
        return media.Histogram.from_values(values, self.bins)
