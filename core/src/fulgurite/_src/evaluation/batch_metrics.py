"""The metrics of one batch of an evaluation, and their results over all batches."""

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from fulgurite._src.evaluation.evaluation import Evaluation, MetricFunctions
from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import (
    CollectingMetric,
    Metric,
    RunningMetric,
    flatten_nested,
    sort_by_kind,
)
from fulgurite._src.metrics.basic import Mean
from fulgurite._src.metrics.conversion import GetWeight, as_metrics, to_number
from fulgurite._src.metrics.weights import collect_weights, find_weight
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import Media, render_if_due
from fulgurite._src.model.module import call_with_mask, evaluate_metric_fn
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.training.forward import get_weight
from fulgurite._src.training.metric_window import check_unique_names, collect_losses
from fulgurite.errors import ModelError


def collect_batch_metrics(
    evaluation: Evaluation,
    plugins: PluginManager,
    module: Any,
    output: Output,
    batch: Any,
    ctx: Context,
) -> tuple[MetricAccumulator, dict[str, CollectingMetric]]:
    """Return the metrics of one batch, and those that collect examples by name; traced.

    Args:
        evaluation: its own metrics and losses replace those of the module's step.
        plugins: of the engine; they may add metrics.
        module: the module, in inference mode.
        output: what its step returned.
        batch: without its mask.
        ctx: the context of the step.
    """
    get_default_weight = cache(partial(get_weight, output, batch, ctx))
    with collect_weights():
        values = _choose_values(evaluation, output, batch, ctx, get_default_weight)
        values |= _collect_plugin_metrics(plugins, module, output, batch, ctx)
        merged, running, collected = sort_by_kind(
            as_metrics(values, get_default_weight), Metric, RunningMetric, CollectingMetric
        )
        # An evaluation has no order of steps: the value of these is the mean over the batches.
        means = {
            name: _as_mean(metric.compute(), get_default_weight())
            for name, metric in running.items()
        }
    return MetricAccumulator.from_metrics(merged | means), collected


def choose_media(
    evaluation: Evaluation, output: Output, batch: Any, ctx: Context, is_first: Any
) -> dict[str, Media]:
    """Return what is shown of a batch, by name: the evaluation's own summaries replace the media of
    the step and of plugins; traced.

    Args:
        evaluation: its summaries are shown whether or not a plugin shows media.
        output: what the module's step returned.
        batch: without its mask.
        ctx: the context of the step.
        is_first: whether it is the first batch; of others nothing is computed.
    """
    if evaluation.summaries is None:
        return output.media
    preds = _get_preds(evaluation.name, output)
    functions: dict[str, Any] = {
        name: partial(call_with_mask, function, preds, batch, ctx.mask)
        for name, function in evaluation.summaries.items()
    }
    return render_if_due(functions, is_first)


def may_have_bare_numbers(evaluation: Evaluation, output: Output) -> bool:
    """Return whether losses or metrics may be scalars without a known weight.

    Args:
        evaluation: its own functions may return anything.
        output: what the step returned.
    """
    if evaluation.losses is not None or evaluation.metrics is not None or output.bare_terms:
        return True
    return output.has_bare_numbers and any(map(_is_number, output.metrics.values()))


def collect_bare_numbers(
    evaluation: Evaluation, output: Output, batch: Any, ctx: Context
) -> dict[str, Any]:
    """Return the scalars without a known weight, each under what it is in a sentence; traced.

    Args:
        evaluation: its own metrics and losses replace those of the module's step.
        output: what the module's step returned.
        batch: without its mask.
        ctx: the context of the step.
    """
    losses: dict[str, Any] = {name: output.losses[name] for name in output.bare_terms}
    metrics = output.metrics if output.has_bare_numbers else {}
    with collect_weights():
        if evaluation.losses is not None:
            losses = _call_functions(evaluation.name, evaluation.losses, output, batch, ctx)
        if evaluation.metrics is not None:
            metrics = _call_functions(evaluation.name, evaluation.metrics, output, batch, ctx)
        labeled = {_label_loss(name): value for name, value in losses.items()}
        labeled |= {f"the metric {name!r}": value for name, value in metrics.items()}
        return {
            label: jnp.asarray(value)
            for label, value in labeled.items()
            if _is_number(value) and find_weight(value) is None
        }


