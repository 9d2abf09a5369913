"""`check_source`: which sources a run can resume on (issue of traps, point 7)."""

from collections.abc import Iterator
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite_testing import SourceFailure, check_source


class Numbers:
    """Batches 0 to 4, in each pass."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 5:
            self.position += 1
            yield {"x": np.full((2, 1), self.position - 1)}
        self.position = 0

    def get_state(self) -> int:
        return self.position

    def set_state(self, state: int) -> None:
        self.position = state


class Buffered(Numbers):
    """Holds two batches back, which its state does not say: so did the shuffle buffer of a library
    whose runs resumed with other batches."""

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for batch in super().__iter__():
            held.append(batch)
            if len(held) == 3:
                yield held.pop(1)
        yield from held


class Overwriting:
    """Yields one array, again and again."""

    def __iter__(self) -> Iterator[Any]:
        buffer = np.zeros((2, 1))
        for number in range(5):
            buffer[:] = number
            yield {"x": buffer}


class Drawing:
    """Another order in each pass, from a generator that continues."""

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng()
        for _ in range(5):
            yield {"x": rng.normal(size=(2, 1))}


def test_sources_that_keep_their_promise_pass() -> None:
    arrays = {"x": np.arange(10.0)}
    check_source(lambda: fg.ArrayData(arrays, 3, shuffle=True))
    check_source(lambda: [{"x": np.full(2, number)} for number in range(5)])
    check_source(Numbers)
    check_source(lambda: fg.DataSource(Numbers(), prefetch=3))
    # What the buffer holds does not matter to who reads from the beginning again.
    check_source(lambda: fg.DataSource(Buffered(), resume="replay"))
    check_source(lambda: fg.DataSource(Overwriting(), copy=True, resume="replay"))
    check_source(lambda: fg.DataSource(Drawing(), resume="restart"))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Buffered, r"(?s)after batch 0 of 12, .*another batch 1: .*It promises 'exact'"),
        (lambda: fg.DataSource(Drawing(), resume="replay"), "It promises 'replay'"),
        (lambda: fg.DataSource(Overwriting(), resume="replay"), "batch 0 was written to after"),
        (Overwriting, "batch 0 was written to after"),
        (Drawing, "the source promises nothing"),
    ],
)
def test_sources_that_break_it_are_reported(build: Any, says: str) -> None:
    with pytest.raises(SourceFailure, match=says):
        check_source(build)
