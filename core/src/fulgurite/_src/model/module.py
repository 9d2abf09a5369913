"""What a user writes: a module with a training contract, or a task around any Equinox model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key, PyTree

from fulgurite._src.metrics.base import is_metric
from fulgurite._src.metrics.basic import Mean
from fulgurite._src.model.context import Context
from fulgurite._src.model.loss import apply_weight, scale_loss
from fulgurite._src.model.output import Output
from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite._src.tree.select import Selector, select
from fulgurite._src.tree.specs import format_tree
from fulgurite._src.tree.typecheck import check_batch
from fulgurite.errors import ConfigurationError, ModelError, error_context


@hide_constructor_frames
@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer and what it updates.

    Example:
        optimizer = fg.OptimizerSpec(optax.adam(1e-3), params="encoder")

    Attributes:
        optimizer: an `optax.GradientTransformation`.
        params: the arrays that it updates, as `select` takes them; all by default. Others get no
            gradient or state.
        gradient_transform: what is applied to the gradients first: the `gradient_transform`s of
            plugins, set by the engine.
    """

    optimizer: optax.GradientTransformation
    params: Selector | str | Callable[[Any], Any] | None = None
    gradient_transform: optax.GradientTransformation = field(
        default_factory=optax.identity, kw_only=True
    )

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, optax.GradientTransformation):
            check_is_not_multi_steps(self.optimizer, "fg.OptimizerSpec")
            raise ConfigurationError(
                f"fg.OptimizerSpec: optimizer is {self.optimizer!r}; give one such as "
                "optax.adam(1e-3)"
            )
        if not isinstance(self.params, Selector | None):
            object.__setattr__(self, "params", select(self.params))

    def param_mask(self, module: PyTree) -> PyTree[bool]:
        """Return True for the floating-point arrays that this optimizer updates, False for every
        other leaf."""
        if self.params is None:
            return jax.tree.map(is_floating_array, module)
        assert isinstance(self.params, Selector)  # made one in __post_init__
        return jax.tree.map(
            lambda leaf, is_selected: is_selected and is_floating_array(leaf),
            module,
            self.params(module),
        )


