"""Media at MLflow are files."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite_logging import media
from fulgurite_mlflow import MLflowLogger
from PIL import Image


class Sound(fg.Media):
    """A medium that no logger knows."""


def test_media_are_files_by_name_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    run: Any = SimpleNamespace(
        run_dir=SimpleNamespace(path=folder), step=0, step_range=SimpleNamespace(start=0)
    )
    backend: Any = MLflowLogger("tests").open_backend(run, None)
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3, 1)
    values = {
        "samples": media.Images(pixels),  # pyright: ignore[reportArgumentType]
        "weight": media.Histogram(np.array([1, 3]), np.array([0.0, 1.0, 2.0])),  # pyright: ignore[reportArgumentType]
        "note": media.Text("so"),
        "figure": media.Figure(lambda values: 3, np.arange(2.0)),
        "sound": Sound(),
    }
    with pytest.warns(UserWarning, match="mlflow leaves") as caught:
        for step in (2, 4):
            backend.write(fg.Record("media", "test", step, values))
    assert ["figure" in str(caught[0].message), "sound" in str(caught[1].message)] == [True, True]
    assert len(caught) == 2
    backend.close()
    (artifacts,) = (tmp_path / "mlruns").glob("*/*/artifacts/test")
    with Image.open(artifacts / "samples" / "0000000004-001.png") as picture:
        assert np.array_equal(np.asarray(picture), pixels[1, ..., 0])
    counts = json.loads((artifacts / "weight" / "0000000002.json").read_text())
    assert counts == {"counts": [1, 3], "edges": [0.0, 1.0, 2.0]}
    assert (artifacts / "note" / "0000000004.txt").read_text() == "so"
