"""Local training: batched over a cohort against a loop over clients, and FedAvg's round against bare SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor, nn

import fedpop as fp
from benchmarks.round import ACTIVE, CLASSES, IMAGES, backbone, precision, random_images
from benchmarks.timing import Advance, in_turns, ratio, shown
from fedpop.client.losses import joint_loss
from fedpop.data.synthetic import SyntheticTask
from fedpop.keys import Key
from fedpop.report.results import Record, record
from fedpop.runtime.run import Run, Settings

NAME = "local training"
CLIENTS, BATCH, EPOCHS = 1_000, 50, 5
SPEEDUP, OVERHEAD = 10.0, 1.15
SECONDS, LEAST = (10.0, 60.0), (5, 3)


def batched(sgd: fp.LocalSGD) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The same local epochs on the synthetic model for all clients side by side, and one after the other by
    torch.optim, as libraries do it."""
    task = SyntheticTask(b=CLIENTS)
    federation = fp.Federation.of(task.make(0).clients)
    model = task.model(0).prepared(federation.example)
    cohort = model.checked(federation).cohort(torch.arange(CLIENTS), torch.device("cpu"))
    w = torch.cat((model.initial_phi(), model.initial_z())).expand(CLIENTS, -1)
    loss = joint_loss(model, cohort.embedded)

    def side_by_side() -> Tensor:
        return sgd.run(loss, w, w[:, :0], cohort.x, cohort, Key(0)).w

    data = list(
        zip(cohort.x.split(cohort.sizes.tolist()), cohort.y.split(cohort.sizes.tolist()), strict=True)
    )
    module = nn.Sequential(nn.Linear(task.k, task.d, bias=False), nn.Linear(task.d, 1, bias=False))
    variance = task.variance

    def one_by_one() -> Tensor:
        out = torch.empty_like(w)
        for c, (x, y) in enumerate(data):
            nn.utils.vector_to_parameters(w[c].clone(), module.parameters())
            optimiser = torch.optim.SGD(module.parameters(), lr=sgd.rate)
            for _ in range(sgd.epochs):
                optimiser.zero_grad()
                ((module(x) - y).square().mean() / (2 * variance)).backward()
                optimiser.step()
            out[c] = nn.utils.parameters_to_vector(module.parameters()).detach()
        return out

    torch.testing.assert_close(side_by_side(), one_by_one(), rtol=1e-3, atol=1e-4)  # the same work
    return side_by_side, one_by_one


def bare_sgd(model: fp.Composition, x: Tensor, y: Tensor) -> Callable[[], None]:
    """As many forward, backward and SGD steps on the same images, laid out beforehand."""
    module = nn.Sequential(backbone(), nn.Linear(64, CLASSES))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    labels = y.flatten()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01)

    def steps() -> None:
        for start in range(0, len(images), BATCH):
            cut = slice(start, start + BATCH)
            optimiser.zero_grad()
            with torch.autocast("cpu", model.autocast, enabled=model.autocast is not None):
                logits = module(images[cut])
            nn.functional.cross_entropy(logits.float(), labels[cut]).backward()
            optimiser.step()

    return steps


def measure(advance: Advance) -> list[Record]:
    sgd = fp.LocalSGD(epochs=EPOCHS, rate=0.01)
    side_by_side, one_by_one = batched(sgd)
    small = in_turns({"batched": side_by_side, "loop": one_by_one}, seconds=SECONDS[0], least=LEAST[0])
    advance(0.2)
    model = fp.Composition(backbone(), nn.Linear(64, CLASSES), "categorical")
    model = model.at_precision(model.chosen_precision())  # as a run has it
    x, y = random_images()
    federation = fp.Federation.of(list(zip(x, y, strict=True)))
    method = fp.FedAvg(model, local=fp.LocalSGD(1, 0.01, BATCH)).prepared(federation.example)
    federation = method.model.checked(federation)
    run = Run(method, federation, Settings(1000, 0, fp.participation.Uniform(ACTIVE)))
    run.begin()
    programs: dict[str, Callable[[], object]] = {
        "bare": bare_sgd(model, x[:ACTIVE], y[:ACTIVE]),
        "round": run.train_round,
    }
    large = in_turns(
        programs,
        seconds=SECONDS[1],
        least=LEAST[1],
        advance=lambda share: advance(0.2 + 0.8 * share),
    )
    first = ratio(small["loop"], small["batched"]) | {"target": SPEEDUP, "repeats": len(small["loop"])}
    second = ratio(large["round"], large["bare"]) | {"target": OVERHEAD, "repeats": len(large["bare"])}
    first_setting = {"benchmark": NAME, "clients": CLIENTS, "epochs": EPOCHS, "model": "synthetic"}
    second_setting = {
        "benchmark": NAME,
        "clients": ACTIVE,
        "images": IMAGES,
        "batch": BATCH,
        "model": "cifar",
    }
    config = {"precision": precision(model), "threads": torch.get_num_threads()}
    return [
        record("bench", first_setting, "LocalSGD", 0, first, {}, {}),
        record("bench", second_setting, "FedAvg", 0, second, {}, config),
    ]


def tables(records: list[Record]) -> list[Table]:
    table = Table(title="Local training", caption="One thread; median and quartiles")
    for name in ("what", "ratio", "ratio, wall clock", "target"):
        table.add_column(name, justify="left" if name == "what" else "right")
    words = {
        "LocalSGD": f"a loop over {CLIENTS:,} clients over all side by side, synthetic model",
        "FedAvg": f"a round of {ACTIVE} x {IMAGES} images in batches of {BATCH} over bare SGD steps",
    }
    for r in records:
        m, sign = r["metrics"], "at least" if r["method"] == "LocalSGD" else "at most"
        numbers = (shown(m, "ratio"), shown(m, "ratio_wall"), f"{sign} {m['target']:.2f}")
        table.add_row(words[r["method"]], *numbers)
    return [table]
