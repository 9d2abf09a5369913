"""Sources that can only be read from the beginning of a pass, and that are checked when a run
resumes."""

import zlib
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any

import jax
import numpy as np
from fulgurite.errors import DataError


class CheckedPasses:
    """A source whose passes are functions of their number, so that a run resumes by reading a pass
    again up to its position.

    Nobody can see of a loader whether that holds: its dataset may draw random numbers. So the
    position holds a checksum of the batches of the pass. A run whose loader gives other batches
    the second time is told so before it trains a step.
    """

    description = "the source"
    """What errors call the source, with an article."""

    _pass: int = 0
    _batch: int = 0
    _checksum: int = 0

    def start_pass(self, number: int) -> Iterator[Any]:
        """Return an iterator over the batches of a pass.

        Args:
            number: of the pass, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start_pass: define it")

    def get_loader(self) -> Any:
        """Return what has the length of a pass, if it has one."""
        return None

    def __length_hint__(self) -> int:
        """Return the number of batches in a pass, where the loader knows it."""
        return get_length_hint(self.get_loader())

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass; after its end, the next pass."""
        number = self._pass
        batches = self.start_pass(number)
        if self._batch:
            self._read_again(batches)
        for batch in batches:
            self._batch += 1
            self._checksum = add_to_checksum(self._checksum, batch)
            yield batch
        self._pass, self._batch, self._checksum = number + 1, 0, 0

    def get_state(self) -> dict[str, int]:
        """Return the position right after the batch that was yielded last."""
        return {"pass": self._pass, "batch": self._batch, "checksum": self._checksum}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to a position: the next iteration continues from there.

        Args:
            state: as `get_state` returned it.
        """
        self._pass, self._batch = state["pass"], state["batch"]
        self._checksum = state["checksum"]

    def _read_again(self, batches: Iterator[Any]) -> None:
        """Read the batches before the position; raise `DataError` if they are others."""
        checksum = 0
        for number in range(self._batch):
            batch = next(batches, None)
            if batch is None:
                raise DataError(
                    f"{self.description} has {number} batches in pass {self._pass}, and the run "
                    f"had read {self._batch}: resume with the data that the run had."
                )
            checksum = add_to_checksum(checksum, batch)
        if checksum != self._checksum:
            raise DataError(
                f"{self.description} cannot be read again: its first {self._batch} batches of pass "
                f"{self._pass} are not those that the run had read. The data or its settings "
                "changed, or it draws random numbers that no seed decides, in its order or in its "
                "examples. Seed them; or give resume='restart', and a resumed run begins with the "
                "first batch (not exact)."
            )


def get_length_hint(loader: Any) -> int:
    """Return the number of batches in a pass over a loader; NotImplemented, as `__length_hint__`
    does, where it does not know.

    Args:
        loader: with or without `__len__`, which may raise a `TypeError`.
    """
    try:
        length = length_hint(loader, -1)
    except TypeError:
        return NotImplemented
    return length if length >= 0 else NotImplemented


def add_to_checksum(checksum: int, batch: Any) -> int:
    """Return the CRC-32 of what was read so far with one more batch.

    Args:
        checksum: of the batches before.
        batch: a pytree of arrays or numbers.
    """
    for leaf in jax.tree.leaves(batch):
        array = np.ascontiguousarray(leaf)
        if array.dtype != object:
            checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    return checksum
