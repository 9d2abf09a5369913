"""A fork leaves a batch out, and continues to after it was killed."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import BatchIterator
from fulgurite_checkpoint import Checkpointer
from fulgurite_replay import Recorded, SkippedBatches, fork, verify
from fulgurite_replay.forking import count_steps
from fulgurite_runs import read_origin
from fulgurite_testing import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*may not be exact. data was 'list' and is")
RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.normal(size=(4, 3)).astype(np.float32),
        "y": RNG.normal(size=(4, 1)).astype(np.float32),
    }
    for _ in range(12)
]


class Line(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((jax.vmap(self.layer)(batch["x"]) - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Killed(Exception):
    pass


class Kill:
    """Ends a fit after a step, as a signal that cannot be caught would."""

    def __init__(self, step: int) -> None:
        self.step = step

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        raise Killed


def make_recorded(
    path: Path, *plugins: Any, data: Any = BATCHES, saved_in: Path | None = None, **settings: Any
) -> Recorded:
    options: dict[str, Any] = {"epochs": 2} | settings
    checkpointer = Checkpointer(every=3, max_to_keep=None, on_exception=False, directory=saved_in)
    engine = fg.Engine(
        run_dir=str(path), autoload=False, plugins=[checkpointer, *plugins], **options
    )
    return Recorded(engine, Line, data, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a run of two epochs of twelve batches."""
    recorded = make_recorded(tmp_path_factory.mktemp("fork") / "old")
    recorded.engine.fit(Line, BATCHES)
    return recorded


def train_by_hand(batches: list[Any], start: Any) -> Any:
    """Return the layer after a plain loop of optax over batches."""
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(start)

    @jax.jit
    def step(layer: Any, opt_state: Any, batch: Any) -> Any:
        def compute_loss(layer: Any) -> Any:
            return jnp.mean((batch["x"] @ layer.weight.T + layer.bias - batch["y"]) ** 2)

        updates, opt_state = optimizer.update(jax.grad(compute_loss)(layer), opt_state)
        return optax.apply_updates(layer, updates), opt_state

    for batch in batches:
        start, opt_state = step(start, opt_state, batch)
    return start


def get_initial_layer() -> Any:
    state = fg.Engine(steps=1, autoload=False).init_state(Line, BATCHES)
    return jax.tree.map(jnp.copy, state.module.layer)


@pytest.mark.parametrize(
    ("step", "skipped"), [(6, (8,)), pytest.param(7, (12, 13), marks=pytest.mark.full)]
)
def test_batch_that_is_left_out_is_as_never_there(
    trained: Recorded, tmp_path: Path, step: int, skipped: tuple[int, ...]
) -> None:
    changed = make_recorded(tmp_path / "new")
    result = fork(trained, step, changed, skipped_steps=skipped)
    twice = [*BATCHES, *BATCHES]
    batches = [batch for number, batch in enumerate(twice, 1) if number not in skipped]
    expected = train_by_hand(batches, get_initial_layer())
    assert int(result.state.step) == len(batches) == count_steps(trained, changed, skipped)
    np.testing.assert_allclose(result.module.layer.weight, expected.weight, rtol=1e-5)
    np.testing.assert_allclose(result.module.layer.bias, expected.bias, rtol=1e-5)
    assert read_origin(tmp_path / "new") == {
        "run": str(trained.path),
        "step": step,
        "skipped_batches": list(skipped),
    }


@pytest.mark.parametrize(("skipped", "expected"), [((8,), 23), ((12, 13, 25), 22), ((), None)])
def test_steps_of_epochs_without_some_batches_are_counted(
    trained: Recorded, tmp_path: Path, skipped: tuple[int, ...], expected: int | None
) -> None:
    # Two epochs of twelve batches; batch 25 would be the first of a third.
    changed = make_recorded(tmp_path / "new")
    assert count_steps(trained, changed, skipped) == expected
    assert count_steps(trained, make_recorded(tmp_path, epochs=None, steps=24), skipped) is None


