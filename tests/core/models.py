"""Small models, data and plugins that the tests of the core share, and what compares their
results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Kept(fg.metrics.CollectingMetric):
    """The examples themselves, as a tree of arrays."""

    values: Any

    def compute(self) -> Any:
        return jax.tree.map(lambda leaf: leaf[self.mask], self.values)


class Counting(fg.Module):
    """One weight that every update makes smaller by exactly 1, whatever the batch: it counts
    updates."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            self.weight * 1.0,
            metrics={"weight": fg.metrics.LastValue.from_values(self.weight)},
            preds=batch,
        )

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"updates": -self.weight}, preds=batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Linear(fg.Module):
    """Least squares with three inputs, by plain gradient descent."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = batch["x"] @ self.weight
        error = (preds - batch["y"]) ** 2
        return fg.Output(
            error.mean(),
            metrics={"error": fg.metrics.Mean.from_values(error, ctx.mask)},
            preds=preds,
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Classifier(fg.Module):
    """A small multilayer perceptron with Adam."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.mlp = eqx.nn.MLP(4, 3, 8, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self.mlp)(batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"], ctx.mask)
        return fg.Output(
            jnp.mean(loss, where=ctx.mask), metrics={"accuracy": accuracy}, preds=logits
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@dataclass(frozen=True, eq=False)
class Act:
    """A plugin with one scheduled action."""

    trigger: fg.Trigger | int
    action: Callable[[fg.Run], Any] | None
    stage: Any = "act"
    instance: str | None = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("act", self.trigger, self.action, self.stage)]


class Evaluating:
    """A plugin that runs its evaluations at a trigger and keeps what it is told of them."""

    def __init__(self, *specs: fg.Evaluation, trigger: fg.Trigger | int) -> None:
        self.specs, self.trigger = specs, trigger
        self.results: list[tuple[int, str, dict[str, Any]]] = []

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return list(self.specs)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        def evaluate(run: fg.Run) -> None:
            for spec in self.specs:
                assert run.evaluate(spec.name) == run.metrics[spec.name]

        return [fg.ScheduledAction("evaluate", self.trigger, evaluate, "evaluate")]

    @fg.hookimpl
    def on_evaluate_end(self, run: fg.Run, source: str, metrics: dict[str, Any]) -> None:
        self.results.append((run.step, source, metrics))


@dataclass(frozen=True, eq=False)
class Events:
    """A plugin that keeps what it is told of compilations, epochs, exceptions and the end."""

    compiled: list[Any] = field(default_factory=list)
    exceptions: list[BaseException] = field(default_factory=list)
    results: list[fg.FitResult] = field(default_factory=list)
    epochs: list[tuple[int, int, fg.StepRange]] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(self, name: str, batch_spec: Any, compiled: Any) -> None:
        self.compiled.append((name, batch_spec, compiled))

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run, epoch: int) -> None:
        self.epochs.append((epoch, run.step, run.step_range))

    @fg.hookimpl
    def on_exception(self, exception: BaseException) -> None:
        self.exceptions.append(exception)

    @fg.hookimpl
    def on_fit_end(self, result: fg.FitResult) -> None:
        self.results.append(result)


def init_module(model: Callable[..., Any]) -> Any:
    """The module that a callable makes."""
    return model(key=jax.random.key(0))


def regression(examples: int = 20, batch_size: int = 8, **options: Any) -> fg.ArrayData:
    """Inputs `x` (examples, 3) and `y`, linear in them but for some noise."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(examples, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * generator.normal(size=examples)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": y}, batch_size, **options)


def classes(examples: int = 50, batch_size: int = 16, **options: Any) -> fg.ArrayData:
    """Inputs `x` (examples, 4) with a label of 0, 1 or 2."""
    x = np.random.default_rng(2).normal(size=(examples, 4)).astype(np.float32)
    return fg.ArrayData(
        {"x": x, "label": ((x[:, 0] > 0) + (x[:, 1] > 0)).astype(np.int32)}, batch_size, **options
    )


def numbers(*batches: Sequence[float]) -> list[np.ndarray]:
    """A list of batches of float32 numbers."""
    return [np.asarray(batch, np.float32) for batch in batches]


@dataclass(frozen=True, eq=False)
class Epochs:
    """A source without a length whose epochs differ: batches of one zero, as many as `lengths` says
    for each."""

    lengths: tuple[int, ...]
    begun: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[np.ndarray]:
        self.begun.append(len(self.begun))
        return iter([np.zeros(1, np.float32)] * self.lengths[len(self.begun) - 1])


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): np.asarray(_plain(leaf)) for path, leaf in leaves}


def assert_same_bits(a: Any, b: Any) -> None:
    """The trees have the same arrays, bit for bit; NaN equals NaN, and 0 does not equal -0."""
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys() and first
    for path, array in first.items():
        assert (array.dtype, array.shape) == (second[path].dtype, second[path].shape), path
        assert array.tobytes() == second[path].tobytes(), f"{path}: {array} is not {second[path]}"


def assert_close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    """The trees have the same arrays but for rounding."""
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys() and first
    for path, array in first.items():
        np.testing.assert_allclose(
            array, second[path], rtol=tolerance, atol=tolerance, err_msg=path
        )


def trained(state: fg.TrainState) -> Any:
    """What training changed, without the metric window, which `step` never closes."""
    return state.module, state.model_state, state.opt_state, state.step, state.key


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
