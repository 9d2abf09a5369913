"""The train state: whose arrays are in it, which models it can hold, and what a consumed or foreign
one is told."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError, StateError
from fulgurite.plugins import hash_tree
from models import (
    Act,
    Classifier,
    Counting,
    Events,
    Linear,
    assert_close,
    assert_same_bits,
    classes,
    init_module,
    numbers,
    regression,
    trained,
)

# --- whose arrays they are ------------------------------------------------------------------------


def test_a_state_that_is_read_many_times_is_that_of_its_step_each_time() -> None:
    states: list[tuple[int, float, int]] = []

    def note(run: fg.Run) -> None:
        state = run.state
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        states.append((int(state.step), float(state.module.weight), int(state.metric_window.count)))

    engine = fg.Engine(steps=40, log_every=10, plugins=[Act(1, note)], autoload=False)
    engine.fit(Counting, numbers([1.0]))

    assert states == [(step, -step, (step - 1) % 10 + 1) for step in range(1, 41)]


def test_the_module_passed_to_fit_stays_usable() -> None:
    model = Classifier(key=jax.random.key(0))
    before = jax.tree.map(np.array, eqx.filter(model, eqx.is_array))
    x = jnp.ones((8, 4))
    data = [{"x": x, "label": np.zeros(8, np.int32)}]
    result = fg.Engine(steps=3).fit(model, data)
    assert_same_bits(eqx.filter(model, eqx.is_array), before)
    assert jax.vmap(model.mlp)(x).shape == (8, 3)
    assert not np.array_equal(result.module.mlp.layers[0].weight, model.mlp.layers[0].weight)
    assert_same_bits(fg.Engine(steps=3).fit(model, data).module, result.module)


def test_the_module_of_a_result_stays_usable_as_a_model() -> None:
    engine, data = fg.Engine(steps=2), regression()
    first = engine.fit(Linear, data)
    engine.fit(first.module, data)
    assert np.isfinite(first.module.weight).all()


class Twice(Linear):
    """The same layer at two places."""

    first: eqx.nn.Linear
    second: Any

    def __init__(self, *, key: Any) -> None:
        super().__init__()
        self.first = eqx.nn.Linear(3, 3, key=key)
        self.second = [self.first]


@pytest.mark.parametrize(
    "model", [Twice, lambda: Twice(key=jax.random.key(0))], ids=["callable", "module"]
)
def test_one_array_at_two_paths_is_an_error(model: Any) -> None:
    with pytest.raises(ModelError, match=r"eqx\.nn\.Shared") as caught:
        fg.Engine(steps=1).fit(model if isinstance(model, type) else model(), regression())
    assert "first.weight and second[0].weight of Twice are the same array" in str(caught.value)


def test_one_numpy_array_at_two_paths_is_an_error() -> None:
    class Pair(Linear):
        scales: Any

        def __init__(self) -> None:
            super().__init__()
            self.scales = [np.ones(3)] * 2

    with pytest.raises(ModelError, match=r"scales\[0\] and scales\[1\]"):
        fg.Engine(steps=1).fit(Pair(), regression())


class Tied(fg.Module):
    """An autoencoder whose second layer is the first one's transpose."""

    layers: eqx.nn.Shared

    def __init__(self, *, key: Any) -> None:
        pair = (jnp.eye(2, 3) * 0.5, jnp.zeros((3, 2)))
        self.layers = eqx.nn.Shared(pair, where=lambda pair: pair[1], get=lambda pair: pair[0].T)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        encoder, decoder = self.layers()
        return fg.Output(jnp.mean((batch @ encoder.T @ decoder.T - batch) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def test_tied_weights_are_one_parameter() -> None:
    batch = np.asarray([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]], np.float32)
    result = fg.Engine(steps=5).fit(Tied, [batch])
    weight = jnp.eye(2, 3) * 0.5
    for _ in range(5):
        weight -= 0.1 * jax.grad(lambda weight: jnp.mean((batch @ weight.T @ weight - batch) ** 2))(
            weight
        )
    assert_close(result.module.layers()[0], weight)
    assert_close(result.module.layers()[1], weight.T)


def test_using_a_consumed_state_is_an_error() -> None:
    engine, data = fg.Engine(steps=1), regression()
    batch = next(iter(data))
    state = engine.init_state(Linear, data)
    new_state, _ = engine.step(state, batch)
    for use in (
        lambda: engine.step(state, batch),
        lambda: engine.fit(data=data, state=state),
        lambda: fg.Engine(steps=1).step(state, batch),
        lambda: fg.Engine(steps=1).fit(data=data, state=state),
    ):
        with pytest.raises(StateError, match=r"was consumed: its .*weight belongs to a later step"):
            use()
    result = engine.fit(data=data, state=new_state)
    assert int(result.state.step) == 2
    with pytest.raises(StateError, match="was consumed"):
        engine.step(new_state, batch)


class Copying:
    """Keeps the weights after each update in its slice, and gives them as a view."""

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> Any:
        return module

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        return module, jax.tree.map(lambda old, new: new + 0 * old, plugin_state, module)

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> Any:
        return {"copy": state.plugin_states["copying"]}


class Many(Counting):
    """Counts in that many vectors."""

    many: list[jax.Array]

    def __init__(self, size: int, *, key: Any = None) -> None:
        super().__init__()
        self.many = [jnp.zeros(3) for _ in range(size)]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + sum(array.sum() for array in self.many))


