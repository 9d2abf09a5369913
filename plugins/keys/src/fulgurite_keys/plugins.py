"""The plugins: losses, metrics and summaries by name, each made of keys."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

import equinox as eqx
import fulgurite as fg
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError, did_you_mean, error_context
from fulgurite.metrics import flatten_nested
from fulgurite.plugins import hide_constructor_frames
from fulgurite_logging import MediaLogger

from fulgurite_keys.fields import Keyed
from fulgurite_keys.layers import LayerOutputs
from fulgurite_keys.losses import Loss
from fulgurite_keys.measures import Measure
from fulgurite_keys.scope import Scope
from fulgurite_keys.shown import Summary

K = TypeVar("K", bound=Keyed)


class _KeyedPlugin(fg.Plugin, Generic[K]):
    """Objects by name whose keys are looked up around the forward pass.

    What they compute goes into the output of the step, as if the step had returned it, so that it
    is right with several optimizers, microbatches and in evaluations.
    """

    kind: ClassVar[type[Keyed]]
    # Outside of what casts the inputs and outputs of a step.
    before = ("precision",)

    def __init__(self, items: Mapping[str, K]) -> None:
        self._items = dict(items)
        self._by_evaluator: dict[str, dict[str, K]] = {}
        self._check(self._items, type(self).__name__)

    def for_evaluators(self, **changes: Mapping[str, K | None]) -> Self:
        """Return a copy in which evaluators have others.

        Args:
            changes: by the name of the evaluator; for each name another object, one more, or None
                to leave it out. All others are inherited.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._by_evaluator = dict(self._by_evaluator)
        for evaluator, replacements in changes.items():
            where = f"{type(self).__name__}, evaluator {evaluator!r}"
            for name, item in replacements.items():
                if item is None and name not in self._items:
                    raise ConfigurationError(
                        f"{where} leaves out {name!r}, which is not there: there is "
                        f"{', '.join(self._items) or 'nothing'}"
                    )
            merged = {**self._items, **replacements}
            remaining = {name: item for name, item in merged.items() if item is not None}
            self._check(remaining, where)
            copy._by_evaluator[evaluator] = remaining
        return copy

    def get_items(self, ctx: fg.Context) -> dict[str, K]:
        """Return the objects by name that a step has."""
        if ctx.evaluation is None:
            return self._items
        return self._by_evaluator.get(ctx.evaluation, self._items)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Tell the user of evaluators that others were given for and that are not there."""
        names = run.engine.evaluations
        for name in self._by_evaluator:
            if name not in names:
                run.notify(
                    self.plugin_name,
                    f"no evaluation of this fit is called {name!r}, as "
                    f"{type(self).__name__}.for_evaluators names it. {did_you_mean(name, names)}",
                )

    @fg.hookimpl
    def around_forward(
        self, call: Callable[[Any, Any], Any], module: Any, batch: Any, ctx: fg.Context
    ) -> Any:
        """Return the output of the step with what the keys find in it."""
        items = {
            name: item for name, item in self.get_items(ctx).items() if self._is_active(item, ctx)
        }
        keys = [key for item in items.values() for key in item.get_keys().values()]
        layer_keys = [key for key in keys if key.prefix == "interms"]
        layers = None
        if layer_keys:
            layers = LayerOutputs(module, layer_keys)
            output = layers.run(call, module, batch)
        else:
            output = call(module, batch)
        if eqx.is_array_like(output) and jnp.ndim(output) == 0:
            output = fg.Output(output)  # a bare loss
        if not isinstance(output, fg.Output):
            return output  # predictions
        scope = Scope(_list_forward_values(module, batch, output, ctx), self.place, layers)
        return self._add(output, items, scope, ctx)

    @property
    def place(self) -> str:
        """What this is called in errors."""
        return type(self).__name__.lower()

    def _is_active(self, item: K, ctx: fg.Context) -> bool:
        """Return whether an object is computed in the forward pass of this step."""
        return True

    def _add(self, output: fg.Output, items: dict[str, K], scope: Scope, ctx: fg.Context) -> Any:
        raise NotImplementedError

    def _check(self, items: Mapping[str, Any], where: str) -> None:
        for name, item in items.items():
            if not isinstance(item, self.kind):
                raise ConfigurationError(
                    f"{where}: {name} is {item!r}; give a {self.kind.__name__} of fulgurite_keys, "
                    "such as those that its guide lists"
                )

    def __repr__(self) -> str:
        items = ", ".join(f"{name}={item.describe()}" for name, item in self._items.items())
        return f"{type(self).__name__}({items})"


@hide_constructor_frames
class Losses(_KeyedPlugin[Loss]):
    """Losses by name, wired by keys; each is a term of the loss and is logged under its name.

    Example:
        from fulgurite_keys import KeyedTask, Losses, SoftmaxCrossEntropy

        task = KeyedTask(model, inputs={"x": "batch[0]"}, optimizer=optax.adam(1e-3))
        losses = Losses(
            ce=SoftmaxCrossEntropy(logits="preds", labels="batch[1]", label_smoothing=0.1)
        )
        engine = fg.Engine(steps=100, plugins=[losses])
    """

    plugin_name = "losses"
    changes_results = True
    kind = Loss

    def __init__(self, **losses: Loss) -> None:
        super().__init__(losses)

    def _add(
        self, output: fg.Output, items: dict[str, Loss], scope: Scope, ctx: fg.Context
    ) -> fg.Output:
        terms = {}
        for name, loss in items.items():
            if name in output.losses:
                raise ModelError(
                    f"the loss term {name!r} comes from the step and from Losses; rename one"
                )
            with error_context(lambda name=name: f"the loss {name!r} of Losses"):
                terms[name] = loss.evaluate(scope, ctx.mask, ctx.step)
        return output.replace(losses={**output.losses, **terms})


@hide_constructor_frames
class Metrics(_KeyedPlugin[Measure]):
    """Metrics by name, wired by keys, in training and in evaluations; they are logged as
    `metrics/NAME`.

    Those with keys such as `grads` and `updates` are of training steps only, and see the module
    after the update; those that keep every example, such as `RocAuc`, are of evaluations only.

    Example:
        from fulgurite_keys import Metrics, keyed
        from fulgurite_metrics import Norm

        metrics = Metrics(
            accuracy=keyed(fg.metrics.Accuracy.from_logits, "preds", "batch[1]"),
            hidden=keyed(Norm.from_vectors, "interms.layers[0]"),
            update=keyed(Norm.from_tree, "updates"),
        )
        engine = fg.Engine(steps=100, plugins=[metrics])
    """

    plugin_name = "metrics"
    kind = Measure

    def __init__(self, **metrics: Measure) -> None:
        super().__init__(metrics)
        _check_one_place(self._items, type(self).__name__)

    @fg.hookimpl
    def step_metrics(
        self,
        state: fg.TrainState,
        output: fg.Output,
        grads: Any,
        updates: Any,
        batch: Any,
        ctx: fg.Context,
    ) -> dict[str, Any]:
        """Return the metrics of what is there after the update only."""
        scope = _make_update_scope(state, output, grads, updates, batch, ctx)
        metrics = {}
        for name, item in self._items.items():
            if item.needs_update:
                with error_context(lambda name=name: f"the metric {name!r} of Metrics"):
                    metrics[name] = item.evaluate(scope, ctx.mask)
        return metrics

    def _is_active(self, item: Measure, ctx: fg.Context) -> bool:
        return not item.needs_update and not (ctx.training and item.for_evaluations)

    def _add(
        self, output: fg.Output, items: dict[str, Measure], scope: Scope, ctx: fg.Context
    ) -> fg.Output:
        metrics = {}
        for name, item in items.items():
            with error_context(lambda name=name: f"the metric {name!r} of Metrics"):
                metrics[f"{self.plugin_name}/{name}"] = item.evaluate(scope, ctx.mask)
        taken = sorted(metrics.keys() & flatten_nested(output.metrics).keys())
        if taken:
            raise ModelError(
                f"the metric {taken[0]!r} comes from the step and from Metrics; rename one"
            )
        return output.replace(metrics={**output.metrics, **metrics})


@hide_constructor_frames
class Summaries(_KeyedPlugin[Summary], MediaLogger):
    """Pictures and histograms by name, wired by keys, at the steps of `every` and of the first
    batch of each evaluation; they take the place of `MediaLogger` and show what the step returns as
    media, too.

    Those with keys such as `grads` and `updates` are of training steps only, see the module after
    the update, and are shown as `media/NAME`.

    Example:
        from fulgurite_keys import Histogram, Images, Summaries

        summaries = Summaries(
            every=500, image=Images("batch.image[:8]"), weights=Histogram("module.**.weight")
        )
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=["tensorboard", summaries])

    Attributes:
        every: a trigger, or an interval in steps, as of `MediaLogger`.
    """

    plugin_name = "media"
    kind = Summary

    def __init__(self, *, every: int | fg.Trigger = 500, **summaries: Summary) -> None:
        MediaLogger.__init__(self, every)
        _KeyedPlugin.__init__(self, summaries)
        _check_one_place(self._items, type(self).__name__)

    @fg.hookimpl
    def step_metrics(
        self,
        state: fg.TrainState,
        output: fg.Output,
        grads: Any,
        updates: Any,
        batch: Any,
        ctx: fg.Context,
    ) -> dict[str, Any]:
        """Return what is shown of what is there after the update only."""
        scope = _make_update_scope(state, output, grads, updates, batch, ctx)
        items = {name: item for name, item in self._items.items() if item.needs_update}
        return {name: self._prepare(name, item, scope) for name, item in items.items()}

    def _is_active(self, item: Summary, ctx: fg.Context) -> bool:
        return not item.needs_update

    def _prepare(self, name: str, item: Summary, scope: Scope) -> Callable[[], fg.Media]:
        """Return the function that draws a summary where it is shown.

        What it shows is looked up here, where a mistake is seen in every step.
        """
        with error_context(lambda: f"the summary {name!r} of Summaries"):
            values = item.resolve(scope)
        return lambda: item.draw(**values)

    def _add(
        self, output: fg.Output, items: dict[str, Summary], scope: Scope, ctx: fg.Context
    ) -> fg.Output:
        shown: dict[str, Any] = {}
        for name, item in items.items():
            if name in output.media:
                raise ModelError(
                    f"the media {name!r} come from the step and from Summaries; rename one"
                )
            shown[name] = self._prepare(name, item, scope)
        return output.replace(media={**output.media, **shown})


def _check_one_place(items: Mapping[str, Keyed], where: str) -> None:
    """Refuse an object that needs both what only the forward pass has, and what comes after it."""
    for name, item in items.items():
        prefixes = {key.prefix for key in item.get_keys().values()}
        if item.needs_update and "interms" in prefixes:
            raise ConfigurationError(
                f"{where}: {name} needs both interms, which only the forward pass has, and what is "
                "there after the update: split it in two"
            )


def _make_update_scope(
    state: fg.TrainState, output: fg.Output, grads: Any, updates: Any, batch: Any, ctx: fg.Context
) -> Scope:
    """Return what keys find after the update; the arguments are those of `step_metrics`."""
    values = _list_forward_values(state.module, batch, output, ctx)
    values |= {
        "grads": grads,
        "updates": updates,
        "opt_state": state.opt_state,
        "losses": output.losses,
        "metrics": {name: _compute(metric) for name, metric in output.metrics.items()},
    }
    return Scope(values, "what is computed after the update")


def _list_forward_values(
    module: Any, batch: Any, output: fg.Output, ctx: fg.Context
) -> dict[str, Any]:
    """Return what keys find in a forward pass, by first name."""
    model_state = ctx.model_state if output.model_state is None else output.model_state
    return {
        "batch": batch,
        "preds": output.preds,
        "aux": output.aux,
        "module": module,
        "model_state": model_state,
        "step": ctx.step,
    }


def _compute(metric: Any) -> Any:
    return metric.compute() if hasattr(metric, "compute") else metric
