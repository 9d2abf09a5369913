"""Writes the logits of transformers' own model of a folder; run by a Python that has it.

python transformers_logits.py FOLDER INPUTS.npy OUTPUT.npy [NEW_TOKENS]
"""

import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)


def main(folder: str, inputs: str, output: str, new_tokens: str = "") -> None:
    is_image = AutoConfig.from_pretrained(folder).model_type == "vit"
    classes = AutoModelForImageClassification if is_image else AutoModelForCausalLM
    model, info = classes.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    batch = torch.tensor(np.load(inputs))
    with torch.no_grad():
        if new_tokens:
            result = model.eval().generate(
                batch, max_new_tokens=int(new_tokens), do_sample=False, eos_token_id=None
            )
        else:
            result = model.eval()(batch).logits
    np.save(output, result.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
