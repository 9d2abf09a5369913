"""Every plugin of this workspace passes the conformance check of fulgurite-testing."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import fulgurite as fg
import optax
import pytest
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator, PredictionWriter
from fulgurite_keys import L2, Histogram, Losses, Metrics, Summaries, keyed
from fulgurite_logging import (
    BatchPictures,
    CompilationMonitor,
    ConsoleLogger,
    CSVLogger,
    EnvironmentLogger,
    JSONLLogger,
    LearningRateMonitor,
    MediaLogger,
    NormMonitor,
    NullLogger,
    PythonLogger,
)
from fulgurite_metrics import Norm
from fulgurite_monitor import Alert, DeviceStatistics, Goodput, Throughput
from fulgurite_optimizers import (
    BackboneFinetuning,
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    NonNegative,
    Phase,
    ReduceOnPlateau,
)
from fulgurite_precision import Precision
from fulgurite_pretrained import Pretrained
from fulgurite_profiler import Profile, ProgramDump
from fulgurite_progress import ProgressBar
from fulgurite_replay import (
    Capture,
    Checked,
    PinPrograms,
    ReplayHint,
    SelfCheck,
    StateDigest,
    read_digests,
    read_programs,
)
from fulgurite_rng import Rng
from fulgurite_sharding import FSDP, DataParallel, Sharding, TensorParallel
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from fulgurite_tensorboard import TensorBoardLogger
from fulgurite_testing import TinyModel, check_plugin, tiny_data
from fulgurite_wandb import WandbLogger
from jax.sharding import PartitionSpec

pytestmark = pytest.mark.full


def evaluator() -> Evaluator:
    return Evaluator("test", tiny_data(), every=4)


class Apart(TinyModel):
    """Weight and bias by an optimizer each."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = super().training_step(batch, ctx)
        return output.replace(loss=None, losses={"weight": output.loss, "bias": output.loss})

    def configure_optimizers(self) -> Any:
        chosen = {"weight": "linear.weight", "bias": "linear.bias"}
        return {
            name: Phase(optax.adam(1e-2), params=fg.select(path)) for name, path in chosen.items()
        }


PLUGINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradient_accumulation": (lambda: GradientAccumulation(2), {"bad_arguments": [{"n": 0}]}),
    "average": (
        lambda: Average(EMA(0.5)),
        {"bad_arguments": [{"rule": EMA(0.5), "statistics": "none"}]},
    ),
    "lookahead": (lambda: Lookahead(2), {"bad_arguments": [{"period": 0}]}),
    "precision_of_parameters": (lambda: Precision("bf16-true"), {}),
    "precision": (
        Precision,
        {"bad_arguments": [{"compute": "int32"}, {"exclude": "bias", "preset": "fp64"}]},
    ),
    "backbone_finetuning": (
        lambda: BackboneFinetuning("linear.bias", 3, warmup=2),
        {"bad_arguments": [{"where": "linear.bias", "until": 3, "rate": -1.0}]},
    ),
    "batch_pictures": (
        BatchPictures,
        {"other_plugins": lambda: [MediaLogger(2)], "bad_arguments": [{"num_examples": 0}]},
    ),
    "checkpoints": (
        lambda: Checkpointer(every=3),
        {"bad_arguments": [{"every": 3, "max_to_keep": 0}, {"every": 3, "weights_only": "head"}]},
    ),
    "gradient_clip": (lambda: GradientClip(max_norm=1.0), {"bad_arguments": [{"max_norm": -1.0}]}),
    "compilations": (CompilationMonitor, {}),
    "console": (ConsoleLogger, {}),
    "csv": (CSVLogger, {}),
    "data_parallel": (DataParallel, {}),
    "environment": (EnvironmentLogger, {}),
    "evaluator": (evaluator, {"bad_arguments": [{"name": "train", "data": []}]}),
    "freeze": (lambda: Freeze("linear.bias"), {}),
    "fsdp": (FSDP, {}),
    "jsonl": (JSONLLogger, {}),
    "learning_rate": (LearningRateMonitor, {}),
    "media": (lambda: MediaLogger(2), {}),
    "non_negative": (lambda: NonNegative("linear.bias"), {}),
    "norms": (NormMonitor, {"bad_arguments": [{"quantities": ("weights",)}]}),
    "null": (NullLogger, {}),
    "python": (PythonLogger, {}),
    "multi_optimizer": (MultiOptimizer, {"model": Apart}),
    "predictions": (
        lambda: PredictionWriter("test", tiny_data()),
        {"bad_arguments": [{"name": "a/b", "data": []}]},
    ),
    "progress": (ProgressBar, {"bad_arguments": [{"refresh": 0}]}),
    "reduce_on_plateau": (
        lambda: ReduceOnPlateau("test/loss", 4),
        {
            "other_plugins": lambda: [evaluator()],
            "bad_arguments": [{"monitor": "loss", "every": 4}],
        },
    ),
    "losses": (lambda: Losses(small=L2("interms.linear", weight=0.1)), {}),
    "metrics": (
        lambda: Metrics(
            hidden=keyed(Norm.from_vectors, "interms.linear"), grad=keyed(Norm.from_tree, "grads")
        ),
        {},
    ),
    "summaries": (lambda: Summaries(every=2, hidden=Histogram("interms.linear")), {}),
    "throughput": (Throughput, {}),
    "devices": (DeviceStatistics, {}),
    "goodput": (Goodput, {}),
    "alert": (lambda: Alert("train/loss > 0.1", do=[str]), {}),
    "profile": (lambda: Profile(at=2, steps=1), {}),
    "programs": (ProgramDump, {}),
    "pretrained": (Pretrained, {}),
    "capture": (lambda: Capture(every=3), {"bad_arguments": [{"max_to_keep": 0}]}),
    # The file grows with each attempt.
    "pin_programs": (PinPrograms, {"content": lambda path: read_programs(path.parent)}),
    "replay_hint": (ReplayHint, {}),
    # checkify numbers the checks of a process; where one fails, the step calls the host.
    "checked": (Checked, {"skip": ["same_trace", "no_effects"]}),
    "self_check": (lambda: SelfCheck(every=3), {}),
    "state_digest": (
        lambda: StateDigest(every=3),
        # The file grows with each attempt, and the newest digest of a step counts.
        {"content": lambda path: read_digests(path.parent)},
    ),
    "rng": (Rng, {}),
    "early_stopping": (
        lambda: EarlyStopping("test/loss", patience=2, restore_best=True),
        {"other_plugins": lambda: [evaluator()], "bad_arguments": [{"monitor": "loss"}]},
    ),
    "spike_detection": (
        lambda: SpikeDetection(factor=1.05, window=2),
        {"bad_arguments": [{"factor": 1.0}]},
    ),
    "time_limit": (lambda: TimeLimit("1h"), {"bad_arguments": [{"limit": "6:00:00"}]}),
    "sharding": (Sharding, {"bad_arguments": [{"batch": "data"}]}),
    "tensor_parallel": (lambda: TensorParallel([("linear.weight", PartitionSpec("model"))], 1), {}),
    "tensorboard": (TensorBoardLogger, {}),
    "wandb": (
        lambda: WandbLogger("p", mode="offline"),
        {"bad_arguments": [{"project": "p", "mode": "on"}]},
    ),
}
ROOT = Path(__file__).parents[2]
CONTRIB = [path.parent.name for path in ROOT.glob("contrib/*/pyproject.toml")]
HERE = {
    entry.name
    for entry in entry_points(group="fulgurite.plugins")
    # The tests of a member of contrib check it, and nothing else lists it.
    if entry.dist is None or entry.dist.name.removeprefix("fulgurite-") not in CONTRIB
}


# A logger and a plugin with state stand for the others, each of which has tests of its own.
QUICK = {"jsonl", "rng"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PLUGINS],
)
def test_each_plugin_passes_the_conformance_check(name: str) -> None:
    plugin, options = PLUGINS[name]
    check_plugin(plugin, **options)


def test_every_plugin_that_is_installed_by_name_is_checked() -> None:
    # These are for the runs of a sweep, whose tests compare them with runs alone.
    of_sweeps = {"sweep_members", "sweep_population", "sweep_trial"}
    assert HERE - PLUGINS.keys() == of_sweeps


@pytest.mark.parametrize("name", CONTRIB)
def test_tests_of_a_member_of_contrib_check_it(name: str) -> None:
    tests = (ROOT / "tests" / "plugins" / name.replace("-", "_")).glob("test_*.py")
    assert any("check_plugin(" in path.read_text() for path in tests)


@pytest.mark.parametrize(
    ("check", "names"),
    [
        pytest.param("resume", ["accumulate", "average", "precision"], marks=pytest.mark.slow),
        pytest.param("all", [], marks=pytest.mark.slow),
    ],
)
def test_everyday_plugins_pass_it_sharded_over_eight_devices(check: str, names: list[str]) -> None:
    program = Path(__file__).with_name("kit_on_eight.py")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run(
        [sys.executable, program, check, *names], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["devices"] == 8
    assert report["shard"] in ([1, 8], [8, 1])
    assert set(report["failures"].values()) == {None}, report["failures"]
