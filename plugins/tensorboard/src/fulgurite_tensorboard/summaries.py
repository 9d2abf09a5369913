"""Turn records into summaries of TensorBoard."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_logging import media
from fulgurite_runs import dumps
from PIL import Image as PillowImage
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

# The modules are generated, and type checkers see nothing in them.
HistogramProto: Any = vars(summary_pb2)["HistogramProto"]
Summary: Any = vars(summary_pb2)["Summary"]
SummaryMetadata: Any = vars(summary_pb2)["SummaryMetadata"]
TensorProto: Any = vars(tensor_pb2)["TensorProto"]
TensorShapeProto: Any = vars(tensor_shape_pb2)["TensorShapeProto"]
DT_STRING: Any = vars(types_pb2)["DT_STRING"]


def build_summary(record: fg.Record, refuse: Callable[[str, Exception], None]) -> Any:
    """Return the one summary of a record.

    Args:
        record: the record.
        refuse: called with the name of each value that cannot be shown, which is left out, and the
            error.
    """
    whole = Summary()
    if record.kind == "config":
        whole.MergeFrom(_summarize_config(record))
        return whole
    for name, value in record.values.items():
        try:
            if record.kind == "text":
                value = media.Text(str(value))
            parts = list(_summarize_value(name, value))
        # Any exception, because a figure's code is the user's: the rest of the record is shown.
        except Exception as error:
            refuse(name, error)
        else:
            for part in parts:
                whole.MergeFrom(part)
    return whole


def build_hyperparameters(record: fg.Record) -> Any:
    """Return the arguments of a program as hyper-parameters of the run; None if the record has
    none."""
    arguments = record.values.get("configuration") if record.kind == "config" else None
    if not arguments:
        return None
    values = {
        name: value if isinstance(value, bool | int | float) else _escape_surrogates(str(value))
        for name, value in arguments.items()
    }
    # Imported here, because it takes 0.3 s and few programs have arguments.
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    # Without a list of metrics TensorBoard finds out by itself which there are to compare.
    return hparams_pb(values, start_time_secs=record.wall_time or 0.0)


def _summarize_value(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, int | float):
        yield _summarize_scalar(name, value)
    elif isinstance(value, fg.Media):
        for media_type, summarize in _SUMMARIZERS.items():
            if isinstance(value, media_type):
                yield from summarize(name, value)
                return
        raise TypeError(f"this logger cannot show fg.Media of type {type(value).__name__}")
    elif isinstance(value, str) or value is None:
        yield from _summarize_text(name, media.Text(str(value)))
    else:
        array = np.asarray(value)
        for index in np.ndindex(array.shape):
            yield _summarize_scalar("/".join([name, *map(str, index)]), float(array[index]))


def _summarize_scalar(tag: str, value: float) -> Any:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def _summarize_config(record: fg.Record) -> Any:
    text = json.dumps(json.loads(dumps(record.values)), indent=2)
    # Markdown shows lines that are indented by four spaces as they are.
    return _build_text(record.source, "\n".join("    " + line for line in text.splitlines()))


def _summarize_image(name: str, image: media.Image) -> Iterator[Any]:
    yield _build_image(name, np.asarray(image.pixels))


def _summarize_images(name: str, images: media.Images) -> Iterator[Any]:
    for index, pixels in enumerate(np.asarray(images.pixels)):
        tag = name if len(images.pixels) == 1 else f"{name}/{index}"
        yield _build_image(tag, pixels)


def _summarize_histogram(name: str, histogram: media.Histogram) -> Iterator[Any]:
    counts = np.asarray(histogram.counts, np.float64)
    edges = np.asarray(histogram.edges, np.float64)
    # The sums of values and squares, as if each value were in the middle of its bin.
    centers = (edges[1:] + edges[:-1]) / 2
    histogram_proto = HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=float(counts @ centers),
        sum_squares=float(counts @ centers**2),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
    yield Summary(value=[Summary.Value(tag=name, histo=histogram_proto)])


def _summarize_text(name: str, text: media.Text) -> Iterator[Any]:
    yield _build_text(name, _escape_surrogates(text.text))


def _build_image(tag: str, pixels: np.ndarray) -> Any:
    """Return the summary of a picture, uint8 `(height, width, 1, 3 or 4)`, as a PNG."""
    height, width, num_channels = pixels.shape
    picture = PillowImage.fromarray(pixels[:, :, 0] if num_channels == 1 else pixels)
    file = io.BytesIO()
    picture.save(file, format="PNG")
    image = Summary.Image(
        height=height,
        width=width,
        colorspace=num_channels,
        encoded_image_string=file.getvalue(),
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _build_text(tag: str, text: str) -> Any:
    """Return the summary of a text in Markdown."""
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    plugin_data = SummaryMetadata.PluginData(plugin_name="text")
    metadata = SummaryMetadata(plugin_data=plugin_data)
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _escape_surrogates(text: str) -> str:
    """Return a text that UTF-8 can encode: file names of other encodings hold lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _summarize_figure(name: str, figure: media.Figure) -> Iterator[Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = figure.draw(figure.values)
    if not isinstance(drawing, Figure):
        raise TypeError(f"`draw` returned {type(drawing).__name__}, not a matplotlib.figure.Figure")
    try:
        canvas = FigureCanvasAgg(drawing)
        canvas.draw()
        yield _build_image(name, np.asarray(canvas.buffer_rgba()))
    finally:
        # pyplot keeps each figure that it made until it is closed.
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(drawing)


_SUMMARIZERS: dict[type, Callable[[str, Any], Iterator[Any]]] = {
    media.Image: _summarize_image,
    media.Images: _summarize_images,
    media.Histogram: _summarize_histogram,
    media.Text: _summarize_text,
    media.Figure: _summarize_figure,
}
