"""The front door of the one-machine runtime: rounds of any method over cohorts of clients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from fedpop.checked import Bytes, Count, OneOf, Seed, Whole, checked
from fedpop.errors import ConvergenceWarning, SettingsError, warn_user
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Said
from fedpop.federation.participation import resolve as resolve_participation
from fedpop.files import folder_named, write_json
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods.base import Algorithm, PopulationPrior, hierarchy_of, role_of, usual_participation
from fedpop.population import Population
from fedpop.precision import PRECISIONS
from fedpop.privacy.gaussian import Gaussian
from fedpop.run.callbacks import Callback
from fedpop.run.private import refuse
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from fedpop.run.stages import advice
from fedpop.server.robust import Robust


@checked
def fit(
    method: Algorithm,
    clients: Any,
    *,
    rounds: Count | None = None,
    seed: Seed = 0,
    participation: Said = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    memory: str | Bytes = "1GiB",
    checkpoint_every: Count = 50,
    restarts: Whole = 0,
    precision: Annotated[str, OneOf(*PRECISIONS)] | None = None,
    threads: Count | None = None,
    device: str | torch.device | None = None,
    sites: Mapping[str, Sequence[str]] | None = None,
    secure: bool | int = False,
    privacy: Gaussian | None = None,
    aggregate: Robust | None = None,
) -> Population:
    """Run a method on one machine and return the population it learned.

    Without ``rounds`` it runs until it has converged: in stages, each as long as all before it together,
    until theta is within 0.05 nats of a local optimum (for networks: until the training loss has stopped
    falling), 8,000 rounds at most. With ``rounds`` it runs so many. Either way the exact engine ends by
    itself once it is at an optimum. ``population.convergence`` and ``print(population)`` say whether that was
    enough, and a run of 100 rounds or more that stopped a nat or more too soon warns.

    Args:
        method: What to run, such as ``fp.FedSOUL(model)``; ``method.fit(clients, ...)`` is the same.
        clients: Their data: a list of (x, y), a mapping of names to (x, y) or to ``fp.Client``s, a list of
            torch Datasets, a ``fp.Table`` or a ``fp.Federation``.
        rounds: How many rounds; None (the default) until it has converged. A finished run goes on with
            ``out`` the same, ``resume=True`` and more of them: a further stage, in which steps start anew at
            full size and decrease towards the new end.
        seed: Of all random numbers, 0 to 2^64 - 1; the same one gives the same bits, with the same number
            of threads. 0 by default.
        participation: Who takes part in a round: None for everyone; a probability such as 0.1 for each
            client by itself (1.0 is everyone); a whole number such as 10 for that many, drawn without
            replacement; a mapping from names to probabilities; or a rule such as
            ``participation.Bernoulli({"anna": 0.1, ...})``.
        out: A folder for ``config.json``, ``metrics.jsonl``, ``result.json`` and checkpoints; None writes
            nothing. One process at a time can use it.
        resume: Go on from the checkpoints in ``out``, to the same bits; False refuses a folder with a run.
        callbacks: What happens between rounds, such as ``callbacks.EarlyStop()``.
        progress: Show a bar; None shows it on a terminal only.
        memory: What a round, or the final pass, may take beside the data, about; more is faster.
        checkpoint_every: Rounds between checkpoints, 50 by default; what is lost to a crash.
        restarts: Further runs from other random starts, of which the one with the best marginal likelihood is
            returned. 0 by default; try 3 where the likelihood has several optima.
        precision: That of the backbone: "float32", "bfloat16", or "auto" for whichever this machine is
            faster in; that of the model by default.
        threads: How many torch works with; None takes one, or as many as have enough to do and find an idle
            core, up to what torch was given. Sums over other numbers of threads differ in their last bits.
        device: Where to compute: "cpu", "cuda", "cuda:1", "mps"; where the model is by default. On "mps",
            which has no double precision, the network runs and nothing else.
        sites: Names of sites, each with those of its clients, which then send one message together; None
            has each client by itself.
        secure: Add messages up as secure sums do: as whole numbers, with participation weights from their
            sites, unseen one by one. The masks, which change no bit of a sum, are left out here. False by
            default; True is 32 bits an entry of a gradient, 16 may be given.
        privacy: ``fp.privacy.Gaussian(epsilon=4, delta=1e-6)`` has what is learned say little of the data of
            any one client; None by default.
        aggregate: What stands for the sum over messages where some may be hostile, such as
            ``fp.aggregates.TrimmedMean()``; None (the default) is the sum.

    >>> import torch, fedpop as fp
    >>> from torch import nn
    >>> x, y = torch.ones(4, 3), torch.zeros(4)
    >>> model = fp.Composition(nn.Linear(3, 1), nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> len(fp.fit(fp.FedSOUL(model), [(x, y), (x, y)], rounds=2))
    2
    """
    rule = usual_participation(method) if participation is None else resolve_participation(participation)
    if precision is not None:
        method = method.replace(model=method.model.asking_for(precision))
    model = method.model.on(method.model.initial_z().device if device is None else device)
    method = method if model is method.model else method.replace(model=model)
    settings = Settings(
        rounds,
        seed,
        rule,
        memory,
        checkpoint_every,
        threads,
        method.model.precision,
        sites,
        secure=fixed_point(secure),
        privacy=privacy,
        aggregate=aggregate,
    )
    if restarts:
        if privacy is not None:
            refuse("the likelihoods by which restarts are compared")
        check_restarts(method)
    federation = Federation.of(clients)
    if not federation.embedded:
        method = method.prepared(federation.example)
    federation = method.model.checked(federation)
    method.model.check_start(federation)
    federation = federation.kept_on(method.model.device)
    folder = None if out is None else folder_named(out)
    best: tuple[float, Population, Run] | None = None
    scores = []
    for restart in range(restarts + 1):
        where = folder / f"restart-{restart}" if folder is not None and restarts else folder
        called = copy.deepcopy(list(callbacks)) if restarts else list(callbacks)
        prior = role_of(method, PopulationPrior) if restart else None
        started = method if prior is None else prior.restarted()
        run = Run(started, federation, settings, where, called, restart)
        population = run.execute(resume=resume, progress=progress)
        if not restarts:
            return _warned(population, run)
        scores.append(population.log_likelihood().value)
        if best is None or scores[-1] > best[0]:
            best = (scores[-1], population, run)
    if folder is not None:
        write_json(folder / "restarts.json", {"log_likelihood": scores})
    assert best is not None
    return _warned(*best[1:])


def fixed_point(secure: bool | int) -> FixedPoint | None:
    """The form of secure sums that this asks for."""
    if isinstance(secure, bool):
        return FixedPoint() if secure else None
    return FixedPoint(secure)


def _warned(population: Population, run: Run) -> Population:
    """The population, with a warning where it is known to have ended too soon."""
    if words := advice(run):
        warn_user(words, ConvergenceWarning)
    return population


def check_restarts(method: Algorithm) -> None:
    """Raise unless runs of this method can be compared by their marginal likelihood."""
    hierarchy = hierarchy_of(method)
    if hierarchy is None:
        raise SettingsError(f"restarts are compared by marginal likelihood, which {method.label} has not")
    if not hierarchy.prior.normalised and method.model.z_layout.size > 2:
        raise SettingsError(
            "restarts are compared by marginal likelihood, which is computed for "
            f"{hierarchy.prior.name} priors when z has at most two dimensions"
        )
