"""What is compiled, when, how often, and what is found out before."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CompilationError, DataError, ModelError
from jax.core import Tracer
from models import (
    Act,
    Classifier,
    Counting,
    Evaluating,
    Events,
    assert_same_bits,
    classes,
    numbers,
    trained,
)


class Everything:
    """Nearly every hook that takes part in a step or runs between steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls: list[str] = []

    @fg.hookimpl
    def gradient_transform(self) -> optax.GradientTransformation:
        return optax.clip_by_global_norm(1.0)

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> Any:
        return {"largest": jnp.zeros(()), "looks": jnp.int32(0)}

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        return {**batch, "x": 2 * batch["x"]}

    @fg.hookimpl
    def loss_terms(self, module: Any) -> Any:
        return {"l2": 1e-3 * jnp.sum(module.mlp.layers[0].weight ** 2)}

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        weight = module.mlp.layers[0].weight
        due = ctx.is_due("everything.look")
        largest = jax.lax.cond(due, lambda: jnp.abs(weight).max(), lambda: plugin_state["largest"])
        module = eqx.tree_at(
            lambda module: module.mlp.layers[0].weight, module, jnp.clip(weight, -0.8, 0.8)
        )
        return module, {"largest": largest, "looks": plugin_state["looks"] + due}

    @fg.hookimpl
    def step_metrics(self, grads: Any, updates: Any, ctx: fg.Context) -> Any:
        norm = jax.lax.cond(
            ctx.is_due("log"), lambda: optax.tree.norm(updates), lambda: jnp.zeros(())
        )
        return {
            "gradient": optax.tree.norm(grads),
            "update": fg.metrics.LastValue.from_values(norm),
        }

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        def note(what: str) -> Any:
            return lambda run: self.calls.append(what)

        return [
            fg.ScheduledAction("decide", self.every + 1, note("decide"), "decide"),
            fg.ScheduledAction("look", fg.Every(self.every) | fg.FirstSteps(2), note("look")),
            fg.ScheduledAction("save", self.every + 2, lambda run: run.save(), "save"),
        ]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        self.calls.append(f"save {int(run.state.step)}")

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        self.calls.append("log")


class Layer(fg.Module):
    """A single layer."""

    layer: Any

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((jax.vmap(self.layer)(batch) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "shape", "small"),
    [
        (lambda key: eqx.nn.Linear(3, 2, key=key), (3,), True),
        (lambda key: eqx.nn.Linear(1024, 512, key=key), (1024,), False),
        (lambda key: eqx.nn.Conv1d(1, 1, 2, key=key), (1, 2), False),
    ],
    ids=["small", "a large state", "a convolution"],
)
def test_small_steps_alone_get_the_memory_optimized_schedule(
    layer: Any, shape: tuple[int, ...], small: bool
) -> None:
    options: list[bool] = []

    class Look:
        @fg.hookimpl
        def on_compile(self, name: str, compiled: jax.stages.Compiled) -> None:
            if name == "step":
                executable: Any = compiled.runtime_executable()
                options.append(b"xla_cpu_scheduler_type" in executable.serialize())

    model = Layer(layer(jax.random.key(0)))
    fg.Engine(steps=1, plugins=[Look()], autoload=False).fit(
        model, [np.ones((4, *shape), np.float32)]
    )
    assert options == [small]


@pytest.mark.parametrize(
    "steps_per_execution",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.full)],
)
def test_one_executable_whatever_is_due_and_the_same_bits_for_three_cadences(
    steps_per_execution: int,
) -> None:
    results = []
    for every, log in ((2, 3), (5, 1), (3, 12)):
        events, everything = Events(), Everything(every)
        evaluating = Evaluating(fg.Evaluation("test", classes(20, 8)), trigger=every)
        engine = fg.Engine(
            steps=13,
            steps_per_execution=steps_per_execution,
            log_every=log,
            plugins=[events, everything, evaluating],
        )
        results.append(engine.fit(Classifier, classes(32, shuffle=True)))
        names = [name for name, _, _ in events.compiled]
        # Two shapes of the batches of the evaluation.
        assert sorted(names) == ["evaluate.test", "evaluate.test", "step"]
        assert {"decide", "look", "log", f"save {every + 2}", "save 13"} <= set(everything.calls)
        assert int(results[-1].state.plugin_states["everything"]["looks"]) == len(
            {1, 2, *range(every, 14, every)}
        )
    for result in results[1:]:
        assert_same_bits(trained(result.state), trained(results[0].state))
    assert results[0].metrics["test"] == results[2].metrics["test"]  # both of step 12


