"""The operation from which a step is not finite is named, and no other one."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer, Phase
from fulgurite_precision import Dynamic, Precision
from fulgurite_replay import Culprit, Examination, Operand, examine_step
from fulgurite_replay.culprits import find_example

X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


class Net(fg.Module):
    """Three weights and a table, with a loss of its own."""

    w: jax.Array
    table: jax.Array
    compute: Callable[..., Any] = eqx.field(static=True)
    optimizer: Any = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.compute(self, batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer


def examine(
    compute: Callable[..., Any],
    batch: Any,
    *plugins: Any,
    w: Any = (1.0, 1.0, 1.0),
    optimizer: Any = None,
    checks_indices: bool = False,
    **settings: Any,
) -> Examination:
    """Execute the first step of a net whose loss is `compute(net, batch)`."""
    engine = fg.Engine(steps=1, autoload=False, plugins=plugins, **settings)
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    net = Net(jnp.float32(w), jnp.ones((4, 2)), compute, optimizer)
    state = engine.init_state(net, [batch])
    return examine_step(engine, state, batch, checks_indices=checks_indices)


def find(compute: Callable[..., Any], batch: Any, *plugins: Any, **settings: Any) -> Culprit:
    culprit = examine(compute, batch, *plugins, **settings).culprit
    assert culprit is not None
    return culprit


def assert_is_in(function: Callable[..., Any], culprit: Culprit) -> None:
    """Check that the line of the user is one of a function."""
    frame = culprit.place.user_frame
    assert frame is not None
    lines, first = inspect.getsourcelines(function)
    assert frame.file == __file__ and first <= frame.line < first + len(lines)


@pytest.mark.full
def test_overflow_in_the_loss_is_named_and_not_what_it_becomes() -> None:
    def compute(net: Net, batch: Any) -> Any:
        powers = jnp.exp(100 * net.w)  # infinite in float32
        return jnp.log(powers / powers.sum()).sum()

    culprit = find(compute, {"x": X})
    assert (culprit.kind, culprit.operation) == ("inf", "exp")
    assert culprit.place.part == "forward pass"
    assert culprit.inputs == (Operand(None, "float32", (3,), 100.0, 100.0),)
    assert_is_in(compute, culprit)


@pytest.mark.full
def test_gradient_of_where_and_sqrt_at_zero_is_the_division_in_the_backward_pass() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jnp.where(net.w > 0, jnp.sqrt(net.w), 0.0).sum()

    examination = examine(compute, {"x": X}, w=(0.0, 1.0, 4.0))
    culprit = examination.culprit
    assert culprit is not None and examination.term == "the gradient of w"
    assert (culprit.kind, culprit.operation) == ("inf", "div")
    assert culprit.place.part == "backward pass"
    # 0.5 / sqrt(w), which is 0 in the first place.
    assert [(operand.low, operand.high) for operand in culprit.inputs] == [(0.5, 0.5), (0.0, 2.0)]
    assert_is_in(compute, culprit)


@pytest.mark.full
def test_infinities_and_nan_that_nothing_uses_are_not_reported() -> None:
    def compute(net: Net, batch: Any) -> Any:
        masked = jnp.where(jnp.array([True, False, True]), net.w, -jnp.inf)
        safe = jnp.where(net.w > 0, net.w, 1.0)
        unused = jax.lax.stop_gradient(jnp.where(net.w < 9, 1.0, jnp.log(-net.w)))
        return jax.nn.softmax(masked)[0] + jnp.where(net.w > 0, jnp.sqrt(safe), 0.0) @ unused

    assert examine(compute, {"x": X}, w=(0.0, 1.0, 4.0)).is_clean


@pytest.mark.full
def test_attention_whose_mask_is_minus_infinity_is_not_reported() -> None:
    def attend_by_hand(x: Any) -> Any:
        logits = x @ x.T + jnp.where(jnp.tril(jnp.ones((3, 3), bool)), 0.0, -jnp.inf)
        return jax.nn.softmax(logits) @ x

    def compute(net: Net, batch: Any) -> Any:
        x = net.w[:, None] * jnp.ones((3, 4))
        causal = jnp.tril(jnp.ones((3, 3), bool))
        heads = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
        by_jax = jax.nn.dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return attend_by_hand(x).sum() + heads(x, x, x, mask=causal).sum() + by_jax.sum()

    assert examine(compute, {"x": X}).is_clean


@pytest.mark.full
def test_a_row_that_is_masked_as_a_whole_is_reported_where_nan_is_made() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jax.nn.softmax(jnp.where(batch["x"] > 3, net.w, -jnp.inf), axis=1).sum()

    culprit = find(compute, {"x": X})
    assert (culprit.kind, culprit.operation) == ("nan", "sub")
    assert culprit.example == (0, 2)
    assert_is_in(compute, culprit)


@pytest.mark.variants("full")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_operation_that_the_loss_is_computed_with_is_of_the_forward_pass(wrap: Any) -> None:
    def compute(net: Net, batch: Any) -> Any:
        @wrap
        def attend(w: Any) -> Any:
            is_seen = batch["x"] > 3  # nothing in the first row
            weights = jax.nn.softmax(w + jnp.where(is_seen, 0.0, -jnp.inf), axis=1)
            return jnp.where(is_seen, weights, 0.0).sum()

        return attend(net.w)

    # The loss is 1, without the NaN of the first row, which the gradient is computed from.
    examination = examine(compute, {"x": X})
    culprit = examination.culprit
    assert culprit is not None and examination.term == "the gradient of w"
    assert (culprit.operation, culprit.kind, culprit.place.part) == ("sub", "nan", "forward pass")
    assert culprit.example == (0, 2)
    assert_is_in(compute, culprit)


@pytest.mark.full
def test_factor_of_a_derivative_in_a_loop_is_of_the_backward_pass() -> None:
    def compute(net: Net, batch: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            return carry + jnp.where(w > 0, jnp.sqrt(w), 0.0), None

        return jax.lax.scan(body, 0.0, net.w)[0]

    culprit = find(compute, {"x": X}, w=(4.0, 0.0, 1.0))
    assert (culprit.operation, culprit.place.part) == ("div", "backward pass")
    assert culprit.place.loops == ("scan iteration 1 of 3",)


@pytest.mark.full
def test_iteration_of_a_scan_is_named() -> None:
    def compute(net: Net, batch: Any) -> Any:
        def body(carry: Any, index: Any) -> Any:
            return jnp.sqrt(carry - index), carry

        return jax.lax.scan(body, 4 * net.w[0], jnp.arange(5.0))[0]

    culprit = find(compute, {"x": X})
    # sqrt(4) = 2, sqrt(2 - 1) = 1, sqrt(1 - 2)
    assert culprit.place.loops == ("scan iteration 2 of 5",)
    assert culprit.operation == "sqrt" and culprit.inputs[0].low == -1
    assert_is_in(compute, culprit)


@pytest.mark.full
def test_loops_conditions_and_checkpoints_are_taken_apart() -> None:
    @jax.checkpoint
    def shrink(value: Any) -> Any:
        return jax.lax.while_loop(lambda v: v > 0.3, lambda v: v / 2, value)

    def compute(net: Net, batch: Any) -> Any:
        value = jax.lax.stop_gradient(shrink(jax.lax.stop_gradient(net.w[0])))  # 0.25
        chosen = jax.lax.cond(value < 0.3, lambda v: jnp.log(v - v), lambda v: v, value)
        return net.w.sum() + chosen

    culprit = find(compute, {"x": X})
    assert (culprit.operation, culprit.inputs[0].high) == ("log", 0.0)
    assert_is_in(compute, culprit)


@pytest.mark.full
def test_optimizer_is_named_and_not_the_loss() -> None:
    examination = examine(
        lambda net, batch: jnp.sum(net.w * 0), {"x": X}, optimizer=optax.adam(1e-3, eps=0.0)
    )
    culprit = examination.culprit
    assert culprit is not None and examination.term == "the update of w"
    assert (culprit.operation, culprit.place.part) == ("div", "optimizer")
    frame = culprit.place.library_frame
    assert culprit.place.user_frame is None and frame is not None and "optax" in frame.file


def test_nan_in_the_data_is_named_with_its_example() -> None:
    batch = {"x": np.array([[1, 2, 3], [4, np.nan, 6]], np.float32)}
    culprit = find(lambda net, batch: (net.w * batch["x"]).sum(), batch)
    assert culprit.is_given and culprit.example == (1, 2)
    assert culprit.output == Operand("batch.x", "float32", (2, 3), 1.0, 6.0, num_nan=1)


@pytest.mark.full
def test_index_outside_of_an_embedding_is_found_where_indices_are_looked_at() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return net.table[batch["index"]].sum()

    batch = {"index": np.array([0, 1, 9], np.int32)}
    assert examine(compute, batch).is_clean
    fault, backward = examine(compute, batch, checks_indices=True).index_faults
    assert (fault.index, fault.axis, fault.shape, fault.label) == (9, 0, (4, 2), "module.table")
    assert fault.example == (2, 3)
    assert (fault.operation, backward.operation) == ("gather", "scatter-add")
    assert examine(compute, {"index": np.array([0, 3, -4], np.int32)}, checks_indices=True).is_clean


class Scaled(eqx.Module):
    """Divides by a number, and is called by a layer above."""

    scale: jax.Array

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        return x / self.scale


class Stack(fg.Module):
    """Layers in a list, of which one divides by zero in the forward or in the backward pass."""

    layers: list[Any]
    head: eqx.nn.Linear
    is_checkpointed: bool = eqx.field(static=True, default=False)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def apply(x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

        apply = jax.checkpoint(apply) if self.is_checkpointed else apply
        return fg.Output(jax.vmap(apply)(batch["x"]).sum())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.variants("full")
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    ("layer", "path", "part", "operation"),
    [
        (Scaled(jnp.zeros(())), "layers[1]", "forward pass", "div"),
        (eqx.nn.Sequential([Scaled(jnp.zeros(()))]), "layers[1].layers[0]", "forward pass", "div"),
        (eqx.nn.Lambda(lambda x: jnp.sqrt(0 * x)), "layers[1]", "backward pass", "div"),
    ],
)
def test_path_of_the_layer_is_named(
    layer: Any, path: str, part: str, operation: str, is_checkpointed: bool
) -> None:
    layers = [eqx.nn.Linear(3, 3, key=jax.random.key(0)), layer]
    stack = Stack(layers, eqx.nn.Linear(3, 1, key=jax.random.key(1)), is_checkpointed)
    engine = fg.Engine(steps=1, autoload=False)
    examination = examine_step(engine, engine.init_state(stack, [{"x": X}]), {"x": X})
    culprit = examination.culprit
    assert culprit is not None
    assert (culprit.place.layer, culprit.place.part) == (path, part)
    assert culprit.operation == operation
    assert f"  in the layer {path}\n" in "\n".join(examination.describe())


@pytest.mark.full
def test_index_outside_of_an_embedding_layer_is_found_in_the_line_that_calls_it() -> None:
    def compute(net: Net, batch: Any) -> Any:
        embedding = eqx.nn.Embedding(weight=net.table)
        return jax.vmap(embedding)(batch["index"]).sum() + net.w.sum()

    batch = {"index": np.array([0, 9], np.int32)}
    fault = examine(compute, batch, checks_indices=True).index_faults[0]
    assert (fault.index, fault.shape, fault.label) == (9, (4, 2), "module.table")
    assert fault.example == (1, 2)
    frame = fault.place.user_frame
    lines, first = inspect.getsourcelines(compute)
    assert frame is not None and frame.file == __file__
    assert frame.line == first + next(
        i for i, text in enumerate(lines) if "vmap(embedding)" in text
    )


@pytest.mark.full
def test_label_outside_of_the_classes_is_found() -> None:
    def compute(net: Net, batch: Any) -> Any:
        logits = net.w * batch["x"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    culprit = find(compute, {"x": X, "label": np.array([2, 7], np.int32)})
    assert (culprit.operation, culprit.example) == ("gather", (1, 2))
    assert culprit.inputs[1].high == 7
    assert_is_in(compute, culprit)


class LogPenalty:
    """Adds a loss term that is infinite where a weight is 1."""

    @fg.hookimpl
    def loss_terms(self, module: Any) -> Any:
        return {"penalty": jnp.log(module.w - 1).sum()}


class Normalize:
    """Divides by zero after the update."""

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        return eqx.tree_at(lambda module: module.w, module, module.w / (0 * module.table.sum())), (
            plugin_state
        )


@pytest.mark.parametrize(
    ("plugin", "operation", "part"),
    [
        (LogPenalty(), "log", "plugin 'log_penalty', hook loss_terms"),
        (Normalize(), "div", "plugin 'normalize', hook after_update"),
    ],
)
def test_plugin_and_hook_are_named(plugin: Any, operation: str, part: str) -> None:
    culprit = find(lambda net, batch: net.w.sum() + net.table.sum(), {"x": X}, plugin)
    assert (culprit.operation, culprit.place.part) == (operation, part)
    frame = culprit.place.user_frame
    assert frame is not None and frame.function.startswith(type(plugin).__name__)


@pytest.mark.full
def test_microbatch_of_an_accumulation_is_named() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jnp.mean(jnp.sqrt(net.w * batch["x"]).sum(1)) + net.table.sum()

    x = np.ones((8, 3), np.float32)
    x[5] = -1
    culprit = find(compute, {"x": x}, GradientAccumulation(4))
    assert culprit.operation == "sqrt"
    # Of four microbatches of two examples each it is the second of number 1 or of number 2.
    assert culprit.place.loops[-1] in ("scan iteration 1 of 4", "scan iteration 2 of 4")
    assert culprit.example == (1, 2)
    assert_is_in(compute, culprit)


def test_phase_of_a_gan_is_named() -> None:
    class Pair(fg.Module):
        generator: jax.Array
        critic: jax.Array

        def losses(self, batch: Any, ctx: fg.Context) -> Any:
            return {
                "critic": lambda: jnp.sum(self.critic * batch["x"]),
                "generator": lambda: jnp.sum(jnp.log(self.generator - 1)),
            }

    phases = MultiOptimizer(
        critic=Phase(optax.sgd(0.1), "critic"), generator=Phase(optax.sgd(0.1), "generator")
    )
    engine = fg.Engine(steps=1, autoload=False, plugins=[phases])
    state = engine.init_state(Pair(jnp.ones(3), jnp.ones(3)), [{"x": X}])
    examination = examine_step(engine, state, {"x": X})
    assert examination.term == "the loss term 'generator/loss'"
    culprit = examination.culprit
    assert culprit is not None and culprit.operation == "log"
    assert_is_in(Pair.losses, culprit)


@pytest.mark.full
def test_overflow_of_float16_is_reported_and_an_expected_skip_is_not() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jnp.sum((net.w * batch["x"]) ** 2) * 1e3 + net.table.sum()

    batch = {"x": 30 * X}
    # (30 * 6) ** 2 * 1e3 is not a number of float16; scaled gradients of it are skipped.
    culprit = find(compute, batch, Precision("fp16", scale=Dynamic(initial=2.0)))
    assert culprit.kind == "inf" and culprit.output is not None
    assert culprit.output.dtype == "float16"
    small = {"x": np.array([[1, 2, 3]], np.float32)}

    def compute_scaled(net: Net, batch: Any) -> Any:
        return jnp.sum(net.w * batch["x"]) + net.table.sum()

    # The loss is 14 and the gradients 1 to 3: those times 2**15 are infinite in float16.
    scaled = Precision("fp16", scale=Dynamic(2.0**15))
    examination = examine(compute_scaled, small, scaled, on_nonfinite="skip")
    assert examination.is_clean and examination.is_expected_skip
    assert not examine(compute_scaled, small, scaled).is_clean


@pytest.mark.full
def test_overflow_of_bfloat16_is_named_with_its_dtype() -> None:
    def compute(net: Net, batch: Any) -> Any:
        large = (net.w * 1e20).astype(jnp.bfloat16)
        return jnp.sum(large * large).astype(jnp.float32)

    culprit = find(compute, {"x": X})
    assert (culprit.operation, culprit.kind) == ("mul", "inf")
    assert culprit.output is not None and culprit.output.dtype == "bfloat16"


def test_a_report_reads_as_sentences() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jnp.log(net.w * batch["x"] - 1).sum()

    text = "\n".join(examine(compute, {"x": X}).describe())
    start = "the loss is not finite\n  infinity made by log in the forward pass\n  at "
    assert text.startswith(f"{start}{__file__}:")
    assert "  input 0: float32[2, 3] in [0, 5]\n" in text
    assert text.endswith("the first example concerned has the index 0 of 2")


def test_the_example_is_that_of_the_nan_and_not_one_with_a_mask() -> None:
    scores = np.where(np.eye(3) > 0, np.ones((4, 3, 3)), -np.inf).astype(np.float32)
    assert find_example(scores, {0}) == (0, 4)
    scores[2] = np.nan
    assert find_example(scores, {0}) == (2, 4)
    assert find_example(scores, set()) is None
    assert find_example(np.ones((4, 3), np.float32), {0}) is None


def test_complex_elements_are_counted_and_found_as_wholes() -> None:
    array = np.ones((8, 3), np.complex64)
    array[5, 1] = complex(np.nan, np.nan)
    assert find_example(array, {0}) == (5, 8)
    array[6, 0] = complex(-7, np.inf)
    operand = Operand.describe(array)
    # Of the 22 other elements, 1 + 0j, and of -7 the parts are looked at.
    assert (operand.num_nan, operand.num_inf) == (1, 1)
    assert (operand.low, operand.high) == (-7.0, 1.0)

    def compute(net: Net, batch: Any) -> Any:
        return jnp.abs(1 / (batch["x"] * net.w.astype(jnp.complex64))).sum()

    x = np.ones((8, 3), np.float32)
    x[5] = 0
    culprit = find(compute, {"x": x})
    assert culprit.example == (5, 8) and culprit.output is not None
    assert culprit.output.num_nan == 3


def double_none(w: Any) -> Any:
    return jax.lax.fori_loop(0, 0, lambda _, value: 2 * value, w)


def stack_none(w: Any) -> Any:
    last, rows = jax.lax.scan(lambda value, x: (2 * value, value), w, jnp.zeros((0, 2)))
    return last + rows.sum()


def double_none_in_reverse(w: Any) -> Any:
    return jax.lax.scan(lambda value, _: (2 * value, None), w, length=0, reverse=True)[0]


@pytest.mark.parametrize("loop", [double_none, stack_none, double_none_in_reverse])
def test_loop_of_no_iterations_is_passed_through(loop: Callable[..., Any]) -> None:
    def compute(net: Net, batch: Any) -> Any:
        return (batch["x"] @ loop(net.w)).sum()

    def divide(net: Net, batch: Any) -> Any:
        return jax.jit(lambda w: (batch["x"] @ loop(w / 0)).sum())(net.w)

    assert examine(compute, {"x": X}, checks_indices=True).is_clean
    culprit = find(divide, {"x": X})
    assert (culprit.operation, culprit.kind) == ("div", "inf")
    assert_is_in(divide, culprit)


@pytest.mark.parametrize(
    "read",
    [
        lambda value: jax.lax.dynamic_slice(value, (), ()),
        lambda value: jax.lax.dynamic_update_slice(value, value, ()),
    ],
)
def test_slice_of_a_single_number_has_no_index(read: Callable[..., Any]) -> None:
    def compute(net: Net, batch: Any) -> Any:
        return read(net.w.sum())

    assert examine(compute, {"x": X}, checks_indices=True).is_clean


# Eight examples, of which one is bad, and a weight with as many rows.
EIGHT = np.ones((8, 3), np.float32)
EIGHT[5] = -1
ROWS = np.ones((8, 3), np.float32)


def convolve(w: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(x[:, None], w[:, None, :2], (1,), "VALID")


def map_examples(w: Any, x: Any) -> Any:
    return jax.lax.map(lambda row: row * 2, x)


def carry_examples(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, value: value + x, jnp.zeros_like(x))


def choose(w: Any, x: Any) -> Any:
    return jax.lax.cond(w[0, 0] > 0, lambda: x @ w.T, lambda: jnp.outer(x[:, 0], w[:, 0]))


@pytest.mark.parametrize(
    ("compute", "example"),
    [
        (lambda w, x: jax.vmap(lambda row: w @ row)(x), 5),
        (lambda w, x: w @ x.T, 5),
        (lambda w, x: jnp.einsum("ri,bi->rb", w, x)[..., None] * jnp.ones(8), 5),
        (lambda w, x: jnp.einsum("bi,bj->bij", x, w), 5),
        (lambda w, x: jnp.concatenate([w, x], axis=1), 5),
        (lambda w, x: x.reshape(8, 1, 3).transpose(2, 1, 0).squeeze(1), 5),
        (lambda w, x: jax.checkpoint(jnp.multiply)(w, x), 5),
        (lambda w, x: jnp.sum(x, axis=1, keepdims=True) * jnp.ones((8, 8)), 5),
        (lambda w, x: w[jnp.where(x[:, 0] < 0, 2, 1)] * jnp.where(x < 0, -1, 1), 5),
        (lambda w, x: jnp.take_along_axis(x, jnp.zeros((8, 1), int), axis=1), 5),
        (lambda w, x: jnp.ones((8, 3)).at[:, 0].set(1) * x[:, :1], 5),
        (convolve, 5),
        (map_examples, 5),
        (carry_examples, 5),
        (choose, 5),
        # Rows that are not of one example each, or whose order is another one.
        (lambda w, x: -w, None),
        (lambda w, x: x[::-1], None),
        (lambda w, x: jnp.sort(x, axis=0), None),
        (lambda w, x: x.T @ jnp.ones((8, 8)) - 9, None),
        (lambda w, x: jnp.broadcast_to(x.sum(0) - 9, (8, 3)), None),
        (lambda w, x: x.reshape(24), None),
        (lambda w, x: x.reshape(4, 2, 3), None),
        (lambda w, x: jnp.ones((8, 3)).at[0].set(x.sum(0) - 9), None),
        (lambda w, x: x[jnp.array([0, 5, 2, 3, 4, 1, 6, 7])], None),
    ],
)
def test_only_a_row_of_examples_is_told_as_an_example(
    compute: Callable[..., Any], example: int | None
) -> None:
    culprit = find(
        lambda net, batch: jnp.sqrt(compute(net.w, batch["x"])).sum(), {"x": EIGHT}, w=ROWS
    )
    assert culprit.operation == "sqrt"
    assert culprit.example == (None if example is None else (example, 8))


def test_row_of_a_weight_is_not_told_as_an_example() -> None:
    def compute(net: Net, batch: Any) -> Any:
        return jnp.mean(net.w[3].sum() * 1e6 * batch["x"])

    # It overflows in the optimizer, in the gradient, and is NaN from the beginning.
    good = {"x": np.ones((8, 3), np.float32)}
    culprit = find(compute, good, w=ROWS, optimizer=optax.sgd(1e38))
    assert (culprit.place.part, culprit.example) == ("optimizer", None)

    def multiply(net: Net, batch: Any) -> Any:
        return jnp.sum((1e38 * batch["x"]) @ net.w.T)  # the sum over eight examples is too large

    culprit = find(multiply, good, w=1e-30 * ROWS)
    assert (culprit.operation, culprit.place.part) == ("dot_general", "backward pass")
    assert culprit.output is not None and culprit.output.shape == (8, 3)
    assert culprit.example is None
    ruined = ROWS.copy()
    ruined[2, 0] = np.nan
    culprit = find(compute, good, w=ruined)
    assert culprit.is_given and culprit.example is None


def test_index_that_is_of_no_example_is_not_told_as_one() -> None:
    rows = jnp.array([0, 1, 2, 9, 3, 3, 3, 3])

    def compute(net: Net, batch: Any) -> Any:
        return (batch["x"] @ net.w[rows].T).sum() + net.w[batch["index"]].sum()

    batch = {"x": EIGHT, "index": np.array([0, 0, 0, 0, 0, 0, 9, 0], np.int32)}
    faults = examine(compute, batch, w=ROWS, checks_indices=True).index_faults
    examples = {fault.example for fault in faults if fault.operation == "gather"}
    assert examples == {None, (6, 8)}
