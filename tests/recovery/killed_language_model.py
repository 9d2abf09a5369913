"""The example of a language model, made small, with workers and several processes, killed at a
moment that its arguments say: `killed_language_model.py RUN CACHE OPTIONS`.

The state of the model holds the tokens of every batch that it was trained on, so that a checkpoint
that is lost loses them too.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

SEED = 3
STEPS = 24
ROWS = 66
BATCH_SIZE = 8
LENGTH = 16
VOCABULARY = 300
NUM_PARTS = 2
"""Into which gradients are accumulated."""


def keep(example: Any) -> Any:
    """Return the example, from a worker."""
    return example


def load_example() -> Any:
    """Return the module of the example, on fewer documents."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from fulgurite_data import TextFiles

    example: Any = import_module("language_model")
    example.DOCUMENTS = TextFiles(sysconfig.get_paths()["stdlib"], "[a-c]*.py")
    return example


def build_data(example: Any, cache: Path, workers: dict[str, int]) -> Any:
    """Return the data of the example, of which each epoch has few rows, read by workers."""
    # Not that of this program, which a worker process would look for in its own.
    from killed_language_model import keep

    class FewRows(example.StandardLibrary):
        def make_train(self) -> Any:
            rows = self.training.take(ROWS).shuffle().map(keep, **workers)
            return rows.batch(self.batch_size, remainder="drop")

    return FewRows(cache, VOCABULARY, LENGTH, BATCH_SIZE)


def build_model(example: Any) -> Any:
    """Return what makes the model of the example, with a log of its tokens as its state."""
    import equinox as eqx
    import fulgurite as fg
    import jax.numpy as jnp
    import optax

    class LoggedGPT(example.GPT):
        log: eqx.nn.StateIndex
        num_logged: eqx.nn.StateIndex

        def __init__(self, *arguments: Any, key: Any) -> None:
            super().__init__(*arguments, key=key)
            shape = (STEPS * NUM_PARTS, BATCH_SIZE // NUM_PARTS, LENGTH + 1)
            self.log = eqx.nn.StateIndex(jnp.full(shape, -1, jnp.int32))
            self.num_logged = eqx.nn.StateIndex(jnp.int32(0))

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            output = super().training_step(batch, ctx)
            state: Any = ctx.model_state
            place = state.get(self.num_logged)
            tokens = batch["tokens"]
            # The engine tries a step on fewer examples too.
            log = state.get(self.log).at[place, : len(tokens)].set(tokens)
            state = state.set(self.log, log)
            state = state.set(self.num_logged, place + 1)
            return fg.Output(output.loss, metrics=output.metrics, model_state=state)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, STEPS // 10, STEPS)
    return eqx.nn.make_with_state(partial(LoggedGPT, VOCABULARY, LENGTH, 8, 1, schedule))


class KillItself:
    """Kill this process some time after a number of steps of this attempt.

    Args:
        step: how many steps; 0 for never.
        seconds: how long after them.
        note: a file that has a line for each process that was killed.
    """

    def __init__(self, step: int, seconds: float, note: Path) -> None:
        self.step = step
        self.seconds = seconds
        self.note = note

    def count(self, run: Any) -> None:
        """Count a step of this attempt."""
        self.step -= 1
        if self.step == 0:
            timer = threading.Timer(self.seconds, self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        """Note it, and kill the process."""
        with self.note.open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def main(run_dir: Path, cache: Path, options: dict[str, Any]) -> None:
    """Train, from the last checkpoint on."""
    import equinox as eqx
    import fulgurite as fg
    import jax
    import numpy as np
    from fulgurite_checkpoint import Checkpointer
    from fulgurite_optimizers import GradientAccumulation, GradientClip
    from fulgurite_sharding import DataParallel, gather

    example = load_example()
    data = build_data(example, cache, options["workers"])
    model = build_model(example)
    plugins: list[Any] = [GradientAccumulation(NUM_PARTS), GradientClip(1.0), DataParallel()]
    plugins += [Checkpointer(every=3)]
    if "process" in options:
        step = options["step"] if jax.process_index() == options["process"] else 0
        killer = KillItself(step, options["seconds"], run_dir / "kills")
        plugins += [fg.LambdaPlugin(every={1: killer.count})]
    engine = fg.Engine(
        steps=STEPS,
        seed=SEED,
        run_dir=run_dir,
        plugins=plugins,
        autoload=False,
        compilation_cache_dir=cache / "compiled",
    )
    result = engine.fit(model, data, resume="auto")
    state: Any = result.state
    arrays = jax.tree.leaves(gather(eqx.filter((state.module, state.opt_state), eqx.is_array)))
    tokens = gather(state.model_state.get(state.module.log))
    if jax.process_index() == 0:
        leaves = {f"leaf {number}": leaf for number, leaf in enumerate(arrays)}
        np.savez(run_dir / "final.npz", allow_pickle=False, tokens=tokens, **leaves)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
