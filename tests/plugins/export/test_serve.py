"""The example of a server answers a real client, under load too."""

import importlib.util
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import Perceptron
from fulgurite_export import export

pytestmark = pytest.mark.full

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module() -> Perceptron:
    return Perceptron(key=jax.random.key(0))


@pytest.fixture
def address(
    serve: ModuleType, module: Perceptron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A server with room for four requests that wait."""
    export(module, tmp_path / "model", {"x": X})
    server = serve.Server(str(tmp_path / "model"), 0, max_batch=8, max_waiting=4)
    monkeypatch.setattr(server.RequestHandlerClass, "log_message", lambda *_: None)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def post(address: str, data: bytes | Any) -> tuple[int, Any]:
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(address, data)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_requests_under_load_are_answered_each_with_its_own_prediction(
    address: str, module: Perceptron
) -> None:
    expected = np.asarray(jax.vmap(module.net)(jnp.asarray(X)))

    def ask(index: int) -> int:
        while True:  # a client tries again when it is told to
            status, answer = post(address, {"x": X[index % 64].tolist()})
            if status != 503:
                break
        np.testing.assert_allclose(answer["outputs"], expected[index % 64], atol=1e-6)
        return status

    with ThreadPoolExecutor(16) as pool:
        assert {*pool.map(ask, range(400))} == {200}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "predict: the request is not JSON: Expecting value"),
        ([1, 2], "the input is list; it must be a dictionary with 'x'"),
        ({"x": [1, 2, 3]}, "the input 'x' is float32 (1, 3); it must be float32 (batch, 4)"),
        ({"x": [1, 2, 3, "4"]}, "must be numbers of type float32"),
        (b"", "Expecting value"),
    ],
)
def test_a_wrong_input_is_400_and_says_what_is_expected(
    address: str, data: Any, message: str
) -> None:
    status, answer = post(address, data)
    assert status == 400 and message in answer["error"]
    assert post(address, {"x": [0, 1, 2, 3]})[0] == 200


@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_of_a_fixed_batch_answers_several_requests_at_once(
    serve: ModuleType, module: Perceptron, tmp_path: Path, batch: int
) -> None:
    export(module, tmp_path / "model", {"x": X}, batch=batch)
    server = serve.Server(str(tmp_path / "model"), 0)
    expected = np.asarray(jax.vmap(module.net)(jnp.asarray(X)))
    with ThreadPoolExecutor(6) as pool:
        texts = [json.dumps({"x": row.tolist()}).encode() for row in X[:6]]
        answers = list(pool.map(server.answer, texts))
    server.server_close()
    assert [status for status, _ in answers] == [200] * 6
    outputs = [answer["outputs"] for _, answer in answers]
    np.testing.assert_allclose(outputs, expected[:6], atol=1e-6)


def test_outputs_that_json_cannot_hold_are_500(
    serve: ModuleType, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (np.float32("nan"), np.complex64(1j)):
        with monkeypatch.context() as patch:
            outputs = [np.full(1, value)]
            patch.setattr(serve, "call_together", lambda *_, outputs=outputs: outputs)
            status, answer = post(address, {"x": [0, 1, 2, 3]})
        assert status == 500 and "JSON cannot hold the outputs" in answer["error"]


def test_a_full_queue_is_503(
    serve: ModuleType, module: Perceptron, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes, may_continue = threading.Event(), threading.Event()
    call_together = serve.call_together

    def call_later(function: Any, examples: Any) -> Any:
        computes.set()
        assert may_continue.wait(60)
        return call_together(function, examples)

    monkeypatch.setattr(serve, "call_together", call_later)
    example = {"x": [0, 1, 2, 3]}
    with ThreadPoolExecutor(13) as pool:
        first = pool.submit(post, address, example)
        assert computes.wait(60)
        # While it computes, four wait, whichever come first, and the rest is told at once.
        others = [pool.submit(post, address, example) for _ in range(12)]
        refused = [answer.result() for answer in islice(as_completed(others), 8)]
        may_continue.set()
        statuses = sorted(answer.result()[0] for answer in others)
    assert {status for status, _ in refused} == {503}
    assert "try again later" in refused[0][1]["error"]
    assert statuses == [200] * 4 + [503] * 8 and first.result()[0] == 200


def test_a_body_that_is_too_long_is_413(
    serve: ModuleType, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MAX_BYTES", 10)
    status, answer = post(address, {"x": [0, 1, 2, 3]})
    assert status == 413 and "at most 10 bytes" in answer["error"]


def test_a_batch_that_fails_is_500_for_those_in_it_alone(
    serve: ModuleType, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(serve, "call_together", lambda function, examples: 1 / 0)
        assert post(address, {"x": [0, 1, 2, 3]}) == (500, {"error": "division by zero"})
    assert post(address, {"x": [0, 1, 2, 3]})[0] == 200
