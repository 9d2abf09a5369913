# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-data",
#     "fulgurite-evaluators",
#     "fulgurite-logging",
#     "fulgurite-metrics",
#     "fulgurite-optimizers",
#     "jax",
#     "optax",
#     "tokenizers",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-data = { path = "../plugins/data", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-metrics = { path = "../plugins/metrics", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# ///
"""A small GPT on the source text of Python's standard library: a trained BPE, packed documents.

uv run examples/language_model.py --run runs/gpt                # installs what it needs; resumes
fulgurite data examples/language_model.py                       # what it trains on, and how fast
"""

import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run
from fulgurite_data import DataModule, TextFiles, Tokens, make_attention_mask, tokenize
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from fulgurite_metrics import Perplexity
from fulgurite_optimizers import GradientAccumulation, GradientClip
from tokenizers import ByteLevelBPETokenizer, Tokenizer

DOCUMENTS = TextFiles(sysconfig.get_paths()["stdlib"], "*.py")


@dataclass
class StandardLibrary(DataModule):
    """Python's own modules, of which ten are for validation."""

    folder: Path
    vocabulary: int
    length: int  # of a row
    batch_size: int

    def prepare(self):
        path = self.folder / "bpe.json"
        if not path.exists():  # two trainings may give two vocabularies: the first one holds
            tokenizer = ByteLevelBPETokenizer()
            tokenizer.train_from_iterator(DOCUMENTS, self.vocabulary, special_tokens=["<end>"])
            tokenizer.save(f"{path}.part")
            Path(f"{path}.part").rename(path)
        self.setup()  # which tokenizes what is not tokenized yet

    def setup(self):
        self.tokenizer = Tokenizer.from_file(str(self.folder / "bpe.json"))
        files = tokenize(DOCUMENTS, self.tokenizer, self.folder, end="<end>")
        documents = Tokens(files).shuffle(seed=0, reshuffle=False)
        self.validation = documents.take(10).pack(self.length + 1, how="split").take(512)
        self.training = documents.skip(10).pack(self.length + 1, how="split")

    def make_train(self):
        return self.training.shuffle().batch(self.batch_size, remainder="drop")

    def make_evaluations(self):
        return {"validation": self.validation.batch(self.batch_size, remainder="pad")}


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, *, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x, mask):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT(fg.Module):
    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    schedule: optax.Schedule = eqx.field(static=True)

    def __init__(self, vocabulary, length, width, depth, schedule, *, key):
        keys = jax.random.split(key, depth + 1)
        weights = 0.02 * jax.random.normal(keys[0], (vocabulary + length, width))
        self.embedding = eqx.nn.Embedding(weight=weights[:vocabulary])
        self.positions = eqx.nn.Embedding(weight=weights[vocabulary:])
        self.blocks = [Block(width, heads=4, key=key) for key in keys[1:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.schedule = schedule

    def __call__(self, tokens, segments, positions):
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(positions)
        for block in self.blocks:
            x = block(x, make_attention_mask(segments))
        return jax.vmap(self.norm)(x) @ self.embedding.weight.T

    def training_step(self, batch, ctx):
        tokens, segments, positions = batch["tokens"], batch["segments"], batch["positions"]
        logits = jax.vmap(self)(tokens[:, :-1], segments[:, :-1], positions[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        metrics = {"perplexity": Perplexity.from_logits(logits, tokens[:, 1:], counts)}
        return fg.Output(fg.metrics.Mean.from_values(losses, counts), metrics=metrics)

    def configure_optimizers(self):
        matrices = fg.select("*_proj.weight", "mlp.layers[*].weight")
        return optax.adamw(self.schedule, weight_decay=0.1, mask=matrices)


@eqx.filter_jit
def generate(model, prompt, key, number):
    """Return tokens that the model writes after a prompt."""

    def draw(context, key):
        logits = model(context, jnp.ones_like(context), jnp.arange(len(context)))
        token = jax.random.categorical(key, logits[-1])
        return jnp.append(context[1:], token), token

    return jax.lax.scan(draw, prompt, jax.random.split(key, number))[1]


def experiment(
    width: int = 128, depth: int = 4, length: int = 128, vocabulary: int = 4096,
    batch_size: int = 16, rate: float = 2e-3, steps: int = 1000, every: int = 100, seed: int = 0,
    cache: Path = Path("runs/standard-library"), run_dir: str | None = None,
) -> Experiment:  # fmt: skip
    """Train a GPT; `run_dir` is the value of --run."""
    data = StandardLibrary(cache / str(vocabulary), vocabulary, length, batch_size)

    def sample(run):
        prompt = data.validation.get(0)["tokens"][:length]
        tokens = generate(run.state.module, prompt, jax.random.key(0), 40)
        text = data.tokenizer.decode(tokens.tolist())
        run.log_text("sample", {"text": text})
        print(f"step {run.step}: {text!r}", flush=True)

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    plugins = [GradientAccumulation(2), GradientClip(1.0), fg.LambdaPlugin(every={every: sample})]
    plugins += [Evaluator("validation", data.evaluations["validation"], every=every)]
    if run_dir is not None:
        plugins += [Checkpointer(every=every, monitor="validation/loss"), JSONLLogger()]
    engine = fg.Engine(steps=steps, seed=seed, log_every=every, plugins=plugins)
    return Experiment(engine, partial(GPT, vocabulary, length, width, depth, schedule), data)


if __name__ == "__main__":
    run(experiment)
