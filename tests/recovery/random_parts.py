"""What takes part in a random program: every plugin of this workspace that a fit can have, with
triggers drawn at random."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import fulgurite as fg
import optax
from crash_program import Average, Net, Trend
from fulgurite_averaging import EMA, Average as AveragedWeights, Lookahead, Mean
from fulgurite_evaluators import Evaluator
from fulgurite_keys import L1, Histogram, Losses, Metrics, Summaries, keyed
from fulgurite_logging import (
    CompilationMonitor,
    ConsoleLogger,
    CSVLogger,
    EnvironmentLogger,
    LearningRateMonitor,
    MediaLogger,
    NormMonitor,
    PythonLogger,
)
from fulgurite_lora import Lora
from fulgurite_metrics import Norm
from fulgurite_mlflow import MLflowLogger
from fulgurite_optimizers import (
    BackboneFinetuning,
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    ReduceOnPlateau,
    UnitNorm,
    WeightClip,
)
from fulgurite_population import Evolution, Population
from fulgurite_precision import Precision
from fulgurite_progress import ProgressBar
from fulgurite_sam import Sam
from fulgurite_sharding import DataParallel
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from fulgurite_tensorboard import TensorBoardLogger
from hypothesis import strategies as st


@dataclass(eq=False)
class Tally:
    """Counts its evaluations on the host before it runs them, and says so after."""

    every: fg.Trigger
    data: Any
    num_begun: int = 0
    plugin_name: str = field(default="tally", init=False)

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation(self.plugin_name, self.data)]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("count", self.every, self.count, "evaluate")]

    def count(self, run: fg.Run) -> None:
        self.num_begun += 1
        run.evaluate(self.plugin_name)
        run.log_scalars("tallies", {self.plugin_name: self.num_begun})

    @fg.hookimpl
    def get_host_state(self) -> int:
        return self.num_begun

    @fg.hookimpl
    def set_host_state(self, state: int, version: int) -> None:
        self.num_begun = state


@dataclass(eq=False)
class EpochTally(Tally):
    """Does the same as the engine ends an epoch."""

    plugin_name: str = field(default="epoch_tally", init=False)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return []

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run) -> None:
        self.count(run)


@dataclass(eq=False)
class InnerFit:
    """Trains another model in the middle of a fit, and logs its loss."""

    every: fg.Trigger
    data: Any
    plugin_name: str = field(default="inner_fit", init=False)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("train", self.every, self.train, "evaluate")]

    def train(self, run: fg.Run) -> None:
        engine = fg.Engine(steps=3, log_every=1, autoload=False, stop_timeout=0.5, plugins=["rng"])
        result = engine.fit(eqx.nn.make_with_state(Net), self.data)
        run.log_scalars("inner", {"loss": result.metrics["train"]["loss"]})


class PhasedNet(Net):
    """The same network with an optimizer for each layer, which take turns."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = super().training_step(batch, ctx)
        return output.replace(loss=None, losses={"inner": output.loss, "outer": output.loss})

    def configure_optimizers(self) -> Any:
        return {
            "inner": Phase(optax.adam(1e-2), "first", every=2),
            "outer": Phase(optax.sgd(1e-2, momentum=0.9), fg.exclude("first")),
        }


Part = Callable[[fg.Trigger, Any], list[Any]]
"""Makes plugins of a trigger and of the data of an evaluation."""

