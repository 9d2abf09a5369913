"""What a second start of a program costs: the command line with its cache, and a program by hand.

Both make the same model of residual layers and train it for 20 steps, in fresh processes: `cold` with
an empty compilation cache, `warm` with what the cold one left. The program by hand has the cache of
JAX at the settings that the command line has. Seconds are from making the module to the end of 20 steps,
without imports; CPU seconds are those of all threads.

python tests/bench/warm.py --arrays 13 121
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite_cli import Experiment, run
from harness import Spread, arguments, show, write
from start import STEPS, make_workload, run_by_hand
from workloads import Trained, Workload

TIMES = ("cold", "warm")


def run_command_line(workload: Workload) -> None:
    """Train as `python program.py` does."""
    arrays = workload.arrays()

    def experiment() -> Experiment:
        engine = fg.Engine(steps=STEPS, autoload=False)
        data = fg.ArrayData(arrays, workload.batch_size, shuffle=True)
        return Experiment(engine, lambda key: Trained(workload.model(key=key)), data)

    result = run(experiment, [])
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))


ARMS: dict[str, Callable[[Workload], Any]] = {
    "hand": run_by_hand,
    "command line": run_command_line,
}


def run_process(arm: str, num_arrays: int, folder: str) -> dict[str, float]:
    """Return what a fresh process prints, whose cache is in a folder."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")
    }
    caches = {
        "hand": {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        "command line": {"XDG_CACHE_HOME": folder},
    }
    command = [sys.executable, __file__, "--arm", arm, "--arrays", str(num_arrays)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**inherited, **caches[arm]}
    )
    return json.loads(done.stdout)


def measure_round(num_arrays: int) -> dict[str, float]:
    """Return the seconds of each arm, cold and warm."""
    seconds = {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as folder:
            for time in TIMES:
                for name, value in run_process(arm, num_arrays, folder).items():
                    seconds[f"{arm}, {time}: {name} (s)"] = value
    return seconds


def main() -> None:
    """Run the processes, print the tables and write the file."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--arrays", nargs="+", type=int, default=[13, 121])
    parser.add_argument("--arm", choices=ARMS, help="what a fresh process is asked for")
    options = parser.parse_args()
    if options.arm:
        workload = make_workload(str(options.arrays[0]))
        before, cpu_before = perf_counter(), process_time()
        ARMS[options.arm](workload)
        wall, cpu = perf_counter() - before, process_time() - cpu_before
        print(json.dumps({"wall": wall, "CPU": cpu}))
        return
    all_ratios: dict[str, Any] = {}
    for num_arrays in options.arrays:
        rounds = [measure_round(num_arrays) for _ in range(options.repeats)]
        seconds = {
            name: Spread.of([results[name] for results in rounds]) for name in sorted(rounds[0])
        }
        ratios = {
            f"{name} of {over}, {clock}": Spread.of(
                [
                    results[f"{name}: {clock} (s)"] / results[f"{over}: {clock} (s)"]
                    for results in rounds
                ]
            )
            for name, over in (
                ("command line, warm", "command line, cold"),
                ("command line, warm", "hand, warm"),
                ("hand, warm", "hand, cold"),
            )
            for clock in ("wall", "CPU")
        }
        show(f"{num_arrays} arrays", seconds)
        show("ratios", ratios)
        all_ratios |= {f"{num_arrays}.{name}": spread for name, spread in ratios.items()}
    if options.json:
        write(options.json, all_ratios)


if __name__ == "__main__":
    main()
