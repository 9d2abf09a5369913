"""What a fit and its plugins use of the engine: a protocol, because the engine is above everything
that it is made of."""

from collections.abc import Callable
from typing import Any, Protocol

from fulgurite._src.evaluation.evaluation import Evaluation, EvaluationResult, ShouldStop
from fulgurite._src.fit.scheduler import BoundAction
from fulgurite._src.fit.snapshot import PathLike
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services
from fulgurite._src.training.settings import StepsPerExecution
from fulgurite._src.training.state import TrainState
from fulgurite._src.triggers import StepRange


class EngineView(Protocol):
    """What a fit and its plugins use of the engine; `Engine` describes the members.

    Example:
        from fulgurite.plugins import EngineView


        def count_plugins(engine: EngineView) -> int:
            return len(engine.plugins.plugins)


        count_plugins(engine)
    """

    steps: int | None
    epochs: int | None
    seed: int
    steps_per_execution: StepsPerExecution
    limit_train_batches: int | None
    on_nonfinite: NonFinitePolicy
    max_compilations: int
    fast_dev_run: int | None
    config: dict[str, Any] | None
    program_file: str | None
    run_dir: str | PathLike | None
    plugins: PluginManager
    sharding: ShardingStrategy
    actions: list[BoundAction]
    evaluations: dict[str, Evaluation]
    services: Services

    @property
    def evaluate(self) -> Callable[..., dict[str, Any]]: ...

    @property
    def predict(self) -> Callable[..., Any]: ...

    def step(
        self,
        state: TrainState,
        batch: Any,
        *,
        returns: tuple[str, ...] = ...,
        step_range: StepRange | None = ...,
    ) -> tuple[TrainState, Output]: ...

    def run_evaluation(
        self, name: str, state: TrainState, should_stop: ShouldStop = ...
    ) -> EvaluationResult: ...

    def get_module_view(self, state: TrainState, name: str) -> Any: ...

    def apply_module_view(self, state: TrainState, name: str) -> TrainState: ...

    def get_metric_types(self, state: TrainState, source: str = ...) -> dict[str, type]: ...
