"""How the costs of the engine grow: each curve changes one number and leaves the rest.

    parameters    of a perceptron with one hidden layer, batches of 8
    arrays        of a network of residual layers of width 16, with those of Adam
    metrics       that the training step returns, beside the loss
    plugins       each with a traced hook and an action every 50 steps
    actions       of one plugin, each at a step of its own
    evaluators    each of one batch, every 100 steps
    records       of the run, all at log steps of a plugin
    checkpoints   in the run, all of which stay
    devices       simulated, in a process for each number; data parallel

A row gives the microseconds of a step (or of an evaluation, a record, a checkpoint) of a warm fit,
those of a loop by hand where there is one, their ratio, and the seconds that the first step took
with everything before it but making the model, which eager operations of JAX do alike in both.

python tests/bench/scale.py --markdown scale.md    # ten minutes on two cores
python tests/bench/scale.py --curves metrics
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from harness import arguments
from overhead import partitioned_arm
from workloads import Batch, ResidualNetwork, Trained, Workload, compute_loss

ROUNDS = 3


@dataclass(frozen=True)
class Point:
    """One row of a curve.

    Attributes:
        curve: its name.
        size: the number that changes.
        engine: microseconds of a step or whatever `unit` says.
        hand: those of the loop by hand, if there is one.
        first: seconds to the end of the first step.
        first_by_hand: the same of the loop by hand.
        unit: what the microseconds are of.
    """

    curve: str
    size: int
    engine: float
    hand: float | None = None
    first: float | None = None
    first_by_hand: float | None = None
    unit: str = "step"


def make_perceptron(width: int, steps: int, batch_size: int = 8) -> Workload:
    """Return a perceptron of 64-width-10."""
    return Workload(
        lambda key: eqx.nn.MLP(64, 10, width, 1, key=key), (64,), batch_size, steps, examples=256
    )


def compare(curve: str, size: int, workload: Workload, module: Any = None) -> Point:
    """Return the row of a model: the engine and the loop by hand in turns.

    Args:
        curve: the name of the curve.
        size: the number of the row.
        workload: model and data.
        module: used in the place of `Trained(model)`.
    """
    arrays = workload.arrays()
    model = workload.model(key=jax.random.key(0))
    before = perf_counter()
    arm = partitioned_arm(workload, arrays, model)
    arm.train(arm.start(), 1, True)
    first_by_hand = perf_counter() - before
    module = module or Trained(model)
    data = fg.ArrayData(arrays, workload.batch_size, shuffle=True)
    fit = EngineArm(fg.Engine(steps=1, autoload=False), module, data)
    engine_times: list[float] = []
    hand_times: list[float] = []
    for _ in range(ROUNDS):
        hand_times.append(arm.seconds_per_step(workload.steps))
        engine_times.append(fit.measure(workload.steps))
    return Point(
        curve,
        size,
        1e6 * median(engine_times),
        1e6 * median(hand_times),
        fit.first,
        first_by_hand,
    )


class EngineArm:
    """Fits of one engine that are compiled before they are timed.

    Attributes:
        first: the seconds of the first fit, of one step.
    """

    def __init__(self, engine: fg.Engine, module: Any, data: Any) -> None:
        self._engine = engine
        self._module = module
        self._data = data
        before = perf_counter()
        self._fit(1)
        self.first = perf_counter() - before
        self._fit(64)

    def measure(self, steps: int) -> float:
        """Return the seconds of a step of a fit of that many, without those of a fit of one."""
        short = min(self._time(1) for _ in range(2))
        return max(self._time(steps) - short, 0.0) / (steps - 1)

    def _time(self, steps: int) -> float:
        before = perf_counter()
        self._fit(steps)
        return perf_counter() - before

    def _fit(self, steps: int) -> None:
        result = self._engine.fit(self._module, self._data, steps=steps)
        jax.block_until_ready(eqx.filter(result.module, eqx.is_array))


def measure_parameters() -> Iterator[Point]:
    """Yield rows from 1e4 to 1e8 parameters."""
    for parameters in (10**4, 10**5, 10**6, 10**7, 10**8):
        steps = int(np.clip(2e9 / parameters, 8, 2000))
        yield compare("parameters", parameters, make_perceptron(parameters // 75, steps))


def measure_arrays() -> Iterator[Point]:
    """Yield rows from 13 to 5,005 arrays."""
    for blocks in (0, 9, 49, 416):
        workload = Workload(
            lambda key, blocks=blocks: ResidualNetwork(64, 16, blocks, key=key),
            (64,),
            8,
            steps=max(32, 2000 // (blocks + 1)),
            examples=256,
        )
        yield compare("arrays", 13 + 12 * blocks, workload)


class ManyMetrics(fg.Module):
    """A model whose step returns that many means of its logits."""

    model: Any
    num_metrics: int = eqx.field(static=True)

    def training_step(self, batch: Batch, ctx: fg.Context) -> fg.Output:
        loss, logits = compute_loss(self.model, batch)
        metrics = {
            f"mean_{index}": fg.metrics.Mean.from_values(logits[:, index % 10] * index)
            for index in range(self.num_metrics)
        }
        return fg.Output(loss, metrics=metrics)

    def configure_optimizers(self) -> Any:
        return Trained(self.model).configure_optimizers()


def measure_metrics() -> Iterator[Point]:
    """Yield rows from 0 to 300 metrics; the loop by hand has none."""
    for num_metrics in (0, 10, 100, 300):
        workload = make_perceptron(64, 1000)
        module = ManyMetrics(workload.model(key=jax.random.key(0)), num_metrics)
        yield compare("metrics", num_metrics, workload, module)


class Counting:
    """A plugin with a traced hook, whose metric takes next to nothing, and an action."""

    def __init__(self, number: int) -> None:
        self.plugin_name = f"counting_{number}"

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        return {"step": fg.metrics.LastValue.from_values(state.step.astype(jnp.float32))}

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("note", fg.Every(50), self.note)]

    def note(self, run: fg.Run) -> None:
        """Do nothing: what is measured is the call."""


class ManyActions:
    """A plugin with that many actions, each at steps of its own."""

    plugin_name = "many_actions"

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(f"note_{index}", fg.At(10 + index), self.note)
            for index in range(self._num_actions)
        ]

    def note(self, run: fg.Run) -> None:
        """Do nothing: what is measured is the call."""


class ManyRecords:
    """A plugin that makes that many records every 10 steps."""

    plugin_name = "many_records"

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("log", fg.Every(10), self.log)]

    def log(self, run: fg.Run) -> None:
        """Make the records."""
        for index in range(self._num_records):
            run.log_scalars(f"group_{index}", {"number": index})


class Clock:
    """A plugin that notes the time after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("note", fg.Every(1), self.note)]

    def note(self, run: fg.Run) -> None:
        """Note the time."""
        self.times.append(perf_counter())


