"""A population with two clusters: which prior predicts clients that were never seen?

Normal, mixture and energy priors are learned by the same rounds of the same method from the same start, and
compared on new clients' predictive log-likelihood, without any data of theirs and with a few examples. phi is
identified only up to an invertible matrix, so they are compared by predictions. "Truth" is the mixture that
the data were drawn from: what no prior can beat but by luck.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Count, Positive, Whole
from fedpop.comparison.truth import held_out
from fedpop.data.synthetic import Synthetic, SyntheticTask
from fedpop.errors import SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.files import read_tensors
from fedpop.keys import Key
from fedpop.methods import FedSOUL
from fedpop.methods.hierarchical import Hierarchical
from fedpop.population import Population
from fedpop.priors.base import Prior
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import Normal
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, record, values
from research.experiment import Asked, Experiment, Job
from research.figures import contours, spread
from research.seeds import interval95

NAME = "clusters"
ROUNDS = 200
LOCAL_STEPS = 5
SHOTS = (0, 2, 5)
"""Examples that a new client has."""
NAMES = ("Normal", "Mixture", "Energy", "Truth")


@dataclass(frozen=True)
class ClusterTask(SyntheticTask):
    """y = x' phi z + noise with z from a mixture of Normals; ``new`` further clients are kept apart.

    >>> data, new = ClusterTask(b=4, new=2, k=3).split(seed=0)
    >>> len(data.clients), len(new.clients)
    (4, 2)
    """

    b: Count = 200
    centres: tuple[tuple[float, ...], ...] = ((1.5, 0.5), (-1.0, -1.0))
    weights: tuple[Positive, ...] = (0.6, 0.4)
    sd: Positive = 0.3
    new: Whole = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(len(c) != self.d for c in self.centres) or len(self.weights) != len(self.centres):
            raise SettingsError("every cluster needs a centre of d numbers and a weight")
        if abs(sum(self.weights) - 1) > 1e-9:
            raise SettingsError(f"weights add up to one, not to {sum(self.weights)}")

    def _effects(self, ids: Tensor, key: Key) -> Tensor:
        edges = torch.tensor(self.weights, dtype=torch.float64).cumsum(0)[:-1]
        chosen = (key.at(purpose="cluster").uniform(ids, (1,), torch.float64) > edges).sum(1)
        centres = torch.tensor(self.centres, dtype=torch.float64)
        out: Tensor = centres[chosen] + self.sd * key.normal(ids, (self.d,), torch.float64)
        return out

    def split(self, seed: int) -> tuple[Synthetic, Synthetic]:
        """Data to train on, and clients never seen; every one of the new has ``n_large`` examples."""
        small = round(self.share_small * self.b) / (self.b + self.new)
        drawn = replace(self, b=self.b + self.new, share_small=small).make(seed)
        parts = (slice(None, self.b), slice(self.b, None))
        known, new = (Synthetic(self, drawn.clients[s], drawn.phi, drawn.z[s]) for s in parts)
        return known, new


TASK = ClusterTask()


def setting_of(task: ClusterTask) -> dict[str, Any]:
    keys = ("b", "d", "k", "centres", "weights", "sd", "new", "share_small", "n_small", "n_large")
    plain: dict[str, Any] = json.loads(json.dumps(asdict(task)))  # tuples are lists in a file
    return {k: plain[k] for k in keys}


def prior_named(name: str, task: ClusterTask = TASK) -> Prior:
    return {
        "Normal": Normal(),
        "Mixture": Mixture(2),
        "Energy": Energy(),
        "Truth": Mixture(len(task.centres)),
    }[name]


def truth(task: ClusterTask, data: Synthetic, seed: int) -> Population:
    """The population that the data were drawn from."""
    method = FedSOUL(task.model(seed), prior=prior_named("Truth", task), engine="sampled")
    log_weights = torch.tensor(task.weights).log()
    parts = [torch.tensor([*centre, math.log(task.sd)]) for centre in task.centres]
    published = {"phi": data.phi.mT.reshape(-1).float(), "beta": torch.cat((log_weights, *parts))}
    return Population(method, published, Key(seed), method.model.checked(Federation.of(data.clients)))


def few_shot(population: Population, new: Synthetic, shots: int) -> dict[str, float]:
    """New clients' held-out log-likelihood and coverage, given so many examples of each."""
    if shots == 0:
        newcomer = population.new_client()
        return held_out(lambda i, x: newcomer.predict(x), new)
    clients = [Client(c.x[:shots], c.y[:shots]) for c in new.clients]
    federation = population.model.checked(Federation.of(clients))
    # What new_client(x, y) does, for all of them at once: nothing is trained or sent.
    key = population.key.at(purpose=f"new-{shots}")
    newcomers = Population(population.algorithm, population.published, key, federation).sample_all()
    return held_out(lambda i, x: newcomers.predict(i, x), new)


