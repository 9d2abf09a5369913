"""A loss, gradient or update that is not finite: who is named, and that nothing acts on that
state."""

import dataclasses
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import NonFiniteError
from fulgurite_logging.media import Histogram
from models import Act, Counting, Evaluating, Events, assert_same_bits, numbers

BAD = 4
"""The step whose batch breaks it."""


class Root(fg.Module):
    """Of where(x > 0, sqrt(x + shift), 0) the value at x = 0 is finite, and the gradient by `shift`
    is not."""

    weight: jax.Array
    shift: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight, self.shift = jnp.ones((2,)), jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x = batch + self.shift
        return fg.Output(jnp.mean(self.weight) * jnp.mean(jnp.where(batch > 0, jnp.sqrt(x), 0)))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


class Loss(Root):
    """The loss is not finite in a bad batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(self.weight) * 1 / batch.min())


class Term(Root):
    """A further term of the loss is not finite in a bad batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("penalty", jnp.log(batch.min()))
        return fg.Output(jnp.mean(self.weight))


class Update(Root):
    """Loss and gradient are finite; the optimizer makes the update infinite."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(self.weight) * jnp.where(batch.min() == 0, 1e10, 1e-20))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e30)


def batches() -> list[np.ndarray]:
    good = [[1.0, 4.0]] * (BAD - 1)
    return numbers(*good, [0.0, 4.0], [1.0, 9.0], [4.0, 1.0])


class Saver:
    """Saves at every step, like a checkpointer."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", fg.Every(1), lambda run: run.save(), stage="save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        state = run.snapshot().state
        self.saved.append(int(state.step))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.module))


class Late(Saver):
    """Tries to save when the run ends with an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[BaseException] = []

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        for look in (lambda: run.state, run.snapshot, run.save):
            try:
                look()
            except NonFiniteError as error:
                self.refused.append(error)


@pytest.mark.variants("full")
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("model", "term"),
    [
        (Root, "the gradient of shift"),
        (Loss, "the loss"),
        (Term, "the loss term 'penalty'"),
        (Update, "the update of weight"),
    ],
)
def test_a_save_due_at_the_step_saves_nothing(
    model: Any, term: str, steps_per_execution: int
) -> None:
    saver, events = Late(), Events()
    with pytest.raises(NonFiniteError) as caught:
        fg.Engine(steps=6, steps_per_execution=steps_per_execution, plugins=[saver, events]).fit(
            model, batches()
        )
    assert caught.value.step == BAD and caught.value.term == term
    assert str(caught.value).startswith(f"step {BAD}: {caught.value.term} is not finite")
    assert saver.saved == list(range(1, BAD))
    assert [error.step for error in saver.refused] == [BAD] * 3  # type: ignore[attr-defined]
    assert events.exceptions == [caught.value] and not events.results


class Weights:
    """Puts `make(weight, step)` in the place of the weight, after every update."""

    def __init__(self, make: Any) -> None:
        self.make = make

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        weight = self.make(module.weight, ctx.step + 1)
        return eqx.tree_at(lambda module: module.weight, module, weight), plugin_state


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_nothing_is_saved_of_what_after_update_broke(steps_per_execution: int) -> None:
    saver, good = Saver(), numbers([1.0, 2.0])
    breaking = Weights(lambda weight, step: jnp.where(step == BAD, jnp.nan, weight))
    with pytest.raises(NonFiniteError) as caught:
        fg.Engine(steps=6, steps_per_execution=steps_per_execution, plugins=[saver, breaking]).fit(
            Root, good
        )
    assert (caught.value.step, caught.value.term) == (BAD, "what after_update made of weight")
    assert saver.saved == list(range(1, BAD))
    skipping = fg.Engine(
        steps=6, steps_per_execution=steps_per_execution, on_nonfinite="skip", plugins=[breaking]
    ).fit(Root, good)
    assert int(skipping.state.nonfinite.skipped) == 1 and np.isfinite(skipping.module.weight).all()


def test_a_bad_update_that_after_update_hides_is_still_an_error() -> None:
    with pytest.raises(NonFiniteError) as caught:
        fg.Engine(steps=6, plugins=[Weights(lambda weight, step: jnp.clip(weight, -1, 1))]).fit(
            Update, batches()
        )
    assert (caught.value.step, caught.value.term) == (BAD, "the update of weight")


@pytest.mark.parametrize(
    ("steps_per_execution", "log"),
    [
        (1, 6),
        (8, 6),
        pytest.param(1, 5, marks=pytest.mark.full),
        pytest.param(8, 2, marks=pytest.mark.full),
    ],
)
def test_the_error_names_the_step_even_if_found_later(steps_per_execution: int, log: int) -> None:
    saved: list[int] = []
    plugin = Act(fg.At(2, 5, 6), lambda run: saved.append(int(run.state.step)), stage="save")
    with pytest.raises(NonFiniteError) as caught:
        fg.Engine(
            steps=6, steps_per_execution=steps_per_execution, log_every=log, plugins=[plugin]
        ).fit(Root, batches())
    assert (caught.value.step, caught.value.term) == (BAD, "the gradient of shift")
    assert saved == [2]
    # The step is at fault, and not the plugin that was the first to read its state.
    assert not [note for note in getattr(caught.value, "__notes__", []) if "plugin" in note]


def test_the_window_of_the_bad_step_is_not_logged() -> None:
    records: list[fg.Record] = []

    class Logger:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            records.append(record)

    with pytest.raises(NonFiniteError):
        fg.Engine(steps=6, log_every=3, plugins=[Logger()]).fit(Loss, batches())
    assert [record.step for record in records if record.stream == "exact"] == [3]


class Shown(Root):
    """Shows its batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        media = {"batch": Histogram.from_values(batch)}
        return super().training_step(batch, ctx).replace(media=media)


