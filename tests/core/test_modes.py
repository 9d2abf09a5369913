"""What the code in a step knows and can do: training or evaluation, keys, further losses, what is
due, annotations."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, NotRequired, TypedDict

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError, PluginError
from jaxtyping import Array, Float, Int
from models import Act, Counting, Evaluating, Kept, init_module, numbers

# --- training or evaluation -----------------------------------------------------------------------


def mode(x: Any) -> Any:
    """1 in training and 0 in evaluation, beside `x`."""
    return jnp.full_like(x, fg.is_training())


def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (mode(carry), None), x, length=2)[0]


def cond(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, mode, lambda x: mode(x) + 0.0, x)


# Made once, so that each is traced in both modes and could keep what it saw first.
NESTED: dict[str, Callable[[Any], Any]] = {
    "plain": mode,
    "jit": jax.jit(mode),
    "filter_jit": eqx.filter_jit(mode),
    "checkpoint": jax.checkpoint(mode),
    "filter_checkpoint": eqx.filter_checkpoint(mode),
    "scan": scanned,
    "cond": cond,
    "vmap": jax.vmap(mode),
    "jit of scan": jax.jit(scanned),
    "jit of checkpoint of scan of cond": jax.jit(
        jax.checkpoint(lambda x: jax.lax.scan(lambda carry, _: (cond(carry), None), x, length=2)[0])
    ),
    "filter_jit of jit of cond": eqx.filter_jit(jax.jit(cond)),
    "custom_vjp": jax.custom_vjp(mode),
}
NESTED["custom_vjp"].defvjp(lambda x: (mode(x), None), lambda _, g: (g,))  # type: ignore[attr-defined]


class Modes(Counting):
    """Its metrics are what every nested function sees, and what the context says."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        outputs = {name: nested(batch).mean() for name, nested in NESTED.items()}
        return fg.Output(
            self.weight + batch.mean(), metrics={**outputs, "context": jnp.float32(ctx.training)}
        )

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return self.training_step(batch, ctx)


@pytest.mark.full
def test_every_nesting_knows_the_mode_of_an_evaluation_between_training_steps() -> None:
    evaluating = Evaluating(fg.Evaluation("test", numbers([1, 2])), trigger=2)
    engine = fg.Engine(steps=4, log_every=1, plugins=[evaluating])
    data = numbers(
        [1, 2], [1, 2, 3]
    )  # two shapes, so that the second is traced after the first was used
    before = engine.evaluate(init_module(Modes), numbers([1, 2]))
    result = engine.fit(Modes, data)
    for name in (*NESTED, "context"):
        assert before[name] == 0, name
        assert result.history[f"train/{name}"].tolist() == [1] * 4, name
        assert result.history[f"test/{name}"].tolist() == [0, 0], name
    assert fg.is_training()


@pytest.mark.full
def test_the_mode_of_nested_functions_outside_of_an_engine() -> None:
    x = jnp.ones(3)
    for name, nested in NESTED.items():
        assert nested(x).mean() == 1, name
        with fg.training_mode(False):
            assert nested(x).mean() == 0, name
            with fg.training_mode(True):
                assert nested(x).mean() == 1, name
        assert nested(x).mean() == 1, name


class Dropping(fg.Module):
    """Two dropouts of ones: the share of zeros that each lets through is a metric."""

    encoder: eqx.nn.Dropout
    head: eqx.nn.Dropout
    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.encoder, self.head, self.weight = (
            eqx.nn.Dropout(0.5),
            eqx.nn.Dropout(0.5),
            jnp.zeros(()),
        )

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        ones, key = jnp.ones(1000), ctx.key()
        with fg.training_mode(False, self.encoder) as encoder:
            frozen, inner = encoder(ones, key=key), fg.is_training()
        outputs = {
            "encoder": self.encoder(ones, key=key),
            "frozen": frozen,
            "head": self.head(ones, key=key),
        }
        dropped = {name: jnp.mean(value == 0) for name, value in outputs.items()}
        modes = {"inner": jnp.float32(inner), "outer": jnp.float32(fg.is_training())}
        return fg.Output(self.weight * 1.0, metrics=dropped | modes)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


