"""Alerts: once for each time a condition comes to hold, and never in the way of training."""

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_evaluators import Evaluator
from fulgurite_monitor import Alert, AlertEvent, NotifyCommand, Webhook, alert as alert_module


class Echo(fg.Module):
    """Its loss is what the batch says."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch["loss"]) + 0 * self.weight)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def fit(*losses: float, alerts: list[Any]) -> fg.FitResult:
    data = [{"loss": np.full(2, loss, np.float32)} for loss in losses]
    engine = fg.Engine(steps=len(losses), log_every=1, autoload=False, plugins=alerts)
    return engine.fit(Echo, data)


def test_alert_comes_once_for_each_time_that_the_condition_comes_to_hold() -> None:
    events: list[AlertEvent] = []
    alert = Alert("train/loss > 10", do=[events.append])
    result = fit(1, 11, 12, 10, 13, 2, alerts=[alert])
    assert [(event.step, event.condition) for event in events] == [
        (2, "train/loss > 10"),
        (5, "train/loss > 10"),
    ]
    messages = [
        "alert at step 2: train/loss > 10 (train/loss is 11)",
        "alert at step 5: train/loss > 10 (train/loss is 13)",
    ]
    assert [event.message for event in events] == messages
    assert [message for message in result.messages if "alert" in message] == messages


def test_functions_see_the_newest_values_of_all_sources_in_the_order_of_loggers() -> None:
    order: list[tuple[str, Any]] = []

    def is_worse(values: Mapping[str, float]) -> bool:
        return values["train/loss"] > values.get("train/loss_average", 1e9)

    class Logger:
        """Comes after the alert, and gets its message after the record that caused it."""

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.source == "alert":
                order.append(("message", record.values["message"]))
            elif record.kind == "scalars" and "loss" in record.values:
                order.append(("loss", record.step))

    fit(4, 1, 9, alerts=[Alert(is_worse), Logger()])
    assert order == [
        ("loss", 1),
        ("loss", 2),
        ("loss", 3),
        ("message", "alert at step 3: is_worse"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train/loss >= 2", [2]),
        ("train/loss < 2", [1, 3]),
        ("train/loss <= 1", [1, 3]),
        ("train/loss==2.0", [2]),
        ("train/loss != 1", [2]),
    ],
)
def test_comparisons(text: str, expected: list[int]) -> None:
    steps: list[int] = []
    fit(1, 2, 1, alerts=[Alert(text, do=[lambda event: steps.append(event.step)])])
    assert steps == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train/los > 0", "nothing has logged train/los. Did you mean 'train/loss'?"),
        ("test/loss > 0", "nothing has logged test/loss. Did you mean 'train/loss'?"),
        ("vectors/v > 0", "vectors/v is an array, and an alert looks at single numbers"),
    ],
)
def test_a_condition_that_was_never_looked_at_is_told_at_the_end(text: str, reason: str) -> None:
    class Vectors(fg.Plugin):
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            run.log_scalars("vectors", {"v": np.ones(2)})

    with pytest.warns(UserWarning, match="the condition '.*' was never looked at"):
        result = fit(1, 2, alerts=[Alert(text), Vectors()])
    assert result.failures == {"alert.when": f"ConfigurationError: {reason}"}


def test_a_condition_on_an_evaluation_that_had_no_turn_is_no_failure() -> None:
    data = [{"loss": np.ones(2, np.float32)}]
    late = Evaluator("test", data, every=fg.At(10))
    result = fit(1, 2, alerts=[Alert("test/loss > 0"), Alert("train/loss > 9"), late])
    assert result.failures == {}


@pytest.mark.parametrize(
    "text", ["train/loss", "loss > 3", "train/loss > ten", "train/loss > 1 or 2", "a/b => 1", ""]
)
def test_condition_of_another_form_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write SOURCE/NAME"):
        Alert(text)


def test_condition_that_no_number_fulfils_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no number compares with NaN"):
        Alert("train/loss > nan")


def test_a_number_of_any_kind_without_axes_is_a_python_number_in_records() -> None:
    """So whatever reads records, an alert for example, need not know NumPy's numbers."""
    numbers = [4, 4.0, np.float32(4), np.int64(4), np.array(4.0), jnp.float32(4), jnp.bfloat16(4)]
    names = [f"number-{index}" for index in range(len(numbers))]
    steps: list[int] = []
    logged: dict[str, Any] = {}

    class Log(fg.Plugin):
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            run.log_scalars("mine", {**dict(zip(names, numbers, strict=True)), "v": np.ones(2)})

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.source == "mine":
                logged.update(record.values)

    def are_all_four(values: Mapping[str, float]) -> bool:
        return all(values.get(f"mine/{name}") == 4 for name in names)

    alert = Alert(are_all_four, do=[lambda event: steps.append(event.step)])
    fit(1, alerts=[alert, Log()])
    assert steps == [0]
    assert [type(logged[name]) for name in names] == [int, float, float, int, float, float, float]
    assert [logged[name] for name in names] == [4] * len(names)


def test_what_an_alert_has_not_done_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_module, "CLOSE_SECONDS", 0.01)
    go = threading.Event()
    try:
        with pytest.warns(UserWarning, match="was not done 0.01 s after the end of training"):
            fit(1, alerts=[Alert("train/loss > 0", do=[lambda event: go.wait(60)])])
    finally:
        go.set()


def test_command_gets_the_message_and_its_failure_is_reported(tmp_path: Path) -> None:
    write = (
        "import os, sys; open(sys.argv[1], 'w').write(sys.argv[2] + os.environ['FULGURITE_STEP'])"
    )
    written = tmp_path / "alert.txt"
    actions = [
        NotifyCommand([sys.executable, "-c", write, str(written)]),
        NotifyCommand([sys.executable, "-c", "raise SystemExit(3)"]),
    ]
    with pytest.warns(UserWarning, match="NotifyCommand failed for the alert at step 2"):
        result = fit(1, 20, 1, alerts=[Alert("train/loss > 10", do=actions)])
    assert written.read_text() == "alert at step 2: train/loss > 10 (train/loss is 20)2"
    assert "exit status 3" in result.failures["alert.NotifyCommand"]


def test_webhook_gets_json_and_one_that_is_dead_does_not_stop_training() -> None:
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_port
        fit(1, 20, alerts=[Alert("train/loss > 10", do=[Webhook(f"http://127.0.0.1:{port}/a")])])
        server.shutdown()
        thread.join()
    message = "alert at step 2: train/loss > 10 (train/loss is 20)"
    assert bodies == [{"text": message, "condition": "train/loss > 10", "step": 2}]
    dead = Webhook(f"http://127.0.0.1:{port}/secret-path")
    with pytest.warns(UserWarning, match="Webhook failed"):
        result = fit(20, 1, alerts=[Alert("train/loss > 10", do=[dead])])
    assert result.metrics["train"]["loss"] == 1
    assert "URLError" in result.failures["alert.Webhook"]


def test_invalid_argument_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="give a list of functions"):
        Alert("train/loss > 1", do=len)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="it must be a function"):
        Alert("train/loss > 1", do=["mail"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="give a list of strings"):
        NotifyCommand("notify-send hello")
    for address in ("file:///etc/passwd", None):
        with pytest.raises(ConfigurationError, match="must begin with https://"):
            Webhook(address)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout is -1; give seconds above 0"):
        NotifyCommand(["true"], timeout=-1)
    with pytest.raises(ConfigurationError, match="timeout is None; give seconds above 0"):
        Webhook("https://chat.example.com/hooks/abc", timeout=None)  # type: ignore[arg-type]
