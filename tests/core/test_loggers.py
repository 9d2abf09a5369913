"""Records: of two streams, in step order, to every logger, whatever becomes of one of them."""

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    FulguriteError,
    PathError,
    PluginError,
    SaveError,
)
from fulgurite_logging import media
from fulgurite_testing.memory import InMemoryCheckpointer
from models import Act, Counting, Evaluating, Linear, assert_same_bits, numbers, regression, trained


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


@dataclass(frozen=True, eq=False)
class Logger:
    """Keeps every record."""

    instance: str | None = None
    records: list[fg.Record] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        self.records.append(record)

    @property
    def exact(self) -> list[fg.Record]:
        return [record for record in self.records if record.stream == "exact"]


class Trouble(Exception):
    """Raised by the loggers below."""


@dataclass(frozen=True, eq=False)
class Failing:
    """Fails at its `at`-th record."""

    at: int
    instance: str | None = None
    observed: list[fg.Record] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind not in ("scalars", "text"):
            return
        self.observed.append(record)
        if record.kind == "scalars" and len(self.observed) == self.at:
            raise Trouble("disk full, token=abc")


class Required(Failing):
    required: ClassVar[bool] = True


# --- streams and order ----------------------------------------------------------------------------


@pytest.mark.hook("log_record")
def test_each_kind_of_record_reaches_the_loggers() -> None:
    values: dict[Any, dict[str, Any]] = {
        "scalars": {"a": 1.5},
        "media": {"image": media.Text("seen")},
        "text": {"note": "hello"},
        "config": {"lr": 0.1},
    }

    def emit(run: fg.Run) -> None:
        for kind, value in values.items():
            getattr(run, f"log_{kind}")("tester", value)

    logger = Logger()
    engine(logger, Act(fg.At(3), emit), steps=4, log_every=None).fit(Counting(), numbers([0]))
    for record, (kind, value) in zip(logger.records, values.items(), strict=True):
        assert (record.kind, record.source, record.step) == (kind, "tester", 3)
        assert list(record.values) == list(value)


@pytest.mark.parametrize(("kind", "stream"), [("scalars", "telemetri")])
def test_a_record_of_an_unknown_stream_is_an_error(kind: Any, stream: Any) -> None:
    act = Act(fg.At(1), lambda run: getattr(run, f"log_{kind}")("tester", {"a": 1}, stream=stream))
    with pytest.raises(
        PluginError,
        match=r"no (records of|stream) '(scalar|telemetri)'. Did you mean '(scalars|telemetry)'",
    ):
        engine(act, steps=1).fit(Counting(), numbers([0]))


NO_RECORDS: dict[str, tuple[Any, Any, Any, str]] = {
    "no dictionary": (
        "scalars",
        "tester",
        [1],
        r"values as a dictionary with strings as keys, not \[1\]",
    ),
    "no name": ("scalars", "tester", {3: 1}, "strings as keys"),
    "no source": ("scalars", 3, {"a": 1}, "the source as a string"),
    "no number": ("scalars", "tester", {"a": 1, "b": "2"}, "'b' is of type str; pass numbers"),
    "complex": ("scalars", "tester", {"a": np.complex64(1)}, "'a' is of type complex64"),
    "a random key": ("scalars", "tester", {"a": jax.random.key(0)}, "'a' is of type PRNGKeyArray"),
    "no string": ("text", "tester", {"a": object()}, "object cannot be written as JSON"),
    "no medium": (
        "media",
        "tester",
        {"a": np.zeros((2, 2))},
        "'a' is of type ndarray; pass media",
    ),
    "no JSON": ("config", "tester", {"a": object()}, "object cannot be written as JSON"),
}


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("kind", "source", "values", "message"), NO_RECORDS.values(), ids=NO_RECORDS
)
def test_unwritable_value_is_an_error_naming_who_emits_it(
    kind: Any, source: Any, values: Any, message: str
) -> None:
    logger = Logger()
    with pytest.raises(FulguriteError, match=message) as caught:
        engine(
            logger, Act(fg.At(1), lambda run: getattr(run, f"log_{kind}")(source, values)), steps=1
        ).fit(Counting(), numbers([0]))
    assert "plugin 'act' (module models), action act, step 1" in caught.value.__notes__
    assert not [record for record in logger.records if record.source == source]


