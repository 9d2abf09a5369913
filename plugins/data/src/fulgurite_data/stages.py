"""One source of batches after the other."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError

from fulgurite_data.parts import PartReader, check_part


class Stages:
    """A source that gives the batches of several sources one after the other, each for a number of
    steps: a curriculum, or other data at the end of training.

    A pass is all stages. Which batch comes next depends only on its number, so a run that resumes
    goes on with it, in the middle of a stage too.

    Example:
        from fulgurite_data import Stages

        easy = fg.ArrayData(np.zeros((40, 3)), 8, shuffle=True)
        hard = fg.ArrayData(np.ones((40, 3)), 8, shuffle=True)
        curriculum = Stages((easy, 100), (hard, 400))
        engine = fg.Engine(steps=len(curriculum))  # 500

    Attributes:
        stages: pairs of a source, an `fg.ArrayData` or a list or tuple of batches, and for how many
            steps it is read. A source that is shorter begins again, in another order if it
            shuffles.
        ends: the numbers of steps after which the stages end.
        seed: for the order of each `ArrayData` that shuffles and has no seed.
    """

    def __init__(self, *stages: tuple[fg.ArrayData | Sequence[Any], int], seed: int = 0) -> None:
        if not stages:
            raise ConfigurationError("Stages: at least one pair (source, steps) is needed.")
        for index, (part, steps) in enumerate(stages):
            check_part("Stages", index, part)
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ConfigurationError(
                    f"Stages: stage {index} has {steps!r} steps; it must be a positive integer."
                )
        self.stages = stages
        self.ends = tuple(accumulate(steps for _, steps in stages))
        self.seed = seed
        self._pass, self._number = 0, 0

    def __len__(self) -> int:
        """Return the number of batches in a pass, which is that of all stages."""
        return self.ends[-1]

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass; after its end, the next pass."""
        readers = self._make_readers()
        num_pass, start = self._pass, self._number
        for number in range(start, len(self)):
            index = bisect_right(self.ends, number)
            first = self.ends[index - 1] if index else 0
            read_before = num_pass * self.stages[index][1]
            batch = readers[index].read_number(read_before + number - first)
            is_last = number + 1 == len(self)
            self._pass, self._number = (num_pass + 1, 0) if is_last else (num_pass, number + 1)
            yield batch

    def get_state(self) -> dict[str, int]:
        """Return the position right after the batch that was yielded last."""
        return {"pass": self._pass, "batch": self._number}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from a position.

        Args:
            state: as `get_state` returned it.
        """
        if not 0 <= state["batch"] < len(self):
            raise ConfigurationError(
                f"Stages: the position is batch {state['batch']}, and a pass has {len(self)}: "
                "resume with the stages that the run had."
            )
        self._pass, self._number = state["pass"], state["batch"]

    @property
    def batch_examples(self) -> tuple[Any, ...]:
        """A batch of each stage, for `fg.DataSource(..., batch_examples=)` where their structures
        differ."""
        return tuple(reader.read_number(0) for reader in self._make_readers())

    def __repr__(self) -> str:
        """Return the stages, for the description of a run."""
        return f"Stages{self.stages!r}, seed={self.seed}"

    def _make_readers(self) -> list[PartReader]:
        return [PartReader(part, (self.seed, i)) for i, (part, _) in enumerate(self.stages)]