@pytest.mark.full
def test_one_executable_per_shape_and_none_compiled_again_by_another_fit() -> None:
    events = Events()
    engine = fg.Engine(steps=4, plugins=[events])
    state = engine.fit(Classifier, classes(20, 8)).state
    assert [spec["x"].shape for _, spec, _ in events.compiled] == [(8, 4), (4, 4)]
    engine.fit(data=classes(20, 8), state=state)
    engine.fit(Classifier, classes(20, 8))
    engine.fit(Classifier(key=jax.random.key(1)), classes(20, 8))
    assert len(events.compiled) == 2
    padded = Events()
    fg.Engine(steps=4, plugins=[padded]).fit(Classifier, classes(20, 8, remainder="pad"))
    assert [(spec.value["x"].shape, spec.mask.shape) for _, spec, _ in padded.compiled] == [
        ((8, 4), (8,))
    ]


class WithFunction(Counting):
    """A model that makes a function of its own, which is equal to no other."""

    function: Any

    def __init__(self, *, key: Any = None) -> None:
        super().__init__()
        self.function = lambda x: 2 * x

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + self.function(batch).sum())


@pytest.mark.parametrize("model", [Counting, WithFunction], ids=["arrays", "function"])
def test_continued_fit_compiles_nothing(model: Any) -> None:
    events = Events()
    engine = fg.Engine(steps=2, plugins=[events])
    first = engine.fit(model, numbers([0]))
    second = engine.fit(data=numbers([0]), state=first.state)
    engine.step(second.state, numbers([0])[0])
    assert len(events.compiled) == 1


@pytest.mark.parametrize(
    "steps_per_execution",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.full)],
)
def test_no_tracer_outlives_its_trace(steps_per_execution: int) -> None:
    """One would keep the whole trace alive."""

    def tracers() -> set[int]:
        gc.collect()
        return {id(item) for item in gc.get_objects() if issubclass(type(item), Tracer)}

    before, engine = (
        tracers(),
        fg.Engine(steps=2, steps_per_execution=steps_per_execution, log_every=1),
    )
    result = engine.fit(Counting, numbers([0]))
    engine.evaluate(result, numbers([0]))
    engine.predict(result, numbers([0]))
    assert not tracers() - before


def test_splitting_a_dispatch_compiles_nothing() -> None:
    events = Events()
    actions = [
        Act(fg.At(1, 3, 6), lambda run: None),
        Act(fg.EveryEpoch(), lambda run: None, instance="epoch"),
    ]
    fg.Engine(steps=11, steps_per_execution=4, log_every=5, plugins=[events, *actions]).fit(
        Counting, numbers([0], [0], [0])
    )
    assert len(events.compiled) == 1


@pytest.mark.full
def test_on_compile_gets_cost_memory_and_the_batch() -> None:
    events, observed = Events(), []

    class Looking:
        @fg.hookimpl
        def on_compile(self, run: fg.Run | None, name: str, batch_spec: Any, compiled: Any) -> None:
            observed.append((run is None, name, compiled.cost_analysis()["flops"] > 0))
            assert compiled.memory_analysis().argument_size_in_bytes > 0
            assert batch_spec["x"].shape == (16, 4) and batch_spec["label"].dtype == np.int32

    engine = fg.Engine(steps=1, plugins=[Looking(), events])
    wide = [
        {name: array.astype(f"{array.dtype.kind}8") for name, array in batch.items()}
        for batch in classes(16)
    ]
    engine.fit(Classifier, wide)
    assert observed == [(False, "step", True)]
    state = engine.init_state(Classifier, wide)
    engine.step(state, wide[0])
    assert observed == [(False, "step", True)]  # `step` and `fit` run the same program