@pytest.mark.full
def test_a_part_is_switched_to_evaluation_and_evaluation_switches_everything() -> None:
    engine = fg.Engine(steps=1)
    result = engine.fit(Dropping, numbers([0]))
    train, test = result.metrics["train"], engine.evaluate(result, numbers([0]))
    assert 0.4 < train["encoder"] < 0.6 and 0.4 < train["head"] < 0.6 and train["frozen"] == 0
    assert (train["inner"], train["outer"]) == (0, 1)
    assert {
        name: test[name] for name in ("encoder", "head", "frozen", "inner", "outer")
    } == dict.fromkeys(("encoder", "head", "frozen", "inner", "outer"), 0)
    assert not result.module.head.inference  # the module that comes back is as it was given


def test_a_part_is_switched_to_training_in_an_evaluation() -> None:
    class Stochastic(Dropping):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            with fg.training_mode(True, self.head) as head:
                dropped = jnp.mean(head(jnp.ones(1000), key=ctx.key()) == 0)
            return fg.Output(
                metrics={"dropped": dropped, "training": jnp.float32(fg.is_training())}
            )

    metrics = fg.Engine().evaluate(init_module(Stochastic), numbers([0]))
    assert 0.4 < metrics["dropped"] < 0.6 and metrics["training"] == 0


def test_the_mode_is_restored_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), fg.training_mode(False):
        raise ZeroDivisionError
    assert fg.is_training()


# --- keys -----------------------------------------------------------------------------------------


class Drawing(Counting):
    """Its metrics are draws from keys; the draw of an evaluation from the same places are its other
    metrics."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        fresh = ctx.fork("second pass")
        keys = {
            "key": ctx.key(),
            "again": ctx.key(),
            "third": ctx.key("default"),
            "named": ctx.key(name="mask"),
            "named again": ctx.key(name="mask"),
            "other name": ctx.key(name="make_rng"),
            "ambient": fg.make_rng(),
            "of keys": ctx.keys("default", 3)[1],
            "fresh": fresh.key(),
            "fresh again": ctx.fork("second pass").key(),
            "second of fresh": fresh.key(),
            "other fresh": ctx.fork("third pass").key(),
            "fresh of fresh": fresh.fork("second pass").key(),
        }
        draws = {
            name: fg.metrics.LastValue.from_values(jax.random.uniform(key))
            for name, key in keys.items()
        }
        assert (
            ctx.training and fresh.training and not ctx.fork("evaluation", training=False).training
        )
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={**draws, "step": fg.metrics.LastValue.from_values(ctx.step)})
        )


DIFFERENT = ("key", "again", "third", "named", "other name", "ambient", "of keys")
DIFFERENT += ("fresh", "second of fresh", "other fresh", "fresh of fresh")


@pytest.mark.full
def test_keys_differ_by_step_stream_and_pass() -> None:
    history = fg.Engine(steps=3, log_every=1).fit(Drawing, numbers([0])).history
    draws = [float(value) for name in DIFFERENT for value in history[f"train/{name}"]]
    assert len(set(draws)) == len(draws) == 33
    assert history["train/step"].tolist() == [0, 1, 2]
    assert history["train/named"].tolist() == history["train/named again"].tolist()
    assert history["train/fresh"].tolist() == history["train/fresh again"].tolist()


def test_the_default_key_is_the_documented_fold() -> None:
    name, phase = (int(hashlib.sha1(text).hexdigest()[:8], 16) for text in (b"default", b"train"))
    key = jax.random.fold_in(
        jax.random.fold_in(jax.random.fold_in(jax.random.key(5), name), 1), phase
    )
    second = fold_by_hand(key, "repeated call", 1)
    named = fold_by_hand(key, "name:mask")
    ambient = fold_by_hand(key, "make_rng", 0)
    history = fg.Engine(steps=2, seed=5, log_every=1).fit(Drawing, numbers([0])).history
    keys = {"key": key, "again": second, "named": named, "ambient": ambient}
    for name, key in keys.items():
        draw = float(jax.random.uniform(key))
        assert history[f"train/{name}"][1] == pytest.approx(draw, abs=1e-7)


def fold_by_hand(key: Any, name: str, *indices: int) -> Any:
    """Fold by the documented rule: four bytes of the name's SHA-1, then each number."""
    key = jax.random.fold_in(key, int(hashlib.sha1(name.encode()).hexdigest()[:8], 16))
    for index in indices:
        key = jax.random.fold_in(key, index)
    return key


