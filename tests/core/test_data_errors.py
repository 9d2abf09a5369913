"""Data sources that fail: what kind of error comes, and which step it names."""

from collections.abc import Iterator
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator
from models import Act, Counting, Events, Linear, numbers, regression


class BrokenDisk(Exception):
    """An error of the source's own."""


class Failing:
    """Raises instead of giving batch number `at` (from 1)."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(1, 100):
            if number == self.at:
                raise BrokenDisk(f"batch {number}")
            yield np.zeros(1, np.float32)


@pytest.mark.variants("full")
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_an_error_of_the_source_notes_the_step(
    at: int, steps_per_execution: int, prefetch: int
) -> None:
    events, done = Events(), []
    plugins = [events, Act(1, lambda run: done.append(run.step))]
    with pytest.raises(BrokenDisk) as caught:
        fg.Engine(steps=10, steps_per_execution=steps_per_execution, plugins=plugins).fit(
            Counting, fg.DataSource(Failing(at), prefetch=prefetch)
        )
    assert str(caught.value) == f"batch {at}"
    assert caught.value.__notes__[0] == f"while the data source made the batch for step {at}"
    # Every step before it was taken; the first batch is looked at before a run exists that plugins
    # could be told of.
    assert done == list(range(1, at))
    assert events.exceptions == [caught.value] * (at > 1)


@pytest.mark.parametrize("at", [1, 3])
def test_step_loop_and_evaluations_note_the_step_too(at: int) -> None:
    engine = fg.Engine(steps=10)
    for use in (
        lambda: list(engine.iter_batches(Failing(at))),
        lambda: engine.evaluate(Counting(), Failing(at)),
        lambda: engine.predict(Counting(), Failing(at)),
    ):
        with pytest.raises(BrokenDisk, match=f"^batch {at}"):
            use()


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_data_that_ends_early_names_the_step_and_what_to_pass(steps_per_execution: int) -> None:
    done: list[int] = []
    plugin = Act(1, lambda run: done.append(run.step))
    with pytest.raises(
        DataError,
        match=r"data ended after 3 steps of 5\..*iterated over again, such as fg\.ArrayData",
    ):
        fg.Engine(steps=5, steps_per_execution=steps_per_execution, plugins=[plugin]).fit(
            Counting, iter(numbers([0], [0], [0]))
        )
    assert done == [1, 2, 3]


def test_an_iterator_makes_one_epoch() -> None:
    assert (
        float(fg.Engine(epochs=1).fit(Counting, iter(numbers([0], [0], [0]))).module.weight) == -3
    )
    with pytest.raises(DataError, match="data ended after 3 steps of 6"):
        fg.Engine(epochs=2).fit(Counting, iter(numbers([0], [0], [0])))


def test_second_fit_on_a_used_iterator_is_an_error() -> None:
    engine, data = fg.Engine(steps=2), iter(numbers([0], [0]))
    result = engine.fit(Counting, data)
    with pytest.raises(DataError, match=r"ended|no batch"):
        engine.fit(data=data, state=result.state)


def test_init_state_does_not_use_up_an_iterator() -> None:
    data = iter(numbers([1], [2]))
    with pytest.raises(DataError, match="init_state would use up the first batch of an iterator"):
        fg.Engine(steps=2).init_state(Counting, data)
    assert [batch.tolist() for batch in data] == [[1], [2]]


def test_empty_data_is_an_error_in_fit() -> None:
    class Generating:
        def __iter__(self) -> Iterator[np.ndarray]:
            return iter([])

    engine = fg.Engine(steps=1)
    for data in ([], iter([]), Generating(), fg.DataSource([])):
        with pytest.raises(DataError, match=r"no batch 0 in epoch 0.*empty"):
            engine.fit(Counting, data)
    with pytest.raises(DataError, match="0 examples"):
        fg.ArrayData(np.zeros((0, 3)), 2)


def test_empty_second_epoch_is_an_error() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = numbers([0], [0])

        def __iter__(self) -> Iterator[np.ndarray]:
            while self.batches:
                yield self.batches.pop()

    with pytest.raises(
        DataError, match=r"\(Once\) has no batch 0 in epoch 1: .*iterated only once"
    ):
        fg.Engine(steps=5).fit(Counting, Once())


def test_invalid_data_is_an_error() -> None:
    engine = fg.Engine(steps=1)
    with pytest.raises(ConfigurationError, match="data must be an iterable of batches, not 3"):
        engine.fit(Counting, 3)
    with pytest.raises(ConfigurationError, match="a dictionary gives its keys: use fg.ArrayData"):
        engine.fit(Counting, {"x": np.zeros((4, 2))})
    for array in (np.zeros((4, 2)), jnp.zeros((4, 2))):
        with pytest.raises(ConfigurationError, match="an array gives its rows: use fg.ArrayData"):
            engine.fit(Counting, array)
    with pytest.raises(DataError, match=r"data\['x'\]\[0\] is a single number"):
        fg.ArrayData({"x": [1.0, 2.0]}, 2)
    with pytest.raises(DataError, match=r"data\['name'\].*encode it first"):
        engine.fit(Counting, [{"x": np.zeros(2), "name": np.asarray(["a", "b"])}])
    with pytest.raises(DataError, match="the batch for step 2"):
        fg.Engine(steps=2).fit(Counting, [np.zeros(2, np.float32), None])


def test_lists_and_numbers_in_a_batch_become_arrays() -> None:
    class Weighted(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight + jnp.mean(batch["x"]) * batch["weight"])

    batch = {"x": np.asarray([1.0, 3.0]), "weight": 0.5}
    result = fg.Engine(steps=1).fit(Weighted, [batch])
    assert float(result.module.weight) == -1 and result.metrics["train"]["loss"] == 1


def test_step_loop_converts_lists_and_numbers_too() -> None:
    engine = fg.Engine(steps=1)
    state = engine.init_state(Counting, [(1.0, 2.0)])
    state, _ = engine.step(state, (1.0, 2.0))
    assert float(state.module.weight) == -1
    with pytest.raises(DataError, match=r"\[0\].*encode it first"):
        engine.step(state, ("text", 2.0))


@pytest.mark.full
def test_a_source_that_reuses_its_buffers_needs_copy() -> None:
    class Reusing:
        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            buffers = {
                name: np.zeros_like(array[:5]) for name, array in regression().arrays.items()
            }
            for batch in regression(20, 5):
                for name, buffer in buffers.items():
                    buffer[...] = batch[name]
                yield buffers

    for prefetch in (0, 2):
        for steps_per_execution in (1, 4):
            result = fg.Engine(steps=8).fit(
                Linear,
                fg.DataSource(Reusing(), copy=True, prefetch=prefetch),
                steps_per_execution=steps_per_execution,
            )
            expected = fg.Engine(steps=8).fit(
                Linear, regression(20, 5), steps_per_execution=steps_per_execution
            )
            assert result.module.weight.tolist() == expected.module.weight.tolist()


@pytest.mark.full
def test_a_source_may_yield_arrays_of_the_device() -> None:
    host = fg.Engine(steps=4).fit(Linear, regression(16, 8))
    batches = [
        {name: jnp.asarray(array) for name, array in batch.items()} for batch in regression(16, 8)
    ]
    for steps_per_execution in (1, 4):
        device = fg.Engine(steps=4).fit(Linear, batches, steps_per_execution=steps_per_execution)
        assert device.module.weight.tolist() == host.module.weight.tolist()
    assert not any(array.is_deleted() for batch in batches for array in batch.values())


def test_long_lists_of_numbers_in_a_batch_are_an_error() -> None:
    with pytest.raises(
        DataError,
        match=r"data\['y'\] is a list of 3 numbers, each an array of its own: give one array",
    ):
        fg.Engine(steps=1).fit(Linear, [{"x": np.zeros((3, 3), np.float32), "y": [0.0, 1.0, 2.0]}])
    few = [{"x": [jnp.zeros((3, 3))], "scale": [2.0]}]  # a list of arrays, and one number
    assert next(iter(fg.Engine(steps=1).iter_batches(few)))["scale"][0] == 2


@pytest.mark.parametrize(
    ("source", "promise", "says"),
    [
        (Failing(9), "exact", r"Failing cannot be resumed exactly.*resume='replay'"),
        (iter(Failing(9)), "replay", "cannot be replayed, because it is an iterator"),
        ([], "skip", "'exact', 'replay' or 'restart'"),
    ],
)
def test_promises_that_a_source_cannot_keep_are_refused(
    source: Any, promise: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        fg.DataSource(source, resume=promise)


def test_errors_name_the_source_G23() -> None:
    data = fg.DataSource([{"x": "text"}], name="captions")
    with pytest.raises(DataError) as error:
        fg.Engine(steps=1, autoload=False).fit(Linear, data)
    assert error.value.__notes__[0] == (
        "while the data source 'captions' made the batch for step 1"
    )
    assert BatchIterator(data, seed=0).description == "captions: list"


def test_masked_values_of_a_batch_are_refused_as_by_jax_and_unmasked_ones_are_arrays() -> None:
    masked, whole = np.ma.masked_greater(np.arange(4), 2), np.ma.masked_greater(np.arange(4), 9)
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        jnp.asarray(masked)
    for read in (
        lambda x: next(iter(fg.ArrayData({"x": x}, 4)))["x"],
        lambda x: BatchIterator([{"x": x}], seed=0).peek()["x"],
    ):
        with pytest.raises(DataError, match=r"data\['x'\] is a masked array.*array\.filled"):
            read(masked)
        assert read(whole).tolist() == [0, 1, 2, 3]
