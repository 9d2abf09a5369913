"""Grain's datasets and data loaders."""

from collections.abc import Iterator, Mapping
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError, DataError

_ENDLESS = 2**62
"""The length of a repeated `MapDataset` is the largest integer of the machine."""


def from_grain(dataset: Any, *, prefetch: int = 2) -> fg.DataSource:
    """Return a dataset of Grain as a data source; a run resumes exactly from the state of Grain.

    Grain's own restriction holds: with worker processes (`mp_prefetch`, `worker_count`) a run
    resumes with the number that it had.

    Example:
        import grain
        from fulgurite_data import from_grain

        dataset = grain.MapDataset.source(np.arange(100.0)).shuffle(seed=0).batch(10)
        data = from_grain(dataset)

    Args:
        dataset: a `MapDataset`, each pass of which is shuffled differently, as by its `repeat()`;
            an `IterDataset` or a `DataLoader`, each pass of which is the same; or an iterator,
            which has one pass.
        prefetch: as of `fg.DataSource`.

    Raises:
        ConfigurationError: it is none of these.
    """
    import grain

    _mark_flags_as_parsed()
    if isinstance(dataset, grain.DatasetIterator):
        return fg.DataSource(dataset, resume="exact", prefetch=prefetch)
    if not isinstance(dataset, grain.MapDataset | grain.IterDataset | grain.DataLoader):
        raise ConfigurationError(
            "from_grain: give a MapDataset, an IterDataset, a DataLoader or an iterator of grain, "
            f"not a {type(dataset).__name__}"
        )
    return fg.DataSource(GrainPasses(dataset), resume="exact", prefetch=prefetch)


class GrainPasses:
    """Pass after pass over a dataset of Grain, with the state of Grain's iterator as position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._pass = 0
        self._iterator: Any = None

    def __length_hint__(self) -> int:
        """Return the number of batches in a pass, if it is known."""
        import grain

        # A filter leaves elements out that the length counts.
        if not isinstance(self.dataset, grain.MapDataset) or _has_filter(self.dataset):
            return NotImplemented
        return len(self.dataset) if len(self.dataset) < _ENDLESS else NotImplemented

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass; after its end, the next pass."""
        iterator = self._get_iterator()
        yield from iterator
        self._pass += 1
        self._iterator = None

    def get_state(self) -> dict[str, Any]:
        """Return the position right after the batch that was yielded last."""
        return {"pass": self._pass, "grain": self._get_iterator().get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration continues from there.

        Args:
            state: as `get_state` returned it.

        Raises:
            DataError: Grain refuses the state.
        """
        self._pass = state["pass"]
        self._iterator = None
        try:
            self._get_iterator().set_state(state["grain"])
        except Exception as error:
            raise DataError(
                f"grain cannot continue this {type(self.dataset).__name__} from the position of "
                f"the run: {error}. It must be the dataset that the run had, with as many worker "
                "processes, and a source of a DataLoader needs a __repr__ without an address"
            ) from error

    def _get_iterator(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._take_pass())
        return self._iterator

    def _take_pass(self) -> Any:
        """Return the dataset of this pass."""
        import grain

        if not isinstance(self.dataset, grain.MapDataset):
            return self.dataset
        length = len(self.dataset)
        if length >= _ENDLESS:
            return self.dataset.to_iter_dataset()
        first = self._pass * length
        return self.dataset.repeat()[first : first + length].to_iter_dataset()


def _has_filter(dataset: Any) -> bool:
    name = type(dataset).__name__
    parents = getattr(dataset, "parents", None) or ()
    return "Filter" in name or any(_has_filter(parent) for parent in parents)


def _mark_flags_as_parsed() -> None:
    """Let Grain start worker processes outside of a program of absl, which it refuses otherwise."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
