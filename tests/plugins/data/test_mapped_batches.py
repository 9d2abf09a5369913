"""Functions of whole batches: what they may return, and what is refused before it is trained on."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError, FulguriteError
from fulgurite_data import Arrays, Batches, MapOnDevice, Ragged


def build_batches(remainder: Any = "keep") -> Batches:
    return Arrays({"x": np.arange(10), "y": np.ones(10)}).batch(4, remainder=remainder)


def halve_odd(batch: Any) -> Any:
    is_odd = batch["x"][0] > 3
    return {**batch, "x": batch["x"] / 2 if is_odd else batch["x"]}


def drop_key(batch: Any) -> Any:
    return batch if batch["x"][0] < 4 else {"x": batch["x"]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (halve_odd, r"data\['x'\] is float64 in batch 1 of batch\(4, .*, and int64 in batch 0"),
        (drop_key, r"batch 1 .* has data\['x'\], and batch 0 has data\['x'\], data\['y'\]"),
        (lambda batch: None, "returned None for batch 1 of"),
        (lambda batch: {}, r"returned \{\} for batch 1 of .*, which holds no array"),
        (
            lambda batch: {"x": batch["x"][:3]},
            r"data\['x'\] .* for batch 1 .* shape \(3,\), and the batch has 4 examples",
        ),
        (lambda batch: {"x": batch["x"].mean()}, r"shape \(\), and the batch has 4 examples"),
        (
            lambda batch: fg.Batch(batch, np.ones(4, bool)),
            r"an fg\.Batch with a mask for batch 1 .*remainder='pad'",
        ),
    ],
)
def test_a_function_of_batches_returns_what_it_returned_for_the_first(
    function: Callable[[Any], Any], message: str
):
    with pytest.raises(DataError, match=message):
        build_batches().map(function).read(1)


@pytest.mark.parametrize("threads", [0, 2])
def test_the_dtypes_are_those_of_batch_0_also_where_a_run_begins_later(threads: int):
    batches = Arrays({"x": np.arange(16)}).map(dict, threads=threads).batch(4).map(halve_odd)
    with pytest.raises(DataError, match="float64 in batch 3 of .*int64 in batch 0"):
        next(batches.iter_epoch(0, seed=0, start=3))


def test_a_function_keeps_the_mask_of_a_padded_batch_and_its_rows():
    padded = build_batches("pad")
    *_, last = padded.map(lambda batch: {"x": batch["x"] + 1})
    assert last.value["x"].tolist() == [9, 10, 1, 1]
    assert last.mask.tolist() == [True, True, False, False]
    with pytest.raises(
        DataError, match=r"returned an fg\.Batch for batch 2 .* the mask, which stays"
    ):
        padded.map(lambda batch: fg.Batch(batch)).read(2)
    with pytest.raises(DataError, match=r"shape \(2,\), and the batch has 4 examples"):
        padded.map(lambda batch: {"x": batch["x"][:2]}).read(2)


def test_a_function_may_say_how_many_examples_arrays_of_other_axes_hold():
    def join(batch: Any) -> fg.Batch:
        nodes: Ragged = batch["nodes"]
        return fg.Batch({"nodes": nodes.values}, num_examples=len(nodes))

    graphs = Arrays({"size": np.arange(1, 7)}).map(lambda e: {"nodes": np.ones(e["size"])})
    batch = graphs.batch(3).map(join).read(1)
    assert (batch.value["nodes"].shape, batch.num_examples) == ((4 + 5 + 6,), 3)


class Mean(fg.Module):
    weight: Any

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((self.weight - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def test_numbers_of_examples_that_a_function_says_weigh_its_batches():
    values = np.arange(10.0) ** 2
    batches = Arrays({"y": values}).batch(4)
    said = batches.map(lambda batch: fg.Batch(batch, num_examples=len(batch["y"])))
    engine = fg.Engine(autoload=False)
    loss = engine.evaluate(Mean(jnp.zeros(())), said)["loss"]
    assert loss == pytest.approx(np.mean(values**2), rel=1e-6)


def test_a_map_on_the_device_that_forgets_to_return_is_named():
    plugin = MapOnDevice(lambda batch: None)
    engine = fg.Engine(steps=1, plugins=[plugin], autoload=False)
    with pytest.raises(FulguriteError, match=r"MapOnDevice\(<lambda>\) returned None"):
        engine.fit(Mean(jnp.zeros(())), build_batches("drop"))


def test_examples_of_unequal_lengths_reach_a_function_with_the_rows_of_padding():
    def pad(batch: Any) -> Any:
        return {"x": np.array([[*row, 0, 0][:2] for row in batch["x"]])}

    lengths = Arrays({"n": np.array([1, 2, 0, 2, 1])})
    batches = lengths.map(lambda e: {"x": np.full(e["n"], 7)}).batch(4, remainder="pad").map(pad)
    first, last = batches
    assert first.value["x"].tolist() == [[7, 0], [7, 7], [0, 0], [7, 7]]
    assert last.value["x"].tolist() == [[7, 0], [0, 0], [0, 0], [0, 0]]
    assert last.mask.tolist() == [True, False, False, False]
