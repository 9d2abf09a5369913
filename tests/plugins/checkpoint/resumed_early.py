"""Trains a run to a step, resumes it where there is a checkpoint, and prints in which order XLA
compiled the step and Orbax read the arrays, then the weights."""

import sys
import threading
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite_checkpoint import Checkpointer, arrays
from trained import NET

run, steps = Path(sys.argv[1]), int(sys.argv[2])
compiles = threading.Event()
compile_lowered = jax.stages.Lowered.compile
load = arrays.load


def compile_noted(lowered: Any, *arguments: Any) -> Any:
    if not compiles.is_set():
        print("compiles")
    compiles.set()
    return compile_lowered(lowered, *arguments)


def load_once_it_compiles(*arguments: Any) -> Any:
    # Never set where nothing is to be compiled, or where it comes after the arrays.
    has_begun = compiles.wait(float(sys.argv[3]))
    print("reads while it compiles" if has_begun else "reads")
    return load(*arguments)


setattr(jax.stages.Lowered, "compile", compile_noted)  # noqa: B010
arrays.load = load_once_it_compiles
x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
data = fg.ArrayData({"x": x, "y": x.sum(1)}, 4, shuffle=True)
engine = fg.Engine(run_dir=run, plugins=[Checkpointer(3)], autoload=False, steps=steps)
result = engine.fit(NET, data, resume="auto")
print("accounts", result.timings.calls["compile"], *result.timings.background_seconds)
print("weights", np.asarray(result.module.first.weight).tobytes().hex())
