"""Integers of NumPy are integers."""

import json
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from models import Counting, numbers

int8: Any = np.int8
int16: Any = np.int16
int32: Any = np.int32
int64: Any = np.int64
uint32: Any = np.uint32
uint64: Any = np.uint64
DATA = numbers([0], [1], [2])


def test_an_engine_takes_integers_of_numpy_and_keeps_those_of_python() -> None:
    engine = fg.Engine(
        steps=int64(5),
        seed=uint32(3),
        log_every=int32(2),
        steps_per_execution=int8(2),
        max_compilations=int16(3),
        limit_train_batches=int64(2),
    )
    for value in (engine.steps, engine.seed, engine.steps_per_execution, engine.max_compilations):
        assert type(value) is int
    result = engine.fit(Counting, DATA)
    assert float(result.module.weight) == -5
    assert result.history.steps("train/loss").tolist() == [2, 4, 5]
    more = engine.fit(data=DATA, state=result.state, epochs=int64(1), steps_per_execution=int64(1))
    assert float(more.module.weight) == -7
    assert len(list(engine.iter_batches(DATA, steps=int64(3)))) == 3
    data = fg.ArrayData(np.arange(6, dtype=np.float32), int64(2), shuffle=True, seed=int64(1))
    same = fg.ArrayData(np.arange(6, dtype=np.float32), 2, shuffle=True, seed=1)
    assert [batch.tolist() for batch in data] == [batch.tolist() for batch in same]
    assert engine.predict(result, data, num_batches=int64(2)).shape == (4,)
    assert engine.evaluate(more, data, num_batches=int64(1)) == {"updates": 7}


def test_triggers_of_numpy_integers_give_steps_that_json_holds() -> None:
    class Third(fg.Trigger):
        def _next_after(self, after: int, step_range: fg.StepRange) -> int | None:
            return int64(3) if after < 3 else None

    step_range = fg.StepRange(0, 1000)
    for trigger, step in (
        (fg.Every(int8(100)), 200),
        (fg.At(int64(150), int64(10)), 150),
        (fg.EvenlySpaced(int8(5)), 200),
        (fg.FirstSteps(int64(300)), 101),
        (fg.Exponential(int64(60), 2.0), 180),
    ):
        assert json.dumps(trigger.next(100, step_range)) == str(step)
    assert json.dumps(Third().next(0, step_range)) == "3"
    # In eight bits this would be a negative step.
    assert fg.Every(int8(100)).next(300, step_range) == 400


@pytest.mark.parametrize("value", [int64(0), int64(-1), np.bool_(True), True, np.float64(5)])
def test_what_is_not_a_positive_integer_of_numpy_is_refused(value: Any) -> None:
    calls = (
        lambda: fg.Engine(steps=value),
        lambda: fg.Every(value),
        lambda: fg.ArrayData(np.zeros(3), value),
        lambda: fg.Engine(steps=1).evaluate(Counting(), DATA, num_batches=value),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match="must be a positive integer"):
            call()
    with pytest.raises(ConfigurationError, match="must be a positive integer"):
        fg.Engine(steps=jnp.int32(5))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="seed is"):
        fg.Engine(seed=int64(-1))
    with pytest.raises(ConfigurationError, match="seed is"):
        fg.Engine(seed=uint64(2**63))
