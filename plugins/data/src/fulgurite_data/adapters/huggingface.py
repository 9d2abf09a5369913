"""Datasets of Hugging Face: of rows with an index, and streamed."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import fulgurite as fg
import numpy as np
from fulgurite.errors import ConfigurationError, check_one_of, check_positive_int

from fulgurite_data.adapters.arrow_columns import as_arrays
from fulgurite_data.adapters.passes import CheckedPasses
from fulgurite_data.adapters.shapes import check_shapes


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
        ConfigurationError: it is not an `IterableDataset`, has no such column, or shuffles without
            a seed, and `resume` is `replay`.
    """
    check_positive_int(batch_size, "from_huggingface: batch_size")
    check_one_of(resume, ("replay", "restart"), "from_huggingface: resume")
    if columns is not None:
        dataset = dataset.select_columns(list(columns))
    if resume == "replay":
        _check_seed(dataset)
    promise = "exact" if resume == "replay" else "restart"
    source = StreamedRows(dataset, batch_size, drop_last)
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
        # The NumPy format of `datasets` turns int8 into int64 and float64 into float32.
        is_plain = features is not None and all(map(_is_plain, features.values()))
        formatted = self.dataset.with_format("arrow" if is_plain else "numpy")
        formatted.set_epoch(number)  # which a copy in another format does not take over
        for batch in formatted.iter(self.batch_size, drop_last_batch=self.drop_last):
            yield as_arrays(batch) if is_plain else check_shapes(batch)


def _is_plain(feature: Any) -> bool:
    """Return whether a feature is one of numbers or strings, or lists of them, as Arrow has them;
    an image, such as, is decoded."""
    feature = feature[0] if isinstance(feature, list) else feature
    inner = getattr(feature, "feature", None)
    return (
        _is_plain(inner) if inner is not None else type(feature).__name__ in ("Value", "ClassLabel")
    )


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
        waiting += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        waiting = [part for part in waiting if part is not None]


def _is_unseeded(generator: np.random.Generator) -> bool:
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
    # NumPy draws 128 bits from the system where there is no seed.
    return isinstance(entropy, int) and entropy.bit_length() > 64