def measure_fit(plugins: list[Any], steps: int, **options: Any) -> tuple[float, float]:
    """Return the microseconds of a step with these plugins, and the seconds of the first."""
    workload = make_perceptron(64, steps)
    module = Trained(workload.model(key=jax.random.key(0)))
    data = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
    fit = EngineArm(fg.Engine(steps=1, autoload=False, plugins=plugins, **options), module, data)
    return 1e6 * median(fit.measure(steps) for _ in range(ROUNDS)), fit.first


def measure_plugins() -> Iterator[Point]:
    """Yield rows from 0 to 50 plugins."""
    for num_plugins in (0, 5, 50):
        engine, first = measure_fit([Counting(number) for number in range(num_plugins)], 1000)
        yield Point("plugins", num_plugins, engine, first=first)


def measure_actions() -> Iterator[Point]:
    """Yield rows from 0 to 1,000 actions."""
    for num_actions in (0, 10, 100, 1000):
        engine, first = measure_fit([ManyActions(num_actions)], 1100)
        yield Point("actions", num_actions, engine, first=first)


def measure_evaluators() -> Iterator[Point]:
    """Yield rows from 1 to 100 evaluators, with the time of one evaluation."""
    plain, _ = measure_fit([], 400)
    arrays = make_perceptron(64, 1).arrays()
    batch = fg.ArrayData({name: array[:64] for name, array in arrays.items()}, 64)
    for num_evaluators in (1, 10, 100):
        evaluators = [
            Evaluator(f"evaluation_{number}", batch, every=100) for number in range(num_evaluators)
        ]
        step, first = measure_fit(evaluators, 400)
        evaluation = (step - plain) * 100 / num_evaluators
        yield Point("evaluators", num_evaluators, evaluation, first=first, unit="evaluation")


