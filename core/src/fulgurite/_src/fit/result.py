"""What is left of a fit in the end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx

from fulgurite._src.fit.history import History
from fulgurite._src.timing import Timings
from fulgurite._src.training.state import TrainState
from fulgurite.errors import StateError


@dataclass
class FitResult:
    """What a fit returns.

    Example:
        result = engine.fit(model, data)
        loss = result.metrics["train"]["loss"]
        result = engine.fit(data=data, state=result.state, steps=1)  # trains on

    Attributes:
        module: the trained module; it shares its arrays with `state`, so a fit from `state`
            consumes it.
        model_state: its `eqx.nn.State`, or None.
        state: to continue training: `engine.fit(data=data, state=result.state)`.
        history: the newest exact scalars of the run, from before a resume too.
        metrics: the newest metrics by source: `metrics["train"]`, `metrics["test"]`.
        timings: where the wall time went.
        stop_reason: None at the planned end, else why the run stopped earlier: `SIGINT`, `SIGTERM`,
            or the reason of a plugin.
        failures: why something failed that did not end the run: loggers, by plugin name, and
            what plugins report, such as evaluators as `evaluate.NAME`.
        messages: what the run and its plugins had to say, such as that the step is compiled again;
            see `Run.notify`.
        shared: what plugins told each other, as `Run.shared`.
    """

    module: Any = field(repr=False)
    model_state: eqx.nn.State | None = field(repr=False)
    state: TrainState = field(repr=False)
    history: History
    metrics: dict[str, dict[str, Any]]
    timings: Timings = field(repr=False)
    stop_reason: str | None
    failures: dict[str, str]
    messages: list[str]
    shared: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _apply_module_view: Callable[[TrainState, str], TrainState] | None = field(
        default=None, repr=False
    )

    def __reduce__(self) -> Any:
        """Refuse to be pickled: whether a module can be depends on the functions in it."""
        raise TypeError(
            "a FitResult cannot be pickled or copied: hand over its metrics or history.to_dict(), "
            "and write what was trained by fulgurite_checkpoint.save_weights(result, path) to a "
            "directory, from which fit(init_from=path) and evaluate(weights=path) read it"
        )

    def view(self, name: str) -> TrainState:
        """Return the state with a module that a plugin derives from it, to evaluate or predict
        with: `engine.evaluate(result.view("average"), data)`.

        Args:
            name: of the module, as plugins give it in the hook `module_views`.

        Raises:
            PluginError: there is no such module.
        """
        if self._apply_module_view is None:
            raise StateError("this result is not of a fit, so no plugin derives modules from it")
        return self._apply_module_view(self.state, name)