def test_loggers_are_closed_once_however_a_fit_ends() -> None:
    closed: list[str] = []

    class Closing:
        @fg.hookimpl
        def close_logger(self) -> None:
            closed.append("closed")

        @fg.hookimpl
        def on_fit_end(self) -> None:
            raise Trouble

    with pytest.raises(SaveError, match="Trouble"):
        engine(Closing(), steps=1).fit(Counting(), numbers([0]))
    assert closed == ["closed"]


def test_failure_of_a_logger_is_reported_in_full_without_secrets() -> None:
    class Looking:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            record.values["missing"]

    with pytest.warns(UserWarning, match="KeyError: 'missing'"):
        result = engine(Looking(), steps=1).fit(Counting(), numbers([0]))
    assert result.failures["looking"].startswith("KeyError: 'missing' (plugin 'looking'")


def test_record_is_independent_of_later_changes_to_its_values() -> None:
    counts, sums = {"n": 0, "of": {"all": 0}}, np.zeros(2)

    def emit(run: fg.Run) -> None:
        counts["n"], counts["of"]["all"], sums[:] = run.step, run.step, run.step
        run.log_scalars("counts", {"n": counts["n"], "sums": sums})
        run.log_config("counts", counts)

    logger = Logger()
    result = engine(logger, Act(1, emit), steps=3, log_every=None).fit(Counting(), numbers([0]))
    assert result.history["counts/sums"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert [record.values for record in logger.records if record.kind == "config"] == [
        {"n": step, "of": {"all": step}} for step in (1, 2, 3)
    ]


def test_changing_evaluation_metrics_does_not_change_their_record() -> None:
    class Greedy:
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", numbers([0]))]

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction("look", 1, lambda run: run.evaluate("test").clear(), "evaluate")
            ]

        @fg.hookimpl
        def on_evaluate_end(self, metrics: dict[str, Any]) -> None:
            metrics.clear()

    result = engine(Greedy(), steps=2).fit(Counting(), numbers([0]))
    assert result.history["test/updates"].tolist() == [1, 2] and result.metrics["test"] == {
        "updates": 2
    }


def test_time_driven_records_are_telemetry() -> None:
    def act(run: fg.Run) -> None:
        run.evaluate("test")
        run.log_scalars("act", {"a": 1})

    class Specs:
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", numbers([0]))]

    clocked, logger = Act(fg.Every(2) | fg.FirstStepsAfterStart(1), act, "evaluate"), Logger()
    plugins = [logger, Specs(), clocked, Act(2, act, instance="exact")]
    fitted = engine(*plugins, steps=2).fit(Counting(), numbers([0]))
    assert fitted.messages == [
        "act.act runs by the clock or by process: what it logs is telemetry, not exact"
    ]
    assert [
        record.step
        for record in logger.records
        if record.source == "act" and record.stream == "telemetry"
    ] == [1, 2]
    assert (
        fitted.history.steps("act/a").tolist()
        == fitted.history.steps("test/updates").tolist()
        == [2]
    )


def test_only_telemetry_holds_attempt_and_time() -> None:
    def emit(run: fg.Run) -> None:
        run.log_scalars("exactly", {"a": 1})
        run.log_scalars("about", {"a": 2}, stream="telemetry")

    logger, before = Logger(), time.time()
    engine(logger, Act(fg.At(2), emit), steps=2).fit(Counting(), numbers([0]))
    by_source = {record.source: record for record in logger.records}
    assert {
        (by_source[name].attempt, by_source[name].wall_time) for name in ("train", "exactly")
    } == {(None, None)}
    about = by_source["about"]
    assert (about.stream, about.attempt) == ("telemetry", 1)
    assert about.wall_time is not None and before <= about.wall_time <= time.time()


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_records_come_in_step_order_and_the_window_before_the_actions(
    steps_per_execution: int,
) -> None:
    logger = Logger()
    act = Act(3, lambda run: run.log_scalars("act", {"step": run.step}))
    engine(logger, act, steps=7, steps_per_execution=steps_per_execution, log_every=2).fit(
        Counting(), numbers(*[[0.0]] * 9)
    )
    order = [(record.step, record.source) for record in logger.exact]
    assert order == [(2, "train"), (3, "act"), (4, "train"), (6, "train"), (6, "act"), (7, "train")]


