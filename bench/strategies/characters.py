"""Train a transformer on characters by DiLoCo, and by its variants that send fewer bytes.

    python -m bench.strategies.characters [METHOD ...] [--seeds 3] [--steps 600]

The text is the documentation of Python's language, which every installation of Python has
(`pydoc_data.topics`). The last tenth of it is the test text; each rank trains on a quarter of the
rest. All ranks run in one process (`gcnzc.exchange.lockstep`) with the same initial model and the
same minibatches in all methods.

A recorded line is a run: the loss and the accuracy of the next character on the test text, the
bytes that a rank sends in an exchange and in the run, and a digest of the text.
"""

import argparse
import hashlib
import math
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench import harness
from gcnzc.exchange import Algorithm, Group, Link, lockstep
from gcnzc.optim import Averaged, DiLoCo, DistributedOptimizer, MuLoCo, Muon, SparseLoCo

RANKS, BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 4, 8, 64, 64, 2, 4
LOCAL_STEPS = 12
LINK = Link(bytes_per_s=50e6 / 8)
LR = 0.003

Build = Callable[[nn.Module, Group], DistributedOptimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the update rule of the methods that do not use Muon."""
    return torch.optim.AdamW(model.parameters(), LR)


METHODS: dict[str, Build] = {
    "average": lambda model, group: Averaged(adamw(model), group),
    "DiLoCo": lambda model, group: DiLoCo(adamw(model), group, local_steps=LOCAL_STEPS),
    "SparseLoCo": lambda model, group: SparseLoCo(adamw(model), group, local_steps=LOCAL_STEPS),
    "MuLoCo": lambda model, group: MuLoCo(
        Muon(model.parameters(), LR, module=model), group, local_steps=LOCAL_STEPS
    ),
}


class Transformer(nn.Module):
    """A causal transformer.

    Args:
        num_characters: the size of the vocabulary.
    """

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next characters.

        Args:
            characters: int64 (batch, CONTEXT).

        Returns:
            (batch, CONTEXT, num_characters).
        """
        hidden = self.embedding(characters) + self.position
        return self.head(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="; ".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args(argv)
    if unknown := set(asked.methods) - set(METHODS):
        parser.error(f"no method {', '.join(sorted(unknown))}; use: {'; '.join(METHODS)}")
    torch.set_num_threads(1)
    text = "\n".join(topics[name] for name in sorted(topics))
    for seed in range(asked.seeds):
        for name in asked.methods or METHODS:
            _measure(name, text, seed, asked.steps)


def _measure(name: str, text: str, seed: int, steps: int) -> None:
    """Train the ranks of a method, and record the result."""
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([numbers[character] for character in text])
    num_test = len(codes) // 10
    torch.manual_seed(seed)
    initial = Transformer(len(alphabet)).state_dict()
    models = [Transformer(len(alphabet)) for _ in range(RANKS)]
    for model in models:
        model.load_state_dict(initial)
    optimizers = [METHODS[name](model, Group(rank, RANKS)) for rank, model in enumerate(models)]
    # the broadcast of the model is not counted
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    shards = codes[:-num_test].chunk(RANKS)
    outcome = lockstep(
        [
            _train(model, optimizer, shard, seed, steps)
            for model, optimizer, shard in zip(models, optimizers, shards, strict=True)
        ],
        LINK,
    )
    loss, accuracy = _test(models[0], codes[-num_test:])
    sent = sum(ledger.bytes_sent for ledger in outcome.ledgers) / RANKS
    interval = 1 if name == "average" else LOCAL_STEPS
    harness.record(
        "characters",
        {"method": name, "seed": seed, "ranks": RANKS, "mbit_per_s": 50, "steps": steps},
        parameters=sum(parameter.numel() for parameter in models[0].parameters()),
        characters=len(codes),
        text_sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
        loss=loss,
        accuracy=accuracy,
        sent_bytes=sent,
        bytes_per_exchange=sent / (steps // interval),
        exchange_s=max(outcome.seconds) / (steps // interval),
    )


def _train(
    model: nn.Module, optimizer: DistributedOptimizer, shard: Tensor, seed: int, steps: int
) -> Algorithm[None]:
    """Train one rank; the learning rate falls to a tenth on a half cosine."""
    generator = torch.Generator().manual_seed(1000 * seed + optimizer.group.rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        begins = torch.randint(len(shard) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([shard[begin : begin + CONTEXT + 1] for begin in begins.tolist()])
        optimizer.zero_grad()
        logits = model(windows[:, :-1])
        cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        yield from optimizer.algorithm()
    yield from optimizer.finalize_algorithm()


@torch.no_grad()
def _test(model: nn.Module, codes: Tensor) -> tuple[float, float]:
    """Return the mean loss, and the accuracy, of the next character."""
    model.eval()
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
    loss = accuracy = 0.0
    for batch in windows.split(64):
        logits = model(batch[:, :-1]).flatten(0, 1)
        classes = batch[:, 1:].flatten()
        loss += float(cross_entropy(logits, classes, reduction="sum"))
        accuracy += float((logits.argmax(dim=1) == classes).sum())
    return loss / (windows.shape[0] * CONTEXT), accuracy / (windows.shape[0] * CONTEXT)


if __name__ == "__main__":
    main()