def scores(population: Population, data: Synthetic, new: Synthetic) -> dict[str, float]:
    """Predictive log-likelihood per example of clients in training and of new ones, and the marginal one."""
    known = held_out(lambda i, x: population.predict(i, x), data)
    out = {"log_likelihood": known["log_likelihood"], "coverage90": known["coverage90"]}
    for shots in SHOTS:
        found = few_shot(population, new, shots)
        out |= {
            f"log_likelihood_{shots}": found["log_likelihood"],
            f"coverage90_{shots}": found["coverage90"],
        }
    out["marginal"] = population.log_likelihood().value
    return out


def run_seed(
    task: ClusterTask,
    seed: int,
    folder: Path | None = None,
    rounds: int = ROUNDS,
    names: tuple[str, ...] = NAMES,
) -> list[Record]:
    """All priors on one draw of the task; what was learned is saved below ``folder``."""
    data, new = task.split(seed)
    records = []
    for name in names:
        if name == "Truth":
            population = truth(task, data, seed)
        else:
            method = FedSOUL(
                task.model(seed), prior=prior_named(name), local_steps=LOCAL_STEPS, engine="sampled"
            )
            population = method.fit(data.clients, rounds=rounds, seed=seed, progress=False)
        population.sample_all()
        cost = population.totals | {"rounds": population.rounds}
        config = population.algorithm.describe()
        metrics = scores(population, data, new)
        records.append(record(NAME, setting_of(task), name, seed, metrics, cost, config))
        if folder is not None:
            population.public().save(folder / "populations" / name)
    return records


def job(seed: int, folder: Path) -> list[Record]:
    """The records of one seed, for a worker process; the first one's populations are kept for the figure."""
    return run_seed(TASK, seed, folder if seed == 0 else None)


def jobs(asked: Asked) -> list[Job]:
    setting = setting_of(TASK)
    return [Job(job, (s, asked.folder), f"seed {s}", setting, s, NAMES) for s in range(asked.seeds)]


def density_in_true_coordinates(population: Population, phi: Tensor, points: Tensor) -> Tensor:
    """The learned prior's density (up to a constant) where the truth's z are ``points`` ``[G, d]``.

    phi_hat z_hat = phi z, so z_hat = pinv(phi_hat) phi z.
    """
    method = population.algorithm
    assert isinstance(method, Hierarchical)
    k, d = phi.shape
    learned = population.published["phi"][: k * d].reshape(d, k).mT.double()
    z = points @ (torch.linalg.pinv(learned) @ phi).mT
    beta = population.published["beta"].double()
    with torch.no_grad():
        log_density = method.hierarchy.prior.log_prob(beta, z)
    return (log_density - log_density.max()).exp()


# --- the report ----------------------------------------------------------------------------------

PAIRS = (("Mixture", "Normal"), ("Energy", "Normal"), ("Energy", "Mixture"), ("Truth", "Mixture"))
LEGEND = (
    "Predictive log-likelihood per held-out example, mean over seeds: of clients in training (known), and of "
    "clients never seen, without data and with a few examples of their own. 90 % cov.: share of held-out "
    "observations of new clients without data inside their 90 % interval. Truth: the population that the "
    "data came from."
)
PAIRED = (
    "Differences within a seed: their mean over seeds and Student's 95 % interval of it, in nats per example."
)


