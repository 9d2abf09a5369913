"""Draw the pictures of the README and of the pages, all as SVG.

python docs/pictures/draw.py               # all; trains two small models, a few seconds
python docs/pictures/draw.py cost step     # some

`overhead.json` is what `python tests/bench/overhead.py --repeats 5 --json FILE` wrote.
"""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "examples"))
# The same picture has the same bytes whenever it is drawn.
matplotlib.rcParams.update({"svg.hashsalt": "fulgurite", "font.size": 10})

MODELS = {
    "mlp_small": "MLP 64-128-128-10, batch 64",
    "resnet48": "residual network, 48 blocks of width 32, batch 8",
    "mlp_784": "MLP 784-256-10, batch 128",
    "transformer": "transformer, 10 million parameters",
    "resnet18": "ResNet-18, 32 channels, images of 32 x 32",
}
ARMS = {
    "fit": ("engine", "#7e57c2"),
    "bare": ("engine, steps_per_execution=1", "#b39ddb"),
    "a": ("hand-written, eqx.filter_jit", "#bdbdbd"),
}
BEFORE_FIT = ("building the experiment", "loading the data", "starting the devices")


def save(figure: Figure, file: Path) -> None:
    """Write a figure as SVG on a white ground, which dark pages need too."""
    figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")


def read_costs() -> dict[str, dict[str, float]]:
    """Return, for each model, the time of a step by arm, where that of the hand-written loop over
    `jax.jit` is 1."""
    content = json.loads((HERE / "overhead.json").read_text())
    costs = {}
    for model in MODELS:
        plain, filtered = (content["microseconds"][f"{model}.{arm}"]["median"] for arm in "ba")
        ratios = {arm: content["ratios"][f"{model}.{arm}"]["median"] for arm in ("fit", "bare")}
        costs[model] = {**ratios, "a": filtered / plain}
    return costs


def draw_cost(file: Path) -> None:
    """Draw what a step costs, beside loops written by hand."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    costs = read_costs()
    for number, (arm, (label, color)) in enumerate(ARMS.items()):
        values = [costs[model][arm] for model in MODELS]
        positions = np.arange(len(MODELS)) + 0.27 * (number - 1)
        bars = axes.barh(positions, values, height=0.25, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(np.arange(len(MODELS)), [text.replace(", ", ",\n") for text in MODELS.values()])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step; 1 is a hand-written loop over jax.jit with donated arrays")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    save(figure, file)


def draw_step(file: Path) -> None:
    """Draw the way of a batch through one step, and where plugins take part."""
    boxes = [
        ("batch", "", "#eeeeee"),
        ("transform", "transform_batch", "#d1c4e9"),
        ("forward", "around_forward\nloss_terms", "#d1c4e9"),
        ("gradients", "gradient_transform\nwrap_update_rule", "#d1c4e9"),
        ("update", "after_update", "#d1c4e9"),
        ("metrics", "step_metrics", "#d1c4e9"),
    ]
    draw_box = partial(FancyBboxPatch, boxstyle="round,pad=0.06")
    figure = Figure(figsize=(9.5, 3.1))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 9.5), ylim=(0, 3.1))
    axes.axis("off")
    axes.add_patch(draw_box((1.66, 1.2), 7.72, 1.45, fc="#faf8ff", ec="#7e57c2", ls="--"))
    axes.text(1.75, 2.8, "one compiled step: jax.jit over flat, donated arrays", color="#5e35b1")
    for number, (title, hooks, color) in enumerate(boxes):
        x = 0.15 + 1.58 * number + (0 if number == 0 else 0.05)
        axes.add_patch(draw_box((x, 1.95), 1.15, 0.4, fc=color))
        axes.text(x + 0.575, 2.15, title, ha="center", va="center", weight="bold")
        axes.text(x + 0.575, 1.72, hooks, ha="center", va="top", size=8, family="monospace")
        if number:
            axes.annotate(
                "", (x - 0.06, 2.15), (x - 0.36, 2.15), arrowprops={"arrowstyle": "->", "lw": 1.3}
            )
    actions = "between two steps, where a trigger says so: log, evaluate, save, your actions"
    axes.add_patch(draw_box((1.66, 0.3), 7.72, 0.35, fc="#fff3e0", ec="#fb8c00"))
    axes.text(5.5, 0.475, actions, ha="center", va="center")
    axes.annotate("", (5.5, 0.78), (5.5, 1.08), arrowprops={"arrowstyle": "<->", "lw": 1.3})
    save(figure, file)


def draw_terminal(file: Path) -> None:
    """Draw what is left in a terminal of 80 columns after the train command of the README."""
    program = ["examples/digits.py"]
    lines = erase_lines(run_in_terminal([sys.executable, *program], columns=80))
    # On a busy machine it is told before what lasts longer than a tenth of a second.
    lines = [line for line in lines if not line.startswith(BEFORE_FIT)]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(Text.from_ansi("\n".join(lines)))
    # Rich points to fonts on other servers.
    picture = console.export_svg(title=f"python {program[0]}", unique_id="run")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def run_in_terminal(command: list[str], columns: int) -> str:
    """Return what a command writes to a terminal, control sequences included.

    Args:
        command: to run in the root of the clone, with the plugins that are on by themselves.
        columns: of the terminal.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    ignored = ("COLUMNS", "LINES", "NO_COLOR", "FULGURITE_AUTOLOAD", "FULGURITE_PLUGINS")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    environment["TERM"] = "xterm-256color"
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    os.close(theirs)
    output = b""
    # Reading fails once the other side is closed.
    with suppress(OSError):
        while chunk := os.read(ours, 65536):
            output += chunk
    os.close(ours)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output.decode()


def erase_lines(output: str) -> list[str]:
    """Return the lines that stay, of an output in which rich erases whole lines."""
    lines, row = [""], 0
    for token in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", output):
        if token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.endswith("m") or not token.startswith(("\r", "\x1b")):
            lines[row] += token
    return [line for line in lines if line]


def draw_curves(file: Path) -> None:
    """Draw what `result.history.plot` shows of a run."""
    import fulgurite as fg
    from digits import experiment, load_arrays
    from fulgurite_evaluators import Evaluator

    program = experiment()
    test = fg.ArrayData(load_arrays()[1], batch_size=120)
    plugins = ["rng", "-progress", Evaluator("test", test, every=50)]
    engine = fg.Engine(steps=600, seed=0, log_every=50, plugins=plugins)
    history = engine.fit(program.model, program.data).history
    figure = history.plot("train/loss", "train/accuracy", "test/accuracy")
    figure.set_size_inches(7, 3.6)
    figure.set_layout_engine("constrained")
    save(figure, file)


PICTURES = {
    "cost": draw_cost,
    "step": draw_step,
    "terminal": draw_terminal,
    "curves": draw_curves,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name](HERE / f"{name}.svg")