class Showing:
    """Shows media at a trigger, and is the logger of them."""

    plugin_name = "media"

    def __init__(self, trigger: fg.Trigger) -> None:
        self.trigger, self.steps = trigger, list[int]()

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("show", self.trigger, fg.Run.emit_media)]

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "media":
            return
        self.steps.append(record.step)


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_nothing_of_the_step_or_after_it_is_shown(steps_per_execution: int) -> None:
    showing = Showing(fg.At(2, BAD, 6))
    with pytest.raises(NonFiniteError, match=f"step {BAD}: the gradient of shift"):
        fg.Engine(
            steps=9, steps_per_execution=steps_per_execution, log_every=None, plugins=[showing]
        ).fit(Shown, batches())
    assert showing.steps == [2]


@pytest.mark.full
def test_an_evaluation_due_at_the_step_does_not_run() -> None:
    evaluating = Evaluating(fg.Evaluation("test", batches()), trigger=fg.At(2, BAD))
    with pytest.raises(NonFiniteError, match=f"step {BAD}"):
        fg.Engine(steps=6, plugins=[evaluating]).fit(Root, batches())
    assert [step for step, _, _ in evaluating.results] == [2]


def test_a_bad_last_step_is_found_without_any_trigger() -> None:
    with pytest.raises(NonFiniteError, match=f"step {BAD}: the gradient of shift"):
        fg.Engine(steps=BAD, log_every=None).fit(Root, batches())


@pytest.mark.full
def test_a_step_loop_finds_a_bad_step_when_it_reads_metrics() -> None:
    engine = fg.Engine(steps=6)
    state = engine.init_state(Root, batches())
    for number, batch in enumerate(engine.iter_batches(batches()), 1):
        state, _ = engine.step(state, batch)
        if number < BAD:
            engine.check_finite(state)
    with pytest.raises(NonFiniteError) as caught:
        engine.check_finite(state)
    assert (caught.value.step, caught.value.term) == (BAD, "the gradient of shift")
    assert int(state.nonfinite.step) == BAD
    with pytest.raises(NonFiniteError):
        engine.fit(data=batches(), state=state)


