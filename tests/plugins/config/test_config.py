"""Configurations as data: references, sharing, paths, JSON and values."""

import copy as standard
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import fulgurite_config as fc
import jax
import numpy as np
import optax
import pytest
from fulgurite_config import ConfigError, L, apply_overrides, from_json, resolve, to_json
from fulgurite_config.overrides import check_types
from fulgurite_config.values import parse_value


class Net:
    """A callable of a configuration."""

    def __init__(self, width: int = 8, dropout: float = 0.1, kind: Literal["a", "b"] = "a") -> None:
        self.width = width
        self.dropout = dropout
        self.kind = kind

    @classmethod
    def build(cls, width: int) -> "Net":
        """Return a net."""
        return cls(width)


class Box:
    """Holds what it gets."""

    def __init__(self, content: Any, label: str | None = None) -> None:
        self.content = content
        self.label = label


def fail(head: int) -> None:
    raise ValueError("inner")


def read_back(config: Any) -> Any:
    return from_json(to_json(config))


ALLOW = [__name__]


def test_an_expression_follows_its_reference_also_after_json() -> None:
    cfg = L(a=10)
    cfg.g = cfg.ref.a + 15 > 20
    assert cfg.g is True
    cfg.a = 0
    assert cfg.g is False
    again = read_back(cfg)
    assert again.g is False
    cfg.a = 6
    again.a = 6
    assert cfg.g is True
    assert again.g is True


def test_a_deep_copy_has_references_and_sharing_of_its_own() -> None:
    shared = L(Net)
    cfg = L(a=1, x=shared, y=shared, z=[shared])
    cfg.b = cfg.ref.a * 10
    for copied in (fc.copy(cfg), standard.deepcopy(cfg)):
        cfg.a = 2
        copied.a = 666
        assert cfg.b == 20
        assert copied.b == 6660
        assert copied.x is copied.y is copied.z[0]
        assert copied.x is not shared


def test_a_function_of_a_reference() -> None:
    cfg = L(parts=["a", "b", "c"])
    cfg.joined = fc.apply(str.join, "/", cfg.ref.parts)
    assert cfg.joined == "a/b/c"
    again = read_back(cfg)
    again.parts = ["d", "e", "f"]
    assert again.joined == "d/e/f"


def test_a_reference_is_neither_true_nor_false() -> None:
    cfg = L(a=1)
    with pytest.raises(ConfigError, match=r"cfg\.ref\.aux\.flag .* & and \|"):
        bool(cfg.ref.aux.flag)
    with pytest.raises(ConfigError, match="& and"):
        assert cfg.ref.a < 3 and cfg.ref.a


def test_sharing_survives_json() -> None:
    model = L(Net)
    model2 = L(Net)
    cfg = L(a=[model, model, model, model2, model2, L(Net)])
    again = read_back(cfg)
    form = fc.to_plain(cfg)["a"]
    assert [item.get("$id", item.get("$same")) for item in form] == [0, 0, 0, 1, 1, None]
    assert to_json(again) == to_json(cfg)
    for config in (cfg, again):
        objects = resolve(config, allow=ALLOW).a
        assert objects[0] is objects[1] is objects[2]
        assert objects[3] is objects[4]
        assert len({id(item) for item in objects}) == 3


def test_arguments_by_position() -> None:
    cfg: Any = L(Path, "a", "b")
    assert (cfg[0], cfg[-1]) == ("a", "b")
    cfg[-1] = "b2"
    cfg[2] = "c1"
    assert resolve(cfg) == Path("a/b2/c1")
    assert resolve(read_back(cfg)) == Path("a/b2/c1")
    for index in (3, -4):
        with pytest.raises(IndexError):
            cfg[index]


def test_keys_of_dictionaries_keep_their_types() -> None:
    value = {0: {"1": 1}, "0": "x", -4: "y"}
    again = read_back(value)
    assert again == value
    assert 1 not in again[0]
    assert "1" in again[0]


