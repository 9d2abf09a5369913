"""Data whose state is not JSON: it is saved as it is, and a run continues with the same batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fulgurite as fg
import grain
import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError
from fulgurite_checkpoint import Checkpointer

NUMBERS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


class Mean(fg.Module):
    """It follows the mean of the batches, so its bits depend on their order."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch - self.weight) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


class Reservoir:
    """Yields numbers from a buffer at random; the buffer and the generator are its state."""

    def __init__(self) -> None:
        self.buffer = NUMBERS[:8].copy()
        self.seed = b"\x00\xff secret of the order \x80"
        self.count = 0

    def __iter__(self) -> Any:
        while self.count < 14:
            generator = np.random.default_rng([*self.seed, self.count])
            place = int(generator.integers(8))
            batch = self.buffer[place : place + 1].copy()
            self.buffer[place] = NUMBERS[8 + self.count]
            self.count += 1
            yield batch
        self.__init__()

    def get_state(self) -> Any:
        return {"buffer": self.buffer, "seed": self.seed, "count": self.count}

    def set_state(self, state: Any) -> None:
        self.buffer = np.array(state["buffer"])
        self.seed = state["seed"]
        self.count = state["count"]


class Rows:
    """What grain's loader reads; it compares sources by their text."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: Any) -> np.ndarray:
        return NUMBERS[index]

    def __repr__(self) -> str:
        return "Rows()"


def make_grain_dataset() -> Any:
    """A `MapDataset` of grain: the state of its iterators is JSON."""
    dataset = grain.MapDataset.source(Rows()).shuffle(seed=3).batch(4).repeat()
    return dataset.to_iter_dataset().__iter__()


def make_grain_loader() -> Any:
    """A `DataLoader` of grain: the state of its iterators is bytes."""
    loader = grain.DataLoader(
        data_source=Rows(),
        sampler=grain.samplers.IndexSampler(len(NUMBERS), shuffle=True, seed=3, num_epochs=9),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )
    return iter(loader)


@pytest.mark.parametrize(
    "make_data",
    [
        pytest.param(Reservoir, marks=pytest.mark.full),
        pytest.param(make_grain_loader, marks=pytest.mark.full),
        pytest.param(make_grain_dataset, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_the_same_batches(make_data: Callable[[], Any], tmp_path: Path) -> None:
    def fit(run: str, **options: Any) -> fg.FitResult:
        stop = fg.LambdaPlugin(every={fg.At(7): lambda run: run.request_stop("a test")})
        plugins = [Checkpointer(3), *([stop] if options.pop("stops", False) else [])]
        engine = fg.Engine(steps=20, run_dir=tmp_path / run, plugins=plugins, autoload=False)
        return engine.fit(Mean, make_data(), **options)

    whole = fit("whole")
    assert fit("cut", stops=True).stop_reason == "a test"
    resumed = fit("cut", resume="auto")
    assert int(resumed.state.step) == 20
    np.testing.assert_array_equal(resumed.module.weight, whole.module.weight)


def test_a_state_that_cannot_be_saved_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Opaque(Reservoir):
        def get_state(self) -> Any:
            return {"generator": object()}

    engine = fg.Engine(steps=2, run_dir=tmp_path / "run", plugins=[Checkpointer(1)])
    with pytest.raises(DataError, match=r"Opaque\) cannot be saved: object: .*bytes"):
        engine.fit(Mean, Opaque())
