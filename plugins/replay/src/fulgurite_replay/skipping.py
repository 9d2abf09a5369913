"""Data of which some batches are left out, so that a run can continue without a bad one."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import BatchIterator, get_device_arrays, get_split
from fulgurite_runs import read_origin


class SkippedBatches:
    """The batches of a data source without some of them, as a source with a state of its own.

    Example:
        from fulgurite_replay import SkippedBatches

        batches = SkippedBatches(data, steps=(38,))
        fg.Engine(steps=50).fit(model, batches)

    Attributes:
        data: the data source.

    Args:
        data: a data source that can be resumed.
        steps: the batches to leave out, by the steps that would train on them without that, from 1.
        position: where in the data to begin: that of a snapshot of a run of `data`; the beginning
            by default.
        num_batches: how many batches come before that position.
    """

    def __init__(
        self,
        data: Any,
        steps: tuple[int, ...],
        position: dict[str, Any] | None = None,
        num_batches: int = 0,
    ) -> None:
        if jax.process_count() > 1:
            raise ConfigurationError(
                "batches are left out of the data of one process, and this run has several"
            )
        self.data = get_split(data, "train")
        self._steps = frozenset(steps)
        self._seed: Any = 0
        self._position = position
        self._num_batches = num_batches

    def set_run_seed(self, seed: Any) -> None:
        """Take the seed of the run, from which the order of the data may follow."""
        self._seed = seed

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, and how many of its batches come before."""
        return {"position": self._position, "num_batches": self._num_batches}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._position = state["position"]
        self._num_batches = state["num_batches"]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches up to the end of the epoch."""
        arrays = get_device_arrays(self.data)
        with BatchIterator(self.data, seed=self._seed, position=self._position) as items:
            for item in items:
                self._position = item.position
                self._num_batches += 1
                if self._num_batches not in self._steps:
                    yield fg.ArrayData.gather(arrays, item.batch)
                if item.epoch_end:
                    return


def read_skipped(run: Path) -> tuple[int, ...]:
    """Return which batches of the data a run leaves out, counted over all epochs from 1; none
    unless it is a fork.

    Args:
        run: its directory.

    Raises:
        CheckpointError: the file holds something else than numbers of batches.
    """
    numbers = read_origin(run).get("skipped_batches", [])
    is_list = isinstance(numbers, list)
    if not is_list or any(type(number) is not int or number < 1 for number in numbers):
        raise CheckpointError(
            f"the skipped_batches of {run / 'origin.json'} are {numbers!r:.100}, not numbers of "
            "batches: restore the file"
        )
    return tuple(sorted(numbers))


def find_batch_numbers(steps: Iterable[int], skipped: tuple[int, ...]) -> tuple[int, ...]:
    """Return which batches of the data some steps of a run trained on, counted over all epochs from
    1.

    Args:
        steps: their numbers.
        skipped: the batches that the run left out, in ascending order.
    """
    numbers = []
    for step in steps:
        number = step
        for other in skipped:
            number += other <= number
        numbers.append(number)
    return tuple(numbers)