def test_loggers_are_called_in_the_order_of_plugins() -> None:
    order: list[str] = []

    class Ordered:
        def __init__(self, instance: str, after: tuple[str, ...] = ()) -> None:
            self.instance, self.after = instance, after

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            if record.stream == "exact":
                order.append(f"{self.instance} {record.step}")

    engine(Ordered("a", after=("ordered:b",)), Ordered("b"), steps=2, log_every=1).fit(
        Counting(), numbers([0])
    )
    assert order == ["b 1", "a 1", "b 2", "a 2"]


def test_exact_records_are_the_same_in_every_run() -> None:
    first, second = Logger(), Logger()
    for logger in (first, second):
        engine(logger, steps=9, log_every=4).fit(Linear(), regression())
    assert [record.step for record in first.exact] == [4, 8, 9]
    assert first.exact == second.exact


def test_steps_per_second_are_telemetry_from_the_second_window_on() -> None:
    logger = Logger()
    result = engine(logger, steps=6, log_every=2).fit(Counting(), numbers([0]))
    rates = [record for record in logger.records if "steps_per_second" in record.values]
    assert [(record.step, record.stream) for record in rates] == [
        (4, "telemetry"),
        (6, "telemetry"),
    ]
    assert all(record.values["steps_per_second"] > 0 for record in rates)
    assert not any("steps_per_second" in name for name in result.history)


def test_an_evaluation_that_is_not_exact_is_telemetry() -> None:
    class Evaluating:
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [
                fg.Evaluation("exact", numbers([0])),
                fg.Evaluation("loose", numbers([0]), exact=False),
            ]

    def evaluate(run: fg.Run) -> None:
        run.evaluate("exact")
        run.evaluate("loose")

    logger = Logger()
    result = engine(logger, Evaluating(), Act(2, evaluate, "evaluate"), steps=2).fit(
        Counting(), numbers([0])
    )
    streams = {
        record.source: record.stream for record in logger.records if record.kind == "scalars"
    }
    assert streams == {"exact": "exact", "loose": "telemetry", "train": "exact"}
    assert set(result.history) == {
        "exact/updates",
        "train/loss",
        "train/weight",
        "train/batch_loss",
        "train/loss_average",
    }
    assert result.metrics["loose"] == {"updates": 2}


# --- history --------------------------------------------------------------------------------------


def test_history_keeps_the_exact_scalars() -> None:
    def emit(run: fg.Run) -> None:
        run.log_scalars("act", {"square": run.step**2})
        run.log_scalars("act", {"clock": 1.0}, stream="telemetry")
        run.log_text("act", {"word": "no"})

    observed: list[list[int]] = []
    look = Act(
        4, lambda run: observed.append(run.history.steps("act/square").tolist()), instance="look"
    )
    result = engine(Act(fg.At(1, 3), emit), look, steps=4, log_every=2).fit(
        Counting(), numbers([0])
    )
    assert result.history["act/square"].tolist() == [1, 9]
    assert result.history.steps("act/square").tolist() == [1, 3]
    assert result.history["train/weight"].tolist() == [-1, -3]
    assert (
        "act/square" in result.history
        and "act/clock" not in result.history
        and "act/word" not in result.history
    )
    assert list(result.history) == result.history.names()
    assert observed == [[1, 3]]
    with pytest.raises(PathError, match=r"'act/sqare'. Did you mean 'act/square'\?"):
        result.history["act/sqare"]


# --- loggers that fail ----------------------------------------------------------------------------


