"""What is to be seen on eight simulated devices only. The number of devices is fixed when JAX
begins, so this is a
program: it runs every function called `check_...` and prints as JSON how each failed, or null."""

import importlib.util
import io
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses as fl
import fulgurite_metrics as fm
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import ConfigurationError, DataError, PathError
from fulgurite.plugins import as_model_init
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_checkpoint import Checkpointer
from fulgurite_keys import L1, L2, KeyedTask, Losses, Metrics, Norm
from fulgurite_logging.media import Histogram
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    ReplicaError,
    ShardBySize,
    Sharding,
    TensorParallel,
    average_by_device,
    bytes_per_device,
    check_replicas,
    gather,
    parallel,
    visualize_sharding,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformer.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("transformer", EXAMPLE)
    assert spec and spec.loader
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


transformer = example()
Transformer = partial(transformer.Transformer, 128, 1, 4, 1e-3)
TEXT = fg.ArrayData(np.random.default_rng(0).integers(0, 256, (64, 17), np.uint8), 16, shuffle=True)


@dataclass(frozen=True, eq=False)
class Compilations:
    """Keeps what was compiled."""

    compilations: list[Any] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(self, compiled: Any) -> None:
        self.compilations.append(compiled)


class Net(fg.Module):
    """Two layers with dropout, and the batch norm between them; regression on `x` (batch, 16)."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.first, self.second = (
            eqx.nn.Linear(16, 64, key=keys[0]),
            eqx.nn.Linear(64, 8, key=keys[1]),
        )
        self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def apply(x: Any, key: Any, state: Any) -> Any:
            hidden, state = self.norm(self.first(x), state)
            return self.second(self.drop(jax.nn.relu(hidden), key=key)), state

        keys = ctx.keys("default", len(batch["x"]))
        axes = {"in_axes": (0, 0, None), "out_axes": (0, None), "axis_name": "batch"}
        preds, state = jax.vmap(apply, **axes)(batch["x"], keys, ctx.model_state)
        drawn = jax.vmap(lambda key: jax.random.bits(key, (64,)))(keys)
        # Sums modulo 2^32 that tell every example's place: the same bits only for the same draws in
        # the same order.
        places = jnp.arange(1, drawn.size + 1, dtype=jnp.uint32).reshape(drawn.shape)
        metrics = {
            "draws": fg.metrics.LastValue.from_values(jnp.sum(drawn * places) % 65521),
            "order": fg.metrics.LastValue.from_values(
                jnp.sum(batch["index"].astype(jnp.uint32) * places[:, 0]) % 65521
            ),
        }
        loss = jnp.mean((preds.sum(1) - batch["y"]) ** 2, where=ctx.mask)
        return fg.Output(loss, metrics=metrics, preds=preds, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def regression(examples: int = 96, batch_size: int = 32, **options: Any) -> fg.ArrayData:
    x = np.random.default_rng(0).normal(size=(examples, 16)).astype(np.float32)
    y = np.tanh(x).sum(1).astype(np.float32)
    arrays = {"x": x, "y": y, "index": np.arange(examples, dtype=np.int32)}
    return fg.ArrayData(arrays, batch_size, **options)


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **{"steps": 1, **settings})


def some(count: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))


@cache
def stepped(preset: Callable[[], Sharding]) -> tuple[Any, fg.TrainState, fg.TrainState, str, float]:
    """Under a preset the transformer's initial state, what became of it, the state after a step,
    HLO and loss."""
    compilations = Compilations()
    trained = engine(preset(), compilations)
    before = trained.init_state(Transformer, TEXT)
    after, output = trained.step(before, next(iter(TEXT)))
    (compiled,) = compilations.compilations
    assert output.loss is not None
    return trained, before, after, compiled.as_text(), float(output.loss)


def whole() -> Sharding:
    return Sharding(batch=())


def tensor() -> Sharding:
    return TensorParallel(transformer.RULES, size=4)


def both() -> Sharding:
    return FSDP(mesh={"data": -1, "model": 4}, rules=transformer.RULES)


def collectives(hlo: str) -> set[str]:
    return set(
        re.findall(
            r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
            hlo,
        )
    )


# --- presets
# --------------------------------------------------------------------------------------------------------


def check_data_parallel_adds_up_gradients_and_gathers_no_parameter() -> None:
    assert collectives(stepped(DataParallel)[3]) == {"all-reduce"}


def check_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    hlo = stepped(FSDP)[3]
    # On the CPU a reduce-scatter is an all-reduce of which each device takes its part.
    assert collectives(hlo) in (
        {"all-gather", "all-reduce"},
        {"all-gather", "all-reduce", "reduce-scatter"},
    )
    gathered = sorted(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", hlo))
    # Four weights of the block's attention and two of its hidden layer, the embedding and the head.
    assert gathered == sorted([*["128,128"] * 4, "512,128", "128,512", *["256,128"] * 2]), gathered


def check_fsdp_moves_no_activations() -> None:
    """Which the compiler does to a perceptron unless it is told where to gather."""
    compilations = Compilations()
    perceptron = fg.Task(
        eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(0)),
        loss=lambda preds, batch: ((preds - batch[1]) ** 2).sum(1),
        optimizer=optax.adam(1e-3),
    )
    trained = engine(FSDP(min_size=64), compilations)
    batch = np.ones((64, 64), np.float32), np.ones((64, 16), np.float32)
    trained.step(trained.init_state(perceptron, [batch]), batch)
    hlo = compilations.compilations[0].as_text()
    assert collectives(hlo) <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered = sorted(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", hlo))
    assert gathered == sorted(["128,64", "128", "128,128", "128", "16,128"]), gathered


def check_tensor_parallel_adds_up_activations_and_gathers_no_parameter() -> None:
    hlo = stepped(tensor)[3]
    assert "all-reduce" in collectives(hlo)
    assert not re.search(r"f32\[(128|512),(128|512)\]\S* all-gather", hlo)


def check_all_presets_compute_one_loss() -> None:
    losses = [stepped(preset)[4] for preset in (whole, DataParallel, FSDP, tensor, both)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def check_fsdp_leaves_each_device_an_eighth() -> None:
    sizes = [
        bytes_per_device((stepped(plugin_class)[2].module, stepped(plugin_class)[2].opt_state))
        for plugin_class in (DataParallel, FSDP)
    ]
    assert sizes[1] <= 0.15 * sizes[0], sizes
    assert bytes_per_device(stepped(both)[2].module) <= 0.2 * bytes_per_device(
        stepped(whole)[2].module
    )


def check_parameters_lie_as_the_rules_say_and_adam_follows() -> None:
    state = stepped(tensor)[2]
    adam = state.opt_state[1][0]
    for module in (state.module, adam.mu, adam.nu):
        block = module.blocks[0]
        assert block.attention.query.weight.sharding.spec == P("model", None)
        assert block.attention.output.weight.sharding.spec == P(None, "model"), (
            "the first rule that matches decides"
        )
        assert block.down.weight.sharding.shard_shape(block.down.weight.shape) == (128, 128)
        assert block.norms[0].weight.sharding.spec == P()
    combined = stepped(both)[2].module
    assert combined.blocks[0].up.weight.sharding.spec == P("model", "data")
    assert combined.embedding.weight.sharding.spec == P("data", None), "the largest dimension"


def check_a_model_is_never_whole_on_a_device_while_it_is_made() -> None:
    source, key = as_model_init(Transformer), jax.random.key(0)
    needed = {}
    for preset in (DataParallel, FSDP):
        program = engine(preset())._programs.get(source, (next(iter(TEXT)),), None)
        memory = (
            program.make_initializer(source)
            .lower(source.arrays, key, key)
            .compile()
            .memory_analysis()
        )
        needed[preset] = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert needed[FSDP] <= 0.2 * needed[DataParallel], needed


def check_every_array_is_donated() -> None:
    for preset in (DataParallel, FSDP, both):
        _, before, after, hlo, _ = stepped(preset)
        # Scalars and the root key travel packed, and that they are not donated lets them be read
        # while steps run.
        parts = eqx.filter((before.module, before.opt_state), eqx.is_array)
        arrays = [leaf for leaf in jax.tree.leaves(parts) if leaf.ndim]
        assert arrays and all(leaf.is_deleted() for leaf in arrays)
        header = hlo[: hlo.index("\n")]
        assert len(re.findall(r"(?:may|must)-alias", header)) == len(arrays)
        assert not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(after, eqx.is_array))
        )


# --- steps ----------------------------------------------------------------------------------------------------------


def check_shardings_stay_and_nothing_is_compiled_again() -> None:
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


def check_fused_steps_train_alike() -> None:
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


def check_batches_gathered_on_the_devices_are_the_same() -> None:
    fit = engine(FSDP(min_size=64), steps=12).fit
    losses = [
        fit(eqx.nn.make_with_state(Net), regression(shuffle=True, on_device=where)).history[
            "train/loss"
        ]
        for where in (False, True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def check_numbers_do_not_depend_on_the_number_of_devices() -> None:
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
    assert len(set(single.history["train/draws"])) > 40, "every step draws anew"
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


def check_batch_norm_takes_its_statistics_over_the_global_batch() -> None:
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


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (16,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch["x"] @ self.weight - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2, momentum=0.9)


class MaskedLine(Line):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        errors = (batch["x"] @ self.weight - batch["y"]) ** 2
        return fg.Output(fg.metrics.Mean.from_values(errors, ctx.mask))


def check_what_was_trained_on_other_devices_goes_on() -> None:
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


def check_evaluations_are_those_of_one_device() -> None:
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


# --- rules ----------------------------------------------------------------------------------------------------------


class Wide(fg.Module):
    """A matrix (16, 24), a vector (24,), and a step that constrains what it computes by the axes'
    names."""

    matrix: jax.Array
    vector: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.matrix, self.vector = jax.random.normal(key, (16, 24)), jnp.zeros(24)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ self.matrix, P("data", None))
        preds = hidden + self.vector
        return fg.Output(jnp.mean((preds.sum(1) - batch["y"]) ** 2), preds={"hidden": preds})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=8),
            optax.trace(0.9),
            optax.scale(-1e-3),
        )


def placed(sharding: Sharding, *plugins: Any) -> fg.TrainState:
    return engine(sharding, *plugins).init_state(Wide, regression())


def check_the_optimizer_may_be_divided_further() -> None:
    state = placed(Sharding(optimizer=ShardBySize("data", 1)))
    assert state.module.matrix.sharding.spec == P()
    assert state.opt_state[1][1].trace.matrix.sharding.spec == P(None, "data")
    state = placed(
        Sharding(optimizer=[("**.trace.matrix", P("data"))], parameters=ShardBySize("data", 1))
    )
    assert state.module.matrix.sharding.spec == P(None, "data")
    assert state.opt_state[1][1].trace.matrix.sharding.spec == P("data")
    assert state.opt_state[1][1].trace.vector.sharding.spec == P("data")


def check_optimizer_state_of_another_shape_goes_by_size() -> None:
    factored = placed(Sharding(rules=[("matrix", P("data"))])).opt_state[1][0]
    assert factored.v_row.matrix.shape == (16,) and factored.v_row.matrix.sharding.spec == P()
    assert placed(FSDP(min_size=16)).opt_state[1][0].v_row.matrix.sharding.spec == P("data")


def check_a_rule_without_axes_keeps_an_array_whole() -> None:
    state = placed(FSDP(min_size=1, rules=[("matrix", P())]))
    assert (state.module.matrix.sharding.spec, state.module.vector.sharding.spec) == (
        P(),
        P("data"),
    )


def check_slices_follow_parameters_or_their_own_rule() -> None:
    @dataclass(frozen=True, eq=False)
    class Average:
        @fg.hookimpl
        def init_plugin_state(self, module: Any) -> Any:
            return module

    @dataclass(frozen=True, eq=False)
    class Own(Average):
        @fg.hookimpl
        def plugin_state_sharding(self, plugin_state: Any, mesh: Mesh) -> Any:
            return jax.tree.map(lambda _: NamedSharding(mesh, P()), plugin_state)

    slices = placed(Sharding(rules=[("matrix", P("data"))]), Average(), Own()).plugin_states
    assert slices["average"].matrix.sharding.spec == P("data")
    assert slices["own"].matrix.sharding.spec == P()


def check_an_average_lies_as_its_parameters_3S14() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    state = placed(FSDP(mesh=mesh, min_size=8), Average(EMA(0.5)), Lookahead())
    average = state.plugin_states["average:averaged"].module
    for module in (average, state.plugin_states["lookahead"].slow):
        assert module.matrix.sharding == state.module.matrix.sharding
    assert 4 * bytes_per_device(average.matrix) == average.matrix.nbytes


def check_outputs_lie_as_the_rules_say() -> None:
    observed = {}

    @dataclass(frozen=True, eq=False)
    class Look:
        @fg.hookimpl
        def loss_terms(self, output: fg.Output) -> Any:
            preds = output.preds["hidden"]
            jax.debug.inspect_array_sharding(
                preds,
                callback=lambda sharding: observed.update(part=sharding.shard_shape(preds.shape)),
            )
            return {}

    sharding = Sharding({"data": 4, "model": 2}, outputs=[("preds.hidden", P("data", "model"))])
    trained = engine(sharding, Look())
    trained.step(trained.init_state(Wide, regression()), next(iter(regression())))
    assert observed["part"] == (8, 12)


def check_rules_for_outputs_leave_alone_what_does_not_divide_in_evaluation_and_what_is_no_array() -> (
    None
):
    class Showing(Wide):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch["x"] @ self.matrix + self.vector
            metrics = {"constant": 2.0, "rows": jnp.float32(len(preds))}
            media = {"preds": lambda: Histogram.from_values(preds)}
            return fg.Output(preds.mean(), preds={"hidden": preds}, metrics=metrics, media=media)

    rules = Sharding(outputs=[("preds.hidden", P("data")), ("**", P())])
    trained = engine(rules, steps=1).fit(Showing, regression())
    arrays = regression().arrays
    ten = fg.ArrayData(jax.tree.map(lambda array: array[:10], arrays), 8)
    assert engine(rules).evaluate(trained, ten)["rows"] == np.float32((8 * 8 + 2 * 2) / 10)


def check_rules_and_meshes_that_do_not_fit_are_errors() -> None:
    data = regression()
    for sharding, error, words in [
        (
            Sharding(rules=[("matrx", P("data"))]),
            PathError,
            ["matrx", "matches no array", "'matrix'"],
        ),
        (
            Sharding(rules=[("**", P(None, "data"))]),
            ConfigurationError,
            ["vector [24]", "1 dimensions"],
        ),
        (
            Sharding(
                {"data": 1, "model": 8},
                rules=[("matrix", P(None, ("data", "model")))],
                optimizer=[("x", P())],
            ),
            PathError,
            ["optimizer", "'x'"],
        ),
        (Sharding({"data": 1, "a": 8}, batch=(), rules=[("vector", P("a"))]), None, []),
        (
            Sharding(outputs=[("preds.*", P(None, None, "data"))]),
            ConfigurationError,
            ["preds.hidden", "2 dimensions"],
        ),
    ]:
        try:
            engine(sharding).init_state(Wide, data)
        except (PathError, ConfigurationError) as raised:
            assert error is not None and type(raised) is error, raised
            assert all(word in str(raised) for word in words), raised
        else:
            assert error is None, sharding
    try:
        engine(TensorParallel([("matrix", P("model"))], size=8)).init_state(Wide, data)
        engine(Sharding({"data": 1, "model": 8}, rules=[("odd", P("model"))])).init_state(
            lambda key: Odd(jnp.zeros((3, 5))), data
        )
    except ConfigurationError as raised:
        assert all(
            word in str(raised) for word in ["odd [3, 5]", "dimension 0 of 3", "'model'", "8"]
        ), raised
    for mesh in ({"data": 3}, {"data": 16}, {"data": 3, "model": -1}):
        try:
            engine(Sharding(mesh))
        except ConfigurationError as raised:
            assert "does not take all 8 devices" in str(raised)
        else:
            raise AssertionError(mesh)
    try:
        engine(Sharding(jax.make_mesh((8,), ("data",))))
    except ConfigurationError as raised:
        assert "Auto" in str(raised)
    else:
        raise AssertionError("explicit axes")


class Odd(fg.Module):
    odd: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.odd.sum())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def check_a_batch_that_does_not_divide_is_an_error() -> None:
    for size, step in ((12, 1), (40, 3)):
        try:
            engine(DataParallel(), steps=5).fit(Wide, regression(84, size))
        except DataError as raised:
            assert f"the batch for step {step}: axis 0 of index" in str(raised), raised
            assert "8 parts" in str(raised) and "remainder='drop'" in str(raised)
        else:
            raise AssertionError(size)


class Stream:
    """Batches of a length that nobody knows beforehand."""

    def __init__(self, data: fg.ArrayData) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def refuse(trained: fg.Engine, data: Any, step: int) -> None:
    try:
        trained.fit(Line, data)
    except DataError as raised:
        # Of a source on the device, the indices of its examples are what is divided.
        words = rf"the batch for step {step}: axis 0 of ind(ex|ices) \[20\] does not divide into 8"
        assert re.match(words, str(raised)), raised
    else:
        raise AssertionError(data)


def check_an_uneven_last_batch_is_refused_before_the_first_step() -> None:
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
        # What the fit does not come to is no mistake.
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


def check_a_run_is_saved_before_an_uneven_batch_that_nobody_knew_of() -> None:
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
            # With a last batch that divides, it goes on where it was.
            mended = fg.DataSource(Stream(regression(344, 32)), resume="replay")
            assert int(trained.fit(Line, mended, resume="auto").state.step) == 30


# --- looking
# --------------------------------------------------------------------------------------------------------


def check_replicas_that_differ_are_found() -> None:
    mesh = Sharding({"data": 4, "model": 2}).device_mesh
    numbers = np.arange(8, dtype=np.float32)

    def copies(wrong: int | None, by: float) -> jax.Array:
        sharding = NamedSharding(mesh, P("data"))
        parts = []
        for device, index in sharding.addressable_devices_indices_map((8,)).items():
            part = numbers[index].copy()
            part[-1] += by if device.id == wrong else 0
            parts.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays((8,), sharding, parts)

    check_replicas({"w": copies(None, 0), "key": jax.random.key(0), "nan": jnp.full(3, jnp.nan)})
    check_replicas({"w": copies(5, 1e-4)}, atol=1e-3)
    # the number that differs is 5 in the first copy.
    check_replicas({"w": copies(5, 1e-4)}, rtol=1e-4)
    try:
        check_replicas({"w": copies(5, 1e-4)}, rtol=1e-6)
    except ReplicaError as raised:
        assert "rtol 1e-06" in str(raised)
    else:
        raise AssertionError("not found")
    try:
        check_replicas({"w": [copies(None, 0), copies(5, 0.25)]})
    except ReplicaError as raised:
        assert "w[1]" in str(raised) and "cpu:5" in str(raised).lower().replace("cpu_5", "cpu:5"), (
            raised
        )
        assert "0.25" in str(raised)
    else:
        raise AssertionError("not found")


def check_replicas_of_large_integers_that_differ_are_found() -> None:
    with jax.enable_x64(True):
        parts = [
            jax.device_put(np.array([2**60 + (device.id == 5)]), device) for device in jax.devices()
        ]
        whole = NamedSharding(DataParallel().device_mesh, P())
        try:
            check_replicas({"n": jax.make_array_from_single_device_arrays((1,), whole, parts)})
        except ReplicaError as raised:
            assert "differs from the first one by up to 1" in str(raised), raised
        else:
            raise AssertionError("not found")


def check_gather_gives_the_whole() -> None:
    state = placed(FSDP(min_size=1))
    assert state.module.matrix.addressable_shards[0].data.shape == (16, 3)
    gathered = gather(
        {
            "matrix": state.module.matrix,
            "key": state.key,
            "name": "x",
            "numbers": np.arange(3),
            "one": np.float32(2),
        }
    )
    assert type(scalar := gather(np.float32(2))) is np.ndarray and scalar == 2
    assert type(gathered["matrix"]) is np.ndarray and gathered["name"] == "x"
    assert np.array_equal(gathered["matrix"], placed(Sharding()).module.matrix)
    assert np.array_equal(gathered["key"], jax.random.key_data(jax.random.key(0)))
    assert np.array_equal(gathered["numbers"], np.arange(3))


def check_show_prints_a_table() -> None:
    state = placed(FSDP(min_size=1))
    with redirect_stdout(io.StringIO()) as out:
        visualize_sharding(state.module)
        visualize_sharding(state.module, visualize="vector")
    lines = out.getvalue().splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[:4]] == [
        ["path", "shape", "spec", "bytes per device"],
        ["matrix", "[16, 24]", "P(None, 'data')", "192"],
        ["vector", "[24]", "P('data',)", "12"],
        ["total", "204"],
    ], lines[:4]
    assert "CPU 7" in out.getvalue()


def check_parallel_takes_an_uneven_number_of_examples_B23() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)

    def project(batch: dict[str, Any], weight: Any) -> Any:
        assert batch["x"].shape[0] == 16  # 11 examples and 5 copies of the last, for 8 devices
        return {"y": batch["x"] @ weight, "n": batch["n"]}

    run = parallel(project, engine(DataParallel()).sharding.mesh, in_axes=(0, None))
    x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    result = run({"x": x, "n": np.arange(11)}, matrix)
    assert np.allclose(result["y"], x @ matrix, atol=1e-6)
    assert result["n"].tolist() == list(range(11))
    whole = parallel(lambda x: x * 2, engine(DataParallel()).sharding.mesh, in_axes=1, out_axes=1)
    doubled = whole(np.ones((2, 16)))
    assert len(doubled.sharding.device_set) == 8 and doubled.addressable_shards[0].data.shape == (
        2,
        2,
    )
    assert parallel(lambda x: x + 1, None)(np.zeros(3)).tolist() == [1, 1, 1]
    for call, says in [
        (lambda: parallel(project, some(8), mesh_axes=("model",)), "no axis 'model'; it has data"),
        (lambda: run({"x": x, "n": np.arange(3)}, matrix), r"\[3, 11\] examples"),
    ]:
        try:
            call()
        except (ConfigurationError, DataError) as error:
            assert re.search(says, str(error)), error
        else:
            raise AssertionError(says)


def check_parallel_functions_call_collectives_and_take_arguments_by_name() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    weight = rng.normal(size=(3,)).astype(np.float32)
    mesh = engine(DataParallel()).sharding.mesh

    def center(x: Any, weight: Any, shift: Any = 0.0) -> Any:
        assert x.shape == (2, 3)  # of one device
        return x * weight - jax.lax.pmean(x.mean(0), "devices") + shift

    run = parallel(center, mesh, in_axes={"weight": None, "shift": None}, axis_name="devices")
    expected = x * weight - x.mean(0)
    assert np.allclose(run(x, weight), expected, atol=1e-6)
    assert np.allclose(run(weight=weight, shift=np.float32(2), x=x), expected + 2, atol=1e-6)

    def total(x: Any) -> Any:
        return jax.lax.psum(x.sum(0), "devices")

    options: Any = {"out_axes": None, "axis_name": "devices"}
    assert np.allclose(parallel(total, mesh, **options)(x), x.sum(0), atol=1e-5)
    assert np.allclose(parallel(total, None, **options)(x[:5]), x[:5].sum(0), atol=1e-5)
    two_axes = jax.make_mesh((2, 4), ("model", "data"))
    assert np.allclose(parallel(total, two_axes, **options)(x), x.sum(0), atol=1e-5)
    by_name = parallel(lambda x, y: x + y.T, mesh, in_axes={"y": 1})
    assert np.allclose(by_name(x[:11], y=x[:11].T), 2 * x[:11])  # uneven, as without collectives
    for call, says in [
        (lambda: parallel(total, mesh, **options)(x[:11]), "11 examples do not divide by 8"),
        (lambda: parallel(total, mesh, out_axes=None), "give axis_name= as well"),
        (lambda: parallel(total, mesh, in_axes={"y": 0}), "names 'y', and .* has no such"),
        (lambda: parallel(center, mesh, in_axes=(0, None))(x, weight=weight), "2 axes for 1 pos"),
        (lambda: parallel(total, two_axes, out_axes=None, axis_name="model"), "another axis"),
    ]:
        try:
            call()
        except (ConfigurationError, DataError) as error:
            assert re.search(says, str(error)), error
        else:
            raise AssertionError(says)


def check_an_engine_computes_on_its_device_G22() -> None:
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


def check_devices_that_are_not_there_are_errors_G22() -> None:
    for plugins, device, says in [
        ([], "cpu:8", "there is no device 'cpu:8'; there are cpu:0, cpu:1"),
        ([], "abacus", "there is no device 'abacus'"),
        ([DataParallel()], "cpu:1", "plugin 'sharding' says which devices"),
    ]:
        try:
            engine(*plugins, device=device)
        except ConfigurationError as error:
            assert says in str(error), error
        else:
            raise AssertionError(says)


def check_batches_are_put_where_a_loop_wants_them_K26() -> None:
    sharding = NamedSharding(some(8), P("data"))
    batches = list(regression().device_put(sharding))
    assert [batch["index"].tolist() for batch in batches] == [
        list(range(start, start + 32)) for start in (0, 32, 64)
    ]
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(batches))
    assert engine(DataParallel()).sharding.batch_sharding == sharding
    for strategy in (engine(FSDP()).sharding, engine(DataParallel()).sharding):
        placed = strategy.shard_batch(dict(batches[0]))
        spread = next(regression().device_put(strategy.batch_sharding))
        for leaf, expected in zip(jax.tree.leaves(spread), jax.tree.leaves(placed), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
            assert np.array_equal(leaf, expected)
    assert engine().sharding.batch_sharding is None
    (batch,) = fg.DataSource([{"x": np.ones(8)}]).device_put(jax.devices()[5])
    assert batch["x"].devices() == {jax.devices()[5]}


class LossesByDevice(fg.Module):
    """Notes the mean loss of each device's examples, in a metric of its own."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        losses = (self.weight - batch["x"]) ** 2
        metrics = {
            "devices": average_by_device(losses, ctx.mask),
            "weighted": average_by_device(losses, ctx.mask, batch["x"]),
        }
        return fg.Output(fg.metrics.Mean.from_values(losses, ctx.mask), metrics=metrics)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def check_losses_by_device_are_those_of_its_examples() -> None:
    x = np.random.default_rng(0).uniform(1, 2, size=(3, 16)).astype(np.float32)
    batches = [{"x": row} for row in x]
    for preset in (DataParallel(), FSDP()):
        result = engine(preset, steps=3, log_every=3).fit(LossesByDevice, batches)
        # Two steps of gradient descent by NumPy, over what each device had in the window.
        weight, losses = 0.0, []
        for row in x:
            losses.append((weight - row.astype(np.float64)) ** 2)
            weight -= 0.1 * 2 * np.mean(weight - row.astype(np.float64))
        by_device = np.concatenate([loss.reshape(8, 2) for loss in losses], axis=1)
        weights = np.concatenate([row.reshape(8, 2) for row in x], axis=1)
        logged = result.metrics["train"]
        np.testing.assert_allclose(logged["devices"], by_device.mean(1), rtol=1e-5)
        expected = (by_device * weights).sum(1) / weights.sum(1)
        np.testing.assert_allclose(logged["weighted"], expected, rtol=1e-5)
    # The last two devices have padding alone.
    padded = fg.ArrayData({"x": x[0, :12]}, 16, remainder="pad")
    expected = np.append((x[0, :12] ** 2).reshape(6, 2).mean(1), [np.nan, np.nan])
    for data in (padded, [{"x": x[0, :12]}]):
        with warnings.catch_warnings(action="error"):
            evaluated = engine(DataParallel()).evaluate(LossesByDevice(), data)
        np.testing.assert_allclose(evaluated["devices"], expected, rtol=1e-5)
    alone = engine().evaluate(LossesByDevice(), [{"x": x[0]}])
    np.testing.assert_allclose(alone["devices"], [(x[0] ** 2).mean()], rtol=1e-5)
    with jax.set_mesh(some(8)):
        try:
            jax.eval_shape(partial(average_by_device, axes=("model",)), np.zeros(16, np.float32))
        except ConfigurationError as error:
            assert "no axis 'model'; it has data" in str(error), error
        else:
            raise AssertionError("an axis that the mesh does not have")