def view_in_place(engine: fg.Engine, state: fg.TrainState) -> fg.TrainState:
    return state.replace(module=engine.get_module_view(state, "copy"))


def on_host(engine: fg.Engine, state: fg.TrainState) -> fg.TrainState:
    module = jax.device_get(state.module)
    return state.replace(module=module, plugin_states={"copying": module})


@pytest.mark.parametrize(
    ("change", "size"),
    [(view_in_place, 2), (on_host, 2), pytest.param(on_host, 120, marks=pytest.mark.full)],
)
def test_a_state_may_hold_an_array_twice_and_arrays_of_the_host(change: Any, size: int) -> None:
    """In `ReplaceState`, `fit` and `step`; 120 vectors travel end to end."""
    replace = Act(fg.At(2), lambda run: fg.ReplaceState(change(run.engine, run.state)))
    engine, data = fg.Engine(steps=3, plugins=[Copying(), replace], autoload=False), numbers([0])
    state = engine.fit(lambda key: Many(size, key=key), data).state
    state = engine.fit(data=data, state=change(engine, state)).state
    for _ in range(2):
        state, _ = engine.step(change(engine, state), data[0])
    for module in (state.module, state.plugin_states["copying"]):
        assert float(module.weight) == -8 and all((array == -8).all() for array in module.many)


def test_using_a_consumed_model_is_an_error() -> None:
    engine, data = fg.Engine(steps=1), regression()
    result = engine.fit(Linear, data)
    engine.fit(data=data, state=result.state)
    for use in (engine.evaluate, engine.predict):
        with pytest.raises(StateError, match="consumed"):
            use(result, data)
    with pytest.raises(StateError, match="consumed"):
        engine.fit(result.module, data)


def test_a_state_of_another_engine_or_model_is_an_error_naming_the_path() -> None:
    class Slice:
        @fg.hookimpl
        def init_plugin_state(self) -> Any:
            return {"total": jnp.zeros(())}

    data = regression()
    with pytest.raises(StateError, match=r"plugin_states\.slice\.total"):
        fg.Engine(steps=1, plugins=[Slice()]).fit(
            data=data, state=fg.Engine(steps=1).init_state(Linear, data)
        )
    with pytest.raises(StateError, match="must be a TrainState"):
        fg.Engine(steps=1).fit(data=data, state=Linear())  # type: ignore[arg-type]
    state = fg.Engine(steps=1).init_state(Classifier, classes())
    bias = jnp.zeros(3, jnp.float16)
    state = state.replace(
        module=eqx.tree_at(lambda module: module.mlp.layers[1].bias, state.module, bias)
    )
    with pytest.raises(
        StateError, match=r"changed opt_state.*layers\[1\]\.bias from float16\[3\] to float32\[3\]"
    ):
        fg.Engine(steps=1).fit(data=classes(), state=state)


class Factored(Counting):
    """Has a number that is not an array."""

    factor: float

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * self.factor)


@pytest.mark.full
@pytest.mark.parametrize("through", ["step", "fit"])
def test_models_with_different_static_leaves_have_separate_programs(through: str) -> None:
    engine = fg.Engine(steps=2)
    for factor in (1.0, 3.0, 1.0):
        if through == "fit":
            state = engine.fit(Factored(factor), numbers([0])).state
        else:
            state = engine.init_state(Factored(factor), numbers([0]))
            for batch in engine.iter_batches(numbers([0])):
                state, _ = engine.step(state, batch)
        assert float(state.module.weight) == -2 * factor