@pytest.mark.full
def test_the_fourth_shape_is_one_too_many() -> None:
    events, shapes = Events(), numbers([0], [0, 0], [0, 0, 0], [0], [0] * 4)
    with pytest.raises(CompilationError) as caught:
        fg.Engine(steps=5, max_compilations=3, plugins=[events]).fit(Counting, shapes)
    text = str(caught.value)
    assert len(events.compiled) == 3
    assert "the batch for step 5, float32[4]" in text and "max_compilations is 3" in text
    assert (
        all(f"  float32[{n}]\n" in text for n in (1, 2, 3))
        and "Pad" in text
        and "remainder='pad'" in text
    )


def test_fits_and_steps_follow_the_settings_around_them() -> None:
    class Promoting(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * jnp.mean(batch * jnp.arange(2)))

    engine = fg.Engine(steps=1, autoload=False)
    data = [np.ones(2, np.float32)]
    state = engine.fit(Promoting, data).state
    state, _ = engine.step(state, data[0])
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
            engine.step(state, data[0])
        with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
            engine.fit(Promoting, data)
    engine.fit(Promoting, data)


def test_a_shape_that_is_compiled_again_counts_once() -> None:
    """JAX compiles another program where it looks for NaN."""
    engine = fg.Engine(steps=1, max_compilations=1, autoload=False)
    state = engine.fit(Counting, numbers([0])).state
    with jax.debug_nans(True):
        state, _ = engine.step(state, numbers([0])[0])
    with pytest.raises(CompilationError, match=r"float32\[2\], would be shape number 2"):
        engine.step(state, numbers([0, 0])[0])


@pytest.mark.full
def test_three_shapes_are_allowed_however_often() -> None:
    events = Events()
    result = fg.Engine(steps=9, max_compilations=3, plugins=[events]).fit(
        Counting, numbers([0], [0, 0], [0, 0, 0])
    )
    assert len(events.compiled) == 3 and float(result.module.weight) == -9


def test_the_cap_on_compilations_holds_in_a_loop_of_steps() -> None:
    engine = fg.Engine(steps=3, max_compilations=1)
    state = engine.init_state(Counting, numbers([0]))
    state, _ = engine.step(state, numbers([0])[0])
    with pytest.raises(
        CompilationError, match=r"for step 2, float32\[2\], would be shape number 2"
    ):
        engine.step(state, numbers([0, 0])[0])


def test_mistakes_are_errors_before_anything_is_compiled() -> None:
    def of(step: Any) -> Any:
        return type("Broken", (Counting,), {"training_step": step})

    class Clash:
        instance = "again"

        @fg.hookimpl
        def after_update(self, module: Any, plugin_state: Any) -> Any:
            return module, plugin_state["missing"]

        @fg.hookimpl
        def init_plugin_state(self) -> Any:
            return {"here": jnp.zeros(())}

    cases: list[tuple[Any, list[Any], type[Exception]]] = [
        (of(lambda self, batch, ctx: fg.Output(batch @ jnp.ones(5))), [], TypeError),
        (of(lambda self, batch, ctx: fg.Output()), [], ModelError),
        (of(lambda self, batch, ctx: fg.Output(self.weight, metrics={"m": batch})), [], ModelError),
        (Counting, [Clash()], KeyError),
    ]
    for model, plugins, kind in cases:
        events = Events()
        engine = fg.Engine(steps=1, plugins=[events, *plugins])
        with jax.log_compiles(False), counted() as compilations, pytest.raises(kind):
            engine.fit(model, numbers([0, 0]))
        assert not events.compiled and not compilations


class counted:
    """Counts what XLA compiles while it is entered."""

    def __enter__(self) -> list[str]:
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self.note)
        return self.events

    def note(self, event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            self.events.append(event)

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self.note)


def test_compilation_counter_counts() -> None:
    with counted() as compilations:
        jax.jit(lambda x: x * 3.14159 + len(compilations))(jnp.ones(7))
    assert compilations


