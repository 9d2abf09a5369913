"""One source of batches after the other."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from fulgurite.errors import ConfigurationError, as_int, check_positive_int
from fulgurite.plugins import SeekableSource, hide_constructor_frames

from fulgurite_data.parts import PartReader, ResumablePasses, check_part


@hide_constructor_frames
class Stages(ResumablePasses):
    """A source that gives the batches of several sources one after the other, each for a number of
    steps: a curriculum, or other data at the end of training.

    A pass is all stages. Which batch comes next depends only on its number, so a run that resumes
    continues with it, in the middle of a stage too.

    Example:
        from fulgurite_data import Stages

        easy = fg.ArrayData(np.zeros((40, 3)), 8, shuffle=True)
        hard = fg.ArrayData(np.ones((40, 3)), 8, shuffle=True)
        curriculum = Stages((easy, 100), (hard, 400))
        engine = fg.Engine(steps=len(curriculum))  # 500

    Attributes:
        stages: pairs of a source, an `fg.ArrayData`, the batches of a `Dataset`, or a list or tuple
            of batches, and for how many steps it is read. A source that is shorter begins again,
            in another order if it shuffles.
        ends: the numbers of steps after which the stages end.
        seed: for the order of each `ArrayData` that shuffles and has no seed; by default the seed
            of the run.
    """

    def __init__(
        self, *stages: tuple[SeekableSource | Sequence[Any], int], seed: int | None = None
    ) -> None:
        if not stages:
            raise ConfigurationError("Stages: at least one pair (source, steps) is needed.")
        self.stages = tuple((part, as_int(steps)) for part, steps in stages)
        for index, (part, steps) in enumerate(self.stages):
            check_part("Stages", index, part)
            check_positive_int(steps, f"Stages: the number of steps of stage {index}")
        self.ends = tuple(accumulate(steps for _, steps in self.stages))
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of batches in a pass, which is that of all stages."""
        return self.ends[-1]

    def iter_pass(self, num_pass: int, start: int) -> Iterator[Any]:
        """Yield the batches of a pass.

        Args:
            num_pass: the number of the pass.
            start: the number of the first batch.
        """
        readers = self._make_readers()
        for number in range(start, len(self)):
            index = bisect_right(self.ends, number)
            first = self.ends[index - 1] if index else 0
            read_before = num_pass * self.stages[index][1]
            yield readers[index].read_number(read_before + number - first)

    @property
    def batch_examples(self) -> tuple[Any, ...]:
        """A batch of each stage, for `fg.DataSource(..., batch_examples=)` where their structures
        differ."""
        return tuple(reader.read_number(0) for reader in self._make_readers())

    def __repr__(self) -> str:
        """Return the stages, for the description of a run."""
        return f"Stages{self.stages!r}, seed={self.seed}"

    def _make_readers(self) -> list[PartReader]:
        seed = self.get_order_seed()
        return [PartReader(part, (seed, i)) for i, (part, _) in enumerate(self.stages)]
