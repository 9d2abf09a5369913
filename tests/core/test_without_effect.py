"""What a user wrote and nothing uses is an error or a message."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError, NonFiniteError
from models import Counting, numbers


class Weights(fg.Module):
    weight: Any

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.sum(jnp.asarray(self.weight) * batch.mean()))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (np.zeros(4, int), r"weight is int32\[4\]"),
        (np.zeros(4, bool), r"weight is bool\[4\]"),
        (jnp.zeros((2, 0), jnp.uint8), r"weight is uint8\[2,0\]"),
    ],
)
def test_a_model_whose_weights_are_all_integers_or_bools_is_an_error(
    weight: Any, text: str
) -> None:
    with pytest.raises(ModelError, match=f"no array of floating-point numbers.*{text}"):
        fg.Engine(steps=1).fit(Weights(weight), numbers([0]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.complex64])
def test_weights_of_other_floating_point_numbers_train(dtype: Any) -> None:
    class Squared(Weights):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(jnp.abs(self.weight) ** 2).astype(jnp.float32))

    result = fg.Engine(steps=1).fit(Squared(jnp.ones(2, dtype)), numbers([0]))
    assert result.messages == []
    # The gradient is 2, and the step 0.1 of it.
    np.testing.assert_allclose(np.asarray(result.module.weight, np.complex64), 0.8, rtol=1e-2)


def test_a_model_without_arrays_is_told_that_nothing_is_trained() -> None:
    (message,) = fg.Engine(steps=1).fit(Weights(0.5), numbers([0])).messages
    assert message == "Weights has no arrays, so nothing is trained"


def test_an_engine_may_train_integers_in_its_own_way() -> None:
    class Adding(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: fg.Context, update_rule: Any) -> Any:
            module = Weights(state.module.weight + 1)
            return state.replace(module=module), fg.Output(jnp.float32(0))

    result = Adding(steps=3).fit(Weights(jnp.zeros(2, jnp.int32)), numbers([0]))
    assert result.module.weight.tolist() == [3, 3]


class Buffered(fg.Module):
    """A weight, a buffer behind `stop_gradient`, an array that nothing uses, and integers."""

    weight: jax.Array
    buffer: jax.Array
    unused: jax.Array
    indices: jax.Array
    optimizer: Any = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def scale(buffer: Any, value: Any) -> Any:
            return value * jax.lax.stop_gradient(buffer)

        preds = jax.jit(scale)(self.buffer[0], self.weight * batch.mean())
        return fg.Output(jnp.sum(scale(self.buffer, preds) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.optimizer


@pytest.mark.parametrize(
    ("optimizer", "is_told"),
    [
        (optax.adamw(1e-3), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), True),
        (optax.adamw(optax.linear_schedule(0.0, 1.0, 10)), True),
        (optax.adam(1e-3), False),
        (optax.lamb(1e-3), False),
        (optax.lbfgs(), False),
        (
            optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
            False,
        ),
    ],
)
def test_weight_decay_of_what_has_no_gradient_is_told(optimizer: Any, is_told: bool) -> None:
    module = Buffered(jnp.ones((2, 2)), jnp.ones(2), jnp.ones(3), jnp.ones(2, int), optimizer)
    result = fg.Engine(steps=2).fit(module, [np.ones(2, np.float32)])
    assert (result.module.buffer != 1).any() == is_told
    assert len(result.messages) == is_told
    if is_told:
        assert result.messages[0].startswith("the optimizer changes buffer, unused, such as by we")


# --- methods and settings -------------------------------------------------------------------------


def test_a_hook_on_a_module_is_told_unless_another_method_calls_it() -> None:
    class Hooked(Counting):
        def after_update(self, module: Any) -> Any:
            return module

        def transform_batch(self, batch: Any) -> Any:
            return batch

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(self.transform_batch(batch), ctx)

    (message,) = fg.Engine(steps=1).fit(Hooked, numbers([0])).messages
    assert message.startswith("nothing calls Hooked.after_update: this is the name of a hook")


@pytest.mark.parametrize(
    ("seed", "options", "is_told"),
    [
        (1, {"shuffle": True, "seed": 3}, True),
        (3, {"shuffle": True, "seed": 3}, False),
        (0, {"shuffle": True, "seed": 3}, False),  # the engine has no seed of its own
        (1, {"shuffle": True}, False),
        (1, {"seed": 3}, False),
    ],
)
def test_a_seed_that_the_data_overrides_is_told(seed: int, options: Any, is_told: bool) -> None:
    data = fg.ArrayData(np.zeros(8, np.float32), 4, **options)
    messages = fg.Engine(steps=1, seed=seed).fit(Counting(), data).messages
    assert [message.split(" because ")[0] for message in messages] == is_told * [
        f"Engine(seed={seed}) does not change the order of the data,"
    ]


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_an_optimizer_that_would_deal_with_nan_and_never_acts_is_told(policy: Any) -> None:
    class Protected(Counting):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.apply_if_finite(optax.chain(optax.zero_nans(), optax.sgd(1.0)), 3)

    messages = fg.Engine(steps=1, on_nonfinite=policy).fit(Protected, numbers([0])).messages
    expected = ["optax.zero_nans and optax.apply_if_finite of the optimizer never act"]
    assert [message.split(":")[0] for message in messages] == (
        [] if policy == "ignore" else expected
    )


# --- skipped steps --------------------------------------------------------------------------------


class NanFrom(Counting):
    """Its loss is NaN from the step on that the batch says."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * jnp.where(ctx.step >= batch[0], jnp.nan, 1.0))


