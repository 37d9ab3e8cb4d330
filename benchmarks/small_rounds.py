"""What a small round costs beyond its arithmetic: FedSOUL's round of the synthetic task, and that by hand.

``by_hand`` is one torch function without a library around it: the same draws, the same posterior, scores and
gradient, the same steps of EM and Adam, the same annealing of the noise variance
(``tests/test_by_hand.py`` holds the two to the same theta). The fixed
cost of a round is that of two clients with one example each, where there is next to nothing to compute.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import torch
from rich.table import Table
from torch import Tensor

import fedpop as fp
from benchmarks.timing import Advance, Spread, in_turns, ratio, shown
from fedpop.data.synthetic import SyntheticTask
from fedpop.keys import Key
from fedpop.report.results import Record, record
from fedpop.run.run import Run, Settings

NAME = "small rounds"
BLOCK, SECONDS, LEAST = 25, 20.0, 8
STEPS, RATE, BETA1, BETA2 = 10, 0.1, 0.9, 0.99
VARIANCE, ANNEALED = SyntheticTask().variance, fp.steps.Anneal().rounds
RATIO_LIMIT, FIXED_LIMIT_MS = 2.5, 3.0


class Hand:
    """The server's theta and everyone's data, and rounds of them."""

    def __init__(self, run: Run) -> None:
        federation = run.federation
        cohort = federation.cohort(torch.arange(len(federation)), torch.device("cpu"))
        assert isinstance(cohort.x, Tensor)
        self.x, self.y = cohort.pad(cohort.x), cohort.pad(cohort.y).squeeze(-1)
        self.mask = torch.arange(cohort.longest) < cohort.sizes.unsqueeze(1)
        self.units = cohort.units
        self.start = max(VARIANCE, float(cohort.y.square().mean()) / 2)
        self.rounds, self.secret = run.settings.rounds, run.secret
        self.at(run)

    def at(self, run: Run) -> None:
        """Go on from where this run stands."""
        self.k, server = run.round, run.server
        self.phi, self.beta, self.unit = (server[n].clone() for n in ("phi", "beta", "unit"))
        self.first, self.second = (server[f"phi.{n}"].clone() for n in ("first", "second"))

    def round(self) -> None:
        variance = VARIANCE
        if self.k < ANNEALED:
            variance = self.start * (VARIANCE / self.start) ** (self.k / ANNEALED)
        k, rounds = max(self.k - ANNEALED, 0), self.rounds - ANNEALED
        self.phi, self.beta, self.first, self.second = by_hand(
            self.x, self.y, self.mask, self.units, self.phi, self.beta, self.unit, self.first, self.second,
            variance, self.secret.at(round=self.k, purpose="train"), k, rounds, self.k + 1,
        )  # fmt: skip
        self.k += 1


def by_hand(
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    units: Tensor,
    phi: Tensor,
    beta: Tensor,
    unit: Tensor,
    first: Tensor,
    second: Tensor,
    variance: float,
    key: Key,
    k: int,
    rounds: int,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One round for everyone: y = x' W' z + noise, z ~ N(mu, s^2 I), theta = (W, mu, log s)."""
    b, _, width = x.shape
    d = beta.shape[0] - 1
    mu, log_scale = beta[:d], beta[d]
    scale = log_scale.exp()
    phi = phi.detach().requires_grad_()
    features = x @ phi.reshape(d, width).mT  # with the graph to phi, for J
    f = features.detach()
    precision = (f.mT @ f) / variance + torch.eye(d) / scale**2
    root = torch.linalg.cholesky(precision.double())
    eye = torch.eye(d, dtype=torch.float64).expand_as(root)
    inverse = torch.linalg.solve_triangular(root, eye, upper=False).float()
    shift = torch.bmm(f.mT, ((y - f @ mu) * mask).unsqueeze(-1)) / variance
    mean = mu + (inverse.mT @ (inverse @ shift)).squeeze(-1)
    chain = key.at(purpose="chain").at(purpose="noise")
    noise = chain.normal(units, (1, d), torch.float32, 0, STEPS).squeeze(2)
    z = mean.unsqueeze(1) + noise @ inverse
    residual = (y.unsqueeze(-1) - torch.bmm(f, z.mT)) * mask.unsqueeze(-1)
    g = torch.bmm(residual.mT, f) / variance
    # I in its mixed form: A left + (1 - A) right, A = Lambda Q^-1.
    centred = z - mu
    cov = inverse.mT @ inverse
    gap = centred / scale**2 - g
    vector = g + gap - gap @ cov / scale**2
    share = d - cov.diagonal(dim1=-2, dim2=-1).sum(-1) / scale**2
    i_mu = vector.mean(1).sum(0)
    i_scale = ((centred * vector).sum(-1).mean(1) - share).sum()
    # J by one backward pass.
    fit = (y.unsqueeze(-1) - torch.bmm(features, z.mT)).square() * mask.unsqueeze(-1)
    constant = 0.5 * math.log(2 * math.pi * variance) * mask.sum()
    value = -0.5 * fit.sum((1, 2)).sum() / (variance * STEPS) - constant
    (j,) = torch.autograd.grad(value, phi)
    # EM on (mu, log s), Adam on W.
    curvature = float(f.square().sum()) / (variance * b)
    rate = fp.steps.EM().at(k, rounds)
    floor = 1 / curvature
    em_shift = rate * scale**2 * i_mu / b
    moved = torch.where(scale**2 >= floor, em_shift, rate * floor * i_mu / b)
    growth = (1 + rate * i_scale / (b * d) - (em_shift / scale).square().mean()).clamp(min=1e-2)
    new_beta = torch.cat((mu + moved, (log_scale + 0.5 * growth.log()).reshape(1)))
    first = BETA1 * first + (1 - BETA1) * j
    second = BETA2 * second + (1 - BETA2) * j.square()
    move = (first / (1 - BETA1**steps)) / (second / (1 - BETA2**steps)).sqrt()
    step = RATE * fp.steps.Decay().factor(k, rounds)
    return phi.detach() + step * unit * move, new_beta, first, second