class Module(eqx.Module):
    """An `equinox.Module` that defines its own training.

    Its methods are pure and traced: `batch` holds arrays with a leading example axis, and
    everything else a step needs (keys, model state, mask) comes from `ctx`.

    Example:
        class Classifier(fg.Module):
            net: eqx.nn.MLP

            def training_step(self, batch, ctx):
                logits = jax.vmap(self.net)(batch["image"])
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
                return fg.Output(losses.mean(), preds=logits)

            def configure_optimizers(self):
                return optax.adam(1e-3)
    """

    def training_step(self, batch: Any, ctx: Context) -> Output:
        """Return the loss and the metrics of one batch. Required."""
        raise ModelError(
            f"{type(self).__name__} has no training_step(self, batch, ctx); define it, return "
            "fg.Output"
        )

    def validation_step(self, batch: Any, ctx: Context) -> Output:
        """Return the metrics of one batch in evaluation, in inference mode.

        Unless overridden, this is `training_step`, or without one the results of the functions that
        a method `losses` returns. The core knows that method, which only a plugin trains, because
        an evaluation has no update rule that it could ask.
        """
        return run_training_losses(self, batch, ctx)

    def predict_step(self, batch: Any, ctx: Context) -> PyTree[Array]:
        """Return the predictions for one batch, each with a leading example axis.

        By default these are what a method `forward(self, batch, ctx)` or `__call__(self, batch)`
        returns, which `training_step` can call too and which needs no labels. Its first parameter
        is called `batch`; it gets `ctx` if it has such a parameter. Without one they are
        `validation_step(...).preds`.
        """
        name = type(self).__name__
        method_name = find_forward(self)
        if method_name is None:
            check_batch(type(self).validation_step, batch, self)
            with error_context(
                lambda: (
                    f"predict ran the validation_step of {name}, which may read labels: define "
                    "forward(self, batch, ctx) and call it in training_step, or predict_step, for "
                    "batches without labels"
                )
            ):
                output = self.validation_step(batch, ctx)
        else:
            forward = getattr(type(self), method_name)
            check_batch(forward, batch, self)
            options = {"ctx": ctx} if "ctx" in inspect.signature(forward).parameters else {}
            output = as_preds_output(forward(self, batch, **options))
        if output.preds is None:
            raise ModelError(
                f"{name} cannot predict: define predict_step or forward(self, batch, ctx), or "
                "return fg.Output(preds=)"
            )
        return output.preds

    def apply_transform(
        self, transform: Callable[[Any, Key[Array, ""]], Any], key: Key[Array, ""]
    ) -> Any:
        """Return this module as the hook `transform_module` of a plugin makes it. A module that
        holds several models overrides this, to transform each with a key of its own.

        Args:
            transform: called with a module and a key, returns the module transformed.
            key: the random key from which the module was made.
        """
        return transform(self, key)

    def adapt_plugin_state(self, name: str, plugin_state: Any) -> Any:
        """Return the initial state of a plugin for this module. A module that holds several models
        overrides this, to have a state for each.

        Args:
            name: of the plugin.
            plugin_state: what its hook `init_plugin_state` returned.
        """
        return plugin_state

    def select_model(self, model_state: Any) -> tuple[Any, Any]:
        """Return the module, with its state, whose losses are tried before training. A module that
        holds several models overrides this, to return one of them.

        Args:
            model_state: the `eqx.nn.State` of this module, or None.
        """
        return self, model_state

    def configure_optimizers(
        self,
    ) -> optax.GradientTransformation | OptimizerSpec | dict[str, OptimizerSpec]:
        """Return the optimizer, also as an `OptimizerSpec`, or several of these by name.

        Called once, on a module of traced arrays: they have shapes and dtypes, and no values, so an
        optimizer cannot hold them. A learning rate is a Python number or a static field; an
        optimizer that needs the initial weights keeps the `params` of its `init` in its state.
        """
        raise ModelError(
            f"{type(self).__name__} has no optimizer: define configure_optimizers(self) to return "
            "one"
        )


