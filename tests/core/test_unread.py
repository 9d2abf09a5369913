"""What a fit did not train on is the next fit's, whatever was read ahead."""

import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import DataError
from fulgurite.plugins import BatchIterator
from models import Act, Counting


class Seeing(Counting):
    """Says which batch each step was given."""

    def __init__(self, *, key: Any = None) -> None:
        super().__init__(key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            self.weight * 1.0, metrics={"seen": fg.metrics.LastValue.from_values(jnp.max(batch))}
        )

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch


def number(count: int = 30, size: Callable[[int], int] = lambda index: 2) -> Iterator[np.ndarray]:
    return (np.full(size(index), index, np.float32) for index in range(count))


class Unhashable:
    """An iterator that compares as it likes, and takes no weak reference."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = number()

    def __iter__(self) -> "Unhashable":
        return self

    def __next__(self) -> np.ndarray:
        return next(self.batches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


class Shared:
    """Returns the same generator every time that it is iterated."""

    def __init__(self) -> None:
        self.batches = number()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.batches


class Stateful:
    """Endless, with a position."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            self.index += 1
            yield np.full(2, self.index - 1, np.float32)

    def get_state(self) -> dict[str, int]:
        return {"index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        self.index = state["index"]


SOURCES: dict[str, Callable[[], Any]] = {
    "generator": number,
    "iter(list)": lambda: iter(list(number())),
    "map": lambda: map(np.negative, map(np.negative, number())),
    "islice": lambda: islice(number(), 25),
    "of its own": Unhashable,
    "shared": Shared,
    "stateful": Stateful,
}


def make_engine(steps_per_execution: int = 1, *plugins: Any) -> fg.Engine:
    return fg.Engine(
        steps=5,
        log_every=1,
        steps_per_execution=steps_per_execution,
        plugins=plugins,
        autoload=False,
    )


def list_seen(result: fg.FitResult) -> list[int]:
    return [int(value) for value in result.history["train/seen"]]


def read(data: Any, count: int) -> list[int]:
    """The next batches of a fit."""
    return [int(batch[0]) for batch in make_engine().iter_batches(data, steps=count)]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("prefetch", "steps_per_execution"), [(0, 1), (3, 4)])
def test_the_next_fit_begins_behind_the_last_batch_of_this_one(
    name: str, prefetch: int, steps_per_execution: int
) -> None:
    source = SOURCES[name]()
    result = None
    for first in (0, 5, 10):
        engine = make_engine(steps_per_execution)  # another one knows of the first one's batches
        data = fg.DataSource(source, prefetch=prefetch)
        if result is None:
            result = engine.fit(Seeing, data)
        else:
            result = engine.fit(data=data, state=result.state)
        assert list_seen(result) == [first + index for index in range(5)]


@pytest.mark.parametrize("name", SOURCES)
def test_every_way_of_reading_leaves_the_rest(name: str) -> None:
    source = SOURCES[name]()
    engine = make_engine()
    # These put a source with a state back to where it was.
    assert engine.predict(Seeing(), source, num_batches=3)[::2].tolist() == [0, 1, 2]
    done = 0 if name == "stateful" else 3
    for _ in range(2):
        batches = engine.iter_batches(source, steps=9)
        assert [int(next(batches)[0]) for _ in range(2)] == [done, done + 1]
        batches.close()  # type: ignore[attr-defined]
        done += 2
        placed = fg.DataSource(source).device_put()
        assert [int(next(placed)[0]) for _ in range(2)] == [done, done + 1]
        placed.close()  # type: ignore[attr-defined]
        done += 2
    with BatchIterator(source, seed=0) as walk:
        walk.peek()
    assert read(source, 3) == [done, done + 1, done + 2]


@pytest.mark.parametrize("name", ["generator", "iter(list)", "stateful"])
@pytest.mark.parametrize(("prefetch", "steps_per_execution"), [(0, 1), (2, 4)])
def test_a_fit_that_is_stopped_leaves_the_rest(
    name: str, prefetch: int, steps_per_execution: int
) -> None:
    def stop(run: fg.Run) -> fg.StopTraining:
        return fg.StopTraining("enough")

    def interrupt(run: fg.Run) -> None:
        signal.raise_signal(signal.SIGINT)

    for action in (stop, interrupt):
        source = SOURCES[name]()
        data = fg.DataSource(source, prefetch=prefetch)
        result = make_engine(steps_per_execution, Act(fg.At(3), action)).fit(Seeing, data)
        # A signal counts from the next dispatch on.
        num_trained = 3 if action is stop else int(result.state.step)
        assert list_seen(result) == list(range(num_trained)) and 3 <= num_trained < 5
        assert read(data, 4) == [num_trained + index for index in range(4)]


