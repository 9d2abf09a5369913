"""Programs that return a configuration."""

import json
import sys
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import Experiment, build_experiment, run
from fulgurite_config import L
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