def test_a_one_way_copy() -> None:
    cfg = L(src=L(name="mnist", version=1, split="train"), batch=32)
    copied: Any = fc.copy_one_way(cfg)
    copied.src.split = "test"
    cfg.src.version = 2
    cfg.batch = 128
    cfg.src.added = 1
    assert (copied.src.split, copied.src.version, copied.batch) == ("test", 2, 128)
    assert cfg.src.split == "train"
    assert "added" not in dir(copied.src)
    whole = L(train=cfg, test=copied)
    again = read_back(whole)
    again.train.batch = 7
    assert again.test.batch == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("0xff", 255),
        ("1_000", 1000),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-3.14", -3.14),
        ("True", True),
        ("None", None),
        ("null", None),
        ("'None'", "None"),
        ('"x"', "x"),
        ("(1,)", (1,)),
        ("[]", []),
        ("{}", {}),
        ("imagenet", "imagenet"),
    ],
)
def test_values_are_read_by_their_annotations(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_values_are_read_by_the_annotation() -> None:
    cfg: Any = L(box=L(Box, 1), net=L(Net))
    apply_overrides(cfg, ["net.dropout=0", "box.label=42", "net.kind=b"])
    assert type(cfg.net.dropout) is float
    assert cfg.box.label == "42"
    apply_overrides(cfg, ["box.label=None", "box.label=None"])
    assert cfg.box.label is None
    for override in ("net.width=1.5", "net.kind=c", "net.width=big"):
        with pytest.raises(ConfigError, match="is not"):
            apply_overrides(cfg, [override])


def test_two_stars_match_any_depth() -> None:
    cfg = L(a=L(b=[1, 2, 3], b2=[1, 2, 3]), b2=5, b="old")
    changes = apply_overrides(cfg, ["**.b=new"])
    assert {change.path for change in changes} == {"a.b", "b"}
    assert (cfg.a.b, cfg.b, cfg.b2, cfg.a.b2) == ("new", "new", 5, [1, 2, 3])


def test_any_depth_finds_defaults_of_calls() -> None:
    cfg = L(net=L(Net), nets=[L(Net, dropout=0.3)])
    changes = apply_overrides(cfg, ["**.dropout=0"])
    assert [(change.path, change.old) for change in changes] == [
        ("net.dropout", 0.1),
        ("nets[0].dropout", 0.3),
    ]


def test_one_star_matches_one_level() -> None:
    cfg = L(a=L(b=[1, 2], b2=[3, 4]), c=1)
    changes = apply_overrides(cfg, ["a.*[0]=new"])
    assert [change.path for change in changes] == ["a.b[0]", "a.b2[0]"]
    with pytest.raises(ConfigError, match="wildcard"):
        apply_overrides(cfg, ["a.*=1"])
    with pytest.raises(ConfigError, match="c is 1"):
        apply_overrides(cfg, ["*.b=1"])


def test_wildcards_of_names_and_of_indices() -> None:
    cfg = L(
        layer_1=L(units=1), layer_2=L(units=2), layers=[L(units=3)], table={"x": L(units=4)}, c=1
    )
    changes = apply_overrides(cfg, ["layer_?.units=8", "layers[*].units=9"])
    assert [change.path for change in changes] == [
        "layer_1.units",
        "layer_2.units",
        "layers[0].units",
    ]
    (change,) = apply_overrides(cfg, ["t*.*.units=7"])
    assert change.path == "table.x.units"
    for override in ("table[*].units=1", "other_*.units=1", "['layer_?'].units=1"):
        with pytest.raises(ConfigError, match="matches nothing"):
            apply_overrides(cfg, [override])


def test_typos_are_refused_where_they_are_written() -> None:
    cfg: Any = L(opt=L(optax.adamw, learning_rate=1e-3))
    for override in ("opt.learnin_rate=1", "**.learnin_rate=1"):
        with pytest.raises(ConfigError, match="matches nothing.*'learning_rate'"):
            apply_overrides(cfg, [override])
    with pytest.raises(ConfigError, match="learning_rate"):
        cfg.opt.learnin_rate = 1
    with pytest.raises(ConfigError, match="learning_rate"):
        L(optax.adamw, **cast(Any, {"learnin_rate": 1}))


def test_an_error_leaves_the_configuration_as_it_was() -> None:
    cfg: Any = L(a=1, net=L(Net))
    before = to_json(cfg)
    with pytest.raises(ConfigError):
        apply_overrides(cfg, ["a=2", "net.width=3", "b=1"])
    assert to_json(cfg) == before


def test_a_failing_constructor_carries_path_and_line() -> None:
    cfg = L(model=L(head=L(fail, 1)))
    with pytest.raises(ValueError, match="^inner") as info:
        resolve(cfg)
    (note,) = info.value.__notes__
    assert "at model.head of the configuration" in note
    assert f"fail, written in {__file__}:" in note


def test_what_has_no_name_is_refused_where_it_is_written() -> None:
    def local() -> None: ...

    for value in (lambda: 1, local, Net().__init__, object()):
        with pytest.raises(ConfigError, match="function"):
            L(Box, content=value)
    assert resolve(read_back(L(Box, content=Net.build)), allow=ALLOW).content(3).width == 3


HOSTILE = """
import sys
imported = []
sys.addaudithook(lambda event, _: imported.append(event) if event in ("import", "exec") else None)
from fulgurite_config import ConfigError, from_json, resolve
import json, mypackage
deep = "[" * 100_000 + "]" * 100_000
calls = '{"$section": null, "a": {"$ref": ["b"]}, "b": {"$ref": ["a"]}}'
double = {"$section": None, "a0": "xxxxxxxxxx"}
for i in range(60):
    ref = {"$ref": [f"a{i}"]}
    double[f"a{i + 1}"] = {"$op": "+", "of": [ref, ref]}
lists = {"$section": None, "a0": [1]}
for i in range(60):
    lists[f"a{i + 1}"] = [{"$ref": [f"a{i}"]}] * 2
power = {"$section": None, "a": {"$op": "**", "of": [10, {"$op": "**", "of": [10, 10]}]}}
texts = [
    '{"$call": "os:system", "$args": ["touch hostile"]}',
    '{"$name": "antigravity:geohash"}',
    '{"$call": "mypackage:operator.add", "$args": [1, 2]}',
    '{"$call": "mypackage:math.floor", "$args": [1]}',
    '{"$call": "mypackage:Decimal", "$args": ["1"]}',
    '{"$op": "apply", "of": [{"$name": "os:system"}, "touch hostile"]}',
    '{"$call": "mypackage:Fraction.__init__.__globals__"}',
    '{"$call": "builtins:eval", "$args": ["1"]}',
    deep, calls, "[" + "0," * 2_000_000 + "0]", "{", '{"$what": 1}', '{"$same": 4}',
    '{"a": 1, "a": 2}', '{"$ref": ["x"], "from": ["y"]}',
    json.dumps(double), json.dumps(lists), json.dumps(power),
    json.dumps({"$op": "%", "of": ["%0999999999d", 1]}),
    json.dumps({"$op": "*", "of": ["x", 10**9]}),
]
before = set(sys.modules)
imported.clear()
for text in texts:
    try:
        resolve(from_json(text), allow=["mypackage"])
    except ConfigError:
        continue
    raise SystemExit(text[:200])
assert set(sys.modules) == before, set(sys.modules) - before
assert not imported, imported
assert not {"os.system", "antigravity", "jax", "fulgurite"} & set(sys.modules)
"""


@pytest.mark.full
def test_a_hostile_file_imports_nothing_and_ends_soon(tmp_path: Path) -> None:
    lines = [
        "import math, operator",
        "from decimal import Decimal",
        "from fractions import Fraction",
    ]
    (tmp_path / "mypackage.py").write_text("\n".join(lines))
    command = [sys.executable, "-B", "-c", HOSTILE]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert not (tmp_path / "hostile").exists()


def test_what_is_not_allowed_says_what_to_add() -> None:
    cfg = read_back(L(Fraction, 1, 2))
    with pytest.raises(ConfigError, match="add 'fractions:Fraction' to allow"):
        resolve(cfg)
    assert resolve(cfg, allow=["fractions:Fraction"]) == Fraction(1, 2)
    assert resolve(L("fractions:Fraction", 1, 2)) == Fraction(1, 2)


def test_a_sweep_is_ordered_and_named() -> None:
    cfg = L(lr=0.1, width=1, name="")
    trials = fc.sweep(cfg, ["lr=1e-3,1e-2", "width,name=(16,small),(32,big)"])
    assert [(trial.config.lr, trial.config.width, trial.config.name) for trial in trials] == [
        (0.001, 16, "small"),
        (0.001, 32, "big"),
        (0.01, 16, "small"),
        (0.01, 32, "big"),
    ]
    assert trials[1].name == "lr=1e-3,width=32,name=big"
    assert cfg.lr == 0.1
    assert [trial.name for trial in fc.sweep(cfg, ["**.lr=1,2"])] == ["lr=1", "lr=2"]
    for axes in (["lr"], ["lr="], ["width,name=(1,2,3)"], ["rate=1"], ["lr=1,1"], ["lr=1", "lr=2"]):
        with pytest.raises(ConfigError):
            fc.sweep(cfg, axes)


def test_a_partial_node_is_a_function() -> None:
    cfg = L.partial(optax.adam, b1=0.8)
    function = resolve(read_back(cfg), allow=["optax"])
    assert function.keywords == {"b1": 0.8}
    assert function.func is optax.adam
    assert function(1e-3).init({}) is not None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (optax.adamw, "optax:adamw"),
        (jax.nn.relu, "jax.nn:relu"),
        (jax.nn.gelu, "jax.nn:gelu"),
        (jax.nn.silu, "jax.nn:silu"),
        (jax.nn.softmax, "jax.nn:softmax"),
        (jax.nn.initializers.he_normal, "jax.nn.initializers:he_normal"),
        (jax.jit, "jax:jit"),
        (np.zeros, "numpy:zeros"),
    ],
)
def test_names_are_the_shortest_public_ones(function: Any, name: str) -> None:
    """The private ones change with the versions of a library."""
    assert fc.to_plain(L(value=function)) == {"$section": None, "value": {"$name": name}}
    assert resolve(read_back(L(value=function)), allow=[name]).value is function


