"""Batches that do not divide by the devices."""

import re
import tempfile
import warnings
from functools import partial
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import pytest
from eight_devices import Line, Noisy, Wide, engine, regression
from fulgurite.errors import DataError
from fulgurite_checkpoint import Checkpointer
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    gather,
)


class MaskedLine(Line):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        errors = (batch["x"] @ self.weight - batch["y"]) ** 2
        return fg.Output(fg.metrics.Mean.from_values(errors, ctx.mask))


def test_a_batch_that_does_not_divide_is_an_error() -> None:
    for size, step in ((12, 1), (40, 3)):
        with pytest.raises(DataError) as caught:
            engine(DataParallel(), steps=5).fit(Wide, regression(84, size))
        assert f"the batch for step {step}: axis 0 of index" in str(caught.value)
        assert "8 parts" in str(caught.value) and "remainder='drop'" in str(caught.value)


class Stream:
    """Batches of a length that nobody knows beforehand."""

    def __init__(self, data: fg.ArrayData) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def refuse(trained: fg.Engine, data: Any, step: int) -> None:
    with pytest.raises(DataError) as caught:
        trained.fit(Line, data)
    # Of a source on the device, the indices of its examples are what is divided.
    words = rf"the batch for step {step}: axis 0 of ind(ex|ices) \[20\] does not divide into 8"
    assert re.match(words, str(caught.value))


def test_an_uneven_last_batch_is_refused_before_the_first_step() -> None:
    steps: list[int] = []
    noting = fg.LambdaPlugin(every={1: lambda run: steps.append(run.step)})
    uneven = partial(regression, 340, 32)  # ten batches of 32, and one of 20
    for data in (
        uneven(),
        uneven(shuffle=True),
        uneven(shuffle=True, on_device=True),
        fg.DataSource(uneven(), prefetch=2),
        list(uneven()),
        tuple(uneven()),
    ):
        settings: list[dict[str, Any]] = [{"epochs": 1}, {"steps": 11}, {"steps": 500}]
        for setting in settings:
            refuse(fg.Engine(plugins=[DataParallel(), noting], autoload=False, **setting), data, 11)
        # What the fit does not come to is not a mistake.
        result = engine(FSDP(), steps=10).fit(Line, data)
        later = engine(DataParallel(), steps=1).fit(state=result.state, data=data)
        assert int(later.state.step) == 11, "a later fit is another pass"
        limited = engine(DataParallel(), steps=12, limit_train_batches=10).fit(Line, data)
        assert int(limited.state.step) == 12
    assert not steps
    for remainder in ("drop", "pad"):
        data = regression(340, 32, remainder=remainder)
        assert int(engine(DataParallel(), steps=12).fit(MaskedLine, data).state.step) == 12
    # On one device, and in an evaluation, any size will do.
    assert int(engine(steps=12).fit(Line, uneven()).state.step) == 12
    assert np.isfinite(engine(DataParallel()).evaluate(limited, uneven())["loss"])


def test_a_run_is_saved_before_an_uneven_batch_that_nobody_knew_of() -> None:
    data = regression(340, 32)
    for steps_per_execution in (1, 4):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("error")
            plugins = [DataParallel(), Checkpointer(every=1000)]
            trained = engine(
                *plugins, steps=30, run_dir=folder, steps_per_execution=steps_per_execution
            )
            source = fg.DataSource(Stream(data), resume="replay")
            refuse(trained, source, 11)
            # The ten steps before it, by NumPy.
            weight = np.asarray(engine().init_state(Line, data).module.weight, np.float64)
            momentum = np.zeros(16)
            for batch in list(data)[:10]:
                error = batch["x"] @ weight - batch["y"]
                momentum = 0.9 * momentum + 2 * batch["x"].T @ error / 32
                weight -= 1e-2 * momentum
            state = trained.load_weights(Line, folder)
            assert int(state.step) == 10
            np.testing.assert_allclose(gather(state.module.weight), weight, rtol=1e-5)
            # With a last batch that divides, it continues where it was.
            mended = fg.DataSource(Stream(regression(344, 32)), resume="replay")
            assert int(trained.fit(Line, mended, resume="auto").state.step) == 30


def test_batches_with_typed_keys_are_divided_whatever_their_size() -> None:
    keys = jax.random.split(jax.random.key(0), 13)
    x = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
    batches = [{"x": x[:8], "key": keys[:8]}, {"x": x[8:], "key": keys[8:]}]
    noise = np.stack([jax.random.normal(key, (3,)) for key in keys])
    expected = np.mean(((x + noise).sum(1) - 1) ** 2)
    for preset in (DataParallel(), FSDP()):
        divided = fg.Engine(steps=2, plugins=[preset])
        np.testing.assert_allclose(divided.evaluate(Noisy(), batches)["loss"], expected, rtol=1e-5)
        np.testing.assert_array_equal(divided.predict(Noisy(), batches), noise)
        result = divided.fit(Noisy(), batches[:1] * 2)
        single = fg.Engine(steps=2).fit(Noisy(), batches[:1] * 2)
        np.testing.assert_allclose(gather(result.module.weight), single.module.weight, rtol=1e-5)
