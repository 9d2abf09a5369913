"""What logging costs, against loops by hand that call the same library at the same steps.

All arms train the same small perceptron for the same steps and log loss and accuracy, every 50 steps
(the default) and every 10. A loop by hand reads the two numbers of the newest step and hands them
to the library; the engine hands it their means over the steps since.

    jsonl         `json.dumps`, a line, and a flush
    tensorboard   TensorBoard's `EventFileWriter` with a summary of two values
    wandb         `wandb.log`, offline

Timed are the steps from the hundredth on until everything is written; opening and closing are left
out. The ratio is the engine over the loop by hand.
"""

import json
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from harness import Spread, arguments, interleaved, ratio, show, write
from loggers import LOGGERS, OPENED, Arm, quiet
from workloads import OPTIMIZER, WORKLOADS, Batch, compute_loss, copy_arrays, iterate_batches

STEPS = 4100
IN_FLIGHT = 4
Numbers = dict[str, float]


class HandLogger(Protocol):
    """A library as a loop by hand uses it."""

    def log(self, step: int, numbers: Numbers) -> None:
        """Log the numbers of a step."""

    def flush(self) -> None:
        """Wait until everything is written."""

    def close(self) -> None:
        """Close what was opened."""


class JsonLines:
    """A file with a JSON value in each line."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "records.jsonl").open("w")

    def log(self, step: int, numbers: Numbers) -> None:
        self._file.write(json.dumps({"step": step, "time": time(), **numbers}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """An event file, written by TensorBoard's own writer."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, numbers: Numbers) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        event = Event(wall_time=time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """An offline run of Weights & Biases."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._run = wandb.init(project="bench", mode="offline", dir=folder)

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(numbers, step=step)

    def flush(self) -> None:
        """wandb writes in a process of its own, and has no call that waits for it."""

    def close(self) -> None:
        self._run.finish()


BY_HAND: dict[str, Callable[[Path], HandLogger]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


class HandArm:
    """The loop by hand with one library: gives the seconds of the timed steps.

    Args:
        make_logger: opens the library in a folder.
        folder: where it writes.
        log_every: steps from one log to the next.
    """

    def __init__(
        self, make_logger: Callable[[Path], HandLogger], folder: Path, log_every: int
    ) -> None:
        self._make_logger = make_logger
        self._folder = folder
        self._log_every = log_every
        self._workload = WORKLOADS["mlp_small"]
        self._arrays = self._workload.arrays()
        model = self._workload.model(key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_array)
        self._initial = params, OPTIMIZER.init(params)
        self._round = 0

        def update(params: Any, opt_state: Any, batch: Batch) -> Any:
            def loss(params: Any) -> Any:
                return compute_loss(eqx.combine(params, static), batch)

            (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
            return optax.apply_updates(params, updates), opt_state, value, accuracy

        self._update = jax.jit(update, donate_argnums=(0, 1))
        self()

    def __call__(self) -> float:
        self._round += 1
        folder = self._folder / str(self._round)
        folder.mkdir(parents=True)
        logger = self._make_logger(folder)
        carry = copy_arrays(self._initial)
        batches = iterate_batches(self._workload, self._arrays, True)
        in_flight: deque[Any] = deque()
        begun = 0.0
        for step in range(1, STEPS + 1):
            *carry, loss, accuracy = self._update(*carry, next(batches))
            in_flight.append(loss)
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().block_until_ready()
            if step % self._log_every == 0:
                logger.log(step, {"loss": float(loss), "accuracy": float(accuracy)})
            if step == OPENED:
                jax.block_until_ready(carry)
                logger.flush()
                begun = perf_counter()
        jax.block_until_ready(carry)
        logger.flush()
        seconds = perf_counter() - begun
        logger.close()
        return seconds


def main() -> None:
    """Run the arms, print the tables and write the file."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--libraries", nargs="+", choices=BY_HAND, default=list(BY_HAND))
    parser.add_argument("--log-every", nargs="+", type=int, default=[50, 10])
    options = parser.parse_args()
    ratios: dict[str, Spread] = {}
    microseconds: dict[str, Spread] = {}
    for log_every in options.log_every:
        with tempfile.TemporaryDirectory() as folder, quiet():
            arms: dict[str, Callable[[], float]] = {}
            for name in options.libraries:
                place = Path(folder)
                arms[name] = Arm([*LOGGERS[name]], place / name, log_every)
                arms[f"{name} by hand"] = HandArm(
                    BY_HAND[name], place / f"{name}_by_hand", log_every
                )
            seconds = interleaved(arms, options.repeats)
        rows = {
            f"{name}, every {log_every}": Spread.of(
                [1e6 * value / (STEPS - OPENED) for value in values]
            )
            for name, values in seconds.items()
        }
        results = {
            f"{name}, every {log_every}": ratio(seconds, name, f"{name} by hand")
            for name in options.libraries
        }
        show("µs a step", rows)
        show("the engine over the loop by hand", results)
        microseconds |= rows
        ratios |= results
    if options.json:
        write(options.json, ratios, microseconds=microseconds)


if __name__ == "__main__":
    main()
