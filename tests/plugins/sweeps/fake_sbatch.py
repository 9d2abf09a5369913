"""A stand-in for SLURM's `sbatch`: runs the jobs of an array as processes, those of odd indices
first, and writes the number of each process into `FAKE_SBATCH/INDEX`. Of its options it knows those
that a sweep gives it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

JOB = "42"


def submit(arguments: list[str]) -> None:
    """Start all jobs, and print what `sbatch` prints.

    Args:
        arguments: the command line.
    """
    parser = argparse.ArgumentParser()
    for name in ("array", "job-name", "open-mode", "output", "partition", "signal", "wrap"):
        parser.add_argument(f"--{name}", required=name in ("array", "output", "wrap"))
    options = parser.parse_args(arguments)
    first, _, last = options.array.partition("-")
    indices = range(int(first), int(last) + 1)
    folder = Path(os.environ["FAKE_SBATCH"])
    for index in sorted(indices, key=lambda index: index % 2 == 0):
        log = options.output.replace("%A", JOB).replace("%a", str(index))
        variables = {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(index)}
        with Path(log).open("ab") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", options.wrap],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        (folder / str(index)).write_text(str(process.pid))
    print(f"Submitted batch job {JOB}")


if __name__ == "__main__":
    submit(sys.argv[1:])