PARTS: dict[str, Part] = {
    "accumulation": lambda trigger, data: [GradientAccumulation(2)],
    "accumulation over steps": lambda trigger, data: [GradientAccumulation({0: 2, 9: 3}, "steps")],
    "average": lambda trigger, data: [Average()],
    "averaged": lambda trigger, data: [
        AveragedWeights(EMA(0.9)),
        Evaluator("of_average", data, every=trigger, module_view="averaged"),
    ],
    "backbone": lambda trigger, data: [BackboneFinetuning("last", 7, warmup=3)],
    "clip": lambda trigger, data: [GradientClip(max_norm=1.0)],
    "compilations": lambda trigger, data: [CompilationMonitor()],
    "console": lambda trigger, data: [ConsoleLogger()],
    "csv": lambda trigger, data: [CSVLogger()],
    "environment": lambda trigger, data: [EnvironmentLogger()],
    "freeze": lambda trigger, data: [Freeze("first.bias", since=3, until=11)],
    "inner fit": lambda trigger, data: [InnerFit(trigger, data)],
    "keyed loss": lambda trigger, data: [Losses(sparse=L1("interms.first", weight=1e-2))],
    "keyed metrics": lambda trigger, data: [
        Metrics(
            hidden=keyed(Norm.from_vectors, "interms.first"), grad=keyed(Norm.from_tree, "grads")
        )
    ],
    "learning rate": lambda trigger, data: [LearningRateMonitor()],
    "lookahead": lambda trigger, data: [Lookahead(3)],
    "lora": lambda trigger, data: [Lora("first", 2, train_too="last")],
    "mean": lambda trigger, data: [AveragedWeights(Mean(after=0.4, every=2), name="mean")],
    "mlflow": lambda trigger, data: [MLflowLogger("random")],
    "norms": lambda trigger, data: [NormMonitor()],
    "parallel": lambda trigger, data: [DataParallel()],
    "plateau": lambda trigger, data: [
        Evaluator("for_plateau", data, every=trigger),
        ReduceOnPlateau("for_plateau/loss", trigger, factor=0.5, patience=1),
    ],
    "bfloat16": lambda trigger, data: [Precision("bf16")],
    "float16": lambda trigger, data: [Precision("fp16")],
    "progress": lambda trigger, data: [ProgressBar()],
    "python": lambda trigger, data: [PythonLogger()],
    "sam": lambda trigger, data: [Sam()],
    "shown": lambda trigger, data: [
        Summaries(every=trigger, hidden=Histogram("interms.first")),
        MediaLogger(trigger),
        TensorBoardLogger(),
    ],
    "spikes": lambda trigger, data: [SpikeDetection(factor=1.05, window=2)],
    "stopping": lambda trigger, data: [
        Evaluator("for_stopping", data, every=trigger),
        EarlyStopping("for_stopping/loss", patience=2, restore_best=True),
    ],
    "stopping on average": lambda trigger, data: [
        AveragedWeights(EMA(0.8), name="stopped"),
        Evaluator("of_stopped", data, every=trigger, module_view="stopped"),
        EarlyStopping("of_stopped/loss", patience=2, restore_best=True),
    ],
    "epoch tally": lambda trigger, data: [EpochTally(trigger, data)],
    "tally": lambda trigger, data: [Tally(trigger, data)],
    "time limit": lambda trigger, data: [TimeLimit("1h")],
    "trend": lambda trigger, data: [Trend()],
    "unit norm": lambda trigger, data: [UnitNorm("last.weight")],
    "weight clip": lambda trigger, data: [WeightClip("first.weight", 0.3)],
}
"""Parts that a program may have."""

EVALUATED = {
    *("averaged", "epoch tally", "inner fit", "plateau", "stopping", "stopping on average", "tally")
}
"""Parts with an evaluation, if their trigger or the end of an epoch comes."""

ModelKind = Literal["net", "phased", "members"]
EXCLUDED: dict[ModelKind, set[str]] = {
    "net": set(),
    # There is no total loss of several optimizers, and they accumulate each for itself.
    "phased": {"accumulation", "accumulation over steps", "backbone", "keyed loss", "spikes"},
    # What is written for the layers of one network does not know members.
    "members": {
        *("accumulation", "accumulation over steps", "average", "averaged", "backbone", "freeze"),
        *("keyed loss", "keyed metrics", "lookahead", "lora", "mean", "parallel", "plateau"),
        *("bfloat16", "float16", "sam", "shown", "spikes", "trend", "unit norm", "weight clip"),
        "stopping on average",
    },
}
"""Parts that do not go with a kind of model."""
RIVALS = (
    {"accumulation", "accumulation over steps"},
    {"bfloat16", "float16"},
    {"stopping", "stopping on average"},
)
"""Parts of which a program has one at most."""


def make_model(kind: ModelKind, data: Any) -> tuple[Any, list[Any]]:
    """Return what makes the model, and the plugins that it needs.

    Args:
        kind: of the model.
        data: of an evaluation.
    """
    if kind == "net":
        return eqx.nn.make_with_state(Net), []
    if kind == "phased":
        return eqx.nn.make_with_state(PhasedNet), [MultiOptimizer()]
    population = Population(seeds=(0, 1, 2), evolution=Evolution(5, "for_evolution/loss"))
    return population.stack(eqx.nn.make_with_state(Net)), [
        population,
        Evaluator("for_evolution", data, every=5),
    ]


@st.composite
def triggers(draw: Any) -> fg.Trigger:
    """Draw a trigger that follows from the program alone, or two of them together."""
    kinds = [
        st.builds(fg.Every, st.integers(2, 9)),
        st.builds(fg.At, st.integers(1, 24), st.integers(1, 24)),
        st.builds(fg.EvenlySpaced, st.integers(1, 6)),
        st.builds(fg.Exponential, st.integers(1, 4), st.sampled_from([1.2, 2])),
        st.builds(fg.FirstSteps, st.integers(1, 3)),
        st.builds(fg.EveryEpoch, st.integers(1, 2)),
        st.builds(fg.AtEnd),
    ]
    trigger = draw(st.one_of(kinds))
    return trigger | draw(st.one_of(kinds)) if draw(st.booleans()) else trigger


@st.composite
def parts(draw: Any, kind: ModelKind, max_size: int) -> tuple[tuple[str, fg.Trigger], ...]:
    """Draw names of parts, each with a trigger.

    Args:
        kind: of the model.
        max_size: how many at most.
    """
    names = sorted(PARTS.keys() - EXCLUDED[kind])
    drawn = draw(st.lists(st.sampled_from(names), unique=True, max_size=max_size))
    for rivals in RIVALS:
        others = [name for name in drawn if name not in rivals]
        drawn = others + [name for name in drawn if name in rivals][:1]
    return tuple((name, draw(triggers())) for name in drawn)
