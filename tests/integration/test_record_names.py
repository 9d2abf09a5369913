"""Names that some logger or a checkpoint cannot write cost a run their own values and nothing
else."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import CSVLogger, JSONLLogger, iter_records, media
from fulgurite_mlflow import MLflowLogger
from fulgurite_tensorboard import TensorBoardLogger
from fulgurite_wandb import WandbLogger, read_run

NAMES = ("$x", "..", "a/../b", "a\0b", "a\ud800b", "x" * 3000, "ä" * 1500, "a\x1b[31mb", "a\nb")

TRAINED = ("loss", "loss_average", "batch_loss", "of_a_module")


class Named(fg.Module):
    weight: jnp.ndarray

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = (self.weight * batch).mean()
        return fg.Output(loss, metrics={"$of_a_module": loss, "of_a_module": loss})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@dataclass
class Naming:
    """Logs each kind of record under such names, and in such sources."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("log", 2, self.log, stage="log")]

    def log(self, run: fg.Run) -> None:
        picture = media.Image(jnp.zeros((2, 2, 3), jnp.uint8))
        for log, value in (
            (run.log_scalars, 1.0),
            (run.log_media, picture),
            (run.log_text, "text"),
            (run.log_config, {"plain": 1, "inner": [dict.fromkeys(NAMES, 1) | {"plain": 2}]}),
        ):
            # At Weights & Biases a picture of the name of a number would take its place.
            plain = "plain" if log == run.log_scalars else "other"
            log("good", {name: value for name in (*NAMES, plain)})
            for name in NAMES:
                log(name, {"lost": value})
        run.report_evaluation("own", {"$lost": 1.0, "plain": 2.0})
        run.report_evaluation("$own", {"lost": 1.0})
        run.shared["$own"] = {"plain": 1}
        run.shared["good"] = {"$lost": 1, "plain": 1}


def fit(folder: Path, steps: int) -> fg.FitResult:
    loggers = [
        *(JSONLLogger(), CSVLogger(), TensorBoardLogger(), WandbLogger("p", mode="offline")),
        MLflowLogger("p", folder / "mlruns"),
    ]
    engine = fg.Engine(
        steps=steps,
        log_every=2,
        run_dir=folder / "run",
        plugins=[*loggers, Naming(), Checkpointer(2)],
        autoload=False,
    )
    return engine.fit(Named(jnp.ones(())), [np.ones(2, np.float32)] * 8, resume="auto")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* is left out of the records:UserWarning")
def test_a_name_that_cannot_be_written_costs_its_own_value_alone(tmp_path: Path) -> None:
    for steps in (4, 8):  # the second fit resumes
        result = fit(tmp_path, steps)
        assert int(result.state.step) == steps and not result.failures
        messages = [message for message in result.messages if "left out of the records" in message]
        # Of values in `good`, of sources, and the three that begin with `$` elsewhere.
        assert len(messages) == len({*messages}) == 2 * len(NAMES) + 3
        assert (
            "'$x' of 'good' is left out of the records: a name cannot be written if it begins with "
            "'$', as the keys by which JSON holds arrays"
        ) in messages
    expected = {
        *((step, "train", name) for step in (2, 4, 6, 8) for name in TRAINED),
        *((step, source, "plain") for step in (2, 4, 6, 8) for source in ("good", "own")),
    }
    written = [
        (record.step, record.source, name)
        for record in iter_records(tmp_path / "run")
        if record.kind == "scalars"
        for name in record.values
    ]
    assert len(written) == len({*written}) and {*written} == expected
    rows = [
        (record.history.step.num, item.key or "/".join(item.nested_key))
        for file in sorted((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
        for record in read_run(file)
        if record.HasField("history")
        for item in record.history.item
    ]
    assert {(step, f"{source}/{name}") for step, source, name in expected} <= {*rows}
