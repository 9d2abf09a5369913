"""What the engine costs, against the loops that one would write by hand.

All arms train the same model on the same arrays, shuffled and gathered by NumPy in the timed
region, and are compiled before it. None of them reads from the device before the end, except the
engine at its log steps.

    b          jax.jit over the partitioned Equinox tree, donated; returns the loss
    a          the same with eqx.filter_jit, not donated
    e          the same over a flat list of leaves, donated
    fit        the default Engine: everything checked to be finite, loss and accuracy in the metric
               window, logged every 50 steps
    bare       the same with steps_per_execution=1
    fused      the same with steps_per_execution=16
    ondevice   `fit` on arrays that stay on the device, where batches are gathered by index
    generator  `fit` on a generator that makes the batches as the loops by hand do
    evaluate   `Engine.evaluate` over 128 batches, a batch
    predict    `Engine.predict` over them

The ratios are those arms over b, `filter_jit` for fit over a, and `over_flat` for fit over e;
`evaluate` and `predict` have loops by hand of their own. The last three arms are tried on the small
perceptron only, where they cost most. `start.py` measures what comes before the first step.
"""

import importlib.util
import json
import logging
import os
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from evaluations import IN_FLIGHT, build_evaluation_arms
from harness import Spread, arguments, interleaved, ratio, show, write
from jaxtyping import Array
from workloads import (
    OPTIMIZER,
    WORKLOADS,
    Batch,
    Trained,
    Workload,
    build_update,
    compute_loss,
    copy_arrays,
    iterate_batches,
)

RATIOS = {
    "fit": "b",
    "bare": "b",
    "fused": "b",
    "ondevice": "b",
    "filter_jit": "a",
    "over_flat": "e",
    "generator": "b",
    "evaluate": "evaluate by hand",
    "predict": "predict by hand",
}
NEVER_FUSED = "resnet18"
"""The model without the arm `fused`: several times slower with convolutions on a CPU."""
ONE_MODEL = "mlp_small"
"""The model of the arms `generator`, `evaluate` and `predict`: there they cost most."""


# --- the arms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        start: a fresh initial state; not timed.
        train: `train(state, steps, shuffle)` consumes the state and gives the loss of the last
            step.
    """

    start: Callable[[], Any]
    train: Callable[[Any, int, bool], float]

    def seconds_per_step(self, steps: int) -> float:
        """The wall time of a step, over `steps` of them from the initial state."""
        state = self.start()
        before = perf_counter()
        self.train(state, steps, True)
        return (perf_counter() - before) / steps


def build_arms(workload: Workload) -> dict[str, Arm]:
    """All arms on one workload."""
    arrays, model = workload.arrays(), workload.model(key=jax.random.key(0))
    # Displays that are merely installed are not part of the engine.
    engines = {
        "fit": fg.Engine(steps=1, autoload=False),
        "bare": fg.Engine(steps=1, steps_per_execution=1, autoload=False),
        "fused": fg.Engine(steps=1, steps_per_execution=16, autoload=False),
        "ondevice": fg.Engine(steps=1, autoload=False),
    }
    by_hand = {"b": partitioned_arm, "a": filter_jit_arm, "e": flat_arm}
    return {name: make(workload, arrays, model) for name, make in by_hand.items()} | {
        name: engine_arm(workload, arrays, model, engine, on_device=name == "ondevice")
        for name, engine in engines.items()
    }


def partitioned_arm(workload: Workload, arrays: Batch, model: Any) -> Arm:
    """(b): `jax.jit` over parameters and optimizer state, donated."""
    params, update = build_update(model)
    step = jax.jit(update, donate_argnums=(0, 1))

    def advance(carry: Any, key: Any, i: int, batch: Batch) -> tuple[Any, Array]:
        params, opt_state, loss = step(*carry, key, i, batch)
        return (params, opt_state), loss

    return hand_arm(workload, arrays, (params, OPTIMIZER.init(params)), advance)


def filter_jit_arm(workload: Workload, arrays: Batch, model: Any) -> Arm:
    """(a): `eqx.filter_jit` over module and optimizer state, as Equinox' own examples have it."""

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, key: Any, i: Any, batch: Batch) -> tuple[Any, Any, Array]:
        (loss, _), grads = eqx.filter_value_and_grad(compute_loss, has_aux=True)(model, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def advance(carry: Any, key: Any, i: int, batch: Batch) -> tuple[Any, Array]:
        # A Python int would be static to filter_jit, which would compile every step again.
        model, opt_state = carry
        model, opt_state, loss = step(model, opt_state, key, np.asarray(i, np.int32), batch)
        return (model, opt_state), loss

    return hand_arm(
        workload, arrays, (model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))), advance
    )


