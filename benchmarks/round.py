"""A plain round of FedSOUL over one bare forward and backward of the same images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import fedpop as fp
from benchmarks.timing import Advance, Lap, Spread, in_turns, ratio, shown
from fedpop.kernels import Kernel
from fedpop.keys import Key
from fedpop.report.results import Record, record
from fedpop.run.run import Run, Settings

NAME = "round"
CLIENTS, ACTIVE, IMAGES, CLASSES = 8, 4, 500, 10
BATCH = 100
BATCHES = (64, 100, 250, 500)
SECONDS, LEAST = 150.0, 5


@dataclass(frozen=True)
class Case:
    """A kernel, its transitions per round, the ratio to stay below, what compresses J, and local epochs on
    phi (in batches of ``BATCH``), with the ratio to stay below in bfloat16.

    A round with a local epoch passes forward once more, for the chain: a third of a bare pass in float32, .36
    to .39 of one in bfloat16, whose backward passes gain more. Its steps cost 5 to 10 % more than bare ones,
    as FedAvg's do, and the chain a twentieth."""

    kernel: Kernel
    steps: int
    target: float
    compressor: fp.compressors.Compressor = fp.compressors.Identity()  # noqa: RUF009 (frozen, and without settings)
    epochs: int = 0
    rounded: float | None = None

    @property
    def setting(self) -> dict[str, Any]:
        gradients = self.steps * self.kernel.gradients_per_step
        name = self.kernel.name
        setting = {"benchmark": NAME, "kernel": name, "local_steps": self.steps, "gradients": gradients}
        if self.epochs:
            setting |= {"phi_epochs": self.epochs}
        return setting if self.compressor.identity else setting | {"compressor": self.compressor.name}

    @property
    def on_phi(self) -> dict[str, Any]:
        if not self.epochs:
            return {}
        local = fp.LocalSGD(epochs=self.epochs, rate=0.01, batch=BATCH)
        return {"phi_step": fp.steps.PhiStep(fp.steps.MeanMove(), local=local)}


CASES = (
    Case(fp.kernels.HMC(), 2, 1.10),
    Case(fp.kernels.ULA(), 10, 1.10),
    Case(fp.kernels.HMC(), 10, 1.25),
    Case(fp.kernels.HMC(), 10, 1.30, fp.compressors.QSGD()),
    Case(fp.kernels.HMC(), 2, 1.40, epochs=1, rounded=1.55),
)


