"""Programs that return a configuration."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.commands import compare
from fulgurite_cli import Experiment, SecretStr, build_experiment, rebuild_experiment, run
from fulgurite_cli.config_command import run_config
from fulgurite_cli.configuration import build_from_config, rebuild_from_config
from fulgurite_cli.fit import load_experiment
from fulgurite_cli.running import shorten_warnings
from fulgurite_config import L, Required, to_json, to_python
from fulgurite_runs import RunDirectory, RunPlugin, get_arguments


class Net(fg.Module):
    weight: jax.Array
    rate: float

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.weight = jnp.ones(())
        self.rate = rate

    def training_step(self, batch: Any, ctx: Any) -> fg.Output:
        return fg.Output((self.weight * batch).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate)


class Report(RunPlugin):
    """A plugin that needs a run directory."""

    def __init__(self, every: int) -> None:
        self.every = every


def make_data() -> list[np.ndarray]:
    return [np.ones(4, np.float32)] * 10


def experiment() -> Any:
    cfg = L(steps=4, rate=0.5)
    cfg.engine = L(fg.Engine, steps=cfg.ref.steps, plugins=[L(Report, every=2)])
    cfg.model = L.partial(Net, rate=cfg.ref.rate)
    cfg.data = L(make_data)
    return cfg


def test_a_configuration_is_overridden_trained_and_built_again_from_the_manifest(
    tmp_path: Any,
) -> None:
    folder = str(tmp_path / "run")
    result = run(experiment, ["rate=0.25", "engine.plugins.*.every=1", "--run", folder])
    assert float(result.module.weight) == 0.0
    saved = RunDirectory(folder).read_manifest()["configuration"]
    built = build_experiment(experiment, [], saved)
    assert built.engine.steps == 4
    assert built.model.keywords == {"rate": 0.25}
    assert built.engine.config == saved
    with pytest.raises(ConfigurationError, match=r"rate=1 differs from what the run was started"):
        build_experiment(experiment, ["rate=1"], saved)

    def start_with_whole_number() -> Any:
        cfg: Any = experiment()
        cfg.model.rate = 1
        return cfg

    # Where the annotation asks for a float, 1 is 1.0.
    whole: Any = build_experiment(start_with_whole_number, []).engine.config
    again = build_experiment(start_with_whole_number, ["model.rate=1"], whole)
    assert again.model.keywords == {"rate": 1}


@pytest.mark.parametrize("name", ["antigravity:geohash", "fulgurite:Module", "builtins:exec"])
def test_a_manifest_names_nothing_that_the_program_does_not(name: str) -> None:
    form = {"$section": None, "engine": {"$call": name}, "x": {"$name": "wave:open"}}
    saved = {"config": json.dumps(form)}
    for argument in ("saved_config", "start_config"):
        with pytest.raises(ConfigurationError, match=f"add --allow {name} --allow wave:open"):
            build_experiment(experiment, [], **cast(Any, {argument: saved}))
    assert "antigravity" not in sys.modules


PROGRAM = """
from fulgurite_config import L, apply
from fulgurite_runs import RunPlugin

class Report(RunPlugin):
    pass

def make_data():
    return [1] * 4

def experiment():
    cfg = L(name="a", steps=2)
    cfg.home = apply("os:getenv", "HOME")
    cfg.text = apply(str.format, "run-{}", cfg.ref.name)
    cfg.engine = L("fulgurite:Engine", steps=cfg.ref.steps, plugins=[L(Report)])
    cfg.model = L(dict, a=1)
    cfg.data = L(make_data)
    return cfg
"""
HOSTILE = """
import json, sys
from pathlib import Path
from fulgurite.errors import ConfigurationError
from fulgurite_cli import rebuild_experiment, run
from fulgurite_config import to_plain
from fulgurite_cli.fit import load_experiment

events = []
watched = ("os.system", "subprocess.Popen", "os.posix_spawn")
def watch(event, args):
    if event in watched or event == "exec" and getattr(args[0], "co_filename", "") == "<string>":
        events.append((event, args))