@pytest.mark.full
def test_two_draws_of_a_step_pass_the_check_of_jax_for_reused_keys() -> None:
    class Views(Drawing):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            drop = eqx.nn.Dropout(0.5)
            first, second = (drop(jnp.ones(64), key=ctx.key()) for _ in range(2))
            equal = jnp.mean(first == second)
            return (
                super()
                .training_step(batch, ctx)
                .replace(metrics={"equal": fg.metrics.LastValue.from_values(equal)})
            )

    with jax.debug_key_reuse(True):
        result = fg.Engine(steps=1, log_every=1).fit(Views, numbers([0]))
    assert 0.25 < result.metrics["train"]["equal"] < 0.75  # 64 pairs of fair coins


@pytest.mark.full
def test_a_plugin_has_keys_of_its_own_and_changes_no_other() -> None:
    class Noise:
        def __init__(self, instance: str) -> None:
            self.instance = instance

        @fg.hookimpl
        def step_metrics(self, ctx: fg.Context) -> Any:
            return {"draw": fg.metrics.LastValue.from_values(jax.random.uniform(ctx.key()))}

        @fg.hookimpl
        def init_plugin_state(self, key: Any) -> Any:
            return {"start": jax.random.uniform(key)}

    alone = fg.Engine(steps=2, log_every=1).fit(Drawing, numbers([0]))
    beside = fg.Engine(steps=2, log_every=1, plugins=[Noise("a"), Noise("b")]).fit(
        Drawing, numbers([0])
    )
    for name in DIFFERENT:
        assert alone.history[f"train/{name}"].tolist() == beside.history[f"train/{name}"].tolist()
    draws = [beside.history[f"train/{name}"] for name in ("noise:a/draw", "noise:b/draw", "key")]
    assert len(set(np.concatenate(draws).tolist())) == 6
    starts = [float(slice["start"]) for slice in beside.state.plugin_states.values()]
    assert len(set(starts)) == 2


