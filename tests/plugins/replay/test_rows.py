"""Where the data has an example of a batch, and which later steps train on it again."""

from collections.abc import Iterator
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite_data import Arrays
from fulgurite_replay import Observer, SkippedBatches
from fulgurite_replay.rows import describe_batch, describe_example, list_examples
from fulgurite_testing import TinyModel

RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.normal(size=(22, 4)).astype(np.float32),
    "label": RNG.integers(3, size=22).astype(np.int32),
}
STEP, INDEX = 7, 2
"""The step that is looked at, after one epoch of six batches and before two more, and the place of
an example in its batch."""


def describe(data: Any, **length: Any) -> tuple[str | None, str | None, Any]:
    """Return what is said of the batch of a step and of an example, and that example."""
    answers: list[Any] = []

    def look(run: fg.Run) -> None:
        item = run.data_iterator.look_ahead(0)
        assert item is not None
        batch = fg.ArrayData.gather(
            data.device_arrays if getattr(data, "on_device", False) else None, item.batch
        )
        lines = describe_batch(run, item), describe_example(run, item, INDEX)
        answers.extend([*lines, np.asarray(batch["x"])[INDEX]])

    observer = Observer({STEP - 1: look})
    options: dict[str, Any] = length or {"epochs": 4}
    engine = fg.Engine(**options, seed=5, autoload=False, plugins=[observer])
    engine.fit(TinyModel, data)
    batch, example, x = answers
    return batch, example, x


def find_row(x: Any) -> int:
    (row,) = np.flatnonzero((ARRAYS["x"] == x).all(axis=1))
    return int(row)


def list_steps(data: Any, row: int) -> list[int]:
    """Return the steps of four epochs that train on a row, by reading all batches."""
    batches = fg.Engine(seed=5, autoload=False).iter_batches(data, epochs=4)
    return [
        step
        for step, batch in enumerate(batches, 1)
        if (np.asarray(batch["x"]) == ARRAYS["x"][row]).all(axis=1).any()
    ]


@pytest.mark.full
@pytest.mark.parametrize("on_device", [False, True])
def test_row_of_shuffled_arrays_is_named_with_the_steps_that_have_it_again(on_device: bool) -> None:
    data = fg.ArrayData(ARRAYS, 4, shuffle=True, on_device=on_device)
    batch, example, x = describe(data)
    assert batch == "the batch is number 0 of epoch 1, both from 0"
    row = find_row(x)
    first, second, *later = list_steps(data, row)
    assert second == STEP and len(later) == 2 and first < STEP
    steps = f"{later[0]}, {later[1]}"
    assert (
        example == f"the example is row {row} of the arrays; the run trains on it again at step "
        f"{steps}"
    )
    # A run that ends before the last of them.
    _, example, _ = describe(data, steps=later[1] - 1)
    assert example is not None and example.endswith(f"again at step {later[0]}")


@pytest.mark.full
def test_row_of_a_pipeline_is_that_of_its_source() -> None:
    data = Arrays(ARRAYS).shuffle().batch(4, remainder="drop")
    batch, example, x = describe(data)
    assert batch == "the batch is number 1 of epoch 1, both from 0"
    assert example == f"the example is example {find_row(x)} of Arrays"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (fg.ArrayData(ARRAYS, 4, shuffle=True, remainder="pad"), "row {} of the arrays"),
        (Arrays(ARRAYS).shuffle().batch(4, remainder="pad"), "example {} of Arrays"),
    ],
)
def test_all_examples_of_a_batch_are_named_without_those_of_padding(data: Any, name: str) -> None:
    answers: list[Any] = []

    def look(run: fg.Run) -> None:
        item = run.data_iterator.look_ahead(0)
        assert item is not None
        answers.append((list_examples(run, item), np.asarray(item.batch.value["x"])))

    # Of 22 rows, the sixth batch of an epoch has two.
    observer = Observer({5: look, 6: look})
    fg.Engine(epochs=2, seed=5, autoload=False, plugins=[observer]).fit(TinyModel, data)
    for (names, x), length in zip(answers, (2, 4), strict=True):
        assert names == [name.format(find_row(row)) for row in x[:length]]


@pytest.mark.full
def test_row_of_data_without_some_batches_is_that_of_the_data() -> None:
    data = fg.ArrayData(ARRAYS, 4, shuffle=True)
    batch, example, x = describe(SkippedBatches(data, (2,)))
    assert batch == "the batch is number 1 of epoch 1, both from 0"
    assert example == f"the example is row {find_row(x)} of the arrays"


def test_batch_of_a_list_is_named_and_one_of_a_generator_is_not() -> None:
    batches = [{name: array[i : i + 4] for name, array in ARRAYS.items()} for i in range(0, 20, 4)]
    batch, example, _ = describe(batches)
    assert (batch, example) == ("the batch is data[1]", None)

    def iter_once() -> Iterator[Any]:
        yield from batches + batches

    assert describe(iter_once(), steps=8)[:2] == (None, None)