@pytest.mark.full
def test_one_element_of_an_array_of_any_shape_is_found() -> None:
    shapes = [(), (3,), (256,), (257,), (1, 300), (300, 1), (17, 19), (4, 5, 20), (2, 3, 4, 15)]

    class Arrays(fg.Module):
        """Of where(x > 0, sqrt(x + array), 0) the value at x = 0 is finite, and the gradient is
        not."""

        arrays: list[jax.Array]

        def __init__(self, *, key: Any = None) -> None:
            self.arrays = [jnp.zeros(shape) for shape in shapes]

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            roots = [
                jnp.where(x > 0, jnp.sqrt(x + array), 0)
                for x, array in zip(batch, self.arrays, strict=True)
            ]
            return fg.Output(jnp.stack([root.sum() for root in roots]).sum(), weight=1)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(1e-3)

    engine = fg.Engine(steps=1)
    for index, shape in enumerate(shapes):
        size = int(np.prod(shape))
        for place in {0, size // 2, size - 1}:
            batch = [np.ones(leaf_shape, np.float32) for leaf_shape in shapes]
            batch[index].flat[place] = 0
            with pytest.raises(NonFiniteError, match=rf"the gradient of arrays\[{index}\] is"):
                engine.fit(Arrays, [batch])
    engine.fit(Arrays, [[np.ones(shape, np.float32) for shape in shapes]])


def test_gradients_are_checked_as_the_optimizer_receives_them() -> None:
    class Zeroed:
        @fg.hookimpl
        def gradient_transform(self) -> optax.GradientTransformation:
            return optax.zero_nans()

    result = fg.Engine(steps=6, plugins=[Zeroed()]).fit(Root, batches())
    assert np.isfinite(result.module.weight).all() and np.isfinite(result.module.shift)


# --- skip -----------------------------------------------------------------------------------------


class Normed(fg.Module):
    """A model with a state, a key and integers beside its parameters."""

    norm: eqx.nn.BatchNorm
    weight: jax.Array
    key: Any
    count: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.norm = eqx.nn.BatchNorm(1, "batch", mode="ema")
        self.weight, self.key, self.count = jnp.ones(3), jax.random.key(1), jnp.asarray(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        forward = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        assert ctx.model_state is not None
        normed, state = forward(batch[:, None], ctx.model_state)
        loss = jnp.mean(self.weight) * jnp.mean(normed + batch[:, None]) + jnp.log(batch.min())
        return fg.Output(
            loss, metrics={"largest": fg.metrics.Max.from_values(batch)}, model_state=state
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


class Slice:
    """A plugin that counts updates in its slice and shrinks the weights."""

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        return {"updates": jnp.int32(0)}

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        module = eqx.tree_at(
            lambda module: module.weight, module, replace_fn=lambda weight: weight * 0.9
        )
        return module, {"updates": plugin_state["updates"] + 1}


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_skip_leaves_every_leaf_but_the_step_as_it_was(steps_per_execution: int) -> None:
    bad = numbers([0, 2])[0]
    good = numbers([1, 2], [2, 3], [3, 1])
    model = eqx.nn.make_with_state(Normed)
    engine = fg.Engine(
        steps=5, steps_per_execution=steps_per_execution, on_nonfinite="skip", plugins=[Slice()]
    )
    skipping = engine.fit(model, [bad, good[0], bad, good[1], bad], steps=5)
    without = engine.fit(model, good[:2], steps=2)
    assert int(skipping.state.step) == 5 and int(without.state.step) == 2
    assert int(skipping.state.nonfinite.skipped) == skipping.metrics["train"]["skipped_steps"] == 3
    assert without.metrics["train"]["skipped_steps"] == 0
    for field in ("module", "model_state", "opt_state", "plugin_states", "key"):
        assert_same_bits(getattr(skipping.state, field), getattr(without.state, field))
    for name in ("loss", "largest"):
        assert skipping.metrics["train"][name] == without.metrics["train"][name]
    assert int(skipping.state.plugin_states["slice"]["updates"]) == 2


@pytest.mark.full
def test_a_window_of_skipped_steps_logs_only_their_number() -> None:
    bad, good = numbers([0, 2], [1, 2])
    result = fg.Engine(steps=5, log_every=1, on_nonfinite="skip").fit(
        Loss, [good, bad, bad, good, bad]
    )
    assert result.history.steps("train/loss").tolist() == [1, 4]
    assert result.history["train/skipped_steps"].tolist() == [0, 1, 2, 2, 3]
    assert result.metrics["train"]["loss"] == result.history["train/loss"][-1]
    assert int(result.state.nonfinite.skipped) == 3 and int(result.state.step) == 5
    nothing = fg.Engine(steps=5, log_every=fg.AtStart() | fg.Every(2), on_nonfinite="skip").fit(
        Loss, [bad]
    )
    assert nothing.history.names() == ["train/skipped_steps"]
    assert nothing.history.steps("train/skipped_steps").tolist() == [2, 4]


def test_steps_that_were_skipped_stay_counted_when_an_earlier_state_is_put_back() -> None:
    states: list[fg.TrainState] = []

    def act(run: fg.Run) -> Any:
        if run.step == 1:
            states.append(jax.tree.map(jnp.copy, run.state))
        return fg.ReplaceState(states[0]) if run.step == 4 else None

    bad, good = numbers([0, 2], [1, 2])
    result = fg.Engine(
        steps=5, log_every=1, on_nonfinite="skip", plugins=[Act(fg.Every(1), act)], autoload=False
    ).fit(Loss, [good, bad, good, bad, bad])
    assert result.history["train/skipped_steps"].tolist() == [0, 1, 1, 2, 3]
    assert int(result.state.nonfinite.skipped) == 3


def test_a_loop_over_two_models_names_what_was_not_finite_in_each() -> None:
    """The newest step is that of the other model, which has fewer parameters."""
    engine = fg.Engine(steps=1, autoload=False)
    bad, other = engine.init_state(Root, batches()), engine.init_state(Counting, batches())
    bad, _ = engine.step(bad, numbers([0.0, 4.0])[0])
    other, _ = engine.step(other, batches()[0])
    engine.check_finite(other)
    with pytest.raises(NonFiniteError, match="step 1: the gradient of shift is not finite"):
        engine.check_finite(bad)


def test_skip_counts_in_the_step_loop_too() -> None:
    engine = fg.Engine(steps=6, on_nonfinite="skip")
    state = engine.init_state(Root, batches())
    for batch in engine.iter_batches(batches()):
        before = jax.tree.map(np.array, (state.module, state.opt_state))
        state, _ = engine.step(state, batch)
        if int(state.step) == BAD:
            assert_same_bits((state.module, state.opt_state), before)
    engine.check_finite(state)
    assert int(state.nonfinite.skipped) == 1 and int(state.step) == 6
    assert_same_bits(state.module, engine.fit(Root, batches()).module)


@pytest.mark.full
def test_a_skipped_step_does_not_fail_later_ones() -> None:
    state = fg.Engine(steps=6, on_nonfinite="skip").fit(Root, batches()).state
    engine = fg.Engine(steps=2)
    engine.check_finite(state)
    state = engine.fit(data=batches()[:2], state=state).state
    assert (int(state.step), int(state.nonfinite.skipped)) == (8, 1)
    with pytest.raises(NonFiniteError, match="step 9"):
        engine.fit(data=batches()[BAD - 1 :], state=state)


# --- ignore, and what is not finite from the beginning --------------------------------------------


def test_ignore_continues_training() -> None:
    result = fg.Engine(steps=6, on_nonfinite="ignore").fit(Root, batches())
    assert int(result.state.step) == 6 and np.isnan(result.module.shift)


@pytest.mark.full
def test_parameters_not_finite_from_the_beginning_are_ignored() -> None:
    class WithMask(Counting):
        mask: jax.Array

        def __init__(self, *, key: Any = None) -> None:
            super().__init__()
            self.mask = jnp.asarray([[0.0, -jnp.inf], [0.0, 0.0]])

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            mask = jax.lax.stop_gradient(self.mask)
            return fg.Output(self.weight + 0 * jax.nn.softmax(batch + mask, axis=-1).sum())

    result = fg.Engine(steps=3).fit(WithMask, numbers([0, 0]))
    assert float(result.module.weight) == -3 and np.isneginf(result.module.mask[0, 1])


def test_a_state_that_another_engine_made_is_checked_as_well() -> None:
    state = fg.Engine(steps=1, on_nonfinite="ignore").init_state(Counting(), numbers([0]))
    broken = state.replace(nonfinite=dataclasses.replace(state.nonfinite, step=jnp.int32(3)))
    fg.Engine(steps=1).check_finite(state)
    with pytest.raises(NonFiniteError, match="step 3"):
        fg.Engine(steps=1).check_finite(broken)