def test_failing_logger_is_reported_once_and_disabled() -> None:
    failing, logger = Failing(3), Logger()
    with pytest.warns(
        UserWarning, match="logger 'failing' failed and gets no more records"
    ) as warned:
        result = engine(failing, logger, steps=6, log_every=1).fit(Counting(), numbers([0]))
    assert len(warned) == 1
    assert [record.step for record in failing.observed if record.stream == "exact"] == [1, 2]
    assert [record.step for record in logger.exact] == [1, 2, 3, 4, 5, 6]
    assert list(result.failures) == ["failing"]
    assert result.failures["failing"].startswith(
        "Trouble: disk full, token=*** (plugin 'failing' ("
    )
    assert result.failures["failing"].endswith("), hook log_record, step 2)")
    (report,) = [record for record in logger.records if record.kind == "text"]
    assert (report.stream, report.step) == ("telemetry", 2)
    assert "disk full, token=*** (plugin" in report.values["message"]


def test_failing_logger_does_not_change_results() -> None:
    with pytest.warns(UserWarning, match="failed"):
        failed = engine(Failing(1), steps=5, log_every=1).fit(Linear(), regression())
    assert_same_bits(
        trained(failed.state), trained(engine(steps=5).fit(Linear(), regression()).state)
    )


def test_failing_logger_does_not_affect_another_instance() -> None:
    left, right = Failing(1, "left"), Failing(100, "right")
    with pytest.warns(UserWarning, match="'failing:left'"):
        result = engine(left, right, steps=3, log_every=1).fit(Counting(), numbers([0]))
    assert list(result.failures) == ["failing:left"]
    assert [record.step for record in right.observed if record.stream == "exact"] == [1, 2, 3]


def test_failed_logger_is_enabled_again_in_the_next_fit() -> None:
    failing = Failing(1)
    both = engine(failing, steps=2, log_every=1)
    with pytest.warns(UserWarning, match="failed"):
        assert both.fit(Counting(), numbers([0])).failures
    assert not both.fit(Counting(), numbers([0])).failures


def test_required_logger_that_fails_ends_the_run() -> None:
    errors: list[BaseException] = []

    class Witness:
        @fg.hookimpl
        def on_exception(self, exception: BaseException) -> None:
            errors.append(exception)

    with pytest.raises(Trouble, match="disk full") as caught:
        engine(Required(2), Witness(), steps=6, log_every=1).fit(Counting(), numbers([0]))
    assert errors == [caught.value]
    note, _ = caught.value.__notes__
    assert note.startswith("plugin 'required' (") and note.endswith("), hook log_record, step 2")


# --- opening and closing --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Opened:
    """Notes when it is opened, gets a record, and is closed."""

    calls: list[str]
    trouble: Exception | None = None
    at: str = ""

    def note(self, what: str) -> None:
        self.calls.append(what)
        if self.trouble and what.startswith(self.at):
            raise self.trouble

    @fg.hookimpl
    def open_logger(self, run: fg.LoggedRun) -> None:
        self.note(f"open at {run.step}")

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "text":
            self.note("text")
        elif record.kind == "scalars" and record.stream == "exact":
            self.note(f"record {record.step}")

    @fg.hookimpl
    def close_logger(self) -> None:
        self.note("close")

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        run.log_text("opened", {"note": "hello"})

    @fg.hookimpl
    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"exception {type(exception).__name__}")

    @fg.hookimpl
    def on_fit_end(self, result: fg.FitResult) -> None:
        self.calls.append("end")


@pytest.mark.hook("open_logger", "close_logger")
def test_logger_is_opened_before_the_first_record_and_closed_after_the_last() -> None:
    calls: list[str] = []
    engine(Opened(calls), steps=4, log_every=2).fit(Counting(), numbers([0]))
    assert calls == ["open at 0", "text", "record 2", "record 4", "close", "end"]


def test_what_is_logged_before_loggers_are_opened_comes_when_they_are() -> None:
    def restore(run: fg.Run) -> None:
        run.log_scalars("restored", {"a": 1})
        run.notify("plugin", "it is restored")

    first = InMemoryCheckpointer()
    engine(first, steps=2, log_every=None).fit(Counting(), numbers([0]))
    calls: list[str] = []
    plugins = fg.LambdaPlugin(on_restore=restore), InMemoryCheckpointer(first.checkpoints)
    resumed = engine(Opened(calls), *plugins, steps=3, log_every=None)
    result = resumed.fit(Counting(), numbers([0]), resume="latest")
    # The last text is that of `Opened` itself.
    assert calls == ["open at 2", "record 2", "text", "text", "close", "end"]
    assert result.history["restored/a"].tolist() == [1]


