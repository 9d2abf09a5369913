# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-evaluators",
#     "fulgurite-logging",
#     "fulgurite-rng",
#     "jax",
#     "jaxtyping",
#     "matplotlib",
#     "numpy",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# ///
"""Handwritten digits, evaluated by a second process while the first one trains.

uv run examples/digits_standalone_eval.py    # installs what it needs; half a minute on two cores

The second process is `fulgurite evaluate PROGRAM --run DIR --group slow`. It evaluates new
checkpoints as they come; if it falls behind it skips some, but never the last one. Kill either
process and start this again: it continues. At the end the program draws `accuracy.png` in the run
directory.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import fulgurite as fg
import numpy as np
from digits import Classifier, load_arrays
from fulgurite_cli import Experiment, run

try:
    from fulgurite_checkpoint import Checkpointer
    from fulgurite_evaluators import Evaluator, EveryCheckpoint, read_results
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with "
        "`uv run examples/digits_standalone_eval.py`, which installs what is listed at its top."
    ) from None

FULGURITE = [sys.executable, "-m", "fulgurite_cli"]


def shift_right(images: np.ndarray) -> np.ndarray:
    """Return images (n, 64) of 8 by 8 pixels, moved one pixel to the right."""
    return np.pad(images.reshape(-1, 8, 8), [(0, 0), (0, 0), (1, 0)])[:, :, :8].reshape(-1, 64)


def experiment(width: int = 768, lr: float = 3e-4, steps: int = 3_000, seed: int = 0) -> Experiment:
    """Train a perceptron; two evaluators of the group `slow` share a process and each restored
    checkpoint."""
    train, test = load_arrays()
    every = EveryCheckpoint(poll=0.2)
    test_shifted = test | {"image": shift_right(test["image"])}
    plugins = [
        "rng",
        Checkpointer(every=250),
        Evaluator("test", fg.ArrayData(test, batch_size=120), every, group="slow"),
        Evaluator("shifted", fg.ArrayData(test_shifted, batch_size=120), every, group="slow"),
    ]
    return Experiment(
        engine=fg.Engine(steps=steps, seed=seed, log_every=50, plugins=plugins),
        model=partial(Classifier, width, lr),
        data=lambda: fg.ArrayData(train, batch_size=64, shuffle=True, remainder="drop"),
    )


def draw(history: fg.History, run_dir: Path) -> Path:
    """Draw the accuracy in training, and that of the second process.

    Args:
        history: of the training.
        run_dir: where the results are, and where the picture goes.

    Returns:
        The path of the picture.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if "train/accuracy" in history:
        axes.plot(
            history.steps("train/accuracy"),
            history["train/accuracy"],
            color="0.7",
            label="training, with dropout",
        )
    records = read_results(run_dir)
    for name in ("test", "shifted"):
        points = [
            (record.step, record.metrics["accuracy"])
            for record in records
            if record.evaluator == name
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}, by the second process")
    axes.set(
        xlabel="step",
        ylabel="accuracy",
        title="Digits: training, and checkpoints evaluated on the side",
    )
    axes.legend()
    figure.savefig(run_dir / "accuracy.png", dpi=120)
    return run_dir / "accuracy.png"


def main() -> None:
    """Train and evaluate at the same time, then draw."""
    arguments = sys.argv[1:]
    if "--run" not in arguments:
        arguments += ["--run", "runs/digits_standalone_eval"]
    run_dir = Path(arguments[arguments.index("--run") + 1])
    with subprocess.Popen(
        [*FULGURITE, "evaluate", __file__, "--run", str(run_dir), "--group", "slow"]
    ) as evaluation:
        try:
            result = run(experiment, arguments)
            code = evaluation.wait()
        finally:
            evaluation.terminate()
    if code:
        sys.exit(code)
    print(draw(result.history, run_dir))


if __name__ == "__main__":
    main()
