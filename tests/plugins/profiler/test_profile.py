"""Traces of windows of steps: what is in them, and how they end."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_profiler import Profile, ProgramDump, summarize_profile
from fulgurite_profiler.command import main
from fulgurite_profiler.window import WindowSteps, list_profiles


class Net(fg.Module):
    """Two layers, one of them in a scope of its own."""

    first: jax.Array
    second: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.first = jnp.ones((64, 128))
        self.second = jnp.ones((128, 32))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        with jax.named_scope("encoder"):
            features = jnp.tanh(batch @ self.first)
        with jax.named_scope("head"):
            preds = features @ self.second
        return fg.Output(jnp.mean(preds**2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.01)


BATCHES = [np.ones((16, 64), np.float32)]


def fit(run_dir: Path | None, *plugins: Any, steps: int, resume: Any = None) -> fg.FitResult:
    engine = fg.Engine(steps=steps, run_dir=run_dir, log_every=100, plugins=plugins, autoload=False)
    return engine.fit(Net, BATCHES, resume=resume)


@contextmanager
def trace_elsewhere(folder: Path) -> Iterator[None]:
    """Have a program's own profiler running within the block."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    yield
    jax.profiler.stop_trace()


def list_names(run_dir: Path) -> list[str]:
    return [path.name for path in list_profiles(run_dir)]


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (WindowSteps(3, 2, None), [3, 4, 5]),
        (WindowSteps(0, 1, 5), [1, 5, 6, 10, 11, 15, 16, 20]),
        (WindowSteps(2, 3, 8), [2, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20]),
        (WindowSteps(30, 3, 8), []),
    ],
)
def test_steps_of_windows(trigger: WindowSteps, steps: list[int]) -> None:
    step_range = fg.StepRange(0, 20)
    fired = []
    step = trigger.next(0, step_range)
    while step is not None:
        fired.append(step)
        step = trigger.next(step, step_range)
    assert fired == steps


