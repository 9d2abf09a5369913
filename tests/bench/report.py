"""What `fulgurite report` and `fulgurite watch` take: seconds of a core, and bytes.

python tests/bench/report.py          # a run of 1,000,000 records of three numbers, 160 MB in a temporary folder
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_RECORDS = 1_000_000
WATCHED_SECONDS = 60
WATCH = """
import sys, threading, time
from fulgurite_report.run import find_runs
from fulgurite_report.view import View
from fulgurite_report import watching
from rich.console import Console
runs = find_runs(sys.argv[1:2])
[run.refresh() for run in runs]
view = View(runs)
began = time.process_time()
pause = watching._Pause(2.0)
deadline = time.monotonic() + float(sys.argv[2])
console = Console(width=120, height=40, file=open("/dev/null", "w"))
while time.monotonic() < deadline:
    time.sleep(pause.get_seconds())
    [run.refresh() for run in runs]
    console.print(view.build(console.size))
print(time.process_time() - began)
"""


def write_records(path: Path, first: int, last: int) -> None:
    """Append records of the steps from `first` up to `last`, as `JSONLLogger` writes them."""
    with open(path / "records.jsonl", "a") as file:
        for step in range(first, last):
            values = {
                "accuracy": 1 - math.exp(-step / 1e5) + 0.01 * math.sin(step),
                "learning_rate/default": 1e-3 * (1 - step / 2e6),
                "loss": math.exp(-step / 2e5) + 0.1 * math.cos(7.0 * step),
            }
            line = {"kind": "scalars", "source": "train", "step": step, "values": values}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def measure_report(run: Path, page: Path) -> None:
    """Print what a page of a run takes."""
    code = "import sys; from fulgurite_report.command import report; sys.exit(report(sys.argv[1:]))"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, run, "-o", page], check=True)
    wall = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"report of {NUM_RECORDS:,} records: {wall:.1f} s, of which {usage.ru_utime:.1f} s of a core, "
        f"{usage.ru_maxrss / 1e3:.0f} MB of memory, a page of {page.stat().st_size / 1e6:.2f} MB"
    )


def measure_watch(run: Path) -> None:
    """Print what the view of a run takes that gets records."""
    arguments = [sys.executable, "-c", WATCH, str(run), str(WATCHED_SECONDS)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        step = NUM_RECORDS + 1
        while process.poll() is None:
            write_records(run, step, step + 10)
            step += 10
            time.sleep(1)
        assert process.stdout is not None
        spent = float(process.stdout.read())
    print(f"watch of a run of {NUM_RECORDS:,} records: {spent / WATCHED_SECONDS:.2%} of a core")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        run.mkdir()
        write_records(run, 1, NUM_RECORDS + 1)
        measure_report(run, Path(temporary) / "report.html")
        measure_watch(run)