def flat_arm(workload: Workload, arrays: Batch, model: Any) -> Arm:
    """(e): `jax.jit` over the list of leaves of parameters and optimizer state, donated."""
    params, update = build_update(model)
    leaves, treedef = jax.tree.flatten((params, OPTIMIZER.init(params)))

    @partial(jax.jit, donate_argnums=0)
    def step(leaves: list[Array], key: Any, i: Any, batch: Batch) -> tuple[list[Array], Array]:
        params, opt_state = jax.tree.unflatten(treedef, leaves)
        params, opt_state, loss = update(params, opt_state, key, i, batch)
        return jax.tree.leaves((params, opt_state)), loss

    return hand_arm(workload, arrays, leaves, step)


def hand_arm(
    workload: Workload, arrays: Batch, carry: Any, advance: Callable[..., tuple[Any, Array]]
) -> Arm:
    """The loop around a step that was written by hand."""
    key = jax.random.key(0)

    def train(carry: Any, steps: int, shuffle: bool) -> float:
        in_flight: deque[Array] = deque()
        loss = jnp.nan
        for i, batch in zip(range(steps), iterate_batches(workload, arrays, shuffle), strict=False):
            carry, loss = advance(carry, key, i, batch)
            in_flight.append(loss)
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(carry)
        return float(loss)

    return Arm(partial(copy_arrays, carry), train)


@dataclass(frozen=True)
class GeneratedBatches:
    """A source that is a generator: it makes the batches as the loops by hand do."""

    workload: Workload
    arrays: Batch
    shuffle: bool

    def __iter__(self) -> Iterator[Batch]:
        return iterate_batches(self.workload, self.arrays, self.shuffle)


def engine_arm(
    workload: Workload,
    arrays: Batch,
    model: Any,
    engine: fg.Engine,
    *,
    on_device: bool = False,
    is_generated: bool = False,
) -> Arm:
    """`Engine.fit` from an initial state: all that a fit does is timed, compiling is not."""
    sources: dict[bool, Any] = {}
    for shuffle in (True, False):
        if is_generated:
            sources[shuffle] = GeneratedBatches(workload, arrays, shuffle)
        else:
            sources[shuffle] = fg.ArrayData(
                arrays, workload.batch_size, shuffle=shuffle, on_device=on_device
            )
    state = engine.init_state(Trained(model), sources[True])

    def train(state: fg.TrainState, steps: int, shuffle: bool) -> float:
        result = engine.fit(data=sources[shuffle], state=state, steps=steps)
        jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
        return result.metrics["train"]["batch_loss"]

    return Arm(partial(copy_arrays, state), train)


# --- other systems --------------------------------------------------------------------------------


def peer_arms(workload: Workload) -> dict[str, Arm]:
    """Keras and Lightning training a perceptron of 128-128, where they are installed."""
    arms: dict[str, Arm] = {}
    for name, make in {"keras": keras_arm, "lightning": lightning_arm}.items():
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: left out")
        else:
            arms[name] = make(workload, workload.arrays())
    return arms