@pytest.mark.full
@pytest.mark.parametrize(
    "killed_at", [10, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 14))]
)
def test_fork_that_was_killed_continues_to_leave_it_out(
    trained: Recorded, tmp_path: Path, killed_at: int
) -> None:
    whole = fork(trained, 6, make_recorded(tmp_path / "whole"), skipped_steps=[11])
    with pytest.raises(Killed):
        fork(trained, 6, make_recorded(tmp_path / "new", Kill(killed_at)), skipped_steps=[11])
    with pytest.raises(CheckpointError, match="holds a run: give a new directory"):
        fork(trained, 6, make_recorded(tmp_path / "new"), skipped_steps=[12])
    again = fork(trained, 6, make_recorded(tmp_path / "new"), skipped_steps=[11])
    assert int(again.state.step) == 23
    assert_same_bits(again.module, whole.module)
    assert_same_bits(again.state.opt_state, whole.state.opt_state)


@pytest.mark.full
def test_program_without_the_fork_does_not_continue_it_with_other_batches(
    trained: Recorded, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        fork(trained, 6, make_recorded(tmp_path / "new", Kill(10)), skipped_steps=[11])
    plain = make_recorded(tmp_path / "new")
    with pytest.raises(Exception, match="cannot resume from"):
        plain.engine.fit(Line, BATCHES, resume="auto")


@pytest.fixture(scope="module")
def forked(trained: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a fork of that run, without its batch 8: of 23 steps."""
    recorded = make_recorded(tmp_path_factory.mktemp("fork") / "forked")
    fork(trained, 6, recorded, skipped_steps=[8])
    return recorded


@pytest.mark.full
def test_fork_of_a_fork_leaves_out_what_either_does(forked: Recorded, tmp_path: Path) -> None:
    # Its step 11 is on batch 12, and its step 13 on batch 2 of the second epoch.
    result = fork(forked, 9, make_recorded(tmp_path / "new"), skipped_steps=[13, 11])
    remaining = [*BATCHES[:7], *BATCHES[8:11], BATCHES[0], *BATCHES[2:]]
    expected = train_by_hand(remaining, get_initial_layer())
    assert int(result.state.step) == len(remaining) == 21
    np.testing.assert_allclose(result.module.layer.weight, expected.weight, rtol=1e-5)
    np.testing.assert_allclose(result.module.layer.bias, expected.bias, rtol=1e-5)
    assert read_origin(tmp_path / "new")["skipped_batches"] == [8, 12, 14]


@pytest.mark.full
def test_steps_of_a_fork_are_made_again_without_what_it_leaves_out(
    forked: Recorded, tmp_path: Path
) -> None:
    proof = verify(forked, 9, 15)
    assert proof.is_equal and proof.counts == {"checkpoints": 2}
    # It began with a state of the other run, and has none itself from before its step 9.
    with pytest.raises(CheckpointError, match=r"is a fork of .*--step 6 --skip-batch 8"):
        fork(forked, 7, make_recorded(tmp_path / "new"), skipped_steps=[9])


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ((-3,), "step -3 cannot be left out: the first step is 1"),
        ((0,), "step 0 cannot be left out: the first step is 1"),
        ((5,), "cannot be left out by a fork at step 6: fork before it, at step 4"),
        ((9, 8, 9), "the batch of step 9 is to be left out twice"),
        ((25,), "the batch of step 25 cannot be left out: the run has 24 steps"),
        (range(7, 13), "steps 7 to 12 are all that is left of an epoch: fork earlier"),
    ],
)
def test_batches_that_cannot_be_left_out_are_refused(
    trained: Recorded, tmp_path: Path, skipped: Sequence[int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fork(trained, 6, make_recorded(tmp_path / "new"), skipped_steps=skipped)
    assert not (tmp_path / "new").exists()


def test_fork_by_a_program_that_reads_no_checkpoint_is_refused(
    trained: Recorded, tmp_path: Path
) -> None:
    changed = Recorded(fg.Engine(epochs=2, autoload=False), Line, BATCHES, tmp_path / "new")
    with pytest.raises(ConfigurationError, match="the program has no Checkpointer"):
        fork(trained, 6, changed)


@pytest.fixture(scope="module")
def saved_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a run of six steps whose checkpoints have a directory of their own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    recorded = make_recorded(folder / "old", saved_in=folder / "saved", steps=6, epochs=None)
    recorded.engine.fit(Line, BATCHES)
    return recorded


def list_files(folder: Path) -> dict[str, bytes]:
    """Return the files of all checkpoints below a folder."""
    files = folder.rglob("step-*/**/*")
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def test_fork_does_not_save_where_the_other_run_does(
    saved_elsewhere: Recorded, tmp_path: Path
) -> None:
    saved = saved_elsewhere.checkpoint_root
    assert [step for step, _ in saved_elsewhere.list_checkpoints()] == [3, 6]
    before = list_files(saved)
    (tmp_path / "link").symlink_to(saved)
    for same_place in (saved, tmp_path / "link"):
        changed = make_recorded(tmp_path / "new", saved_in=same_place)
        with pytest.raises(ConfigurationError, match="give its Checkpointer another directory="):
            fork(saved_elsewhere, 3, changed)
    # Nor where a third one does.
    third = make_recorded(tmp_path / "third", saved_in=tmp_path / "both", steps=3, epochs=None)
    third.engine.fit(Line, BATCHES)
    of_third = list_files(tmp_path / "both")
    changed = make_recorded(tmp_path / "new", saved_in=tmp_path / "both", steps=6, epochs=None)
    with pytest.raises(CheckpointError, match="is a checkpoint of the run .*third"):
        fork(saved_elsewhere, 3, changed)
    assert list_files(saved) == before and list_files(tmp_path / "both") == of_third


@pytest.mark.parametrize("use", [lambda run, new: fork(run, 3, new), lambda run, _: verify(run)])
def test_checkpoints_of_another_run_are_not_read_as_those_of_the_run(
    saved_elsewhere: Recorded, tmp_path: Path, use: Any
) -> None:
    shutil.copytree(saved_elsewhere.checkpoint_root, tmp_path / "saved")
    mixed_up = make_recorded(tmp_path / "other", saved_in=tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"is a checkpoint of the run .*old"):
        use(mixed_up, make_recorded(tmp_path / "new"))


def test_killed_fork_that_saves_elsewhere_continues_from_what_it_saved(
    saved_elsewhere: Recorded, tmp_path: Path
) -> None:
    def make_changed(*plugins: Any) -> Recorded:
        saved = tmp_path / "saved"
        return make_recorded(tmp_path / "new", *plugins, saved_in=saved, steps=12, epochs=None)

    with pytest.raises(Killed):
        fork(saved_elsewhere, 3, make_changed(Kill(8)))
    starts: list[int] = []
    note_start = fg.LambdaPlugin(on_fit_start=lambda run: starts.append(run.step))
    again = fork(saved_elsewhere, 3, make_changed(note_start))
    expected = train_by_hand(BATCHES, get_initial_layer())
    assert starts == [6] and not (tmp_path / "saved/superseded").exists()
    np.testing.assert_allclose(again.module.layer.weight, expected.weight, rtol=1e-5)
    # Once its directory is gone, it begins again.
    shutil.rmtree(tmp_path / "new")
    with pytest.warns(UserWarning, match="held checkpoints that this run does not resume from"):
        fork(saved_elsewhere, 3, make_changed(note_start))
    assert starts == [6, 3]


def test_limited_epochs_are_refused(trained: Recorded, tmp_path: Path) -> None:
    limited = make_recorded(tmp_path / "new", limit_train_batches=4)
    with pytest.raises(ConfigurationError, match="limit_train_batches"):
        fork(trained, 6, limited, skipped_steps=[8])


@pytest.mark.parametrize("on_device", [False, True])
def test_shuffled_arrays_keep_their_order(on_device: bool) -> None:
    arrays = {"x": np.arange(10, dtype=np.float32)}
    data = fg.ArrayData(arrays, 2, shuffle=True, on_device=on_device)
    plain = fg.ArrayData(arrays, 2, shuffle=True)
    with BatchIterator(plain, seed=5, epochs=3) as items:
        expected = [item.batch["x"].tolist() for item in items]
    for skipped in (7, 5, 10):
        remaining = [rows for number, rows in enumerate(expected, 1) if number != skipped]
        with BatchIterator(SkippedBatches(data, (skipped,)), seed=5, epochs=3) as items:
            read = list(items)
        assert [item.batch["x"].tolist() for item in read] == remaining
        ends = [number for number, item in enumerate(read, 1) if item.epoch_end]
        assert ends == [end - (end >= skipped) for end in (5, 10, 15)]
        for count, item in enumerate(read[:-1], 1):
            source = SkippedBatches(data, (skipped,))
            with BatchIterator(source, seed=5, position=item.position) as items:
                assert next(items).batch["x"].tolist() == remaining[count]