@pytest.mark.parametrize("through", ["step", "fit"])
def test_two_models_of_one_class_have_separate_programs(through: str) -> None:
    class Sized(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(self.weight))

    engine = fg.Engine(steps=2)
    for shape, dtype in (
        ((2,), jnp.float32),
        ((5,), jnp.float32),
        ((5,), jnp.float16),
        ((2,), jnp.float32),
    ):
        model = eqx.tree_at(
            lambda module: module.weight, init_module(Sized), jnp.zeros(shape, dtype)
        )
        if through == "fit":
            state = engine.fit(model, numbers([0])).state
        else:
            state = engine.init_state(model, numbers([0]))
            for batch in engine.iter_batches(numbers([0])):
                state, _ = engine.step(state, batch)
        assert_same_bits(state.module.weight, jnp.full(shape, -2, dtype))


# --- models that carry a state --------------------------------------------------------------------


class Normalized(fg.Module):
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.head = eqx.nn.Linear(3, "scalar", key=key)

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(x, state)
        return self.head(x), state

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        forward = jax.vmap(self, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        preds, state = forward(batch["x"], ctx.model_state)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), preds=preds, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def normalized(key: Any) -> Any:
    return eqx.nn.make_with_state(Normalized)(key=key)


def test_batch_norm_is_carried_and_evaluated_in_inference_mode() -> None:
    model, state = normalized(jax.random.key(1))
    data = regression(16, 8)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            net = eqx.combine(params, static)
            forward = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
            preds, new = forward(batch["x"], state)
            return jnp.mean((preds - batch["y"]) ** 2), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new

    expected, expected_state = params, state
    for batch in [*data, *data, *data]:
        expected, expected_state = update(expected, expected_state, batch)
    engine = fg.Engine(steps=6)
    result = engine.fit((model, state), data)
    assert_close(eqx.filter(result.module, eqx.is_array), expected)
    assert_close(result.model_state, expected_state)

    inference = eqx.nn.inference_mode(eqx.combine(expected, static))
    x = data.arrays["x"]
    preds, _ = jax.vmap(inference, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
        x, expected_state
    )
    for weights in (result, result.state, (result.module, result.model_state)):
        np.testing.assert_allclose(engine.predict(weights, data), preds, rtol=1e-5, atol=1e-5)
    error = np.mean((np.asarray(preds) - data.arrays["y"]) ** 2)
    assert engine.evaluate(result, data)["loss"] == pytest.approx(error, rel=1e-5)


def test_a_step_that_drops_the_model_state_is_an_error() -> None:
    class Forgetful(Normalized):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(model_state=None)

    class Frozen(Forgetful):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(model_state=ctx.model_state)

    engine, data = fg.Engine(steps=1), regression(16, 8)
    with pytest.warns(
        UserWarning, match=r"Forgetful.training_step returned no model_state.*model_state=state"
    ):
        engine.fit(eqx.nn.make_with_state(Forgetful), data)
    engine.fit(eqx.nn.make_with_state(Frozen), data)


@pytest.mark.full
def test_a_callable_may_give_a_module_and_its_state() -> None:
    data = regression(16, 8)
    result = fg.Engine(steps=2).fit(eqx.nn.make_with_state(Normalized), data)
    fused = fg.Engine(steps=2, steps_per_execution=2).fit(eqx.nn.make_with_state(Normalized), data)
    assert_close(trained(result.state), trained(fused.state))
    engine = fg.Engine(steps=2)
    state = engine.init_state(eqx.nn.make_with_state(Normalized), data)
    for batch in engine.iter_batches(data):
        state, _ = engine.step(state, batch)
    assert_same_bits(trained(result.state), trained(state))


def test_a_model_with_a_state_stays_usable() -> None:
    model, state = normalized(jax.random.key(1))
    fg.Engine(steps=1).fit((model, state), regression(16, 8))
    assert all(
        not leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter((model, state), eqx.is_array))
    )


def test_a_task_carries_batch_norm() -> None:
    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self) -> None:
            self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema", momentum=0.5)

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(x, state)

    net, state = eqx.nn.make_with_state(Net)()
    task = fg.Task(net, loss=lambda preds, batch: preds.sum(-1), optimizer=optax.sgd(0.0))
    batch = np.asarray([[2.0, 4.0, 6.0], [4.0, 4.0, 4.0]], np.float32)
    result = fg.Engine(steps=1).fit((task, state), [(batch,)])
    mean, _ = result.model_state.get(result.module.model.norm.ema_state_index)  # type: ignore[union-attr]
    np.testing.assert_allclose(
        mean, batch.mean(0)
    )  # the first batch's, with the zero of the beginning corrected for