def collect_losses_and_bare_metrics(
    evaluation: Evaluation, output: Output, batch: Any, ctx: Context
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every loss, and the bare numbers among the metrics, each under what it is in a
    sentence; traced. The arguments are those of `collect_bare_numbers`."""
    numbers = collect_bare_numbers(evaluation, output, batch, ctx)
    metrics = {name: value for name, value in numbers.items() if name.startswith("the metric")}
    if evaluation.losses is not None:
        return {name: value for name, value in numbers.items() if name not in metrics}, metrics
    losses = {_label_loss(name): jnp.asarray(value) for name, value in output.losses.items()}
    return losses, metrics


def _label_loss(name: str) -> str:
    return "the loss" if name == "loss" else f"the loss {name!r}"


def _is_number(value: Any) -> bool:
    return eqx.is_array_like(value) and jnp.ndim(value) == 0


def compute_collected(metric: CollectingMetric) -> dict[str, Any]:
    """Return the result of a collecting metric over all batches: each leaf of a tree by its path,
    and what is not a tree by the path ""."""
    leaves = jax.tree_util.tree_leaves_with_path(metric.compute())
    return {"/".join(keystr((key,), simple=True) for key in path): leaf for path, leaf in leaves}


def as_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return metrics as Python numbers and NumPy arrays; a dictionary gives `name/key` for each of
    its keys."""
    return {name: to_number(value) for name, value in flatten_nested(values).items()}


def _choose_values(
    evaluation: Evaluation, output: Output, batch: Any, ctx: Context, get_default_weight: GetWeight
) -> dict[str, Any]:
    """Return losses and metrics by name: the evaluation's own replace the module's, by kind."""
    metrics = output.metrics
    if evaluation.metrics is not None:
        metrics = _call_functions(evaluation.name, evaluation.metrics, output, batch, ctx)
    if evaluation.losses is None:
        losses: dict[str, Any] = {**collect_losses(output, get_default_weight)}
    else:
        losses = _call_functions(evaluation.name, evaluation.losses, output, batch, ctx)
    check_unique_names(losses, metrics)
    return losses | metrics


def _call_functions(
    evaluation_name: str, functions: MetricFunctions, output: Output, batch: Any, ctx: Context
) -> dict[str, Any]:
    """Return what an evaluation's own metrics or losses are for one batch, by name.

    A function that takes `mask` makes its own metric; for a padded batch without it that is an
    error, because padding would count.
    """
    preds = _get_preds(evaluation_name, output)
    return {
        name: evaluate_metric_fn(name, function, preds, batch, ctx.mask)
        for name, function in functions.items()
    }


def _get_preds(evaluation_name: str, output: Output) -> Any:
    if output.preds is None:
        raise ModelError(
            f"evaluator {evaluation_name!r} has metrics, losses or summaries of its own, which "
            "take predictions: return fg.Output(..., preds=...)"
        )
    return output.preds


def _collect_plugin_metrics(
    plugins: PluginManager, module: Any, output: Output, batch: Any, ctx: Context
) -> dict[str, Any]:
    """Return the metrics of plugins for one batch, as `PLUGIN/NAME`; traced."""
    answers = plugins.hooks.evaluation_metrics.each(
        per_plugin=lambda plugin: {"ctx": ctx.for_plugin(plugin.name)},
        module=module,
        output=output,
        batch=batch,
    )
    metrics: dict[str, Any] = {}
    for plugin, answer in answers:
        for key, value in flatten_nested(answer or {}).items():
            metrics[f"{plugin.name}/{key}"] = value
    return metrics


def _as_mean(value: Any, num_examples: Any) -> Metric:
    """Return the mean over that many examples, element by element."""
    means = jax.vmap(partial(Mean.from_values, weight=num_examples))(jnp.ravel(value))
    return jax.tree.map(lambda leaf: leaf.reshape(jnp.shape(value)), means)