def test_nothing_is_compiled_after_the_first_dispatches() -> None:
    snapshots: list[list[str]] = []
    with counted() as compilations:
        plugins = [
            Evaluating(fg.Evaluation("test", classes(20, 8)), trigger=2),
            Act(fg.Every(2), lambda run: snapshots.append(list(compilations))),
        ]
        fg.Engine(steps=10, log_every=2, plugins=plugins).fit(Classifier, classes(64))
    assert snapshots[0] and snapshots[1] == snapshots[-1]


@pytest.mark.full
def test_metrics_are_compiled_into_the_step_alone() -> None:
    """What closed a window, and what took the numbers apart at the end, were programs of their own
    that grew with the number of metrics, and no timing knew of them."""

    def fit(num_metrics: int) -> list[str]:
        class Many(Classifier):
            def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
                output = super().training_step(batch, ctx)
                assert output.loss is not None
                metrics = {f"scaled{index}": index * output.loss for index in range(num_metrics)}
                return output.replace(metrics=metrics)

        with counted() as compilations:
            result = fg.Engine(steps=6, log_every=2).fit(Many, classes(64))
        assert result.history[f"train/scaled{num_metrics - 1}"].shape == (3,)
        return compilations

    fit(39)  # compiles the small operations that make a state
    # The step, and what sets the flag of a closed window among the packed numbers.
    assert len(fit(40)) == 2


def test_another_engine_of_the_same_program_compiles_nothing() -> None:
    """A sweep makes many."""
    first, second = (fg.Engine(steps=4, log_every=2, seed=seed) for seed in (0, 1))
    first.fit(Classifier, classes(64))
    with counted() as compilations:
        second.fit(Classifier, classes(64))
    assert not compilations


@pytest.mark.full
def test_an_engine_whose_program_differs_in_one_number_compiles_its_own() -> None:
    def train(factor: float) -> float:
        class Scaled(Counting):
            def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
                return fg.Output(factor * self.weight)

        return float(fg.Engine(steps=1).fit(Scaled, numbers([0])).module.weight)

    assert [train(1.0), train(2.0), train(1.0)] == [-1.0, -2.0, -1.0]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_engines_that_use_different_arrays_of_a_batch_are_not_confused(names: str) -> None:
    """A program has no argument for what it does not use. A convolution is not put into a loop,
    where all arrays of a batch are arguments."""

    class Convolved(fg.Module):
        conv: eqx.nn.Conv1d
        name: str = eqx.field(static=True)

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jax.vmap(self.conv)(batch[self.name]).mean())

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(1.0)

    zeros = np.zeros((4, 1, 5), np.float32)
    data = fg.ArrayData({"a": zeros, "b": zeros + 1}, 4)
    conv = eqx.nn.Conv1d(1, 1, 5, use_bias=False, key=jax.random.key(0))
    weights = {
        name: fg.Engine(steps=1).fit(Convolved(conv, name), data).module.conv.weight
        for name in names
    }
    assert np.array_equal(weights["a"], conv.weight)
    np.testing.assert_allclose(weights["b"], conv.weight - 1, atol=1e-6)


def test_host_callbacks_of_two_engines_are_not_confused() -> None:
    """A program that calls the host has the same text whatever it calls."""
    called: list[str] = []

    def make_class(name: str) -> type[fg.Module]:
        class Calling(Counting):
            def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
                jax.debug.callback(lambda: called.append(name))
                return super().training_step(batch, ctx)

        return Calling

    for name in ("first", "second"):
        fg.Engine(steps=1).fit(make_class(name), numbers([0]))
        jax.effects_barrier()
    assert called == ["first", "second"]


@pytest.mark.full
def test_compiled_initializer_is_reused_unless_the_class_changed() -> None:
    scale = 1.0

    class Scaled(Classifier):
        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.mlp = jax.tree.map(
                lambda leaf: scale * leaf if eqx.is_array(leaf) else leaf, self.mlp
            )

    engine, data = fg.Engine(steps=1), classes()
    first = engine.fit(Scaled, data).metrics
    with counted() as compilations:
        assert engine.fit(Scaled, data).metrics == first
    assert not compilations
    scale = 2.0
    assert engine.fit(Scaled, data).metrics == fg.Engine(steps=1).fit(Scaled, data).metrics != first