@pytest.mark.full
def test_evaluations_repeat_their_noise_and_differ_by_name_and_batch() -> None:
    class Noisy(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            draw = jax.random.uniform(ctx.key())
            return fg.Output(
                metrics={
                    "largest": fg.metrics.Max.from_values(draw),
                    "least": fg.metrics.Min.from_values(draw),
                }
            )

    data = numbers([0], [0])
    specs = [
        fg.Evaluation("test", data),
        fg.Evaluation("other", data),
        fg.Evaluation("fresh", data, new_rng_each_time=True),
    ]
    history = (
        fg.Engine(steps=2, plugins=[Evaluating(*specs, trigger=1)]).fit(Noisy, numbers([0])).history
    )
    for name in ("test", "other"):
        assert (
            history[f"{name}/largest"][0]
            == history[f"{name}/largest"][1]
            > history[f"{name}/least"][0]
        )
    assert history["test/largest"][0] != history["other/largest"][0]
    assert history["fresh/largest"][0] != history["fresh/largest"][1]


def test_a_key_of_an_undeclared_stream_is_an_error() -> None:
    class Wanting(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            ctx.keys("dropout", 2)
            return super().training_step(batch, ctx)

    with pytest.raises(PluginError, match=r"no random stream is called 'dropout'.*fulgurite-rng"):
        fg.Engine(steps=1, autoload=False).fit(Wanting, numbers([0]))


# --- further losses -------------------------------------------------------------------------------


class Penalized(eqx.Module):
    """A part of a model that adds a loss of its own."""

    weight: jax.Array

    def __call__(self, x: Any, ctx: fg.Context) -> Any:
        ctx.add_loss("size", jnp.mean(jnp.square(self.weight)))
        return x @ self.weight


class WithPart(fg.Module):
    part: Penalized

    def __init__(self, *, key: Any = None) -> None:
        self.part = Penalized(jnp.asarray([1.0, 3.0]))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            jnp.mean(self.part(batch, ctx)), losses={"more": jnp.sum(self.part.weight)}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


@pytest.mark.full
def test_losses_are_added_from_a_submodule() -> None:
    batch = np.asarray([[1, 0], [3, 2]], np.float32)
    engine = fg.Engine(steps=1)
    state, output = engine.step(engine.init_state(WithPart, [batch]), batch)
    # mean(x·w) = (1 + 9) / 2, sum(w) = 4, mean(w²) = 5
    assert {name: float(value) for name, value in output.losses.items()} == {
        "loss": 5,
        "more": 4,
        "size": 5,
    }
    assert output.loss == 14
    # w - 0.5·([2, 1] + [1, 1] + w)
    assert state.module.part.weight.tolist() == [-1.0, 0.5]
    result = fg.Engine(steps=1).fit(WithPart, [batch])
    assert {
        name: result.metrics["train"][name] for name in ("loss", "more", "size", "batch_loss")
    } == {
        "loss": 14,
        "more": 4,
        "size": 5,
        "batch_loss": 14,
    }


@pytest.mark.full
def test_plugins_add_terms() -> None:
    class Decay:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> Any:
            return {"l2": 0.5 * jnp.sum(module.part.weight**2)}

    class Seeing:
        """Traced hooks that run after the forward pass see every term (G19)."""

        @fg.hookimpl
        def step_metrics(self, output: fg.Output) -> Any:
            return {name: 2 * term for name, term in output.losses.items()}

    batch = np.zeros((2, 2), np.float32)
    engine = fg.Engine(steps=1, plugins=[Decay(), Seeing()])
    state, output = engine.step(engine.init_state(WithPart, [batch]), batch)
    assert float(output.losses["l2"]) == 5 and output.loss == 0 + 4 + 5 + 5
    metrics = engine.fit(WithPart, [batch]).metrics["train"]
    assert metrics["seeing/l2"] == 10 and metrics["seeing/more"] == 8
    assert state.module.part.weight.tolist() == [1 - 0.5 * (1 + 1 + 1), 3 - 0.5 * (1 + 3 + 3)]


def build_module_class(body: Callable[[Any, Any, fg.Context], Any]) -> type[Counting]:
    """A `Counting` whose training step is `body(module, batch, ctx)`."""

    class Made(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return body(self, batch, ctx)

    return Made


def test_training_with_added_losses_alone() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("only", jnp.mean(module.weight + batch))
        return fg.Output()

    result = fg.Engine(steps=3).fit(build_module_class(body), numbers([1, 3]))
    assert float(result.module.weight) == -3 and result.metrics["train"]["loss"] == 2 - 1


@pytest.mark.variants("full")
@pytest.mark.parametrize("place", ["bare", "loss", "losses", "add_loss", "plugin"])
def test_a_loss_that_is_an_array_is_averaged_with_a_warning_G4(place: str) -> None:
    """One rule for every way in which a loss comes: the mean of w + [1, 3] at w = 0."""
    is_plugin = place == "plugin"

    def body(module: Any, batch: Any, ctx: fg.Context) -> Any:
        values = module.weight + batch
        if place == "add_loss":
            ctx.add_loss("loss", values)
            return fg.Output()
        if place == "losses":
            return fg.Output(losses={"loss": values})
        if is_plugin:
            return fg.Output(0 * module.weight)
        return values if place == "bare" else fg.Output(values)

    class Further:
        @fg.hookimpl
        def loss_terms(self, module: Any, batch: Any) -> Any:
            return {"further": module.weight + batch} if is_plugin else {}

    engine = fg.Engine(steps=1, plugins=[Further()])
    with pytest.warns(UserWarning, match=r"has the shape \(2,\), and its mean is taken"):
        result = engine.fit(build_module_class(body), numbers([1, 3]))
    assert result.metrics["train"]["loss"] == 2 and float(result.module.weight) == -1


def test_a_bare_number_is_the_loss() -> None:
    class Bare(build_module_class(lambda module, batch, ctx: module.weight * batch.mean())):
        validation_step = fg.Module.validation_step

    result = fg.Engine(steps=1).fit(Bare, numbers([1, 3]))
    assert float(result.module.weight) == -2
    assert fg.Engine().evaluate(result, numbers([1, 3])) == {"loss": -4}


def test_nested_metrics_have_names_with_slashes_B9() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        metrics = {"layers": {"first": {"mean": batch.mean()}, "second": batch.sum()}}
        return fg.Output(module.weight, metrics=metrics)

    class Nested(build_module_class(body)):
        validation_step = fg.Module.validation_step

    class NestedPlugin:
        plugin_name = "nested"

        @fg.hookimpl
        def step_metrics(self, batch: Any) -> Any:
            return {"batch": {"max": batch.max()}}

    result = fg.Engine(steps=1, plugins=[NestedPlugin()]).fit(Nested, numbers([1, 3]))
    expected = {"layers/first/mean": 2, "layers/second": 4}
    assert expected.items() <= result.metrics["train"].items()
    assert result.metrics["train"]["nested/batch/max"] == 3
    assert expected.items() <= fg.Engine().evaluate(result, numbers([1, 3])).items()

    def clash(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(module.weight, metrics={"a": {"b": batch.sum()}, "a/b": batch.sum()})

    with pytest.raises(ModelError, match="'a/b' appears twice in nested dictionaries"):
        fg.Engine(steps=1).fit(build_module_class(clash), numbers([1, 3]))


def test_losses_of_one_name_add_up_where_asked() -> None:
    """The loss is (0 + 1) + (0 + 2) at first, and its gradient 2."""

    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        for value in (1, 2):
            ctx.add_loss("penalty", module.weight + value, accumulate=True)
        return fg.Output()

    result = fg.Engine(steps=1, log_every=1).fit(build_module_class(body), numbers([0]))
    assert result.metrics["train"]["penalty"] == 3
    assert float(result.module.weight) == -2


def test_a_step_without_any_loss_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"Made\.training_step returned no loss: .*ctx\.add_loss"):
        fg.Engine(steps=1).fit(
            build_module_class(lambda module, batch, ctx: fg.Output()), numbers([0])
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda module, batch, ctx: {"loss": module.weight}, "returned dict: return fg.Output"),
        (
            lambda module, batch, ctx: fg.Output(module.weight, losses={"loss": module.weight}),
            r"'loss' comes twice in Made\.training_step",
        ),
        (
            lambda module, batch, ctx: (
                ctx.add_loss("a", module.weight),
                ctx.add_loss("a", module.weight),
            ),
            "'a' was added twice",
        ),
        (
            lambda module, batch, ctx: ctx.add_loss(3, module.weight),
            r"add_loss\(3, .*pass a name and an array",
        ),
        (
            lambda module, batch, ctx: fg.Output(module.weight, metrics={"each": batch}),
            r"metric 'each' is an array of shape \(2,\)",
        ),
        (
            lambda module, batch, ctx: fg.Output(
                module.weight, metrics={"all": Kept(batch > 0, batch)}
            ),
            "'all' is a CollectingMetric, which keeps every example",
        ),
    ],
)
def test_invalid_results_of_a_step_are_errors(body: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fg.Engine(steps=1).fit(build_module_class(body), numbers([0, 0]))


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda batch: "x", "'extra' .*is 'x': a loss is one floating-point number"),
        (
            lambda batch: jnp.int32(1),
            r"'extra' .*is int32\[\]: a loss is one floating-point number",
        ),
    ],
)
def test_invalid_loss_terms_of_a_plugin_are_errors(term: Any, message: str) -> None:
    class Extra:
        @fg.hookimpl
        def loss_terms(self, batch: Any) -> Any:
            return {"extra": term(batch)}

    with pytest.raises(ModelError, match=message):
        fg.Engine(steps=1, plugins=[Extra()]).fit(Counting, numbers([0, 0]))


