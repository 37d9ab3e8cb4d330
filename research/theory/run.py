"""The paper's theorem, measured: bias in gamma, noise of participation and compression, local steps.

One small task on which everything is known: y = a_i + w_i x' phi + noise, z_i = (w_i, a_i) ~ N(1/2, I). The
private intercept fixes the scale of z, so that theta is identified up to a sign (without it constant
Langevin steps would push log sigma up for ever, along a direction that changes no prediction). The
likelihood is closed-form, and so is the mean field of Algorithm 1 (``mean_field``): what is
measured has an exact counterpart. Each part is a job that gives records in the one format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedpop.client.local_sgd import LocalSGD
from fedpop.client.sampler import Chain
from fedpop.data.synthetic import SyntheticTask
from fedpop.evaluation.oracle import Optimum, everyone, exact_optimum, log_likelihood
from fedpop.federation.clients import Client, Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation.rules import Bernoulli
from fedpop.kernels import ULA
from fedpop.keys import Key
from fedpop.message.compressors import RandK
from fedpop.methods import FedAvg, FedSOUL
from fedpop.methods.base import Algorithm
from fedpop.methods.hierarchical import Hierarchical
from fedpop.models import likelihoods
from fedpop.models.composition import Composition
from fedpop.models.modules import blank
from fedpop.population import Population
from fedpop.priors.normal import Normal
from fedpop.report.results import Record, mean, record
from fedpop.run.callbacks import Callback
from fedpop.server.averaging import Averaging
from research.experiment import Asked, Job
from research.theory.mean_field import MeanField

NAME = "theory"
TASK = SyntheticTask(b=100, d=1, k=11, variance=1.0, held_out=1)
MEAN = 0.5
"""The population's mean, of both coordinates of z."""

STEPS = (0.08, 0.2, 0.4, 0.8)
"""c = gamma_i L_i."""
DECREASING = (0.8, 0.5)
"""c_k = 0.8 (1 + k)^-0.5."""
BIAS_POINTS = (*((c, 0.0) for c in STEPS), DECREASING)
LOCAL_STEPS = (1, 2, 5, 10, 20, 50)
NEAR = 0.05
"""Within 5 %: this share of the start's gap to the optimum is left."""


# --- the task and its exact optimum ----------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Data with a model that starts at given weights, and all clients as one cohort in double precision."""

    clients: list[Client]
    phi: Tensor
    model: Composition
    federation: Federation
    cohort: Cohort

    def optimum(self, method: Hierarchical) -> Optimum:
        """theta* from the truth on; what the prior holds fixed stays fixed."""
        d = self.model.z_layout.size
        beta = method.hierarchy.prior.init(torch.full((d,), MEAN, dtype=torch.float64), 1.0)
        return exact_optimum(method, self.federation, [(self.phi, beta)])

    def starting_at(self, phi: Tensor) -> Composition:
        """The model with its backbone at phi."""
        return build(TASK.k, phi.float(), self.model.initial_z())


def build(k: int, phi: Tensor, z: Tensor) -> Composition:
    """The linear model with these weights."""
    backbone = blank(nn.Linear, k, 1, bias=False)
    head = blank(nn.Linear, 1, 1, bias=True)
    with torch.no_grad():
        backbone.weight.copy_(phi.view(1, k))
        head.weight.copy_(z[:1].view(1, 1))
        head.bias.copy_(z[1:])
    return Composition(backbone, head, likelihoods.Normal(TASK.variance))


def problem(seed: int, b: int = TASK.b) -> Problem:
    """The task of one seed with b clients."""
    data = replace(TASK, b=b).make(seed)
    key = Key(seed, purpose="theory")
    intercepts = MEAN + key.at(purpose="intercept").normal(torch.arange(b), ())
    phi = data.phi[:, 0]
    clients = [
        Client(c.x, c.y + MEAN * (c.x.double() @ phi).float() + a)
        for c, a in zip(data.clients, intercepts, strict=True)
    ]
    start = key.at(purpose="start").normal(key.server(), (TASK.k + 2,))[0]
    model = build(TASK.k, start[: TASK.k] / TASK.k**0.5, start[TASK.k :])
    federation = model.checked(Federation.of(clients))
    return Problem(clients, phi, model, federation, everyone(FedSOUL.paper(model), federation))


