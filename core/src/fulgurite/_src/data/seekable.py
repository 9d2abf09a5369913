"""Sources of which any batch of any epoch can be read at once, as `ArrayData` and the pipelines of
`fulgurite-data`."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

Seed = int | tuple[int, ...]
"""What random numbers follow from: one integer that is not negative, or several."""


@runtime_checkable
class SeekableSource(Protocol):
    """A source whose batches are a function of seed, epoch and number, so that a position is two
    integers, whatever was read ahead and however many processes there are.

    `DataSource` calls no method before a walk begins, so that each may take its time.

    Example:
        from fulgurite.plugins import SeekableSource

        data = fg.ArrayData({"x": np.ones((6, 2))}, 2, shuffle=True)
        assert isinstance(data, SeekableSource)
        third = next(data.iter_epoch(4, seed=0, start=2))  # of epoch 4
    """

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        ...

    def iter_epoch(
        self, number: int, *, seed: Seed, start: int = 0, process: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Args:
            number: that of the epoch, from 0.
            seed: what the order follows from.
            start: the first batch.
            process: index and number of the processes that share each batch; each gets an equal,
                contiguous part.
        """
        ...

    def iter_known_batches(self, process: tuple[int, int]) -> Iterator[tuple[int, Any]]:
        """Yield one batch of each further kind of shapes than the first, with its number in an
        epoch.

        Args:
            process: as of `iter_epoch`.
        """
        ...

    def has_unequal_batches(self) -> bool:
        """Return whether some batches have fewer examples than others, padding left out."""
        ...

    def has_padding(self) -> bool:
        """Return whether some batches have rows of padding."""
        ...

    def depends_on_epoch(self) -> bool:
        """Return whether the batches differ from epoch to epoch, and with the seed."""
        ...

    def get_identity(self) -> tuple[str, ...]:
        """Return what decides which batches these are, line by line. A run resumes only with what
        has the lines that are in its position; none for a source that does not care."""
        ...


def find_changes(saved: list[str], current: list[str]) -> list[str]:
    """Return sentences about how the identity of a source differs from that in a position.

    Args:
        saved: the lines in the position.
        current: those of the source.
    """
    changes = [
        f"{before!r} is {after!r} now"
        for before, after in zip(saved, current, strict=False)
        if before != after
    ]
    num_common = min(len(saved), len(current))
    changes += [f"{line!r} is gone" for line in saved[num_common:]]
    return changes + [f"{line!r} is new" for line in current[num_common:]]
