"""Sources with `__getitem__` and `__len__`: read from 0 to their length, and no exception of theirs is
taken for the end."""

from collections.abc import Iterator, Sequence
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator
from models import Counting


class Endless:
    """`length` batches; any other index gives a batch as well, as that of many datasets does."""

    def __init__(
        self, length: int = 3, fails_at: int | None = None, error: Any = IndexError
    ) -> None:
        self.length, self.fails_at, self.error = length, fails_at, error
        self.indices: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        if index == self.fails_at:
            raise self.error("in the source")
        self.indices.append(index)
        return np.full(2, index, np.float32)


class EndlessSequence(Endless, Sequence):
    """Has the `__iter__` of `Sequence`, which ends at an IndexError only."""


class Averaging(Counting):
    """Evaluates to the mean of what it is given."""

    def __init__(self, *, key: Any = None) -> None:
        super().__init__(key=key)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"mean": fg.metrics.Mean.from_values(batch)})

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch


@pytest.mark.variants("full")
@pytest.mark.parametrize("source_class", [Endless, EndlessSequence])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_indexed_source_is_read_from_0_to_its_length(source_class: Any, prefetch: int) -> None:
    source = source_class(3)
    data = fg.DataSource(source, prefetch=prefetch, resume="replay")
    engine = fg.Engine(epochs=2, autoload=False)
    result = engine.fit(Averaging, data)
    assert int(result.state.step) == 6
    # What is read ahead may be of a third pass.
    assert source.indices[:6] == [0, 1, 2, 0, 1, 2] and max(source.indices) == 2
    assert engine.evaluate(result, data) == {"mean": 1.0}
    assert engine.predict(result, data).tolist() == [0, 0, 1, 1, 2, 2]
    assert [batch.tolist() for batch in data.device_put()] == [[0, 0], [1, 1], [2, 2]]
    batches = [batch[0] for batch in engine.iter_batches(data, epochs=2)]
    assert batches == [0, 1, 2, 0, 1, 2]
    # It is resumed by replay.
    position = {"epoch": 1, "batch": 2}
    with BatchIterator(data, seed=0, position=position) as walk:
        assert [next(walk).batch[0] for _ in range(3)] == [2, 0, 1]


@pytest.mark.variants("full")
@pytest.mark.parametrize("source_class", [Endless, EndlessSequence])
@pytest.mark.parametrize("error", [IndexError, KeyError, ZeroDivisionError])
def test_an_error_of_an_indexed_source_is_not_its_end(source_class: Any, error: Any) -> None:
    engine = fg.Engine(epochs=1, autoload=False)
    model = Averaging()
    for prefetch in (0, 2):
        data = fg.DataSource(source_class(10, 3, error), prefetch=prefetch)
        for use in (
            lambda data: engine.fit(Averaging, data),
            lambda data: engine.evaluate(model, data),
            lambda data: engine.predict(model, data),
            lambda data: list(data.device_put()),
        ):
            with pytest.raises(error, match="in the source"):
                use(data)


def test_stop_iteration_of_a_source_is_not_its_end() -> None:
    """Python takes it for the end wherever a function is called within an iteration."""

    class Stateful(Endless):
        def __iter__(self) -> Iterator[np.ndarray]:
            return (self[index] for index in range(len(self)))

        def get_state(self) -> int:
            if len(self.indices) == 2:
                next(iter(()))
            return len(self.indices)

        def set_state(self, state: int) -> None:
            self.indices = self.indices[:state]

    for source in (Endless(10, 1, StopIteration), Stateful(10)):
        with pytest.raises(RuntimeError, match="StopIteration"):
            fg.Engine(epochs=1, autoload=False).evaluate(Averaging(), source)


def test_an_indexed_source_without_a_length_is_refused() -> None:
    class Unsized:
        def __getitem__(self, index: int) -> np.ndarray:
            return np.zeros(1)

    with pytest.raises(ConfigurationError, match="has __getitem__, and needs __len__ as well"):
        fg.Engine(steps=1, autoload=False).fit(Counting, Unsized())


def test_an_empty_indexed_source_is_an_error() -> None:
    with pytest.raises(DataError, match="no batch 0 in epoch 0"):
        fg.Engine(steps=1, autoload=False).fit(Counting, Endless(0))