def check_losses_and_metrics_are_those_of_one_device() -> None:
    """Over a batch with padding of NaN, also where examples are compared with each other."""
    random = np.random.default_rng(0)
    mask = np.arange(16) % 5 != 3
    logits = np.where(mask[:, None], random.normal(size=(16, 4)), np.nan).astype(np.float32)
    labels = np.where(mask, random.integers(0, 4, 16), -1)
    batch = (logits, labels, mask)

    def compute_loss(logits: Any, labels: Any, mask: Any) -> Any:
        return (
            fl.softmax_cross_entropy(logits, labels, mask=mask)
            + fl.triplet_loss(logits, labels, mask=mask)
            + fl.info_nce(logits, logits[:, ::-1], mask=mask)
        )

    @jax.jit
    def compute(logits: Any, labels: Any, mask: Any) -> Any:
        first, second = logits[:, 0], logits[:, 1]
        return {
            "loss": jax.value_and_grad(compute_loss)(logits, labels, mask),
            "fbeta": fm.FBeta.from_predictions(logits, labels, mask, beta=2.0),
            "brier": fm.BrierScore.from_logits(logits, labels, mask),
            "pearson": fm.Pearson.from_predictions(first, second, mask),
            "ndcg": fm.NDCG.from_scores(logits, abs(logits), mask),
            "area": fm.RocAucOneVsRest.from_logits(logits, labels, mask),
            "spearman": fm.Spearman.from_predictions(first, second, mask),
        }

    def finish(results: dict[str, Any]) -> Any:
        host = jax.device_get(results)
        return {
            name: value.compute() if hasattr(value, "compute") else value
            for name, value in host.items()
        }

    single = finish(compute(*batch))
    divided = finish(compute(*jax.device_put(batch, NamedSharding(some(8), P("data")))))
    assert not divided["loss"][1][~mask].any()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), divided, single
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(divided))


