"""The forward pass of a step: the module's own method, and every term of the loss."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from traceback import walk_tb
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fulgurite._src.metrics.base import flatten_nested
from fulgurite._src.metrics.basic import Mean
from fulgurite._src.metrics.conversion import as_metrics, split_loss, sum_values
from fulgurite._src.metrics.weights import collect_weights
from fulgurite._src.model.ambient_rng import provide_rngs
from fulgurite._src.model.context import Context, average_loss
from fulgurite._src.model.loss import as_weight
from fulgurite._src.model.media import render_if_due
from fulgurite._src.model.module import get_method
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.metric_window import check_unique_names, collect_losses
from fulgurite._src.tree.paths import leaves_with_paths, path_from_keys
from fulgurite._src.tree.specs import format_tree
from fulgurite._src.tree.typecheck import check_batch
from fulgurite.errors import DataError, ModelError, PluginError

Step = str | Callable[[Any, Any, Context], Output]
"""The name of a module's method, or a function `step(module, batch, ctx)`."""


@collect_weights()
def forward(
    plugins: PluginManager,
    sharding: ShardingStrategy,
    step: Step,
    module: Any,
    batch: Any,
    ctx: Context,
) -> Output:
    """Run a module's step on a batch, and add up every term of its loss.

    Args:
        plugins: those of the engine, which may add terms.
        sharding: where the module and its output lie on the devices.
        step: `training_step` or another step.
        module: the module.
        batch: a batch without its mask.
        ctx: the context of the step.

    Returns:
        The output. Its `losses` are all terms by name: the module's own, those of plugins, those of
        `ctx.add_loss`; its `loss` is their sum. No term at all is an error in training.
    """
    ctx = ctx.for_forward()
    module = sharding.constrain_params(module)
    function = get_method(module, step) if isinstance(step, str) else step
    where = f"{type(module).__name__}.{function.__name__}"
    check_batch(function, batch, module)
    output = call_with_around_hooks(plugins, function, module, batch, ctx)
    output = _as_output(output, where)
    output = output.replace(
        metrics=flatten_nested(output.metrics), media=flatten_nested(output.media)
    )
    output = output.resolve()
    output = output.replace(weight=as_weight(output.weight, where))
    output = sharding.constrain_output(output)
    terms, weights = _collect_loss_terms(plugins, module, output, batch, ctx, where)
    output = _add_up(output, terms, weights, batch, ctx)
    check_unique_names(output.losses, output.metrics)
    model_state = output.model_state
    if model_state is None:
        model_state = ctx.model_state
        if ctx.training and step == "training_step" and model_state is not None:
            warnings.warn(
                f"{where} returned no model_state, so statistics such as BatchNorm's would never "
                "change: return fg.Output(..., model_state=state), or ctx.model_state itself",
                stacklevel=1,
            )
    media = {}
    if output.media and ctx.media_due is not None:
        media = render_if_due(output.media, ctx.media_due)
    return output.replace(model_state=model_state, media=media)


def _add_up(
    output: Output, terms: dict[str, Array], weights: dict[str, Array], batch: Any, ctx: Context
) -> Output:
    """Return the output with all terms of the loss, their weights, and their sum as its loss.

    Args:
        output: of the module's step.
        terms: by name.
        weights: of those terms that bring one.
        batch: the batch without its mask.
        ctx: the context of the step.
    """
    is_stated = output.weight is not None
    bare_terms = [name for name in terms if name not in weights]
    if bare_terms:
        weight = get_weight(output, batch, ctx)
        weights = weights | dict.fromkeys(bare_terms, weight)
        output = output.replace(weight=weight)
    if is_stated:
        bare_terms = []
    if ctx.training:
        # Every batch has examples, but perhaps none with a token.
        terms = {
            name: value if name in bare_terms else jnp.where(weights[name] == 0, 0, value)
            for name, value in terms.items()
        }
    return output.replace(
        loss=sum_values(terms.values()) if terms else None,
        losses=terms,
        loss_weights=weights,
        bare_terms=tuple(bare_terms),
    )


