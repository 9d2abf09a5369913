"""Reading any batch of a source that is combined with others."""

from collections.abc import Iterator, Sequence
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError


class PartReader:
    """Reads any batch of any epoch of a source; those in order without seeking.

    Args:
        part: the source.
        seed: for its order, if it shuffles and has no seed.
    """

    def __init__(self, part: fg.ArrayData | Sequence[Any], seed: tuple[int, int]) -> None:
        self.part = part
        self.seed = seed
        self._next: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def read(self, epoch: int, number: int) -> Any:
        """Return a batch of an epoch."""
        if not isinstance(self.part, fg.ArrayData):
            return self.part[number]
        if self._next != (epoch, number):
            self._batches = self.part.iter_epoch(epoch, seed=self.seed, start=number)
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
    if isinstance(part, fg.ArrayData):
        if part.remainder == "pad" or part.on_device:
            setting = "on_device=True" if part.on_device else "remainder='pad'"
            raise ConfigurationError(
                f"{owner}: source {name!r} has {setting}, and the batches of several sources have "
                "no common mask and no common index: use remainder='drop' and on_device=False."
            )
    elif not isinstance(part, list | tuple):
        raise ConfigurationError(
            f"{owner}: source {name!r} is a {type(part).__name__}. A run can resume in the middle "
            "of an fg.ArrayData, a list or a tuple of batches; write a source with get_state and "
            "set_state for anything else."
        )
    if not len(part):
        raise ConfigurationError(f"{owner}: source {name!r} has no batch.")
