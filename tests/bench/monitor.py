"""What monitors cost training: the same small fit, logging every 50 steps, with them and without.

    none         the default Engine, autoload off
    throughput, devices, goodput, alert    the same with one of them
    all          with all of them; items are counted for each batch, Goodput notes in a run directory

Timed are the steps from `OPENED` on until the last one is done, as in `loggers.py`; the arms take turns.
With all of them a step may cost at most 1.02 of one without. Where other programs run, wall time tells
little: the processor time of the whole process, with opening and closing, is shown as well.

python tests/bench/monitor.py --json monitor.json
"""

import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import jax
from fulgurite_monitor import Alert, DeviceStatistics, Goodput, Throughput
from harness import Spread, arguments, interleaved, ratio, show, write
from loggers import OPENED, STEPS, Arm, quiet

LOG_EVERY = 50


class TimedArm(Arm):
    """An arm that notes the processor time of each fit too, in `processor`."""

    def __call__(self) -> float:
        began = process_time()
        seconds = super().__call__()
        # The first call, of `Arm.__init__`, compiles.
        self.processor: list[float] = getattr(self, "processor", [])
        self.processor.append(process_time() - began)
        return seconds


def build_plugins() -> dict[str, list[Any]]:
    """Return the monitors of each arm."""

    def count_numbers(batch: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(batch))

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


def main() -> None:
    options = arguments(__doc__, repeats=15).parse_args()
    with tempfile.TemporaryDirectory() as folder, quiet():
        arms = {
            name: TimedArm(
                plugins,
                Path(folder) / name if name in ("goodput", "all") else None,
                log_every=LOG_EVERY,
            )
            for name, plugins in build_plugins().items()
        }
        steps = interleaved(arms, options.repeats)
    processor = {name: arm.processor[1:] for name, arm in arms.items()}
    ratios = {name: ratio(steps, name, "none") for name in arms if name != "none"}
    fastest = {name: Spread.of([min(steps[name]) / min(steps["none"])]) for name in ratios}
    show("time of the steps over that without monitors", ratios)
    show("the same, fastest fit over fastest fit", fastest)
    cost = {name: ratio(processor, name, "none") for name in ratios}
    show("processor time of a fit over that without monitors", cost)
    least = {name: Spread.of([min(processor[name]) / min(processor["none"])]) for name in ratios}
    show("the same, least over least", least)
    microseconds = [1e6 * seconds / (STEPS - OPENED) for seconds in steps["none"]]
    show("microseconds a step", {"none": Spread.of(microseconds)})
    if options.json:
        write(options.json, ratios, fastest=fastest, processor=cost)


if __name__ == "__main__":
    main()
