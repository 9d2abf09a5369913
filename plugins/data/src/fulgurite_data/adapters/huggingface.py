"""Datasets of Hugging Face: of rows with an index, and streamed."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import fulgurite as fg
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    as_int,
    check_one_of,
    check_positive_int,
    error_context,
)

from fulgurite_data.adapters.passes import CheckedPasses
from fulgurite_data.adapters.shapes import check_shapes
from fulgurite_data.arrow import read_column
from fulgurite_data.content import Mark, choose_rows, look_at
from fulgurite_data.dataset import Dataset
from fulgurite_data.examples import Ragged, stack_rows
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass


class HuggingFace(Dataset):
    """The rows of a Hugging Face dataset that has an index, in the dtypes of its columns. The rows
    of a batch are read at once.

    Example:
        from datasets import Dataset
        from fulgurite_data import HuggingFace

        table = Dataset.from_dict({"x": np.arange(100.0), "label": [0, 1] * 50})
        dataset = HuggingFace(table, columns=["x", "label"])
        batches = dataset.shuffle().batch(64)

    Args:
        dataset: a `datasets.Dataset`.
        columns: those of an example; all by default.

    Raises:
        ConfigurationError: it is another kind of dataset: a `DatasetDict` has several, of which to
            choose one, and an `IterableDataset` no index, see `from_huggingface`; or it has a
            transform.
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] | None = None) -> None:
        _check_kind(dataset, "HuggingFace", "Dataset")
        if columns is not None:
            dataset = dataset.select_columns(list(columns))
        super().__init__(HuggingFaceNode(dataset))


class HuggingFaceNode(Node):
    """The rows of a `datasets.Dataset`.

    Args:
        dataset: with the columns of an example.
    """

    def __init__(self, dataset: Any) -> None:
        if dataset.format["type"] == "custom":
            raise ConfigurationError(
                "HuggingFace: this dataset has a transform, which is not called here: give "
                "HuggingFace(dataset.with_format(None)).map(function) a function of one example"
            )
        self.length = len(dataset)
        self.names = dataset.column_names
        plain = [name for name, feature in dataset.features.items() if _is_plain(feature)]
        others = [name for name in self.names if name not in plain]
        self.rows = dataset.with_format("arrow")
        self.plain = self.rows.select_columns(plain) if plain else None
        self.others = dataset.select_columns(others).with_format("numpy") if others else None
        self.stages = (f"HuggingFace({', '.join(self.names)}, {self.length})",)

    def look(self) -> Mark:
        # Not `_fingerprint`, which is another one in each process for some datasets.
        numbers = choose_rows(self.length)
        rows = self.rows[numbers].to_pydict() if numbers else {}
        return look_at(str(self.rows.features), rows)

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        numbers = indices.tolist()
        columns = {}
        with error_context(lambda: f"in {self.stages[-1]}, examples {numbers[:10]}"):
            if self.plain is not None:
                columns |= _read_columns(self.plain[numbers])
            if self.others is not None:
                examples = self.others.__getitems__(numbers)
                columns |= stack_rows(examples, lambda: self.stages[-1])
        return {name: columns[name] for name in self.names}


def from_huggingface(
    dataset: Any,
    batch_size: int,
    *,
    columns: Sequence[str] | None = None,
    drop_last: bool = False,
    resume: Literal["replay", "restart"] = "replay",
    prefetch: int = 2,
) -> fg.DataSource:
    """Return a streamed dataset of Hugging Face as a data source of batches.

    Its `state_dict()` leaves the shuffle buffer out, so that a run that resumed from it would lose
    and repeat examples. So the position is a number of batches, which are read again.

    Example:
        from datasets import Dataset
        from fulgurite_data import from_huggingface

        dataset = Dataset.from_dict({"x": np.arange(100.0)}).to_iterable_dataset()
        data = from_huggingface(dataset.shuffle(seed=0), 10)

    Args:
        dataset: an `IterableDataset`. Each pass calls its `set_epoch`, and so is in an order of its
            own if the dataset shuffles.
        batch_size: examples in a batch.
        columns: the columns of a batch; all by default.
        drop_last: whether to leave a last, smaller batch out.
        resume: `replay`: the batches of a pass are read again up to the position, and compared with
            a checksum, so that the run is exact or fails before its first step. `restart`: a
            resumed run begins with the first batch, and is not exact.
        prefetch: as of `fg.DataSource`.

    Raises:
        ConfigurationError: it is not an `IterableDataset`, or it shuffles without a seed and
            `resume` is `replay`.
    """
    _check_kind(dataset, "from_huggingface", "IterableDataset")
    batch_size = as_int(batch_size)
    check_positive_int(batch_size, "from_huggingface: batch_size")
    check_one_of(resume, ("replay", "restart"), "from_huggingface: resume")
    if columns is not None:
        dataset = dataset.select_columns(list(columns))
    if resume == "replay":
        _check_seed(dataset)
    source = StreamedRows(dataset, batch_size, drop_last)
    promise = "exact" if resume == "replay" else "restart"
    return fg.DataSource(source, resume=promise, prefetch=prefetch)