def test_missing_values_are_named_together_before_anything_is_called() -> None:
    cfg = L(a=L(fail, 1), folder=fc.Required("the data"), box=read_back(cast(Any, L)(Box)))
    with pytest.raises(ConfigError, match=r"folder \(the data\); box\.content \(an argument"):
        resolve(cfg, allow=ALLOW)


def test_cycles_are_errors() -> None:
    cfg: Any = L()
    cfg.a = cfg.ref.b
    cfg.b = cfg.ref.a
    with pytest.raises(ConfigError, match=r"cfg\.ref\.b -> cfg\.ref\.a -> cfg\.ref\.b"):
        _ = cfg.a
    cfg = L()
    cfg.x = L(Box, cfg)
    with pytest.raises(ConfigError, match="contains itself"):
        resolve(cfg)
    with pytest.raises(ConfigError, match="contains itself"):
        to_json(cfg)


def test_a_reference_that_leads_nowhere_names_itself() -> None:
    cfg = L(net=L(Net, width=1))
    cfg.a = cfg.ref.net.widht
    with pytest.raises(ConfigError, match=r"cfg\.ref\.net\.widht leads nowhere.*'width'"):
        resolve(cfg)


def test_a_reference_reads_defaults_and_nodes() -> None:
    cfg = L(net=L(Net))
    cfg.same = cfg.ref.net
    cfg.double = cfg.ref.net.width * 2
    cfg.aux.scale = 3
    cfg.scaled = cfg.ref.aux.scale + 1
    result = resolve(cfg)
    assert result.same is result.net
    assert result.double == 16
    assert result == SimpleNamespace(net=result.net, same=result.net, double=16, scaled=4)
    assert read_back(cfg) == cfg


