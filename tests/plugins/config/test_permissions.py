"""What a configuration from a file may name."""

import enum
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite_config as fc
import pytest
from fulgurite_config import ConfigError, L, NotAllowedError, from_json, resolve
from fulgurite_config.permissions import find_names


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Layer:
    def __init__(self, mode: Mode | None = None) -> None:
        self.mode = mode


def test_exact_names_allow_nothing_else_of_their_package() -> None:
    form = {"a": {"$call": "wave:open"}, "b": [{"$name": "wave:Wave_read"}], "$section": None}
    with pytest.raises(NotAllowedError, match=r"add 'wave:Wave_read' to allow=\['wave:open'\]"):
        resolve(from_json(json.dumps(form)), allow=["wave:open"])
    assert "wave" not in sys.modules


def test_all_names_that_are_not_allowed_are_named_at_once() -> None:
    apply = {"$op": "apply", "of": [{"$name": "os:popen"}, "x"]}
    form = {"$section": None, "a": apply, "b": {"$call": "optax:sgd", "x": {"$name": "os:sep"}}}
    inner = {"$op": "apply", "of": [{"$name": "wave:open"}, {"$name": "pickle:loads"}]}
    form["c"] = {"$op": "+", "of": [1, inner]}
    config = from_json(json.dumps(form))
    for load in (fc.load_targets, resolve):
        with pytest.raises(NotAllowedError) as caught:
            load(config, ["jax"])
        assert sorted(caught.value.modules) == [
            *("optax:sgd", "os:popen", "os:sep", "pickle:loads", "wave:open")
        ]
    assert "wave" not in sys.modules


@pytest.mark.parametrize("entry", ["builtins", "os", "os.path", "subprocess", "fractions"])
def test_a_module_of_python_itself_is_allowed_by_full_names_only(entry: str) -> None:
    """`builtins` has exec, `os` popen, and others lead there."""
    with pytest.raises(
        ConfigError, match=f"'{entry}' cannot be allowed as a whole.*'{entry}:name'"
    ):
        resolve(L(a=1), allow=[entry])


def test_what_a_package_imports_from_elsewhere_is_not_of_it() -> None:
    config = from_json('{"$call": "fulgurite_config.names:partial", "$args": [{"$name": "x:y"}]}')
    with pytest.raises(NotAllowedError, match="x:y is not allowed"):
        resolve(config, allow=["fulgurite_config"])
    config = from_json('{"$call": "fulgurite_config.names:partial"}')
    with pytest.raises(NotAllowedError, match="it is of functools"):
        resolve(config, allow=["fulgurite_config"])


def test_names_of_a_program_are_those_that_it_wrote() -> None:
    config: Any = L(a=L("fractions:Fraction", 1), b=fc.apply("os:getenv", "HOME"), c=len)
    config.read = from_json('{"$call": "wave:open"}')
    assert find_names(config) == ["builtins:len", "fractions:Fraction", "os:getenv"]


def test_members_of_an_enum_are_names_of_the_program_that_has_it_as_a_type() -> None:
    names = find_names(L(Layer, mode=Mode.FAST))
    assert names == [f"{__name__}:{name}" for name in ("Layer", "Mode.EXACT", "Mode.FAST")]
    read = from_json(fc.to_json(L(Layer, mode=Mode.EXACT)))
    assert resolve(read, allow=find_names(L(Layer))).mode is Mode.EXACT


HOSTILE = """
import json, os, sys
events = []
watched = ("os.system", "subprocess.Popen", "os.posix_spawn", "exec", "compile", "open")
sys.addaudithook(lambda event, args: events.append((event, args)) if event in watched else None)
from fulgurite_config import ConfigError, L, apply, from_json, resolve, to_plain
from fulgurite_config.permissions import find_names
import numpy as np, numpy.testing

program = L(a=L(dict, x=1), home=apply("os:getenv", "HOME"), zeros=L(np.zeros, 3), name="a")
program.text = apply(str.format, "run-{}", program.ref.name)
allow = find_names(program)
command = "open('hostile', 'w')"
evil = [
    {"$call": "os:popen", "$args": ["touch hostile"]},
    {"$call": "builtins:exec", "$args": [command]},
    {"$call": "builtins:eval", "$args": [command]},
    {"$op": "apply", "of": [{"$name": "builtins:exec"}, command]},
    {"$call": "numpy.testing:runstring", "$args": [command, {}]},
    {"$call": "numpy:load", "$args": ["hostile.npy"], "allow_pickle": True},
    {"$partial": "os:system", "$args": ["touch hostile"]},
    {"$call": "builtins:max", "$args": [[command]], "key": {"$name": "builtins:exec"}},
    {"$call": "builtins:str.format.__class__"},
    {"$dict": [[{"$name": "os:system"}, 1]]},
]
forms = [to_plain(program) | {"evil": form} for form in evil]
events.clear()
for form in forms:
    try:
        resolve(from_json(json.dumps(form)), allow=allow)
    except ConfigError:
        continue
    raise SystemExit(form)
assert not events, events
"""


@pytest.mark.full
def test_a_hostile_file_runs_nothing_that_the_program_does_not_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOSTILE]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert not list(tmp_path.iterdir())
