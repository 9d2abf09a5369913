"""One source of batches out of several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import SeekableSource, hide_constructor_frames

from fulgurite_data.parts import PartReader, ResumablePasses, check_part

Length = Literal["cycle", "min", "max"]


@hide_constructor_frames
class Together(ResumablePasses):
    """A source whose batches are dictionaries with a batch of each of several sources.

    Which batches these are depends only on the number of the pass and of the batch in it, so a run
    that resumes continues with the next one, whatever the lengths are.

    Example:
        from fulgurite_data import Together

        labelled = fg.ArrayData({"x": np.ones((40, 3)), "y": np.ones(40)}, 8, shuffle=True)
        unlabelled = fg.ArrayData(np.zeros((400, 3)), 8, shuffle=True)
        both = Together({"labelled": labelled, "unlabelled": unlabelled})
        len(both)  # 50: the first is read ten times

    Attributes:
        parts: the sources by name: `fg.ArrayData`, the batches of a `Dataset`, or lists and tuples
            of batches.
        length: when a pass ends. `cycle`: with the longest source; the others begin again.
            `min`: with the shortest. `max`: with the longest; a source that has ended gives None,
            so that a batch has another structure, see `batch_examples`.
        seed: for the order of each `ArrayData` that shuffles and has no seed; by default the seed
            of the run. Every source gets an order of its own, also two of one length.
    """

    def __init__(
        self,
        parts: Mapping[str, SeekableSource | Sequence[Any]],
        length: Length = "cycle",
        *,
        seed: int | None = None,
    ) -> None:
        if length not in get_args(Length):
            raise ConfigurationError(
                f"Together: length is {length!r}; it must be 'cycle', 'min' or 'max'."
            )
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigurationError("Together: parts must be a dictionary of sources by name.")
        for name, part in parts.items():
            check_part("Together", name, part)
        self.parts = dict(parts)
        self.length: Length = length
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of batches in a pass."""
        lengths = [len(part) for part in self.parts.values()]
        return min(lengths) if self.length == "min" else max(lengths)

    def iter_pass(self, num_pass: int, start: int) -> Iterator[dict[str, Any]]:
        """Yield the batches of a pass.

        Args:
            num_pass: the number of the pass.
            start: the number of the first batch.
        """
        seed = self.get_order_seed()
        readers = {
            name: PartReader(part, (seed, index))
            for index, (name, part) in enumerate(self.parts.items())
        }
        for number in range(start, len(self)):
            yield {name: self._read(reader, num_pass, number) for name, reader in readers.items()}

    @property
    def batch_examples(self) -> tuple[dict[str, Any], ...]:
        """A batch of each structure that occurs, for `fg.DataSource(..., batch_examples=)`: with
        `length="max"`, sources end one after the other."""
        seed = self.get_order_seed()
        readers = [PartReader(part, (seed, 0)) for part in self.parts.values()]
        ends = {0} | {len(part) for part in self.parts.values() if self.length == "max"}
        numbers = sorted(end for end in ends if end < len(self))
        return tuple(
            dict(zip(self.parts, (self._read(r, 0, n) for r in readers), strict=True))
            for n in numbers
        )

    def __repr__(self) -> str:
        """Return the sources and the length, for the description of a run."""
        return f"Together({self.parts!r}, {self.length!r}, seed={self.seed})"

    def _read(self, reader: PartReader, num_pass: int, number: int) -> Any:
        size = len(reader.part)
        if self.length == "max" and number >= size:
            return None
        # A source that begins again within a pass has another order each time.
        rounds = math.ceil(len(self) / size) if self.length == "cycle" else 1
        return reader.read(num_pass * rounds + number // size, number % size)
