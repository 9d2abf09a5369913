"""What the plugin promises as a plugin, what it trains, and what is done to models with adapters."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, ModelError
from fulgurite_checkpoint import Checkpointer, load
from fulgurite_lora import (
    Lora,
    LoraLinear,
    add_adapters,
    merge,
    remove_adapters,
    select_adapters,
    unmerge,
    use_adapters,
)
from fulgurite_optimizers import Freeze
from fulgurite_testing import TinyModel, check_plugin, tiny_data

KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.sin(X).sum(1).astype(np.float32)


class Net(fg.Module):
    """A small perceptron whose loss is that of a regression."""

    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        body, head = jax.random.split(key)
        self.body = eqx.nn.Linear(4, 6, key=body)
        self.head = eqx.nn.Linear(6, "scalar", key=head)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.tanh(self.body(x)))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((jax.vmap(self)(batch[0]) - batch[1]) ** 2))

    def configure_optimizers(self) -> Any:
        return optax.adamw(1e-2, weight_decay=0.1)


def make_engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(**{"steps": 3, "log_every": 1, "plugins": plugins, **settings})


def make_data() -> fg.ArrayData:
    return fg.ArrayData((X, Y), 8)


def set_up_matrices(module: Any, value: float = 0.1) -> Any:
    """Return a model whose adapters change something."""
    return jax.tree.map(
        lambda leaf, chosen: jnp.full_like(leaf, value) if chosen else leaf,
        module,
        fg.select("up")(module),
    )


def list_arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def assert_same(left: Any, right: Any) -> None:
    for first, second in zip(list_arrays(left), list_arrays(right), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.full
def test_plugin_passes_the_conformance_check():
    bad = [{"rank": -1}, {"scale": float("nan")}, {"dropout": 1.0}]
    check_plugin(Lora, bad_arguments=bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "x"}, "scale is 'x'; it must be a finite number"),
        ({"dropout": "x"}, "dropout is 'x'"),
        ({"rank": True}, "rank is True"),
        ({"name": ""}, "name is ''"),
        ({"where": ["head"]}, r"a function of the module, or fg\.select.*not by \['head'\]"),
        ({"train_too": 3}, "not by 3"),
    ],
)
def test_arguments_of_another_type_are_errors(arguments: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Lora(**arguments)


@pytest.mark.full
def test_updates_have_the_bits_of_a_loop_by_hand():
    """The base is not updated, not even by weight decay, and has no optimizer state."""
    engine = make_engine(Lora("body", rank=2, scale=0.5))
    model = Net(key=jax.random.key(0))
    start = engine.init_state(model, make_data())
    adapter = start.module.body.adapters["default"]
    params = (adapter.down, adapter.up)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    opt_state = optimizer.init(params)

    def compute_loss(params: Any, base: Any, scale: Any, batch: Any) -> Any:
        def predict(x: Any) -> Any:
            down, up = params
            hidden = base.body(x) + scale * (up @ (down @ x))
            return base.head(jnp.tanh(hidden))

        return jnp.mean((jax.vmap(predict)(batch[0]) - batch[1]) ** 2)

    @eqx.filter_jit
    def step(params: Any, opt_state: Any, base: Any, scale: Any, batch: Any) -> Any:
        grads = jax.grad(compute_loss)(params, base, scale, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    batch = (jnp.asarray(X), jnp.asarray(Y))
    for _ in range(3):
        params, opt_state = step(params, opt_state, model, jnp.float32(0.5), batch)
    result = engine.fit(model, make_data())
    trained = result.module.body.adapters["default"]
    np.testing.assert_array_equal(trained.down, params[0])
    np.testing.assert_array_equal(trained.up, params[1])
    assert_same(remove_adapters(result.module), model)
    shapes = {leaf.shape for leaf in list_arrays(result.state.opt_state)}
    assert shapes == {(), (2, 4), (6, 2)}


@pytest.mark.full
def test_train_too_trains_a_head():
    """Its adapters, too, but not their scale."""
    model = Net(key=jax.random.key(0))
    lora = Lora("**", rank=2, scale=0.5, train_too="head")
    module = make_engine(lora).fit(model, make_data()).module
    assert (np.asarray(module.head.weight) != np.asarray(model.head.weight)).any()
    assert_same((module.body.weight, module.body.bias), (model.body.weight, model.body.bias))
    assert module.head.adapters["default"].scale == 0.5


@pytest.mark.parametrize("is_made", [True, pytest.param(False, marks=pytest.mark.full)])
def test_checkpoints_of_adapters_fit_the_base(tmp_path: Path, is_made: bool):
    """They hold nothing else of the module; `load_weights` fills them in by path, with the scale that
    they were trained with. A base that the engine is yet to make is that of the run, whose key the
    checkpoint holds."""
    model = Net(key=jax.random.key(0)) if is_made else Net
    saver = Checkpointer(every=3, weights_only=fg.select(select_adapters()))
    result = make_engine(Lora(rank=2, scale=0.5), saver, run_dir=tmp_path / "run").fit(
        model, make_data()
    )
    index = (tmp_path / "run" / "checkpoints" / "step-3" / "index.json").read_text()
    assert "module.body.adapters" in index
    assert "module.body.weight" not in index and "opt_state" not in index
    weights = fg.CheckpointRef(tmp_path / "run", strict=False)
    other = Checkpointer(every=100, directory=tmp_path / "other")
    reader = make_engine(Lora(rank=2), other)
    with pytest.warns(UserWarning, match=r"(?s)in part.*module\.body\.weight: saved nothing"):
        loaded = reader.load_weights(model, weights).module
    assert_same(loaded, result.module)
    assert loaded.body.adapters["default"].scale == 0.5
    for plugins in ([other], [Lora(rank=2, name="other"), other]):
        with pytest.raises(CheckpointError, match=r"no array in common.*adapters\.default\.down"):
            make_engine(*plugins).load_weights(model, weights)
    with pytest.raises(CheckpointError, match="strict=False takes what both have"):
        reader.load_weights(model, tmp_path / "run")


@pytest.mark.full
def test_an_adapter_of_another_rank_is_left_as_a_whole(tmp_path: Path):
    """Its scale would fit, and belongs to matrices that do not."""
    model = Net(key=jax.random.key(0))
    ranks = [Lora("body", rank=2, scale=0.5), Lora("head", rank=3, scale=0.25)]
    saver = Checkpointer(every=3, directory=tmp_path / "run")
    trained = make_engine(*ranks, saver).fit(model, make_data()).module
    others = [Lora("body", rank=2), Lora("head", rank=2)]
    reader = make_engine(*others, Checkpointer(every=3, directory=tmp_path / "other"))
    weights = fg.CheckpointRef(tmp_path / "run", strict=False)
    with pytest.warns(UserWarning, match="left with the rest of module.head.adapters") as caught:
        module = reader.load_weights(model, weights).module
    (text,) = [str(warning.message) for warning in caught]
    assert "module.head.adapters" in text and "module.body" not in text
    assert (
        module.head.adapters["default"].scale == 1 and not module.head.adapters["default"].up.any()
    )
    assert_same(module.body, trained.body)
    assert_same(remove_adapters(module), remove_adapters(trained))
    fresh = add_adapters(add_adapters(model, "body", rank=2, key=KEY), "head", rank=2, key=KEY)
    with pytest.warns(UserWarning, match="left with the rest of module.head.adapters"):
        loaded = load(tmp_path / "run", model=fresh, strict=False)
    assert_same(loaded.head.adapters, fresh.head.adapters)
    assert_same(loaded.body, trained.body)


@pytest.mark.full
def test_a_layer_whose_matrix_is_zero_computes_what_the_base_does():
    model = Net(key=jax.random.key(0))
    fresh = add_adapters(model, rank=2, key=KEY)
    rankless = add_adapters(model, rank=0, key=KEY)
    scaleless = set_up_matrices(add_adapters(model, rank=2, scale=0.0, key=KEY))
    changed = set_up_matrices(add_adapters(model, rank=2, key=KEY))
    expected = jax.vmap(model)(X)
    for module in (fresh, rankless, scaleless, use_adapters(changed)):
        np.testing.assert_array_equal(jax.vmap(module)(X), expected)
    assert (jax.vmap(changed)(X) != expected).any()


@pytest.mark.full
def test_adapters_of_rank_zero_train_nothing_but_a_head():
    model = Net(key=jax.random.key(0))
    lora = Lora("body", rank=0, train_too="head")
    module = make_engine(lora).fit(model, make_data()).module
    assert module.body.adapters["default"].down.shape == (0, 4)
    assert_same(remove_adapters(module).body, model.body)
    assert (np.asarray(module.head.weight) != np.asarray(model.head.weight)).any()


def test_merged_weights_compute_the_same():
    model = Net(key=jax.random.key(0))
    module = set_up_matrices(add_adapters(model, rank=2, scale=0.5, key=KEY))
    merged = merge(module)
    expected = jax.vmap(module)(X)
    for same in (merged, unmerge(merged), merge(merged), remove_adapters(merged)):
        np.testing.assert_allclose(jax.vmap(same)(X), expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(remove_adapters(merged)) == jax.tree.structure(model)
    assert jax.tree.structure(unmerge(merged)) == jax.tree.structure(module)
    with pytest.raises(ConfigurationError, match="unmerge the model first"):
        use_adapters(merged, "default")


@pytest.mark.full
def test_several_adapters_stand_side_by_side():
    model = Net(key=jax.random.key(0))
    module = set_up_matrices(add_adapters(model, rank=2, name="french", key=KEY))
    french = jax.vmap(module)(X)
    module = set_up_matrices(add_adapters(module, "body", rank=1, name="law", key=KEY), 0.2)
    assert module.body.active == ("french", "law") and module.head.active == ("french",)
    both = jax.vmap(module)(X)
    only_law = jax.vmap(use_adapters(module, "law"))(X)
    assert (both != only_law).any() and (both != french).any()
    assert_same(remove_adapters(module, "law").head, module.head)
    by_name = merge(module, "law").body
    assert by_name.merged == ("law",)
    np.testing.assert_allclose(by_name(X[0]), module.body(X[0]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match="Did you mean 'law'"):
        use_adapters(module, "laws")


@pytest.mark.full
def test_a_second_adapter_is_trained_beside_the_first():
    model = Net(key=jax.random.key(0))
    first = make_engine(Lora("body", rank=2, name="first")).fit(model, make_data()).module
    second = make_engine(Lora("body", rank=1, name="second")).fit(first, make_data()).module
    assert_same(second.body.adapters["first"], first.body.adapters["first"])
    assert np.asarray(second.body.adapters["second"].up).any()


@pytest.mark.full
def test_several_plugins_train_the_adapters_of_each():
    """By hand: the two low-rank changes are parameters of one optimizer. Their layers have different
    ranks and scales, and the adapters that the model came with stay as they are."""
    base = Net(key=jax.random.key(0))
    model = set_up_matrices(add_adapters(base, "body", rank=1, name="old", key=KEY))
    plugins = [Lora("body", rank=2, scale=0.5, name="first"), Lora("head", rank=1, name="second")]
    engine = make_engine(*plugins)
    start = engine.init_state(model, make_data()).module
    params: Any = tuple(
        (adapter.down, adapter.up)
        for adapter in (start.body.adapters["first"], start.head.adapters["second"])
    )
    old = model.body.adapters["old"].change
    optimizer = optax.adamw(1e-2, weight_decay=0.1)

    def compute_loss(params: Any) -> Any:
        (down, up), (head_down, head_up) = params
        hidden = X @ (base.body.weight + old + 0.5 * up @ down).T + base.body.bias
        preds = jnp.tanh(hidden) @ (base.head.weight + head_up @ head_down).T + base.head.bias
        return jnp.mean((preds[:, 0] - Y) ** 2)

    opt_state = optimizer.init(params)
    for _ in range(3):
        updates, opt_state = optimizer.update(jax.grad(compute_loss)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert {"lora:first", "lora:second"} <= set(engine.plugins.plugins)
    module = engine.fit(model, make_data()).module
    trained = (module.body.adapters["first"], module.head.adapters["second"])
    for adapter, (down, up) in zip(trained, params, strict=True):
        np.testing.assert_allclose(adapter.down, down, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(adapter.up, up, rtol=1e-4, atol=1e-6)
    assert_same(remove_adapters(module, "first", "second"), model)


@pytest.mark.full
def test_several_plugins_of_one_name_have_ranks_of_their_own():
    """Dropout of both draws from the one stream, and another wrapper may stand between them."""
    model = Net(key=jax.random.key(0))
    plugins = [Lora("body", rank=2, dropout=0.5), Freeze("head.bias"), Lora("head", rank=1)]
    module = make_engine(*plugins).fit(model, make_data()).module
    assert module.body.adapters["default"].down.shape == (2, 4)
    assert module.head.adapters["default"].down.shape == (1, 6)
    assert np.asarray(module.body.adapters["default"].up).any()
    assert np.asarray(module.head.adapters["default"].up).any()
    assert_same(remove_adapters(module), model)


@pytest.mark.full
def test_paths_of_the_base_stay():
    attention = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    module = add_adapters({"attention": attention}, "attention", rank=2, key=KEY)
    before = [path for path, _ in jax.tree_util.tree_leaves_with_path({"attention": attention})]
    after = [path for path, _ in jax.tree_util.tree_leaves_with_path(module)]
    assert set(before) <= set(after)
    assert isinstance(module["attention"].query_proj, LoraLinear)
    x = jnp.ones((3, 4))
    np.testing.assert_array_equal(module["attention"](x, x, x), attention(x, x, x))


@pytest.mark.full
def test_a_stack_of_layers_has_a_stack_of_adapters():
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jax.random.split(KEY, 3))
    module = set_up_matrices(add_adapters(stack, rank=2, scale=0.5, key=KEY))
    assert module.adapters["default"].down.shape == (3, 2, 4)
    assert module.adapters["default"].scale.shape == (3,)
    merged = remove_adapters(merge(module))
    for index in range(3):
        layer, plain = jax.tree.map(
            lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, (module, merged)
        )
        np.testing.assert_allclose(layer(X[0]), plain(X[0]), rtol=1e-5, atol=1e-6)


def test_dropout_is_in_training_alone():
    module = set_up_matrices(add_adapters(Net(key=KEY), "body", rank=2, dropout=0.5, key=KEY))
    layer = module.body
    assert (layer(X[0], key=jax.random.key(0)) != layer(X[0], key=jax.random.key(1))).any()
    np.testing.assert_array_equal(
        eqx.nn.inference_mode(layer)(X[0]),
        jax.tree.map(lambda leaf: leaf, layer).replace(
            adapters={
                "default": eqx.tree_at(
                    lambda adapter: adapter.dropout.p, layer.adapters["default"], 0.0
                )
            }
        )(X[0]),
    )
    with pytest.raises(ModelError, match="outside of a step"):
        layer(X[0])


@pytest.mark.full
def test_dropout_draws_from_a_stream_of_its_own():
    """The noise of the model is the same with and without adapters that change nothing."""
    plain = make_engine(steps=1).fit(TinyModel, tiny_data())
    dropped = make_engine(Lora(rank=2, dropout=0.5), steps=1).fit(TinyModel, tiny_data())
    assert plain.history["train/loss"] == dropped.history["train/loss"]


def take(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


class Stack(fg.Module):
    """Layers in a scan, or one after the other; each gets a key if there are keys."""

    layers: eqx.nn.Linear
    is_scan: bool = eqx.field(static=True)
    has_keys: bool = eqx.field(static=True)

    def __init__(self, is_scan: bool, has_keys: bool, *, key: Any) -> None:
        make_layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))
        self.layers = make_layers(jax.random.split(key, 3))
        self.is_scan = is_scan
        self.has_keys = has_keys

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        keys = jax.random.split(ctx.key(), 3)

        @jax.checkpoint
        def apply(x: Any, inputs: Any) -> Any:
            layer = eqx.combine(inputs[0], static)
            return jnp.tanh(layer(x, key=inputs[1] if self.has_keys else None)), None

        x = batch[0]
        if self.is_scan:
            x, _ = jax.lax.scan(apply, x, (arrays, keys))
        else:
            for index in range(3):
                x, _ = apply(x, take((arrays, keys), index))
        return fg.Output(jnp.sum(x))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.full
def test_dropout_in_a_scan_takes_the_keys_of_the_caller():
    data = fg.DataSource([np.ones((1, 8), np.float32)] * 4)

    def fit(is_scan: bool, dropout: float, has_keys: bool = True) -> Any:
        engine = make_engine(Lora(rank=2, dropout=dropout), steps=4)
        return engine.fit(partial(Stack, is_scan, has_keys), data).module.layers.adapters

    in_scan = fit(is_scan=True, dropout=0.5)
    for array, expected in zip(list_arrays(in_scan), list_arrays(fit(False, 0.5)), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-6)
    without = list_arrays(fit(is_scan=True, dropout=0.0))
    pairs = zip(list_arrays(in_scan), without, strict=True)
    assert any((array != other).any() for array, other in pairs)
    with pytest.raises(ModelError, match=r"inside a jit, scan.* Draw the key outside and pass it"):
        fit(is_scan=True, dropout=0.5, has_keys=False)


def test_errors_say_what_to_do():
    model = Net(key=jax.random.key(0))
    with pytest.raises(ConfigurationError, match=r"no eqx.nn.Linear.*are net\.body, net\.head$"):
        add_adapters({"net": model, "bias": jnp.zeros(2)}, lambda tree: tree["bias"], key=KEY)
    many = [eqx.nn.Linear(1, 1, key=KEY) for _ in range(7)]
    with pytest.raises(ConfigurationError, match=r"there are \[0\], .*, \[5\], \.\.\.$"):
        add_adapters([*many, jnp.zeros(1)], "[7]", key=KEY)
    with pytest.raises(ConfigurationError, match="has the rank 2, not 3"):
        add_adapters(add_adapters(model, rank=2, key=KEY), rank=3, key=KEY)
    with pytest.raises(ConfigurationError, match="has no adapters"):
        merge(model)


@pytest.mark.slow
def test_adapters_of_a_sharded_transformer_resume_with_the_same_bits(tmp_path: Path):
    """Acceptance 2: killed after a checkpoint, on two devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = Path(__file__).with_name("train_transformer.py")
        command = [sys.executable, str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    whole = run(str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.split()[1:] == ["shards", "2", "False"]
    assert run(str(tmp_path / "killed"), "12").returncode < 0
    resumed = run(str(tmp_path / "killed"))
    assert resumed.stdout == whole.stdout, resumed.stderr
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "killed")]
    assert records[0] == records[1]