def keras_arm(workload: Workload, arrays: Batch) -> Arm:
    """`Model.fit` with the JAX backend. Its unit is the epoch: `steps` are rounded up to whole
    ones."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras  # pyright: ignore[reportMissingImports]

    dense = keras.layers.Dense
    model = keras.Sequential(
        [dense(128, activation="relu"), dense(128, activation="relu"), dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])

    def train(state: None, steps: int, shuffle: bool) -> float:
        history = model.fit(
            arrays["input"],
            arrays["label"],
            batch_size=workload.batch_size,
            epochs=-(-steps * workload.batch_size // workload.examples),
            shuffle=shuffle,
            verbose=0,
        )
        return history.history["loss"][-1]

    return Arm(lambda: None, train)


def lightning_arm(workload: Workload, arrays: Batch) -> Arm:
    """`Trainer.fit` on the CPU, with loss and accuracy logged every 50 steps."""
    import lightning  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    nn = torch.nn
    dataset = torch.utils.data.TensorDataset(
        *(torch.from_numpy(array) for array in arrays.values())
    )

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (
                nn.Linear(workload.shape[0], 128),
                nn.ReLU(),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.Linear(128, 10),
            )
            self.net = nn.Sequential(*layers)

        def training_step(self, batch: Any, index: int) -> Any:
            input, label = batch
            logits = self.net(input)
            loss = nn.functional.cross_entropy(logits, label.long())
            self.log_dict({"loss": loss, "accuracy": (logits.argmax(-1) == label).float().mean()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    def train(state: Any, steps: int, shuffle: bool) -> float:
        off = dict(
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", log_every_n_steps=50, **off)
        trainer.fit(
            state, torch.utils.data.DataLoader(dataset, workload.batch_size, shuffle=shuffle)
        )
        return float(trainer.callback_metrics["loss"])

    return Arm(Classifier, train)


# --- fresh processes ------------------------------------------------------------------------------


def processes(repeats: int) -> dict[str, Spread]:
    """What a fresh process needs until it has imported and until it has trained one step, and its
    peak memory.

    `import` is that of jax, equinox and optax; `import fulgurite` what comes on top, with a name
    used, because the package loads its parts when the first one is. `first step` begins after the
    imports and holds making the model and compiling.
    """
    script = (
        "from time import perf_counter as now; a = now(); import jax, equinox, optax; b = now(); "
    )
    script += "import fulgurite; fulgurite.Engine; print([b - a, now() - b])"
    rows: dict[str, list[float]] = {}
    for _ in range(repeats):
        results = dict(
            zip(("import (s)", "import fulgurite (s)"), run_program("-c", script), strict=True)
        )
        for arm in ("b", "fit"):
            seconds, mebibytes = run_program(__file__, "--first", arm)
            results |= {f"first step, {arm} (s)": seconds, f"peak memory, {arm} (MiB)": mebibytes}
        for name, value in results.items():
            rows.setdefault(name, []).append(value)
    return {name: Spread.of(values) for name, values in rows.items()}


def run_program(*arguments: str) -> list[float]:
    """What a fresh interpreter prints as JSON."""
    command = [sys.executable, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def first(name: str) -> None:
    """Prints the seconds to the first step of an arm on the small perceptron, and the peak memory
    of 500 steps."""
    workload, before = WORKLOADS["mlp_small"], perf_counter()
    arrays, model = workload.arrays(), workload.model(key=jax.random.key(0))
    if name == "b":
        arm = partitioned_arm(workload, arrays, model)
    else:
        arm = engine_arm(workload, arrays, model, fg.Engine(steps=1, autoload=False))
    arm.train(arm.start(), 1, True)
    seconds = perf_counter() - before
    arm.train(arm.start(), 500, True)
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


# --- the program ----------------------------------------------------------------------------------


def measure_workload(
    workload: Workload,
    arms: dict[str, Arm],
    repeats: int,
    further: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, list[float]]:
    """Seconds a step of every arm, a value a round.

    Args:
        workload: says how many steps are timed.
        arms: what trains.
        repeats: the number of rounds.
        further: what else is measured in each round.
    """
    for arm in arms.values():
        arm.train(arm.start(), min(32, workload.steps), True)
    timings = {name: partial(arm.seconds_per_step, workload.steps) for name, arm in arms.items()}
    return interleaved({**timings, **(further or {})}, repeats)


def check_equal_work(arms: dict[str, Arm], steps: int) -> None:
    """Every arm must reach the same loss on the same batches, or it is not the same work."""
    losses = {name: arm.train(arm.start(), steps, False) for name, arm in arms.items()}
    if not np.allclose(list(losses.values()), losses["b"], rtol=1e-3):
        raise SystemExit(f"the arms do not train alike; losses after {steps} steps: {losses}")


def main() -> None:
    """Runs the arms on the models that were asked for, prints the tables and writes the file."""
    parser = arguments(__doc__, repeats=11)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--peers", action="store_true", help="Keras and Lightning too, on mlp_small"
    )
    parser.add_argument(
        "--first", metavar="ARM", choices=("b", "fit"), help="what a fresh process is asked for"
    )
    options = parser.parse_args()
    if options.first:
        return first(options.first)

    fresh = processes(min(options.repeats, 3))
    show("fresh processes", fresh)
    ratios: dict[str, Spread] = {}
    times: dict[str, Spread] = {}
    for model in options.models:
        workload = WORKLOADS[model]
        arms = build_arms(workload)
        if model == NEVER_FUSED:
            del arms["fused"]
        check_equal_work(arms, min(32, workload.steps))
        peers = peer_arms(workload) if options.peers and model == "mlp_small" else {}
        further = {}
        if model == ONE_MODEL:
            network = workload.model(key=jax.random.key(0))
            arrays = workload.arrays()
            engine = fg.Engine(steps=1, autoload=False)
            arms["generator"] = engine_arm(workload, arrays, network, engine, is_generated=True)
            further = build_evaluation_arms(workload, network)
        seconds = measure_workload(workload, arms | peers, options.repeats, further)
        shown = {
            f"{model}.{name}": Spread.of([value * 1e6 for value in values])
            for name, values in seconds.items()
        }
        results = {
            f"{model}.{name}": ratio(seconds, name if name in seconds else "fit", base)
            for name, base in (RATIOS | dict.fromkeys(peers, "b")).items()
            if name in seconds or (base != "b" and base in seconds)
        }
        show(f"{model}: µs a step", shown)
        show(f"{model}: ratios", results)
        ratios |= results
        times |= shown
    if options.json:
        write(options.json, ratios, microseconds=times, processes=fresh)


if __name__ == "__main__":
    main()
