"""One fit, from what was asked for to its result."""

from contextlib import AbstractContextManager, ExitStack

from fulgurite._src.evaluation.service import EvaluationService
from fulgurite._src.execution.program_cache import ProgramCache
from fulgurite._src.fit.ending import ResultKeeper
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.loop import Loop
from fulgurite._src.fit.plan import plan_fit
from fulgurite._src.fit.request import FitRequest
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.signals import StopRequests, raise_unanswered
from fulgurite._src.fit.start import restore_host_states
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.sharding import SINGLE_PROCESS
from fulgurite._src.timing import Timings


def run_fit(
    engine: EngineView,
    programs: ProgramCache,
    evaluations: EvaluationService,
    request: FitRequest,
) -> FitResult:
    """Train, and return the result.

    Args:
        engine: the engine that trains.
        programs: of the engine.
        evaluations: of the engine.
        request: what `Engine.fit` was asked for.
    """
    plugins = engine.plugins
    sync = engine.sharding.sync
    raise_unanswered(sync)
    # One of several processes cannot stop alone.
    timeout = engine.services.settings.stop_timeout if sync is SINGLE_PROCESS else None
    with (
        _reserve_plugins(engine, request),
        StopRequests(sync.signals, timeout) as signals,
        ResultKeeper() as keeper,
        ExitStack() as stack,
    ):
        plugins.timings = Timings()
        stack.callback(_stop_timings, plugins)
        plugins.hooks.around_fit.enter_contexts(stack, timings=plugins.timings)
        with plugins.timings.time("start"):
            plan = plan_fit(engine, programs, request, stack)
        loop = Loop(engine, evaluations, plan, signals)
        keeper.loop = loop
        # What opens the run's directory compares it with the snapshot, and closes it last. It
        # describes the run before host states are restored, which may be in the fields that
        # are settings of plugins.
        plugins.hooks.fit_context.enter_contexts(stack, loop.step, run=loop.run)
        restore_host_states(plugins, plan.resumed_from)
        result = loop.run_to_end()
        signals.stopped_by = result.stop_reason
        return result


def _stop_timings(plugins: PluginManager) -> None:
    """End the timings of a fit, so that no later evaluation adds to those of its result."""
    plugins.timings.stop()
    plugins.timings = Timings()


def _reserve_plugins(engine: EngineView, request: FitRequest) -> AbstractContextManager[None]:
    """Return a context in which no other fit uses the engine or an instance of its plugins.

    Args:
        engine: the engine that trains.
        request: what `fit` was asked for.
    """
    return engine.plugins.reserve(f"the fit of {request.length.describe()}", engine.run_dir)
