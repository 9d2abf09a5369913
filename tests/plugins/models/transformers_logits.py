"""Writes what transformers' own models compute of folders; run by a Python that has it.

python transformers_logits.py FOLDER

Each folder in FOLDER has `theirs` and `ours`, folders of one model, and `inputs.npy`. Beside these
come the logits of both, and `again`, which is `theirs` as transformers writes it, in shards. With
`prompts.json` there is `generated.json` too: what follows each prompt, without and with an end.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)


def main(folder: str) -> None:
    for case in sorted(Path(folder).iterdir()):
        inputs = torch.tensor(np.load(case / "inputs.npy"))
        for name in ("ours", "theirs"):
            model = load(case / name)
            if name == "theirs":
                model.save_pretrained(case / "again", max_shard_size="2KB")
            model = model.float().eval()
            with torch.no_grad():
                np.save(case / f"{name}.npy", model(inputs).logits.numpy())
        if (case / "prompts.json").exists():
            settings = json.loads((case / "prompts.json").read_text())
            rows = [generate(model, settings, end) for end in ([], settings["end"])]
            (case / "generated.json").write_text(json.dumps(rows))


def load(folder: Path) -> Any:
    is_image = AutoConfig.from_pretrained(folder).model_type == "vit"
    classes = AutoModelForImageClassification if is_image else AutoModelForCausalLM
    model, info = classes.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model


def generate(model: Any, settings: dict[str, Any], end: list[int]) -> list[list[int]]:
    """The most probable tokens after prompts that are padded on their left."""
    prompts = settings["prompts"]
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(row)) + row for row in prompts]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=settings["new"],
            do_sample=False,
            eos_token_id=end or None,
            pad_token_id=0,
        )
    rows = tokens[:, longest:].tolist()
    ends = [next((n for n, token in enumerate(row) if token in end), len(row)) for row in rows]
    return [row[: number + 1] for row, number in zip(rows, ends, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