# --- what may be in a model -----------------------------------------------------------------------


class Mixed(fg.Module):
    """One of everything."""

    weight: jax.Array
    name: str = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    nothing: None
    activation: Callable[..., Any]
    factor: float
    switch: bool
    words: list[str]
    key: Any
    old_key: jax.Array
    count: jax.Array
    flags: jax.Array
    empty: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.ones(3)
        self.name, self.sizes, self.nothing = "mixed", (3, 4), None
        self.activation, self.factor, self.switch, self.words = jax.nn.tanh, 0.5, True, ["a", "b"]
        self.key, self.old_key = jax.random.split(jax.random.key(7), 2), jax.random.PRNGKey(3)
        self.count, self.flags = jnp.asarray([1, 2], jnp.int8), jnp.asarray([True, False])
        self.empty = jnp.zeros((0, 3))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = jax.random.normal(self.key[0], (3,))
        return fg.Output(jnp.mean(self.activation(batch * self.weight) * self.factor + 0 * noise))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(0.1, weight_decay=0.1)


@pytest.mark.parametrize("model", [Mixed, Mixed()], ids=["callable", "module"])
def test_every_kind_of_leaf_survives_training(model: Any) -> None:
    batch = np.ones((2, 3), np.float32)
    result = fg.Engine(steps=3, on_nonfinite="skip").fit(model, [batch])
    module = result.module
    model = Mixed()
    assert not np.array_equal(module.weight, model.weight)
    assert (module.name, module.sizes, module.nothing) == ("mixed", (3, 4), None)
    assert (module.activation, module.factor, module.switch, module.words) == (
        jax.nn.tanh,
        0.5,
        True,
        ["a", "b"],
    )
    assert_same_bits(
        [module.key, module.old_key, module.count, module.flags, module.empty],
        [model.key, model.old_key, model.count, model.flags, model.empty],
    )
    assert jnp.issubdtype(module.key.dtype, jax.dtypes.prng_key)
    again = fg.Engine(steps=1).fit(data=[batch], state=result.state)
    assert int(again.state.step) == 4


@pytest.mark.full
def test_keys_of_another_implementation_keep_it() -> None:
    class Keyed(Counting):
        key: Any

        def __init__(self, *, key: Any = None) -> None:
            super().__init__()
            self.key = jax.random.key(1, impl="rbg")

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return (
                super()
                .training_step(batch, ctx)
                .replace(metrics={"draw": jax.random.normal(self.key, ())})
            )

    result = fg.Engine(steps=2).fit(Keyed, numbers([0]))
    assert str(jax.random.key_impl(result.module.key)) == "rbg"
    assert result.metrics["train"]["draw"] == pytest.approx(
        float(jax.random.normal(jax.random.key(1, impl="rbg"), ()))
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_parameters_keep_their_dtype(dtype: Any) -> None:
    class Half(Linear):
        scale: jax.Array

        def __init__(self, *, key: Any = None) -> None:
            self.weight, self.scale = jnp.ones(3, dtype), jnp.ones((), dtype)

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = self.scale * (batch["x"].astype(dtype) @ self.weight)
            return fg.Output(jnp.mean((preds.astype(jnp.float32) - batch["y"]) ** 2))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1e-2)

    result = fg.Engine(steps=3).fit(Half, regression())
    assert result.module.weight.dtype == result.module.scale.dtype == dtype
    assert not np.array_equal(result.module.weight, jnp.ones(3, dtype)) and result.module.scale != 1
    assert np.isfinite(result.metrics["train"]["loss"])


@pytest.mark.full
def test_numpy_leaves_become_parameters() -> None:
    class FromNumpy(Linear):
        offset: Any

        def __init__(self, *, key: Any = None) -> None:
            self.weight, self.offset = np.zeros(3, np.float32), np.float32(0)  # type: ignore[assignment]

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean((batch["x"] @ self.weight + self.offset - batch["y"]) ** 2))

    for model in (FromNumpy, FromNumpy()):
        module = fg.Engine(steps=2).fit(model, regression()).module
        assert isinstance(module.weight, jax.Array) and isinstance(module.offset, jax.Array)
        assert module.weight.any() and module.offset != 0
    assert not model.weight.any()