command = "open('hostile', 'w')"
evil = [
    {"$call": "os:popen", "$args": ["touch hostile"]},
    {"$call": "builtins:exec", "$args": [command]},
    {"$op": "apply", "of": [{"$name": "builtins:exec"}, command]},
    {"$op": "apply", "of": [{"$name": "os:popen"}, "touch hostile"]},
]
program = to_plain(load_experiment("program.py")())
forms = [json.dumps(program | {"evil": form}) for form in evil]
run_dir = Path("run")
(run_dir / "attempts").mkdir(parents=True)
manifest = {"configuration": {}, "plugins": {}, "program": {"file": "program.py"}}
sys.addaudithook(watch)
for form in forms:
    experiment = load_experiment("program.py")
    Path("config.json").write_text(form)
    manifest["configuration"] = {"config": form}
    (run_dir / "attempts" / "1").write_text(json.dumps(manifest))
    for options in (["--config", "config.json"], ["--from", "run"]):
        for last in ([], ["--print"], ["--sweep", "steps=1,2", "--run", "sweep"]):
            try:
                run(experiment, [*options, *last])
            except SystemExit as error:
                assert error.code == 2, error.code
            else:
                raise SystemExit(form)
    for program in ("program.py", None):
        try:
            rebuild_experiment("run", program)
        except ConfigurationError as error:
            assert "--allow" in str(error), error
        else:
            raise SystemExit(form)
