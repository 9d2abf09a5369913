"""Search spaces: what is written, and what fits the program."""

from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sweeps import Space
from fulgurite_sweeps.program import Program
from fulgurite_sweeps.space import split_point
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

PROGRAM = str(Path(__file__).with_name("quadratic.py"))


def test_a_space_is_written_as_numbers_choices_and_fixed_arguments() -> None:
    space = Space.parse(
        [
            "steps=100",
            "lr=log(1e-5, 1e-1)",
            "dropout=float(0,0.5,step=0.25)",
            "width=int(32,512,log)",
            "optimizer=adam,sgd",
            "depth,name=(2,small),(4,'log(1,2)')",
            "note='log(1,2)'",
        ]
    )
    assert space.distributions == {
        "lr": FloatDistribution(1e-5, 1e-1, log=True),
        "dropout": FloatDistribution(0.0, 0.5, step=0.25),
        "width": IntDistribution(32, 512, log=True),
        "optimizer": CategoricalDistribution(("adam", "sgd")),
        "depth,name": CategoricalDistribution(("(2,small)", "(4,'log(1,2)')")),
    }
    point = {"lr": 0.1, "dropout": 0.25, "width": 64, "optimizer": "sgd", "depth,name": "(2,small)"}
    assert space.build_overrides(point) == [
        "steps=100",
        "note='log(1,2)'",
        "lr=0.1",
        "dropout=0.25",
        "width=64",
        "optimizer=sgd",
        "depth=2",
        "name=small",
    ]


def test_a_space_in_python_takes_values_and_distributions_in_their_order() -> None:
    space = Space.make(
        {
            "width": [16, 32],
            "lr": "log(0.1,1)",
            "fast": [True, False],
            "rate": FloatDistribution(0, 1),
        }
    )
    assert list(space.axes) == ["width", "lr", "fast", "rate"]
    values = {"width": "32", "lr": 0.5, "fast": "true", "rate": 0.25}
    assert space.build_overrides(values) == ["width=32", "lr=0.5", "fast=true", "rate=0.25"]


CONDITIONAL = [
    "optimizer=adam,sgd,lion",
    "momentum=float(0,0.5,step=0.5) if optimizer=sgd",
    "nesterov=true,false if optimizer=sgd,lion",
    "warm=5 if nesterov=true",
]


def test_what_has_a_condition_is_searched_only_if_it_holds() -> None:
    space = Space.parse(CONDITIONAL)
    points = [space.build_overrides(point) for point in space.list_points()]
    assert points == [
        ["optimizer=adam"],
        *(
            ["optimizer=sgd", f"momentum={momentum}", *rest]
            for momentum in (0.0, 0.5)
            for rest in (["nesterov=true", "warm=5"], ["nesterov=false"])
        ),
        ["optimizer=lion", "nesterov=true", "warm=5"],
        ["optimizer=lion", "nesterov=false"],
    ]
    # What it is described as is the same space, and each value is tried under each condition.
    texts = [f"{name}={text}" for name, text in space.describe().items()]
    assert Space.parse(texts) == space
    samples = [tuple(space.build_overrides(point)) for point in space.list_samples()]
    assert {override for sample in samples for override in sample} == {
        override for point in points for override in point
    }
    assert {sample[:2] for sample in samples} >= {
        ("optimizer=sgd", "momentum=0.0"),
        ("optimizer=sgd", "momentum=0.5"),
        ("optimizer=lion", "nesterov=true"),
        ("optimizer=lion", "nesterov=false"),
    }


def test_a_condition_in_python_names_any_axis_before_it() -> None:
    space = Space.make({"depth": IntDistribution(1, 3), "last": "int(1,2) if depth=2,3"})
    assert [tuple(point.values()) for point in space.list_points()] == [
        (1,),
        *((depth, last) for depth in (2, 3) for last in (1, 2)),
    ]
    assert space.make_point(split_point("depth=2 last=1")) == {"depth": 2, "last": 1}
    with pytest.raises(ConfigurationError, match="searched only if depth=2,3, which the point"):
        space.make_point(split_point("last=1"))


