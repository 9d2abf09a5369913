"""A program's arguments, and how it ends."""

import copy
import gc
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import redact_text
from fulgurite_cli import Experiment, SecretStr, build_experiment, run
from fulgurite_cli.values import parse_value
from fulgurite_config import L
from fulgurite_runs import RunDirectory, RunPlugin

PROGRAM = """
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import fulgurite as fg
from fulgurite_cli import Experiment, run
from fulgurite_runs import RunPlugin

class Net(fg.Module):
    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jnp.ones(())

    def training_step(self, batch, ctx):
        return fg.Output(self.weight * batch.mean())

    def configure_optimizers(self):
        return optax.sgd(0.1)

class Report(RunPlugin):
    @fg.hookimpl
    def log_record(self, record):
        if record.kind == "scalars":
            print("step", record.step, flush=True)

    @fg.hookimpl
    def on_exception(self):
        time.sleep(600)  # what a second Ctrl-C must not wait for

    @fg.hookimpl
    def on_fit_end(self, run, result):
        print("end", result.stop_reason, run.run_dir.path, flush=True)

class Source:
    def __init__(self, stuck):
        self.stuck = stuck

    def __iter__(self):
        for _ in range(101):
            yield np.ones((1, 1), np.float32)
        if self.stuck:
            print("waiting", file=sys.stderr, flush=True)
            time.sleep(600)

def experiment(steps: int = 10**9, stuck: bool = False):
    engine = fg.Engine(steps=steps, log_every=100, plugins=[Report()])
    return Experiment(engine, model=Net, data=fg.DataSource(Source(stuck), prefetch=0))

if __name__ == "__main__":
    run(experiment)
"""


