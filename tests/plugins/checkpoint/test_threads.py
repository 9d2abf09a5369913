"""A run for whose checkpoints the system starts no thread."""

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import fulgurite as fg
import pytest
from fulgurite_checkpoint import SaveError
from trained import Act, counting, steps_in


@pytest.mark.full
def test_a_save_for_which_the_system_starts_no_thread_has_failed(tmp_path: Path) -> None:
    """It is tried again, and the third one ends the run with its result and without the lock."""
    # Orbax leaves coroutines that nobody awaits, of which Python tells at some later time.
    program = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["saved"] == [1, 2, 5, 6]
    assert len(report["warnings"]) == 2
    for step, message in zip((3, 4), report["warnings"], strict=True):
        assert message.startswith(f"the checkpoint of step {step} could not be written")
        assert "can't start new thread" in message and "the next save tries again" in message
    assert "third failure in a row" in report["error"] and report["weight"] == -9
    assert report["resumed"] == -12


def limit(*steps: int) -> Act:
    """Have no thread be started at these steps, but at all others."""

    def set_stack_size(run: fg.Run) -> None:
        # No thread gets a stack that is larger than all addresses.
        threading.stack_size(1 << 47 if run.step in steps else 0)

    return Act(1, set_stack_size)


def train(run: Path) -> None:
    """Trains without threads for a while, and prints how that went."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        counting(run, limit(3, 4), steps=6, max_to_keep=None, async_save=False)
    report = {
        "saved": steps_in(run),
        "warnings": [str(warning.message) for warning in caught],
    }
    try:
        counting(run, limit(7, 8, 9), steps=12, resume="auto", async_save=False)
    except SaveError as error:
        report |= {"error": str(error), "weight": float(error.result.module.weight)}
    threading.stack_size(0)
    report["resumed"] = float(counting(run, steps=12, resume="auto").module.weight)
    print(json.dumps(report))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