def test_merging_and_differences() -> None:
    cfg: Any = L(net=L(Net, width=1), a=1)
    before = fc.copy(cfg)
    other: Any = L(net=L(Net, dropout=0.5), b=2)
    other.c = other.ref.a + 1
    fc.merge(cfg, other)
    assert (cfg.net.width, cfg.net.dropout, cfg.c) == (1, 0.5, 2)
    assert fc.diff(before, cfg) == {
        "net.dropout": (None, "0.5"),
        "b": (None, "2"),
        "c": (None, '{"$op": "+", "of": [{"$ref": ["a"]}, 1]}'),
    }
    assert before != cfg


def test_sources_of_values() -> None:
    cfg: Any = L(net=L(Net, width=1), a=1)
    apply_overrides(cfg, ["a=3"])
    sources = {path: source for path, _, source in fc.iter_values(cfg)}
    assert sources["a"] == "override a=3"
    assert sources["net.width"].startswith(f"{__file__}:")


def test_printed_python_builds_the_same() -> None:
    shared = L(Net, width=3)
    cfg: Any = L(a=1, nets=[shared, shared], path=Path("x"), need=fc.Required("a thing"))
    cfg.box = cast(Any, L)(Box, (cfg.ref.a, -cfg.ref.a, fc.apply(max, cfg.ref.a, 3)), label="b")
    cfg.copied = fc.copy_one_way(cast(Any, cfg.box))
    cfg.box.aux.free = 1
    assert run_printed(cfg) == cfg


