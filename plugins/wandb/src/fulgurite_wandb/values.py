"""Turn values of records into what wandb shows."""

import sys
from collections.abc import Callable
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_logging import media


def convert_value(name: str, value: Any) -> dict[str, Any]:
    """Return what is handed to wandb for one value, by name.

    Args:
        name: `SOURCE/NAME`; the elements of an array that is not a table have `name/INDEX`.
        value: a number, a string, a medium or an array.

    Raises:
        TypeError: wandb cannot show such a medium.
    """
    if value is None or isinstance(value, int | float):
        return {name: value}
    if isinstance(value, fg.Media):
        return {name: _convert_media(value)}
    if isinstance(value, str):
        return {name: _convert_text(media.Text(value))}
    array = np.asarray(value)
    if array.ndim == 2:
        import wandb

        columns: list[Any] = [str(column) for column in range(array.shape[1])]
        return {name: wandb.Table(columns=columns, data=array.tolist())}
    return {
        "/".join([name, *map(str, index)]): array[index].item() for index in np.ndindex(array.shape)
    }


def _convert_media(value: fg.Media) -> Any:
    for media_type, convert in _CONVERTERS.items():
        if isinstance(value, media_type):
            return convert(value)
    raise TypeError(f"this logger cannot show fg.Media of type {type(value).__name__}")


def _convert_image(image: media.Image) -> Any:
    # wandb looks Pillow up in the loaded modules, where it may be half imported by the thread of
    # another logger; this import waits for that.
    import PIL.Image  # noqa: F401
    import wandb

    pixels = np.asarray(image.pixels)
    if pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return wandb.Image(pixels)


def _convert_images(images: media.Images) -> Any:
    return [_convert_image(media.Image(pixels)) for pixels in np.asarray(images.pixels)]


def _convert_histogram(histogram: media.Histogram) -> Any:
    import wandb

    counts = np.asarray(histogram.counts)
    edges = np.asarray(histogram.edges)
    # wandb takes this many bins at most: neighbours are merged.
    bins_per_group = -(-len(counts) // wandb.Histogram.MAX_LENGTH)
    starts = np.arange(0, len(counts), bins_per_group)
    merged_counts = np.add.reduceat(counts, starts)
    merged_edges = np.append(edges[starts], edges[-1])
    return wandb.Histogram(np_histogram=(merged_counts, merged_edges))


def _convert_text(text: media.Text) -> Any:
    import wandb

    return wandb.Table(columns=["text"], data=[[text.text]])


def _convert_figure(figure: media.Figure) -> Any:
    import PIL.Image  # noqa: F401
    import wandb
    from matplotlib.figure import Figure

    drawing = figure.draw(figure.values)
    if not isinstance(drawing, Figure):
        raise TypeError(f"`draw` returned {type(drawing).__name__}, not a matplotlib.figure.Figure")
    try:
        return wandb.Image(drawing)
    finally:
        # pyplot keeps each figure that it made until it is closed.
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(drawing)


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    media.Image: _convert_image,
    media.Images: _convert_images,
    media.Histogram: _convert_histogram,
    media.Text: _convert_text,
    media.Figure: _convert_figure,
}
