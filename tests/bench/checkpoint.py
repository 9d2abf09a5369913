"""What a checkpoint costs the training, against Orbax's own asynchronous checkpointer in the same
loop.

A state of 200 MB in 50 arrays is trained by one engine. Every few steps it is saved, in
turns by `Checkpointer` and by `ocp.training.Checkpointer`, which keeps neither hashes nor commits;
before each save the former one is complete.

    save_blocking        seconds for which one save blocks the loop
    steps_while_saving   seconds that the steps take that follow it while it is being written

The ratios are ours over Orbax's, save by save.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from harness import Spread, arguments, ratio, show, write

LEAVES, SIZE = 50, 1_000_000
NEVER = fg.At(10**9)


class Large(fg.Module):
    """50 arrays of 4 MB, each multiplied with the batch."""

    parts: list[jax.Array]

    def __init__(self, *, key: Any) -> None:
        self.parts = [jnp.full(SIZE, 1.0 + number / LEAVES) for number in range(LEAVES)]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.stack([jnp.mean(part * batch[0]) ** 2 for part in self.parts]).sum())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


class Turns:
    """Saves every `period` steps, with the arms in turns, and times the `steps` steps after it."""

    def __init__(self, folder: Path, period: int, steps: int) -> None:
        from orbax.checkpoint import v1 as ocp

        training: Any = ocp.training
        self.orbax = training.Checkpointer(
            folder / "orbax",
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(1),
        )
        self.period, self.steps = period, steps
        self.blocking: dict[str, list[float]] = defaultdict(list)
        self.following: dict[str, list[float]] = defaultdict(list)
        self.arm, self.begun, self.ours = "ours", 0.0, 0
        self.response: Any = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        timed = fg.At(*range(self.period + self.steps, 100_000, self.period))
        return [
            fg.ScheduledAction("timed", timed, self.time, "act"),
            fg.ScheduledAction("saved", self.period, self.write, "save"),
        ]

    def write(self, run: fg.Run) -> None:
        self.wait(run)
        jax.block_until_ready(run.state)
        self.arm = "ours" if self.arm == "orbax" else "orbax"
        begun = perf_counter()
        if self.arm == "ours":
            self.ours = run.step
            run.save()
        else:
            arrays = jax.tree_util.tree_leaves_with_path(eqx.filter(run.state, eqx.is_array))
            tree = {
                jax.tree_util.keystr(path, simple=True, separator="/"): leaf
                for path, leaf in arrays
            }
            self.response = self.orbax.save_async(run.step, tree, force=True)
        self.begun = perf_counter()
        self.blocking[self.arm].append(self.begun - begun)

    def time(self, run: fg.Run) -> None:
        jax.block_until_ready(run.state)
        self.following[self.arm].append(perf_counter() - self.begun)

    def wait(self, run: fg.Run) -> None:
        """Returns when nothing is being written any more."""
        if self.response is not None:
            self.response.result()
        assert run.run_dir is not None
        while self.ours and self.ours not in dict(run.run_dir.list_checkpoints()):
            sleep(0.01)
        sleep(0.05)  # what is superfluous is removed after the commit


def main() -> None:
    parser = arguments(__doc__, repeats=15)
    parser.add_argument(
        "--steps", type=int, default=6, help="steps timed after each save (default 6)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        period = options.steps + 1
        turns = Turns(Path(folder), period, options.steps)
        engine = fg.Engine(
            steps=(2 * options.repeats + 3) * period,
            plugins=[Checkpointer(NEVER, max_to_keep=1), turns],
            autoload=False,
            run_dir=Path(folder) / "run",
            log_every=None,
        )
        engine.fit(Large, [np.full(1, 0.5, np.float32)])
    # The first save of each arm imports and warms up.
    blocking = {arm: values[1 : options.repeats + 1] for arm, values in turns.blocking.items()}
    following = {arm: values[1 : options.repeats + 1] for arm, values in turns.following.items()}
    ratios = {
        "save_blocking": ratio(blocking, "ours", "orbax"),
        "steps_while_saving": ratio(following, "ours", "orbax"),
    }
    seconds = {f"{arm} blocking": Spread.of(values) for arm, values in blocking.items()}
    seconds |= {
        f"{arm} {options.steps} steps": Spread.of(values) for arm, values in following.items()
    }
    show("seconds: median, quartiles", seconds)
    show("ratio of ours to Orbax's own", ratios)
    if options.json:
        write(options.json, ratios, seconds=seconds)


if __name__ == "__main__":
    main()
