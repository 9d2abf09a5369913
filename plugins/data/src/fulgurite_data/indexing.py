"""Other orders of the same elements, examples or batches: functions from their numbers to their
numbers before."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fulgurite_data.passes import Pass, start_pass
from fulgurite_data.permutation import permute

ENDLESS = 2**62
"""The length of what never ends."""
ENDLESS_ROUNDS = 2**20
"""How many epochs of what it repeats an endless repetition takes for each of its own: a part of it
that is read epoch after epoch (`repeat().take(n)`) has other orders in each."""
_BLOCK = 8192
"""How many numbers of an order are computed at once: the network takes 200 us for a batch of them,
and 1 ms for a block."""


class Places(NamedTuple):
    """Where elements come from.

    Attributes:
        indices: their numbers there, int64 `(k,)`.
        epochs: the epochs they are read in, int64 `(k,)`; None where all are in that of the pass.
    """

    indices: np.ndarray
    epochs: np.ndarray | None = None


class IndexMap(Protocol):
    """A function from the numbers of elements to their numbers before.

    Attributes:
        length: how many elements there are.
        is_fixed: whether it is the same in each pass.
        num_random: 1 if it draws random numbers, else 0.
    """

    length: int
    is_fixed: bool
    num_random: int

    def locate(self, indices: np.ndarray, at: Pass, level: int) -> Places:
        """Return where elements come from.

        Args:
            indices: their numbers, int64 `(k,)`.
            at: the pass.
            level: the number of random stages before.
        """
        ...

    def describe(self) -> str:
        """Return the call that made it, without what does not matter to the elements."""
        ...


@dataclass
class Shuffle:
    """A random order in each epoch, or one order for all of them.

    Attributes:
        length: of the order.
        seed: its own; None for that of the pass.
        reshuffle: whether each epoch has another order.
    """

    length: int
    seed: int | None
    reshuffle: bool
    num_random = 1

    def __post_init__(self) -> None:
        self.is_fixed = not self.reshuffle
        # The key of an order, the first number of a block of it, and the block.
        self._block: tuple[int, int, np.ndarray] = (0, -1, np.empty(0, np.int64))

    def locate(self, indices: np.ndarray, at: Pass, level: int) -> Places:
        if self.seed is not None:
            # An order for all epochs is one for all places, in a mixture or not.
            place = at if self.reshuffle else start_pass(0)
            at = Pass(start_pass(self.seed).seed, place.epoch, place.branch)
        key = at.make_key(level)
        low, high = int(indices[0]), int(indices[-1])
        first = low // _BLOCK * _BLOCK
        is_in_block = high < first + _BLOCK and high - low == len(indices) - 1
        if not is_in_block or not (indices[1:] > indices[:-1]).all():
            return Places(permute(indices, self.length, key))
        # Replaced as a whole, because threads share it.
        block = self._block
        if block[:2] != (key, first):
            numbers = np.arange(first, min(first + _BLOCK, self.length))
            block = (key, first, permute(numbers, self.length, key))
            self._block = block
        return Places(block[2][indices - first])

    def describe(self) -> str:
        options = [] if self.seed is None else [f"seed={self.seed}"]
        options += [] if self.reshuffle else ["reshuffle=False"]
        return f"shuffle({', '.join(options)})"


@dataclass
class Slice:
    """A contiguous part of the elements.

    Attributes:
        start: the first one.
        length: how many.
        call: what asked for it.
    """

    start: int
    length: int
    call: str
    is_fixed = True
    num_random = 0

    def locate(self, indices: np.ndarray, at: Pass, level: int) -> Places:
        return Places(indices + self.start)

    def describe(self) -> str:
        return self.call


@dataclass
class Repeat:
    """The elements several times; each time is an epoch of its own of what comes before.

    Attributes:
        size: how many elements there are.
        times: how often; None for endlessly.
    """

    size: int
    times: int | None
    num_random = 0
    is_fixed = True

    def __post_init__(self) -> None:
        self.length = ENDLESS if self.times is None else min(self.size * self.times, ENDLESS)

    def locate(self, indices: np.ndarray, at: Pass, level: int) -> Places:
        rounds, numbers = np.divmod(indices, self.size)
        return Places(numbers, at.epoch * (self.times or ENDLESS_ROUNDS) + rounds)

    def describe(self) -> str:
        return f"repeat({'' if self.times is None else self.times})"
