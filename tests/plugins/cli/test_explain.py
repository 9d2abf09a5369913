"""`explain(engine)` tells the order of plugins and hooks, who owns which exclusive hook, and what is
due when."""

from typing import Any

import fulgurite as fg
import optax
from fulgurite_cli import explain
from fulgurite_cli.explanation import EXCLUSIVE_HOOKS


class First:
    after = ("second",)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("look", fg.Every(100) | fg.EverySeconds(60), lambda run: None),
            fg.ScheduledAction("decide", fg.EveryEpoch(), lambda run: None, "decide"),
        ]

    @fg.hookimpl
    def loss_terms(self) -> dict[str, Any]:
        return {}


class Second:
    @fg.hookimpl
    def loss_terms(self) -> dict[str, Any]:
        return {}

    @fg.hookimpl
    def configure_optimizers(self) -> dict[str, fg.OptimizerSpec]:
        return {"default": fg.OptimizerSpec(optax.sgd(0.1))}


def test_the_explanation_of_two_plugins() -> None:
    engine = fg.Engine(steps=250, seed=3, plugins=[First(), Second()], autoload=False)
    rows = [" ".join(line.split()) for line in explain(engine).splitlines()]
    assert rows[0] == "250 steps, seed 3, as many steps in a dispatch as fit chooses"
    assert rows[1].startswith("program: ")
    assert rows[4:6] == [
        f"second module {__name__} given in the order given",
        f"first module {__name__} given after second",
    ]
    assert "loss_terms traced second, first" in rows
    assert "configure_optimizers second" in rows
    assert rows[-3:] == [
        "decide first.decide EveryEpoch(n=1): where epochs end",
        "log log Every(n=50) | AtEnd(): 50, 100, 150, 200, 250",
        "act first.look Every(n=100) | EverySeconds(seconds=60): 100, 200, by the clock",
    ]


def test_explanation_abbreviates_many_steps_and_is_empty_without_plugins() -> None:
    rows = explain(fg.Engine(epochs=3, log_every=10, autoload=False)).splitlines()
    assert rows[0] == "3 epochs, seed 0, as many steps in a dispatch as fit chooses"
    assert rows[4] == "  none"
    assert rows[-1].endswith("Every(n=10) | AtEnd(): 10, 20, 30, 40, 50, 60, …")


def test_exclusive_hooks_are_those_that_one_plugin_answers() -> None:
    assert "configure_optimizers" in EXCLUSIVE_HOOKS and "loss_terms" not in EXCLUSIVE_HOOKS


def test_cadence_in_epochs_is_unknown_before_their_end() -> None:
    engine = fg.Engine(epochs=3, log_every=fg.EvenlySpaced(4) | fg.At(2), autoload=False)
    rows = explain(engine).splitlines()
    assert rows[-1].split(maxsplit=2)[-1] == "EvenlySpaced(n=4) | At(2): 2"
    rows = explain(fg.Engine(epochs=3, log_every=fg.EvenlySpaced(4), autoload=False)).splitlines()
    assert rows[-1].endswith("EvenlySpaced(n=4): not known before the end is")