@pytest.mark.full
def test_adapters_of_a_complex_layer_are_complex():
    """After a step from zero, `up` is the step against the gradient by its two parts."""

    class Model(fg.Module):
        layer: eqx.nn.Linear

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean(jnp.abs(jax.vmap(self.layer)(batch)) ** 2))

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    layer = eqx.nn.Linear(4, 3, key=KEY, dtype=jnp.complex64)
    batch = (X[:4] + 1j * X[4:]).astype(np.complex64)
    result = make_engine(Lora(rank=2), steps=1).fit(Model(layer), [batch])
    adapter = result.module.layer.adapters["default"]
    assert adapter.down.dtype == adapter.up.dtype == jnp.complex64
    assert np.abs(adapter.down.real).max() <= 0.5 and np.abs(adapter.down.imag).max() <= 0.5
    assert np.std(adapter.down.real) > 0.1 and np.std(adapter.down.imag) > 0.1

    def compute_loss(parts: Any) -> Any:
        change = (parts[0] + 1j * parts[1]) @ adapter.down
        preds = batch @ (layer.weight + change).T + layer.bias
        return jnp.mean(preds.real**2 + preds.imag**2)

    step = -0.1 * jax.grad(compute_loss)(jnp.zeros((2, 3, 2)))
    np.testing.assert_allclose(adapter.up, step[0] + 1j * step[1], rtol=1e-4, atol=1e-6)


class Normalized(Net):
    """With a layer that has statistics."""

    norm: eqx.nn.BatchNorm

    def __init__(self, *, key: Any) -> None:
        super().__init__(key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        normalize = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        x, state = normalize(batch[0], ctx.model_state)
        return super().training_step((x, batch[1]), ctx).replace(model_state=state)


@pytest.mark.parametrize(
    ("plugins", "num_kept"),
    [
        ([Lora("body", rank=2)], 1),
        ([Lora("body", rank=2), Lora("head", rank=1, train_too="norm")], 0),
    ],
    ids=["one", "two"],
)
def test_statistics_of_frozen_layers_are_said_to_stay(plugins: Any, num_kept: int) -> None:
    """So that `recompute_statistics` leaves them alone; what any plugin trains does not stay."""
    engine = make_engine(*plugins, autoload=False)
    state = engine.init_state(eqx.nn.make_with_state(Normalized), make_data())
    hook: Any = engine.plugins.hooks.get("list_kept_state")
    markers = {index.marker for _, indices in hook.each(module=state.module) for index in indices}
    # Mean and variance, and whether there are any yet.
    assert len(markers) == 2 * num_kept
    assert num_kept == 0 or state.module.norm.ema_state_index.marker in markers
