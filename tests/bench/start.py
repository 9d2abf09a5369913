"""What comes before the first step, in fresh processes: the engine, and a program by hand.

Both make the same model, train it for 20 steps and print their seconds. A program is `transformer`,
of 10 million parameters, or a model of residual layers with a number of arrays, which are those of
the model and of Adam: 4 for each layer and optimizer moment. By hand the model is made operation by
operation (`hand`), or in one jitted function (`jitted`); ratios are over the faster of the two.

    total     from making the module to the end of 20 steps; imports are left out
    compile   lowering the step and compiling it; with an engine the account `compile`, which holds
              all other programs of the fit as well

`second` is the fit of another engine for the same program in the same process over the first one.
`function` is an engine that is given the function that makes the model, and not the model: so the step compiles
while the model is made.

`evaluator` is an engine whose first evaluation is due after 1,000 steps: `stall` is what it waits for the
compilation of the evaluation, over what XLA takes for that.

python tests/bench/start.py --programs 13 121 601 transformer
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite_evaluators import Evaluator
from harness import Spread, arguments, show, write
from workloads import (
    OPTIMIZER,
    WORKLOADS,
    Batch,
    ResidualNetwork,
    Trained,
    Workload,
    build_update,
    iterate_batches,
)

STEPS = 20
EVALUATE_AT = 1_000


def make_workload(program: str) -> Workload:
    """Return a model, and what it is trained on.

    Args:
        program: `transformer`, or about how many arrays there are with those of Adam, at least 13.
    """
    if program == "transformer":
        return replace(WORKLOADS[program], steps=STEPS)
    blocks = max(0, round((int(program) - 13) / 12))
    return Workload(
        lambda key: ResidualNetwork(64, 32, blocks, key=key), (64,), 8, STEPS, examples=256
    )


def run_by_hand(workload: Workload, *, is_jitted: bool = False) -> dict[str, float]:
    """Train and return the seconds in all, and those of compiling the step.

    Args:
        workload: the model and what it is trained on.
        is_jitted: whether the model is made in one jitted function.
    """
    arrays = workload.arrays()
    make_model = eqx.filter_jit(workload.model) if is_jitted else workload.model
    before = perf_counter()
    params, update = build_update(make_model(key=jax.random.key(0)))
    carry = params, OPTIMIZER.init(params)
    key = jax.random.key(0)
    batches = iterate_batches(workload, arrays, True)
    first = next(batches)
    traced = jax.jit(update, donate_argnums=(0, 1)).trace(*carry, key, 0, first)
    before_compile = perf_counter()
    step = traced.lower().compile()
    compiled = perf_counter() - before_compile
    for index in range(STEPS):
        *carry, _ = step(*carry, key, np.int32(index), next(batches))
    jax.block_until_ready(carry)
    return {"total": perf_counter() - before, "compile": compiled}


def run_function(workload: Workload) -> dict[str, float]:
    """Do the same with an engine that makes the model itself."""
    arrays = workload.arrays()
    before = perf_counter()
    timings = fit_anew(workload, arrays, lambda key: Trained(workload.model(key=key)))
    return {"total": perf_counter() - before, "compile": timings.seconds["compile"]}


def run_engine(workload: Workload) -> dict[str, float]:
    """Do the same with an engine, and again with another."""
    arrays = workload.arrays()
    before = perf_counter()
    model = Trained(workload.model(key=jax.random.key(0)))
    before_fit = perf_counter()
    timings = fit_anew(workload, arrays, model)
    before_second = perf_counter()
    fit_anew(workload, arrays, model)
    first = before_second - before_fit
    return {
        "total": before_second - before,
        "compile": timings.seconds["compile"],
        "unaccounted": first - sum(timings.seconds.values()),
        "first fit": first,
        "second fit": perf_counter() - before_second,
    }


def fit_anew(workload: Workload, arrays: Batch, model: Any) -> fg.Timings:
    """Fit with a new engine, and return where the time went."""
    data = fg.ArrayData(arrays, workload.batch_size, shuffle=True)
    result = fg.Engine(steps=STEPS, autoload=False).fit(model, data)
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
    return result.timings


@dataclass(eq=False)
class CompileClock:
    """Notes the accounts of the compiler when a program is ready.

    Attributes:
        waited: the seconds until then that the fit has waited for the compiler, by program.
        background: the seconds until then that it has not, by program.
    """

    waited: dict[str, float] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)

    @fg.hookimpl
    def around_fit(self, timings: fg.Timings) -> AbstractContextManager[None]:
        self._timings = timings
        return nullcontext()

    @fg.hookimpl
    def on_compile(self, name: str) -> None:
        self.waited[name] = self._timings.seconds["compile"]
        self.background[name] = self._timings.background_seconds["compile"]


def run_evaluator(workload: Workload) -> dict[str, float]:
    """Train to the first evaluation, and return how long it has waited for its compilation."""
    arrays = workload.arrays()
    clock = CompileClock()
    evaluator = Evaluator("test", fg.ArrayData(arrays, workload.batch_size), every=EVALUATE_AT)
    engine = fg.Engine(steps=EVALUATE_AT, plugins=[clock, evaluator], autoload=False)
    data = fg.ArrayData(arrays, workload.batch_size, shuffle=True)
    engine.fit(lambda key: Trained(workload.model(key=key)), data)
    waited, background = (
        seconds["evaluate.test"] - seconds["step"] for seconds in (clock.waited, clock.background)
    )
    return {"waited": waited, "compile": waited + background}


ARMS: dict[str, Callable[[Workload], dict[str, float]]] = {
    "hand": run_by_hand,
    "jitted": partial(run_by_hand, is_jitted=True),
    "engine": run_engine,
    "function": run_function,
    "evaluator": run_evaluator,
}


def run_process(arm: str, program: str) -> dict[str, float]:
    """Return what a fresh process prints."""
    command = [sys.executable, __file__, "--arm", arm, "--programs", program]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output)


def measure(program: str, repeats: int) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Return the seconds and the ratios for one program."""
    # A thousand steps of the transformer take minutes.
    arms = [arm for arm in ARMS if (arm, program) != ("evaluator", "transformer")]
    rounds: list[dict[str, dict[str, float]]] = [
        {arm: run_process(arm, program) for arm in arms} for _ in range(repeats)
    ]
    by_hand = [
        min((results[arm] for arm in ("hand", "jitted")), key=lambda seconds: seconds["total"])
        for results in rounds
    ]
    pairs = list(zip(rounds, by_hand, strict=True))
    seconds = {
        f"{arm}: {name} (s)": Spread.of([results[arm][name] for results in rounds])
        for arm in arms
        for name in rounds[0][arm]
    }
    ratios = {
        name: Spread.of([results["engine"][name] / hand[name] for results, hand in pairs])
        for name in ("total", "compile")
    }
    ratios["total of a function"] = Spread.of(
        [results["function"]["total"] / hand["total"] for results, hand in pairs]
    )
    if "evaluator" in arms:
        ratios["stall"] = Spread.of(
            [results["evaluator"]["waited"] / results["evaluator"]["compile"] for results in rounds]
        )
    ratios["second"] = Spread.of(
        [results["engine"]["second fit"] / results["engine"]["first fit"] for results in rounds]
    )
    return seconds, ratios


def main() -> None:
    """Run the processes, print the tables and write the file."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument(
        "--programs", nargs="+", default=["13", "121", "601", "5005", "transformer"]
    )
    parser.add_argument("--arm", choices=ARMS, help="what a fresh process is asked for")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(ARMS[options.arm](make_workload(options.programs[0]))))
        return
    all_ratios: dict[str, Any] = {}
    all_seconds: dict[str, Any] = {}
    for program in options.programs:
        # The largest takes minutes.
        repeats = 1 if program == "5005" else options.repeats
        seconds, ratios = measure(program, repeats)
        show(program, seconds)
        show("engine over hand; second engine over the first", ratios)
        all_ratios |= {f"{program}.{name}": spread for name, spread in ratios.items()}
        all_seconds |= {f"{program}.{name}": spread for name, spread in seconds.items()}
    if options.json:
        write(options.json, all_ratios, seconds=all_seconds)


if __name__ == "__main__":
    main()