class Task(Module):
    """Any Equinox model with a loss.

    Example:
        def loss(preds, batch):
            return optax.softmax_cross_entropy_with_integer_labels(preds, batch[1])


        mlp = eqx.nn.MLP(784, 10, 256, 1, key=jax.random.key(0))
        task = fg.Task(mlp, loss=loss, optimizer=optax.adam(1e-3))

    Attributes:
        model: the Equinox model.
        loss: `loss(preds, batch)` returns an array that begins with the example axis (averaged over
            the examples that are not masked), a scalar, or a `Mean`. With a parameter `mask` it
            gets `ctx.mask` as well. None where plugins (hook `loss_terms`) or `ctx.add_loss` in
            `forward` give all of the loss.
        optimizer: an `optax.GradientTransformation`, or an `OptimizerSpec`.
        metrics: functions by name, of the same kind, or `metric(preds, batch, mask)` that returns a
            `Metric`.
        eval_metrics: what evaluations measure instead; by default the same.
        forward: `forward(model, batch, ctx)` returns `preds`, or an `Output` with `preds` and
            `model_state`. By default the model is applied to the first entry of a tuple or list,
            with one key per example if it takes `key`. Predictions need no labels: nothing else is
            called.
        weight: a factor for the loss: a number, or a schedule `step -> number`.
    """

    model: PyTree
    loss: Callable[..., Array | Mean] | None = eqx.field(static=True, default=None)
    optimizer: optax.GradientTransformation | OptimizerSpec | None = eqx.field(
        static=True, default=None
    )
    metrics: Mapping[str, Callable[..., Any]] = eqx.field(static=True, default_factory=dict)
    forward: Callable[[Any, Any, Context], Any] | None = eqx.field(static=True, default=None)
    weight: float | Callable[[Array], Array] = eqx.field(static=True, default=1.0)
    eval_metrics: Mapping[str, Callable[..., Any]] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        """Refuse a weight of no loss."""
        if self.loss is None and self.weight != 1:
            raise ConfigurationError(
                f"fg.Task: weight is {self.weight!r}, and there is no loss that it is a factor of: "
                "pass loss= as well, or leave weight out"
            )

    def training_step(self, batch: Any, ctx: Context) -> Output:
        """Return the weighted loss and the metrics of one batch."""
        return self._run(batch, ctx, self.metrics)

    def validation_step(self, batch: Any, ctx: Context) -> Output:
        """Return the weighted loss and the metrics of evaluations of one batch."""
        metrics = self.metrics if self.eval_metrics is None else self.eval_metrics
        return self._run(batch, ctx, metrics)

    def predict_step(self, batch: Any, ctx: Context) -> PyTree[Array]:
        """Return the predictions for one batch, by the forward function alone: no loss, no metric
        and so no label is looked at."""
        return self._run_forward(batch, ctx).preds

    def _run_forward(self, batch: Any, ctx: Context) -> Output:
        forward = self.forward or apply_model
        return as_preds_output(forward(self.model, batch, ctx))

    def _run(
        self, batch: Any, ctx: Context, metric_fns: Mapping[str, Callable[..., Any]]
    ) -> Output:
        output = self._run_forward(batch, ctx)
        if self.loss is not None:
            factor = self.weight(ctx.step) if callable(self.weight) else self.weight
            value = evaluate_metric_fn("loss", self.loss, output.preds, batch, ctx.mask)
            output = output.replace(loss=scale_loss("loss", value, factor))
        metrics = {
            name: evaluate_metric_fn(name, metric, output.preds, batch, ctx.mask)
            for name, metric in metric_fns.items()
        }
        return output.replace(metrics={**output.metrics, **metrics})

    def configure_optimizers(self) -> optax.GradientTransformation | OptimizerSpec:
        """Return the optimizer passed to the task."""
        if self.optimizer is None:
            raise ConfigurationError(
                "fg.Task has no optimizer: pass optimizer=optax.adam(1e-3) or another one"
            )
        return self.optimizer


def find_forward(module: Module) -> str | None:
    """Return the name of the method that makes a module's predictions of a batch, if it has one:
    `forward` or `__call__` whose first parameter is called `batch`.

    The parameter tells it from a `__call__` that takes one example, as Equinox' layers do.
    """
    field_names = {field.name for field in fields(module)}
    for name in ("forward", "__call__"):
        # A class without `__call__` has that of its metaclass.
        is_method = any(name in vars(cls) for cls in type(module).__mro__)
        method = getattr(type(module), name) if is_method and name not in field_names else None
        if callable(method) and list(inspect.signature(method).parameters)[1:2] == ["batch"]:
            return name
    return None


def as_preds_output(result: Any) -> Output:
    """Return what a forward function returned, predictions or an `Output`, as an `Output`."""
    return result if isinstance(result, Output) else Output(preds=result)


def has_training_losses(module: Any) -> bool:
    """Return whether a module defines its losses, by a `training_step` or by a method `losses`."""
    training_step = getattr(type(module), "training_step", Module.training_step)
    has_training_step = training_step is not Module.training_step
    return has_training_step or callable(getattr(module, "losses", None))


def run_training_losses(module: Any, batch: Any, ctx: Context) -> Output:
    """Return what `training_step` of a module returns, or without one the results of the functions
    that its method `losses` returns."""
    training_step = getattr(type(module), "training_step", Module.training_step)
    if training_step is Module.training_step and callable(getattr(module, "losses", None)):
        functions = get_loss_fns(module, batch, ctx)
        outputs = [prefix_output(name, function()) for name, function in functions.items()]
        return merge_outputs(outputs)
    check_batch(training_step, batch, module)
    return training_step(module, batch, ctx)


