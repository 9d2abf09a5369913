"""What a user writes: a module with a training contract, or a task around any Equinox model."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.metrics import CollectingMetric, Mean, Metric, RunningMetric
from fulgurite.tree.typecheck import check_batch

if TYPE_CHECKING:
    from fulgurite.model.context import Context
    from fulgurite.training.update import OptimizerSpec


class Output(eqx.Module):
    """What a step returns.

    Attributes:
        loss: the scalar to minimise; after the engine's forward pass, the sum of all terms.
        metrics: by name: a `Metric` (merged over the window), a `RunningMetric` one (carried from
            step to step), or a scalar, taken as a mean over the batch's examples.
        losses: further terms by name, added to `loss`; the multi-optimizer plugin gives each its
            own optimizer. After the forward pass, all terms.
        preds: whatever the model predicted, for hooks and `predict`; not returned by the compiled
            step.
        model_state: the new `eqx.nn.State`, for models that carry one.
        media: what to show, by name: one of `fg.media`, or a function without arguments that is
            evaluated only where the result is shown. After the forward pass, zeros at all other
            steps.
        grads: the gradients as the optimizer receives them; set by the update rule.
        updates: what the optimizer returned; set by the update rule.
    """

    loss: Float[Array, ""] | None = None
    metrics: dict[str, Any] = eqx.field(default_factory=dict)
    losses: dict[str, Float[Array, ""]] = eqx.field(default_factory=dict)
    preds: PyTree = None
    model_state: eqx.nn.State | None = None
    media: dict[str, Any] = eqx.field(default_factory=dict)
    grads: PyTree = None
    updates: PyTree = None

    def replace(self, **changes: Any) -> "Output":
        """A copy with some fields changed."""
        return replace(self, **changes)


class Module(eqx.Module):
    """An `equinox.Module` that defines its own training.

    Its methods are pure and traced: `batch` holds arrays with a leading example axis, and
    everything else a step needs (keys, model state, mask) comes from `ctx`.
    """

    def training_step(self, batch: Any, ctx: "Context") -> Output:
        """The loss and the metrics of one batch. Required."""
        raise ModelError(
            f"{type(self).__name__} has no training_step(self, batch, ctx); define it, return fg.Output"
        )

    def validation_step(self, batch: Any, ctx: "Context") -> Output:
        """The metrics of one batch in evaluation, in inference mode. Unless overridden, this is
        `training_step`, or without one the results of the functions that a method `losses`
        returns."""
        if type(self).training_step is Module.training_step and callable(
            getattr(self, "losses", None)
        ):
            parts = [
                prefix_output(name, one()) for name, one in get_loss_fns(self, batch, ctx).items()
            ]
            losses, metrics, media = (
                {key: value for one in parts for key, value in getattr(one, kind).items()}
                for kind in ("losses", "metrics", "media")
            )
            preds = next((one.preds for one in parts if one.preds is not None), None)
            return Output(losses=losses, metrics=metrics, media=media, preds=preds)
        check_batch(type(self).training_step, batch)
        return self.training_step(batch, ctx)

    def predict_step(self, batch: Any, ctx: "Context") -> PyTree[Array]:
        """The predictions for one batch, each with a leading example axis;
        `validation_step(...).preds` by default."""
        check_batch(type(self).validation_step, batch)
        preds = self.validation_step(batch, ctx).preds
        if preds is None:
            raise ModelError(
                f"{type(self).__name__} cannot predict: define predict_step or return fg.Output(preds=)"
            )
        return preds

    def configure_optimizers(self) -> "optax.GradientTransformation | dict[str, OptimizerSpec]":
        """The optimizer. Called once, on a module of traced arrays: they have shapes and dtypes,
        and no values."""
        raise ModelError(
            f"{type(self).__name__} has no optimizer: define configure_optimizers(self) to return one"
        )


class Task(Module):
    """Any Equinox model with a loss: `fg.Task(model, loss=..., optimizer=optax.adam(1e-3))`.

    Attributes:
        model: the Equinox model.
        loss: `loss(preds, batch)` returns an array that begins with the example axis (averaged over
            the examples that are not masked) or a scalar. With a parameter `mask` it gets
            `ctx.mask` as well.
        optimizer: an `optax.GradientTransformation`.
        metrics: functions by name, of the same kind, or `metric(preds, batch, mask)` that returns a
            `Metric`.
        forward: `forward(model, batch, ctx)` returns `preds`, or an `Output` with `preds` and
            `model_state`. By default the model is applied to the first entry of a tuple or list,
            with one key per example if it takes `key`.
        weight: a factor for the loss: a number, or a schedule `step -> number`.
    """

    model: PyTree
    loss: Callable[..., Array] = eqx.field(static=True)
    optimizer: optax.GradientTransformation | None = eqx.field(static=True, default=None)
    metrics: Mapping[str, Callable[..., Any]] = eqx.field(static=True, default_factory=dict)
    forward: "Callable[[Any, Any, Context], Any] | None" = eqx.field(static=True, default=None)
    weight: float | Callable[[Array], Array] = eqx.field(static=True, default=1.0)

    def training_step(self, batch: Any, ctx: "Context") -> Output:
        """The weighted loss and the metrics of one batch."""
        made = (self.forward or _vmap_model)(self.model, batch, ctx)
        output = made if isinstance(made, Output) else Output(preds=made)
        weight = self.weight(ctx.step) if callable(self.weight) else self.weight
        loss = weight * compute_value(
            evaluate_metric_fn("loss", self.loss, output.preds, batch, ctx.mask)
        )
        metrics = {
            name: evaluate_metric_fn(name, metric, output.preds, batch, ctx.mask)
            for name, metric in self.metrics.items()
        }
        return output.replace(loss=loss, metrics={**output.metrics, **metrics})

    def configure_optimizers(self) -> optax.GradientTransformation:
        """The optimizer passed to the task."""
        if self.optimizer is None:
            raise ConfigurationError(
                "fg.Task has no optimizer: pass optimizer=optax.adam(1e-3) or another one"
            )
        return self.optimizer


def get_loss_fns(module: Any, batch: Any, ctx: "Context") -> dict[str, Callable[[], Any]]:
    """The functions that `losses(batch, ctx)` of a module gives, each for one of several losses, by
    name."""
    check_batch(module.losses, batch)
    functions, where = module.losses(batch, ctx), f"{type(module).__name__}.losses"
    if not isinstance(functions, dict):
        raise ModelError(
            f"{where} gave {type(functions).__name__}: return a dictionary of functions, by name"
        )
    if bad := [name for name, function in functions.items() if not callable(function)]:
        kind = (
            "an array"
            if isinstance(functions[bad[0]], jax.Array)
            else type(functions[bad[0]]).__name__
        )
        gap = f"{where} gave {kind} as {bad[0]!r}"
        raise ModelError(
            f"{gap}: give a function that makes the loss, {{{bad[0]!r}: lambda: ..., ...}}"
        )
    return functions


def prefix_output(name: str, made: Any) -> Output:
    """What the function of the loss `name` made, a loss or an output, with all of it under that
    name."""
    output = made if isinstance(made, Output) else Output(made)
    terms = {} if output.loss is None else {name: output.loss}
    metrics, media = (
        {f"{name}/{key}": one for key, one in part.items()}
        for part in (output.metrics, output.media)
    )
    return output.replace(
        loss=None, losses={**terms, **output.losses}, metrics=metrics, media=media
    )


def get_method(module: Any, name: str) -> Callable[..., Any]:
    """The method `name` of the module's class, which fulgurite calls."""
    if not hasattr(type(module), name):
        raise ModelError(
            f"{type(module).__name__} has no {name}: subclass fg.Module, or give fg.Task(model, loss=...)"
        )
    return getattr(type(module), name)