def as_loss_scalar(name: Any, value: Any, module: Any, mask: Any) -> Array:
    """Return one term of the loss as a floating-point scalar; of an array the mean, with a warning.

    Args:
        name: the term's name.
        value: what the module or a plugin gave for it.
        module: the module, for the error.
        mask: of the batch, or None.

    Raises:
        ModelError: the value is not of floating-point numbers, or has one for each example of a
            padded batch.
    """
    term = jnp.asarray(value) if eqx.is_array_like(value) else value
    is_array = isinstance(term, jax.Array)
    if is_array and jnp.issubdtype(term.dtype, jnp.floating):
        return average_loss(name, term, mask)
    raise ModelError(
        f"the loss term {name!r} of {type(module).__name__} is "
        f"{format_tree(term) if is_array else repr(value)}: a loss is one floating-point number"
    )


def collect_metrics(output: Output, batch: Any, ctx: Context) -> dict[str, Any]:
    """Return the losses and metrics of an output as metrics by name, for a rule that trains several
    modules in one step.

    Args:
        output: what a step returned, or the forward pass.
        batch: the batch without its mask.
        ctx: the context of the step.
    """
    with collect_weights():
        output = output.resolve()
        get_step_weight = cache(partial(get_weight, output, batch, ctx))
        losses = collect_losses(output, get_step_weight)
        return losses | as_metrics(output.metrics, get_step_weight)


def get_weight(output: Output, batch: Any, ctx: Context) -> Array:
    """Return what the bare numbers of an output are means over.

    Args:
        output: of a forward pass.
        batch: the batch without its mask.
        ctx: the context of the step.

    Raises:
        DataError: neither the output nor the batch says it.
    """
    if output.weight is None:
        return count_examples(batch, ctx)
    return jnp.asarray(output.weight)


def count_examples(batch: Any, ctx: Context) -> Float[Array, ""]:
    """Return the number of examples in a batch: those that are not padding, or what its source
    says, or the length with which its arrays begin.

    Args:
        batch: the batch without its mask.
        ctx: the context of the step.

    Raises:
        DataError: its arrays begin with different lengths.
    """
    if ctx.mask is not None:
        return jnp.sum(ctx.mask, dtype=jnp.float32)
    if ctx.num_examples is not None:
        return jnp.asarray(ctx.num_examples, jnp.float32)
    return jnp.float32(get_common_length(batch))


def get_common_length(batch: Any) -> int:
    """Return the length with which all arrays of a batch begin; single numbers have none, and a
    batch of nothing else is one example.

    Args:
        batch: the batch without its mask.

    Raises:
        DataError: its arrays begin with different lengths.
    """
    lengths = {
        path or "the array": jnp.shape(leaf)[0]
        for path, leaf in leaves_with_paths(batch)
        if jnp.shape(leaf)
    }
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} with {length}" for path, length in lengths.items())
        raise DataError(
            f"the arrays of a batch begin with different lengths ({listed}), so nobody knows how "
            "many examples it has: return each loss and metric as fg.metrics.Mean.from_values("
            "values), which says what it is a mean over; or fg.Output(loss, weight=...); or have "
            "a source of your own yield fg.Batch(value, num_examples=...)"
        )
    return next(iter(lengths.values()), 1)


def call_with_around_hooks(
    plugins: PluginManager,
    step: Callable[[Any, Any, Context], Any],
    module: Any,
    batch: Any,
    ctx: Context,
) -> Any:
    """Call a module's step within the hooks `around_forward`; traced.

    Args:
        plugins: those of the engine.
        step: the step, `step(module, batch, ctx)`.
        module: the module.
        batch: the batch without its mask.
        ctx: the context of the step.

    Returns:
        What the outermost hook returns, or the step itself where there is none.
    """

    step_outputs: list[Any] = []

    def call(module: Any, batch: Any) -> Any:
        with provide_rngs(ctx), _used_state_context(module):
            output = step(module, batch, ctx)
        step_outputs.append(output)
        if isinstance(output, Output | Mean):
            # Here, where a loss is still the very number whose weight was noted.
            output = _as_output(output, step.__qualname__).resolve()
        return output

    def accept(plugin: RegisteredPlugin, answer: Any) -> Any:
        # None of the step itself is the module's mistake.
        if answer is None and not any(output is None for output in step_outputs):
            raise PluginError(
                "hook around_forward returned None: return what call(module, batch) returns, or "
                "something in its place"
            )
        return answer

    wrapped = plugins.hooks.around_forward.wrap(
        call,
        ctx.step_number,
        per_plugin=lambda plugin: {"ctx": ctx.for_plugin(plugin.name)},
        accept=accept,
    )
    return wrapped(module, batch)