class Stack(eqx.Module):
    """Blocks under scan and remat, which know nothing of keys."""

    blocks: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        make = partial(eqx.nn.Linear, 32, 32)
        self.blocks = eqx.filter_vmap(lambda key: make(key=key))(jax.random.split(key, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def apply_block(carry: jax.Array, arrays: Any) -> Any:
            return jnp.tanh(eqx.combine(arrays, static)(carry)), None

        return jax.lax.scan(apply_block, x, arrays)[0]


def check_a_loss_and_a_metric_on_a_layer_under_fsdp() -> None:
    inputs = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    task = KeyedTask(Stack(key=jax.random.key(0)), {"x": "batch"}, optimizer=optax.sgd(0.1))
    plugins = [
        Losses(fit=L2("preds", "batch"), sparse=L1("interms.model.blocks[2]", weight=0.1)),
        Metrics(hidden=Norm("interms.model.blocks[2]", axis=-1)),
    ]
    results = [
        fg.Engine(steps=6, plugins=[*plugins, *layout]).fit(task, fg.ArrayData(inputs, 16))
        for layout in ([], [FSDP(min_size=0)])
    ]
    single, divided = (result.module.model.blocks.weight for result in results)
    assert divided.sharding.shard_shape(divided.shape) != divided.shape
    np.testing.assert_allclose(gather(divided), single, rtol=1e-5, atol=1e-6)
    values = [result.metrics["train"]["metrics/hidden"] for result in results]
    np.testing.assert_allclose(*values, rtol=1e-5)


def check_parameters_that_fsdp_leaves_whole_are_told() -> None:
    class Wide(fg.Module):
        wide: jax.Array
        even: jax.Array
        bias: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch @ self.wide + self.even.sum() + self.bias
            return fg.Output(jnp.mean(preds**2))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.0)

    def fit(*plugins: Any) -> list[str]:
        module = Wide(jnp.ones((101, 3)), jnp.ones((16, 3)), jnp.ones(3))
        data = [np.ones((8, 101), np.float32)]
        return fg.Engine(steps=1, plugins=plugins).fit(module, data).messages

    (message,) = fit(FSDP(min_size=10))
    assert "8 parts of the axis 'data': wide (101, 3). Pad" in message
    (message,) = fit(FSDP())
    assert "no parameter is divided over the axis 'data'" in message
    assert fit(FSDP(min_size=304)) == [message.replace("16384", "304")]
    assert fit(DataParallel()) == []
    assert fit(Sharding(parameters=ShardBySize("data", 10), rules=[("wide", P())])) == []


class Noisy(fg.Module):
    weight: jax.Array

    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        inputs = batch["x"]
        if "key" in batch:
            inputs = inputs + jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["key"])
        return fg.Output(jnp.mean((inputs @ self.weight - 1) ** 2))

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["key"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def check_batches_with_typed_keys_are_divided_whatever_their_size() -> None:
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


def check_batches_on_other_devices_are_moved_to_that_of_the_model() -> None:
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


if __name__ == "__main__":
    # python eight.py NAME ... runs only these.
    wanted = sys.argv[1:] or [
        name for name in globals() if name.startswith("check_") and name != "check_replicas"
    ]
    reports: dict[str, str | None] = {}
    for name in wanted:
        try:
            globals()[name]()
            reports[name] = None
        except Exception:
            reports[name] = traceback.format_exc()
        print(name, "failed" if reports[name] else "passed", file=sys.stderr, flush=True)
    print(json.dumps({"devices": len(jax.devices()), "reports": reports}))