class StreamedRows(CheckedPasses):
    """An `IterableDataset`, each pass of which is shuffled by its number."""

    description = "the Hugging Face IterableDataset"

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last

    def start_pass(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass.

        Args:
            number: of the pass, from 0.
        """
        features = self.dataset.features
        is_plain = features is not None and all(map(_is_plain, features.values()))
        formatted = self.dataset.with_format("arrow" if is_plain else "numpy")
        formatted.set_epoch(number)  # which a copy in another format does not take over
        for batch in formatted.iter(self.batch_size, drop_last_batch=self.drop_last):
            yield _check_equal(_read_columns(batch)) if is_plain else check_shapes(batch)


def _is_plain(feature: Any) -> bool:
    """Return whether a column is of numbers or strings, or lists of them, as Arrow has them.

    The NumPy format of `datasets` turns int8 into int64 and float64 into float32, so that it is
    only for what it decodes, such as images.
    """
    feature = feature[0] if isinstance(feature, list) else feature
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_plain(inner)
    return type(feature).__name__ in ("Value", "ClassLabel")


def _read_columns(table: Any) -> dict[str, np.ndarray | Ragged]:
    names = table.schema.names
    return {name: read_column(table.column(name), f"column {name!r}") for name in names}


def _check_kind(dataset: Any, where: str, expected: str) -> None:
    """Raise `ConfigurationError` if a dataset is of another kind."""
    names = [
        cls.__name__ for cls in type(dataset).__mro__ if cls.__module__.startswith("datasets.")
    ]
    if expected in names:
        return
    advice = {
        "Dataset": "It has an index: HuggingFace(dataset).shuffle().batch(size)",
        "IterableDataset": "It has no index: from_huggingface(dataset, batch_size)",
        "DatasetDict": "It holds several: choose one, dataset['train']",
        "IterableDatasetDict": "It holds several: choose one, dataset['train']",
    }
    hint = next((advice[name] for name in names if name in advice), "")
    raise ConfigurationError(
        f"{where} is for a {expected} of Hugging Face, and this is a {type(dataset).__name__}. "
        f"{hint}".rstrip()
    )


def _check_equal(columns: dict[str, np.ndarray | Ragged]) -> dict[str, Any]:
    """Return the columns of a batch; raise `DataError` if the examples of one have several
    lengths."""
    for name, column in columns.items():
        if isinstance(column, Ragged):
            raise DataError(
                f"column {name!r} has examples of {column.lengths.min()} to {column.lengths.max()} "
                "values: a batch holds arrays of one shape. Pad them to one length, bucket them by "
                "length, or pack them"
            )
    return columns


def _check_seed(dataset: Any) -> None:
    """Raise `ConfigurationError` if a dataset shuffles by a seed that no one chose."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        generator = getattr(part, "generator", None)
        if isinstance(generator, np.random.Generator) and _is_unseeded(generator):
            raise ConfigurationError(
                "from_huggingface: this dataset is shuffled without a seed, so that no other "
                "process can read it in the same order: give shuffle(seed=...), or "
                "resume='restart' (not exact)"
            )
        # The library's own attributes: where they are missing, the checksum finds a difference.
        parents = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        waiting += [parent for parent in parents if parent is not None]


def _is_unseeded(generator: np.random.Generator) -> bool:
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
    # Without a seed, NumPy draws 128 bits from the system.
    return isinstance(entropy, int) and entropy.bit_length() > 64
