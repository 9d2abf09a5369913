"""What monitors cost training: the same small fit, logging every 50 steps, with them and without.

    none         an Engine that logs with `jsonl` into a run directory
    throughput, devices, goodput, alert    the same with one of them
    all          with all of them; items are counted for each batch, and the telemetry is written

Timed are the steps from `OPENED` on until the last one is done, as in `loggers.py`; the arms take turns.
With all of them a step may cost at most 1.02 of one without. Where other programs run, wall time tells
little: the processor time of the same steps is shown as well, of all threads, and of the thread that
trains alone. XLA's threads spin while they wait, so that the former depends on what else runs.

python tests/bench/monitor.py --json monitor.json
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import fulgurite as fg
import jax
from fulgurite_monitor import Alert, DeviceStatistics, Goodput, Throughput
from harness import Spread, arguments, interleaved, ratio, show, write
from loggers import OPENED, STEPS, Arm, quiet

LOG_EVERY = 50


class Processor:
    """Notes the processor time of the process and of its thread that trains, at the step `OPENED`
    and at the last one."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("note", fg.At(OPENED) | fg.AtEnd(), self.note)]

    def note(self, run: fg.Run) -> None:
        jax.block_until_ready(run.state.module)
        self.at.append((process_time(), thread_time()))


class TimedArm(Arm):
    """An arm that notes the processor time of the timed steps of each fit too: of the process in
    `seconds`, of the thread that trains in `thread_seconds`."""

    def __init__(self, plugins: list[Any], run: Path) -> None:
        self._processor = Processor()
        self.seconds: list[float] = []
        self.thread_seconds: list[float] = []
        super().__init__([*plugins, self._processor], run, log_every=LOG_EVERY)
        self.seconds.clear()  # the first fit compiles
        self.thread_seconds.clear()

    def __call__(self) -> float:
        wall_time = super().__call__()
        opened, trained = self._processor.at[-2:]
        self.seconds.append(trained[0] - opened[0])
        self.thread_seconds.append(trained[1] - opened[1])
        return wall_time


def build_plugins() -> dict[str, list[Any]]:
    """Return the monitors of each arm."""

    def count_numbers(batch: Any) -> int:
        return batch["input"].size

    def make_alert() -> Alert:
        return Alert("train/loss > 1e9", do=[print])

    single = {
        "throughput": [Throughput()],
        "devices": [DeviceStatistics()],
        "goodput": [Goodput()],
        "alert": [make_alert()],
    }
    every = [
        Throughput(items={"numbers": count_numbers}),
        DeviceStatistics(),
        Goodput(),
        make_alert(),
    ]
    return {"none": [], **single, "all": every}


def main(command_line: Sequence[str] | None = None) -> None:
    """Measure, and print it.

    Args:
        command_line: the options; by default those of the process.
    """
    options = arguments(__doc__, repeats=15).parse_args(command_line)
    with tempfile.TemporaryDirectory() as folder, quiet():
        arms = {
            name: TimedArm(["jsonl", *plugins], Path(folder) / name)
            for name, plugins in build_plugins().items()
        }
        steps = interleaved(arms, options.repeats)
    processor = {name: arm.seconds for name, arm in arms.items()}
    thread = {name: arm.thread_seconds for name, arm in arms.items()}
    ratios = {name: ratio(steps, name, "none") for name in arms if name != "none"}
    fastest = {name: Spread.of([min(steps[name]) / min(steps["none"])]) for name in ratios}
    show("time of the steps over that without monitors", ratios)
    show("the same, fastest fit over fastest fit", fastest)
    cost = {name: ratio(processor, name, "none") for name in ratios}
    show("processor time of the steps over that without monitors", cost)
    least = {name: Spread.of([min(processor[name]) / min(processor["none"])]) for name in ratios}
    show("the same, least over least", least)
    of_thread = {name: ratio(thread, name, "none") for name in ratios}
    show("processor time of the thread that trains", of_thread)
    show(
        "the same, least over least",
        {name: Spread.of([min(thread[name]) / min(thread["none"])]) for name in ratios},
    )
    show("microseconds a step", {name: in_microseconds(steps[name]) for name in ("none", "all")})
    show("of the processor", {name: in_microseconds(processor[name]) for name in ("none", "all")})
    if options.json:
        write(options.json, ratios, fastest=fastest, processor=cost, thread=of_thread)


def in_microseconds(seconds: list[float]) -> Spread:
    """Return what a step took."""
    return Spread.of([1e6 * value / (STEPS - OPENED) for value in seconds])


if __name__ == "__main__":
    main()
