"""A run of any length holds as much memory, as many descriptors and as many threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fulgurite_logging import iter_records
from long_run import HOURS, NUM_EVALUATIONS, RECORDS_A_STEP, SAVE_EVERY, Sample

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("long_run.py")
LEAK_OF_A_SAVE = 0.04
"""MiB. TensorStore 0.1.86 never releases the lists of its metrics, which Orbax 0.12.8 asks for with
each save, and some native memory for each array: 28 KB for a save of this program, over 1,600 of
them. The same run without a checkpointer grows by 0.04 KB a step."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "num_evaluators"),
    [
        pytest.param(1_000, 5, marks=pytest.mark.full),
        # A million records, 2,000 checkpoints, 100 evaluators: ten minutes.
        pytest.param(100_000, 100, marks=pytest.mark.slow),
    ],
)
def test_a_long_run_holds_no_more_at_its_end(
    tmp_path: Path, steps: int, num_evaluators: int
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, PROGRAM, run_dir, str(steps), str(num_evaluators)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    samples = [Sample(**json.loads(line)) for line in lines]
    assert [sample.step for sample in samples] == [*range(steps // 10, steps + 1, steps // 10)]
    for sample in samples:
        print(sample)
    # By then every program is compiled, and the history is as long as it ever gets.
    settled, end = samples[1:5], samples[-1]
    num_saves = (end.step - samples[1].step) / SAVE_EVERY
    assert end.memory < samples[1].memory + 32 + LEAK_OF_A_SAVE * num_saves
    # While a checkpoint is written there are a few more for a moment; and a pool starts a thread when
    # its others are busy, which on a loaded machine is after the settled part (9 threads for 8, once).
    # A leak is one for each save, of which ten or more follow.
    for name in ("descriptors", "threads"):
        before, after = (
            min(getattr(sample, name) for sample in part) for part in (settled, samples[5:])
        )
        assert after <= before + 2
    assert end.hours == pytest.approx(HOURS, abs=0.5)
    assert end.ticks == pytest.approx(HOURS * 6, abs=HOURS)

    steps_of_records = [record.step for record in iter_records(run_dir)]
    assert len(steps_of_records) == steps * RECORDS_A_STEP + num_evaluators * NUM_EVALUATIONS
    assert steps_of_records == sorted(steps_of_records)
    assert len(list((run_dir / "checkpoints").iterdir())) <= 4