def test_a_grid_is_the_product_with_the_last_axis_next_to_each_other() -> None:
    space = Space.parse(["lr=0.1,0.2", "width=int(1,5,step=2)", "rate=float(0,1,step=0.5)"])
    points = [tuple(point.values()) for point in space.list_points()]
    assert points == [
        (lr, width, rate)
        for lr in ("0.1", "0.2")
        for width in (1, 3, 5)
        for rate in (0.0, 0.5, 1.0)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lr=log(0,1)"], "lr=log(0,1) is not a search space"),
        (["lr=log(1)"], "is not a search space: write log(low,high)"),
        (["lr=loguniform(1e-3,1)"], "is not a search space: write log(low,high)"),
        (["lr=choice(1,2)"], "is not a search space: write the values with commas"),
        (["lr=float(0,x)"], "lr: 'x' is not a number"),
        (["width=int(1,2.5)"], "width: '2.5' is not an integer"),
        (["width=int(1,5,lgo)"], "is not a search space: write"),
        (["width=int(5,1)"], "is not a search space"),
        (["lr=float(0,inf)"], "lr is searched between 0.0 and inf: both must be finite"),
        (["lr=log(nan,1)"], "lr is searched between nan and 1.0: both must be finite"),
        (["lr=log(0.1,1)", "lr=0.1"], "lr is set twice"),
        (["lr=0.1,0.2", "lr,width=(1,2),(3,4)"], "lr is set twice"),
        (["lr"], "is not an axis of a sweep"),
        (["a=1,2 if b=1", "b=1,2"], "nothing called 'b' is searched before it"),
        (["b=float(0,1)", "a=1,2 if b=1"], "b may be any number"),
        (["b=1,2", "a=1,2 if b=3"], "b=3 is not in the search space"),
    ],
)
def test_what_is_no_space_is_an_error(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Space.parse(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [3, [], {"a": 1}])
def test_what_cannot_be_searched_in_python_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="lr: .* cannot be searched"):
        Space.make({"lr": value})


def test_a_point_that_is_not_in_the_space_is_an_error() -> None:
    space = Space.parse(
        ["lr=log(0.1,1)", "width=int(1,4)", "optimizer=adam,sgd", "size=int(32,512,step=32)"]
    )
    assert space.make_point(split_point("lr=0.5 optimizer=sgd")) == {"lr": 0.5, "optimizer": "sgd"}
    for point, message in {
        "lr=2": "lr=2 is not in the search space, float(0.1,1.0,log)",
        "width=9": "width=9 is not in the search space, int(1,4)",
        "size=100": "size=100 is not in the search space, int(32,512,step=32)",
        "optimizer=adm": "Did you mean 'adam'?",
        "lrr=0.5": "nothing called 'lrr' is searched. Did you mean 'lr'?",
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            space.make_point(split_point(point))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rl=log(0.1,1)"], "has no argument 'rl'"),
        (["width=log(1,8)"], "width=1.0 is not int"),
        (["steps=8,x"], "steps=x is not int"),
        (["bad=no,nope"], "bad=nope"),
        (["bad=no,nan", "width=1,x if bad=nan"], "width=x is not int"),
    ],
)
def test_what_the_program_does_not_take_is_found_without_a_trial(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Program(PROGRAM).check(Space.parse(arguments))
    assert message in str(caught.value) and "does not fit" in str(caught.value)


def test_secrets_are_not_searched() -> None:
    for argument in ("bad=https://u:abc@a,https://u:abc@b", "api_key=abc,def"):
        with pytest.raises(ConfigurationError, match="is a secret") as caught:
            Program(PROGRAM).check(Space.parse([argument]))
        assert "abc" not in str(caught.value)


@pytest.mark.parametrize("option", ["lr=0.5", "--run=a", "--sweep=lr=1,2", "--print"])
def test_options_that_a_sweep_chooses_itself_are_an_error(option: str) -> None:
    with pytest.raises(ConfigurationError, match="not for the trials of a sweep"):
        Program(PROGRAM, (option,)).check(Space.parse(["lr=0.1,0.2"]))
