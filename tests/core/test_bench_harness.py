"""The statistics of the benchmarks, on made-up numbers."""

import importlib.util
import json
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def harness() -> ModuleType:
    """The module that the benchmarks share; it belongs to no package."""
    file = Path(__file__).parents[1] / "bench" / "harness.py"
    spec = importlib.util.spec_from_file_location("harness", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_spread_is_median_and_interpolated_quartiles(harness: ModuleType) -> None:
    assert harness.Spread.of([4.0, 1.0, 3.0, 2.0]) == harness.Spread(median=2.5, p25=1.75, p75=3.25)
    assert harness.Spread.of([7]) == harness.Spread(7.0, 7.0, 7.0)


def test_ratio_is_computed_per_round(harness: ModuleType) -> None:
    # The machine was 10 times slower in the second round. The quotient of the medians would be 3 /
    # 2.
    seconds = {"fast": [1.0, 30.0, 3.0], "base": [2.0, 60.0, 1.0]}
    assert harness.ratio(seconds, "fast", "base") == harness.Spread(median=0.5, p25=0.5, p75=1.75)


def test_ratio_of_unequal_rounds_is_an_error(harness: ModuleType) -> None:
    with pytest.raises(ValueError, match="zip"):
        harness.ratio({"a": [1.0], "b": [1.0, 2.0]}, "a", "b")


def test_arms_run_in_a_different_order_each_round(harness: ModuleType) -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = harness.interleaved({name: lambda name=name: arm(name) for name in "abc"}, rounds=30)
    rounds = ["".join(order[at : at + 3]) for at in range(0, 90, 3)]
    assert {"".join(sorted(arms)) for arms in rounds} == {"abc"} and len(set(rounds)) == 6
    assert seconds == {
        name: [float(at + 1) for at in range(90) if order[at] == name] for name in "abc"
    }


def test_results_file_holds_ratios_and_the_machine(harness: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    ratios = {"mlp.fit": harness.Spread(0.9, 0.8, 1.0)}
    harness.write(file, ratios, microseconds={"mlp.b": harness.Spread(200.0, 190.0, 210.0)})
    content = json.loads(file.read_text())
    assert content["ratios"] == {"mlp.fit": {"median": 0.9, "p25": 0.8, "p75": 1.0}}
    assert content["microseconds"]["mlp.b"]["median"] == 200.0
    assert content["versions"]["jax"] == version("jax")


def test_every_benchmark_has_the_same_options(harness: ModuleType) -> None:
    options = harness.arguments("What it measures.", repeats=7).parse_args(["--json", "out.json"])
    assert (options.json, options.repeats) == (Path("out.json"), 7)
