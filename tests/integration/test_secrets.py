"""Secrets that a run meets stand in nothing that it writes."""

import subprocess
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.redact import register_secret
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import CSVLogger, EnvironmentLogger, JSONLLogger
from fulgurite_tensorboard import TensorBoardLogger

pytestmark = pytest.mark.full

REGISTERED = "canary-registered"


class Connected(fg.Module):
    weight: jnp.ndarray
    address: str = eqx.field(static=True, default="https://u:canary1@host/?token=canary2")
    api_key: str = eqx.field(static=True, default="canary3")

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((self.weight * batch).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@dataclass
class Talking:
    command: str = "tool --passwd=canary4;canary5"
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": "Bearer canary6"})

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("talk", 1, self.talk, stage="log"),
            fg.ScheduledAction("stop", fg.At(4), self.stop, stage="decide"),
        ]

    def talk(self, run: fg.Run) -> None:
        run.notify("talking", f"Bearer canary7 of {REGISTERED}")
        run.log_text("talking", {"sample": f"token: none, {REGISTERED}", "all": [REGISTERED]})
        run.log_config("talking", {"api_key": "canary8", "u": "--passwd canary9", "at": REGISTERED})

    def stop(self, run: fg.Run) -> fg.StopTraining:
        return fg.StopTraining(f"the server says token=canary10 of {REGISTERED} is none")


class Unreachable:
    """A logger whose answers fail."""

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        command = ["false", "--passwd", "canary11", "--api-key", "canary12", REGISTERED]
        subprocess.run(command, check=True)

    @fg.hookimpl
    def flush_logger(self, step: int) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(OSError(f"POST: Authorization: Bearer canary13, {REGISTERED}"))
        return future


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_secrets_stand_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_secret(REGISTERED)
    arguments = ["train.py", "--passwd=canary14;canary15", "-p", "canary16", REGISTERED]
    monkeypatch.setattr("sys.argv", arguments)
    loggers = [JSONLLogger(), CSVLogger(), TensorBoardLogger(), EnvironmentLogger(), Unreachable()]
    engine = fg.Engine(
        steps=8,
        log_every=2,
        run_dir=tmp_path,
        plugins=[Checkpointer(2), *loggers, Talking()],
        autoload=False,
    )
    result = engine.fit(Connected(jnp.ones(())), [np.ones(2, np.float32)] * 2)
    assert int(result.state.step) == 4
    assert "canary" not in f"{result.stop_reason} {result.messages} {result.failures}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []
    # What a user logs as a text is not guessed at.
    assert "token: none, ***" in (tmp_path / "records.jsonl").read_text()