@pytest.mark.parametrize(("prefetch", "steps_per_execution"), [(0, 4), (2, 1)])
def test_a_signal_while_a_batch_is_made_leaves_the_rest(
    prefetch: int, steps_per_execution: int
) -> None:
    def interrupted() -> Iterator[np.ndarray]:
        for batch in number():
            if batch[0] == 9:
                signal.raise_signal(signal.SIGINT)
            yield batch

    data = fg.DataSource(interrupted(), prefetch=prefetch)
    result = make_engine(steps_per_execution).fit(Seeing, data, steps=25)
    num_trained = int(result.state.step)
    assert list_seen(result) == list(range(num_trained)) and 5 <= num_trained < 25
    assert read(data, 5) == [num_trained + index for index in range(5)]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_batch_of_another_shape_that_was_waiting_is_not_lost(prefetch: int) -> None:
    """It ends a dispatch, and the fit ends there as well."""
    sizes = {2: 3, 5: 4}
    data = fg.DataSource(number(size=lambda index: sizes.get(index, 2)), prefetch=prefetch)
    stop = Act(fg.At(2), lambda run: fg.StopTraining("enough"))
    result = make_engine(4, stop).fit(Seeing, data)
    assert list_seen(result) == [0, 1]
    result = make_engine(4).fit(data=data, state=result.state)
    assert list_seen(result) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["generator", "iter(list)", "stateful"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_fit_that_fails_leaves_what_it_did_not_train_on(name: str, prefetch: int) -> None:
    class Failing(Seeing):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            raise ZeroDivisionError("in the step")

    def fail(run: fg.Run) -> None:
        raise ZeroDivisionError("in an action")

    source = SOURCES[name]()
    data = fg.DataSource(source, prefetch=prefetch)
    with pytest.raises(ZeroDivisionError, match="in the step"):
        make_engine(4).fit(Failing, data)
    with pytest.raises(ZeroDivisionError, match="in an action"):
        make_engine(4, Act(fg.At(3), fail)).fit(Seeing, data)
    assert read(data, 3) == [3, 4, 5]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_dispatch_that_fails_is_not_trained_on(prefetch: int) -> None:
    def batches() -> Iterator[Any]:
        yield from ({"x": batch} for batch in number(3))
        yield {"other": np.zeros(2, np.float32)}
        yield {"x": np.full(2, 4, np.float32)}

    class Dictionary(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 1.0)

    data = fg.DataSource(batches(), prefetch=prefetch)
    with pytest.raises(DataError, match="the batch for step 4 has another structure"):
        make_engine(2).fit(Dictionary, data)
    rest = list(make_engine().iter_batches(data, epochs=1))
    assert [[*batch] for batch in rest] == [["other"], ["x"]] and rest[1]["x"][0] == 4


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_end_is_the_end_however_often_a_walk_began(prefetch: int) -> None:
    data = fg.DataSource(number(7), prefetch=prefetch)
    assert read(data, 3) == [0, 1, 2]
    assert read(data, 3) == [3, 4, 5]
    with BatchIterator(data, seed=0, epochs=1) as walk:
        (item,) = list(walk)
    assert item.epoch_end and int(item.batch[0]) == 6
    with pytest.raises(DataError, match="no batch 0 in epoch 0"):
        read(data, 1)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_that_wait_are_copies_where_the_source_reuses_its_buffer(prefetch: int) -> None:
    def reuse() -> Iterator[np.ndarray]:
        buffer = np.zeros(2, np.float32)
        for index in range(12):
            buffer[:] = index
            yield buffer

    data = fg.DataSource(reuse(), copy=True, prefetch=prefetch)
    assert list_seen(make_engine(4).fit(Seeing, data)) == [0, 1, 2, 3, 4]
    assert read(data, 5) == [5, 6, 7, 8, 9]


def test_each_pass_of_what_can_be_iterated_again_begins_anew() -> None:
    """Also where a source returns one iterator that it resets, as a loader with persistent workers
    does."""

    class Loader:
        def __init__(self) -> None:
            self.index = 0

        def __iter__(self) -> "Loader.Workers":
            self.workers = getattr(self, "workers", Loader.Workers())
            self.workers.index = 0
            return self.workers

        class Workers:
            index = 0

            def __iter__(self) -> "Loader.Workers":
                return self

            def __next__(self) -> np.ndarray:
                if self.index == 9:
                    raise StopIteration
                self.index += 1
                return np.full(2, self.index - 1, np.float32)

    class Passes:
        def __iter__(self) -> Iterator[np.ndarray]:
            yield from number(9)

    for source in (Loader(), Passes(), list(number(9)), fg.DataSource(list(number(9)), prefetch=3)):
        for _ in range(2):
            assert read(source, 4) == [0, 1, 2, 3]
    # What a source with an end returns twice in one walk is not read twice.
    shared = Shared()
    shared.batches = number(3)
    with (
        pytest.raises(DataError, match="no batch 0 in epoch 1"),
        BatchIterator(fg.DataSource(shared, prefetch=4), seed=0) as walk,
    ):
        assert [int(item.batch[0]) for item in islice(walk, 4)] == [0, 1, 2]


def test_nothing_is_kept_of_an_iterator_that_nobody_holds() -> None:
    class Array(np.ndarray):
        """Takes a weak reference."""

    references: list[weakref.ref[Any]] = []

    def make() -> Iterator[np.ndarray]:
        for array in number(9):
            array = array.view(Array)
            references.append(weakref.ref(array))
            yield {"x": jnp.asarray(array), "y": Keeping(array)}  # type: ignore[misc]

    class Keeping:
        """An array to NumPy, and to us another owner of it."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            return self.array

    for wrap in (lambda batches: batches, lambda batches: map(lambda batch: batch, batches)):
        references.clear()
        source: Any = wrap(make())
        batches = make_engine().iter_batches(source, steps=5)
        for _ in range(2):
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert sum(reference() is not None for reference in references) >= 1
        del source, batches
        gc.collect()
        read(repeat(np.zeros(2)), 1)  # the next walk forgets iterators of built-in types
        gc.collect()
        assert not any(reference() is not None for reference in references)
