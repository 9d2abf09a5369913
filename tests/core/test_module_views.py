"""Modules that plugins derive from a state, by name."""

from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import PluginError
from hook_plugins import Averaging, averaged_by_hand, engine, plugin
from models import Act, Linear, regression


@pytest.mark.full
@pytest.mark.hook("module_views")
def test_module_views_are_evaluated_by_name() -> None:
    data = regression(24, 8)
    spec = fg.Evaluation("averaged", data, module_view="averaged")
    evaluating = plugin("evaluating", register_evaluations=lambda self: [spec])
    answers: list[Any] = []
    act = Act(fg.At(6), lambda run: answers.append(run.evaluate("averaged")))
    engine(Averaging(), evaluating, act, steps=9).fit(Linear(), data)
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    assert answers[0]["error"] == pytest.approx(
        float(np.mean((x @ averaged_by_hand(6)[1] - y) ** 2)), rel=1e-5
    )


def test_a_view_of_a_result_is_evaluated_as_it_is() -> None:
    data = regression(24, 8)
    trainer = engine(Averaging(), steps=6)
    result = trainer.fit(Linear(), data)
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    metrics = trainer.evaluate(result.view("averaged"), data)
    by_hand = float(np.mean((x @ averaged_by_hand(6)[1] - y) ** 2))
    assert metrics["error"] == pytest.approx(by_hand, rel=1e-5)
    assert metrics != trainer.evaluate(result, data)
    with pytest.raises(PluginError, match="Did you mean 'averaged'"):
        result.view("averagde")


def test_unknown_view_is_an_error_naming_the_available_ones() -> None:
    trainer = engine(Averaging(), steps=1)
    state = trainer.init_state(Linear(), regression())
    np.testing.assert_array_equal(trainer.get_module_view(state, "averaged").weight, np.zeros(3))
    with pytest.raises(
        PluginError, match=r"no plugin provides the weights 'averagde'. Did you mean 'averaged'\?"
    ):
        trainer.get_module_view(state, "averagde")
