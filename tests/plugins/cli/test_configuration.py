"""Programs that return a configuration."""

import json
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import Experiment, build_experiment, rebuild_experiment, run
from fulgurite_cli.config_command import run_config
from fulgurite_config import L, to_json
from fulgurite_runs import RunDirectory, RunPlugin


class Net(fg.Module):
    weight: jax.Array
    rate: float

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.weight = jnp.ones(())
        self.rate = rate

    def training_step(self, batch: Any, ctx: Any) -> fg.Output:
        return fg.Output((self.weight * batch).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate)


class Report(RunPlugin):
    """A plugin that needs a run directory."""

    def __init__(self, every: int) -> None:
        self.every = every


def make_data() -> list[np.ndarray]:
    return [np.ones(4, np.float32)] * 10


def experiment() -> Any:
    cfg = L(steps=4, rate=0.5)
    cfg.engine = L(fg.Engine, steps=cfg.ref.steps, plugins=[L(Report, every=2)])
    cfg.model = L.partial(Net, rate=cfg.ref.rate)
    cfg.data = L(make_data)
    return cfg


def test_a_configuration_is_overridden_trained_and_built_again_from_the_manifest(
    tmp_path: Any,
) -> None:
    folder = str(tmp_path / "run")
    result = run(experiment, ["rate=0.25", "engine.plugins.*.every=1", "--run", folder])
    assert float(result.module.weight) == 0.0
    saved = RunDirectory(folder).read_manifest()["configuration"]
    built = build_experiment(experiment, [], saved)
    assert built.engine.steps == 4
    assert built.model.keywords == {"rate": 0.25}
    assert built.engine.config == saved
    with pytest.raises(ConfigurationError, match=r"rate=1 differs from what the run was started"):
        build_experiment(experiment, ["rate=1"], saved)


def test_a_manifest_names_nothing_outside_the_packages_of_the_program() -> None:
    saved = {"config": json.dumps({"$section": None, "engine": {"$call": "antigravity:geohash"}})}
    with pytest.raises(ConfigurationError, match="antigravity:geohash is not allowed"):
        build_experiment(experiment, [], saved)
    assert "antigravity" not in sys.modules


def test_a_secret_stays_out_of_the_manifest() -> None:
    def configure() -> Any:
        cfg = experiment()
        cfg.api_key = "abc123"
        return cfg

    built = build_experiment(configure)
    assert built.engine.config is not None
    assert "abc123" not in built.engine.config["config"]
    with pytest.raises(ConfigurationError, match="hides a secret"):
        build_experiment(configure, [], built.engine.config)


def test_a_mistyped_override_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(experiment, ["engine.stpes=3"])
    assert caught.value.code == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err


def test_a_configuration_may_be_that_of_an_experiment() -> None:
    def configure() -> Any:
        return L(Experiment, engine=L(fg.Engine, steps=1), model=3)

    assert build_experiment(configure, ["model=4"]).model == 4
    with pytest.raises(ConfigurationError, match="no `engine`"):
        build_experiment(lambda: L(model=1))


def print_values(
    program: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """What `--print` says of each value, by the text before ` = ` or `=`."""
    with pytest.raises(SystemExit) as caught:
        run(program, [*arguments, "--print"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition("=")[0].strip(): line.partition("=")[2].strip() for line in lines}


def test_print_shows_values_and_where_they_come_from(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    values = print_values(experiment, ["rate=0.25"], capsys)
    assert " ".join(values["rate"].split()) == "0.25 # override rate=0.25"
    assert values["engine.steps"].startswith("4")
    assert f"cfg.ref.steps, {__file__}:" in values["engine.steps"]
    assert values["model"].split()[0].endswith("test_configuration:Net")

    def configure(width: int = 1, api_key: str = "abc123", name: str = "a") -> Any:
        raise AssertionError("this is not called to print values")

    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"width": 3, "name": "b"}))
    values = print_values(configure, ["name=c", "--config", str(file)], capsys)
    assert " ".join(values["width"].split()) == f"3 # --config {file}"
    assert " ".join(values["name"].split()) == "c # command line"
    assert " ".join(values["api_key"].split()) == "*** # default"


def test_a_run_starts_from_a_file_or_from_another_run(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(experiment, ["rate=0.25", "steps=1", "--run", str(folder)])
    result = run(experiment, ["steps=2", "--from", str(folder)])
    assert float(result.module.weight) == 0.5
    for file in (folder / "attempts" / "1", tmp_path / "config.json"):
        if not file.exists():
            cfg = experiment()
            cfg.rate = 0.25
            file.write_text(to_json(cfg))
        values = print_values(experiment, ["steps=2", "--config", str(file)], capsys)
        assert values["rate"].split() == ["0.25", "#", "--config", str(file)]
        assert values["engine.steps"].split()[0] == "2"


def test_a_configuration_that_cannot_be_read_is_an_error(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def configure(width: int = 1) -> Any:
        raise AssertionError("this is not called")

    file = tmp_path / "config.json"
    texts = {
        "[1]": "it holds list, not a JSON object",
        "{": "cannot be read as a configuration",
        '{"wdith": 1}': "Did you mean 'width'?",
        '{"configuration": null, "plugins": []}': "it was not started by fulgurite_cli",
    }
    for text, message in texts.items():
        file.write_text(text)
        with pytest.raises(SystemExit) as caught:
            run(configure, ["--config", str(file)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_help_lists_the_paths_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(experiment, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "  rate=0.5\n" in out
    assert "  engine.plugins[0].every=2\n" in out
    assert "  engine.steps=cfg.ref.steps\n" in out


def test_a_run_is_built_again_from_its_manifest_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "run")
    run(experiment, ["rate=0.25", "steps=1", "--run", folder])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rebuilt = rebuild_experiment(folder, None, [], ["fulgurite", "tests"])
    assert rebuilt.engine.steps == 1
    assert rebuilt.model.keywords == {"rate": 0.25}
    with pytest.raises(ConfigurationError, match="add 'tests' to allow"):
        rebuild_experiment(folder, None, [], ["fulgurite"])
    with pytest.raises(ConfigurationError, match=r"'test_configuration.py' is not in this dir"):
        rebuild_experiment(folder, None)


def test_config_diff_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{name}.json") for name in "abcd"]
    cfg = experiment()
    Path(files[0]).write_text(to_json(cfg))
    cfg.engine.plugins[0].every = 5
    cfg.engine.seed = 1
    Path(files[1]).write_text(to_json(cfg))
    assert run_config(["diff", files[0], files[0]]) == 0
    assert run_config(["diff", *files[:2]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["engine.plugins[0].every: 2 -> 5", "engine.seed: (nothing) -> 1"]

    Path(files[2]).write_text('{"width": 1, "name": "x"}')
    Path(files[3]).write_text('{"width": 2, "name": "x"}')
    assert run_config(["diff", *files[2:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"width": ["1", "2"]}
    with pytest.raises(SystemExit) as caught:
        run_config(["diff", files[0], files[2]])
    assert caught.value.code == 2
    assert "of different kinds" in capsys.readouterr().err
