"""Log batches, examples, tokens and FLOPs a second, and the model FLOPs utilization."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, check_name, check_positive_int
from fulgurite.plugins import BatchItem, count_model_flops, hide_constructor_frames
from jax.extend.core import ClosedJaxpr

from fulgurite_monitor.arguments import check_rate
from fulgurite_monitor.buckets import Classifier
from fulgurite_monitor.peaks import find_peak
from fulgurite_monitor.rates import RateWindow

PAUSES = ("compile", "evaluation", "save", "restore")
"""Buckets whose seconds are not those of training."""


@dataclass
class _Meter:
    """What was counted in one fit.

    Attributes:
        window: of the newest log steps.
        counts: by name, since the fit began.
        classifier: of what the time was spent on.
        first_step: the step at which the fit began.
        flops_by_shapes: of a step, by the shapes of its batch; the first program comes first.
        num_counted: batches whose FLOPs are in the counts.
        last_logged: when the newest record was logged; None before the first.
    """

    window: RateWindow
    counts: dict[str, float]
    classifier: Classifier
    first_step: int
    flops_by_shapes: Mapping[Any, float]
    num_counted: int = 0
    last_logged: float | None = None


@hide_constructor_frames
@dataclass(eq=False)
class Throughput(fg.Plugin):
    """Log how fast a run trains, at log steps, as telemetry.

    The records of the source `throughput` have `batches_per_second`, `examples_per_second` (padding
    does not count), `NAME_per_second` for each of `items`, and, if they are known,
    `flops_per_second`, and `mfu` with its `peak_flops_per_second`. The time of evaluations, saves
    and compilation is left out; `Goodput` tells of that. The first log step has no record.

    MFU is the model FLOPs a second of all devices over the peak of all of them. The model FLOPs are
    `count_model_flops` of the traced step: products of matrices and convolutions, with the trips of
    loops, without what `jax.checkpoint` computes again. The peak is that of the table
    `fulgurite_monitor.PEAKS`, for dense products of bfloat16. A message says once what the numbers
    are, or why there is no MFU.

    Example:
        from fulgurite_monitor import Throughput

        throughput = Throughput(items={"features": lambda batch: batch["x"].size})
        engine = fg.Engine(steps=100, plugins=[throughput])

    Attributes:
        items: what else is counted, by name: `count(batch)` returns the number of them in a batch
            as the data source yields it. It is called for every batch, on the host.
        window: the number of log steps that a rate is over: with 2, from one to the next.
        interval: seconds that are between two records at least. Of log steps that come faster most
            are passed over, and a rate is over those that are not.
        peak_flops: of one device, a second; by default that of the table.
        flops_per_step: of all devices; by default they are counted. Give them where a step calls
            kernels of its own, in which nothing is counted.
    """

    items: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)
    window: int = 2
    interval: float = 1.0
    peak_flops: float | None = None
    flops_per_step: float | None = None
    _meter = fg.PerFit["_Meter | None"](lambda: None)

    def __post_init__(self) -> None:
        if not isinstance(self.items, Mapping):
            raise ConfigurationError(
                f"Throughput: items is {self.items!r}; give functions of the batch by name, such "
                "as items={'tokens': lambda batch: batch['tokens'].size}"
            )
        for name, count in self.items.items():
            check_name(name, "Throughput: the name of items")
            if not callable(count):
                raise ConfigurationError(
                    f"Throughput: items has {count!r} as {name!r}; give a function of the batch "
                    "that returns a number"
                )
        check_positive_int(self.window, "Throughput: window")
        if self.window < 2:
            raise ConfigurationError("Throughput: window is 1; a rate is over 2 log steps or more")
        if not isinstance(self.interval, int | float) or not self.interval >= 0:
            raise ConfigurationError(
                f"Throughput: interval is {self.interval!r}; give seconds, or 0 for each log step"
            )
        for name in ("peak_flops", "flops_per_step"):
            value = getattr(self, name)
            if value is not None:
                check_rate(value, f"Throughput: {name}")
        # The FLOPs of a step by the shapes of its batch, for each update rule: another fit of the
        # same program compiles nothing, so that it is told nothing.
        self._programs: list[tuple[Any, dict[Any, float]]] = []

    @fg.hookimpl
    def register_actions(self, log_trigger: fg.Trigger | None) -> list[fg.ScheduledAction]:
        """Log with the engine."""
        if log_trigger is None:
            raise ConfigurationError(
                "Throughput logs at log steps, and this engine has none: give log_every=, or leave "
                "it out"
            )
        return [fg.ScheduledAction("log", "log", self.log, stage="act")]

    @fg.hookimpl
    def on_compile(
        self, run: fg.Run | None, name: str, batch_spec: Any, jaxpr: ClosedJaxpr
    ) -> None:
        """Count the FLOPs of a new training step.

        Args:
            run: the run; None outside of a fit, where the program is not known to be of one.
            name: of the program.
            batch_spec: the shapes of its batch.
            jaxpr: the program.
        """
        if name != "step" or run is None:
            return
        if self._meter is not None:
            self._count_flops(run, self._meter)  # of the steps before, by their program
        self._get_program(run)[_get_shapes(batch_spec)] = count_model_flops(jaxpr)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Count each batch from now on."""
        is_on_device = isinstance(run.data, fg.ArrayData) and run.data.on_device
        if self.items and is_on_device:
            raise ConfigurationError(
                f"Throughput: {', '.join(self.items)} cannot be counted, because "
                "ArrayData(on_device=True) has no batches on the host: leave out items, or "
                "on_device"
            )
        flops_by_shapes = self._get_program(run)
        meter = _Meter(
            RateWindow(self.window),
            dict.fromkeys(["examples", *self.items, "flops"], 0.0),
            Classifier(run.engine.actions),
            run.step,
            flops_by_shapes,
        )
        self._meter = meter
        counts = meter.counts
        functions = tuple(self.items.items())

        # Called for every batch: a step may take no more than a tenth of a millisecond.
        def count(item: BatchItem) -> None:
            batch = item.batch
            counts["examples"] += _count_examples(batch, is_on_device)
            for name, count_items in functions:
                try:
                    counts[name] += count_items(batch)
                except Exception as error:
                    error.add_note(f"while Throughput counted the {name} of a batch")
                    raise
            if len(flops_by_shapes) > 1 and self.flops_per_step is None:
                counts["flops"] += flops_by_shapes.get(_get_shapes(batch), math.nan)
                meter.num_counted += 1

        run.data_iterator.observe(count)

    def log(self, run: fg.Run) -> None:
        """Log the rates of the newest window."""
        meter = self._meter
        assert meter is not None
        now = perf_counter()
        if meter.last_logged is not None and now < meter.last_logged + self.interval:
            return
        seconds = meter.classifier.add_up(run.timings.seconds)
        trained = now - sum(seconds[pause] for pause in PAUSES)
        num_batches = run.step - meter.first_step
        self._count_flops(run, meter)
        counts = {**meter.counts, "batches": num_batches}
        rates = meter.window.update(trained, counts)
        if rates is None:
            return
        flops = rates.pop("flops")
        # A process reads only its own part of every batch.
        _, num_parts = run.data_iterator.process
        values = {f"{name}_per_second": rate * num_parts for name, rate in rates.items()}
        values["batches_per_second"] = rates["batches"]
        if flops > 0:
            values["flops_per_second"] = flops
            values |= self._compare_with_peak(run, flops)
        if meter.last_logged is None:
            run.notify(self.registered_name, self._explain(run, meter, flops))
        meter.last_logged = now
        run.log_scalars(self.registered_name, values, stream="telemetry")

    def _count_flops(self, run: fg.Run, meter: _Meter) -> None:
        """Count the FLOPs of the steps since the last call; NaN if they are not known.

        An update rule that changes has another program, by which only the steps from then on count.

        Args:
            run: the run.
            meter: of it.
        """
        num_new = run.step - meter.first_step - meter.num_counted
        if not num_new:
            return
        flops = self.flops_per_step
        if flops is None:
            flops = next(iter(meter.flops_by_shapes.values()), math.nan)
        meter.counts["flops"] += flops * num_new
        meter.num_counted += num_new

    def _get_program(self, run: fg.Run) -> dict[Any, float]:
        """Return the FLOPs of a step by the shapes of its batch, for the program of a run."""
        for update_rule, flops_by_shapes in self._programs:
            if update_rule is run.update_rule:
                return flops_by_shapes
        self._programs.append((run.update_rule, {}))
        return self._programs[-1][1]

    def _compare_with_peak(self, run: fg.Run, flops: float) -> dict[str, float]:
        """Return MFU and its denominator; nothing for a device whose peak is not known.

        Args:
            run: the run.
            flops: a second, of all devices.
        """
        device, num_devices = _get_devices(run)
        peak, _ = self._find_peak(device)
        if peak is None:
            return {}
        return {"mfu": flops / (peak * num_devices), "peak_flops_per_second": peak * num_devices}

    def _find_peak(self, device: Any) -> tuple[float | None, str]:
        """Return the peak of a `jax.Device`, and where it is from."""
        if self.peak_flops is not None:
            return self.peak_flops, "Throughput(peak_flops=...)"
        peak = find_peak(device.device_kind)
        return (None, "") if peak is None else peak

    def _explain(self, run: fg.Run, meter: _Meter, flops: float) -> str:
        """Return what MFU is made of, or why there is none."""
        device, num_devices = _get_devices(run)
        peak, source = self._find_peak(device)
        if peak is None:
            return (
                f"no MFU: the peak of {device.device_kind!r} is not known; "
                "Throughput(peak_flops=...) gives it, for one device"
            )
        if not flops > 0:
            return (
                "no MFU: the FLOPs of a step are not known, because its program was compiled "
                "before this fit; Throughput(flops_per_step=...) gives them"
            )
        mean = meter.counts["flops"] / (run.step - meter.first_step)
        origin = "products of matrices and convolutions in the traced step"
        if self.flops_per_step is not None:
            origin = "Throughput(flops_per_step=...)"
        return (
            f"MFU is {mean:.4g} FLOP a step ({origin}) x steps a second / ({num_devices} "
            f"{device.device_kind} x {peak:.4g} FLOP/s, {source})"
        )


def _get_devices(run: fg.Run) -> tuple[Any, int]:
    """Return a device of a run, and how many it trains on."""
    mesh = run.engine.sharding.mesh
    if mesh is None:
        return jax.devices()[0], 1
    return mesh.devices.flat[0], mesh.size


def _get_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch))


def _count_examples(batch: Any, is_indexed: bool) -> float:
    """Return the number of examples of a batch on the host, without padding.

    Args:
        batch: as its source yields it.
        is_indexed: whether it is indices of arrays on the device.
    """
    if is_indexed or isinstance(batch, fg.Batch):
        if batch.mask is not None:
            return int(np.count_nonzero(batch.mask))
        num_examples = getattr(batch, "num_examples", None)
        if num_examples is not None:
            return float(num_examples)
    # Ten times faster than a walk through the tree, and called for every batch.
    leaf = batch
    while isinstance(leaf, dict) and leaf:
        leaf = next(iter(leaf.values()))
    shape = getattr(leaf, "shape", ())
    if shape:
        return shape[0]
    lengths = (np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch))
    return next((length for (length,) in filter(None, lengths)), 1)