@dataclass
class Path(Callback):
    """One number of the server's state after every round."""

    of: Callable[[dict[str, Tensor]], float]

    def __post_init__(self) -> None:
        self.values: list[float] = []

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        self.values.append(self.of(run.server))
        return False

    def marks(self, name: str, rounds: Sequence[int]) -> dict[str, float]:
        """``name@k``: the mean over the rounds k/2 to k, for each k that was reached."""
        there = [k for k in rounds if k <= len(self.values)]
        return {f"{name}@{k}": mean(self.values[k // 2 : k]) for k in there}


def theta_of(server: dict[str, Tensor]) -> Tensor:
    return torch.cat((server["phi"], server["beta"])).double()


def gap(task: Problem, method: Hierarchical, best: Optimum, theta: Tensor) -> float:
    """How far the log-likelihood at theta is below that of the optimum."""
    size = best.phi.shape[0]
    with torch.no_grad():
        return best.log_likelihood - float(log_likelihood(method, task.cohort, theta[:size], theta[size:]))


def entry(
    setting: dict[str, Any],
    seed: int,
    metrics: dict[str, float | None],
    population: Population,
    name: str = "FedSOUL-paper",
) -> list[Record]:
    cost = population.totals | {"rounds": population.rounds}
    return [record(NAME, setting, name, seed, metrics, cost, population.algorithm.describe())]


# --- the bias of Langevin steps: A(gamma) ----------------------------------------------------

BIAS: dict[str, Any] = {"rate": 1e-3, "power": 0.0, "local_steps": 20, "chain": Chain(chains=30, burn_in=0)}
"""Constant server steps and many chains: beside the bias there is little noise, averaged over a tail."""
BIAS_ROUNDS = 200
MARKS = (10, 20, 40, 80, 160, 200, 320)


def bias_setting(c: float, decay: float) -> dict[str, Any]:
    return {"part": "bias", "c": c, "decay": decay}


def bias_job(c: float, decay: float, seed: int) -> list[Record]:
    """FedSOUL.paper() from the optimum on: where theta settles, beside the root of its mean field."""
    task = problem(seed)
    prior = Normal(mean=MEAN, scale=1.0)
    best = task.optimum(FedSOUL.paper(task.model, prior=prior))
    method = FedSOUL.paper(
        task.starting_at(best.phi),
        prior=prior,
        kernel=ULA(c, decay),
        average=Averaging("tail", 0.5),
        **BIAS,
    )
    path = Path(lambda server: float(server["beta"][-1]) - float(best.beta[-1]))
    rounds = BIAS_ROUNDS if decay == 0 else MARKS[-1]
    population = method.fit(task.clients, rounds=rounds, seed=seed, callbacks=[path], progress=False)
    theta = torch.cat((best.phi, best.beta))
    field = MeanField(method, task.cohort)
    # Averages are over the second half of the rounds; of a decreasing step, that in its middle counts.
    root = field.root(theta, c * (0.75 * rounds) ** -decay)
    metrics: dict[str, float | None] = {}
    for name, where in (("", theta_of(population.published)), ("_root", root)):
        metrics["log_scale" + name] = float(where[-1] - theta[-1])
        metrics["log_phi" + name] = float((where[: TASK.k].norm() / best.phi.norm()).log())
        metrics["gap" + name] = gap(task, method, best, where)
    metrics |= path.marks("log_scale", MARKS)
    return entry(bias_setting(c, decay), seed, metrics, population)


# --- the noise of participation and compression ----------------------------------------------

NOISE_STEPS, NOISE_RATE, FALLING_RATE = 5, 2e-4, 1e-3
"""M, the constant step, and eta_0 of the decreasing one."""
KEPT = (
    (11, 1.0),
    (5, 1.0),
    (2, 1.0),
    (1, 1.0),
    (11, 0.2),
    (11, 0.1),
    (5, 0.5),
    (2, 0.25),
)
"""(entries kept by rand-k, probability of taking part)."""
NOISE_ROUNDS, NOISE_BURN_IN = 240, 60
VANISHING = ((11, 1.0), (2, 0.25))
POWER = 0.6
NOISE_POINTS = (*((k, p, 0.0) for k, p in KEPT), *((k, p, POWER) for k, p in VANISHING))
NOISE_MARKS = (20, 40, 80, 160, 240, 320, 640)


def noise_setting(kept: int, p: float, power: float) -> dict[str, Any]:
    omega = TASK.k / kept - 1
    return {"part": "noise", "kept": kept, "p": p, "power": power, "excess": (omega + 1) / p - 1}


def noise_job(kept: int, p: float, power: float, seed: int) -> list[Record]:
    """Squared distance of phi_k from where it is heading (beta fixed), as a share of norm(phi)^2."""
    task = problem(seed)
    fixed = Normal(mean=MEAN, scale=1.0, learn_mean=False, learn_scale=False)
    best = task.optimum(FedSOUL.paper(task.model, prior=fixed))
    method = FedSOUL.paper(
        task.starting_at(best.phi),
        prior=fixed,
        rate=FALLING_RATE if power else NOISE_RATE,
        power=power,
        local_steps=NOISE_STEPS,
        compressor=RandK(k=kept),
    )
    root = MeanField(method, task.cohort).root(torch.cat((best.phi, best.beta)), ULA().step_size)
    centre = root[: TASK.k]
    path = Path(
        lambda server: float((server["phi"].double() - centre).square().sum() / centre.square().sum())
    )
    rounds = NOISE_MARKS[-1] if power else NOISE_ROUNDS
    population = method.fit(
        task.clients,
        rounds=rounds,
        seed=seed,
        participation=Bernoulli(p, weights="inverse"),
        callbacks=[path],
        progress=False,
    )
    metrics: dict[str, float | None] = {"error": mean(path.values[NOISE_BURN_IN:])}
    metrics |= path.marks("error", NOISE_MARKS)
    return entry(noise_setting(kept, p, power), seed, metrics, population)


# --- local steps -----------------------------------------------------------------------------

PAPER, TRIAL = "FedSOUL-paper", "FedSOUL-paper, trial eta_0"
METHODS = (PAPER, TRIAL, "FedSOUL", "FedAvg")
ROUNDS = {PAPER: 150, TRIAL: 150, "FedSOUL": 60}
LOCAL_RATE, LOCAL_C = 1e-3, 0.4
"""One eta_0 for every M, where trial rounds find larger ones for larger M; and a step of the chains
at which their bias is far below 5 %."""
FEDAVG_RATE = 0.05
FEDAVG_ROUNDS = {1: 300, 2: 200, 5: 120, 10: 80, 20: 50, 50: 30}
"""Enough for its error to stand still."""


def local_setting(steps: int) -> dict[str, Any]:
    return {"part": "local steps", "M": steps}


def rounds_to(path: list[float], level: float) -> float | None:
    """The round from which on the path stays at the level or below; noise may cross it before."""
    above = max((k for k, value in enumerate(path) if not value <= level), default=-1) + 1
    return float(above + 1) if above < len(path) else None


def local_job(name: str, steps: int, seed: int) -> list[Record]:
    """Rounds until 5 % of the start's gap to the method's own optimum are left, and the share at the end."""
    task = problem(seed)
    if name == "FedAvg":
        method: Algorithm = FedAvg(task.model, local=LocalSGD(epochs=steps, rate=FEDAVG_RATE))
        of, start = pooled_gap(task)
        rounds = FEDAVG_ROUNDS[steps]
    else:
        rate = LOCAL_RATE if name == PAPER else None
        paper = FedSOUL.paper(task.model, rate=rate, kernel=ULA(LOCAL_C), local_steps=steps)
        method = FedSOUL(task.model, local_steps=steps, engine="sampled") if name == "FedSOUL" else paper
        rounds = ROUNDS[name]
        best = task.optimum(paper)
        theta = torch.cat((task.model.initial_phi(), paper.hierarchy.prior.init(torch.zeros(2), 1.0)))
        start = gap(task, paper, best, theta.double())
        of = lambda server: gap(task, paper, best, theta_of(server))  # noqa: E731
    path = Path(of)
    population = method.fit(task.clients, rounds=rounds, seed=seed, callbacks=[path], progress=False)
    shares = [value / start for value in path.values]
    metrics = {"rounds": rounds_to(shares, NEAR), "left": shares[-1]}
    return entry(local_setting(steps), seed, metrics, population, name)


def pooled_gap(task: Problem) -> tuple[Callable[[dict[str, Tensor]], float], float]:
    """FedAvg's objective, the mean squared error of one model for all, above its least-squares optimum."""
    x = torch.cat([torch.cat((c.x, torch.ones(len(c.y), 1)), 1) for c in task.clients]).double()
    y = torch.cat([c.y for c in task.clients]).double()

    def loss(w: Tensor) -> float:
        return float((y - x @ w).square().mean())

    lowest = loss(torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0])

    def of(server: dict[str, Tensor]) -> float:
        w = server["w"].double()
        return loss(torch.cat((w[: TASK.k] * w[TASK.k], w[TASK.k + 1 :]))) - lowest

    return of, of({"w": torch.cat((task.model.initial_phi(), task.model.initial_z()))})


# --- all of it -------------------------------------------------------------------------------


def jobs(asked: Asked) -> list[Job]:
    """Every job of the experiment, part by part."""
    paper = ("FedSOUL-paper",)
    out = []
    for seed in range(asked.seeds):
        for c, decay in BIAS_POINTS:
            setting = bias_setting(c, decay)
            label = f"bias, c = {c}{' decreasing' if decay else ''}, seed {seed}"
            out.append(Job(bias_job, (c, decay, seed), label, setting, seed, paper))
        for kept, p, power in NOISE_POINTS:
            setting = noise_setting(kept, p, power)
            label = f"noise, rand-{kept}, p = {p}{' decreasing' if power else ''}, seed {seed}"
            out.append(Job(noise_job, (kept, p, power, seed), label, setting, seed, paper))
        for steps in LOCAL_STEPS:
            for name in METHODS:
                label = f"local steps, {name}, M = {steps}, seed {seed}"
                out.append(Job(local_job, (name, steps, seed), label, local_setting(steps), seed, (name,)))
    return out