@pytest.mark.full
def test_programs_of_dropped_models_are_garbage_collected() -> None:
    """A model with a function that is written in a loop is another kind each time, as are other
    shapes of batches."""
    engine, references = fg.Engine(steps=1), list[weakref.ref[Any]]()

    class Counted(Counting):
        def configure_optimizers(self) -> optax.GradientTransformation:
            def update(updates: Any, state: Any, params: Any = None) -> Any:
                return updates, state

            references.append(weakref.ref(update))
            return optax.GradientTransformation(lambda params: (), update)

    for size in range(1, 21):
        jax.eval_shape(lambda size=size: engine.init_state(Counted, [np.zeros(size, np.float32)]))
    gc.collect()
    assert len(references) == 20 and sum(reference() is not None for reference in references) <= 16


@pytest.mark.full
def test_changed_structure_of_the_batch_is_an_error_naming_the_step() -> None:
    x = np.zeros((2, 4), np.float32)
    labelled = {"x": x, "label": np.zeros(2, np.int32)}
    with pytest.raises(DataError, match="the batch for step 3 has another structure") as caught:
        fg.Engine(steps=4).fit(Classifier, [labelled, labelled, {"x": x}])
    assert "x float32[2,4], not label int32[2], x float32[2,4]" in str(caught.value)
    engine = fg.Engine(steps=2)
    state, _ = engine.step(engine.init_state(Classifier, [labelled]), labelled)
    with pytest.raises(DataError, match="the batch for step 2 has another structure"):
        engine.step(state, {**labelled, "more": x})


@pytest.mark.full
def test_changed_structure_among_fused_steps_is_an_error_naming_the_step() -> None:
    x = np.zeros((2, 4), np.float32)
    labelled = {"x": x, "label": np.zeros(2, np.int32)}
    for changed in ({"x": x}, {"first": labelled["label"], "second": x}):
        with pytest.raises(DataError, match="the batch for step 3 has another structure"):
            fg.Engine(steps=4, steps_per_execution=4).fit(Classifier, [labelled, labelled, changed])


@pytest.mark.full
def test_changed_dtype_counts_as_another_shape() -> None:
    events = Events()
    with pytest.warns(UserWarning, match="step 2 has another dtype .*: it is int32, not float32"):
        result = fg.Engine(steps=2, plugins=[events]).fit(
            Counting, [np.zeros(2, np.float32), np.zeros(2, np.int32)]
        )
    assert len(events.compiled) == 2 and float(result.module.weight) == -2


CACHED = """
import sys
import equinox as eqx, fulgurite as fg, jax, numpy as np, optax

class Model(fg.Module):
    net: eqx.nn.Linear
    def __init__(self, *, key):
        self.net = eqx.nn.Linear(3, 1, key=key)
    def training_step(self, batch, ctx):
        return fg.Output(jax.vmap(self.net)(batch).mean())
    def configure_optimizers(self):
        return optax.sgd(0.1)

jax.numpy.ones(3) + 1  # something that is compiled before
data = [np.ones((2, 3), np.float32)]
engine = fg.Engine(steps=1, compilation_cache_dir=sys.argv[1], autoload=False)
engine.evaluate(engine.fit(Model, data).module, data)
"""


@pytest.mark.slow
def test_a_directory_keeps_steps_evaluations_and_what_makes_the_model(tmp_path: Any) -> None:
    """The second process compiles nothing that is not there."""
    sizes = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", CACHED, str(tmp_path)], check=True)
        names = {file.name for file in tmp_path.glob("*-cache")}
        sizes.append(len(names))
        programs = {name.split("-")[0] for name in names}
        # The step, the evaluation, and an operation that makes the model.
        assert {"jit__run", "jit__call_flat", "jit__uniform"} <= programs, programs
    assert sizes[0] == sizes[1]
