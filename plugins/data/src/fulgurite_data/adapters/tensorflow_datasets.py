"""TensorFlow's `tf.data.Dataset`."""

from collections.abc import Iterator
from typing import Any, Literal

import fulgurite as fg
from fulgurite.errors import ConfigurationError, check_one_of

from fulgurite_data.adapters.passes import CheckedPasses, get_length_hint
from fulgurite_data.adapters.shapes import check_shapes


def from_tfdata(
    dataset: Any, *, resume: Literal["replay", "restart"] | None = None, prefetch: int = 2
) -> fg.DataSource:
    """Return a `tf.data.Dataset` of batches as a data source of NumPy batches.

    Its position cannot be saved as numbers. So a run with a `Checkpointer` refuses it unless
    `resume` says what the run may expect.

    Example:
        import tensorflow as tf
        from fulgurite_data import from_tfdata

        dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(100.0)})
        dataset = dataset.shuffle(1000, seed=0, reshuffle_each_iteration=False).batch(32)
        data = from_tfdata(dataset, resume="replay")

    Args:
        dataset: of batches.
        resume: `replay`: each pass is the same. The batches of a pass are read again up to the
            position, and compared with a checksum, so that the run is exact or fails before its
            first step. `restart`: a resumed run begins with the first batch, and is not exact.
        prefetch: as of `fg.DataSource`.

    Raises:
        ConfigurationError: it is plain that passes differ, and `resume` is `replay`.
    """
    if not hasattr(dataset, "as_numpy_iterator"):
        raise ConfigurationError(
            f"from_tfdata: give a tf.data.Dataset, not a {type(dataset).__name__}, which has no "
            "as_numpy_iterator()"
        )
    if resume is None:
        return fg.DataSource(TensorFlowBatches(dataset), prefetch=prefetch)
    check_one_of(resume, ("replay", "restart"), "from_tfdata: resume")
    if resume == "restart":
        return fg.DataSource(TensorFlowBatches(dataset), resume="restart", prefetch=prefetch)
    _check_order(dataset)
    return fg.DataSource(TensorFlowPasses(dataset), resume="exact", prefetch=prefetch)


class TensorFlowBatches:
    """The batches of a dataset as NumPy arrays.

    Attributes:
        resume_hint: what a `Checkpointer` says that refuses it.
    """

    resume_hint = (
        "Of a tf.data.Dataset: from_tfdata(dataset, resume='replay') reads a pass again and checks "
        "that it is the same, which needs shuffle(seed=..., reshuffle_each_iteration=False)"
    )

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __length_hint__(self) -> int:
        """Return the number of batches in a pass, where the dataset knows it."""
        return get_length_hint(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass."""
        return map(check_shapes, self.dataset.as_numpy_iterator())


class TensorFlowPasses(CheckedPasses):
    """A dataset of which each pass is the same."""

    description = "the tf.data.Dataset"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def get_loader(self) -> Any:
        """Return the batches of a pass, which know how many they are."""
        return TensorFlowBatches(self.dataset)

    def start_pass(self, number: int) -> Iterator[Any]:
        """Return an iterator over the batches of a pass.

        Args:
            number: of the pass, from 0.
        """
        return iter(TensorFlowBatches(self.dataset))


def _check_order(dataset: Any) -> None:
    """Raise `ConfigurationError` if it is plain that the passes over a dataset differ."""
    if dataset.options().deterministic is False:
        raise ConfigurationError(
            "from_tfdata: resume='replay' needs batches in a fixed order, and the options of this "
            "dataset say deterministic=False"
        )
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        # An attribute of TensorFlow's own: where it is missing, the checksum finds the difference.
        if getattr(part, "_reshuffle_each_iteration", False):
            raise ConfigurationError(
                "from_tfdata: resume='replay' says that each pass is the same, and this dataset "
                "shuffles each differently: give shuffle(seed=..., reshuffle_each_iteration=False)"
            )
        waiting += getattr(part, "_inputs", list)()
