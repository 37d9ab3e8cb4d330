"""Effective draws of each kernel, per gradient evaluation and per second.

First on a linear softmax head, whose curvature bound is the preconditioner; then on heads through vmap whose
inputs have different scales, with the mass matrix that adapts to each client and without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from arviz_stats.base import array_stats  # type: ignore[attr-defined]
from rich.table import Table
from torch import Tensor, nn

import fedpop as fp
from benchmarks.timing import Advance, Lap, Spread, lap
from fedpop.kernels import Kernel, Target, Tuning, run
from fedpop.keys import Key
from fedpop.models.likelihoods import Categorical
from fedpop.models.local import LinearLikelihood
from fedpop.report.results import Record, record

NAME = "kernels"
KERNELS: dict[str, Kernel] = {
    "HMC": fp.kernels.HMC(),
    "MALA": fp.kernels.MALA(),
    "Exponential(h=0.5)": fp.kernels.Exponential(h=0.5),
    "ULA": fp.kernels.ULA(),
}
SIZES = (500, 25, 1)
CLIENTS, CHAINS = 2, 4
FEATURES, CLASSES, OWN_CLASSES, INPUTS = 64, 10, 5, 20
SCALE = 0.54
"""Standard deviation of the prior: heads of this size make predictions that are neither flat nor sure."""

WARM_UP, BLOCK, BLOCKS = 1000, 250, 8
"""Gradient evaluations of every kernel: before counting, and per block of what counts."""
REFERENCE = 1500
"""Transitions of the long HMC run that the bias is measured against."""

VMAP_KERNELS: dict[str, Kernel] = {"HMC": fp.kernels.HMC(), "MALA": fp.kernels.MALA()}
RATIOS = (1.0, 30.0)
"""Scale of a head's last input over that of its first."""
WIDTH, ROWS, VMAP_BLOCKS = 8, 50, 4


def features(key: Key, rows: int) -> tuple[Tensor, Tensor]:
    """Correlated ReLU features ``[C, rows, 65]`` of clients with half of the classes, and labels."""
    ids, one = torch.arange(CLIENTS), key.server()
    shared = Key(0, purpose="bench")
    centres = shared.at(purpose="centres").normal(one, (CLASSES, 16))[0]
    mix = shared.at(purpose="mix").normal(one, (16, FEATURES))[0] / 4
    label = (key.at(purpose="y").uniform(ids, (rows,)) * OWN_CLASSES).long().clamp(max=OWN_CLASSES - 1)
    label = (label + ids[:, None]) % CLASSES
    latent = 0.6 * centres[label] + key.at(purpose="latent").normal(ids, (rows, 16))
    seen = 0.5 * torch.relu(latent @ mix + 0.3 * key.at(purpose="own").normal(ids, (rows, FEATURES)))
    return torch.cat((seen, torch.ones(CLIENTS, rows, 1)), -1), label


def posterior(rows: int) -> Target:
    x, label = features(Key(1, purpose="train"), rows)
    likelihood = Categorical()
    local = LinearLikelihood(x, likelihood.encode(label, CLASSES, x.dtype), None, likelihood, {})
    prior = fp.priors.Normal(scale=SCALE)
    return Target(local, prior, prior.init(torch.zeros(CLASSES * (FEATURES + 1)), SCALE))


