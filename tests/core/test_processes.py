"""What the core does with what several processes agreed on."""

import fulgurite as fg
import pytest
from hook_plugins import engine, plugin
from models import Act, Counting, Evaluating, numbers


class Once(fg.ProcessSync):
    """Says once, at step 4, that all stop."""

    def __init__(self) -> None:
        self.said = False

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        if step < 4 or self.said:
            return frozenset()
        self.said = True
        return frozenset({"stop:preempted"})


class Agreeing:
    """Stops as `Once` says."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return fg.SingleDevice(Once())


def test_agreed_stop_holds_through_an_evaluation() -> None:
    """An evaluation asks between its batches; that the answer is nothing new then takes nothing
    back."""
    spec = fg.Evaluation("test", numbers([0], [0]))
    evaluating = Evaluating(spec, trigger=4)
    result = fg.Engine(steps=9, plugins=[Agreeing(), evaluating], autoload=False).fit(
        Counting(), numbers([0])
    )
    assert (result.stop_reason, int(result.state.step)) == ("preempted", 4)
    assert not evaluating.results


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_an_action_may_ask_to_stop(steps_per_execution: int) -> None:
    asking = Act(3, lambda run: run.request_stop("enough"))
    result = fg.Engine(
        steps=9, plugins=[asking], autoload=False, steps_per_execution=steps_per_execution
    ).fit(Counting(), numbers([0]))
    assert result.stop_reason == "enough"
    assert 3 <= int(result.state.step) < 9


class Preempting(fg.ProcessSync):
    """Wants to stop from step 6 on; what processes wish for themselves it overrules."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, frozenset[str]]] = []

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        self.requests.append((step, requests))
        return frozenset({"stop:preempted"} if step >= 6 else ())


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_process_sync_decides_for_all_processes(steps_per_execution: int) -> None:
    sync = Preempting()
    ends: list[int] = []
    by_clock = Act(fg.EverySeconds(1e-9), lambda run: ends.append(run.step))
    agreeing = plugin("agreeing", sharding_strategy=lambda self: fg.SingleDevice(sync))
    result = engine(
        agreeing, by_clock, steps=20, steps_per_execution=steps_per_execution, log_every=None
    ).fit(Counting(), numbers(*[[0.0]] * 20))
    # 20 steps are divided into dispatches of 7, 7 and 6.
    end = 7 if steps_per_execution == 8 else 6
    assert (result.stop_reason, int(result.state.step)) == ("preempted", end)
    assert not ends
    steps = {step for step, _ in sync.requests if step}
    assert steps == ({7} if steps_per_execution == 8 else set(range(1, 7)))
    assert all("action:act.act" in requests for step, requests in sync.requests if step)
