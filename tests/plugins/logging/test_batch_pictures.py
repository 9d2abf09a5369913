"""Pictures of a batch (K20)."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_logging import BatchPictures, MediaLogger


class Net(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.sum(self.weight**2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Keeper:
    """Keeps the records of media."""

    def __init__(self) -> None:
        self.records: list[fg.Record] = []

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "media":
            return
        self.records.append(record)


def test_pictures_of_the_first_batch_are_shown_K20() -> None:
    grey = np.linspace(0, 1, 3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    batch = {
        "grey": grey,
        "colour": np.full((3, 4, 4, 3), 7, np.uint8),
        "half": jnp.full((3, 4, 4), 0.5, jnp.bfloat16),
        "label": np.arange(3),
        "video": np.zeros((3, 4, 4, 2), np.float32),
        "rows": np.zeros((3, 2, 9), np.float32),
    }
    keeper = Keeper()
    plugins = [keeper, BatchPictures(num_examples=2), MediaLogger(every=fg.FirstSteps(1))]
    engine = fg.Engine(steps=3, plugins=plugins, autoload=False)
    engine.fit(Net(jnp.ones(1)), [batch] * 3)
    (record,) = keeper.records
    assert (record.step, record.source) == (1, "train")
    assert set(record.values) == {"batch/shapes", "batch/grey", "batch/half", "batch/colour"}
    assert np.array_equal(record.values["batch/colour"].pixels, batch["colour"][:2])
    expected = np.round(255 * grey[:2]).astype(np.uint8)[..., None]
    assert np.unique(record.values["batch/half"].pixels).tolist() == [128]
    assert np.array_equal(record.values["batch/grey"].pixels, expected)
    assert "label int32[3]" in record.values["batch/shapes"].text


def test_arguments_are_checked_K20() -> None:
    with pytest.raises(ConfigurationError, match="num_examples"):
        BatchPictures(num_examples=0)
