"""A learning rate that has changed when a run resumes: what is taken from where is said, and what is
written down is what runs."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.comparing import compare_runs
from trained import ZEROS, Counting

RATE = "opt_state[1].hyperparams.learning_rate"
PROGRAM = fg.CheckpointRef(None, hyperparameters="program")


def train(
    run_dir: Path,
    optimizer: optax.GradientTransformation,
    steps: int,
    *plugins: Any,
    **options: Any,
) -> fg.FitResult:
    """The gradient is 1, so that each update takes the learning rate off a weight that begins
    at 0."""

    class Falling(Counting):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optimizer

    engine = fg.Engine(
        steps=steps, run_dir=run_dir, plugins=[Checkpointer(100), *plugins], autoload=False
    )
    options.setdefault("resume", "auto")
    return engine.fit(Falling, ZEROS, **options)


def inject(rate: Any, **others: Any) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, **others)


def read_manifest(run_dir: Path, attempt: int) -> dict[str, Any]:
    return json.loads((run_dir / f"attempts/{attempt}").read_text())


@pytest.mark.full
def test_a_rate_in_the_state_stays_and_the_message_names_both_values(tmp_path: Path) -> None:
    """Two updates by 0.5, two more by 0.5 although the program has 0.25 by then."""
    train(tmp_path, inject(0.5), 2)
    stays = (
        f"{RATE} stays 0.5, as in the checkpoint; in the program it was 0.5 and is 0.25; to take what "
        "the program has, resume with CheckpointRef(..., hyperparameters='program'), on the command "
        "line --hyperparameters program"
    )
    with pytest.warns(UserWarning, match=re.escape(stays)):
        result = train(tmp_path, inject(0.25), 4)
    assert float(result.module.weight) == -2.0
    message = (
        "hyperparameters from the checkpoint: learning_rate=0.5 (the program has 0.25); all others "
        "are those of the program"
    )
    assert message in result.messages
    entry = {"value": 0.5, "program": 0.25}
    assert read_manifest(tmp_path, 2)["hyperparameters"]["state"] == {RATE: entry}
    # The program has not changed since, and the message still tells.
    result = train(tmp_path, inject(0.25), 5)
    assert float(result.module.weight) == -2.5 and message in result.messages


@pytest.mark.full
def test_a_rate_of_the_program_is_taken_where_resume_says_so(tmp_path: Path) -> None:
    """Two updates by 0.5 and two by 0.25; from then on it is the checkpoint's."""
    train(tmp_path, inject(0.5), 2)
    with pytest.warns(UserWarning, match=r"learning_rate was 0\.5 and is 0\.25$"):
        result = train(tmp_path, inject(0.25), 4, resume=PROGRAM)
    assert float(result.module.weight) == -1.5
    assert any(
        "hyperparameters from the program, as resume says: learning_rate=0.25;" in message
        for message in result.messages
    )
    entry = {"value": 0.25, "program": 0.25}
    assert read_manifest(tmp_path, 2)["hyperparameters"]["state"] == {RATE: entry}
    assert float(train(tmp_path, inject(0.25), 6).module.weight) == -2.0


@pytest.mark.full
def test_momentum_goes_on_where_the_rate_is_taken_anew(tmp_path: Path) -> None:
    """By hand: m = 0.5 m + 1 gives 1, 1.5, 1.75; the weight -1 - 1.5 - 0.1 * 1.75."""
    train(tmp_path, inject(1.0, momentum=0.5), 2)
    with pytest.warns(UserWarning, match=r"learning_rate was 1\.0 and is 0\.1"):
        result = train(tmp_path, inject(0.1, momentum=0.5), 3, resume=PROGRAM)
    np.testing.assert_allclose(float(result.module.weight), -2.675, rtol=1e-6)


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (optax.sgd(0.5), optax.sgd(0.25), r"scale\.step_size was -0\.5 and is -0\.25"),
        (optax.sgd(0.5, 0.0), optax.sgd(0.5, 0.9), r"trace\.decay was 0\.0 and is 0\.9"),
        (
            optax.sgd(optax.linear_schedule(1.0, 0.0, 10)),
            optax.sgd(optax.linear_schedule(1.0, 0.0, 20)),
            r"polynomial_schedule\.transition_steps was 10 and is 20",
        ),
        (
            inject(lambda step: 0.5),
            inject(lambda step, rate=0.25: rate),
            r"rate was None and is 0\.25",
        ),
    ],
)
def test_what_the_functions_of_an_optimizer_hold_is_the_programs_and_said(
    before: Any, now: Any, change: str, tmp_path: Path
) -> None:
    train(tmp_path, before, 2)
    with pytest.warns(UserWarning, match=change):
        train(tmp_path, now, 4)
    program = read_manifest(tmp_path, 2)["hyperparameters"]["program"]
    assert program != read_manifest(tmp_path, 1)["hyperparameters"]["program"]


@pytest.mark.full
def test_an_unchanged_program_resumes_without_a_warning(tmp_path: Path) -> None:
    """Also where an action has changed the rate in the state: then the message tells."""

    def halve(run: fg.Run) -> fg.ReplaceState:
        opt_state = optax.tree.set(run.state.opt_state, learning_rate=0.25)
        return fg.ReplaceState(run.state.replace(opt_state=opt_state))

    halving = fg.LambdaPlugin(every={fg.At(2): halve})
    train(tmp_path, inject(0.5), 3, halving)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(tmp_path, inject(0.5), 4, halving)
        plain = train(tmp_path / "plain", optax.adam(1e-3), 2)
        assert not any("hyperparameters" in text for text in plain.messages)
        train(tmp_path / "plain", optax.adam(1e-3), 3)
    assert float(result.module.weight) == -1.5
    assert any("learning_rate=0.25 (the program has 0.5);" in text for text in result.messages)


@pytest.mark.full
def test_a_start_without_a_step_does_not_hide_the_change(tmp_path: Path) -> None:
    train(tmp_path, inject(0.5), 2)
    for steps in (2, 3):
        with pytest.warns(UserWarning, match=r"stays 0\.5"):
            train(tmp_path, inject(0.25), steps)


@pytest.mark.full
def test_runs_are_compared_by_the_hyperparameters_that_ran(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, inject(0.5), 2)
    with pytest.warns(UserWarning, match=r"stays 0\.5"):
        train(tmp_path / "b", inject(0.25), 3)
    names = [name for name, *_ in compare_runs(tmp_path / "a", tmp_path / "b")]
    assert not any(name.startswith("hyperparameters") for name in names)
    with pytest.warns(UserWarning, match=r"learning_rate was 0\.5 and is 0\.25"):
        train(tmp_path / "a", inject(0.25), 3, resume=PROGRAM)
    rows = compare_runs(tmp_path / "a", tmp_path / "b")
    assert (f"hyperparameters.{RATE}", "0.25", "0.5") in rows


def test_a_choice_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="CheckpointRef: hyperparameters"):
        fg.CheckpointRef(None, hyperparameters="config")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rates_are_written_as_they_run(dtype: Any, tmp_path: Path) -> None:
    """0.1 in bfloat16 is 0.10009765625: 205 of 2048."""
    optimizer = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=dtype)(learning_rate=0.1)
    train(tmp_path, optimizer, 1)
    value = read_manifest(tmp_path, 1)["hyperparameters"]["state"][RATE]["value"]
    assert value == (0.1 if dtype == jnp.float32 else 205 / 2048)