@dataclass
class Chains:
    """One kernel on one posterior, run a block at a time."""

    kernel: Kernel
    target: Target
    key: Key
    z: Tensor
    mass: bool = False
    blocks: list[Tensor] = field(default_factory=list)
    laps: list[Lap] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        dimension = self.z.shape[-1] if self.mass else None
        self.tuning = Tuning.fresh(CLIENTS, self.kernel.initial_log_step, self.z, dimension)

    def warm_up(self) -> None:
        for part in range(WARM_UP // (10 * self.kernel.gradients_per_step)):
            self._run(10, f"warm-{part}", adapt=True)

    def block(self) -> None:
        self.laps.append(lap(self._block))

    def _block(self) -> None:
        steps = BLOCK // self.kernel.gradients_per_step
        draws, accepted = self._run(steps, f"block-{len(self.blocks)}", adapt=False)
        self.blocks.append(draws)
        self.acceptance.append(accepted)

    def _run(self, steps: int, purpose: str, adapt: bool) -> tuple[Tensor, float]:
        key, ids = self.key.at(purpose=purpose), torch.arange(CLIENTS)
        trace = run(self.kernel, self.target, self.z, self.tuning, steps, key, ids, adapt=adapt)
        self.z, self.tuning = trace.state.z, trace.tuning
        return trace.draws, float(trace.acceptance.mean())


@dataclass(frozen=True)
class Reference:
    """A long HMC run: where every kernel starts, and the mean of norm(z - mu)^2."""

    z: Tensor
    size: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, target: Target) -> Reference:
        key, d = Key(2, purpose="reference"), CLASSES * (FEATURES + 1)
        chains = Chains(fp.kernels.HMC(), target, key, SCALE * key.normal(torch.arange(CLIENTS), (CHAINS, d)))
        chains.warm_up()
        draws, _ = chains._run(REFERENCE, "draws", adapt=False)
        size = squared_size(draws)
        return cls(chains.z, size.mean((1, 2)), standard_error(size))


def squared_size(draws: Tensor) -> np.ndarray:
    """norm(z - mu)^2 of draws ``[C, M, K, d]`` as ``[C, K, M]``; mu is zero."""
    return draws.square().sum(-1).transpose(1, 2).numpy()


def probabilities(draws: Tensor) -> np.ndarray:
    """Class probabilities at some inputs, ``[C, K, M, inputs * classes]``."""
    x, _ = features(Key(3, purpose="test"), INPUTS)
    weight = draws.unflatten(-1, (CLASSES, FEATURES + 1))
    eta = torch.einsum("cnq,cmkoq->ckmno", x, weight)
    return torch.softmax(eta, -1).flatten(3).numpy()


def effective(draws: np.ndarray) -> np.ndarray:
    """Effective sample sizes of ``[C, K, M, ...]``."""
    return np.asarray(array_stats.ess(draws, chain_axis=1, draw_axis=2))


def standard_error(size: np.ndarray) -> np.ndarray:
    return np.asarray(size.std((1, 2)) / np.sqrt(effective(size)))


def measure(advance: Advance) -> list[Record]:
    first = measure_linear(lambda share: advance(0.5 * share))
    return first + measure_vmap(lambda share: advance(0.5 + 0.5 * share))


def measure_linear(advance: Advance) -> list[Record]:
    out = []
    for i, rows in enumerate(SIZES):
        target = posterior(rows)
        reference = Reference.of(target)
        key = Key(4, purpose="chains")
        all_chains = {name: Chains(k, target, key, reference.z) for name, k in KERNELS.items()}
        for chains in all_chains.values():
            chains.warm_up()
        for b in range(BLOCKS):
            for chains in all_chains.values():
                chains.block()
            advance((i + (b + 1) / BLOCKS) / len(SIZES))
        found = {name: summary(chains, reference) for name, chains in all_chains.items()}
        for name, metrics in found.items():
            for what in ("probability", "size"):
                key_ = f"{what}_per_second"
                metrics[f"{key_}_relative"] = metrics[key_] / found["HMC"][key_]
            setting = {"benchmark": NAME, "examples": rows, "dimensions": CLASSES * (FEATURES + 1)}
            seconds = sum(lap.wall for lap in all_chains[name].laps)
            cost = {"head_steps": BLOCK * BLOCKS * CHAINS * CLIENTS * rows, "seconds": seconds}
            config = {"clients": CLIENTS, "chains": CHAINS, "scale": SCALE}
            out.append(record("bench", setting, name, 0, metrics, cost, config))
    return out


