"""Peak memory of fresh processes, at 50 million parameters and Adam: the engine, and a program by hand.

    hand             a donated `jax.jit` loop over a model that was made before
    instance         `fit` of a module that was made before
    class            `fit` of a class, which makes the module
    evaluation       `instance` with an evaluator
    saving by hand   `hand`, with one save by Orbax' asynchronous checkpointer in the middle
    saving           `instance`, with one checkpoint in the middle, saved in the background

Each trains 6 steps. Printed are MiB over those of a process that has only imported everything; the
ratios are over `hand`, and of `saving` over `saving by hand`.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import orbax.checkpoint as ocp
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from harness import Spread, arguments, show, write
from workloads import OPTIMIZER, Trained, Workload, build_update, iterate_batches

STEPS = 6
WORKLOAD = Workload(
    partial(eqx.nn.MLP, 64, 10, 5_000, 3), (64,), 8, STEPS, examples=256
)  # 2 x 25 million


def train_by_hand(save: Callable[[int, Any], None] | None = None) -> None:
    """Train in a donated loop; `save(step, carry)` is called after each step."""
    params, update = build_update(WORKLOAD.model(key=jax.random.key(0)))
    carry = params, OPTIMIZER.init(params)
    del params
    step = jax.jit(update, donate_argnums=(0, 1))
    batches = iterate_batches(WORKLOAD, WORKLOAD.arrays(), True)
    for index in range(1, STEPS + 1):
        *carry, _ = step(*carry, jax.random.key(0), np.int32(index), next(batches))
        if save is not None:
            save(index, carry)
    jax.block_until_ready(carry)


def save_by_hand() -> None:
    """Train by hand, with one save by Orbax in the background."""
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

        def save(step: int, carry: Any) -> None:
            if step == STEPS // 2:
                leaves = dict(enumerate(jax.tree.leaves(carry)))
                state = {str(index): leaf for index, leaf in leaves.items()}
                checkpointer.save(Path(folder) / "state", args=ocp.args.StandardSave(state))

        train_by_hand(save)
        checkpointer.wait_until_finished()
        checkpointer.close()


class TrainedFromClass(Trained):
    """The model as a class makes it."""

    def __init__(self, *, key: Any) -> None:
        self.model = WORKLOAD.model(key=key)


def fit(model: Any, plugins: list[Any] | None = None, run_dir: Path | None = None) -> None:
    """Train with the engine."""
    data = fg.ArrayData(WORKLOAD.arrays(), WORKLOAD.batch_size, shuffle=True)
    engine = fg.Engine(steps=STEPS, plugins=plugins or [], run_dir=run_dir, autoload=False)
    result = engine.fit(model, data)
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))


def make_module() -> Trained:
    """Return the module as an instance."""
    return Trained(WORKLOAD.model(key=jax.random.key(0)))


def fit_with_evaluation() -> None:
    """Train with an evaluator."""
    data = fg.ArrayData(WORKLOAD.arrays(), WORKLOAD.batch_size)
    fit(make_module(), [Evaluator("test", data, every=STEPS // 2)])


def fit_and_save() -> None:
    """Train with one checkpoint in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        fit(make_module(), [Checkpointer(every=fg.At(STEPS // 2))], Path(folder) / "run")


ARMS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "hand": train_by_hand,
    "instance": lambda: fit(make_module()),
    "class": lambda: fit(TrainedFromClass),
    "evaluation": fit_with_evaluation,
    "saving by hand": save_by_hand,
    "saving": fit_and_save,
}


def run_process(arm: str) -> float:
    """Return the peak memory of a fresh process, in MiB."""
    command = [sys.executable, __file__, "--arm", arm]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Run the processes, print the tables and write the file."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--arm", choices=ARMS, help="what a fresh process is asked for")
    options = parser.parse_args()
    if options.arm:
        ARMS[options.arm]()
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
        return
    rounds = [{arm: run_process(arm) for arm in ARMS} for _ in range(options.repeats)]
    names = [arm for arm in ARMS if arm != "nothing"]
    mebibytes = {
        name: Spread.of([results[name] - results["nothing"] for results in rounds])
        for name in names
    }
    bases = dict.fromkeys(["instance", "class", "evaluation"], "hand")
    bases["saving"] = "saving by hand"
    ratios = {
        name: Spread.of(
            [
                (results[name] - results["nothing"]) / (results[base] - results["nothing"])
                for results in rounds
            ]
        )
        for name, base in bases.items()
    }
    show("MiB", mebibytes)
    show("ratios", ratios)
    if options.json:
        write(options.json, ratios, mebibytes=mebibytes)


if __name__ == "__main__":
    main()