@pytest.mark.full
def test_float64_leaves_and_data_become_float32() -> None:
    class Double(Linear):
        def __init__(self, *, key: Any = None) -> None:
            self.weight = np.zeros(3)  # type: ignore[assignment]

    arrays = {name: array.astype(np.float64) for name, array in regression().arrays.items()}
    doubled = fg.Engine(steps=3).fit(Double(), fg.ArrayData(arrays, 8))
    assert doubled.module.weight.dtype == jnp.float32
    assert_same_bits(
        doubled.module.weight, fg.Engine(steps=3).fit(Linear, regression()).module.weight
    )


@pytest.mark.full
def test_weakly_typed_leaves_become_strong_and_compile_once() -> None:
    class Weak(Counting):
        scale: jax.Array

        def __init__(self, *, key: Any = None) -> None:
            self.weight, self.scale = jnp.asarray(0.0), jnp.full((2, 2), 2.0)

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 1.0 + self.scale.sum() + batch.sum())

    assert Weak().weight.weak_type
    events = Events()
    engine = fg.Engine(steps=3, plugins=[events])
    for model in (Weak, Weak()):
        first = engine.fit(model, numbers([0]))
        assert not any(leaf.weak_type for leaf in (first.module.weight, first.module.scale))
        second = engine.fit(data=numbers([0]), state=first.state)
        assert float(second.module.weight) == -6
    assert len(events.compiled) == 1
    batches = [
        jnp.full((2,), 1.0),
        jnp.ones(2),
        np.ones(2, np.float32),
    ]  # the first is weakly typed
    assert float(engine.fit(Weak, batches).module.weight) == -3


# --- what leaves a step is what entered it --------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (jnp.zeros(4), r"weight from float32\[3\] to float32\[4\]"),
        (jnp.zeros(3, jnp.float16), r"weight from float32\[3\] to float16\[3\]"),
        (None, r"changed the structure of the state at .*weight"),
    ],
)
def test_a_step_that_changes_the_structure_of_the_state_is_an_error(
    weight: Any, message: str
) -> None:
    class Changing(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            state, output = super().train_step(state, batch, ctx, update_rule)
            return state.replace(
                module=eqx.tree_at(lambda module: module.weight, state.module, weight)
            ), output

    with pytest.raises(ModelError, match=message):
        Changing(steps=1).fit(Linear, regression())


def test_a_step_that_changes_a_static_leaf_is_an_error() -> None:
    class Changing(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            state, output = super().train_step(state, batch, ctx, update_rule)
            return state.replace(
                module=eqx.tree_at(lambda module: module.factor, state.module, 2.0)
            ), output

    with pytest.raises(ModelError, match=r"module\.factor from .*1\.0 to .*2\.0"):
        Changing(steps=1).fit(Factored(), numbers([0]))


def test_replacing_the_state_by_one_of_another_structure_is_an_error() -> None:
    def shrink(run: fg.Run) -> fg.ReplaceState:
        module = eqx.tree_at(lambda module: module.weight, run.state.module, jnp.zeros(2))
        return fg.ReplaceState(run.state.replace(module=module))

    with pytest.raises(
        ModelError, match=r"act\.act changed module\.weight from float32\[3\] to float32\[2\]"
    ):
        fg.Engine(steps=3, plugins=[Act(fg.At(2), shrink)]).fit(Linear, regression())


def test_a_metric_whose_shape_follows_the_batch() -> None:
    class Uneven(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return (
                super()
                .training_step(batch, ctx)
                .replace(metrics={"newest": fg.metrics.LastValue.from_values(batch)})
            )

    with pytest.raises(ModelError, match="newest"):
        fg.Engine(steps=2).fit(Uneven, numbers([0, 0], [0]))


def test_the_view_of_a_run_is_valid_during_the_call_only() -> None:
    runs: list[fg.Run] = []
    fg.Engine(steps=2, plugins=[Act(fg.Every(1), lambda run: runs.append(run))]).fit(
        Linear, regression()
    )
    with pytest.raises(StateError, match="only during the call"):
        _ = runs[0].state


def test_the_digest_depends_on_numbers_and_not_on_memory_layout() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert (
        hash_tree({"y": table[:, 1]})
        == hash_tree({"y": jnp.asarray(table[:, 1])})
        != hash_tree({"y": table[:, 2]})
    )
