"""What else is recorded: console lines, the environment, compilations, norms and learning rates."""

import base64
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError, PathError
from fulgurite.plugins import format_error, redact_text, redact_value, register_secret
from fulgurite_logging import (
    CompilationMonitor,
    ConsoleLogger,
    EnvironmentLogger,
    LearningRateMonitor,
    MediaLogger,
    NormMonitor,
    PythonLogger,
)
from fulgurite_logging.console import format_number
from fulgurite_logging.environment import describe_parameters, redact_arguments
from fulgurite_logging.media import Histogram
from fulgurite_optimizers import GradientClip
from fulgurite_progress.summary import model_summary
from fulgurite_runs.json_codec import loads
from logged import Act, Line, data
from rich.console import Console


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **{"steps": 6, "log_every": 2, **settings})


class Logger:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[fg.Record] = []

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        self.records.append(record)

    def of(self, source: str) -> list[fg.Record]:
        return [record for record in self.records if record.source == source]


# --- console --------------------------------------------------------------------------------------


def test_console_prints_a_line_per_log_step(capsys: pytest.CaptureFixture[str]) -> None:
    notice = Act(
        fg.At(3), lambda run: run.log_text("act", {"message": "hello"}, stream="telemetry")
    )
    result = engine("console", notice).fit(Line, data())
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    loss, error = (result.history[f"train/{name}"] for name in ("loss", "error"))
    assert first == f"step       2  train  error {error[0]:.4f}  loss {loss[0]:.4f}"
    assert second == "step       3  note: hello"
    for line, at in ((third, 1), (fourth, 2)):
        start, _, rate = line.rpartition("  ")
        assert (
            start == f"step       {2 * at + 2}  train  error {error[at]:.4f}  loss {loss[at]:.4f}"
        )
        assert rate.endswith(" steps/s")


def test_without_a_standard_output_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert engine("console").fit(Line, data()).failures == {}


@pytest.mark.full
def test_a_closed_pipe_does_not_end_training() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import fulgurite as fg; from logged import Line, data\n"
        "result = fg.Engine(steps=50, log_every=1, plugins=['console'], autoload=False).fit(Line, data())\n"
        "print(result.failures, int(result.state.step), file=sys.stderr)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parent)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr.startswith("{'console': \"BrokenPipeError: ") and done.stderr.endswith(
        "} 50\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (0.0, "0.0000"),
        (1234.56, "1,234.6"),
        (1e-5, "1.000e-05"),
        (2.5e9, "2.500e+09"),
        (float("nan"), "nan"),
        (12_345, "12,345"),
        (True, "True"),
        (np.zeros((2, 3)), "array[2, 3]"),
    ],
)
def test_numbers_are_short(value: Any, text: str) -> None:
    assert format_number(value) == text


def test_steps_per_second_are_logged() -> None:
    """Step 10 at 1000 s, 133 at 1010 s: 12.3, and nothing at the first; only from the second log
    step on in a run."""
    from fulgurite._src.timing import StepRate

    rate = StepRate()
    assert rate(10, 1000.0) is None
    assert rate(133, 1010.0) == pytest.approx(12.3)
    logger = Logger()
    engine(logger).fit(Line, data())
    assert [
        record.step for record in logger.of("train") if "steps_per_second" in record.values
    ] == [4, 6]


# --- environment ----------------------------------------------------------------------------------


class Tower(Line):
    """A model with modules in it."""

    layers: list[eqx.nn.Linear]

    def __init__(self, *, key: Any) -> None:
        super().__init__(key=key)
        self.layers = [eqx.nn.Linear(4, 2, key=key), eqx.nn.Linear(2, 3, use_bias=False, key=key)]


