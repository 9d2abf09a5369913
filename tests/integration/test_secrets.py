"""Secrets that a run meets stand in nothing that it writes."""

import subprocess
from collections.abc import Iterator
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
from fulgurite.plugins import register_secret
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import CSVLogger, EnvironmentLogger, JSONLLogger, MediaLogger, media
from fulgurite_mlflow import MLflowLogger
from fulgurite_tensorboard import TensorBoardLogger
from fulgurite_wandb import WandbLogger

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
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
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


class Client:
    """Tells of itself without quotes."""

    def __repr__(self) -> str:
        return f"<Client https://bob:canary1@db of {REGISTERED}, api_key=canary2 seen>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Client)

    def __hash__(self) -> int:
        return 0


class Served(fg.Module):
    weight: jnp.ndarray
    client: Client = eqx.field(static=True, default_factory=Client)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = (self.weight * batch).mean()
        return fg.Output(loss, metrics={f"metric of {REGISTERED}": loss})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Connection:
    """A source whose state says where it reads."""

    resume = "exact"

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from [np.ones(2, np.float32)] * 8

    def get_state(self) -> dict[str, str]:
        return {"at": REGISTERED}

    def set_state(self, state: dict[str, str]) -> None:
        assert state == {"at": REGISTERED}


@dataclass
class Naming:
    """Has secrets in whatever has a name."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction(f"act of {REGISTERED}", 2, self.act, stage="log")]

    def act(self, run: fg.Run) -> None:
        picture = media.Image(jnp.zeros((2, 2, 3), jnp.uint8))
        for source in ("plain", f"source of {REGISTERED}"):
            run.log_scalars(source, {f"number of {REGISTERED}": 1.0, f"a {REGISTERED}": 2.0})
            run.log_media(source, {f"picture of {REGISTERED}": picture})
            run.log_media(source, {"text": media.Text(f"text of {REGISTERED}")})
            run.log_text(source, {f"text of {REGISTERED}": {REGISTERED: [REGISTERED]}})
            run.log_config(source, {f"config of {REGISTERED}": {REGISTERED: {REGISTERED: 1}}})
        run.shared["naming"] = {REGISTERED: REGISTERED}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_registered_secrets_stand_in_no_name_and_in_states_for_their_owner_alone(
    tmp_path: Path,
) -> None:
    register_secret(REGISTERED)
    settings = {"name": REGISTERED, "notes": f"of {REGISTERED}", "tags": [REGISTERED]}
    loggers = [
        *(JSONLLogger(), CSVLogger(), TensorBoardLogger(), MediaLogger()),
        WandbLogger("p", mode="offline", settings={**settings, "group": REGISTERED}),
        MLflowLogger("p", tmp_path / "mlruns", f"run of {REGISTERED}", {REGISTERED: REGISTERED}),
    ]
    for steps in (2, 4):  # the second fit resumes
        engine = fg.Engine(
            steps=steps,
            log_every=2,
            run_dir=tmp_path / "run",
            plugins=[Checkpointer(2), *loggers, Naming()],
            autoload=False,
        )
        engine.config = {"inner": {REGISTERED: 1}, REGISTERED: "x"}
        result = engine.fit(Served(jnp.ones(())), Connection(), resume="auto")
        assert not result.failures and "canary" not in str(result.messages)
    # A name is found as the program wrote it.
    assert len(result.history[f"train/metric of {REGISTERED}"]) == 2
    assert len(result.history[f"plain/number of {REGISTERED}"]) == 2
    assert [path for path in tmp_path.rglob("*") if "canary" in path.name] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    owned = [path for path in files if b"canary" in path.read_bytes()]
    folders = {step: tmp_path / "run" / "checkpoints" / f"step-{step}" for step in (2, 4)}
    assert {
        path.relative_to(folders[4]).parts[0] for path in owned if folders[4] in path.parents
    } == {*("arrays", "host-0.json", "index.json")}
    for path in owned:
        [folder] = [folder for folder in folders.values() if folder in path.parents]
        assert folder / "arrays" in path.parents or path.stat().st_mode & 0o077 == 0
        assert (folder / "arrays").stat().st_mode & 0o077 == 0
    manifest = (tmp_path / "run" / "attempts" / "1").read_text()
    assert "<Client https://***@db of ***, api_key=*** seen>" in manifest
