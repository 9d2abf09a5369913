"""Turn media into files."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_logging import media

from fulgurite_mlflow.values import escape_surrogates


def convert_media(value: fg.Media) -> Iterator[tuple[str, bytes]]:
    """Yield the end of the name and the content of each file that shows a medium.

    Raises:
        TypeError: there is no file for such a medium.
    """
    for media_type, convert in _CONVERTERS.items():
        if isinstance(value, media_type):
            yield from convert(value)
            return
    raise TypeError(f"this logger cannot show fg.Media of type {type(value).__name__}")


def _convert_image(image: media.Image) -> Iterator[tuple[str, bytes]]:
    yield ".png", _encode_picture(np.asarray(image.pixels))


def _convert_images(images: media.Images) -> Iterator[tuple[str, bytes]]:
    for index, pixels in enumerate(np.asarray(images.pixels)):
        yield f"-{index:03d}.png", _encode_picture(pixels)


def _encode_picture(pixels: np.ndarray) -> bytes:
    """Return `(height, width, channels)`, uint8, as PNG."""
    import PIL.Image

    content = io.BytesIO()
    PIL.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(content, "png")
    return content.getvalue()


def _convert_histogram(histogram: media.Histogram) -> Iterator[tuple[str, bytes]]:
    values = {
        "counts": np.asarray(histogram.counts).tolist(),
        "edges": np.asarray(histogram.edges).tolist(),
    }
    yield ".json", json.dumps(values).encode()


def _convert_text(text: media.Text) -> Iterator[tuple[str, bytes]]:
    yield ".txt", escape_surrogates(text.text).encode()


def _convert_figure(figure: media.Figure) -> Iterator[tuple[str, bytes]]:
    from matplotlib.figure import Figure

    drawing = figure.draw(figure.values)
    if not isinstance(drawing, Figure):
        raise TypeError(f"`draw` returned {type(drawing).__name__}, not a matplotlib.figure.Figure")
    content = io.BytesIO()
    try:
        drawing.savefig(content, format="png")
    finally:
        # pyplot keeps each figure that it made until it is closed.
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(drawing)
    yield ".png", content.getvalue()


_CONVERTERS: dict[type, Callable[[Any], Iterator[tuple[str, bytes]]]] = {
    media.Image: _convert_image,
    media.Images: _convert_images,
    media.Histogram: _convert_histogram,
    media.Text: _convert_text,
    media.Figure: _convert_figure,
}