def test_a_logger_that_was_not_opened_is_not_closed() -> None:
    """The evaluation fails where it is checked, before loggers are opened."""
    calls: list[str] = []

    def fail(preds: Any, batch: Any) -> Any:
        raise Trouble("no metric")

    evaluation = Evaluating(fg.Evaluation("test", numbers([0]), metrics={"a": fail}), trigger=1)
    say = fg.LambdaPlugin(on_exception=lambda run: run.notify("plugin", "it failed"))
    with pytest.raises(Trouble):
        engine(Opened(calls), evaluation, say, steps=1).fit(Counting(), numbers([0]))
    assert calls == ["exception Trouble"]


def test_a_logger_hears_after_it_is_opened_of_one_that_cannot_be_opened() -> None:
    first, calls = Opened([], OSError("no space"), "open"), []

    class Later(Opened):
        pass

    with pytest.warns(UserWarning, match="logger 'opened' failed"):
        engine(first, Later(calls), steps=1, log_every=None).fit(Counting(), numbers([0]))
    # The failure, and what each of the two logs in `on_fit_start`.
    assert calls == ["open at 0", "text", "text", "text", "close", "end"]


def test_logger_is_closed_with_all_records_when_training_fails() -> None:
    calls: list[str] = []

    def fail(run: fg.Run) -> None:
        raise Trouble("at 3")

    with pytest.raises(Trouble):
        engine(Opened(calls), Act(fg.At(3), fail), steps=4, log_every=2).fit(
            Counting(), numbers([0])
        )
    assert calls == ["open at 0", "text", "record 2", "exception Trouble", "close"]


def test_pending_window_is_logged_when_the_data_fails() -> None:
    calls: list[str] = []
    with pytest.raises(DataError, match="after 5 steps"):
        engine(Opened(calls), steps=9, log_every=5).fit(Counting(), iter(numbers(*[[0]] * 5)))
    assert calls == ["open at 0", "text", "record 5", "exception DataError", "close"]


def test_fast_dev_run_opens_no_logger() -> None:
    calls: list[str] = []
    engine(Opened(calls), steps=4, fast_dev_run=2).fit(Counting(), numbers([0]))
    assert calls == ["end"]


@pytest.mark.parametrize(
    ("at", "calls"),
    [
        ("open", ["open at 0", "close", "end"]),
        ("close", ["open at 0", "text", "record 2", "record 4", "close", "end"]),
    ],
)
def test_logger_that_fails_to_open_or_close_is_reported_once(at: str, calls: list[str]) -> None:
    logger = Opened([], OSError("no space"), at)
    with pytest.warns(UserWarning, match="logger 'opened' failed") as warned:
        result = engine(logger, steps=4, log_every=2).fit(Counting(), numbers([0]))
    assert len(warned) == 1
    assert result.failures["opened"].startswith("OSError: no space (plugin 'opened' (")
    assert logger.calls == calls


def test_logger_that_refuses_its_position_ends_the_run() -> None:
    calls: list[str] = []
    refusal = ConfigurationError("no directory")
    with pytest.raises(ConfigurationError, match="no directory"):
        engine(Opened(calls, refusal, "open"), steps=4).fit(Counting(), numbers([0]))
    assert calls == ["open at 0", "exception ConfigurationError", "close"]


def test_a_record_after_the_last_is_an_error() -> None:
    class Late:
        @fg.hookimpl
        def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
            run.log_scalars("late", {"a": 1})

    with pytest.raises(SaveError, match="before `on_fit_end`"):
        engine(Late(), steps=1).fit(Counting(), numbers([0]))