def evaluate_metric_fn(
    name: str, function: Callable[..., Any], preds: Any, batch: Any, mask: Any
) -> Any:
    """What `function(preds, batch)` gives: a metric, a scalar, or of an array `(batch, ...)` the
    mean without padding. A function with a parameter `mask` gets it. One without must make no
    metric of a padded batch, padding and all."""
    masks = {"mask": mask} if "mask" in inspect.signature(function).parameters else {}
    value = function(preds, batch, **masks)
    if isinstance(value, Metric | RunningMetric | CollectingMetric):
        if mask is not None and not masks:
            kind = type(value).__name__
            gap = f"metric {name!r} is a {kind} of a padded batch, made without its mask"
            raise ModelError(
                f"{gap}: take it, as in `lambda preds, batch, mask: {kind}.from_values(..., mask)`"
            )
        return value
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        gap = f"metric {name!r} is {type(value).__name__}, which is no number and no array of them"
        raise ModelError(f"{gap}; return pictures and the like as fg.Output(media=...)") from error
    if mask is not None and not masks and value.ndim == 0:
        gap = f"{name!r} is one number for a padded batch, made without its mask"
        raise ModelError(
            f"{gap}: give an array with the example axis, or take it: `lambda preds, batch, mask: ...`"
        )
    return Mean.from_values(value, mask) if value.ndim else value


def compute_value(measured: Any) -> Any:
    """The number that `measured` gives."""
    return (
        measured.compute()
        if isinstance(measured, Metric | RunningMetric | CollectingMetric)
        else measured
    )


def _vmap_model(model: Any, batch: Any, ctx: "Context") -> Output:
    if not isinstance(batch, tuple | list):
        gap = f"fg.Task cannot tell which part of a batch of type {type(batch).__name__} is the model's input"
        raise ModelError(
            f"{gap}: pass forward=lambda model, batch, ctx: jax.vmap(model)(batch['image'])"
        )
    keyed = issubclass(type(model), eqx.Module) and "key" in inspect.signature(model).parameters
    keys = {"key": ctx.keys("default", len(jax.tree.leaves(batch[0])[0]))} if keyed else {}
    if ctx.model_state is None:
        return Output(preds=jax.vmap(model)(batch[0], **keys))
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    preds, model_state = mapped(batch[0], ctx.model_state, **keys)
    return Output(preds=preds, model_state=model_state)