def _as_output(output: Any, where: str) -> Output:
    """Return what a step returned as an output; an error for anything else than that or a loss."""
    if isinstance(output, Mean) or eqx.is_array_like(output):
        return Output(output)
    if not isinstance(output, Output):
        raise ModelError(f"{where} returned {type(output).__name__}: return fg.Output(...)")
    for field in ("losses", "metrics", "media"):
        value = getattr(output, field)
        if not isinstance(value, dict):
            raise ModelError(
                f"the {field} of {where} are of type {type(value).__name__}: "
                "return a dictionary, by name"
            )
    return output


def _collect_loss_terms(
    plugins: PluginManager, module: Any, output: Output, batch: Any, ctx: Context, where: str
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return all terms by name: of the output, of plugins, of `ctx.add_loss`; and the weights of
    those that bring one."""
    terms: dict[str, Array] = {}
    if output.loss is not None:
        terms["loss"] = as_loss_scalar("loss", output.loss, module, ctx.mask)
    weights = {**output.loss_weights, **ctx.loss_weights}
    names_of_module = {*terms, *output.losses, *(ctx.losses or {})}

    def accept(plugin: RegisteredPlugin, answer: Any) -> dict[str, Array]:
        scalars = {}
        for name, value in (answer or {}).items():
            if name in names_of_module:
                raise ModelError(
                    f"the loss term {name!r} comes twice in {where}: plugin {plugin.name!r} "
                    "returned it from its hook loss_terms, too; rename that one"
                )
            number, weight = split_loss(name, value)
            scalars[name] = as_loss_scalar(name, number, module, ctx.mask)
            if weight is not None:
                weights[name] = weight
        return scalars

    plugin_terms = plugins.hooks.loss_terms.merge(
        ctx.step_number,
        what="loss term",
        per_plugin=lambda plugin: {"ctx": ctx.for_plugin(plugin.name)},
        accept=accept,
        module=module,
        output=output,
        batch=batch,
    )
    for source in (output.losses, plugin_terms, ctx.losses or {}):
        for name, value in source.items():
            if name in terms:
                raise ModelError(f"the loss term {name!r} comes twice in {where}; rename one")
            terms[name] = as_loss_scalar(name, value, module, ctx.mask)
    if not terms and ctx.training:
        raise ModelError(
            f"{where} returned no loss: return fg.Output(loss, ...) or call ctx.add_loss(name, "
            "value)"
        )
    return terms, {name: weights[name] for name in terms if name in weights}


@contextmanager
def _used_state_context(module: Any) -> Iterator[None]:
    """Name the layer that was called with an `eqx.nn.State` that another call has used up."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Attempted to use old state"):
            raise
        callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        layers = [caller for caller in callers if isinstance(caller, eqx.Module)]
        layer = layers[-1] if layers and layers[-1] is not module else None
        name = "a layer" if layer is None else f"{_find_path(module, layer)}"
        raise ModelError(
            f"{name} was called with a state that another call has used up before. Each call of "
            "a layer with a state returns the next one: hand that to the next call, and return the "
            "last, fg.Output(..., model_state=state)"
        ).with_traceback(error.__traceback__) from None


def _find_path(module: Any, layer: Any) -> str:
    """Return the path of a layer in a module, and its class."""
    nodes = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda node: node is layer)[0]
    paths = [path for path, node in nodes if node is layer]
    name = type(layer).__name__
    return f"{path_from_keys(paths[0])} ({name})" if paths else f"the layer {name}"