@pytest.mark.full
def test_environment_is_logged_once_as_telemetry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--api-key", "canary1", "token=canary2", "lr=0.1"]
    )
    monkeypatch.setenv("JAX_CANARY_TOKEN", "canary3")
    monkeypatch.setenv("MY_SECRET", "canary4")
    monkeypatch.setenv("MY_PROXY", "http://me:canary5@host/x")
    logger = Logger()
    with caplog.at_level(logging.INFO, "fulgurite"):
        quiet = EnvironmentLogger(variables=("MY_PROXY",))
        engine(logger, quiet).fit(Tower, data())
        assert not caplog.records
        telling = EnvironmentLogger(("MY_PROXY",), prefix="here/", level=logging.WARNING)
        prefixed = Logger()
        engine(prefixed, telling).fit(Tower, data())
    (environment,), (config, table) = logger.of("environment"), logger.of("parameters")
    (moved,) = prefixed.of("here/environment")
    assert moved.values["argv"] == environment.values["argv"]
    assert len(prefixed.of("here/parameters")) == 2 and prefixed.of("environment") == []
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[0] for line in lines] == [
        f"here/environment/{name}" for name in environment.values
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "canary" not in str(lines).lower().replace("jax_canary_token", "")
    for wrong in ({"prefix": 1}, {"level": "INFO"}, {"level": True}):
        with pytest.raises(ConfigurationError, match="EnvironmentLogger: (prefix|level) is"):
            EnvironmentLogger(**wrong)  # pyright: ignore[reportArgumentType]
    assert {(record.stream, record.step) for record in (environment, config, table)} == {
        ("telemetry", 0)
    }
    values = environment.values
    assert values["argv"] == ["train.py", "--api-key", "***", "token=***", "lr=0.1"]
    assert values["variables"]["JAX_CANARY_TOKEN"] == "***"
    assert (
        values["variables"]["MY_PROXY"] == "http://***@host/x"
        and "MY_SECRET" not in values["variables"]
    )
    assert "canary" not in json.dumps(values).lower().replace("jax_canary_token", "")
    assert values["devices"] == {
        "kind": jax.devices()[0].device_kind,
        "platform": "cpu",
        "count": len(jax.devices()),
    }
    assert values["versions"]["jax"] == jax.__version__
    assert values["plugins"]["environment"].startswith("fulgurite-logging ")
    # weight 3; layers 4 x 2 + 2 and 2 x 3: four bytes each
    assert (config.values["count"], config.values["bytes"]) == (19, 76)
    assert (config.values["parameters"], config.values["extra"]) == (19, 0)
    assert config.values["modules"] == {
        "layers": {"count": 16, "bytes": 64},
        "layers[0]": {"count": 10, "bytes": 40},
        "layers[1]": {"count": 6, "bytes": 24},
    }
    assert config.values["arrays"]["layers[0].weight"] == {
        "shape": [2, 4],
        "dtype": "float32",
        "bytes": 32,
    }
    assert config.values["optimizer_bytes"] == 2 * 76 + 4
    assert table.values["table"].splitlines()[-1].split() == ["total", "19", "76"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=3e-4", "lr=3e-4"),
        ("token=abc", "token=***"),
        ("--wandb.api_key=a,b", "--wandb.api_key=***"),
        ("token=a;b, then token=c; then", "token=***, then token=***; then"),
        ("max_tokens=abc tokenizer=bpe", "max_tokens=*** tokenizer=bpe"),
        (
            "['curl', '--passwd', 'a b', '-p', 'c', 'x']",
            "['curl', '--passwd', ***, '-p', ***, 'x']",
        ),
        (
            "(--api-key abc) [--api-key abc] x:--api-key abc",
            "(--api-key ***) [--api-key ***] x:--api-key ***",
        ),
        ("auth=['u', 'abc'] headers={'X': 'abc'} x", "auth=*** headers=*** x"),
        ("auth=Basic('u', 'abc'), x", "auth=***, x"),
        ('{\\"passwd\\": \\"abc\\"}', '{\\"passwd\\": ***}'),
        ("Bearer 'abc' or b'Bearer abc'", "Bearer *** or b'Bearer ***'"),
        ("Cookie: session=abc; id=abc\nx", "Cookie: ***\nx"),
        ("Authorization: Digest username=abc, response=abc", "Authorization: ***"),
        ('{"password": "a b", "lr": 1}', '{"password": ***, "lr": 1}'),
        ("SECRET: 'x y'", "SECRET: ***"),
        ("https://user:pa@ss@host/path?token=abc&x=1", "https://***@host/path?token=***&x=1"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("run.py --passwd abc --lr 1", "run.py --passwd *** --lr 1"),
        ("--pwd=abc --auth abc --credentials abc", "--pwd=*** --auth *** --credentials ***"),
        ('-H "Authorization: Bearer abc"', '-H "Authorization: ***"'),
        ("GET /x?X-Amz-Signature=abc&sig=abc&x=1", "GET /x?X-Amz-Signature=***&sig=***&x=1"),
        ("passwd=abc auth=abc header=abc", "passwd=*** auth=*** header=***"),
        ("failed: --api-key abc, Bearer abc.def", "failed: --api-key ***, Bearer ***"),
        ("Authorization: Basic YWJj; x\ny", "Authorization: ***\ny"),
        ("sent hf_" + 24 * "a" + " and AKIA" + 16 * "A", "sent *** and ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", "***"),
        ("author=me sigma=2 design=3 --use-bias x", "author=me sigma=2 design=3 --use-bias x"),
        (
            "Client(token=abc, host=b) [key=abc] <a key=abc>",
            "Client(token=***, host=b) [key=***] <a key=***>",
        ),
        ("token=abc,lr=3,seed=5", "token=***,lr=3,seed=5"),
        ("token={'a': 1\nlr=3", "token=***\nlr=3"),
        ("the key: \nlr", "the key: \nlr"),
        ("api_key=<Client abc> lr", "api_key=*** lr"),
        ('{"u":"https://host","m":"a@b"}', '{"u":"https://host","m":"a@b"}'),
        ("--verbose --use-key --run a", "--verbose --use-key --run a"),
    ],
)
def test_secrets_are_redacted(text: str, expected: str) -> None:
    assert redact_text(text) == expected


def test_a_secret_that_is_a_part_of_another_one_leaves_nothing_of_it() -> None:
    for secret in ("har/bour", "har/bour/light", "har/bour/light/house"):
        register_secret(secret)
    assert redact_text("at har/bour/light/house and har/bour") == "at *** and ***"


@pytest.mark.parametrize(
    "written",
    [
        'gr"ö ss/e',
        'xgr"ö ss/ey',
        "gr%22%C3%B6%20ss%2Fe",
        "gr%22%C3%B6+ss%2Fe",
        json.dumps('gr"ö ss/e'),
        json.dumps('gr"ö ss/e', ensure_ascii=False),
        base64.b64encode('gr"ö ss/e'.encode()).decode(),
        "gr%22%C3%B6%20ss/e",
        r"gr\\\"ö ss/e",
        r"gr\\\"\\u00f6 ss/e",
    ],
)
def test_a_registered_secret_is_redacted_however_it_is_written(written: str) -> None:
    register_secret('gr"ö ss/e')
    assert redact_text(f"at {written}").strip('xy"') in ("at ***", "at x***", 'at "***')


def test_a_registered_secret_is_redacted_in_base64_for_urls_without_padding() -> None:
    register_secret("???>>>~")
    assert redact_text("at Pz8_Pj4-fg and Pz8/Pj4+fg==") == "at *** and ***"


def test_a_secret_need_not_be_utf_8_and_the_key_of_an_error_is_none() -> None:
    register_secret("pa\udcffss-word")
    assert redact_text("at pa\udcffss-word and pa%FFss-word") == "at *** and ***"
    assert format_error(KeyError("foo")) == "KeyError: 'foo'"
    assert format_error(OSError("token=abc")) == "OSError: token=***"


def test_a_short_secret_is_redacted_as_a_word() -> None:
    register_secret("q1")
    assert redact_text("q1 is q1.5, but not q12") == "*** is ***.5, but not q12"


def test_numbers_are_secrets_where_they_may_be_passwords() -> None:
    settings = {"max_tokens": 512, "key_size": 64, "use_keys": True, "password": 1234, "key": "abc"}
    assert redact_value(settings) == {**settings, "password": "***", "key": "***"}


@pytest.mark.parametrize("wrong", ["SLURM_*", 1, (1,)])
def test_a_string_in_the_place_of_names_is_an_error(wrong: Any) -> None:
    # Its letters would be the names: `*` alone is every variable of the environment.
    for build, label in (
        (lambda: EnvironmentLogger(variables=wrong), "EnvironmentLogger: variables"),
        (lambda: ConsoleLogger(hide=wrong), "ConsoleLogger: hide"),
        (lambda: PythonLogger(hide=wrong), "PythonLogger: hide"),
    ):
        with pytest.raises(ConfigurationError, match=f"{label} is .*; give a tuple of names"):
            build()
    assert EnvironmentLogger(variables=["SLURM_*"]).variables == ["SLURM_*"]  # pyright: ignore[reportArgumentType]


def test_secret_after_an_option_is_redacted() -> None:
    assert redact_arguments(["--token", "abc", "x", "--use-key", "--run", "a"]) == [
        "--token",
        "***",
        "x",
        "--use-key",
        "--run",
        "a",
    ]
    assert redact_arguments(["--user=me:abc", "--proxy-user=me:a=b", "--user=me"]) == [
        "--user=me:***",
        "--proxy-user=me:***",
        "--user=me",
    ]
    assert redact_arguments(["-p", "abc", "-H", "Authorization: Bearer abc"]) == [
        "-p",
        "***",
        "-H",
        "Authorization: ***",
    ]
    assert redact_arguments(
        ["--passwd=a;b c&d", "auth=a b", "header=X: y", "--passwd", "-a b"]
    ) == [
        "--passwd=***",
        "auth=***",
        "header=***",
        "--passwd",
        "***",
    ]
    assert redact_arguments(["-u", "me:abc", "-p=abc", "pass=abc", "--pass", "a", "-u", "me"]) == [
        "-u",
        "me:***",
        "-p=***",
        "pass=***",
        "--pass",
        "***",
        "-u",
        "me",
    ]


def test_long_texts_are_redacted_in_time_that_grows_with_them() -> None:
    text = "a-" * 50_000 + " token=abc"
    assert redact_text(text) == "a-" * 50_000 + " token=***"


# --- compilations ---------------------------------------------------------------------------------


@pytest.mark.full
def test_a_compilation_during_training_says_what_changed() -> None:
    logger, batches = (
        Logger(),
        [{"x": np.ones((n, 3), np.float32), "y": np.ones(n, np.float32)} for n in (4, 4, 2)],
    )
    engine(logger, CompilationMonitor(), steps=3).fit(Line, batches)
    assert [record.values["message"] for record in logger.of("compilations")] == [
        "step was compiled again, the batch changed: x from float32[4, 3] to float32[2, 3]; y from float32[4] to "
        "float32[2]"
    ]
    first, second = logger.of("compilation/step")
    # Before the first step, and before the one whose batch is smaller.
    assert (first.step, second.step, first.stream) == (0, 2, "telemetry")
    assert first.values["flops"] > second.values["flops"] > 0


# --- norms and learning rates ---------------------------------------------------------------------


@pytest.mark.full
def test_norms_equal_numpy() -> None:
    observed: list[Any] = []

    class Witness:
        @fg.hookimpl
        def step_metrics(self, state: fg.TrainState, grads: Any, updates: Any) -> dict[str, Any]:
            last = fg.metrics.LastValue.from_values
            squares = {
                "gradients": grads.weight,
                "updates": updates.weight,
                "parameters": state.module.weight,
            }
            return {name: last(jnp.sum(value**2)) for name, value in squares.items()}

    groups = {"top": "layers[1]", "rest": ~fg.select("layers[1]")}
    result = engine(
        NormMonitor(groups=groups), Witness(), Act(2, lambda run: observed.append(run.state.module))
    ).fit(Tower, data())
    history = result.history
    for kind in ("gradients", "updates"):
        expected = np.sqrt(history[f"train/witness/{kind}"])
        np.testing.assert_allclose(history[f"train/norms/{kind}"], expected, rtol=1e-6)
        np.testing.assert_allclose(history[f"train/norms/{kind}/rest"], expected, rtol=1e-6)
        assert history[f"train/norms/{kind}/top"].tolist() == [
            0,
            0,
            0,
        ]  # it takes no part in the loss
    module = result.module
    whole = np.sqrt(
        sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(eqx.filter(module, eqx.is_array)))
    )
    assert history["train/norms/parameters"][-1] == pytest.approx(float(whole), rel=1e-6)
    top = np.linalg.norm(module.layers[1].weight)
    assert history["train/norms/parameters/top"][-1] == pytest.approx(float(top), rel=1e-6)