def measure_records() -> Iterator[Point]:
    """Yield rows from 1e3 to 1e6 records, with the time of one record, to a file of JSON lines."""
    plain, _ = measure_fit([], 1000)
    for num_records in (10**3, 10**4, 10**5, 10**6):
        in_an_action = max(10, num_records // 100)
        steps = 10 * num_records // in_an_action
        with tempfile.TemporaryDirectory() as folder:
            data, module = make_data_and_module()
            engine = fg.Engine(
                steps=steps,
                autoload=False,
                plugins=["jsonl", ManyRecords(in_an_action)],
                run_dir=Path(folder) / "run",
            )
            before = perf_counter()
            engine.fit(module, data)
            seconds = perf_counter() - before - 1e-6 * plain * steps
        yield Point("records", num_records, 1e6 * seconds / num_records, unit="record")


def measure_checkpoints() -> Iterator[Point]:
    """Yield rows from 10 to 500 checkpoints, with the time of the last tenth of them; 2,000 take six
    minutes."""
    for num_checkpoints in (10, 100, 500):
        with tempfile.TemporaryDirectory() as folder:
            data, module = make_data_and_module()
            clock = Clock()
            fg.Engine(
                steps=num_checkpoints,
                autoload=False,
                plugins=[Checkpointer(every=1, max_to_keep=None), clock],
                run_dir=Path(folder) / "run",
            ).fit(module, data)
            last = clock.times[-max(2, num_checkpoints // 10) :]
        seconds = (last[-1] - last[0]) / (len(last) - 1)
        yield Point("checkpoints", num_checkpoints, 1e6 * seconds, unit="checkpoint")


def make_data_and_module() -> tuple[fg.ArrayData, Trained]:
    """Return a small perceptron and its data."""
    workload = make_perceptron(64, 1)
    data = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
    return data, Trained(workload.model(key=jax.random.key(0)))


def measure_devices() -> Iterator[Point]:
    """Yield rows from 1 to 64 simulated devices, each in a process of its own."""
    for num_devices in (1, 4, 16, 64):
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"
        }
        command = [sys.executable, __file__, "--devices", str(num_devices)]
        output = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
        yield Point(**json.loads(output))


def measure_on_devices(num_devices: int) -> Point:
    """Return the row of this process, whose devices are simulated."""
    from fulgurite_sharding import DataParallel
    from sharding import sharded_arm

    workload = make_perceptron(64, 200, batch_size=64)
    arrays = workload.arrays()
    model = workload.model(key=jax.random.key(0))
    strategy = DataParallel()
    before = perf_counter()
    arm = sharded_arm(workload, arrays, model, strategy)
    arm.train(arm.start(), 1, True)
    first_by_hand = perf_counter() - before
    data = fg.ArrayData(arrays, workload.batch_size, shuffle=True)
    fit = EngineArm(fg.Engine(steps=1, autoload=False, plugins=[strategy]), Trained(model), data)
    hand = median(arm.seconds_per_step(workload.steps) for _ in range(ROUNDS))
    engine = median(fit.measure(workload.steps) for _ in range(ROUNDS))
    return Point("devices", num_devices, 1e6 * engine, 1e6 * hand, fit.first, first_by_hand)


CURVES: dict[str, Callable[[], Iterator[Point]]] = {
    "parameters": measure_parameters,
    "arrays": measure_arrays,
    "metrics": measure_metrics,
    "plugins": measure_plugins,
    "actions": measure_actions,
    "evaluators": measure_evaluators,
    "records": measure_records,
    "checkpoints": measure_checkpoints,
    "devices": measure_devices,
}


def format_row(point: Point) -> str:
    """Return the row of a table in Markdown."""

    def format_number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    ratio = None if point.hand is None else point.engine / point.hand
    cells = [
        f"{point.size:,} {point.curve}",
        f"{point.engine:,.0f} a {point.unit}",
        format_number(point.hand, 0),
        format_number(ratio, 2),
        format_number(point.first, 1),
        format_number(point.first_by_hand, 1),
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """| what | engine (µs) | by hand (µs) | ratio | first step (s) | by hand (s) |
|---|---|---|---|---|---|"""


def main() -> None:
    """Measure the curves that were asked for, and print the table."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    parser.add_argument("--devices", type=int, help="what a process of one row is asked for")
    options = parser.parse_args()
    if options.devices:
        print(json.dumps(asdict(measure_on_devices(options.devices))))
        return
    make_data_and_module()
    measure_fit([], 10)  # what a process compiles only once is not part of a curve
    print(HEADER)
    points: list[Point] = []
    for curve in options.curves:
        for point in CURVES[curve]():
            points.append(point)
            print(format_row(point), flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join([HEADER, *map(format_row, points)]) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n")


if __name__ == "__main__":
    main()
