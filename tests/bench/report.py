"""What `fulgurite report` and `fulgurite watch` take: seconds of a core, and bytes.

python tests/bench/report.py          # a run of 1,000,000 records of three numbers, 160 MB in a temporary folder
python tests/bench/report.py 2000     # of as many
"""

import json
import math
import os
import pty
import resource
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

NUM_RECORDS = 1_000_000
STARTING_SECONDS = 15
WATCHED_SECONDS = 60


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
    """Print what `fulgurite watch` takes in a terminal, of a run that gets records and never ends;
    after its first look, which reads all that is there."""
    (run / "attempts").mkdir()
    code = "import sys; from fulgurite_report.command import watch; sys.exit(watch(sys.argv[1:]))"
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, run],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    threading.Thread(target=read_all, args=(terminal,), daemon=True).start()
    time.sleep(STARTING_SECONDS)
    began = measure_cpu(process.pid)
    for step in range(NUM_RECORDS + 1, NUM_RECORDS + 1 + 10 * WATCHED_SECONDS, 10):
        write_records(run, step, step + 10)
        time.sleep(1)
    spent = measure_cpu(process.pid) - began
    process.terminate()
    process.wait()
    print(f"watch of a run of {NUM_RECORDS:,} records: {spent / WATCHED_SECONDS:.2%} of a core")


def read_all(terminal: int) -> None:
    """Read what is written to a terminal, until its other side is closed."""
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def measure_cpu(pid: int) -> float:
    """Return the seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    NUM_RECORDS = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RECORDS
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        run.mkdir()
        write_records(run, 1, NUM_RECORDS + 1)
        measure_report(run, Path(temporary) / "report.html")
        measure_watch(run)