def summary(chains: Chains, reference: Reference) -> dict[str, float]:
    draws = torch.cat(chains.blocks, 1)
    size = squared_size(draws)
    seconds = sum(lap.cpu for lap in chains.laps)
    # Per client and gradient evaluation of one of its chains; per second, of all chains together.
    counted = {
        "probability": np.median(effective(probabilities(draws)), axis=-1),
        "size": effective(size),
    }
    metrics = {"acceptance": float(np.mean(chains.acceptance))}
    for name, ess in counted.items():
        metrics[f"{name}_per_gradient"] = float(ess.mean()) / (BLOCK * BLOCKS * CHAINS)
        metrics[f"{name}_per_second"] = float(ess.sum()) / seconds
    metrics["bias"] = float((size.mean((1, 2)) / reference.size).mean()) - 1
    errors = (standard_error(size) ** 2 + reference.error**2) / reference.size**2
    metrics["bias_error"] = math.sqrt(float(errors.sum())) / CLIENTS
    speed = Spread.of([BLOCK * CHAINS * CLIENTS / lap.cpu for lap in chains.laps])
    return metrics | speed.metrics("gradients_per_second")


# --- heads through vmap ------------------------------------------------------------------------


class Scaled(nn.Module):
    """A module on inputs of different scales."""

    def __init__(self, inner: nn.Module, ratio: float) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.logspace(0, math.log10(ratio), WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.scale)
        return out


def vmap_model(head: str, ratio: float) -> fp.Composition:
    if head == "logistic":
        return fp.Composition(None, Scaled(nn.Linear(WIDTH, 1), ratio), "bernoulli")
    network = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3))
    return fp.Composition(None, Scaled(network, ratio), "categorical")


def vmap_posterior(model: fp.Composition, ratio: float) -> Target:
    """Clients whose labels come from a linear model in which every input matters as much."""
    key, ids = Key(5, purpose="vmap"), torch.arange(CLIENTS)
    x = key.at(purpose="x").normal(ids, (ROWS, WIDTH)) / math.sqrt(WIDTH)
    noise = key.at(purpose="noise").normal(ids, (ROWS,))
    score = x.sum(-1) + 0.5 * noise
    y = (score > 0).float() if model.outputs == 1 else (score > -0.5).long() + (score > 0.5).long()
    federation = fp.Federation.of(list(zip(x, y, strict=True)))
    model = model.prepared(federation.example)
    cohort = model.checked(federation).cohort(ids, x.device)
    prior = fp.priors.Normal(scale=1.0)
    local = model.bind(model.initial_phi(), cohort.x, cohort)
    return Target(local, prior, prior.init(torch.zeros(model.z_layout.size), 1.0))


def measure_vmap(advance: Advance) -> list[Record]:
    settings = [(head, ratio) for head in ("logistic", "network") for ratio in RATIOS]
    out = []
    for i, (head, ratio) in enumerate(settings):
        model = vmap_model(head, ratio)
        target = vmap_posterior(model, ratio)
        for name, kernel in VMAP_KERNELS.items():
            for mass in (False, True):
                key = Key(6, purpose="chains")
                start = key.at(purpose="start").normal(torch.arange(CLIENTS), (CHAINS, model.z_layout.size))
                chains = Chains(kernel, target, key, start, mass)
                with torch.no_grad():
                    chains.warm_up()
                    for _ in range(VMAP_BLOCKS):
                        chains.block()
                setting = {"benchmark": NAME, "head": head, "ratio": ratio, "dimensions": start.shape[-1]}
                seconds = sum(lap.wall for lap in chains.laps)
                cost = {"head_steps": BLOCK * VMAP_BLOCKS * CHAINS * CLIENTS * ROWS, "seconds": seconds}
                label = f"{name}, {'adapted mass' if mass else 'prior as mass'}"
                config = {"clients": CLIENTS, "chains": CHAINS, "examples": ROWS}
                out.append(record("bench", setting, label, 0, vmap_summary(chains, model), cost, config))
        advance((i + 1) / len(settings))
    return out


