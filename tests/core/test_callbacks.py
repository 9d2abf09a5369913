"""Errors that arise while a compiled step runs: one sentence with the step and the user's line."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CallbackError
from jax.experimental import io_callback

ROWS = np.arange(1, 13, dtype=np.float32)[:, None]
DATA = fg.ArrayData({"x": ROWS}, batch_size=4)
BATCHES = [{"x": ROWS[start : start + 4]} for start in (0, 4, 8)]


def check_rows(x: Any) -> Any:
    return eqx.error_if(x, jnp.any(x == 10), "no row may be ten")


def refuse_ten(x: Any) -> None:
    if 10 in x.ravel():
        raise KeyError("ten")


def inspect_rows(x: Any) -> Any:
    jax.debug.callback(refuse_ten, x)
    return x


def inspect_rows_by_io(x: Any) -> Any:
    io_callback(refuse_ten, None, x, ordered=False)
    return x


def divide(x: Any) -> Any:
    return x * (1 - jnp.sqrt(9.5 - x))


class Model(fg.Module):
    """Does something with its inputs that fails in the third batch."""

    weight: jax.Array
    act: Callable[[Any], Any] = eqx.field(static=True)

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.weight = jnp.ones(())
        self.act = act

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(self.weight * self.act(batch["x"])))

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return self.weight * self.act(batch["x"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


def fit(model: Model) -> None:
    fg.Engine(epochs=1, steps_per_execution=1, autoload=False).fit(model, BATCHES)


def fit_fused(model: Model) -> None:
    fg.Engine(epochs=1, steps_per_execution=3, autoload=False).fit(model, BATCHES)


def step(model: Model) -> None:
    engine = fg.Engine(steps=3, autoload=False)
    state = engine.init_state(model, BATCHES)
    for batch in BATCHES:
        state, _ = engine.step(state, batch)


def evaluate(model: Model) -> None:
    fg.Engine(steps=1, autoload=False).evaluate(model, DATA)


def predict(model: Model) -> None:
    fg.Engine(steps=1, autoload=False).predict(model, DATA)


CALLS = {
    fit: "training step 3",
    fit_fused: "one of the training steps 1 to 3 (Engine(steps_per_execution=1) tells which)",
    step: "training step 3",
    evaluate: "batch 2 of 'test'",
    predict: "batch 2 of 'predict'",
}


def get_line(function: Any, offset: int) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1] + offset}, in {function.__name__}"


def catch(call: Any, act: Any, error: type[Exception]) -> Exception:
    with pytest.raises(error) as caught:
        call(Model(act))
    return caught.value


@pytest.mark.variants("full")
@pytest.mark.parametrize("call", CALLS)
def test_failed_check_is_a_sentence_with_its_message_its_step_and_its_line(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    error = catch(call, check_rows, CallbackError)
    line = get_line(check_rows, 1)
    assert str(error) == f"{CALLS[call]}: no row may be ten (eqx.error_if at {line})"
    assert len(traceback.format_exception(error)) < 8
    assert isinstance(error, RuntimeError)  # as those of Equinox and JAX
    assert not caplog.records


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("call", "act"),
    [*[(call, inspect_rows) for call in CALLS], (fit, inspect_rows_by_io)],
)
def test_error_of_a_callback_is_a_sentence_and_has_that_error_as_its_cause(
    call: Any, act: Any, caplog: pytest.LogCaptureFixture
) -> None:
    error = catch(call, act, CallbackError)
    line = get_line(refuse_ten, 2)
    assert str(error) == f"{CALLS[call]}: a callback raised KeyError at {line}: 'ten'"
    assert type(error.__cause__) is KeyError
    text = "".join(traceback.format_exception(error))
    assert "jax/_src" not in text and "fulgurite/fit" not in text
    assert not caplog.records


@pytest.mark.variants("full")
@pytest.mark.parametrize("call", CALLS)
def test_debugged_nan_is_an_error_at_the_line_of_the_user_in_its_step(call: Any) -> None:
    with jax.debug_nans(True):
        error = catch(call, divide, FloatingPointError)
    assert "encountered in sqrt" in str(error)
    place = CALLS[call] if call is not fit_fused else "training step 3"
    assert f"while running {place} on a batch of x float32[4,1]" in error.__notes__
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "divide"
    assert {frame.filename for frame in frames} == {__file__}


@pytest.mark.full
def test_debugged_numbers_find_infinities_and_leave_finite_runs_alone() -> None:
    def invert(x: Any) -> Any:
        return 1 / (x - 9)

    with jax.debug_infs(True):
        error = catch(fit, invert, FloatingPointError)
    assert "(inf) encountered in div" in str(error)
    plain = fg.Engine(epochs=1).fit(Model(jnp.square), BATCHES)
    with jax.debug_nans(True), jax.debug_infs(True):
        debugged = fg.Engine(epochs=1).fit(Model(jnp.square), BATCHES)
        assert fg.Engine(steps=1).evaluate(debugged, DATA)["loss"] > 0
    assert plain.module.weight == debugged.module.weight


def test_error_of_a_callback_of_an_action_names_no_training_step() -> None:
    def call_back(run: fg.Run) -> None:
        jax.block_until_ready(jax.jit(inspect_rows)(jnp.array([10.0])))

    plugin = fg.LambdaPlugin(
        register_actions=lambda: [fg.ScheduledAction("look", fg.Every(2), call_back)]
    )
    with pytest.raises(CallbackError, match=r"^after step 2: a callback raised KeyError") as caught:
        fg.Engine(epochs=1, plugins=[plugin], autoload=False).fit(Model(jnp.square), BATCHES)
    assert any("action look, step 2" in note for note in caught.value.__notes__)


def test_plugins_see_the_sentence_and_nothing_is_saved_of_the_step() -> None:
    exceptions: list[Any] = []

    class Watcher:
        @fg.hookimpl
        def on_exception(self, run: fg.Run, exception: BaseException) -> None:
            exceptions.append(exception)

    with pytest.raises(CallbackError) as caught:
        fg.Engine(epochs=1, plugins=[Watcher()]).fit(Model(check_rows), BATCHES)
    assert exceptions == [caught.value]
