"""Random programs with random faults leave what they leave without them."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from crash_harness import PATIENCE, STARTING
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_programs import (
    Fault,
    Program,
    disarm,
    faulty_programs,
    read_files,
    read_strikes,
    train,
    train_here,
    train_until_done,
)

pytestmark = pytest.mark.full

NUM_EXAMPLES = int(os.environ.get("FULGURITE_RANDOM_PROGRAMS", "2"))
"""How many programs are tried: `FULGURITE_RANDOM_PROGRAMS=500 pytest -m full` for a soak."""
SEED = int(os.environ.get("FULGURITE_RANDOM_SEED", "0"))
"""Which programs: another number, others."""
NUM_KILLS = 8
"""Of each program that is killed."""
OPTIONS = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    # What is found is one of few settings, and to shrink it takes hundreds of fits.
    phases=(Phase.explicit, Phase.generate),
)
FaultyProgram = tuple[Program, tuple[Fault, ...]]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
@seed(SEED)
@OPTIONS
@given(
    faulty_programs(
        ("terminate", "raise", "block", "full", "read-only"), num_faults=2, max_steps=24
    )
)
def test_interrupted_programs_leave_what_undisturbed_ones_leave(
    faulty_program: FaultyProgram,
) -> None:
    program, faults = faulty_program
    with tempfile.TemporaryDirectory() as folder:
        whole_dir, run_dir = Path(folder) / "whole", Path(folder) / "run"
        disarm(whole_dir, faults)
        whole = train(program, whole_dir, faults)
        assert train_until_done(program, run_dir, faults) == whole
        assert read_files(run_dir) == read_files(whole_dir)


def train_until_not_killed(program: Program, run_dir: Path, faults: Sequence[Fault]) -> list[int]:
    """Train in processes that are killed, until one is not.

    Returns:
        The steps that the killed ones had come to.
    """
    killed_at = []
    for _ in range(len(faults) + 1):
        process = STARTING.Process(target=train_here, args=(program, run_dir, faults))
        process.start()
        process.join(PATIENCE)
        if process.exitcode == 0:
            return killed_at
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        killed_at.append(read_strikes(run_dir)[-1].step)
    raise AssertionError(f"{program} was not done after {len(faults)} faults: {faults}")


@pytest.mark.slow
def test_killed_programs_leave_what_undisturbed_ones_leave() -> None:
    """Prints where in the programs they were killed."""
    tenths: Counter[int] = Counter()
    places: Counter[str] = Counter()

    @seed(SEED)
    @OPTIONS
    @given(faulty_programs(("kill",), num_faults=NUM_KILLS, max_steps=96))
    def check(faulty_program: FaultyProgram) -> None:
        program, faults = faulty_program
        with tempfile.TemporaryDirectory() as folder:
            whole_dir, run_dir = Path(folder) / "whole", Path(folder) / "run"
            disarm(whole_dir, faults)
            train_here(program, whole_dir, faults)
            killed_at = train_until_not_killed(program, run_dir, faults)
            assert run_dir.with_suffix(".digest").read_text() == (
                whole_dir.with_suffix(".digest").read_text()
            )
            assert read_files(run_dir) == read_files(whole_dir)
            tenths.update((step - 1) * 10 // program.steps for step in killed_at)
            places.update(faults[strike.index].place for strike in read_strikes(run_dir))
            print(f"{tenths.total()} kills, by tenth of the program: {sorted(tenths.items())}")

    check()
    print("by place:", dict(places))
    first_half = sum(tenths[tenth] for tenth in range(5))
    second_half = tenths.total() - first_half
    assert min(first_half, second_half) > tenths.total() / 4