def vmap_summary(chains: Chains, model: fp.Composition) -> dict[str, float]:
    """Per gradient: effective draws of predicted probabilities (median and worst), of |z|^2 and of the worst
    coordinate; hidden units may be exchanged, so coordinates of a network mean little."""
    draws = torch.cat(chains.blocks, 1)
    x = Key(7, purpose="test").normal(Key(7).server(), (INPUTS, WIDTH))[0] / math.sqrt(WIDTH)
    with torch.no_grad():
        eta = model.outputs_at(model.initial_phi(), draws.flatten(0, 2), x)
    p = model.likelihood.mean(eta, {}).flatten(1)
    p = p.reshape(*draws.shape[:3], -1).transpose(1, 2)
    counted = {
        "probability": effective(p.numpy()),
        "size": effective(squared_size(draws))[..., None],
        "coordinate": effective(draws.transpose(1, 2).numpy()),
    }
    total = BLOCK * VMAP_BLOCKS * CHAINS
    metrics = {
        "acceptance": float(np.mean(chains.acceptance)),
        "probability_per_gradient": float(np.median(counted["probability"], -1).mean()) / total,
    }
    for name, ess in counted.items():
        metrics[f"worst_{name}_per_gradient"] = float(ess.min(-1).mean()) / total
    return metrics


def tables(records: list[Record]) -> list[Table]:
    linear = [r for r in records if "head" not in r["setting"]]
    through_vmap = [r for r in records if "head" in r["setting"]]
    return (linear_table(linear) if linear else []) + (vmap_table(through_vmap) if through_vmap else [])


def vmap_table(records: list[Record]) -> list[Table]:
    table = Table(
        title="Effective draws per gradient on heads through vmap",
        caption="Inputs differ in scale by the ratio. p: predicted probabilities, median and worst.",
    )
    for name in ("head", "ratio", "kernel", "acceptance", "p", "worst p", "|z|^2", "worst coordinate"):
        table.add_column(name, justify="left" if name in ("head", "kernel") else "right")
    for n, r in enumerate(records):
        s, m = r["setting"], r["metrics"]
        numbers = [m["probability_per_gradient"]]
        numbers += [m[f"worst_{what}_per_gradient"] for what in ("probability", "size", "coordinate")]
        last = n + 1 == len(records) or records[n + 1]["setting"] != s
        table.add_row(
            s["head"],
            f"{s['ratio']:g}",
            r["method"],
            f"{m['acceptance']:.2f}",
            *(f"{v:.4f}" for v in numbers),
            end_section=last,
        )
    return [table]


def linear_table(records: list[Record]) -> list[Table]:
    table = Table(
        title=f"Effective draws on a softmax head, {records[0]['setting']['dimensions']} dimensions",
        caption="For predicted probabilities p (median) and for |z - mu|^2. Per second: processor seconds "
        f"of {CLIENTS} clients with {CHAINS} chains each, and relative to HMC. Bias: mean of |z - mu|^2 "
        "relative to a long HMC run, with its Monte-Carlo error.",
    )
    for name in ("examples", "kernel", "acceptance"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for what in ("p", "|z - mu|^2"):
        for per in ("per gradient", "per second", "relative"):
            table.add_column(f"{what} {per}", justify="right")
    table.add_column("bias", justify="right")
    for r in records:
        m = r["metrics"]
        cells = [str(r["setting"]["examples"]), r["method"], f"{m['acceptance']:.2f}"]
        for what in ("probability", "size"):
            cells += [f"{m[f'{what}_per_gradient']:.4f}", f"{m[f'{what}_per_second']:.0f}"]
            cells.append(f"{m[f'{what}_per_second_relative']:.2f}")
        last = r["method"] == list(KERNELS)[-1]
        table.add_row(*cells, f"{100 * m['bias']:+.1f} ± {100 * m['bias_error']:.1f} %", end_section=last)
    return [table]
