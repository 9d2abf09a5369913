"""Write `report.png` and `watch.png`: what `fulgurite report` and `fulgurite watch` show of three
runs of `examples/classifier.py`, the second of which evaluates and saves ten times as often.

python docs/pictures/photograph_report.py    # needs the command `chromium`, which the tests do not
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fulgurite_report import Run, write_report
from fulgurite_report.view import View
from rich.console import Console, ConsoleDimensions

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "examples" / "classifier.py"
ARGUMENTS = {
    "usual": ["rate=3e-3"],
    "often": ["rate=1e-2", "every=5"],
    "slow": ["rate=1e-4"],
}
PAGE_SIZE = (1200, 1250)
TERMINAL_SIZE = (1120, 590)


def train(folder: Path) -> list[Path]:
    """Train the runs, and return their directories."""
    runs = []
    for name, arguments in ARGUMENTS.items():
        runs.append(folder / name)
        command = [sys.executable, PROGRAM, "steps=400", *arguments, "--run", runs[-1]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return runs


def photograph(page: Path, size: tuple[int, int], file: Path) -> None:
    """Write a picture of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    width, height = size
    shot = ["--virtual-time-budget=5000", f"--screenshot={file}"]
    command = ["chromium", *options, f"--window-size={width},{height}", *shot, page.as_uri()]
    subprocess.run(command, check=True)


def draw(paths: list[Path], file: Path) -> None:
    """Write a drawing of the view of runs in a terminal."""
    runs = [Run(path) for path in paths]
    for run in runs:
        run.refresh()
    with open(os.devnull, "w") as nowhere:
        console = Console(width=90, record=True, file=nowhere)
        console.print(View(runs, "test/loss").build(ConsoleDimensions(90, 24)))
    console.save_svg(str(file), title="fulgurite watch runs/usual runs/often runs/slow")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs = train(folder)
        write_report(runs, folder / "report.html")
        photograph(folder / "report.html", PAGE_SIZE, HERE / "report.png")
        draw(runs, folder / "watch.svg")
        photograph(folder / "watch.svg", TERMINAL_SIZE, HERE / "watch.png")
