"""On which devices engines compute and batches are put."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from eight_devices import Net, Noisy, engine, regression, some
from fulgurite.errors import ConfigurationError
from fulgurite_sharding import (
    FSDP,
    DataParallel,
)
from jax.sharding import NamedSharding, PartitionSpec as P


def test_an_engine_computes_on_its_device() -> None:
    class Places:
        def __init__(self) -> None:
            self.devices: set[Any] = set()

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("look", 1, self.look)]

        def look(self, run: fg.Run) -> None:
            for leaf in jax.tree.leaves(eqx.filter(run.state, eqx.is_array)):
                self.devices |= leaf.devices()

    model = eqx.nn.make_with_state(Net)
    device = jax.devices()[3]
    on_default = engine(steps=4).fit(model, regression())
    for data in (regression(), regression(on_device=True)):
        places = Places()
        trained = engine(places, steps=4, device="cpu:3")
        result = trained.fit(model, data)
        assert places.devices == {device}, places.devices
        modules = [eqx.filter(fit.module, eqx.is_array) for fit in (result, on_default)]
        leaves = zip(*map(jax.tree.leaves, modules), strict=True)
        assert all(np.array_equal(mine, other) for mine, other in leaves)
        state, _ = trained.step(result.state, next(iter(regression())))
        assert state.module.first.weight.devices() == {device}
        assert trained.evaluate(state, data)["loss"] > 0
    assert "cpu:3" in trained.explain_sharding(next(iter(regression()))).lower()


def test_devices_that_are_not_there_are_errors() -> None:
    for plugins, device, says in [
        ([], "cpu:8", "there is no device 'cpu:8'; there are cpu:0, cpu:1"),
        ([], "abacus", "there is no device 'abacus'"),
        ([DataParallel()], "cpu:1", "plugin 'sharding' says which devices"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            engine(*plugins, device=device)
        assert says in str(caught.value)


def test_batches_are_put_where_a_loop_wants_them() -> None:
    sharding = NamedSharding(some(8), P("data"))
    batches = list(regression().device_put(sharding))
    assert [batch["index"].tolist() for batch in batches] == [
        list(range(start, start + 32)) for start in (0, 32, 64)
    ]
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(batches))
    assert engine(DataParallel()).sharding.batch_sharding == sharding
    for strategy in (engine(FSDP()).sharding, engine(DataParallel()).sharding):
        placed = strategy.shard_batch(dict(batches[0]), beside=())
        spread = next(regression().device_put(strategy.batch_sharding))
        for leaf, expected in zip(jax.tree.leaves(spread), jax.tree.leaves(placed), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
            assert np.array_equal(leaf, expected)
    assert engine().sharding.batch_sharding is None
    (batch,) = fg.DataSource([{"x": np.ones(8)}]).device_put(jax.devices()[5])
    assert batch["x"].devices() == {jax.devices()[5]}


def test_batches_on_other_devices_are_moved_to_that_of_the_model() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    first, second, third = jax.devices()[:3]
    expected = fg.Engine(steps=2).fit(Noisy(), [{"x": x}] * 2).module.weight
    batches = [{"x": jax.device_put(x, device)} for device in (second, third)]
    for steps_per_execution in (1, 2):
        engine = fg.Engine(steps=2, steps_per_execution=steps_per_execution)
        for model, device in ((Noisy(), first), (jax.device_put(Noisy(), third), third)):
            result = engine.fit(model, batches)
            np.testing.assert_array_equal(result.module.weight, expected)
            assert result.module.weight.devices() == {device}
            state = engine.init_state(model, batches)
            for batch in batches:
                state, _ = engine.step(state, batch)
            np.testing.assert_array_equal(state.module.weight, expected)
            loss = engine.evaluate(result, batches)["loss"]
            np.testing.assert_allclose(
                loss, np.mean((x @ np.asarray(expected) - 1) ** 2), rtol=1e-5
            )