def run_printed(config: Any) -> Any:
    scope: dict[str, Any] = {}
    code = fc.to_python(config).replace(f"import {__name__}\n", "")
    exec(code.replace(f"{__name__}.", ""), globals() | scope, scope)
    return scope["cfg"]


def test_json_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from fractions import Fraction; from fulgurite_config import L, to_json\n"
        "cfg = L(a=1, b={'x': 1, 2: [1.5, (None,)]}); cfg.c = L(Fraction, cfg.ref.a + 1)\n"
        "print(to_json(cfg)); assert not {'jax', 'fulgurite', 'numpy'} & set(sys.modules)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_one_of_several_values_is_chosen_by_a_reference() -> None:
    cfg = L(kind="net", index=1)
    cfg.aux.kinds = L(net=L(Net, width=3), box=L(Box, "x"))
    cfg.model = cfg.ref.aux.kinds[cfg.ref.kind]
    cfg.item = L(dict, values=[10, 20, 30])
    cfg.second = cfg.ref.item["values"][cfg.ref.index]
    again = read_back(cfg)
    assert again == cfg and fc.copy(cfg) == cfg
    assert "cfg.model = cfg.ref.aux.kinds[cfg.ref.kind]" in repr(cfg)
    for config in (cfg, again, fc.copy(cfg)):
        assert cast(Any, resolve(config, ALLOW)).model.width == 3
        fc.load_targets(config, ALLOW)
        apply_overrides(config, ["kind=box", "index=-1", "aux.kinds.box.label=b"])
        resolved: Any = resolve(config, ALLOW)
        assert (resolved.model.content, resolved.model.label, resolved.second) == ("x", "b", 30)
    for override, message in (
        ("kind=bxo", r"cfg\.ref\.aux\.kinds\[cfg\.ref\.kind\].*'bxo'. Did you mean 'box'"),
        ("index=3", r"there is no 3"),
    ):
        wrong = fc.copy(cfg)
        apply_overrides(wrong, [override])
        with pytest.raises(ConfigError, match=message):
            resolve(wrong)


def test_a_reference_has_no_text() -> None:
    """`f"{cfg.ref.width}"` would be the text of the reference forever."""
    cfg = L(width=8)
    for make in (str, "w{}".format, lambda reference: f"w{reference:>3}"):
        with pytest.raises(ConfigError, match=r"cfg\.ref\.width has no string.*apply\(str.format"):
            make(cfg.ref.width)
    cfg.name = fc.apply(str.format, "w{}", cfg.ref.width)
    assert cfg.name == "w8"


def test_text_takes_the_place_of_no_call_and_of_no_number() -> None:
    cfg = L(net=L(Net), part=L(size=1, flag=True, share=0.5, name=None), labelled=L(Box, L(Net)))
    for override, message in (
        ("net=cnn", r"net=cnn is not a value for .*Net: set its values, net\.width="),
        ("part=x", "part=x is not a value for this section"),
        ("part.size=big", "part.size=big is not int"),
        ("part.flag=no", "part.flag=no is not bool"),
        ("part.share=half", "is not int | float"),
    ):
        with pytest.raises(ConfigError, match=message):
            apply_overrides(cfg, [override])
    texts = ["net=None", "part.size=0.5", "part.flag=false", "part.share=None", "part.name=x"]
    apply_overrides(cfg, texts)
    assert (cfg.net, cfg.part.size, cfg.part.flag, cfg.part.name) == (None, 0.5, False, "x")


def test_names_are_loaded_for_their_types() -> None:
    """What is named by text, or was read from JSON, has no arguments to check until then."""
    cfg: Any = L(net=L(f"{__name__}:Net", 4), frac=L("fractions:Fraction", 1, denominator=2))
    fc.load_targets(cfg)
    assert cfg.net == L(Net, width=4)
    with pytest.raises(ConfigError, match="net.dropout=no is not float"):
        apply_overrides(cfg, ["net.dropout=no"])
    assert cast(Any, resolve(cfg)).frac == Fraction(1, 2)
    read = read_back(L(a=L("fractions:Fraction"), b=L("wave:open"), c=L("chunk:Chunk")))
    for load in (fc.load_targets, resolve):
        with pytest.raises(fc.NotAllowedError, match="wave:open, chunk:Chunk are not allowed"):
            load(read, ["fractions:Fraction"])
    assert "wave" not in sys.modules