def get_loss_fns(module: Any, batch: Any, ctx: Context) -> dict[str, Callable[[], Any]]:
    """Return the functions that `losses(batch, ctx)` of a module gives, one for each loss.

    Args:
        module: has a method `losses`.
        batch: as the step gets it, without its mask.
        ctx: the context of the step.

    Raises:
        ModelError: the method returned anything else.
    """
    check_batch(module.losses, batch)
    functions = module.losses(batch, ctx)
    source = f"{type(module).__name__}.losses"
    if not isinstance(functions, dict):
        raise ModelError(
            f"{source} returned {type(functions).__name__}: return a dictionary of functions, "
            "by name"
        )
    for name, function in functions.items():
        if not callable(function):
            is_array = isinstance(function, jax.Array)
            kind = "an array" if is_array else type(function).__name__
            raise ModelError(
                f"{source} returned {kind} for {name!r}: return a function that makes the loss, "
                f"{{{name!r}: lambda: ..., ...}}"
            )
    return functions


def prefix_output(name: str, result: Any) -> Output:
    """Return an output whose entries are all under the name of a loss.

    Args:
        name: of the loss, as `losses` gives it.
        result: what its function returned, a scalar or an `Output`.
    """
    output = result if isinstance(result, Output) else Output(result)
    output = apply_weight(output, f"the loss {name!r}")
    weights = {
        name if key == "loss" else key: weight for key, weight in output.loss_weights.items()
    }
    terms = {} if output.loss is None else {name: output.loss}
    return output.replace(
        loss=None,
        losses={**terms, **output.losses},
        loss_weights=weights,
        metrics={f"{name}/{key}": value for key, value in output.metrics.items()},
        media={f"{name}/{key}": value for key, value in output.media.items()},
    )


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """Return one output with the losses, metrics and media of all, and the first predictions."""
    losses: dict[str, Any] = {}
    loss_weights: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    media: dict[str, Any] = {}
    preds = None
    for output in outputs:
        losses |= output.losses
        loss_weights |= output.loss_weights
        metrics |= output.metrics
        media |= output.media
        if preds is None:
            preds = output.preds
    return Output(
        losses=losses, loss_weights=loss_weights, metrics=metrics, media=media, preds=preds
    )


def get_method(module: Any, name: str) -> Callable[..., Any]:
    """Return a method of a module's class, to be called with the module.

    Args:
        module: as the user gave it, perhaps no `fg.Module`.
        name: the method.

    Raises:
        ModelError: the class has no such method; the message says how to get one.
    """
    if not hasattr(type(module), name):
        raise ModelError(
            f"{type(module).__name__} has no {name}: subclass fg.Module, or give "
            "fg.Task(model, loss=...)"
        )
    return getattr(type(module), name)


def call_with_mask(function: Callable[..., Any], preds: Any, batch: Any, mask: Any) -> Any:
    """Return what a function of predictions and batch gives, called with `mask` if it has such a
    parameter."""
    if _takes_mask(function):
        return function(preds, batch, mask=mask)
    return function(preds, batch)


def _takes_mask(function: Callable[..., Any]) -> bool:
    return "mask" in inspect.signature(function).parameters


def evaluate_metric_fn(
    name: str, function: Callable[..., Any], preds: Any, batch: Any, mask: Any
) -> Any:
    """Return what a loss or metric function gives, so that padding does not count.

    Args:
        name: that of the metric, for messages.
        function: called as `function(preds, batch)`, or with `mask` if it has such a parameter.
        preds: the predictions.
        batch: the batch.
        mask: bool `(batch,)`, False for padding; None for a batch without padding.

    Returns:
        A metric, a scalar, or the mean without padding of an array `(batch, ...)`.

    Raises:
        ModelError: a function without a parameter `mask` made a metric or a number of a padded
            batch, padding and all; or the result holds no numbers.
    """
    value = call_with_mask(function, preds, batch, mask)
    counts_padding = mask is not None and not _takes_mask(function)
    if is_metric(value):
        if counts_padding:
            kind = type(value).__name__
            raise ModelError(
                f"metric {name!r} is a {kind} of a padded batch, computed without its mask: take "
                f"it, as in `lambda preds, batch, mask: {kind}.from_values(..., mask)`"
            )
        return value
    try:
        # An array stays the object that its weight was noted for.
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"metric {name!r} is {type(value).__name__}, which is neither a number nor an array of "
            "numbers; return pictures and the like as fg.Output(media=...)"
        ) from error
    if value.ndim:
        return Mean.from_values(value, mask)
    if counts_padding:
        raise ModelError(
            f"{name!r} is one number for a padded batch, computed without its mask: give an array "
            "with the example axis, or take it: `lambda preds, batch, mask: ...`"
        )
    return value


