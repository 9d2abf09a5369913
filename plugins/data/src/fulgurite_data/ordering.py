"""The stages that only change which elements there are, and in which order, checked: the same for
examples and for batches."""

from typing import Any

from fulgurite.errors import ConfigurationError, as_int, check_one_of, check_positive_int

from fulgurite_data.identity import PipelineStage
from fulgurite_data.indexing import ENDLESS, Repeat, Shuffle, Slice


def make_shuffle(parent: PipelineStage, seed: Any, reshuffle: bool) -> Shuffle:
    """Return a random order.

    Args:
        parent: what is shuffled.
        seed: for the order; None for that of the run.
        reshuffle: whether each epoch has another order.
    """
    seed = as_int(seed)
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigurationError(
            f"shuffle: seed is {seed!r}; it must be an integer that is not negative"
        )
    if not reshuffle and seed is None:
        raise ConfigurationError(
            "shuffle: an order that is the same in every epoch and run needs a seed of its own, "
            "shuffle(seed=0, reshuffle=False)"
        )
    if parent.length >= ENDLESS:
        raise ConfigurationError(
            f"shuffle: {parent.stages[-1]} never ends, so it has no random order: put repeat() "
            "after shuffle()"
        )
    return Shuffle(parent.length, seed, reshuffle)


def make_repeat(parent: PipelineStage, times: Any) -> Repeat:
    """Return a repetition.

    Args:
        parent: what is repeated.
        times: how often; None for endlessly.
    """
    times = as_int(times)
    if times is not None:
        check_positive_int(times, "repeat: times")
    if parent.length >= ENDLESS:
        raise ConfigurationError(f"repeat: {parent.stages[-1]} never ends already")
    _check_not_empty(parent, "repeat")
    return Repeat(parent.length, times)


def make_take(parent: PipelineStage, count: Any) -> Slice:
    """Return the first elements.

    Args:
        parent: what is taken from.
        count: how many.
    """
    count = as_int(count)
    check_positive_int(count, "take: count")
    return Slice(0, min(count, parent.length), f"take({count})")


def make_skip(parent: PipelineStage, count: Any) -> Slice:
    """Return the elements without the first ones.

    Args:
        parent: what is left out of.
        count: how many are left out.
    """
    count = as_int(count)
    if type(count) is not int or count < 0:
        raise ConfigurationError(
            f"skip: count is {count!r}; it must be an integer that is not negative"
        )
    is_endless = parent.length >= ENDLESS
    length = ENDLESS if is_endless else max(parent.length - count, 0)
    return Slice(count, length, f"skip({count})")


def make_shard(parent: PipelineStage, index: Any, count: Any, remainder: str) -> Slice:
    """Return one of several contiguous parts whose sizes differ by one at most, or not at all.

    Args:
        parent: what is divided.
        index: the number of the part.
        count: how many parts there are.
        remainder: `keep` what does not divide, in the first parts, or `drop` it.

    Raises:
        ConfigurationError: with `drop`, all parts would be empty.
    """
    index, count = as_int(index), as_int(count)
    check_positive_int(count, "shard: count")
    check_one_of(remainder, ("keep", "drop"), "shard: remainder")
    if type(index) is not int or not 0 <= index < count:
        raise ConfigurationError(f"shard: index is {index!r}; it must be in range({count})")
    if parent.length >= ENDLESS:
        raise ConfigurationError(
            f"shard: {parent.stages[-1]} never ends: put repeat() after shard()"
        )
    size, num_left = divmod(parent.length, count)
    call = f"shard({index}, {count}, {remainder!r})"
    if remainder == "drop":
        if not size:
            raise ConfigurationError(
                f"{call}: {parent.length} examples over {count} parts leave none for each: use "
                "fewer parts, or remainder='keep', which gives the first parts one each"
            )
        return Slice(index * size, size, call)
    return Slice(index * size + min(index, num_left), size + (index < num_left), call)


def _check_not_empty(parent: PipelineStage, call: str) -> None:
    if not parent.length:
        raise ConfigurationError(f"{call}: there are no examples ({'.'.join(parent.stages)})")
