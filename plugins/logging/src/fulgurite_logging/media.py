"""Media that a step or an evaluation can show: pictures, histograms, texts and figures.

A step returns them by name in `fg.Output(media=...)`, as an object or as a function without
arguments that returns one:

    from fulgurite_logging import media

    fg.Output(loss, media={"samples": lambda: media.Images.from_pixels(self.draw(ctx.key()))})

Such a function is traced behind `jax.lax.cond`, so its work is done only at the steps that show it:
those of the scheduled action `media.show`, which `MediaLogger` provides, and the first batch of
each evaluation. Without that action none of it is compiled.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite import Media
from fulgurite.errors import ModelError
from jaxtyping import Array, Float, Int, PyTree, Shaped, UInt8


class Image(Media):
    """A picture, `(height, width, channels)` with 1, 3 or 4 channels, uint8.

    Example:
        from fulgurite_logging import media

        media.Image.from_pixels(jnp.zeros((28, 28)))
    """

    pixels: UInt8[Array, "height width channels"]

    @staticmethod
    def from_pixels(pixels: Shaped[Array, "..."]) -> "Image":
        """Build a picture from `(height, width)` or `(height, width, channels)`, with numbers as
        for `Images.from_pixels`."""
        pictures = Images.from_pixels(pixels).pixels
        if jnp.ndim(pixels) == 4:
            raise ModelError(
                f"media.Image: {jnp.shape(pixels)} are several pictures; give "
                "media.Images.from_pixels(...)"
            )
        return Image(pictures[0])


class Images(Media):
    """Pictures, `(n, height, width, channels)` with 1, 3 or 4 channels, uint8.

    Example:
        from fulgurite_logging import media

        media.Images.from_pixels(jnp.zeros((16, 28, 28, 3)))
    """

    pixels: UInt8[Array, "n height width channels"]

    @staticmethod
    def from_pixels(pixels: Shaped[Array, "..."]) -> "Images":
        """Build pictures from pixels.

        Args:
            pixels: `(height, width)`, `(height, width, channels)` or
                `(n, height, width, channels)`: uint8, or floats and booleans in [0, 1], clipped to
                that range. NaN is black.
        """
        pixels = jnp.asarray(pixels)
        shape = pixels.shape
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.ndim == 3:
            pixels = pixels[None]
        if pixels.ndim != 4 or pixels.shape[-1] not in (1, 3, 4):
            raise ModelError(
                f"media.Images: an array of shape {shape} is not a picture; give (height, width), "
                "(height, width, channels) or (n, height, width, channels), 1, 3 or 4 channels"
            )
        if pixels.dtype != jnp.uint8:
            if not jnp.issubdtype(pixels.dtype, jnp.floating) and pixels.dtype != bool:
                raise ModelError(
                    f"media.Images: pixels are {pixels.dtype}; give uint8, or floats or bools up "
                    "to 1"
                )
            brightness = jnp.nan_to_num(jnp.clip(pixels.astype(jnp.float32), 0, 1))
            pixels = jnp.round(255 * brightness).astype(jnp.uint8)
        return Images(pixels)


class Histogram(Media):
    """How values are distributed: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`.

    Example:
        from fulgurite_logging import media

        media.Histogram.from_values(model, bins=32)  # of all its parameters
    """

    counts: Int[Array, " bins"]
    edges: Float[Array, " bins+1"]

    @staticmethod
    def from_values(values: PyTree[Shaped[Array, "..."]], bins: int = 64) -> "Histogram":
        """Count the finite numbers in equal bins from the smallest to the largest.

        Args:
            values: an array, or a tree with arrays, such as a module.
            bins: how many bins.
        """
        leaves = [leaf for leaf in jax.tree.leaves(values) if hasattr(leaf, "dtype")]
        arrays = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
        if not arrays:
            raise ModelError(
                f"media.Histogram: there is no array of numbers in {type(values).__name__}"
            )
        if any(map(jnp.iscomplexobj, arrays)):
            raise ModelError(
                "media.Histogram: complex numbers have no order: give real ones, such as "
                "jax.tree.map(jnp.abs, values)"
            )
        flat = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in arrays])
        finite = jnp.isfinite(flat)
        low = jnp.min(flat, where=finite, initial=jnp.inf)
        high = jnp.max(flat, where=finite, initial=-jnp.inf)
        low = jnp.where(finite.any(), low, 0.0)
        high = jnp.where(finite.any(), high, 0.0)
        edges = jnp.histogram_bin_edges(flat, bins, (low, high))
        places = jnp.searchsorted(edges, jnp.where(finite, flat, low), side="right") - 1
        # As integers, which `jnp.histogram` does not: from 2**24 on, which are fewer than the zeros
        # of a large model, adding 1 changes no float32.
        bin_counts = jnp.zeros(bins, jnp.int32)
        counts = bin_counts.at[jnp.clip(places, 0, bins - 1)].add(finite.astype(jnp.int32))
        return Histogram(counts, edges)


class Text(Media):
    """A text, known when the step is traced.

    Example:
        from fulgurite_logging import media

        media.Text("a sample of epoch 3")
    """

    text: str = eqx.field(static=True)


class Figure(Media):
    """A figure, drawn on the host: `draw(values)` returns a `matplotlib.figure.Figure`.

    Example:
        from fulgurite_logging import media
        from matplotlib.figure import Figure


        def draw(values):
            figure = Figure()
            figure.add_subplot().plot(values)
            return figure


        media.Figure(draw, jnp.arange(10.0))

    Attributes:
        draw: called by the loggers that show figures.
        values: a tree of arrays, NumPy arrays by the time that `draw` sees them.
    """

    draw: Callable[[Any], Any] = eqx.field(static=True)
    values: PyTree[Shaped[Array, "..."]]
