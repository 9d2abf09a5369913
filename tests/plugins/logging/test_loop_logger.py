"""Loggers in a loop of one's own, against what a fit logs of the same steps."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, NonFiniteError, PluginError, StateError
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import ConsoleLogger, CSVLogger, JSONLLogger, LoopLogger, iter_records, media
from fulgurite_runs import RunDirectory
from logged import Line, data


def make_engine(run: Path | None, **options: Any) -> fg.Engine:
    plugins = [JSONLLogger(), CSVLogger()] if run is not None else []
    return fg.Engine(steps=10, run_dir=run, plugins=plugins, autoload=False, **options)


@pytest.mark.full
def test_a_loop_logs_what_a_fit_logs_with_the_same_bits(tmp_path: Path) -> None:
    fitted = make_engine(tmp_path / "fit", log_every=4).fit(Line, data())
    engine = make_engine(tmp_path / "loop")
    state = engine.init_state(Line, data())
    with LoopLogger(engine) as log:
        for step, batch in enumerate(engine.iter_batches(data()), 1):
            state, _ = engine.step(state, batch)
            if step in (4, 8, 10):
                # Reading changes nothing.
                assert state.metric_window.read() == state.metric_window.read()
                state = log.metrics(state)
                assert state.metric_window.read() == {}
        with pytest.raises(CheckpointError, match="is in use by attempt 1"):
            with RunDirectory(tmp_path / "loop").lock():
                pass
        history = log.history
    tables = [path.name for path in (tmp_path / "fit").glob("records*.csv")]
    assert len(tables) > 0
    for name in ("records.jsonl", *tables):
        assert (tmp_path / "loop" / name).read_bytes() == (tmp_path / "fit" / name).read_bytes()
    assert len(list(iter_records(tmp_path / "loop"))) == 3
    assert history.to_dict() == fitted.history.to_dict()
    # The moving average is carried across the windows: that of all batch losses so far.
    single = make_engine(None, log_every=1).fit(Line, data()).history
    averages = single["train/loss_average"]
    assert history["train/loss_average"].tolist() == averages[[3, 7, 9]].tolist()
    losses = single["train/loss"]
    np.testing.assert_allclose(history["train/loss"][1], losses[4:8].mean(), rtol=1e-6)


def test_numbers_on_the_device_are_numbers_of_python_in_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = fg.Engine(steps=1, plugins=[ConsoleLogger()], autoload=False)
    with LoopLogger(engine) as log:
        values = {"a": jnp.float32(0.5), "b": np.float32(0.25), "c": jnp.int32(3), "d": jnp.ones(2)}
        log.scalars("test", values, 1)
        (record,) = log.history.records
    assert [type(value) for value in record.values.values()][:3] == [float, float, int]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[2:] == ["test", "a", "0.5000", "b", "0.2500", "c", "3", "d", "array[2]"]


@pytest.mark.full
def test_a_logger_belongs_to_the_loop_until_that_ends_also_if_it_cannot_begin(
    tmp_path: Path,
) -> None:
    logger = JSONLLogger()
    loop, fits = [
        fg.Engine(steps=10, run_dir=tmp_path / name, plugins=[logger], autoload=False)
        for name in ("loop", "fit")
    ]
    with LoopLogger(loop) as log:
        with pytest.raises(PluginError, match="'jsonl'.* is in use by a LoopLogger .*the fit of"):
            fits.fit(Line, data())
        log.scalars("mine", {"one": 1.0}, 1)
    assert [record.step for record in iter_records(tmp_path / "loop")] == [1]
    assert not (tmp_path / "fit").exists()
    with RunDirectory(tmp_path / "loop").lock():
        with pytest.raises(CheckpointError, match="is in use by attempt"):
            with LoopLogger(loop):
                pass
    assert fits.fit(Line, data()).failures == {}
    assert [record.step for record in iter_records(tmp_path / "fit")] == [10]


def test_a_loop_that_starts_again_logs_each_record_once(tmp_path: Path) -> None:
    def log_steps(log: LoopLogger, steps: range) -> None:
        for step in steps:
            log.scalars("mine", {"double": np.float32(2 * step), "one": jnp.ones(())}, step)

    with LoopLogger(make_engine(tmp_path / "run")) as log:
        log_steps(log, range(1, 4))
        positions = log.flush()
        log_steps(log, range(4, 7))  # lost: the state was saved at step 3
    with LoopLogger(make_engine(tmp_path / "run"), step=3, positions=positions) as log:
        log_steps(log, range(4, 6))
        log.text("notes", {"note": "the end"}, 5)
    records = list(iter_records(tmp_path / "run"))
    expected: list[Any] = [
        ("mine", step, {"double": 2.0 * step, "one": 1.0}) for step in range(1, 6)
    ]
    expected.append(("notes", 5, {"note": "the end"}))
    assert [(record.source, record.step, record.values) for record in records] == expected
    assert RunDirectory(tmp_path / "run").num_attempts == 2
    with LoopLogger(make_engine(tmp_path / "run")) as log:
        log_steps(log, range(1, 3))
    assert [record.step for record in iter_records(tmp_path / "run")] == [1, 2]
    fitting = fg.Engine(steps=2, run_dir=tmp_path / "fit", plugins=[Checkpointer(1)])
    fitting.fit(Line, data())
    with pytest.raises(CheckpointError, match="the newest of step 2: choose another run dir"):
        LoopLogger(make_engine(tmp_path / "fit"), step=1).__enter__()
    with RunDirectory(tmp_path / "fit").lock():
        pass  # it was released


@pytest.mark.full
def test_mistakes_in_a_loop_are_told(tmp_path: Path) -> None:
    class Falling(Line):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.log(self.weight[0] - ctx.step))

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.0)

    outside = LoopLogger(make_engine(None))
    for call in (outside.flush, lambda: outside.scalars("a", {}, 0), lambda: outside.history):
        with pytest.raises(StateError, match="logs within its block"):
            call()
    with outside as log:
        log.scalars("a", {"b": 1}, 5)
        with pytest.raises(StateError, match="a record of step 4 comes after one of step 5"):
            log.scalars("a", {"b": 1}, 4)
        with pytest.raises(PluginError, match="'b' is of type str; pass numbers"):
            log.scalars("a", {"b": "c"}, 5)
        with pytest.raises(PluginError, match="pass media"):
            log.media("a", {"b": 1}, 5)
        log.media("a", {"b": media.Text("c")}, 6)
        assert log.history.to_dict() == {"a/b": {5: 1}}
    with pytest.raises(StateError, match="was used already"), outside:
        pass
    with pytest.raises(StateError, match="its loggers are closed"):
        outside.scalars("a", {"b": 1}, 9)
    batch = {"x": np.ones((2, 3), np.float32), "y": np.ones(2, np.float32)}
    for policy in ("raise", "skip"):
        engine = make_engine(None, on_nonfinite=policy)
        state = engine.init_state(Falling, [batch])
        state = state.replace(module=jax.tree.map(lambda _: jnp.asarray([0.5, 0, 0]), state.module))
        with LoopLogger(engine) as log:
            for _ in range(3):
                state, _ = engine.step(state, batch)
            if policy == "raise":
                with pytest.raises(NonFiniteError):
                    log.metrics(state)
            else:
                log.metrics(state)
                assert log.history["train/skipped_steps"].tolist() == [2]
                assert log.history["train/loss"][0] == pytest.approx(np.log(0.5))
