"""Steps and evaluations over eight devices compute what one device does."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from eight_devices import Compilations, Line, Net, engine, regression, some
from fulgurite_evaluators import Evaluator
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    Sharding,
    check_replicas,
    gather,
)


def test_shardings_stay_and_nothing_is_compiled_again() -> None:
    for settings in ({}, {"steps_per_execution": 4}):
        compilations = Compilations()
        trained = engine(FSDP(min_size=64), compilations, steps=11, log_every=3, **settings)
        data = regression()
        first = trained.init_state(eqx.nn.make_with_state(Net), data)
        places = jax.tree.map(lambda leaf: leaf.sharding, eqx.filter(first, eqx.is_array))
        result = trained.fit(state=first, data=data)
        assert (
            jax.tree.map(lambda leaf: leaf.sharding, eqx.filter(result.state, eqx.is_array))
            == places
        )
        again = trained.fit(state=result.state, data=data)
        assert int(again.state.step) == 22
        assert len(compilations.compilations) == 1
        check_replicas(again.state)


def test_fused_steps_train_alike() -> None:
    results = [
        engine(FSDP(min_size=64), steps=20, **settings).fit(
            eqx.nn.make_with_state(Net), regression(shuffle=True)
        )
        for settings in ({}, {"steps_per_execution": 8})
    ]
    np.testing.assert_allclose(*(result.history["train/loss"] for result in results), rtol=1e-6)
    np.testing.assert_allclose(
        *(gather(result.module.first.weight) for result in results), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_batches_gathered_on_the_devices_are_the_same() -> None:
    fit = engine(FSDP(min_size=64), steps=12).fit
    losses = [
        fit(eqx.nn.make_with_state(Net), regression(shuffle=True, on_device=where)).history[
            "train/loss"
        ]
        for where in (False, True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_numbers_do_not_depend_on_the_number_of_devices() -> None:
    """Random keys and data order to the bit, losses and the batch norm's statistics but for
    rounding."""
    results = {
        count: (
            engine(Sharding(mesh=some(count)), steps=50, log_every=1, seed=3).fit(
                eqx.nn.make_with_state(Net), regression(shuffle=True)
            )
        )
        for count in (1, 2, 4, 8)
    }
    single = results[1]
    assert len(set(single.history["train/draws"])) > 40, "every step draws other numbers"
    for count, result in results.items():
        for name in ("draws", "order"):
            assert np.array_equal(
                result.history[f"train/{name}"], single.history[f"train/{name}"]
            ), (
                count,
                name,
            )
        np.testing.assert_allclose(
            result.history["train/loss"], single.history["train/loss"], rtol=2e-4
        )


def test_batch_norm_takes_its_statistics_over_the_global_batch() -> None:
    """Equal to 1e-6 on one device and on eight: mean and variance after one step."""
    states = [
        engine(Sharding(mesh=some(count)), steps=1)
        .fit(eqx.nn.make_with_state(Net), regression())
        .state
        for count in (1, 8)
    ]
    single, eight = (
        [np.asarray(leaf) for leaf in jax.tree.leaves(state.model_state)] for state in states
    )
    assert len(single) == len(eight) > 1
    for a, b in zip(single, eight, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_what_was_trained_on_other_devices_goes_on() -> None:
    """A state on a mesh on no mesh, wherever jax computes, and on another one, likewise in
    evaluation; a module on some device on a mesh."""
    data = regression()

    def trained(*plugins: Any, state: Any = None, model: Any = Line) -> fg.TrainState:
        return engine(*plugins, steps=2).fit(None if state else model, data, state=state).state

    module = jax.device_put(engine().init_state(Line, data).module, jax.devices()[3])
    states = [
        trained(state=trained(FSDP(min_size=1))),
        trained(FSDP(), state=trained(Sharding(some(4)), model=module)),
    ]
    for state in states:
        np.testing.assert_allclose(
            state.module.weight, trained(state=trained()).module.weight, rtol=1e-5
        )
    with jax.default_device(jax.devices()[3]):
        assert (
            trained(state=trained(FSDP(min_size=1))).module.weight.devices()
            == module.weight.devices()
        )
    meshes = [Sharding(some(4)), Sharding({"a": 2, "data": 4})]
    losses = [
        engine(mesh).evaluate(start, data)["loss"]
        for mesh in meshes
        for start in (states[1], module)
    ]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-6)


def test_evaluations_are_those_of_one_device() -> None:
    """With a last batch that does not divide by eight, and with one that is padded."""
    module, state = eqx.nn.make_with_state(Net)(key=jax.random.key(0))
    for data in (regression(53), regression(53, remainder="pad")):
        values = [
            trainer.evaluate((module, state), data)["loss"]
            for trainer in (engine(), engine(DataParallel()))
        ]
        np.testing.assert_allclose(*values, rtol=1e-6)
        preds = [
            trainer.predict((module, state), data) for trainer in (engine(), engine(DataParallel()))
        ]
        assert preds[1].shape == (53, 8)
        np.testing.assert_allclose(*preds, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_evaluations_compile_behind_the_first_steps_for_where_the_state_stays() -> None:
    """By what is compiled at the start, from the state as it was made, the state after some steps
    is evaluated."""
    begun: list[Any] = []
    compile_lowered = jax.stages.Lowered.compile

    def compile_watched(lowered: Any, *arguments: Any) -> Any:
        begun.append(lowered)
        return compile_lowered(lowered, *arguments)

    data = regression(seed=0)
    for plugin in (FSDP(min_size=64), DataParallel()):
        begun.clear()
        evaluator = Evaluator("val", regression(32), every=4)
        trainer = engine(plugin, evaluator, steps=8, log_every=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", compile_watched)
            result = trainer.fit(eqx.nn.make_with_state(Net), data)
        # The state, the step and the evaluation.
        assert len(begun) == 3
        assert result.timings.calls["compile"] == 2
        expected = engine(DataParallel()).evaluate(result, regression(32))
        np.testing.assert_allclose(result.metrics["val"]["loss"], expected["loss"], rtol=1e-6)
