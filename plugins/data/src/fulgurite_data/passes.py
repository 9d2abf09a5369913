"""One pass over a pipeline: what everything random in it follows from."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from fulgurite.errors import ConfigurationError, as_int
from fulgurite.plugins import Seed


@dataclass(frozen=True)
class Pass:
    """The seed and the epoch that are read, and the branch of the pipeline.

    Attributes:
        seed: integers that are not negative.
        epoch: its number; that of a repeated dataset counts through all repetitions.
        branch: the way from the end of the pipeline to a source, as numbers of sources. Two sources
            of a mixture have random numbers of their own that way.
    """

    seed: tuple[int, ...]
    epoch: int = 0
    branch: tuple[int, ...] = ()

    def at_epoch(self, epoch: int) -> "Pass":
        """Return the same pass in another epoch."""
        return Pass(self.seed, epoch, self.branch)

    def enter(self, source: int) -> "Pass":
        """Return the pass over one of several sources.

        Args:
            source: its number.
        """
        return Pass(self.seed, self.epoch, (*self.branch, source))

    def make_key(self, level: int) -> int:
        """Return 64 random bits.

        Args:
            level: of the stage that draws them: how many random stages come before it.
        """
        return _make_key(self.seed, self.epoch, level, self.branch)


def start_pass(seed: Seed, epoch: int = 0) -> Pass:
    """Return the pass of an epoch.

    Args:
        seed: an integer that is not negative, or several.
        epoch: the number of the epoch.

    Raises:
        ConfigurationError: seed or epoch are anything else.
    """
    words = tuple(as_int(word) for word in (seed if isinstance(seed, tuple) else (seed,)))
    if not words or any(type(word) is not int or word < 0 for word in words):
        raise ConfigurationError(
            f"the data's seed is {seed!r}; it must be integers that are not negative"
        )
    epoch = as_int(epoch)
    if type(epoch) is not int or epoch < 0:
        raise ConfigurationError(
            f"the data's epoch is {epoch!r}; it must be an integer that is not negative"
        )
    return Pass(words, epoch)


@lru_cache(maxsize=1024)
def _make_key(seed: tuple[int, ...], epoch: int, level: int, branch: tuple[int, ...]) -> int:
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, level, *branch))
    return int(sequence.generate_state(1, np.uint64)[0])
