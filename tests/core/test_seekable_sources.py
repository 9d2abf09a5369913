"""Sources of which any batch can be read at once: what a class of a user gets for the methods of
`SeekableSource`."""

from collections.abc import Iterator
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator, SeekableSource


class Numbered:
    """Batch `n` of epoch `e` holds `(e, n)` and the part of the process."""

    def __init__(self, length: int = 3, identity: tuple[str, ...] = ("numbered",)) -> None:
        self.length = length
        self.identity = identity

    def __len__(self) -> int:
        return self.length

    def iter_epoch(
        self, number: int, *, seed: Any, start: int = 0, process: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        for index in range(start, self.length):
            yield np.array([number, index, *process])

    def iter_known_batches(self, process: tuple[int, int]) -> Iterator[tuple[int, Any]]:
        yield self.length - 1, np.zeros(2)

    def has_unequal_batches(self) -> bool:
        return False

    def has_padding(self) -> bool:
        return False

    def depends_on_epoch(self) -> bool:
        return True

    def get_identity(self) -> tuple[str, ...]:
        return self.identity


def read(source: Any, count: int, **options: Any) -> list[Any]:
    with BatchIterator(source, seed=0, **options) as batches:
        return [next(batches) for _ in range(count)]


def test_array_data_and_other_sources_are_seekable():
    assert isinstance(Numbered(), SeekableSource)
    assert isinstance(fg.ArrayData(np.arange(4), 2), SeekableSource)
    assert not isinstance([np.arange(2)], SeekableSource)


def test_a_walk_begins_at_any_position_for_any_process():
    items = read(Numbered(), 7, process=(1, 2))
    assert [item.batch.tolist()[:2] for item in items] == [[n // 3, n % 3] for n in range(7)]
    assert all(item.batch.tolist()[2:] == [1, 2] for item in items)
    assert [item.epoch_end for item in items] == [False, False, True] * 2 + [False]
    for number in (0, 2, 3):
        rest = read(Numbered(), 3, position=items[number].position)
        expected = [item.batch.tolist()[:2] for item in items[number + 1 : number + 4]]
        assert [item.batch.tolist()[:2] for item in rest] == expected
    with BatchIterator(Numbered(), seed=0, process=(0, 2)) as batches:
        assert (batches.resume, batches.is_shared, batches.epoch_length) == ("exact", True, 3)


def test_a_limit_cuts_epochs_and_what_is_known_of_them():
    items = read(Numbered(), 4, limit=2)
    assert [item.batch.tolist()[:2] for item in items] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    with BatchIterator(Numbered(), seed=0, limit=2) as batches:
        assert [*batches.iter_known_batches()] == []
    with BatchIterator(Numbered(), seed=0) as batches:
        assert [number for number, _ in batches.iter_known_batches()] == [2]


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (("other",), "'numbered' is 'other' now"),
        (("numbered", "more"), "'more' is new"),
        ((), "'numbered' is gone"),
    ],
)
def test_a_position_of_other_data_is_refused_with_what_differs(
    identity: tuple[str, ...], message: str
):
    (item,) = read(Numbered(), 1)
    with pytest.raises(DataError, match=message):
        read(Numbered(identity=identity), 1, position=item.position)
    data = fg.ArrayData(np.arange(6), 2)
    with pytest.raises(DataError, match=r"ArrayData.* 'numbered' is gone"):
        read(data, 1, position=item.position)


def test_a_source_without_an_identity_resumes_whatever_it_is():
    (item,) = read(Numbered(identity=()), 1)
    assert item.position == {"epoch": 0, "batch": 1}
    assert read(Numbered(5, ()), 1, position=item.position)[0].batch.tolist()[:2] == [0, 1]


def test_a_loop_of_ones_own_says_which_epoch_it_is():
    data = fg.DataSource(Numbered())
    placed = [batch.tolist()[:2] for batch in data.device_put(epoch=4, seed=1)]
    assert placed == [[4, 0], [4, 1], [4, 2]]
    with pytest.raises(ConfigurationError, match="order of this Numbered depends on"):
        next(data.device_put())