def test_an_evaluation_in_on_fit_end_warns_of_its_numbers() -> None:
    """The loggers are closed by then, so its message becomes a warning; `on_compile` gets no run."""
    runs: list[fg.Run | None] = []

    class Root(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"root": jnp.sqrt(jnp.mean(batch**2))})

    class Ending:
        @fg.hookimpl
        def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
            runs.clear()
            data = numbers([1, 2, 3, 4], [1, 2, 2, 5])
            run.shared["roots"] = run.engine.evaluate(result, data)

        @fg.hookimpl
        def on_compile(self, run: fg.Run | None) -> None:
            runs.append(run)

    with pytest.warns(UserWarning, match="depend on how its data is divided into batches"):
        result = engine(Ending(), steps=1).fit(Root, numbers([0]))
    expected = (np.sqrt(30 / 4) + np.sqrt(34 / 4)) / 2
    assert result.shared["roots"]["root"] == pytest.approx(expected, rel=1e-6)
    assert runs == [None]


def test_history_finds_a_source_with_a_slash():
    history = fg.History()
    history.append(fg.Record("scalars", "mine/best", 3, {"loss": 0.5}))
    assert history.names() == ["mine/best/loss"]
    assert (history["mine/best/loss"].tolist(), history.steps("mine/best/loss").tolist()) == (
        [0.5],
        [3],
    )


def test_history_becomes_a_dictionary_a_table_and_a_picture() -> None:
    history = fg.History(
        [
            fg.Record("scalars", "train", 1, {"loss": 2.0}),
            fg.Record("scalars", "train", 2, {"loss": 1.0, "recall": np.array([0.5, 1.0])}),
            fg.Record("scalars", "test", 2, {"loss": 3.0}),
        ]
    )
    assert history.to_dict()["train/loss"] == {1: 2.0, 2: 1.0}
    table = history.to_pandas()
    assert table.index.tolist() == [1, 2]
    assert table["train/loss"].tolist() == [2.0, 1.0]
    assert np.isnan(table["test/loss"][1])
    assert table["train/recall"][2].tolist() == [0.5, 1.0]
    (axes,) = history.plot().axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {"train/loss": [[1, 2], [2, 1]], "test/loss": [[2, 3]]}
    with pytest.raises(PathError, match="plot numbers"):
        history.plot("train/recall")
    with pytest.raises(PathError, match="Did you mean 'train/loss'"):
        history.plot("train/los")


def test_a_value_whose_name_cannot_be_written_is_left_out_and_told_once() -> None:
    def log(run: fg.Run) -> None:
        run.log_scalars("good", {"$x": 1.0, "plain": 2.0})
        run.log_config("good", {"a": [{"b\0": 1, "plain": (2,)}]})
        run.log_text("a/../b", {"plain": "text"})
        run.log_scalars("good", {})

    logger = Logger()
    with pytest.warns(UserWarning, match="is left out of the records") as caught:
        result = engine(logger, Act(fg.At(1, 2), log), steps=2).fit(Counting(), numbers([0]))
    assert len(caught) == 3 and len(result.messages) == 3
    assert "it holds the character '\\x00'" in result.messages[1]
    values = [record.values for record in logger.records if record.source in ("good", "a/../b")]
    assert values == [{"plain": 2.0}, {"a": [{"plain": [2]}]}, {}] * 2


@pytest.mark.parametrize("name", ["$x", "..", "a\nb", "\ud800", "x" * 1001])
def test_names_of_plugins_actions_and_evaluators_can_be_written(name: str) -> None:
    for make in (
        lambda: engine(type("Unnamed", (Logger,), {"plugin_name": name})()),
        lambda: fg.ScheduledAction(name, 1, id),
        lambda: fg.Evaluation(name, []),
        lambda: fg.LambdaPlugin(name=name),
    ):
        with pytest.raises(FulguriteError, match="which cannot be written: "):
            make()


def test_record_that_a_logger_emits_comes_after_the_one_that_it_answers() -> None:
    order: list[tuple[str, int]] = []

    class Answering:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            self.run = run

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.source == "train" and record.stream == "exact":
                self.run.log_scalars("answer", {"to": record.step}, stream="telemetry")

    class Later:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.source == "answer":
                order.append(("answer", record.values["to"]))
            elif record.stream == "exact":
                order.append(("train", record.step))

    engine(Answering(), Later(), steps=2, log_every=1).fit(Linear(), regression(16, 8))
    assert order == [("train", 1), ("answer", 1), ("train", 2), ("answer", 2)]
