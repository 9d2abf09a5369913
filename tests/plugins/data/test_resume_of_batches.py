"""Runs on pipelines that stop and resume: the same batches and bits as if they had not stopped."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator
from fulgurite_checkpoint import Checkpointer
from fulgurite_data import Arrays, Batches, Stages, Together, Tokens
from fulgurite_testing import check_source


class Sum(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(fg.metrics.Mean.from_values((self.weight - batch["x"]) ** 2, ctx.mask))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.05)


def add_noise(example: Any, rng: np.random.Generator) -> Any:
    return {"x": np.float32(example["x"] + rng.normal())}


def build_batches(size: int = 4) -> Batches:
    dataset = Arrays({"x": np.arange(30)}).filter(lambda example: example["x"] % 5)
    return dataset.shuffle().repeat(2).map(add_noise, rng=True).batch(size, remainder="pad")


def test_every_position_continues_with_the_same_batches():
    check_source(build_batches, num_batches=26)


@pytest.mark.full
def test_a_run_resumes_with_the_bits_of_one_that_never_stopped(tmp_path: Path):
    def fit(folder: str, steps: int) -> Any:
        engine = fg.Engine(steps=steps, run_dir=tmp_path / folder, plugins=[Checkpointer(every=5)])
        return engine.fit(Sum(jnp.zeros(())), build_batches(), resume="auto")

    whole = fit("whole", 17)
    fit("parts", 5)
    fit("parts", 12)
    assert float(fit("parts", 17).module.weight) == float(whole.module.weight)
    # By hand: the twelve batches of 24 examples, twice, and the first ones of the next epoch.
    weight = np.float32(0)
    batches = [*build_batches().iter_epoch(0, seed=0), *build_batches().iter_epoch(1, seed=0)]
    for batch in batches[:17]:
        weight -= 0.05 * 2 * (weight - batch.value["x"][batch.mask]).mean()
    assert float(whole.module.weight) == pytest.approx(float(weight), rel=1e-5)


def test_a_position_is_small_and_far_ones_are_reached_at_once(tmp_path: Path):
    np.zeros(1_000_000, np.uint16).tofile(tmp_path / "a.bin")
    windows = Tokens(tmp_path / "a.bin", has_offsets=False).window(8, stride=1)
    batches = windows.shuffle().batch(4).repeat(100)
    position = {"epoch": 3, "batch": 20_000_000, "identity": list(batches.get_identity())}
    with BatchIterator(batches, seed=0, position=position) as iterator:
        item = next(iterator)
    assert item.position["batch"] == 20_000_001
    assert len(str(item.position)) < 1_000
    expected = batches.read(20_000_000, epoch=3)
    assert np.array_equal(item.batch["tokens"], expected["tokens"])


@pytest.mark.full
def test_data_that_changed_since_the_checkpoint_is_refused_with_what_differs(tmp_path: Path):
    def fit(steps: int, batches: Batches) -> Any:
        engine = fg.Engine(steps=steps, run_dir=tmp_path, plugins=[Checkpointer(every=2)])
        return engine.fit(Sum(jnp.zeros(())), batches, resume="auto")

    fit(2, build_batches())
    with pytest.raises(DataError, match=r"\"batch\(4, 'pad'\)\" is \"batch\(2, 'pad'\)\" now"):
        fit(4, build_batches(size=2))
    longer = Arrays({"x": np.arange(40.0)}).shuffle().batch(4)
    with pytest.raises(DataError, match=r"Arrays\(30 of .*Arrays\(40 of .*is gone"):
        fit(4, longer)
    fit(4, build_batches())


def test_equal_shapes_with_other_contents_are_not_the_data_of_the_run(tmp_path: Path):
    def fit(steps: int, factor: float) -> Any:
        batches = Arrays({"x": factor * np.arange(40.0)}).shuffle().batch(4)
        engine = fg.Engine(steps=steps, run_dir=tmp_path, plugins=[Checkpointer(every=2)])
        return engine.fit(Sum(jnp.zeros(())), batches, resume="auto")

    fit(2, 1.0)
    with pytest.raises(DataError, match=r"Arrays\(40 of .* is .*Arrays\(40 of .* now"):
        fit(4, 7.0)
    fit(4, 1.0)


def test_batches_can_be_parts_of_several_sources():
    def build_source() -> Any:
        numbers = Arrays({"x": np.arange(12)}).shuffle()
        return Together({"a": numbers.batch(3), "b": numbers.batch(2)})

    check_source(build_source)
    batch = next(iter(build_source()))
    assert {name: len(part["x"]) for name, part in batch.items()} == {"a": 3, "b": 2}
    stages = Stages((Arrays({"x": np.arange(4)}).batch(2), 3))
    assert [batch["x"].tolist() for batch in stages] == [[0, 1], [2, 3], [0, 1]]


def test_a_loop_of_ones_own_gets_the_batches_of_fit():
    batches = Arrays({"x": np.arange(12)}).shuffle().batch(4)
    engine = fg.Engine(epochs=2, seed=5)
    of_fit = [batch["x"].tolist() for batch in engine.iter_batches(batches)]
    data = fg.DataSource(batches)
    placed = [
        batch["x"].tolist() for epoch in range(2) for batch in data.device_put(epoch=epoch, seed=5)
    ]
    assert placed == of_fit
    with pytest.raises(ConfigurationError, match="order of this Batches depends on"):
        next(data.device_put())
