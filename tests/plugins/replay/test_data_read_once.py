"""Steps of a run whose data cannot continue in its middle are executed again from the beginning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, DataError
from fulgurite_checkpoint import Checkpointer
from fulgurite_replay import Recorded, fork, replay, verify
from fulgurite_testing import TinyModel, assert_same_bits

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.normal(size=(4, 4)).astype(np.float32),
        "label": RNG.integers(3, size=4).astype(np.int32),
    }
    for _ in range(10)
]


def read_once(count: int = 10) -> fg.DataSource:
    """Return batches that can be read once, in a program that says that it knows."""

    def iter_batches() -> Iterator[Any]:
        yield from BATCHES[:count]

    return fg.DataSource(iter_batches(), resume="restart")


def make_recorded(path: Path, data: Any = None, steps: int = 8, *plugins: Any) -> Recorded:
    saving = Checkpointer(every=4, max_to_keep=None, on_exception=False)
    all_plugins = [saving, "jsonl", *plugins]
    engine = fg.Engine(
        steps=steps, log_every=1, run_dir=str(path), autoload=False, plugins=all_plugins
    )
    return Recorded(engine, TinyModel, data or read_once(), path)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of 8 steps, saved at 4 and 8."""
    path = tmp_path_factory.mktemp("once") / "run"
    make_recorded(path).engine.fit(TinyModel, read_once())
    return path


def test_step_after_a_checkpoint_is_that_of_the_run_and_not_the_first_of_the_data(
    run_dir: Path,
) -> None:
    result = replay(make_recorded(run_dir), 5)
    assert (result.start, result.difference) == (0, None)
    np.testing.assert_array_equal(result.batch["x"], BATCHES[4]["x"])
    assert str(result) == "replayed from step 0\nstep 5 is finite here"


def test_steps_after_a_checkpoint_are_compared_from_the_beginning(run_dir: Path) -> None:
    proof = verify(make_recorded(run_dir), 4, 8)
    assert str(proof) == "steps 1 to 8 are as recorded (2 checkpoints, 8 records)"


def test_data_that_has_ended_is_told_with_where_it_ends(run_dir: Path) -> None:
    used = read_once()
    list(used.source)
    messages = {"has no batch 0 in epoch 0": used, "ended after 3 steps of 8": read_once(3)}
    for message, data in messages.items():
        with pytest.raises(DataError, match=message) as caught:
            replay(make_recorded(run_dir, data), 7)
        note = caught.value.__notes__[-1]
        assert "trained again from step 0 on, and needs the data from there" in note
        assert "train with Capture()" in note


def test_fork_at_a_step_that_was_not_saved_has_the_state_of_that_step(
    run_dir: Path, tmp_path: Path
) -> None:
    changed = make_recorded(tmp_path / "new", steps=6)
    forked = fork(make_recorded(run_dir), 5, changed)
    engine = fg.Engine(steps=6, autoload=False)
    # The data of a fork begins again, as wherever such a run resumes.
    expected = engine.fit(TinyModel, [*BATCHES[:5], BATCHES[0]])
    assert_same_bits(forked.module, expected.module)
    with pytest.raises(CheckpointError, match="its data begins again where a run resumes"):
        replay(make_recorded(tmp_path / "new"), 6)
    with pytest.raises(ConfigurationError, match="no batch can be left out of this data"):
        fork(make_recorded(run_dir), 4, make_recorded(tmp_path / "other"), skipped_steps=[6])


def test_attempts_whose_data_began_again_are_made_again_one_by_one(tmp_path: Path) -> None:
    def stop(run: fg.Run) -> None:
        raise InterruptedError

    def make(*plugins: Any) -> Recorded:
        data = fg.DataSource(BATCHES, resume="restart")
        return make_recorded(tmp_path / "run", data, 8, *plugins)

    with pytest.raises(InterruptedError):
        make(fg.LambdaPlugin(every={6: stop})).engine.fit(TinyModel, make().data)
    result = make().engine.fit(TinyModel, make().data, resume="auto")
    expected = fg.Engine(steps=8, autoload=False).fit(TinyModel, [*BATCHES[:4], *BATCHES[:4]])
    assert_same_bits(result.module, expected.module)
    proof = verify(make())
    assert str(proof) == "steps 1 to 8 are as recorded (2 checkpoints, 8 records)"