def test_trace_holds_the_steps_of_its_window_and_what_each_layer_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(tmp_path, Profile(at=10, steps=5), steps=20)
    assert not result.messages and list_names(tmp_path) == ["steps-11-15"]
    summary = summarize_profile(tmp_path / "profiles" / "steps-11-15")
    assert list(summary.steps) == [11, 12, 13, 14, 15]
    assert all(seconds > 0 for seconds in summary.steps.values())
    # 16 examples: forward and by the weights of both layers, and by the input of the second.
    layers = {layer.layer: layer for layer in summary.add_up_layers()}
    products = {"encoder": 2 * 16 * 64 * 128, "head": 2 * 16 * 128 * 32}
    assert layers["encoder"].flops == 5 * products["encoder"]
    assert layers["encoder (backward)"].flops == 5 * products["encoder"]
    assert layers["head"].flops == 5 * products["head"]
    assert layers["head (backward)"].flops == 5 * 2 * products["head"]
    assert sum(layer.seconds for layer in layers.values()) == pytest.approx(summary.seconds)
    # The command shows the newest trace of a run, or the trace itself.
    assert main([str(tmp_path), "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert "steps 11 to 15" in shown and "/host:CPU" in shown
    assert "by time" in shown and "by FLOPs" in shown and "head (backward)" in shown
    assert main([str(tmp_path / "profiles" / "steps-11-15"), "--json"]) == 0
    assert '"layer": "encoder (backward)"' in capsys.readouterr().out
    assert main([str(tmp_path), "--window", "steps-1-2"]) == 1
    assert "there are steps-11-15" in capsys.readouterr().err
    assert main([str(tmp_path / "profiles"), "--top", "3"]) == 1
    assert "there is no profile" in capsys.readouterr().err
    assert main([str(tmp_path), "--open"]) == 1
    assert "install fulgurite-profiler[xprof]" in capsys.readouterr().err


@pytest.mark.full
def test_fit_that_resumes_within_a_window_does_not_trace_it(tmp_path: Path) -> None:
    checkpointer = Checkpointer(every=12)
    fit(tmp_path, checkpointer, steps=12)
    profiles = [Profile(at=10, steps=5, instance="a"), Profile(at=15, steps=2, instance="b")]
    fit(tmp_path, checkpointer, *profiles, steps=20, resume="auto")
    assert list_names(tmp_path) == ["steps-16-17"]


@pytest.mark.full
def test_only_the_newest_traces_stay(tmp_path: Path) -> None:
    fit(tmp_path, Profile(at=2, steps=1, every=3, keep=2), steps=12)
    assert list_names(tmp_path) == ["steps-9-9", "steps-12-12"]


@pytest.mark.full
def test_traces_of_an_earlier_attempt_are_older_whatever_their_steps(tmp_path: Path) -> None:
    profile = Profile(at=2, steps=1, every=10, keep=1)
    fit(tmp_path, profile, steps=14)
    assert list_names(tmp_path) == ["steps-13-13"]
    (recording,) = (tmp_path / "profiles" / "steps-13-13" / "plugins" / "profile").iterdir()
    recording.rename(recording.with_name("2020_01_31_12_00_00"))
    fit(tmp_path, profile, steps=4)
    assert list_names(tmp_path) == ["steps-3-3"]


def test_a_window_at_the_start_of_a_fit_is_traced_and_one_at_its_end_is_not(tmp_path: Path) -> None:
    plugins = [Profile(at=0, steps=2, instance="a"), Profile(at=4, steps=1, instance="b")]
    result = fit(tmp_path, *plugins, steps=4)
    assert list_names(tmp_path) == ["steps-1-2"]
    summary = summarize_profile(tmp_path / "profiles" / "steps-1-2")
    assert list(summary.steps) == [1, 2]
    engine = fg.Engine(steps=6, run_dir=tmp_path, plugins=plugins, autoload=False)
    engine.fit(data=BATCHES, state=result.state)
    assert set(list_names(tmp_path)) == {"steps-1-2", "steps-5-5"}


@pytest.mark.full
def test_signal_within_a_window_ends_the_trace(tmp_path: Path) -> None:
    interrupt = fg.LambdaPlugin(every={fg.At(12): lambda run: os.kill(os.getpid(), signal.SIGTERM)})
    result = fit(tmp_path, Profile(at=10, steps=5), interrupt, steps=20)
    assert result.stop_reason == "SIGTERM"
    fg.forget_stop_request()
    last = int(result.state.step)
    assert last < 15 and list_names(tmp_path) == [f"steps-11-{last}"]
    summary = summarize_profile(tmp_path / "profiles" / f"steps-11-{last}")
    assert list(summary.steps) == list(range(11, last + 1))


@pytest.mark.full
def test_exception_within_a_window_ends_the_trace(tmp_path: Path) -> None:
    def fail(run: fg.Run) -> None:
        raise ValueError("an action fails")

    # The second attempt ends at the same step, and its trace is the one that stays.
    for _ in range(2):
        with pytest.raises(ValueError, match="an action fails") as caught:
            fit(tmp_path, Profile(at=2, steps=5), fg.LambdaPlugin(every={fg.At(4): fail}), steps=20)
        assert "OSError" not in str(caught.value.__notes__)
        assert list_names(tmp_path) == ["steps-3-4"]
    with trace_elsewhere(tmp_path / "other"):
        pass  # nothing is traced any more, so that this can


@pytest.mark.full
def test_another_profiler_is_let_alone(tmp_path: Path) -> None:
    with trace_elsewhere(tmp_path / "other"):
        result = fit(tmp_path / "run", Profile(at=2, steps=2), steps=5)
    assert result.messages == [
        "no profile of the steps 3 to 4: Profile has already been started. Only one profile may be "
        "run at a time."
    ]
    assert list((tmp_path / "other").glob("plugins/profile/*/*.xplane.pb"))
    assert not list_names(tmp_path / "run")


@pytest.mark.full
def test_two_windows_never_overlap(tmp_path: Path) -> None:
    plugins = [Profile(at=2, steps=4, instance="a"), Profile(at=4, steps=1, instance="b")]
    result = fit(tmp_path, *plugins, steps=10)
    assert list_names(tmp_path) == ["steps-3-6"]
    assert len(result.messages) == 1 and "Only one profile" in result.messages[0]


@pytest.mark.full
def test_numbers_are_those_of_a_run_without_a_trace(tmp_path: Path) -> None:
    traced = fit(tmp_path, Profile(at=2, steps=4), steps=10)
    plain = fit(None, steps=10)
    assert eqx.tree_equal(traced.module, plain.module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": -1}, "at is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"keep": 0}, "keep is 0"),
        ({"steps": 5, "every": 5}, "does not fit into every=5"),
    ],
)
def test_invalid_argument_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Profile(**options)


@pytest.mark.parametrize("plugin", [Profile(), ProgramDump()])
def test_run_without_a_directory_is_an_error(plugin: Any) -> None:
    with pytest.raises(ConfigurationError, match="writes into the run's directory"):
        fit(None, plugin, steps=2)


def test_programs_are_written_before_and_after_optimization(tmp_path: Path) -> None:
    fit(tmp_path, ProgramDump(), steps=2)
    (folder,) = (tmp_path / "programs").iterdir()
    assert folder.name == "1-1-step"
    assert "stablehlo.dot_general" in (folder / "before.mlir").read_text()
    assert (folder / "after.hlo.txt").read_text().startswith("HloModule")
    assert "dot_general" in (folder / "jaxpr.txt").read_text()
    cost = json.loads((folder / "cost.json").read_text())
    assert cost["model_flops"] == 2 * 16 * (2 * 64 * 128 + 3 * 128 * 32)
    assert cost["flops"] > cost["model_flops"] and cost["argument_bytes"] > 4 * 64 * 128


def test_folder_without_a_trace_and_damaged_trace_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no trace"):
        summarize_profile(tmp_path)
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(b"\xff not a trace")
    with pytest.raises(ConfigurationError, match="cannot be read as a trace"):
        summarize_profile(tmp_path)
