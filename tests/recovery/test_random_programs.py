"""Random programs with a random fault leave what they leave without it."""

import multiprocessing
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from crash_harness import PATIENCE, STARTING
from hypothesis import HealthCheck, Phase, given, settings
from random_programs import Fault, Program, faults, programs, read_files, train, train_until_done

NUM_EXAMPLES = int(os.environ.get("FULGURITE_RANDOM_PROGRAMS", "5"))
"""How many programs are tried: `FULGURITE_RANDOM_PROGRAMS=500 pytest -m slow` for a soak."""
OPTIONS = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    # What is found is one of few settings, and to shrink it takes hundreds of fits.
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
@OPTIONS
@given(programs(), faults("terminate", "raise", "block"))
def test_interrupted_programs_leave_what_undisturbed_ones_leave(
    program: Program, fault: Fault
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(program, Path(folder) / "whole", None)
        resumed = train_until_done(program, Path(folder) / "run", fault)
        assert resumed == whole
        assert read_files(Path(folder) / "run") == read_files(Path(folder) / "whole")


def train_here(
    program: Program, run_dir: Path, fault: Fault, answers: "multiprocessing.Queue[str]"
) -> None:
    answers.put(train(program, run_dir, fault))


@pytest.mark.slow
def test_killed_programs_leave_what_undisturbed_ones_leave() -> None:
    """Prints at which steps they were killed."""
    killed_at: Counter[int] = Counter()

    @OPTIONS
    @given(programs(), faults("kill"))
    def check(program: Program, fault: Fault) -> None:
        with tempfile.TemporaryDirectory() as folder:
            whole = train(program, Path(folder) / "whole", None)
            run_dir = Path(folder) / "run"
            answers = STARTING.Queue()
            for _ in range(3):
                process = STARTING.Process(
                    target=train_here, args=(program, run_dir, fault, answers)
                )
                process.start()
                process.join(PATIENCE)
                if process.exitcode == 0:
                    break
                assert process.exitcode == -9, process.exitcode
                killed_at[fault.step] += 1
            assert answers.get(timeout=10) == whole
            assert read_files(run_dir) == read_files(Path(folder) / "whole")

    check()
    print("killed at steps", dict(sorted(killed_at.items())), "in all", killed_at.total())
    assert killed_at.total() > 0