def test_an_error_in_a_step_notes_the_batch() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        raise KeyError("image")

    with pytest.raises(KeyError) as caught:
        fg.Engine(steps=1).fit(
            build_module_class(body),
            [{"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int32)}],
        )
    assert any("x float32[2,3], y int32[2]" in note for note in caught.value.__notes__)


def test_an_error_in_a_step_notes_the_step() -> None:
    good, wide = np.ones((1, 3), np.float32), np.ones((1, 4), np.float32)
    engine = fg.Engine(steps=4)
    module = build_module_class(
        lambda module, batch, ctx: fg.Output(module.weight + (batch @ jnp.ones(3)).sum())
    )
    state, _ = engine.step(engine.init_state(module, [good]), good)
    for wrong, step in (
        (lambda: engine.fit(module, [good, good, wide]), 3),
        (lambda: engine.step(state, wide), 2),
    ):
        with pytest.raises(TypeError) as caught:
            wrong()
        assert (
            f"while tracing training step {step} on a batch of float32[1,4]"
            in caught.value.__notes__
        )


INSIDE: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "vmap": lambda f, x: jax.vmap(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, element: (carry, f(element)), 0, x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit": lambda f, x: jax.jit(f)(x),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_adding_a_loss_inside_an_inner_transformation_is_an_error(inside: str) -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        def mapped(x: Any) -> Any:
            ctx.add_loss("hidden size", jnp.sum(x * module.weight))
            return x

        INSIDE[inside](mapped, batch)
        return fg.Output(module.weight)

    with pytest.raises(ModelError, match="inside vmap, scan, checkpoint, cond") as caught:
        fg.Engine(steps=1).fit(build_module_class(body), numbers([0, 0]))
    assert (
        "hidden, hidden_size = jax.vmap(f)(x)\n    ctx.add_loss('hidden size', hidden_size)"
        in str(caught.value)
    )


def test_the_remedy_that_the_error_names_works() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        hidden, hidden_size = jax.vmap(lambda x: (x * module.weight, x + module.weight))(batch)
        ctx.add_loss("hidden size", hidden_size.mean())
        return fg.Output(0 * hidden.sum())

    result = fg.Engine(steps=2).fit(build_module_class(body), numbers([1, 3]))
    assert float(result.module.weight) == -2 and result.metrics["train"]["hidden size"] == 1.5


@pytest.mark.full
def test_a_loss_of_each_example_of_a_padded_batch_is_no_mean_over_the_padding() -> None:
    batches = fg.ArrayData(np.asarray([2, 4, 6], np.float32), 2, remainder="pad")

    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("all", module.weight)
        ctx.add_loss(
            "each", fg.metrics.Mean.from_values(batch, ctx.mask).compute() if careful else batch
        )
        return fg.Output()

    careful = False
    with pytest.raises(
        ModelError, match=r"'each' has 2 values of a padded batch.*Mean\.from_values"
    ):
        fg.Engine(steps=2).fit(build_module_class(body), batches)
    careful = True
    assert fg.Engine(steps=2, log_every=1).fit(build_module_class(body), batches).history[
        "train/each"
    ].tolist() == [3, 6]


def test_a_loss_added_in_a_fresh_pass_outside_of_the_forward_pass() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.fork("again").add_loss("a", module.weight)
        return fg.Output(module.weight)

    with pytest.raises(ModelError, match=r"add_loss\('a'\) has no effect"):
        fg.Engine(steps=1).fit(build_module_class(body), numbers([0]))


def test_a_loss_is_added_under_contexts_that_trace_nothing() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        with (
            fg.training_mode(False),
            jax.named_scope("part"),
            jax.default_matmul_precision("float32"),
        ):
            ctx.add_loss("a", module.weight)
        return fg.Output()

    assert float(fg.Engine(steps=2).fit(build_module_class(body), numbers([0])).module.weight) == -2


def test_a_value_that_leaked_from_a_vmap_is_an_error() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        leaked: list[Any] = []
        jax.vmap(lambda x: leaked.append(x * module.weight) or x)(batch)
        ctx.add_loss("leaked", leaked[0])
        return fg.Output(module.weight)

    with pytest.raises(ModelError, match=r"'leaked'.*Return"):
        fg.Engine(steps=1).fit(build_module_class(body), numbers([0, 0]))


def test_losses_of_an_evaluation_are_metrics() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("size", batch.mean())
        return fg.Output(module.weight)

    class Evaluated(build_module_class(body)):
        validation_step = fg.Module.validation_step

    assert fg.Engine().evaluate(init_module(Evaluated), numbers([1, 2], [6])) == {
        "loss": 3,
        "size": 3,
    }


# --- what is due ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_due_is_true_at_the_steps_of_an_action_and_no_others(steps_per_execution: int) -> None:
    class Telling:
        @fg.hookimpl
        def init_plugin_state(self) -> Any:
            return {"count": jnp.zeros(3, jnp.int32)}

        @fg.hookimpl
        def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
            due = [ctx.is_due(name) for name in ("act.act", "act:other.act", "log")]
            return module, {
                "count": (
                    plugin_state["count"] * 10 ** jnp.stack(due) + jnp.stack(due) * (ctx.step + 1)
                )
            }

    actions = [
        Act(fg.Every(3), lambda run: None),
        Act(fg.At(2, 7), lambda run: None, instance="other"),
    ]
    engine = fg.Engine(
        steps=8, steps_per_execution=steps_per_execution, log_every=4, plugins=[*actions, Telling()]
    )
    result = engine.fit(Counting, numbers([0], [0], [0]))
    assert result.state.plugin_states["telling"]["count"].tolist() == [36, 27, 48]


def test_is_due_of_an_unknown_action_is_an_error() -> None:
    def body(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.is_due("lag")
        return fg.Output(module.weight)

    with pytest.raises(
        PluginError, match=r"no scheduled action is called 'lag'\. Did you mean 'log'"
    ):
        fg.Engine(steps=1).fit(build_module_class(body), numbers([0]))


# --- annotations ----------------------------------------------------------------------------------


class Images(TypedDict):
    image: Float[Array, "batch 2 2"]
    label: Int[Array, "batch"]


class Pair(NamedTuple):
    x: Float[Array, "batch 3"]
    y: Float[Array, "batch"]


class OfImages(Counting):
    def training_step(self, batch: Images, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + batch["image"].mean())


class OfPairs(Counting):
    def training_step(self, batch: Pair, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + batch.x.mean())


class OfArrays(Counting):
    def training_step(self, batch: Float[Array, "batch 3"], ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + batch.mean())


def images(
    image: tuple[int, ...] = (4, 2, 2), label: Any = np.int32, labels: int = 4
) -> dict[str, np.ndarray]:
    return {"image": np.zeros(image, np.float32), "label": np.zeros(labels, label)}


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (OfImages, images()),
        (OfPairs, Pair(jnp.zeros((2, 3)), jnp.zeros(2))),
        (OfArrays, np.zeros((2, 3))),
    ],
)
def test_batches_that_fit_their_annotation(model: Any, batch: Any) -> None:
    assert float(fg.Engine(steps=1).fit(model, [batch]).module.weight) == -1


@pytest.mark.parametrize(
    ("model", "batch", "leaf", "structure"),
    [
        (
            OfImages,
            images(image=(4, 2, 3)),
            r'batch\["image"\] is float32\[4,2,3\]',
            "image float32[4,2,3], label int32[4]",
        ),
        (
            OfImages,
            images(label=np.float32),
            r'batch\["label"\] is float32\[4\]',
            "label float32[4]",
        ),
        (
            OfImages,
            images(labels=3),
            r'batch\["label"\] is int32\[3\].*"batch"',
            "image float32[4,2,2], label int32[3]",
        ),
        (
            OfImages,
            {"image": images()["image"]},
            r'batch\["label"\] is missing',
            "image float32[4,2,2]",
        ),
        (
            OfPairs,
            Pair(jnp.zeros((2, 3)), jnp.zeros(3)),
            r"batch\.y is float32\[3\]",
            "x float32[2,3], y float32[3]",
        ),
        (OfArrays, np.zeros((2, 4), np.float32), r"batch is float32\[2,4\]", "float32[2,4]"),
    ],
)
def test_a_batch_unlike_its_annotation_is_an_error_naming_the_leaf(
    model: Any, batch: Any, leaf: str, structure: str
) -> None:
    with pytest.raises(DataError, match=leaf) as caught:
        fg.Engine(steps=1).fit(model, [batch])
    assert f"{model.__name__}.training_step expects" in str(caught.value)
    assert structure in str(caught.value).partition("expects")[2]


class Optional(TypedDict):
    x: Float[Array, "batch 5"]
    y: NotRequired[Float[Array, "batch"]]


WRONG = np.ones((4, 3), np.float32)


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("hint", "right", "wrong", "leaf"),
    [
        (
            tuple[Float[Array, "b 5"], Int[Array, "b"]],
            (np.ones((4, 5)), np.ones(4, int)),
            (WRONG, WRONG),
            r"batch\[0\]",
        ),
        (list[Float[Array, "b 5"]], [np.ones((4, 5))] * 2, [np.ones((4, 5)), WRONG], r"batch\[1\]"),
        (dict[str, Float[Array, "b 5"]], {"x": np.ones((4, 5))}, {"x": WRONG}, r'batch\["x"\]'),
        (Float[Array, "b 5"] | None, np.ones((4, 5)), WRONG, "batch"),  # pyright: ignore
        (Float[Array, "b"] | Float[Array, "b 5"], np.ones((4, 5)), WRONG, "batch"),
        (Optional, {"x": np.ones((4, 5))}, {"x": np.ones((4, 5)), "y": WRONG}, r'batch\["y"\]'),
    ],
)
def test_any_structure_of_arrays_is_checked_wherever_it_goes(
    hint: Any, right: Any, wrong: Any, leaf: str
) -> None:
    class Annotated(Counting):
        def training_step(self, data: Any, ctx: fg.Context) -> fg.Output:  # pyright: ignore
            return fg.Output(self.weight, preds=jax.tree.leaves(data)[0])

        training_step.__annotations__["data"] = hint
        validation_step = fg.Module.validation_step

    class Predicting(Counting):
        def predict_step(self, data: Any, ctx: fg.Context) -> Any:  # pyright: ignore
            return jax.tree.leaves(data)[0]

        predict_step.__annotations__["data"] = hint

    engine = fg.Engine(steps=1)
    for call, model in (
        (engine.fit, Annotated),
        (engine.evaluate, Annotated),
        (engine.predict, Annotated),
        (engine.predict, Predicting),
    ):
        call(init_module(model), [right])
        with pytest.raises(DataError, match=rf"{leaf} is float32\[4,3\]; .* expects Float"):
            call(init_module(model), [wrong])


Two = tuple[Float[Array, "b 3"], Float[Array, "b 3"]]


@pytest.mark.parametrize(
    ("hint", "batch", "expected"),
    [
        (
            Images,
            (WRONG, WRONG),
            r"batch is .*float32\[4,3\].* expects a dictionary\. The batch: \[0\] float32",
        ),
        (Two, (WRONG,) * 3, "expects a tuple of 2"),
        (Two, (WRONG,), "expects a tuple of 2"),
        (Two, {"x": WRONG}, "batch is x float32.* expects a tuple of 2"),
        (dict[str, Two], {"x": WRONG}, r'batch\["x"\] is float32\[4,3\].* expects a tuple of 2'),
        (list[Float[Array, "b 3"]], WRONG, "expects a list"),
        (Two | dict[str, Float[Array, "b 5"]], {"x": WRONG}, "expects"),
    ],
)
def test_a_batch_of_another_structure_than_annotated_is_an_error(
    hint: Any, batch: Any, expected: str
) -> None:
    class Annotated(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight)

        training_step.__annotations__["batch"] = hint

    with pytest.raises(DataError, match=expected):
        fg.Engine(steps=1).init_state(init_module(Annotated), [batch])


@pytest.mark.parametrize(
    "hint", [tuple[Any, Any], dict[str, Any], tuple[Float[Array, "b 3"], ...], Two | Any]
)
def test_unions_and_optional_annotations_accept_a_batch(hint: Any) -> None:
    class Annotated(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight)

        training_step.__annotations__["batch"] = hint

    fg.Engine(steps=1).init_state(init_module(Annotated), [(WRONG,) * 3])


def test_annotations_are_checked_under_the_names_of_strings_too() -> None:
    class Quoted(Counting):
        def training_step(self, batch: "Images", ctx: "fg.Context") -> "fg.Output":
            return fg.Output(self.weight)

    with pytest.raises(DataError, match="image"):
        fg.Engine(steps=1).fit(Quoted, [images(image=(4, 3))])


def test_an_evaluation_s_batches_are_checked_against_its_own_step() -> None:
    class Both(OfImages):
        def validation_step(self, batch: Float[Array, "batch 3"], ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"mean": batch.mean()})

    assert fg.Engine().evaluate(init_module(Both), [np.ones((2, 3), np.float32)]) == {"mean": 1}
    with pytest.raises(DataError, match=r"Both\.validation_step expects"):
        fg.Engine().evaluate(init_module(Both), [np.ones((2, 4), np.float32)])


def test_invalid_arguments_of_the_engine_are_errors() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps_per_execution": 0}, "steps_per_execution is 0"),
        ({"max_compilations": 0}, "max_compilations is 0"),
        ({"limit_train_batches": -1}, "limit_train_batches is -1"),
        ({"fast_dev_run": 0}, "fast_dev_run is 0"),
        ({"steps": True}, "steps is True"),
        ({"log_every": 0}, "n is 0"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            fg.Engine(**arguments)
