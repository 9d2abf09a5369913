# /// script
# requires-python = ">=3.11"
# dependencies = ["fulgurite-export", "numpy"]
#
# [tool.uv.sources]
# fulgurite-export = { path = "../plugins/export", editable = true }
# ///
"""An HTTP server over the function `predict` of an exported model.

uv run examples/serve.py model --port 8000
curl localhost:8000 -d '{"image": [0.5, 0.25]}'    # one example; {"outputs": ...}

One thread computes. Requests that arrive meanwhile wait, and are computed together as the next
batch. 400 says what is wrong with an input, 503 that too many requests wait, 500 that the model
failed or that JSON cannot hold its outputs. An example, not a product: no TLS, no limits for a
client, no metrics.
"""

import argparse
import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from fulgurite_export import call_together, load, parse_example

MAX_BYTES = 1 << 24


class Server(ThreadingHTTPServer):
    """Answers requests by the function `predict` of a folder, once `serve_forever()` is called."""

    request_queue_size = 128  # clients that connect at once; those beyond it are reset

    def __init__(self, folder: str, port: int, max_batch: int = 64, max_waiting: int = 256) -> None:
        self.function = load(folder).functions["predict"]
        call_together(self.function, [])  # an error if it does not take batches of examples
        self.max_batch = max_batch
        self.waiting: queue.Queue[tuple[Any, Future[Any]]] = queue.Queue(max_waiting)
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.compute, daemon=True).start()

    def compute(self) -> None:
        """Take all requests that wait, up to a batch, compute them together, and begin again."""
        while True:
            requests = [self.waiting.get()]
            while len(requests) < self.max_batch and not self.waiting.empty():
                requests.append(self.waiting.get())
            examples, futures = zip(*requests, strict=True)
            try:
                outputs = call_together(self.function, examples)
            except Exception as error:  # those who wait hear of it, and the thread continues
                for future in futures:
                    future.set_exception(error)
            else:
                for future, output in zip(futures, outputs, strict=True):
                    future.set_result(output)

    def answer(self, data: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of the answer to an example."""
        future: Future[Any] = Future()
        try:
            self.waiting.put_nowait((parse_example(self.function, data), future))
        except queue.Full:
            return 503, {"error": "too many requests wait: try again later"}
        except ValueError as error:
            return 400, {"error": str(error)}
        failure = future.exception()  # waits for the batch
        if failure is not None:
            return 500, {"error": str(failure)}
        return 200, {"outputs": future.result()}


class Handler(BaseHTTPRequestHandler):
    server: Any  # a `Server`
    timeout = 30

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= MAX_BYTES:
            status, answer = self.server.answer(self.rfile.read(int(length)))
        else:
            status, answer = 413, {"error": f"say Content-Length, at most {MAX_BYTES} bytes"}
        try:
            text = json.dumps(answer, default=np.ndarray.tolist, allow_nan=False)
        except (TypeError, ValueError) as error:  # NaN, infinities and complex numbers
            status, text = 500, json.dumps({"error": f"JSON cannot hold the outputs: {error}"})
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    Server(options.folder, options.port).serve_forever()