def fit_nan_from(first: int, **options: Any) -> fg.FitResult:
    engine = fg.Engine(on_nonfinite="skip", **options)
    return engine.fit(NanFrom, [np.full(2, first, np.float32)])


def test_a_fit_whose_steps_are_all_skipped_is_told() -> None:
    (message,) = fit_nan_from(0, steps=99).messages
    assert message.startswith("nothing was trained: each of the 99 steps was skipped")
    result = fit_nan_from(3, steps=5, log_every=1)
    assert result.messages == []
    assert result.metrics["train"]["skipped_steps"] == 2
    # A fit that resumes from there counts its own steps.
    engine = fg.Engine(on_nonfinite="skip", steps=2)
    result = engine.fit(data=[np.full(2, 3, np.float32)], state=result.state)
    assert "each of the 2 steps was skipped" in result.messages[0]


@pytest.mark.parametrize(
    ("first", "options", "step"),
    [
        (0, {"steps": 100}, 100),
        (0, {"steps": 130, "log_every": None}, 130),
        (5, {"steps": 130, "log_every": 10}, 110),  # the window of steps 1 to 10 has finite ones
    ],
)
def test_a_hundred_skipped_steps_in_a_row_are_an_error(first: int, options: Any, step: int) -> None:
    with pytest.raises(NonFiniteError, match=rf"step {step}: each of the last \d+ steps was skip"):
        fit_nan_from(first, **options)


# --- evenly spaced --------------------------------------------------------------------------------


class Epochs:
    """An iterable whose epochs have these numbers of batches."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        length = self.lengths[self.number % len(self.lengths)]
        self.number += 1
        yield from [np.zeros(2, np.float32)] * length


@pytest.mark.parametrize(
    ("lengths", "fired", "reason"),
    [
        ([3, 3, 3], [3, 6, 9], ""),
        # The last epoch is shorter, and nothing was due at a wrong step before it.
        ([3, 3, 2], [3, 6, 8], ""),
        (
            [2, 4, 3],
            [2, 4, 7, 9],
            "was expected at step 6 until an epoch had another length. It is step 10 now; if it "
            "stays there, the action runs 2 more times, next at step 7.",
        ),
        (
            [4, 2, 1],
            [4, 6, 7],
            "was expected at step 12 until an epoch had another length. It is step 8 now; if it "
            "stays there, the action runs 2 more times, next at step 6.",
        ),
        (
            [4, 8, 8],
            [4, 8, 14, 20],
            "was expected at step 12 until an epoch had another length. It is step 20 now; if it "
            "stays there, the action runs 2 more times, next at step 14.",
        ),
        (
            [200, 200, 200],
            [128, 200, 400, 600],
            "was not known before the first epoch had ended. It is step 600 now; if it stays "
            "there, the action runs 3 more times, next at step 200.",
        ),
    ],
)
def test_evenly_spaced_fires_as_often_as_it_says_or_the_user_is_told_what_follows(
    lengths: list[int], fired: list[int], reason: str
) -> None:
    steps: list[int] = []

    class Spy:
        @fg.hookimpl
        def register_actions(self) -> Any:
            return [
                fg.ScheduledAction("spy", fg.EvenlySpaced(3), lambda run: steps.append(run.step)),
                fg.ScheduledAction("end", fg.EvenlySpaced(1), lambda run: None),
            ]

    result = fg.Engine(epochs=3, plugins=[Spy()]).fit(Counting(), Epochs(lengths))
    assert result.state.step == sum(lengths)
    assert steps == fired
    expected = f"EvenlySpaced(n=3) of spy.spy is not even over this fit, whose end {reason}"
    messages = [message for message in result.messages if "spy.end" not in message]
    assert len(messages) == bool(reason)
    assert all(message.startswith(expected) for message in messages)
    # Once is at the end, wherever that is, unless nothing was known of it at first.
    assert len(result.messages) - len(messages) == (lengths[0] == 200)
