# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "fulgurite",
#     "fulgurite-checkpoint",
#     "fulgurite-evaluators",
#     "fulgurite-lora",
#     "fulgurite-models",
#     "fulgurite-optimizers",
#     "fulgurite-pretrained",
#     "huggingface-hub",
#     "jax",
#     "numpy",
#     "optax",
#     "tokenizers",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-lora = { path = "../contrib/lora", editable = true }
# fulgurite-models = { path = "../contrib/models", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# fulgurite-pretrained = { path = "../plugins/pretrained", editable = true }
# ///
"""Fine-tunes a language model of Hugging Face on Python code, by adapters of low rank.

uv run examples/finetune.py openai-community/gpt2 tuned    # a model on the hub, or a folder
python examples/finetune.py FOLDER tuned --steps 500 --run runs/tuned  # resumes if run again

`tuned` is a folder of the same kind, with the adapters merged into the weights: transformers reads
it as the first one.
"""

import argparse
import sysconfig
from pathlib import Path

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_lora import Lora, merge, remove_adapters
from fulgurite_models import Sampling, TextSamples, next_token_loss
from fulgurite_optimizers import GradientClip
from fulgurite_pretrained import find_folder, from_pretrained, save_pretrained

try:
    from tokenizers import Tokenizer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/finetune.py`, "
        "which installs what is listed at its top."
    ) from None

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TRAINING = ["argparse.py", "dataclasses.py", "inspect.py", "pathlib.py", "typing.py"]
TEST = ["functools.py"]
PROMPTS = ["def __init__(self", "    return "]


def read_rows(names: list[str], tokenizer: Tokenizer, length: int) -> np.ndarray:
    """Return the tokens of files as rows of equal length."""
    tokens = [tokenizer.encode((LIBRARY / name).read_text()).ids for name in names]
    joined = np.concatenate(tokens)
    return joined[: len(joined) // length * length].reshape(-1, length)


def main(
    source: str,
    target: Path,
    steps: int,
    length: int,
    rank: int,
    rate: float,
    run: Path | None,
) -> None:
    """Fine-tune the model of `source`, and write it to `target`."""
    folder = find_folder(source)
    model = from_pretrained(folder, dtype=jnp.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    training = fg.ArrayData(
        (read_rows(TRAINING, tokenizer, length),), 8, shuffle=True, remainder="drop"
    )
    test = fg.ArrayData((read_rows(TEST, tokenizer, length),), 8, remainder="pad")
    task = fg.Task(model, loss=next_token_loss, optimizer=optax.adamw(rate))
    samples = TextSamples(
        PROMPTS,
        every=fg.AtEnd(),
        encode=lambda text: tokenizer.encode(text).ids,
        decode=tokenizer.decode,
        max_new_tokens=16,
        sampling=Sampling(temperature=0.8, top_p=0.95),
    )
    plugins = [
        Lora("**.attention", rank=rank, scale=2.0),
        GradientClip(1.0),
        Evaluator("test", test, every=max(1, steps // 4)),
        samples,
        fg.LambdaPlugin(log_record=print_record),
    ]
    saving = [] if run is None else [Checkpointer(every=max(1, steps // 10), max_to_keep=1)]
    engine = fg.Engine(
        steps=steps, log_every=max(1, steps // 4), run_dir=run, plugins=[*plugins, *saving]
    )
    print(f"before  test loss {fg.Engine().evaluate(task, test)['loss']:.4f}")
    result = engine.fit(task, training, resume=None if run is None else "auto")
    tuned = remove_adapters(merge(result.module)).model
    save_pretrained(tuned, target, like=folder)
    again = fg.Task(from_pretrained(target), loss=next_token_loss)
    print(f"after   test loss {fg.Engine().evaluate(again, test)['loss']:.4f}")


def print_record(record: fg.Record) -> None:
    """Show what is measured and written while the adapters are trained."""
    if record.kind == "text":
        for number, text in record.values.items():
            print(f"sample  {PROMPTS[int(number)]!r} -> {text!r}")
    elif record.source in ("train", "test") and "loss" in record.values:
        print(f"step {record.step:>4}  {record.source} loss {record.values['loss']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="a folder, or the name of a model on the hub")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--run", type=Path, help="where checkpoints are saved, to resume from")
    main(**vars(parser.parse_args()))