def test_an_argument_that_nobody_knows_yet_is_another_error() -> None:
    cfg = L(steps=3, net=L(f"{__name__}:Net", width=4))
    for override in ("net.dropout=0.5", "**.dropout=0.5"):
        with pytest.raises(fc.NotLoadedError, match="call load_targets"):
            apply_overrides(cfg, [override])
    with pytest.raises(ConfigError, match="Did you mean 'steps'"):
        apply_overrides(cfg, ["stpes=4"])
    fc.load_targets(cfg)
    apply_overrides(cfg, ["**.dropout=0.5"])
    assert cfg.net.dropout == 0.5


def test_what_was_read_is_checked_as_what_is_written() -> None:
    text = to_json(L(net=L(Net, width=4, dropout=0.5)))
    renamed: Any = from_json(text.replace('"width"', '"widht"'))
    with pytest.raises(
        ConfigError, match=r"net.widht: .*Net has no argument 'widht'. Did you mean"
    ):
        resolve(renamed, [__name__])
    other_type: Any = from_json(text.replace("0.5", '"half"'))
    fc.load_targets(other_type, [__name__])
    with pytest.raises(ConfigError, match="net.dropout=half is not float"):
        check_types(other_type)


class Scheduled:
    def __init__(self, rate: "float | np.ndarray | Callable[[int], float]" = 0.1) -> None:
        self.rate = rate


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("=3", "there is no path before '='"),
        ("+rate=1", r"'\+rate': overrides add and delete nothing"),
        ("~rate=1", "overrides add and delete nothing"),
        ("call.rate=fast", "call.rate=fast is not a number"),
        ("optimizer.weight_decay=fast", "optimizer.weight_decay=fast is not a number"),
        ('call.rate=["sk-1"', r"^call.rate: what begins with \[ is not a value: a bracket is"),
    ],
)
def test_what_is_no_override_says_why(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(L(call=L(Scheduled), optimizer=L(optax.adamw, 0.1)), [override])


def test_names_that_mean_something_else_are_no_values() -> None:
    for name in ("ref", "aux"):
        with pytest.raises(ConfigError, match=f"'{name}' cannot be the name of a value"):
            L(**{name: 1})
    with pytest.raises(ConfigError, match=r"overrides are a list of strings: write \['rate=1'\]"):
        apply_overrides(L(rate=1), "rate=1")


def test_values_of_a_nested_dictionary_are_set_or_none_of_them() -> None:
    cfg = L(net=L(Net), rate=0.1, boxes=[L(Box, 1), L(Box, 2)])
    values = {"net": {"width": 3}, "boxes[1].content": [1, 2], "boxes.*.label": "b"}
    changes = fc.apply_values(cfg, values, "a file")
    assert [change.path for change in changes] == [
        *("net.width", "boxes[1].content", "boxes[0].label", "boxes[1].label"),
    ]
    assert (cfg.net.width, cfg.boxes[1].content, cfg.boxes[0].label) == (3, [1, 2], "b")
    sources = {path: source for path, _, source in fc.iter_values(cfg)}
    assert sources["net.width"] == "a file"
    before = fc.copy(cfg)
    for wrong in ({"rate": 1, "net": {"width": "wide"}}, {"rate": 1, "net": {"widht": 3}}):
        with pytest.raises(ConfigError, match="width"):
            fc.apply_values(cfg, wrong)
        assert cfg == before
    for nested, message in (
        ({"net": {"wdith": 3}}, "net.wdith matches nothing: net has no 'wdith'. Did you mean"),
        ({"net": {"$call": "os:system"}}, "values by name are constants"),
    ):
        with pytest.raises(ConfigError, match=message):
            fc.apply_values(cfg, nested)


def test_initials_are_understood_and_long_lists_cut() -> None:
    cfg = L(optimizer=L(optax.adamw, 1e-3))
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        apply_overrides(cfg, ["optimizer.lr=1"])
    many = L(**{f"name{index}": index for index in range(50)})
    with pytest.raises(ConfigError, match="name0, .*, 30 more"):
        apply_overrides(many, ["quite_else=1"])


def test_functions_written_in_c_have_public_names() -> None:
    import operator

    assert '"operator:getitem"' in to_json(fc.apply(operator.getitem, [1], 0))


def test_an_integer_too_large_to_be_a_float_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_json(f'{{"$section":null,"a":{{"$float":{10**400}}}}}')