def backbone() -> nn.Module:
    """The paper's network for CIFAR: 64 features of a 3 x 32 x 32 image."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU()),
    )


def random_images() -> tuple[Tensor, Tensor]:
    key, ids = Key(0, purpose="bench"), torch.arange(CLIENTS)
    x = key.at(purpose="x").normal(ids, (IMAGES, 3, 32, 32))
    y = key.at(purpose="y").uniform(ids, (IMAGES,)) * CLASSES
    return x, y.long().clamp(max=CLASSES - 1)


def bare(model: fp.Composition, x: Tensor, y: Tensor, batch: int) -> Callable[[], None]:
    """One forward and backward of all images, with inputs and weights laid out for it beforehand."""
    module = nn.Sequential(backbone(), nn.Linear(64, CLASSES))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    labels = y.flatten()

    def one_pass() -> None:
        module.zero_grad()
        for start in range(0, len(images), batch):
            cut = slice(start, start + batch)
            with torch.autocast("cpu", model.autocast, enabled=model.autocast is not None):
                logits = module(images[cut])
            nn.functional.cross_entropy(logits.float(), labels[cut], reduction="sum").backward()

    return one_pass


def begun(case: Case, model: fp.Composition, federation: fp.Federation) -> Run:
    settings = {"kernel": case.kernel, "local_steps": case.steps, "compressor": case.compressor}
    method = fp.FedSOUL(model, engine="sampled", batch=None, **settings, **case.on_phi)
    run = Run(method, federation, Settings(1000, 0, fp.participation.Uniform(ACTIVE)))
    run.begin()
    run.totals.clear()
    return run


def measure(advance: Advance) -> list[Record]:
    model = fp.Composition(backbone(), nn.Linear(64, CLASSES), "categorical")
    model = model.at_precision(model.chosen_precision())  # as a run has it
    x, y = random_images()
    federation = fp.Federation.of(list(zip(x, y, strict=True)))
    model = model.prepared(federation.example)
    federation = model.checked(federation)
    # The bare pass may choose its batch; the round has to follow the clients.
    few = {str(b): bare(model, x[:2], y[:2], b) for b in BATCHES}
    tried = in_turns(few, seconds=1.0, least=3)
    batch = int(min(tried, key=lambda name: median(lap.cpu for lap in tried[name])))
    runs = [begun(case, model, federation) for case in CASES]
    programs: dict[str, Callable[[], object]] = {"bare": bare(model, x[:ACTIVE], y[:ACTIVE], batch)}
    programs |= {str(i): run.train_round for i, run in enumerate(runs)}
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=advance)
    out = [bare_record(int(name), laps_, tried[str(batch)], model) for name, laps_ in tried.items()]
    for i, (case, run) in enumerate(zip(CASES, runs, strict=True)):
        limit = case.target if case.rounded is None or model.autocast is None else case.rounded
        metrics = ratio(laps[str(i)], laps["bare"]) | {"target": limit, "repeats": len(laps["bare"])}
        cost = {name: value / run.round for name, value in run.totals.items()} | {"rounds": 1}
        config = run.algorithm.describe() | {"bare_batch": batch, "precision": precision(model)}
        out.append(record("bench", case.setting, "FedSOUL", 0, metrics, cost, config))
    return out


def bare_record(batch: int, laps: list[Lap], fastest: list[Lap], model: fp.Composition) -> Record:
    """Images per second of a bare pass, and its time relative to the batch it was run with."""
    images = 2 * IMAGES
    speed = Spread.of([images / lap.cpu for lap in laps]).metrics("images_per_second")
    setting = {"benchmark": NAME, "batch": batch}
    cost = {"backbone_passes": images, "seconds": median(lap.wall for lap in laps)}
    config = {"precision": precision(model), "threads": torch.get_num_threads()}
    return record("bench", setting, "bare", 0, ratio(laps, fastest) | speed, cost, config)


def precision(model: fp.Composition) -> str:
    return str(model.autocast or model.dtype).removeprefix("torch.")


def tables(records: list[Record]) -> list[Table]:
    passes = [r for r in records if r["method"] == "bare"]
    rounds = [r for r in records if r["method"] == "FedSOUL"]
    config = rounds[0]["config"]
    table = Table(
        title=f"A round of FedSOUL over one bare forward and backward of the same {ACTIVE * IMAGES} images",
        caption=f"{config['precision']}, one thread; the bare pass in its fastest batches, of "
        f"{config['bare_batch']}; median and quartiles of {rounds[0]['metrics']['repeats']} turns",
    )
    for name in (
        "kernel",
        "compressor",
        "on phi",
        "transitions",
        "gradients",
        "ratio",
        "ratio, wall clock",
        "target",
    ):
        table.add_column(name, justify="left" if name in ("kernel", "compressor", "on phi") else "right")
    for r in rounds:
        s, m = r["setting"], r["metrics"]
        steps = f"{s['phi_epochs']} epoch" if "phi_epochs" in s else "1 gradient"
        counts = (s["kernel"], s.get("compressor", "-"), steps, str(s["local_steps"]), str(s["gradients"]))
        table.add_row(*counts, shown(m, "ratio"), shown(m, "ratio_wall"), f"{m['target']:.2f}")
    speeds = Table(title="The bare pass by its batch")
    for name in ("batch", "images per second", "time, relative"):
        speeds.add_column(name, justify="right")
    for r in passes:
        m = r["metrics"]
        speeds.add_row(str(r["setting"]["batch"]), shown(m, "images_per_second", 0), shown(m, "ratio"))
    return [table, speeds]