assert not events, events
"""


@pytest.mark.full
def test_a_hostile_file_runs_nothing_by_any_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-c", HOSTILE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr.count("which may not be imported") == 24
    assert not (tmp_path / "hostile").exists()


def test_a_file_may_name_what_the_command_line_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = experiment()
    cfg.size = L(dict, half=L("fractions:Fraction", 1, 2), name=optax.sgd)
    file = tmp_path / "config.json"
    file.write_text(to_json(cfg))
    options = ["--config", str(file), "--allow", "fractions:Fraction"]
    with pytest.raises(SystemExit):
        run(experiment, [*options, "--print"])
    assert "names optax:sgd, which may not be imported" in capsys.readouterr().err
    values = print_values(experiment, [*options, "--allow", "optax"], capsys)
    assert values["size.half"].startswith("fractions:Fraction")


def test_a_secret_stays_out_of_the_manifest() -> None:
    def configure() -> Any:
        cfg = experiment()
        cfg.api_key = "abc123"
        return cfg

    built = build_experiment(configure)
    assert built.engine.config is not None
    assert "abc123" not in json.dumps(built.engine.config)
    # What the manifest hides, the program says or the command line.
    saved = built.engine.config
    assert build_experiment(configure, [], saved).engine.config == saved
    for overrides in ([], ["api_key=xyz789"]):
        again = build_experiment(configure, overrides, start_config=saved)
        assert again.engine.config == saved
    with pytest.raises(ConfigurationError, match="hides the secret api_key: give api_key="):
        build_experiment(experiment, [], start_config=saved)


class Login:
    def __init__(
        self,
        phrase: SecretStr,
        place: str = "",
        second: SecretStr | None = None,
        others: dict[str, list[SecretStr]] | None = None,
    ) -> None:
        self.phrase = phrase
        self.place = place
        self.second = second
        self.others = others or {}


def test_a_secret_type_makes_a_secret_of_any_argument() -> None:
    def configure() -> Any:
        cfg = experiment()
        cfg.login = L(Login, cast(Any, "ope-nse/same"), place="ope-nse/same here")
        cfg.other = L(SecretStr, "fri/end")
        cfg.login.second = cast(Any, "enter/same")
        cfg.login.others = cast(Any, {"a": ["lemon/same", "melon/same"]})
        return cfg

    resolved, saved = build_from_config(configure(), [], None)
    login = resolved.login
    secrets = (login.phrase, resolved.other, login.second, *login.others["a"])
    assert [secret.get_secret_value() for secret in secrets] == [
        "ope-nse/same",
        "fri/end",
        "enter/same",
        "lemon/same",
        "melon/same",
    ]
    assert resolved.login.place == "ope-nse/same here"
    assert "same" not in str(saved) and "fri/" not in str(saved)
    again = rebuild_from_config(saved, [], configure())
    assert again.login.phrase == resolved.login.phrase


def test_what_differs_since_a_run_was_started_is_told_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and not as a traceback, because no line of the user is at fault."""
    folder = str(tmp_path / "run")

    def exit_code(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as caught:
            run(sized, arguments)
        return caught.value.code

    run(sized, ["--run", folder])
    assert exit_code("width=3", "--run", folder) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and "does not fit" in lines[0]
    assert "since the run was started, width was 2 and is 3" in lines
    assert not any("Traceback" in line or ".py" in line for line in lines)
    for damaged in ("", "{"):  # what cannot be read does not hide the error of the resume
        (tmp_path / "run" / "attempts" / "9").write_text(damaged)
        assert exit_code("width=3", "--run", folder) == 1
        assert capsys.readouterr().err.splitlines()[0] == lines[0]


def test_options_of_the_command_line_are_told_only_where_they_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data source has an argument `resume`, too, which no option sets."""

    def configure() -> Any:
        cfg = sized()
        cfg.data = L(iter, L(make_data))
        return cfg

    with pytest.raises(SystemExit) as caught:
        run(configure, ["--run", str(tmp_path)])
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    assert "resume='restart'" in printed
    assert "--resume" not in printed


def sized() -> Any:
    cfg = L(width=2)
    cfg.engine = L(fg.Engine, steps=2, plugins=[L(Checkpointer, 1)], autoload=False)
    cfg.model = L.partial(Sized, width=cfg.ref.width)
    cfg.data = L(make_data)
    return cfg


class Sized(Net):
    def __init__(self, width: int, *, key: jax.Array) -> None:
        super().__init__(0.5, key=key)
        self.weight = jnp.ones((width, 1))


def test_a_configuration_of_another_kind_of_program_is_an_error() -> None:
    saved = build_experiment(experiment).engine.config
    with pytest.raises(ConfigurationError, match="that of a program whose `experiment` returns on"):
        build_experiment(with_arguments, start_config=saved)
    with pytest.raises(ConfigurationError, match="width=high is not int"):
        build_experiment(with_arguments, start_config={"width": "high"})


def test_types_in_a_whole_configuration_are_checked() -> None:
    cfg = experiment()
    cfg.engine.seed = "zero"
    with pytest.raises(ConfigurationError, match="engine.seed=zero is not int"):
        build_experiment(experiment, start_config={"config": to_json(cfg)})


def test_warnings_of_fulgurite_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that resumes with another rate is told so, without the line of ours that says it."""
    place = str(Path(fg.__file__).parent / "engine.py")
    with shorten_warnings():
        ours = warnings.formatwarning("rate was 1", UserWarning, place, 3)
        other = warnings.formatwarning("old", UserWarning, "/tmp/mine.py", 3, "x = 1")
    assert ours == "warning: rate was 1\n"
    assert other.startswith("/tmp/mine.py:3: UserWarning: old")


def with_arguments(width: int = 3) -> Experiment:
    raise AssertionError("its arguments are wrong")


def test_a_mistyped_override_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(experiment, ["engine.stpes=3"])
    assert caught.value.code == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err


def test_a_configuration_may_be_that_of_an_experiment() -> None:
    def configure() -> Any:
        return L(Experiment, engine=L(fg.Engine, steps=1), model=3)

    assert build_experiment(configure, ["model=4"]).model == 4
    with pytest.raises(ConfigurationError, match="no `engine`"):
        build_experiment(lambda: L(model=1))


def print_values(
    program: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """What `--print` says of each value, by the text before ` = ` or `=`."""
    with pytest.raises(SystemExit) as caught:
        run(program, [*arguments, "--print"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition("=")[0].strip(): line.partition("=")[2].strip() for line in lines}


def test_print_shows_values_and_where_they_come_from(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    values = print_values(experiment, ["rate=0.25"], capsys)
    assert " ".join(values["rate"].split()) == "0.25 # override rate=0.25"
    assert values["engine.steps"].startswith("4")
    assert f"cfg.ref.steps, {__file__}:" in values["engine.steps"]
    assert values["model"].split()[0].endswith("test_configuration:Net")

    def describe() -> Any:
        return L(format="xml", language="c")

    values = print_values(describe, ["format=JSON", "language=C#"], capsys)
    assert " ".join(values["format"].split()) == "'JSON' # override format=JSON"
    assert " ".join(values["language"].split()) == "'C#' # override language=C#"

    def configure(width: int = 1, api_key: str = "abc123", name: str = "a") -> Any:
        raise AssertionError("this is not called to print values")

    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"width": 3, "name": "b"}))
    values = print_values(configure, ["name=c", "--config", str(file)], capsys)
    assert " ".join(values["width"].split()) == f"3 # --config {file}"
    assert " ".join(values["name"].split()) == "c # command line"
    assert " ".join(values["api_key"].split()) == "*** # default"


@pytest.mark.full
def test_a_run_starts_from_a_file_or_from_another_run(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(experiment, ["rate=0.25", "steps=1", "--run", str(folder)])
    result = run(experiment, ["steps=2", "--from", str(folder)])
    assert float(result.module.weight) == 0.5
    for file in (folder / "attempts" / "1", tmp_path / "config.json"):
        if not file.exists():
            cfg = experiment()
            cfg.rate = 0.25
            file.write_text(to_json(cfg))
        values = print_values(experiment, ["steps=2", "--config", str(file)], capsys)
        assert values["rate"].split() == ["0.25", "#", "--config", str(file)]
        assert values["engine.steps"].split()[0] == "2"


def test_a_configuration_that_cannot_be_read_is_an_error(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def configure(width: int = 1) -> Any:
        raise AssertionError("this is not called")

    file = tmp_path / "config.json"
    texts = {
        "[1]": "it holds list, not a JSON object",
        "{": "cannot be read as a configuration",
        '{"a": "\udcff"}': "is not UTF-8 from byte 7 on",
        '{"wdith": 1}': "Did you mean 'width'?",
        '{"width": 1, "width": 2}': "it has the name 'width' twice",
        '{"configuration": null, "plugins": []}': "it was not started by fulgurite_cli",
    }
    for text, message in texts.items():
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(SystemExit) as caught:
            run(configure, ["--config", str(file)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_help_lists_the_paths_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(experiment, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "  rate=0.5\n" in out
    assert "  engine.plugins[0].every=2\n" in out
    assert "  engine.steps=cfg.ref.steps\n" in out


def test_a_run_is_built_again_from_its_manifest_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "run")
    run(experiment, ["rate=0.25", "steps=1", "--run", folder])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rebuilt = rebuild_experiment(folder, None, [], ["fulgurite", "tests"])
    assert rebuilt.engine.steps == 1
    assert rebuilt.model.keywords == {"rate": 0.25}
    with pytest.raises(
        ConfigurationError, match=f"add --allow {__name__}:Report --allow {__name__}:Net"
    ):
        rebuild_experiment(folder, None, [], ["fulgurite"])
    with pytest.raises(ConfigurationError, match=r"'test_configuration.py' is not in this dir"):
        rebuild_experiment(folder, None)


class Named(Report):
    """Stands in for an evaluator: two of a name are one."""

    def __init__(self, name: str, data: Any) -> None:
        super().__init__(1)
        self.name, self.data = name, data

    @property
    def instance(self) -> str:
        return self.name


def test_evaluators_are_replaced_and_added_by_a_program_of_their_own_K5(tmp_path: Path) -> None:
    def train() -> Any:
        cfg = experiment()
        cfg.engine.plugins = [L(Report, 3), L(Named, "test", 1), L(Named, "train", data=2)]
        return cfg

    def evaluate() -> Any:
        cfg = L(size=5)
        cfg.evaluators = [L(Named, name="test", data=cfg.ref.size), L(Named, "more", 7)]
        return cfg

    folder = str(tmp_path / "run")
    run(train, ["rate=0.25", "steps=1", "--run", folder])
    saved = RunDirectory(folder).read_manifest()["configuration"]
    built = build_experiment(evaluate, [], saved, allow=["fulgurite", "tests"])
    plugins = [plugin.plugin for plugin in built.engine.plugins.plugins.values()]
    named = {plugin.name: plugin.data for plugin in plugins if isinstance(plugin, Named)}
    assert named == {"test": 5, "train": 2, "more": 7}
    assert built.model.keywords == {"rate": 0.25}
    with pytest.raises(ConfigurationError, match="add --allow fulgurite:Engine"):
        build_experiment(evaluate, [], saved)
    with pytest.raises(ConfigurationError, match="evaluators must be a list of calls"):
        build_experiment(lambda: L(evaluators=3), [], saved, allow=["fulgurite", "tests"])


def test_config_diff_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{name}.json") for name in "abcd"]
    cfg = experiment()
    Path(files[0]).write_text(to_json(cfg))
    cfg.engine.plugins[0].every = 5
    cfg.engine.seed = 1
    Path(files[1]).write_text(to_json(cfg))
    assert run_config(["diff", files[0], files[0]]) == 0
    assert run_config(["diff", *files[:2]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["engine.plugins[0].every: 2 -> 5", "engine.seed: (nothing) -> 1"]

    Path(files[2]).write_text('{"width": 1, "name": "x"}')
    Path(files[3]).write_text('{"width": 2, "name": "x"}')
    assert run_config(["diff", *files[2:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"width": ["1", "2"]}
    with pytest.raises(SystemExit) as caught:
        run_config(["diff", files[0], files[2]])
    assert caught.value.code == 2
    assert "one is a whole configuration, and the other holds" in capsys.readouterr().err


def test_an_argument_may_be_called_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def configure(config: str = "small", values: dict[str, int] = {}, rate: float = 1.0) -> Any:  # noqa: B006
        return Experiment(fg.Engine(steps=1), config, [])

    files = [str(tmp_path / f"{name}.json") for name in "abc"]
    for file, config in zip(files, ("small", "large"), strict=False):
        arguments: Any = build_experiment(configure, [f"config={config}"]).engine.config
        assert get_arguments({"configuration": arguments}) == arguments
        Path(file).write_text(json.dumps({"configuration": arguments, "plugins": []}))
    assert run_config(["diff", *files[:2]]) == 1
    assert capsys.readouterr().out == 'config: "small" -> "large"\n'
    # And a value of a configuration.
    Path(files[2]).write_text('{"config": "large"}')
    values = print_values(lambda: L(config="small"), ["--config", files[2]], capsys)
    assert values["config"].startswith("'large' ")


def test_values_from_a_run_keep_their_types_and_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest holds names alone; what they name has the types."""
    folder = str(tmp_path / "run")
    run(experiment, ["steps=1", "--run", folder])
    values = print_values(experiment, ["engine.seed=3", "--from", folder], capsys)
    assert values["engine.seed"].startswith("3 ")
    for override in ("engine.seed=abc", "engine.plugins[0].every=no", "rate=fast"):
        for start in ([], ["--from", folder]):
            with pytest.raises(SystemExit) as caught:
                run(experiment, [override, *start, "--print"])
            assert caught.value.code == 2
            assert "is not int" in capsys.readouterr().err


def test_a_call_is_not_replaced_by_text(capsys: pytest.CaptureFixture[str]) -> None:
    for override in ("model=cnn", "engine.plugins[0]=x", "engine=fulgurite:Engine"):
        with pytest.raises(SystemExit) as caught:
            run(experiment, [override])
        assert caught.value.code == 2
        assert "is not a value for" in capsys.readouterr().err


def choose() -> Any:
    """One of two models, by name."""
    cfg = L(model_name="slow", folder=Required("of the pictures"))
    cfg.aux.models = L(slow=L.partial(Net, rate=0.25), fast=L.partial(Net, rate=0.5))
    cfg.model = cfg.ref.aux.models[cfg.ref.model_name]
    cfg.engine = L(fg.Engine, steps=1, plugins=[L(Report, every=1)])
    cfg.data = L(make_data)
    return cfg


def make_key(key: Any, token: str = "a") -> Any:
    """Return a key; the arguments have names of secrets."""
    return key


def test_names_like_those_of_secrets_leave_the_manifest_readable(tmp_path: Path) -> None:
    def configure() -> Any:
        cfg = experiment()
        cfg.aux.first = L(make_key, key=L(make_key, key=3), token="abc123")
        cfg.header = {"key": [1, 2]}
        return cfg

    folder = str(tmp_path / "run")
    run(configure, ["steps=1", "--run", folder])
    saved = RunDirectory(folder).read_manifest()["configuration"]
    assert "abc123" not in json.dumps(saved)
    again = build_experiment(configure, [], saved)
    assert again.engine.steps == 1


@pytest.mark.full
def test_one_of_several_models_is_chosen_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    chosen = ["model_name=fast", "folder=x", "aux.models.fast.rate=0.75"]
    values = print_values(choose, chosen, capsys)
    assert values["model"].startswith("(that of aux.models.fast) ")
    assert "# cfg.ref.aux.models[cfg.ref.model_name], " in values["model"]
    result = run(choose, [*chosen, "--run", folder])
    assert float(result.module.weight) == 0.25
    again = run(choose, ["model.rate=0.5", "--from", folder])
    assert float(again.module.weight) == 0.5
    for name, hint in (
        ("model_name=fsat", "Did you mean 'fast'"),
        ("mode_name=fast", "model_name"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(choose, [name, "folder=x"])
        assert caught.value.code == 2
        assert hint in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(choose, ["--help"])
    assert "  folder=...  (of the pictures)\n" in capsys.readouterr().out


def test_a_file_may_hold_a_part_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "part.json"
    part = {"rate": 0.25, "engine": {"seed": 3, "plugins[0]": {"every": 7}}, "**.log_every": 5}
    file.write_text(json.dumps(part))
    values = print_values(experiment, ["rate=0.5", "--config", str(file)], capsys)
    assert values["rate"].startswith("0.5 ")
    assert values["engine.seed"].split() == ["3", "#", "--config", str(file)]
    assert values["engine.plugins[0].every"].startswith("7 ")
    assert values["engine.log_every"].startswith("5 ")
    for text, message in (
        ('{"engine": {"sede": 3}}', "Did you mean 'seed'?"),
        ('{"engine": {"seed": "3"}}', "engine.seed=3 is not int"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit) as caught:
            run(experiment, ["--config", str(file)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.full
def test_runs_of_configurations_are_shown_and_compared_by_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate in (("a", "0.25"), ("b", "0.5")):
        run(experiment, [f"rate={rate}", "steps=1", "--run", str(tmp_path / name)])
    configuration = RunDirectory(tmp_path / "a").read_manifest()["configuration"]
    assert configuration["values"]["model"].endswith("test_configuration:Net")
    assert "engine.steps" not in configuration["values"]  # it follows from another one
    assert configuration["values"]["rate"] == 0.25
    assert configuration["values"]["engine.seed"] == 0  # a default, which may change
    compare([str(tmp_path / "a"), str(tmp_path / "b")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "rate 0.25 0.5" in lines
    assert not any("$call" in line for line in lines)


def test_the_command_line_says_how_arguments_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def configure(lr: float = 1e-3) -> Any:
        raise AssertionError("this is not called")

    for arguments, message in (
        (["--lr=1e-2"], "arguments of the program are written lr=1e-2"),
        (["--config", "a.json", "--config", "b.json"], "--config is given twice"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(configure, arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_a_program_with_arguments_returns_no_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def configure(lr: float = 1e-3) -> Any:
        return experiment()

    with pytest.raises(SystemExit):
        run(configure, ["lr=1e-2"])
    assert "one that returns a configuration has no arguments" in capsys.readouterr().err


@pytest.mark.full
def test_a_run_begins_anew_or_with_the_weights_of_another(tmp_path: Path) -> None:
    def configure() -> Any:
        cfg = experiment()
        cfg.engine.plugins = [L(Checkpointer, every=1)]
        return cfg

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert float(run(configure, ["--run", first]).module.weight) == -1.0
    begun = run(configure, ["--run", second, "--init-from", first])
    assert float(begun.module.weight) == -3.0
    # Started again, it is complete; started over, it trains again.
    assert float(run(configure, ["--run", second, "--init-from", first]).module.weight) == -3.0
    restarted = run(configure, ["--run", second, "--resume", "never"])
    assert float(restarted.module.weight) == -1.0


@pytest.mark.full
def test_a_reader_of_print_may_stop_reading(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from test_configuration import *\nrun(experiment)\n")
    command = f"{sys.executable} {program} --print | head -1"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("steps = 4")
    assert not done.stderr


@pytest.mark.parametrize("name", ["my-prog.py", "01 train (2).py"])
def test_a_program_may_have_any_file_name(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.write_text(PROGRAM)
    run_dir = str(tmp_path / "run")
    configure = load_experiment(str(program))
    scope: dict[str, Any] = {}
    exec(to_python(configure()), scope)
    assert scope["cfg"] == configure()
    _, saved = build_from_config(cast(Any, configure()), [], None)
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    manifest = {"configuration": saved, "plugins": {}, "program": {"file": name}}
    (tmp_path / "run" / "attempts" / "1").write_text(json.dumps(manifest))
    assert rebuild_experiment(run_dir, str(program)).engine.steps == 2
    started = build_experiment(load_experiment(str(program)), start_config=saved)
    assert started.data == [1] * 4


def test_a_run_whose_program_is_here_and_has_no_experiment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attempts = tmp_path / "run" / "attempts"
    attempts.mkdir(parents=True)
    manifest = {"configuration": {}, "plugins": {}, "program": {"file": "plain.py"}}
    (attempts / "1").write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match=r"'plain\.py' is not in this directory"):
        rebuild_experiment("run", None)
    (tmp_path / "plain.py").write_text("def main(): ...")
    with pytest.raises(
        ConfigurationError, match=r"plain\.py defines no function `experiment`.*let"
    ):
        rebuild_experiment("run", None)
    manifest["program"] = {"file": None}
    (attempts / "1").write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match="the run run was not trained by a file, but in a"):
        rebuild_experiment("run", None)
