# /// script
# requires-python = ">=3.11"
# dependencies = ["fulgurite-export", "jax", "numpy"]
#
# [tool.uv.sources]
# fulgurite-export = { path = "../plugins/export", editable = true }
# ///
"""An HTTP server over an exported model whose inputs are a dictionary of arrays.

uv run examples/serve.py model --port 8000
curl localhost:8000 -d '{"image": [0.5, 0.25]}'    # one example; {"outputs": ...}

One thread computes. Requests that arrive meanwhile wait, and are computed together as the next
batch. 400 says what is wrong with an input, 503 that too many requests wait. An example, not a
product: no TLS, no limits for a client, no metrics.
"""

import argparse
import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jax
import numpy as np
from fulgurite_export import ExportedFunction, InputError, load

MAX_BYTES = 1 << 24
Request = tuple[dict[str, np.ndarray], Future[Any]]


def parse_example(function: ExportedFunction, data: bytes) -> dict[str, np.ndarray]:
    """Return an example in JSON as a batch of one."""
    values = json.loads(data)
    specs = {spec.name: spec for spec in function.spec.read_inputs}
    if not isinstance(values, dict) or values.keys() != specs.keys():
        raise InputError(f"send a JSON object with {', '.join(specs)}")
    example = {}
    for name, value in values.items():
        array, dtype = np.asarray([value]), np.dtype(specs[name].dtype)
        kinds = {"b": "b", "i": "i", "u": "i", "f": "if"}.get(dtype.kind, "")
        if array.dtype.kind not in kinds or not np.isfinite(array).all():
            raise InputError(f"the input {name!r} must be numbers of type {dtype}")
        with np.errstate(over="ignore"):
            example[name] = array.astype(dtype)
        if not np.allclose(example[name], array):
            raise InputError(f"the input {name!r} has a number that is too large for {dtype}")
    function.check(example)
    return example


def compute_together(function: ExportedFunction, requests: list[Request]) -> None:
    """Answer requests of equal shapes; the batch is a power of two, so that few are compiled."""
    padding = (1 << (len(requests) - 1).bit_length()) - len(requests)
    examples = [example for example, _ in requests] + [requests[0][0]] * padding
    try:
        batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *examples)
        outputs = jax.tree.map(np.asarray, function(batch))
        for index, (_, future) in enumerate(requests):
            future.set_result(jax.tree.map(lambda array, i=index: array[i].tolist(), outputs))
    except Exception as error:  # those who wait hear of it, and the thread continues
        for _, future in requests:
            if not future.done():
                future.set_exception(error)


def compute_forever(
    function: ExportedFunction, waiting: "queue.Queue[Request]", max_batch: int
) -> None:
    """Take all requests that wait, up to a batch, and answer them."""
    while True:
        requests = [waiting.get()]
        while len(requests) < max_batch and not waiting.empty():
            requests.append(waiting.get())
        groups: dict[Any, list[Request]] = {}
        for request in requests:
            shapes = tuple(array.shape for array in request[0].values())
            groups.setdefault((*request[0], *shapes), []).append(request)
        for group in groups.values():
            compute_together(function, group)


def make_server(
    folder: str, port: int, *, max_batch: int = 64, max_waiting: int = 256
) -> ThreadingHTTPServer:
    """Return a server of the function `predict` of a folder, that waits for `serve_forever()`."""
    function = load(folder).functions["predict"]
    if any(spec.name.startswith("[") for spec in function.spec.inputs):
        raise InputError("the inputs have no names: export the model with a dictionary of arrays")
    waiting: queue.Queue[Request] = queue.Queue(max_waiting)
    arguments = (function, waiting, max_batch)
    threading.Thread(target=compute_forever, args=arguments, daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_POST(self) -> None:
            status, answer = self._answer()
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self) -> tuple[int, dict[str, Any]]:
            try:
                length = int(self.headers["Content-Length"] or 0)
                if not 0 <= length <= MAX_BYTES:
                    return 413, {"error": f"send at most {MAX_BYTES} bytes"}
                future: Future[Any] = Future()
                waiting.put_nowait((parse_example(function, self.rfile.read(length)), future))
            except queue.Full:
                return 503, {"error": "too many requests wait: try again later"}
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                return 400, {"error": str(error)}
            return 200, {"outputs": future.result()}

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # clients that connect at once; those beyond it are reset

    return Server(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    make_server(options.folder, options.port).serve_forever()