class Net(fg.Module):
    """One weight, made smaller by 1 at each step."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: jax.Array, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Act(Enum):
    relu = 1
    tanh = 2


def settings(
    lr: float = 1e-3,
    steps: int = 10,
    seed: int = 0,
    shuffle: bool = True,
    name: str = "digits",
    limit: int | None = None,
    tag: str | None = "a",
    kind: Literal["mlp", "conv"] = "mlp",
    depth: Literal[1, 2, 3] = 1,
    widths: tuple[int, ...] = (64, 32),
    betas: tuple[float, float] = (0.9, 0.999),
    step: tuple[int, float] = (1, 0.5),
    rates: list[float] | None = None,
    scale: int | float = 1,
    untyped=3,
    act: Act = Act.relu,
    out: Path | None = Path("a"),
) -> Experiment:
    """Trains nothing; its model is its arguments."""
    return Experiment(engine=fg.Engine(steps=steps), model=locals(), data=None)


def counting(steps: int = 3) -> Experiment:
    """Counts."""
    return Experiment(
        engine=fg.Engine(steps=steps), model=Net, data=partial(list, [np.ones((2, 1), np.float32)])
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("lr=3e-4", 3e-4),
        ("lr=1", 1.0),
        ("lr=-inf", -math.inf),
        ("steps=20", 20),
        ("seed=-1_000", -1000),
        ("shuffle=false", False),
        ("shuffle=True", True),
        ("name=a=b c", "a=b c"),
        ("name=", ""),
        ("name=none", "none"),
        ("limit=5", 5),
        ("limit=none", None),
        ("tag=None", None),
        ("tag=b", "b"),
        ("kind=conv", "conv"),
        ("depth=2", 2),
        ("widths=128", (128,)),
        ("widths=1, 2,3", (1, 2, 3)),
        ("widths=(3, 4)", (3, 4)),
        ("widths=", ()),
        ("betas=0.5,1", (0.5, 1.0)),
        ("step=2,3", (2, 3.0)),
        ("rates=1,2.5", [1.0, 2.5]),
        ("scale=2", 2),
        ("scale=2.5", 2.5),
        ("untyped=4", 4),
        ("act=tanh", Act.tanh),
        ("out=b/c", Path("b/c")),
    ],
)
def test_override_has_the_type_of_its_argument(override: str, value: Any):
    name = override.partition("=")[0]
    got, unchanged = (
        build_experiment(settings, [override]).model,
        build_experiment(settings, []).model,
    )
    assert (repr(got.pop(name)), unchanged.pop(name) is not None) == (
        repr(value),
        name not in ("limit", "rates"),
    )
    assert got == unchanged


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=fast", "lr=fast is not float"),
        ("steps=1.5", "steps=1.5 is not int"),
        ("steps=", "steps= is not int"),
        ("shuffle=1", "shuffle=1 is not bool"),
        ("limit=few", "limit=few is not int | None"),
        ("kind=mpl", "kind=mpl is not 'mlp' | 'conv'"),
        ("depth=4", "depth=4 is not 1 | 2 | 3"),
        ("widths=1,x", "widths=1,x is not tuple[int, ...]"),
        ("betas=1", "betas=1 is not tuple[float, float]"),
        ("betas=1,2,3", "betas=1,2,3 is not tuple[float, float]"),
        ("untyped=x", "untyped=x is not int"),
        ("act=gelu", "act=gelu is not relu | tanh"),
        ("widht=3", "settings has no argument 'widht'. Did you mean 'widths'?"),
        ("zzzzzz=3", "settings has no argument 'zzzzzz'. There are: act, betas, depth"),
        ("lr", "'lr' is not an argument: write name=value"),
    ],
)
def test_invalid_override_is_an_error(override: str, message: str):
    with pytest.raises(ConfigurationError) as caught:
        build_experiment(settings, [override])
    assert message in str(caught.value)


def test_arguments_are_stored_as_in_manifests():
    built = build_experiment(settings, ["act=tanh", "out=b"])
    assert built.engine.config is not None
    config = json.loads(json.dumps(built.engine.config))
    assert build_experiment(settings, ["act=tanh"], config).model == built.model
    with pytest.raises(
        ConfigurationError, match=r"act=.*differs from what the run was started with, act='tanh'"
    ):
        build_experiment(settings, ["act=relu"], config)

    def experiment(width: Any = 1j) -> Experiment:
        return Experiment(engine=fg.Engine(steps=1), model=None, data=None)

    build_experiment(experiment, [])
    with pytest.raises(
        ConfigurationError,
        match=r"experiment\(width=\.\.\.\) cannot be written to the run's manifest",
    ):
        build_experiment(experiment, [], run_dir="runs/a")


def test_a_run_is_built_again_with_defaults_of_another_type_than_their_annotation() -> None:
    def experiment(
        lr: float = 1,
        steps: int = 4.0,  # type: ignore[assignment]
        is_long: bool = 0,  # type: ignore[assignment]
        sizes: Sequence[int] = (1, 2),
        rates: tuple[float, ...] = (1, 2),
    ) -> Experiment:
        values = (lr, steps, is_long, sizes, rates)
        return Experiment(engine=fg.Engine(steps=1), model=values, data=None)

    config: Any = build_experiment(experiment, []).engine.config
    saved = json.loads(json.dumps(config))
    again = build_experiment(experiment, ["lr=1", "rates=1,2"], saved)
    assert again.model == (1, 4.0, 0, (1, 2), (1, 2))
    assert type(again.model[3]) is tuple
    started = build_experiment(experiment, ["lr=1", "rates=1,2"], start_config=saved)
    assert json.dumps(started.engine.config) == json.dumps(saved)
    with pytest.raises(ConfigurationError, match="lr=2.0 differs from what the run was started"):
        build_experiment(experiment, ["lr=2"], saved)
    # A manifest of an earlier version, with the default as it was written.
    assert build_experiment(experiment, ["lr=1"], saved | {"lr": 1}).model == again.model


def test_arguments_that_no_name_sets_are_left_out_and_a_partial_is_an_error() -> None:
    def experiment(lr: float = 1.0, *others: int, **options: Any) -> Experiment:
        return Experiment(engine=fg.Engine(steps=1), model=(lr, others, options), data=None)

    built = build_experiment(experiment, ["lr=2"])
    assert (built.model, built.engine.config) == ((2.0, (), {}), {"lr": 2.0})
    with pytest.raises(ConfigurationError, match="has no argument 'options'. There are: lr"):
        build_experiment(experiment, ["options=2"])
    with pytest.raises(ConfigurationError, match="is not a function, so that the types"):
        build_experiment(partial(experiment, lr=3.0), [])


def test_an_annotation_for_type_checkers_only_leaves_the_others() -> None:
    def experiment(lr: float = 1, path: "NotImported" = "a") -> "NotImported":  # type: ignore
        return Experiment(engine=fg.Engine(steps=1), model=(lr, path), data=None)

    built = build_experiment(experiment, ["lr=2", "path=3"])
    assert built.model == (2.0, "3")


def test_missing_argument_without_default_is_an_error():
    def experiment(width: int, depth: int, lr: float = 0.1) -> Experiment:
        return Experiment(engine=fg.Engine(steps=1), model=(width, depth), data=None)

    with pytest.raises(ConfigurationError, match=r"experiment needs width=..., depth=...$"):
        build_experiment(experiment, ["lr=1"])
    assert build_experiment(experiment, ["depth=2", "width=1"]).model == (1, 2)


def test_a_function_that_returns_no_experiment_is_an_error():
    def experiment() -> Any:
        return fg.Engine(steps=1)

    with pytest.raises(
        ConfigurationError, match=r"experiment returned Engine; return fulgurite_cli\.Experiment"
    ):
        build_experiment(experiment, [])
    for program in (lambda: Experiment(3, None), lambda: L(engine=3, model=None)):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="the engine is 3: give a fulgurite.Engine"):
            build_experiment(program, [])


@pytest.mark.full
def test_main_trains_with_the_overrides():
    assert float(run(counting, []).module.weight) == -3
    assert float(run(counting, ["steps=5"]).module.weight) == -5


def test_imports_are_out_of_the_search_for_garbage_while_a_program_runs():
    counts = []

    def experiment() -> Experiment:
        counts.append(gc.get_freeze_count())
        return counting()

    run(experiment, [])

    assert counts[0] > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.full
def test_the_run_directory_is_set_from_the_command_line_anywhere_among_the_overrides(
    tmp_path: Path,
):
    directories = []

    class Where(RunPlugin):
        @fg.hookimpl
        def on_fit_end(self, run: fg.Run) -> None:
            directories.append(run.run_dir and run.run_dir.path)

    def experiment(steps: int = 1, lr: float = 1.0) -> Experiment:
        data = [np.full((2, 1), lr, np.float32)]
        return Experiment(engine=fg.Engine(steps=steps, plugins=[Where()]), model=Net, data=data)

    path = str(tmp_path / "run")
    for argv in (
        ["steps=2", "--run", path, "lr=2"],
        ["--run", path, "steps=2"],
        ["steps=2", f"--run={path}"],
    ):
        assert int(run(experiment, argv).state.step) == 2
    assert directories == [tmp_path / "run"] * 3


def test_mistakes_on_the_command_line_end_with_2(capsys: pytest.CaptureFixture[str]):
    for argv, message in [
        (["stesp=2"], "error: counting has no argument 'stesp'. Did you mean 'steps'?"),
        (["steps=0"], "error: steps is 0"),
        (["--runs=a", "--verbose"], "--verbose"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            run(counting, argv)
        assert stopped.value.code == 2
        out, err = capsys.readouterr()
        assert message in err and not out


def test_an_unknown_plugin_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FULGURITE_PLUGINS", "progres")
    with pytest.raises(SystemExit) as stopped:
        run(counting, [])
    assert stopped.value.code == 2
    assert "error: no plugin 'progres'" in capsys.readouterr().err


def test_help_shows_the_arguments_with_types_and_defaults(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run(settings, ["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for line in (
        "Trains nothing; its model is its arguments.",
        "lr=0.001  (float)",
        "shuffle=True  (bool)",
        "limit=None  (int | None)",
        "kind=mlp  ('mlp' | 'conv')",
        "widths=(64, 32)  (tuple[int, ...])",
        "untyped=3  (int)",
        "--run DIR",
    ):
        assert line in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "options"),
    [
        (signal.SIGINT, 130, []),
        pytest.param(signal.SIGTERM, 143, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 85, ["--preempted-exit-code", "85"], marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, ["--preempted-exit-code=85"], marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_program_between_steps_with_its_code(
    tmp_path: Path, number: signal.Signals, code: int, options: list[str]
):
    with started(tmp_path, *options) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out.splitlines()[-1] == f"end {number.name} {tmp_path / 'run'}"
    assert f"stopped by {number.name} at step " in err
    assert not RunDirectory(tmp_path / "run").is_complete


def test_closed_standard_error_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    def batches() -> Iterator[Any]:
        yield np.ones((1, 1), np.float32)
        while True:
            signal.raise_signal(signal.SIGINT)
            yield np.ones((1, 1), np.float32)

    def experiment() -> Experiment:
        return Experiment(
            fg.Engine(steps=10**6, autoload=False),
            model=Net,
            data=fg.DataSource(batches(), prefetch=0),
        )

    full = open("/dev/full", "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(SystemExit) as stopped:
        run(experiment, [])
    assert stopped.value.code == 130
    with suppress(OSError):
        full.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_second_signal_ends_the_program_at_once(
    tmp_path: Path, number: signal.Signals, code: int
):
    """The data source never gives another batch, so that the first signal waits for it."""
    with started(tmp_path, "stuck=true") as process:
        assert process.stderr is not None
        # On a busy machine it is told before what the program is doing.
        assert "waiting\n" in iter(process.stderr.readline, "")
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):  # for stop_timeout, 30 s
            process.wait(0.5)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err


@pytest.mark.parametrize("code", ["0", "256", "-1", "x"])
def test_invalid_exit_code_is_an_error(code: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run(counting, [f"--preempted-exit-code={code}"])
    assert stopped.value.code == 2
    assert "--preempted-exit-code" in capsys.readouterr().err


@contextmanager
def started(path: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """The program in a process of its own, from its hundredth step on."""
    (path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(path / "program.py"), "--run", str(path / "run"), *arguments]
    alone = os.environ | {"FULGURITE_AUTOLOAD": "0"}  # what is installed may print, too
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=alone
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "step 100\n"
            yield process
        finally:
            process.kill()


def test_experiment_with_a_run_argument_receives_the_run_directory(tmp_path: Path):
    def experiment(steps: int = 2, run_dir: str | None = None) -> Experiment:
        engine = fg.Engine(steps=steps, autoload=False)
        return Experiment(engine=engine, model=(steps, run_dir), data=None)

    assert build_experiment(experiment, []).model == (2, None)
    program = build_experiment(experiment, ["steps=3"], run_dir=str(tmp_path))
    assert program.model == (3, str(tmp_path)) and program.engine.config == {"steps": 3}


@pytest.mark.full
def test_values_of_secret_arguments_never_leave_memory(tmp_path: Path) -> None:
    """Neither by the manifest nor by the command line, records or a message."""
    program = tmp_path / "program.py"
    program.write_text(SECRET_PROGRAM)
    command = [sys.executable, str(program), "login=tr-oub/4dor", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tr-oub/4dor\n"
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert texts and not any(b"4dor" in text for text in texts)
    assert any(b"login=***" in text for text in texts)
    manifest = json.loads((tmp_path / "run" / "attempts" / "1").read_text())
    assert manifest["configuration"] == {"login": "***", "steps": 2}
    shown = subprocess.run([*command, "--print"], capture_output=True, text=True).stdout
    assert "4dor" not in shown and "login=***" in shown


def test_secrets_in_lists_and_dictionaries_are_secrets() -> None:
    keys = parse_value("keys", "maple/1,birch/2", tuple[SecretStr, ...] | None)
    assert [key.get_secret_value() for key in keys] == ["maple/1", "birch/2"]
    named = parse_value("keys", "{'a': 'cedar/3'}", dict[str, SecretStr])
    assert named["a"].get_secret_value() == "cedar/3"
    assert redact_text("at maple/1, birch/2 and cedar/3") == "at ***, *** and ***"


def test_a_secret_is_copied_but_not_pickled() -> None:
    secret = SecretStr("tr-oub/5dor")
    assert copy.deepcopy([secret]) == [secret]
    with pytest.raises(TypeError, match="a SecretStr cannot be pickled"):
        pickle.dumps(secret)


SECRET_PROGRAM = """
import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment, SecretStr, run
from fulgurite_logging import EnvironmentLogger, JSONLLogger


class Model(fg.Module):
    weight: jnp.ndarray

    def training_step(self, batch, ctx):
        return fg.Output((self.weight * batch).mean())

    def configure_optimizers(self):
        return optax.sgd(0.1)


class Tell:
    @fg.hookimpl
    def on_fit_start(self, run):
        run.log_text("tell", {"text": f"connected by {self.login}, {self.value}"})


def experiment(login: SecretStr, steps: int = 2) -> Experiment:
    tell = Tell()
    tell.login, tell.value = login, login.get_secret_value()
    plugins = [EnvironmentLogger(), JSONLLogger(), tell]
    engine = fg.Engine(steps=steps, plugins=plugins, autoload=False)
    print(login.get_secret_value())
    return Experiment(engine, Model(jnp.ones(())), [np.ones(2, np.float32)] * 2)


run(experiment)
"""
