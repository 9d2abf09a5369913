"""What an evaluation has summed up, batch by batch, and its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import numpy as np

from fulgurite._src.evaluation.batch_metrics import as_numbers, compute_collected
from fulgurite._src.evaluation.evaluation import Evaluation, EvaluationResult
from fulgurite._src.evaluation.program import Carry
from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import CollectingMetric, flatten_nested
from fulgurite._src.metrics.basic import is_over_nothing
from fulgurite.errors import ModelError


@dataclass(frozen=True)
class Pending:
    """What one batch collected, on the device.

    Attributes:
        done: an array that the batch leaves.
        collected: the arrays of the collecting metrics.
        treedef: their structure.
    """

    done: Any
    collected: list[Any]
    treedef: Any

    def read(self) -> dict[str, CollectingMetric]:
        """Return the collecting metrics by name, on the host, once the batch is done."""
        self.done.block_until_ready()
        # `device_get` of nothing takes 10 µs.
        return self.treedef.unflatten(jax.device_get(self.collected) if self.collected else [])


@dataclass(frozen=True, eq=False)
class EvaluationTotals:
    """The metrics of an evaluation over the batches so far, as `Engine.evaluate_step` returns them.

    They are summed up on the device; nothing is read before `compute`.

    Example:
        state = engine.init_state(model, data)
        totals = None
        for batch in data:
            totals = engine.evaluate_step(state, batch, totals)
        print(totals.compute()["loss"])

    Attributes:
        evaluation: what is evaluated.
        num_batches: how many batches there were.
        carries: by structure of the batches, what one of them hands to the next.
        parts: the collecting metrics of each batch, on the host.
        pending: those of the newest batches.
        shown: the media of the first batch.
    """

    evaluation: Evaluation
    num_batches: int = 0
    carries: Mapping[Any, Carry] = field(default_factory=dict)
    parts: tuple[dict[str, CollectingMetric], ...] = ()
    pending: tuple[Pending, ...] = ()
    shown: Mapping[str, Any] = field(default_factory=dict)

    def compute(self) -> dict[str, Any]:
        """Return the metrics over all batches so far, as `Engine.evaluate` does. Waits for the
        device."""
        return self.get_result().metrics

    def read_metrics(self) -> dict[str, Any]:
        """Return the metrics over all batches so far themselves, by name, on the host: they can be
        merged with those of other evaluations. Waits for the device."""
        accumulator, collected = self._read()
        return {**accumulator.by_name, **collected}

    def get_result(self) -> EvaluationResult:
        """Return the metrics and media over all batches so far. Waits for the device."""
        accumulator, collected = self._read()
        values: dict[str, Any] = accumulator.compute()
        shown = {name: metric.media() for name, metric in accumulator.by_name.items()}
        media = dict(self.shown)
        media |= {name: value for name, value in flatten_nested(shown).items() if value is not None}
        values |= {name: compute_collected(metric) for name, metric in collected.items()}
        values = flatten_nested(values)
        # Summed up here and not for each batch: each term may weigh examples in its own way, so the
        # sums of the batches have no weight that fits.
        losses = self.evaluation.losses or {}
        if "loss" in losses or (losses and "loss" not in values):
            for name in losses:
                if name not in values or np.ndim(values[name]):
                    raise ModelError(
                        f"the loss {name!r} of evaluation {self.evaluation.name!r} is a metric "
                        "that gives several results, and losses are added up: give one number"
                    )
            # A term over nothing adds nothing, unless all are.
            terms = [name for name in losses if not is_over_nothing(accumulator.by_name.get(name))]
            values["loss"] = sum(values[name] for name in terms or losses)
        return EvaluationResult(as_numbers(values), media)

    def _read(self) -> tuple[MetricAccumulator, dict[str, CollectingMetric]]:
        """Return the merged metrics, and the collecting ones by name, on the host."""
        parts: dict[str, list[CollectingMetric]] = {}
        for part in (*self.parts, *(batch.read() for batch in self.pending)):
            for name, metric in part.items():
                parts.setdefault(name, []).append(metric)
        accumulators = [carry.read() for carry in self.carries.values()]
        accumulator = reduce(MetricAccumulator.merge, accumulators, MetricAccumulator({}, {}))
        return accumulator, {name: first.merge(*more) for name, (first, *more) in parts.items()}