def means(results: Results) -> Sheet:
    """Means over seeds, prior by prior."""
    columns = (
        "prior",
        "seeds",
        "known",
        *(f"new, {shots}" for shots in SHOTS),
        "90 % cov.",
        "kB up",
        "sec.",
    )
    rows = []
    for name in NAMES:
        records = results.of(method=name)
        if not records:
            continue
        cells = [f"{mean(values(records, 'log_likelihood')):.3f}"]
        cells += [f"{mean(values(records, f'log_likelihood_{shots}')):.3f}" for shots in SHOTS]
        cost = [mean(values(records, key, "cost")) for key in ("bytes_up", "seconds")]
        cells += [f"{100 * mean(values(records, 'coverage90_0')):.1f} %"]
        cells += [f"{cost[0] / 1e3:.0f}", f"{cost[1]:.1f}"] if cost[0] else ["-", "-"]
        rows.append((name, str(len(records)), *cells))
    return Sheet(columns, rows)


def differences(results: Results, metric: str, first: str, second: str) -> list[float]:
    """Of one metric, seed by seed."""
    one, two = (
        {r["seed"]: r["metrics"][metric] for r in results.of(method=name)} for name in (first, second)
    )
    return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def difference_sheet(results: Results) -> Sheet:
    columns = ("difference", "seeds", *(f"new clients, {shots} examples" for shots in SHOTS))
    rows = []
    for first, second in PAIRS:
        cells = []
        for shots in SHOTS:
            found = differences(results, f"log_likelihood_{shots}", first, second)
            centre, low, high = interval95(found)
            cells.append(f"{centre:+.4f} [{low:+.4f}, {high:+.4f}]")
        rows.append((f"{first} - {second}", str(len(found)), *cells))
    return Sheet(columns, rows, frozenset({0, 1}))


LEARNED = (
    "Seed 0: true z of the clients trained on (dots), and the regions that hold 50 and 90 % of each learned "
    "prior, brought to the same coordinates through phi."
)
NONE_LEARNED = "There are no populations beside the records that learned from seed 0's data."


def prior_figures(folder: Path) -> list[Figure]:
    """The learned priors of seed 0 in the truth's coordinates, over the z of the clients trained on."""
    if not all((folder / "populations" / name).exists() for name in NAMES):
        return []
    data, _ = TASK.split(0)
    # Theta alone, on the experiment's own methods: the settings saved with it may be of another version.
    files = {n: next((folder / "populations" / n).glob("theta*.safetensors"), None) for n in NAMES}
    theta = {n: read_tensors(file) for n, file in files.items() if file is not None}
    if len(theta) < len(NAMES):
        return []
    if not torch.equal(theta["Truth"]["phi"], truth(TASK, data, 0).published["phi"]):
        return []  # of other data than are drawn now: there are no coordinates to bring them to
    line = torch.linspace(-4, 4, 161, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    points = torch.stack((x, y), -1).reshape(-1, 2)
    panels = {}
    for name in NAMES:
        method = FedSOUL(TASK.model(0), prior=prior_named(name), engine="sampled")
        population = Population(method, theta[name], Key(0), federation=None)
        panels[name] = density_in_true_coordinates(population, data.phi, points).reshape(x.shape).tolist()
    dots = [(float(z[0]), float(z[1])) for z in data.z]
    at = line.tolist()
    return [Figure(contours(name, found, at, at, dots), name) for name, found in panels.items()]


def sheets(results: Results) -> dict[str, Sheet]:
    return {
        "Over seeds": means(results),
        "Paired differences, with 95 % intervals": difference_sheet(results),
    }


def page(results: Results) -> Page:
    groups = {
        f"{shots} examples": {n: values(results.of(method=n), f"log_likelihood_{shots}") for n in NAMES}
        for shots in SHOTS
    }
    seeds = Figure(
        spread(groups, "a new client's own", "log-likelihood per example", log_y=False),
        "Every dot is a seed, the line the median.",
    )
    learned = prior_figures(results.folder)
    sections = [
        Section(
            "What each prior learned",
            LEARNED if learned else NONE_LEARNED,
            figures=learned,
            small=True,
        ),
        Section("New clients", LEGEND, sheet=means(results)),
        Section("Differences", PAIRED, sheet=difference_sheet(results)),
        Section("Seed by seed", figures=[seeds], wide=True),
    ]
    lead = (
        f"{TASK.b} clients, most with {TASK.n_small} examples, whose z come from two clusters; {TASK.new} "
        "further clients take no part in training. Three priors are learned by the same rounds of FedSOUL."
    )
    return Page("fedpop: a population with two clusters", lead, sections)


EXPERIMENT = Experiment(name=NAME, seeds=10, jobs=jobs, sheets=sheets, page=page)
