"""Reading any batch of a source that is combined with others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import SeekableSource


class PartReader:
    """Reads any batch of any epoch of a source; those in order without seeking. With several
    processes each reads its part of a batch; a list has in each process the batches for that.

    Args:
        part: the source.
        seed: for its order, if it shuffles and has no seed.
    """

    def __init__(self, part: SeekableSource | Sequence[Any], seed: tuple[int, int]) -> None:
        self.part = part
        self.seed = seed
        self._next: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def read(self, epoch: int, number: int) -> Any:
        """Return a batch of an epoch."""
        if not isinstance(self.part, SeekableSource):
            return self.part[number]
        if self._next != (epoch, number):
            process = (jax.process_index(), jax.process_count())
            self._batches = self.part.iter_epoch(
                epoch, seed=self.seed, start=number, process=process
            )
        self._next = (epoch, number + 1)
        return next(self._batches)

    def read_number(self, number: int) -> Any:
        """Return a batch, counted through all epochs."""
        return self.read(*divmod(number, len(self.part)))


def check_part(owner: str, name: str | int, part: Any) -> None:
    """Raise if a source cannot be combined with others.

    Args:
        owner: the class that combines them.
        name: of the source, or its number.
        part: the source.
    """
    if isinstance(part, fg.ArrayData) and part.on_device:
        raise ConfigurationError(
            f"{owner}: source {name!r} has on_device=True, and the batches of several sources have "
            "no common index: use on_device=False."
        )
    if isinstance(part, SeekableSource):
        batch = next(part.iter_epoch(0, seed=0))
        if isinstance(batch, fg.Batch):
            kind = "an fg.Batch" if batch.mask is None else "remainder='pad'"
            advice = "map() them to arrays" if batch.mask is None else "use remainder='drop'"
            raise ConfigurationError(
                f"{owner}: source {name!r} has {kind}, and the batches of several sources have no "
                f"common mask, num_examples or spec: {advice}."
            )
    elif not isinstance(part, list | tuple):
        raise ConfigurationError(
            f"{owner}: source {name!r} is a {type(part).__name__}. A run can resume in the middle "
            "of an fg.ArrayData, the batches of a dataset, a list or a tuple of batches; write a "
            "source with get_state and set_state for anything else."
        )
    if not len(part):
        raise ConfigurationError(f"{owner}: source {name!r} has no batch.")


class ResumablePasses:
    """The base of sources whose batches depend only on their number and a seed, so that a position
    is two integers.

    Attributes:
        seed: for the order of each `ArrayData` that shuffles and has no seed; None for that of the
            run, and 0 where there is no run.
    """

    seed: int | None
    _run_seed: int = 0
    _pass: int = 0
    _number: int = 0

    def __len__(self) -> int:
        """Return the number of batches in a pass."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__: define it")

    def iter_pass(self, num_pass: int, start: int) -> Iterator[Any]:
        """Yield the batches of a pass.

        Args:
            num_pass: the number of the pass.
            start: the number of the first batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no iter_pass: define it")

    def set_run_seed(self, seed: int) -> None:
        """Take the seed of a run, which the engine gives before each pass.

        Args:
            seed: of the run.
        """
        self._run_seed = seed

    def get_order_seed(self) -> int:
        """Return the seed that counts: that of the source, or else that of the run."""
        return self._run_seed if self.seed is None else self.seed

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass; after its end, the next pass."""
        num_pass, start = self._pass, self._number
        for number, batch in enumerate(self.iter_pass(num_pass, start), start=start + 1):
            is_last = number == len(self)
            self._pass, self._number = (num_pass + 1, 0) if is_last else (num_pass, number)
            yield batch

    def get_state(self) -> dict[str, int]:
        """Return the position right after the batch that was yielded last."""
        return {"pass": self._pass, "batch": self._number}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to a position: the next iteration continues from there.

        Args:
            state: as `get_state` returned it.
        """
        if not 0 <= state["batch"] < len(self):
            raise ConfigurationError(
                f"{type(self).__name__}: the position is batch {state['batch']}, and a pass has "
                f"{len(self)}: resume with the sources that the run had."
            )
        self._pass, self._number = state["pass"], state["batch"]