def is_floating_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of floating-point numbers, or stands for one as
    `jax.ShapeDtypeStruct` does."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_optimizer_specs(optimizers: Any, source: str) -> dict[str, OptimizerSpec]:
    """Return optimizers by name; a single one, or a single `OptimizerSpec`, is called `default`.

    Args:
        optimizers: what `configure_optimizers` returned.
        source: whose answer it is, for the message.
    """
    if isinstance(optimizers, optax.GradientTransformation):
        return {"default": OptimizerSpec(optimizers)}
    if isinstance(optimizers, OptimizerSpec):
        return {"default": optimizers}
    check_is_not_multi_steps(optimizers, source)
    is_dict = isinstance(optimizers, dict) and bool(optimizers)
    if is_dict and all(isinstance(spec, OptimizerSpec) for spec in optimizers.values()):
        return optimizers
    raise ConfigurationError(
        f"{source} returned {type(optimizers).__name__}; return an optax.GradientTransformation "
        "such as optax.adam(1e-3), an fg.OptimizerSpec, or a dict of fg.OptimizerSpec by name"
    )


def check_is_not_multi_steps(optimizer: Any, source: str) -> None:
    """Raise an error for `optax.MultiSteps`, which is not an optimizer itself.

    Args:
        optimizer: what was given for one.
        source: who gave it, for the message.
    """
    if isinstance(optimizer, optax.MultiSteps):
        raise ConfigurationError(
            f"{source}: optax.MultiSteps is not an optax.GradientTransformation: give the "
            "optimizer that it wraps, and accumulate with GradientAccumulation(n) of "
            "fulgurite-optimizers in the plugins of the engine, which weighs batches by examples"
        )


def apply_model(model: Any, batch: Any, ctx: Context) -> Output:
    """Apply a model to each example of the first entry of a batch: what `Task` does by default.

    Args:
        model: called with one example.
        batch: a tuple or list, whose first entry holds the inputs.
        ctx: has the random keys for a model with an argument `key`, and the model state.

    Raises:
        ModelError: the batch does not say which part of it is the input.
    """
    if isinstance(batch, jax.Array):
        # A loss that reads `batch[1]` would take the second example for the labels.
        raise ModelError(
            f"fg.Task got a batch that is one array, {format_tree(batch)}, and applies its model "
            "to the first entry of a tuple: give data such as fg.ArrayData((x,), batch_size) or "
            "fg.ArrayData((x, y), batch_size), or pass forward="
        )
    if not isinstance(batch, tuple | list):
        raise ModelError(
            f"fg.Task cannot tell which part of a batch of type {type(batch).__name__} is the "
            "model's input: pass forward=lambda model, batch, ctx: jax.vmap(model)(batch['image'])"
        )
    inputs = batch[0]
    takes_key = issubclass(type(model), eqx.Module) and "key" in inspect.signature(model).parameters
    keys = {"key": ctx.keys("default", jax.tree.leaves(inputs)[0].shape[0])} if takes_key else {}
    if ctx.model_state is None:
        return Output(preds=jax.vmap(model)(inputs, **keys))
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    preds, model_state = apply(inputs, ctx.model_state, **keys)
    return Output(preds=preds, model_state=model_state)
