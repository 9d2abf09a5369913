"""The program of the tests with several processes: `python trained.py OUT OPTION=VALUE ...`.

It trains a small network on `ArrayData`, alone or as one of several processes, and writes what it
saw as JSON lines to `OUT-PROCESS.jsonl`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_sharding import FSDP, DataParallel

BATCH, EXAMPLES = 16, 160


class Net(fg.Module):
    """A perceptron with two layers of 64 and 8 rows, with plain gradient descent."""

    first: jax.Array
    second: jax.Array

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.first = jax.random.normal(keys[0], (64, 4)) / 2
        self.second = jax.random.normal(keys[1], (8, 64)) / 8

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = jax.random.bernoulli(ctx.key(), 0.9, (len(batch["x"]), 64))
        preds = (jnp.tanh(batch["x"] @ self.first.T) * noise) @ self.second.T
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), preds=preds)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


@dataclass(frozen=True, eq=False)
class Told:
    """Writes down each process's own view: its gradients, its saves, and, where asked, its
    evaluation."""

    out: Path
    gradients: bool = False

    def say(self, **values: Any) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps(values) + "\n")

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        self.say(started=run.step, attempt=run.attempt, pid=os.getpid())

    @fg.hookimpl
    def on_save(self, step: int) -> None:
        self.say(saved=step)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        if record.stream == "exact":
            self.say(logged=record.step, source=record.source, **record.values)

    @fg.hookimpl
    def step_metrics(self, grads: Any) -> dict[str, Any]:
        if not self.gradients:
            return {}
        numbers = [
            jnp.sin(1 + jnp.arange(leaf.size, dtype=jnp.float32)) for leaf in jax.tree.leaves(grads)
        ]
        weighed = [
            leaf.ravel() @ number
            for leaf, number in zip(jax.tree.leaves(grads), numbers, strict=True)
        ]
        return {"norm": optax.global_norm(grads), "first": weighed[0], "second": weighed[1]}

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"process": jax.process_index()}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        self.say(restored=state["process"])


@dataclass(frozen=True, eq=False)
class Due:
    """Does something at a trigger."""

    instance: str
    trigger: fg.Trigger | int
    action: Any

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("due", self.trigger, self.action, "decide")]


class Evaluating:
    """Evaluates over batches at a trigger."""

    def __init__(self, every: int) -> None:
        self.every = every

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("test", data(shuffle=False))]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("evaluate", self.every, self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate("test")


class Own:
    """A source of each process's own, endless and with a place of its own; each batch takes some
    seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.count = seconds, 0

    def __iter__(self) -> Iterator[Any]:
        share = BATCH // jax.process_count()
        while True:
            time.sleep(self.seconds)
            self.count += 1
            yield {
                "x": np.full((share, 4), self.count % 7, np.float32),
                "y": np.zeros((share, 8), np.float32),
            }

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def data(shuffle: bool = True) -> fg.ArrayData:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    y = np.stack([np.sin(x.sum(1) + number) for number in range(8)], 1)
    return fg.ArrayData({"x": x, "y": y}, BATCH, shuffle=shuffle)


def main(out: str, **options: str) -> None:
    mine = jax.process_index()
    losses_log = Told(Path(f"{out}-{mine}.jsonl"), gradients="gradients" in options)
    steps, every = int(options.get("steps", 50)), int(options.get("agree", 50))
    sharding = (
        FSDP(min_size=64, agree_every=every)
        if "fsdp" in options
        else DataParallel(agree_every=every)
    )
    plugins: list[Any] = [losses_log] if "alone" in options else [losses_log, sharding]
    if "save" in options:
        plugins.append(Checkpointer(every=int(options["save"]), max_to_keep=None))
    if "period" in options:
        plugins.append(
            Checkpointer(every=fg.EverySeconds(float(options["period"])), max_to_keep=None)
        )
    if "limit" in options:
        plugins.append(
            Due(
                "limit",
                fg.EverySeconds(float(options["limit"])),
                lambda run: fg.StopTraining("time limit"),
            )
        )
    if "vote" in options and mine == 1:
        plugins.append(Due("vote", int(options["vote"]), lambda run: run.request_stop("enough")))
    elif "vote" in options:
        plugins.append(Due("vote", int(options["vote"]), lambda run: None))
    if "stop" in options:
        plugins.append(
            Due("stop", fg.At(int(options["stop"])), lambda run: run.request_stop("enough"))
        )
    if "evaluate" in options:
        plugins.append(Evaluating(int(options["evaluate"])))
    if "kill" in options:
        kill = (lambda run: os.kill(os.getpid(), signal.SIGKILL)) if mine == 1 else lambda run: None
        plugins.append(Due("kill", fg.At(int(options["kill"])), kill))
    slow = float(options.get("slow", 0)) if mine == 1 else 0.0
    source = (
        fg.DataSource(Own(slow), prefetch=0) if "own" in options or "slow" in options else data()
    )
    engine = fg.Engine(
        steps=steps,
        plugins=plugins,
        autoload=False,
        log_every=int(options.get("log", 1)),
        steps_per_execution=int(options.get("fuse", 1)),
        run_dir=options.get("run"),
    )
    result = engine.fit(Net, source, resume=options.get("resume"))
    leaves = [whole(leaf) for leaf in jax.tree.leaves(result.module)]
    losses_log.say(
        ended=int(result.state.step),
        stopped=result.stop_reason,
        processes=jax.process_count(),
        sums=[float(np.abs(leaf).sum(dtype=np.float64)) for leaf in leaves],
        bits=[leaf.tobytes().hex()[:64] for leaf in leaves],
    )
    if result.stop_reason == "SIGTERM":
        sys.exit(143)


def whole(leaf: jax.Array) -> np.ndarray:
    """An array on the host, wherever its parts are."""
    if isinstance(leaf.sharding, jax.sharding.NamedSharding):
        everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.P())
        leaf = jax.jit(lambda array: array, out_shardings=everywhere)(leaf)
    return np.asarray(leaf)


if __name__ == "__main__":
    pairs = [argument.partition("=") for argument in sys.argv[2:]]
    main(sys.argv[1], **{name: value for name, _, value in pairs})
