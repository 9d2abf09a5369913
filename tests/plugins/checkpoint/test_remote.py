"""Checkpoints on Google Cloud Storage, as far as an emulator on this machine is like it; and
nowhere else."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import Any, cast

import fulgurite as fg
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.format import list_entries
from trained import ZEROS, Counting, Scores, counting, engine

BUCKET = "gs://bucket/runs/a"


@pytest.mark.parametrize("scheme", ["s3", "az", "memory", "http"])
def test_unsupported_remote_directories_are_errors_at_construction(scheme: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"{scheme}://bucket/run: only local folders and gs:// are supported",
    ):
        Checkpointer(1, directory=f"{scheme}://bucket/run")


def test_run_directory_must_be_local() -> None:
    with pytest.raises(ConfigurationError, match="run_dir= is not a local folder"):
        engine(cast(Path, ""), Checkpointer(1), steps=1).fit(Counting, ZEROS)
    with pytest.raises(ConfigurationError, match="run_dir=gs://bucket/run is not a local folder"):
        engine(cast(Path, "gs://bucket/run"), Checkpointer(1), steps=1).fit(Counting, ZEROS)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_missing_gcsfs_is_an_error_saying_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'fulgurite-checkpoint\[gcs\]'"):
        Checkpointer(1, directory=BUCKET)


@pytest.mark.slow
def test_run_resumes_from_checkpoints_in_a_bucket(tmp_path: Path) -> None:
    """In a process of its own, because gcsfs looks for the emulator once, when it is imported."""
    for name in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["saved"] == [1, 3, 4]  # the best and the last two
    assert report["best"] == -1 and report["resumed"] == -5
    (warning,) = report["warned"]
    assert "step 4 is damaged" in warning and "step 3 is used" in warning
    assert report["left"] == ["step-1", "step-4", "step-5"]
    assert report["unseen"] == []


def in_a_bucket(path: Path) -> None:
    """Saves, damages the newest checkpoint from outside, continues from the one before, and prints
    how that went."""
    from gcp_storage_emulator import server  # pyright: ignore[reportMissingImports]
    from gcp_storage_emulator.handlers import objects  # pyright: ignore[reportMissingImports]

    def move(request: Any, response: Any, storage: Any) -> None:
        """Cloud Storage has it since 2025, the emulator not yet."""
        request.params["dest_bucket_name"] = request.params["bucket_name"]
        objects.copy(request, response, storage)
        objects.delete(request, response, storage)

    source, target = (
        r"(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)",
        r"(?P<dest_object_id>.*[^/]+)",
    )
    server.HANDLERS = (
        (rf"^/storage/v1/b/{source}/moveTo/o/{target}$", {"POST": move}),
        *server.HANDLERS,
    )
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    emulator: Any = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    address = f"http://127.0.0.1:{emulator._api._httpd.server_address[1]}"
    os.environ |= {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
    os.environ |= {"FSSPEC_GCS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    try:
        print(json.dumps(trained_there(path, address)))
    finally:
        emulator.stop()


def trained_there(path: Path, address: str) -> dict[str, Any]:
    def names() -> list[str]:
        with urllib.request.urlopen(
            f"{address}/storage/v1/b/bucket/o?prefix=runs/a/checkpoints/"
        ) as answer:
            return [
                item["name"].removeprefix("runs/a/checkpoints/")
                for item in json.load(answer)["items"]
            ]

    options: dict[str, Any] = {"directory": BUCKET, "keep": 2, "monitor": "test/score"}
    counting(path / "run", Scores((0.9, 0.1, 0.2, 0.3)), steps=4, **options)
    report: dict[str, Any] = {"saved": [entry.step for entry in list_entries(resolve_root(BUCKET))]}
    observed: list[float] = []

    class Look:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            observed.append(float(run.state.module.weight))

    start = engine(path / "best", Checkpointer(99), Look(), steps=1, log_every=None)
    start.fit(Counting, ZEROS, init_from=fg.CheckpointRef(BUCKET, "best"))
    report["best"] = observed[0]
    array = next(name for name in names() if name.startswith("step-4/arrays/state/d/"))
    request = (
        f"{address}/storage/v1/b/bucket/o/runs%2Fa%2Fcheckpoints%2F{array.replace('/', '%2F')}"
    )
    urllib.request.urlopen(urllib.request.Request(request, method="DELETE")).close()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = counting(path / "run", Scores((0.0, 0.0)), steps=5, resume="auto", **options)
    report["warned"] = [
        str(warning.message) for warning in warned if "damaged" in str(warning.message)
    ]
    report["resumed"] = float(result.module.weight)
    report["left"] = sorted({name.split("/")[0] for name in names()})
    # What tensorstore wrote is in the hashes too, though gcsfs did not write it.
    hashes = json.loads(
        (resolve_root(BUCKET) / "checkpoints" / "step-5" / "hashes-0.json").read_text()
    )
    there = {name.removeprefix("step-5/") for name in names() if name.startswith("step-5/")}
    report["unseen"] = sorted(there - set(hashes) - {"COMMIT", "hashes-0.json"})
    return report


if __name__ == "__main__":
    in_a_bucket(Path(sys.argv[1]))
