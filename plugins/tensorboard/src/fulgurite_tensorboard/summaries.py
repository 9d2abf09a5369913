"""What TensorBoard is told of a record."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.encoding import dumps
from tensorboardX import summary
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


def summary_of(record: fg.Record) -> Any:
    """The one summary of a record."""
    whole = Summary()
    if record.kind == "config":
        for part in _config(record):
            whole.MergeFrom(part)
    for name, value in record.values.items() if record.kind != "config" else ():
        if isinstance(value, int | float):
            whole.value.add(tag=name, simple_value=value)
        elif isinstance(value, fg.media.Media):
            for part in _MEDIA[type(value)](name, value):
                whole.MergeFrom(part)
        elif isinstance(value, str) or value is None:
            whole.MergeFrom(summary.text(name, str(value)))
        else:
            array = np.asarray(value)
            for index in np.ndindex(array.shape):
                whole.value.add(tag="/".join([name, *map(str, index)]), simple_value=float(array[index]))
    return whole


def _config(record: fg.Record) -> Iterator[Any]:
    """The whole as a text, and a program's arguments as hyper-parameters."""
    text = json.dumps(json.loads(dumps(record.values)), indent=2)
    yield summary.text(record.source, "\n".join("    " + line for line in text.splitlines()))
    if arguments := record.values.get("configuration"):
        plain = {
            name: one if isinstance(one, bool | int | float | str) else str(one) for name, one in arguments.items()
        }
        yield from summary.hparams(plain, {})


def _image(name: str, image: fg.media.Image) -> Iterator[Any]:
    yield summary.image(name, np.asarray(image.pixels), dataformats="HWC")


def _images(name: str, images: fg.media.Images) -> Iterator[Any]:
    several = len(images.pixels) > 1
    for index, pixels in enumerate(np.asarray(images.pixels)):
        yield summary.image(f"{name}/{index}" if several else name, pixels, dataformats="HWC")


def _histogram(name: str, histogram: fg.media.Histogram) -> Iterator[Any]:
    counts, edges = np.asarray(histogram.counts, np.float64), np.asarray(histogram.edges, np.float64)
    # The sums are those of numbers in the middle of their bins.
    middle = (edges[1:] + edges[:-1]) / 2
    sums = float(counts @ middle), float(counts @ middle**2)
    yield summary.histogram_raw(
        name, edges[0], edges[-1], counts.sum(), *sums, bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist()
    )


def _text(name: str, text: fg.media.Text) -> Iterator[Any]:
    yield summary.text(name, text.text)


def _figure(name: str, figure: fg.media.Figure) -> Iterator[Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure.draw(figure.values))
    canvas.draw()
    yield summary.image(name, np.asarray(canvas.buffer_rgba()), dataformats="HWC")


_MEDIA: dict[type, Callable[[str, Any], Iterator[Any]]] = {
    fg.media.Image: _image,
    fg.media.Images: _images,
    fg.media.Histogram: _histogram,
    fg.media.Text: _text,
    fg.media.Figure: _figure,
}
