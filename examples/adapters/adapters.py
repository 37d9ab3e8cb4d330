"""Low-rank adapters of a small transformer as the private part z; the rest is shared or frozen.

    pip install -r requirements.txt
    python adapters.py            # a BERT; python adapters.py gpt

The networks are made at random, so that nothing is downloaded. What a round costs is measured in
passes of the bare network, forward and backward, over the same examples.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import fedpop as fp

WORDS, LENGTH, CLASSES = 40, 8, 2


class Logits(nn.Module):
    """The module that fedpop sees: tensors in, one tensor of outputs out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return out


def network(kind: str, width: int = 64, seed: int = 0) -> nn.Module:
    """A transformer with adapters in its attention; .eval() turns off dropout that torch would draw."""
    torch.manual_seed(seed)  # noqa: TID251 - transformers draws its weights from the global state
    if kind == "bert":
        config: Any = BertConfig(
            vocab_size=WORDS, hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=2 * width, max_position_embeddings=LENGTH, num_labels=CLASSES,
        )  # fmt: skip
        base, targets = BertForSequenceClassification(config), ["query", "value"]
    else:
        config = GPT2Config(
            vocab_size=WORDS, n_embd=width, n_layer=2, n_head=2, n_positions=LENGTH, num_labels=CLASSES,
            pad_token_id=0,
        )  # fmt: skip
        base, targets = GPT2ForSequenceClassification(config), ["c_attn"]
    adapters = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=targets)
    return Logits(get_peft_model(base, adapters)).eval()


def clients(count: int, examples: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Sentences of words; every second client calls the others' first class its second."""
    found = []
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, WORDS, (examples, LENGTH), generator=g)
        mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (examples, 1), generator=g)).long()
        y = ((ids < WORDS // 2) & (torch.arange(LENGTH) < 3)).sum(1) >= 2
        found.append(({"input_ids": ids * mask, "attention_mask": mask}, (y ^ bool(i % 2)).long()))
    return found


def bare_pass(module: nn.Module, data: list[tuple[dict[str, Tensor], Tensor]]) -> float:
    """Processor seconds of a forward and a backward pass over everybody's examples."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for x, y in data:
            nn.functional.cross_entropy(module(**x), y).backward()
        best = min(best, time.process_time() - started)
    return best


def main(kind: str = "bert", count: int = 8, examples: int = 60, rounds: int = 60) -> dict[str, float]:
    everyone = clients(count, examples)
    train = [({n: v[: examples // 2] for n, v in x.items()}, y[: examples // 2]) for x, y in everyone]
    held_out = [({n: v[examples // 2 :] for n, v in x.items()}, y[examples // 2 :]) for x, y in everyone]
    body = network(kind)
    adapters = fp.Split(body, personal="*lora*", likelihood="categorical")
    final = fp.chains.Final(chains=2, draws=20, burn_in=10)
    spent: list[float] = []

    class Clock(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: Any) -> bool:
            spent.append(time.process_time())
            return False

    # The quick way: the frozen body's features, computed once, and a linear head of everyone's own.
    frozen = network(kind).requires_grad_(False)
    head_only = fp.Composition(frozen, nn.Linear(CLASSES, CLASSES), "categorical")
    found = {}
    for name, method, calls in (
        ("adapters", fp.FedSOUL(adapters, final=final), [Clock()]),
        ("head only", fp.FedSOUL(head_only), []),
    ):
        population = method.fit(train, rounds=rounds, threads=1, callbacks=calls, progress=False)
        right = [
            float((population.predict(i, x).probs.argmax(-1) == y).float().mean())
            for i, (x, y) in enumerate(held_out)
        ]
        found[name] = sum(right) / count
    steps = sorted(b - a for a, b in itertools.pairwise(spent[1:]))
    found["passes a round"] = steps[len(steps) // 2] / bare_pass(body, train)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, value in main(*sys.argv[1:2]).items():
        print(f"{name:<16}{value:.2f}")