@pytest.mark.full
def test_norms_of_a_selection_leave_the_rest_out_of_groups_as_well() -> None:
    monitor = NormMonitor(("parameters", "updates"), {"all": "**"}, where="layers[1]")
    rest = NormMonitor(("parameters",), where=~fg.select("layers[1]"), instance="rest")
    whole = NormMonitor(("parameters",), instance="whole")
    result = engine(monitor, rest, whole, steps=1).fit(Tower, data())
    metrics = result.metrics["train"]
    squares = [metrics[f"norms{name}/parameters"] ** 2 for name in ("", ":rest", ":whole")]
    assert squares[0] + squares[1] == pytest.approx(squares[2], rel=1e-6)
    top = np.linalg.norm(result.module.layers[1].weight)
    for name in ("norms/parameters", "norms/parameters/all"):
        assert metrics[name] == pytest.approx(float(top), rel=1e-6)
    # The selection takes no part in the loss.
    assert metrics["norms/updates"] == metrics["norms/updates/all"] == 0


@pytest.mark.full
@pytest.mark.parametrize("clip_first", [True, False])
def test_norms_before_and_after_clipping_are_both_shown(clip_first: bool) -> None:
    clip = GradientClip(max_norm=1e-3)
    plugins = [clip, NormMonitor()] if clip_first else [NormMonitor(), clip]
    history = engine(*plugins, steps=2).fit(Line, data()).history
    plain = engine(NormMonitor(), steps=2).fit(Line, data()).history
    first = [history[f"train/norms/{name}"][0] for name in ("gradients", "clipped_gradients")]
    # The last bits depend on how XLA fuses the sum.
    assert first == pytest.approx([plain["train/norms/gradients"][0], 1e-3], rel=1e-5)
    # Without a plugin that changes gradients there is one norm of them.
    assert "train/norms/clipped_gradients" not in plain.names()


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_norms_are_computed_only_at_log_steps(
    steps_per_execution: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm_steps: list[int] = []

    def counted(tree: Any) -> Any:
        jax.debug.callback(lambda: norm_steps.append(1))
        return jnp.zeros(())

    monkeypatch.setattr("fulgurite_logging.norms.compute_norm", counted)
    result = engine(
        NormMonitor(quantities=("gradients",)),
        steps=7,
        log_every=3,
        steps_per_execution=steps_per_execution,
    ).fit(Line, data())
    jax.effects_barrier()
    assert len(norm_steps) == len(result.history["train/norms/gradients"]) == 3


@pytest.mark.full
def test_norms_are_right_in_double_precision() -> None:
    with jax.enable_x64(True):
        result = engine("norms", steps=2).fit(Line, data())
    whole = np.sqrt(
        sum(
            np.sum(np.square(leaf))
            for leaf in jax.tree.leaves(eqx.filter(result.module, eqx.is_array))
        )
    )
    assert result.history["train/norms/parameters"][-1] == pytest.approx(float(whole), rel=1e-6)


def test_invalid_norms_are_errors() -> None:
    with pytest.raises(
        ConfigurationError, match="gradients, clipped_gradients, updates, parameters"
    ):
        NormMonitor(quantities=("gradient",))
    with pytest.raises(PathError, match="selects no array"):
        engine(NormMonitor(groups={"top": "nowhere"})).fit(Line, data())

    class Bare(fg.GradientUpdate):
        def __call__(self, *arguments: Any) -> Any:
            state, output = super().__call__(*arguments)
            return state, output.replace(grads=None, updates=None)

    class Own:
        @fg.hookimpl
        def make_update_rule(self, optimizers: Any) -> fg.UpdateRule:
            return Bare(optimizers["default"])

    with pytest.raises(
        ConfigurationError, match="the update rule gives no clipped_gradients and no updates"
    ):
        engine(Own(), NormMonitor()).fit(Line, data())


class Scheduled(Line):
    def configure_optimizers(self) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(1.0, 0.0, 10)
        return optax.chain(
            optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
        )


@pytest.mark.full
def test_the_learning_rate_is_that_of_the_steps_update() -> None:
    result = engine(LearningRateMonitor()).fit(Scheduled, data())
    np.testing.assert_allclose(
        result.history["train/learning_rate/default"], [0.9, 0.7, 0.5], rtol=1e-6
    )


def test_a_learning_rate_that_is_not_exposed_is_an_error() -> None:
    class Foreign(Line):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.GradientTransformation(
                lambda params: (), lambda updates, state, params=None: (updates, state)
            )

    with pytest.raises(ConfigurationError, match=r"optax\.inject_hyperparams\(optax\.adam\)"):
        engine("learning_rate").fit(Foreign, data())


# --- media ----------------------------------------------------------------------------------------


class Shown(Line):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        media = {"weights": lambda: Histogram.from_values(self.weight, 2)}
        return super().training_step(batch, ctx).replace(media=media)


@pytest.mark.full
def test_media_are_shown_at_their_trigger() -> None:
    logger = Logger()
    engine(logger, MediaLogger(every=3)).fit(Shown, data())
    shown = [record for record in logger.records if record.kind == "media"]
    assert [record.step for record in shown] == [3, 6]
    assert [int(record.values["weights"].counts.sum()) for record in shown] == [3, 3]


def test_histogram_of_complex_numbers_is_an_error_instead_of_their_real_parts() -> None:
    weights = {"real": jnp.ones(2), "complex": jnp.array([3 + 4j])}
    with pytest.raises(ModelError, match=r"no order.*jax\.tree\.map\(jnp\.abs, values\)"):
        Histogram.from_values(weights)
    histogram = Histogram.from_values(jax.tree.map(jnp.abs, weights), 2)
    np.testing.assert_array_equal(histogram.counts, [2, 1])


@pytest.mark.full
def test_histogram_counts_more_values_than_float32_can() -> None:
    values = jnp.ones(2**24 + 3, bool)
    assert Histogram.from_values(values, 3).counts.tolist() == [0, values.size, 0]


@pytest.mark.parametrize(
    "every",
    [fg.EverySeconds(60), fg.FirstStepsAfterStart(2), fg.AtStart(), fg.Every(3) | fg.AtStart()],
)
def test_time_driven_media_trigger_is_an_error(every: fg.Trigger) -> None:
    with pytest.raises(ConfigurationError, match="nothing would be shown"):
        MediaLogger(every=every)


def test_everything_goes_into_one_file(tmp_path: Path) -> None:
    engine("jsonl", "csv", "environment", "compilations", "norms", run_dir=tmp_path).fit(
        Line, data()
    )
    lines = [loads(line) for line in (tmp_path / "telemetry.jsonl").read_bytes().splitlines()]
    sources = {(record["kind"], record["source"]) for record in lines}
    config = {("config", "environment"), ("config", "parameters"), ("text", "parameters")}
    assert sources >= {*config, ("scalars", "compilation/step"), ("scalars", "train")}


class Normalized(fg.Module):
    """Has 3 parameters, 2 integers, and 4 numbers of state: mean and variance of 2."""

    weight: jax.Array
    offsets: jax.Array
    mean: eqx.nn.StateIndex

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.sum(self.weight**2), model_state=ctx.model_state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def build_normalized(key: Any) -> Any:
    def build() -> Normalized:
        index = eqx.nn.StateIndex((jnp.zeros(2), jnp.ones(2)))
        return Normalized(jnp.ones(3), jnp.zeros(2, jnp.int32), index)

    return eqx.nn.make_with_state(build)()


def test_parameters_and_other_numbers_are_counted_apart_B10() -> None:
    engine = fg.Engine(steps=1, plugins=[], autoload=False)
    state = engine.init_state(build_normalized, [np.ones(1, np.float32)])
    counts = describe_parameters(state)
    assert (counts["parameters"], counts["extra"]) == (3, 2 + 4)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(model_summary(state))
    assert "Normalized: 3 parameters, 20 B; optimizer 0 B; 6 other numbers" in console.export_text()


def test_lines_in_a_format_of_one_s_own_B24(capsys: pytest.CaptureFixture[str]) -> None:
    def format_loss(record: fg.Record) -> str | None:
        if record.stream == "exact" and "loss" in record.values:
            return f"<{record.step} {record.source}>"
        return None

    engine(ConsoleLogger(format=format_loss), steps=4).fit(Line, data())
    assert capsys.readouterr().out.splitlines() == ["<2 train>", "<4 train>"]


def test_lines_go_to_logging_B22(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "mine")

    def say(run: fg.Run) -> None:
        run.log_text("act", {"message": "half of it"})

    engine(
        PythonLogger("mine", level=10, hide=("batch_loss", "loss_average")), Act(2, say), steps=2
    ).fit(Line, data())
    lines = [(record.levelname, record.getMessage().split()[:4]) for record in caplog.records]
    assert ("DEBUG", ["step", "2", "train", "error"]) in lines
    assert ("WARNING", ["step", "2", "note:", "half"]) in lines


@pytest.mark.full
def test_monitors_rename_what_they_measure_B22() -> None:
    monitor = NormMonitor(("gradients",), {"all": fg.select("**")}, rename=str.upper)
    history = engine(monitor, steps=2).fit(Line, data()).history
    assert float(history["train/norms/GRADIENTS"][0]) == float(
        history["train/norms/GRADIENTS/ALL"][0]
    )


@pytest.mark.parametrize("rename", [lambda name: "norm", lambda name: None])
def test_names_that_would_lose_a_norm_are_an_error(rename: Any) -> None:
    monitor = NormMonitor(("gradients", "parameters"), rename=rename)
    with pytest.raises(
        ConfigurationError, match=r"rename\('\w+'\) returned .*another one for each"
    ):
        engine(monitor, steps=1).fit(Line, data())
