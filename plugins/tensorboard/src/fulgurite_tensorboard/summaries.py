"""What TensorBoard is told of a record."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_logging import media
from fulgurite_runs.json_codec import dumps
from tensorboardX import summary
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


def summary_of(record: fg.Record, refuse: Callable[[str, Exception], None]) -> Any:
    """The one summary of a record. A value that cannot be shown is left out; `refuse` is told its
    name and why."""
    whole = Summary()
    if record.kind == "config":
        for part in _config(record):
            whole.MergeFrom(part)
        return whole
    for name, value in record.values.items():
        try:
            parts = list(
                _text(name, media.Text(str(value)))
                if record.kind == "text"
                else _shown(name, value)
            )
        except (
            Exception
        ) as error:  # of a figure's own code, too: the rest of the record does not depend on it
            refuse(name, error)
        else:
            for part in parts:
                whole.MergeFrom(part)
    return whole


def _shown(name: str, value: Any) -> Iterator[Any]:
    """What one value looks like."""
    if isinstance(value, int | float):
        yield _scalar(name, value)
    elif isinstance(value, fg.Media):
        show = next((show for kind, show in _MEDIA.items() if isinstance(value, kind)), None)
        if show is None:
            raise TypeError(f"this logger cannot show fg.Media of type {type(value).__name__}")
        yield from show(name, value)
    elif isinstance(value, str) or value is None:
        yield from _text(name, media.Text(str(value)))
    else:
        array = np.asarray(value)
        for index in np.ndindex(array.shape):
            yield _scalar("/".join([name, *map(str, index)]), float(array[index]))


def _scalar(tag: str, value: float) -> Any:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def _config(record: fg.Record) -> Iterator[Any]:
    """The whole as a text."""
    text = json.dumps(json.loads(dumps(record.values)), indent=2)
    yield summary.text(record.source, "\n".join("    " + line for line in text.splitlines()))


def hyperparameters(record: fg.Record) -> Any:
    """The arguments of a program, if the record has them, as hyper-parameters of the run."""
    arguments = record.values.get("configuration") if record.kind == "config" else None
    if not arguments:
        return None
    plain = {
        name: one if isinstance(one, bool | int | float) else _encodable(str(one))
        for name, one in arguments.items()
    }
    # Which metrics there are to compare TensorBoard finds out by itself if it is told of none.
    _, start, _ = summary.hparams(plain, {})
    return start


def _image(name: str, image: media.Image) -> Iterator[Any]:
    yield summary.image(name, np.asarray(image.pixels), dataformats="HWC")


def _images(name: str, images: media.Images) -> Iterator[Any]:
    several = len(images.pixels) > 1
    for index, pixels in enumerate(np.asarray(images.pixels)):
        yield summary.image(f"{name}/{index}" if several else name, pixels, dataformats="HWC")


def _histogram(name: str, histogram: media.Histogram) -> Iterator[Any]:
    counts, edges = (
        np.asarray(histogram.counts, np.float64),
        np.asarray(histogram.edges, np.float64),
    )
    # The sums are those of numbers in the middle of their bins.
    middle = (edges[1:] + edges[:-1]) / 2
    sums = float(counts @ middle), float(counts @ middle**2)
    yield summary.histogram_raw(
        name,
        edges[0],
        edges[-1],
        counts.sum(),
        *sums,
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
    )


def _text(name: str, text: media.Text) -> Iterator[Any]:
    yield summary.text(name, _encodable(text.text))


def _encodable(text: str) -> str:
    """A text without lone surrogates, which UTF-8 does not have: file names of other encodings hold
    them."""
    return text.encode(errors="backslashreplace").decode()


def _figure(name: str, figure: media.Figure) -> Iterator[Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = figure.draw(figure.values)
    if not isinstance(drawn, Figure):
        raise TypeError(f"`draw` gave {type(drawn).__name__} and no matplotlib.figure.Figure")
    try:
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        yield summary.image(name, np.asarray(canvas.buffer_rgba()), dataformats="HWC")
    finally:
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close(drawn)  # which keeps each figure that it made


_MEDIA: dict[type, Callable[[str, Any], Iterator[Any]]] = {
    media.Image: _image,
    media.Images: _images,
    media.Histogram: _histogram,
    media.Text: _text,
    media.Figure: _figure,
}
