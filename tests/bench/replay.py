"""What fulgurite-replay costs a run, and how long it takes to find a bad batch.

All arms train the same model with `Engine.fit`, in turns, compiled before the timed region, which
has a thousand steps and so as many as twenty digests and ten checked steps.

    plain      the default Engine, with a run directory
    digest     with StateDigest(every=50)
    self       with SelfCheck(every=100)
    capture    with Capture(every=50)
    checked    with Checked("float")

The ratios are over plain, of the wall time and of the CPU time of the process, which says more on a
machine that does other things too. With `--find`, the transformer is trained for 200 steps with a bad batch at step
137, and the seconds are printed that `replay` takes to name the operation.
"""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import NonFiniteError
from fulgurite_checkpoint import Checkpointer
from fulgurite_replay import Capture, Checked, Recorded, SelfCheck, StateDigest, replay
from harness import Spread, arguments, interleaved, ratio, show, write
from workloads import WORKLOADS, Trained, copy_arrays

ARMS = {
    "plain": [],
    "digest": [StateDigest(every=50)],
    "self": [SelfCheck(every=100)],
    "capture": [Capture(every=50)],
    "checked": [Checked("float")],
}
SEARCH_STEPS, BAD_STEP = 200, 137


def measure_step(engine: fg.Engine, state: Any, data: Any, cpu_seconds: list[float]) -> float:
    """Return the seconds of a step, over all steps of a fit from the initial state; note its CPU
    time."""
    state = copy_arrays(state)
    before, cpu_before = perf_counter(), process_time()
    result = engine.fit(data=data, state=state, resume="never")
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
    num_steps = int(result.state.step)
    cpu_seconds.append((process_time() - cpu_before) / num_steps)
    return (perf_counter() - before) / num_steps


def measure_costs(name: str, steps: int, repeats: int, folder: Path) -> dict[str, Spread]:
    """Return the ratios of a workload, over fits of `steps` steps."""
    workload = WORKLOADS[name]
    data = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
    model = Trained(workload.model(key=jax.random.key(0)))
    arms = {}
    cpu_seconds: dict[str, list[float]] = {}
    for arm, plugins in ARMS.items():
        engine = fg.Engine(
            steps=steps,
            autoload=False,
            plugins=[*plugins, "jsonl"],
            run_dir=str(folder / f"{name}-{arm}"),
        )
        state = engine.init_state(model, data)
        measure_step(engine, state, data, [])
        cpu_seconds[arm] = []
        arms[arm] = partial(measure_step, engine, state, data, cpu_seconds[arm])
    seconds = interleaved(arms, repeats)
    show(
        f"{name}: milliseconds a step",
        {k: Spread.of([1e3 * s for s in v]) for k, v in seconds.items()},
    )
    ratios = {}
    for arm in ARMS:
        if arm != "plain":
            ratios[f"{name}/{arm}"] = ratio(seconds, arm, "plain")
            ratios[f"{name}/{arm}, CPU"] = ratio(cpu_seconds, arm, "plain")
    return ratios


class Weighted(Trained):
    """A model whose loss is divided by a number in each batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the loss over `divisor`."""
        batch = dict(batch)
        divisor = batch.pop("divisor").mean()
        output = super().training_step(batch, ctx)
        return output.replace(loss=output.loss / divisor)


def make_search(path: Path) -> Recorded:
    """Return a run of the transformer that saves every 50 steps and has a bad batch."""
    workload = WORKLOADS["transformer"]
    arrays = {name: array[: workload.batch_size] for name, array in workload.arrays().items()}
    batches = [
        {**arrays, "divisor": np.ones(workload.batch_size, np.float32)} for _ in range(SEARCH_STEPS)
    ]
    batches[BAD_STEP - 1]["divisor"] *= 0
    plugins = [Checkpointer(every=50), "jsonl"]
    engine = fg.Engine(steps=SEARCH_STEPS, autoload=False, plugins=plugins, run_dir=str(path))
    return Recorded(engine, Weighted(workload.model(key=jax.random.key(0))), batches, path)


def train_until_it_fails(path: Path) -> None:
    """Train that run up to its bad batch."""
    recorded = make_search(path)
    try:
        recorded.engine.fit(recorded.model, recorded.data)
    except NonFiniteError as error:
        print(f"training ended: {error}")


def measure_search(folder: Path) -> None:
    """Print how long it takes to find what a division by zero at step 137 has made, in a process
    that has compiled nothing yet."""
    path = folder / "bad"
    subprocess.run([sys.executable, __file__, "--train", str(path)], check=True)
    before, cpu_before = perf_counter(), process_time()
    print(replay(make_search(path), BAD_STEP))
    print(f"{perf_counter() - before:.1f} s, {process_time() - cpu_before:.1f} s of CPU time")


def main() -> None:
    """Run the arms, print the tables and write the file."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp_784"])
    parser.add_argument(
        "--steps", metavar="N", type=int, default=1000, help="of each fit (default 1000)"
    )
    parser.add_argument("--find", action="store_true", help="find a bad batch of the transformer")
    parser.add_argument("--train", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train_until_it_fails(options.train)
        return
    ratios: dict[str, Spread] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.find:
            measure_search(Path(folder))
            return
        for name in options.models:
            ratios |= measure_costs(name, options.steps, options.repeats, Path(folder))
    show("ratios", ratios)
    if options.json is not None:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