def begun(task: SyntheticTask, local_steps: int) -> Run:
    """A run of FedSOUL's default before its first round; it is so long that no schedule falls."""
    federation = fp.Federation.of(task.make(seed=0).clients)
    method = fp.FedSOUL(task.model(seed=0), local_steps=local_steps, engine="sampled").prepared(
        federation.example
    )
    run = Run(method, method.model.checked(federation), Settings(100_000, 0, fp.participation.Everyone()))
    run.begin()
    run.totals.clear()
    return run


def measure(advance: Advance) -> list[Record]:
    task = SyntheticTask()
    ours, tiny = begun(task, STEPS), begun(replace(task, b=2, n_small=1, share_small=1.0), STEPS)
    hand = Hand(ours)

    def rounds(work: Run | Hand) -> None:
        for _ in range(BLOCK):
            work.train_round() if isinstance(work, Run) else work.round()

    programs = {"ours": lambda: rounds(ours), "by hand": lambda: rounds(hand), "fixed": lambda: rounds(tiny)}
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=advance)
    fixed = Spread.of([1000 * lap.cpu / BLOCK for lap in laps["fixed"]]).metrics("fixed_ms")
    each = Spread.of([1000 * lap.cpu / BLOCK for lap in laps["ours"]]).metrics("round_ms")
    metrics = ratio(laps["ours"], laps["by hand"]) | each | fixed | {"target": RATIO_LIMIT}
    sizes = {k: v for k, v in asdict(task).items() if k in ("b", "d", "k")}
    setting = {"benchmark": NAME, "local_steps": STEPS} | sizes
    cost = ours.totals | {"rounds": ours.round}
    return [record("bench", setting, "FedSOUL", 0, metrics, cost, ours.algorithm.describe())]


def tables(records: list[Record]) -> list[Table]:
    table = Table(title="A small round: 100 clients, M = 10", caption="Median and quartiles, processor time")
    limits = (f"over by hand (at most {RATIO_LIMIT})", f"fixed, ms (at most {FIXED_LIMIT_MS:g})")
    for name in ("round, ms", *limits):
        table.add_column(name, justify="right")
    for r in records:
        table.add_row(*(shown(r["metrics"], n) for n in ("round_ms", "ratio", "fixed_ms")))
    return [table]
