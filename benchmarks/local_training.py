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
from fedpop.run.run import Run, Settings

NAME = "local training"
CLIENTS, EPOCHS = 1_000, 5
BATCHES = {50: ACTIVE, 10: 2}
"""Sizes of SGD's batches, and how many clients take part."""
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


def bare_sgd(model: fp.Composition, x: Tensor, y: Tensor, batch: int) -> Callable[[], None]:
    """As many forward, backward and SGD steps on the same images, laid out beforehand."""
    module = nn.Sequential(backbone(), nn.Linear(64, CLASSES))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    labels = y.flatten()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01)

    def steps() -> None:
        for start in range(0, len(images), batch):
            cut = slice(start, start + batch)
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
    first = ratio(small["loop"], small["batched"]) | {"target": SPEEDUP, "repeats": len(small["loop"])}
    setting = {"benchmark": NAME, "clients": CLIENTS, "epochs": EPOCHS, "model": "synthetic"}
    out = [record("bench", setting, "LocalSGD", 0, first, {}, {})]
    for i, batch in enumerate(BATCHES):
        out.append(_round(batch, lambda share, i=i: advance(0.2 + 0.8 * (i + share) / len(BATCHES))))
    return out


def _round(batch: int, advance: Advance) -> Record:
    """FedAvg's round over bare steps in the same batches."""
    active = BATCHES[batch]
    model = fp.Composition(backbone(), nn.Linear(64, CLASSES), "categorical")
    model = model.at_precision(model.chosen_precision())  # as a run has it
    x, y = random_images()
    federation = fp.Federation.of(list(zip(x, y, strict=True)))
    method = fp.FedAvg(model, local=fp.LocalSGD(1, 0.01, batch)).prepared(federation.example)
    federation = method.model.checked(federation)
    run = Run(method, federation, Settings(1000, 0, fp.participation.Uniform(active)))
    run.begin()
    steps = bare_sgd(model, x[:active], y[:active], batch)
    programs: dict[str, Callable[[], object]] = {"bare": steps, "round": run.train_round}
    laps = in_turns(programs, seconds=SECONDS[1], least=LEAST[1], advance=advance)
    metrics = ratio(laps["round"], laps["bare"]) | {"target": OVERHEAD, "repeats": len(laps["bare"])}
    setting = {"benchmark": NAME, "clients": active, "images": IMAGES, "batch": batch, "model": "cifar"}
    config = {"precision": precision(model), "threads": torch.get_num_threads()}
    return record("bench", setting, "FedAvg", 0, metrics, {}, config)


def tables(records: list[Record]) -> list[Table]:
    table = Table(title="Local training", caption="One thread; median and quartiles")
    for name in ("what", "ratio", "ratio, wall clock", "target"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for r in records:
        m, s, sign = r["metrics"], r["setting"], "at least" if r["method"] == "LocalSGD" else "at most"
        words = f"a loop over {s['clients']:,} clients over all side by side, synthetic model"
        if "batch" in s:
            words = (
                f"a round of {s['clients']} x {s['images']} images in batches of {s['batch']} over bare steps"
            )
        numbers = (shown(m, "ratio"), shown(m, "ratio_wall"), f"{sign} {m['target']:.2f}")
        table.add_row(words, *numbers)
    return [table]
