"""What ``fit`` returns: a population that answers questions about every client, old or new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Tensors
from fedpop.algorithms.fedsouk import FedSOUK, Final
from fedpop.client.local_steps import describe_steps
from fedpop.client.phi_gradient import PhiGradient
from fedpop.client.plan import Plan, parse_bytes, plan_for
from fedpop.client.store import LocalStore
from fedpop.errors import CheckpointError, DataError, EstimateError, SettingsError
from fedpop.evaluation import quadrature
from fedpop.evaluation.diagnostics import (
    ChainDiagnostics,
    Diagnostics,
    ThetaDiagnostics,
    gradient_ratio,
    rhat_and_ess,
)
from fedpop.evaluation.information import (
    closed_form_information,
    require_small,
    reweighted,
    theta_draws,
)
from fedpop.evaluation.marginal import WORST_SHAPE, LogLikelihood, closed_form, importance
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, as_inputs, map_inputs, narrowed, require_finite
from fedpop.files import read_json, read_tensors, writable_folder, write_json, write_tensors
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.flat import Layout
from fedpop.models.links import LinkedLayout
from fedpop.models.predictive import Predictive
from fedpop.priors.base import Prior
from fedpop.version import __version__

GROUP = 256
"""Clients that the final pass works on together, at most."""
MEMORY = "1GiB"
"""What it may take, about."""
DRAWS_PER_THETA = 10
NEWCOMER = 2**32 - 2
"""The id under which a client that was never in training draws."""


@dataclass(frozen=True)
class Posterior:
    """Draws of one client's z with theta fixed, ``[chains, n, d]``."""

    draws: Tensor
    layout: Layout

    def __repr__(self) -> str:
        chains, n, d = self.draws.shape
        return f"Posterior({chains} chains of {n} draws, {d} dimensions)"

    @property
    def flat(self) -> Tensor:
        """All draws, ``[L, d]``."""
        return self.draws.reshape(-1, self.draws.shape[-1])

    @property
    def mean(self) -> Tensor:
        return self.flat.mean(0)

    @property
    def sd(self) -> Tensor:
        return self.flat.std(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Equal-tailed credible interval of every coordinate."""
        if not 0 < level < 1:
            raise SettingsError(f"a credible level lies in (0, 1), not {level}")
        tail = (1 - level) / 2
        wanted = torch.tensor([tail, 1 - tail], dtype=self.draws.dtype, device=self.draws.device)
        low, high = torch.quantile(self.flat, wanted, dim=0)
        return low, high

    def named(self) -> dict[str, Tensor]:
        """Draws under the names of the head's parameters."""
        return self.layout.views(self.flat)


@dataclass(frozen=True)
class Newcomer:
    """A client that was not there in training: from the prior alone, or with its own few data."""

    algorithm: Algorithm
    published: Tensors
    personal: Tensors
    key: Key

    @property
    def posterior(self) -> Posterior:
        if "draws" not in self.personal:
            raise SettingsError(f"{self.algorithm.label} has a point estimate of z, not a posterior")
        return Posterior(self.personal["draws"][0], self.algorithm.model.z_layout)

    def predict(self, x: Any) -> Predictive:
        """The predictive distribution at new x."""
        x = _inputs(self.algorithm.model, x)
        return self.algorithm.predict(self.published, self.personal, x, self.key)


@dataclass(repr=False)
class Population:
    """theta, and each client's own model, made when it is asked for.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> clients = {"anna": (x, 2 * x[:, 0]), "ben": (x, 4 * x[:, 0])}
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    >>> population = fp.FedSOUL(model).fit(clients, rounds=50)
    >>> population
    Population(FedSOUL, 2 clients, 50 rounds)
    >>> low, high = population.predict("ben", [[1.0]]).interval(0.9)
    >>> bool(low < 4 < high)
    True
    >>> population.posterior("anna")
    Posterior(4 chains of 250 draws, 2 dimensions)
    >>> population.new_client().predict([[1.0]])  # nobody knows it yet: from the prior alone
    Predictive(1 examples, normal, from 1000 draws of z)
    """

    algorithm: Algorithm
    published: Tensors
    key: Key
    federation: Federation | None
    store: LocalStore | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    drift: float | None = None
    names: list[str] = field(default_factory=list)
    learned_from: int = 0
    """How many clients theta was learned from, also where they are not here."""
    _personal: dict[int, Tensors] = field(default_factory=dict, repr=False)
    _plan: Plan | None = field(default=None, repr=False)
    _thetas: list[tuple[Tensor, Tensor]] | None = field(default=None, repr=False)
    _theta_groups: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.federation is not None:
            self.names = list(self.federation.names)
        self.learned_from = self.learned_from or len(self.names)

    def __repr__(self) -> str:
        return f"Population({self.algorithm.label}, {self._whose}, {self.rounds} rounds)"

    @property
    def _whose(self) -> str:
        return f"{len(self)} clients" if self.names else f"theta alone, from {self.learned_from} clients"

    # --- theta -------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        return self.algorithm.model

    @property
    def phi(self) -> dict[str, Tensor]:
        """The fixed effect, under the names of the module's parameters."""
        return self.model.phi_layout.views(self.published["phi"])

    @property
    def typical(self) -> dict[str, Tensor]:
        """z at the prior's mean, under the names of its parameters (and on their natural scale)."""
        return self.model.z_layout.views(self.prior_mean)

    @property
    def prior_mean(self) -> Tensor:
        return self._fedsouk("a population prior").prior.summary(self.published["beta"], self.published)[0]

    @property
    def prior_sd(self) -> Tensor:
        """Marginal standard deviations of the population prior."""
        return self._fedsouk("a population prior").prior.summary(self.published["beta"], self.published)[1]

    def _fedsouk(self, what: str) -> FedSOUK:
        if not isinstance(self.algorithm, FedSOUK):
            raise SettingsError(f"{self.algorithm.label} has no {what.removeprefix('a ')}")
        return self.algorithm

    def __len__(self) -> int:
        return len(self.names)

    # --- clients -----------------------------------------------------------------------------

    def predict(self, client: str | int, x: Any, *, theta_uncertainty: bool = False) -> Predictive:
        """The predictive distribution of a client of the federation at x.

        Intervals are conditional on theta unless ``theta_uncertainty``, which draws theta from its
        asymptotic law (in closed form for linear heads with a normal likelihood, else from posterior draws,
        for models of up to 200 parameters).
        """
        i = self._index(client)
        inputs = _inputs(self.model, x)
        key = self.key.at(purpose=f"predict.{i}")
        if not theta_uncertainty:
            return self.algorithm.predict(self.published, self._model_of(i), inputs, key)
        with torch.no_grad():
            outputs = [
                self.model.outputs_at(phi, z[i % GROUP], inputs)
                for (phi, _), z in zip(self.theta_draws(), self._theta_models(i // GROUP), strict=True)
            ]
        drawn = [self.model.params(phi) for phi, _ in self.theta_draws()]
        params = {
            name: torch.stack([p[name] for p in drawn]).repeat_interleave(len(outputs[0]))[:, None, None]
            for name in drawn[0]
        }
        return Predictive(torch.cat(outputs), self.model.likelihood, params, key, plug_in=False)

    def _theta_models(self, group: int) -> list[Tensor]:
        """For each theta drawn, draws of z ``[C, L, d]`` of a group of clients; computed once."""
        if group not in self._theta_groups:
            method = self._fedsouk("uncertainty about theta")
            ids = torch.arange(group * GROUP, min((group + 1) * GROUP, len(self)))
            cohort = self._cohort(ids)
            models: list[Tensor] = []
            if not closed_form_information(method):
                self._theta_groups[group] = self._resampled(method, ids, cohort)
                return self._theta_groups[group]
            with torch.no_grad():
                for t, (phi, beta) in enumerate(self.theta_draws()):
                    target = method.target(phi, beta, self.model.features(phi, cohort), cohort)
                    mean, cov = target.moments()
                    root = torch.linalg.cholesky(cov.double()).to(mean.dtype)
                    key = self.key.at(purpose=f"theta.{t}")
                    noise = key.normal(cohort.ids, (DRAWS_PER_THETA, mean.shape[1]), mean.dtype)
                    models.append(mean.unsqueeze(1) + noise @ root.mT)
            self._theta_groups[group] = models
        return self._theta_groups[group]

    def _resampled(self, method: FedSOUK, ids: Tensor, cohort: Cohort) -> list[Tensor]:
        """For each theta drawn, draws of z out of those at the returned theta, weighted anew."""
        self._personalise(ids)
        draws = self._flat_draws(ids)
        models, sizes = [], []
        with torch.no_grad():
            for t, theta in enumerate(self.theta_draws()):
                uniform = self.key.at(purpose=f"theta.{t}").uniform(cohort.ids, (DRAWS_PER_THETA,))
                z, size = reweighted(method, self.published, theta, cohort, draws, uniform)
                models.append(z)
                sizes.append(size.cpu())
        usual = torch.stack(sizes).quantile(0.1, dim=0)
        if float(usual.min()) < DRAWS_PER_THETA:
            name = self.names[int(ids[int(usual.argmin())])]
            raise EstimateError(
                f"theta is so uncertain that the posterior of client {name!r} moves out of its own draws "
                f"({float(usual.min()):.1f} of {draws.shape[1]} still count): theta_uncertainty needs more "
                "clients or fewer parameters"
            )
        return models

    def _flat_draws(self, ids: Tensor) -> Tensor:
        """Posterior draws of these clients, ``[C, L, d]``."""
        return torch.cat([self._personal[i]["draws"] for i in ids.tolist()]).flatten(1, 2)

    def theta_draws(self) -> list[tuple[Tensor, Tensor]]:
        """Draws of theta from its asymptotic normal law; computed once."""
        if self._thetas is None:
            method = self._fedsouk("uncertainty about theta")
            require_small(method, self.published["beta"])
            self._thetas = theta_draws(method, self.published, self._information_parts(method), self.key)
        return self._thetas

    def _information_parts(self, method: FedSOUK) -> Iterator[tuple[Cohort, Tensor | None]]:
        for ids in self._groups():
            if closed_form_information(method):
                yield self._cohort(ids), None
            else:
                self._personalise(ids)
                yield self._cohort(ids), self._flat_draws(ids)

    def sample_all(self) -> Population:
        """Run the final pass for every client now, many at a time, rather than when one is asked for."""
        for ids in self._groups():
            self._personalise(ids)
        return self

    def held_out(self, split: str) -> Iterator[tuple[int, Predictive | None, Tensor]]:
        """For every client that has examples in this split: its position, the predictive distribution of
        these examples (None where the method has no model for this client) and their targets."""
        if self.federation is None or split not in self.federation.splits:
            raise DataError(f"there are no {split} data here to be judged on")
        sizes, method = self.federation.splits[split].sizes, self.algorithm
        if self.federation.embedded:  # what is held are features already
            method = method.but(model=self.model.on_features())
        device = self.published["phi"].device
        with suppress(DataError):  # somebody cannot be served: one at a time tells who
            self.sample_all()
        for i in (sizes > 0).nonzero().squeeze(1).tolist():
            own = self.federation.cohort(torch.tensor([i]), torch.ones(1), device, split)
            key = self.key.at(purpose=f"predict.{i}")
            try:
                yield i, method.predict(self.published, self._model_of(i), own.x, key), own.y
            except DataError:
                yield i, None, own.y

    def posterior(self, client: str | int) -> Posterior:
        """Draws from p(z | D_i, theta): a pass of its own, with theta frozen at the returned value."""
        self._fedsouk("posterior of z")
        return Posterior(self._model_of(self._index(client))["draws"][0], self.model.z_layout)

    def personal(self, client: str | int) -> dict[str, Tensor]:
        """The client's head parameters: the posterior mean, or the point estimate."""
        state = self._model_of(self._index(client))
        if "draws" not in state:
            return self.model.z_layout.views(state["z"][0])
        return {n: v.mean((0, 1)) for n, v in self.model.z_layout.views(state["draws"][0]).items()}

    def new_client(self, x: Any = None, y: Any = None) -> Newcomer:
        """A client never seen before: nothing is trained or sent.

        Without data its z is drawn from the population prior; with a few examples, from its posterior
        with theta fixed.
        """
        if (x is None) != (y is None):
            raise DataError("a new client needs both x and y, or neither")
        key = self.key.at(purpose="newcomer")
        if x is None and isinstance(self.algorithm, FedSOUK):
            ids = torch.full((1,), NEWCOMER, device=self.published["phi"].device)
            beta, states, final = self.published["beta"], self.published.get("states"), self.algorithm.final
            z = self.algorithm.prior.final_draws(beta, ids, key, final.total, states)
            prior = {"draws": z.unflatten(1, (final.chains, final.draws))}
            return Newcomer(self.algorithm, self.published, prior, key)
        if x is None:
            cohort = self._empty_cohort()
        else:
            one = self.model.prepare(Federation.of({"the new client": (x, y)}))
            cohort = self._single(one)
        personal = self.algorithm.personalise(self.published, cohort, None, key)
        return Newcomer(self.algorithm, self.published, personal, key)

    def _single(self, federation: Federation) -> Cohort:
        device = self.published["phi"].device
        cohort = federation.cohort(torch.tensor([0]), torch.ones(1), device)
        ids = torch.full_like(cohort.ids, NEWCOMER)
        return Cohort(ids, cohort.sizes, cohort.x, cohort.y, cohort.weights, cohort.longest, cohort.embedded)

    def _empty_cohort(self) -> Cohort:
        none = torch.zeros(1, dtype=torch.int64, device=self.published["phi"].device)
        rows = self.published["phi"].new_zeros(0)
        return Cohort(torch.full_like(none, NEWCOMER), none, rows, rows, rows.new_ones(1), 0)

    def _index(self, client: str | int) -> int:
        if self.federation is not None:
            return self.federation.index(client)
        if str(client) in self.names:
            return self.names.index(str(client))
        if isinstance(client, int) and -len(self.names) <= client < len(self.names):
            return client % len(self.names)
        raise DataError(f"no client {client!r} in this population of {len(self.names)}")

    def _model_of(self, i: int) -> Tensors:
        if i not in self._personal:
            self._personalise(torch.tensor([i]))
        return self._personal[i]

    def _personalise(self, ids: Tensor) -> None:
        """The final pass for these clients, as one cohort."""
        missing = torch.tensor([i for i in ids.tolist() if i not in self._personal], dtype=torch.int64)
        if not len(missing):
            return
        if self.federation is None:
            name = self.names[int(missing[0])]
            raise CheckpointError(
                f"nothing was saved for client {name!r} and there are no data to sample from; load the "
                "population with clients=..."
            )
        # Clients with a state and clients without go apart: what is made for one depends on no other.
        seen = torch.zeros_like(missing, dtype=torch.bool) if self.store is None else self.store.seen(missing)
        for part in (*self._cut(missing[seen]), *self._cut(missing[~seen])):
            if not len(part):
                continue
            cohort = self._cohort(part)
            local = None
            if self.store is not None and bool(self.store.seen(part).all()):
                local = self.store.get(part, self.published["phi"].device)
            result = self.algorithm.personalise(self.published, cohort, local, self.key)
            for row, i in enumerate(part.tolist()):
                self._personal[i] = {n: t[row : row + 1] for n, t in result.items()}

    def _cohort(self, ids: Tensor) -> Cohort:
        if self.federation is None:
            raise CheckpointError("this needs the clients' data; load the population with clients=...")
        device = self.published["phi"].device
        return self.federation.cohort(ids, torch.ones(len(ids)), device)

    def _groups(self, limit: int | None = None) -> Iterator[Tensor]:
        ids = torch.arange(len(self))
        if limit is not None and len(ids) > limit:
            ids = ids[torch.linspace(0, len(ids) - 1, limit).long()]
        yield from self._cut(ids)

    def _cut(self, ids: Tensor) -> list[Tensor]:
        """Groups of clients whose final pass, or diagnostics, fit the memory budget together."""
        if self.federation is None:
            return list(ids.split(GROUP))
        if self._plan is None:
            base = plan_for(self.algorithm, self.federation, parse_bytes(MEMORY))
            draws, item = (
                getattr(self.algorithm, "final", Final()).total,
                self.published["phi"].element_size(),
            )
            # Draws with their gradients and proposals; head outputs of all draws, or what a head through
            # vmap keeps of the eighth that diagnostics differentiate at a time.
            per_client = 10.0 * item * draws * self.model.z_layout.size
            per_row = base.per_row + max(item * draws * self.model.outputs, base.per_draw * draws / 8)
            self._plan = Plan(per_row, per_client, base.budget)
        sizes = self.federation.train.sizes
        return [part for block in ids.split(GROUP) for part in self._plan.cut(block, sizes)]

    # --- how well ----------------------------------------------------------------------------

    def log_likelihood(self) -> LogLikelihood:
        """The marginal log-likelihood of all clients at the returned theta, with its error."""
        method = self._fedsouk("marginal likelihood")
        phi, beta = self.published["phi"], self.published["beta"]
        value, variance, shapes = 0.0, 0.0, []
        exact = "closed form" if method.prior.normalised else "quadrature"
        with torch.no_grad():
            for ids in self._groups():
                cohort = self._cohort(ids)
                target = method.target(phi, beta, self.model.features(phi, cohort), cohort)
                if target.closed_form:
                    value += float(closed_form(target).double().sum())
                    continue
                if not method.prior.normalised:
                    value += float(quadrature.evidence(target, len(cohort)).sum())
                    continue
                exact = ""
                self._personalise(ids)
                draws = self._flat_draws(ids)
                estimate, error, shape = importance(target, draws, self.key, cohort.ids)
                filled = cohort.sizes > 0
                value += float(estimate[filled].sum())
                variance += float(error[filled].square().sum())
                shapes += [
                    (self.names[i], float(k))
                    for i, k, f in zip(ids.tolist(), shape, filled.tolist(), strict=True)
                    if f
                ]
        if exact:
            return LogLikelihood(value, 0.0, exact)
        failed = [(name, k) for name, k in shapes if not k <= WORST_SHAPE]
        if failed:
            worst = max(failed, key=lambda pair: pair[1])
            raise EstimateError(
                f"importance sampling fails for {len(failed)} client(s), worst {worst[0]!r} with Pareto "
                f"shape {worst[1]:.2f} (above {WORST_SHAPE}): z has {self.model.z_layout.size} "
                "dimensions, and no simple proposal covers its posterior"
            )
        return LogLikelihood(value, variance**0.5, "importance sampling")

    def diagnostics(self, limit: int = 1000) -> Diagnostics:
        """R-hat and ESS of the final pass over (at most ``limit``) clients, and theta's gradient, which
        needs all clients and is left out when there are more."""
        method = self._fedsouk("chains")
        names, rhats, esses = [], [], []
        batches = 8
        i_total: list[Tensor] = []
        j_total: list[Tensor] = []
        phi = self.published["phi"].detach().requires_grad_(self.published["phi"].numel() > 0)
        beta = self.published["beta"]
        for ids in self._groups(limit):
            self._personalise(ids)
            draws = torch.cat([self._personal[i]["draws"] for i in ids.tolist()])
            for i, own in zip(ids.tolist(), draws, strict=True):
                rhat, ess = rhat_and_ess(own)
                names.append(self.names[i])
                rhats.append(rhat)
                esses.append(ess)
            cohort = self._cohort(ids)
            parts = torch.cat(draws.chunk(2, dim=2), dim=1)  # half-chains as batches
            good = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
            for b in range(batches):
                part = parts[:, b]
                estimate = PhiGradient(self.model, None, part)
                features = self.model.features(phi, cohort)
                _, j = estimate.fused(phi, features, cohort, None, good)
                score = method.prior.score(beta, part, part, "left").sum(0)
                i_grad = method.prior.gradient(beta, score)
                if len(j_total) <= b:
                    i_total.append(torch.zeros_like(i_grad))
                    j_total.append(torch.zeros_like(j))
                i_total[b] = i_total[b] + i_grad
                j_total[b] = j_total[b] + j
        hyper_phi = method.hyperprior.phi_grad(phi.detach())
        hyper_beta = method.prior.mask(method.hyperprior.beta_grad(method.prior, beta))
        key = self.key.at(purpose="diagnostics")
        lacking = method.prior.normaliser_batches(beta, self.published, key, batches) * len(self)
        i_all = torch.stack(i_total) + method.prior.mask(lacking) + hyper_beta
        whole = len(names) == len(self)
        learned = whole and phi.numel() > 0
        theta = ThetaDiagnostics(
            phi_gradient=gradient_ratio(torch.stack(j_total) + hyper_phi) if learned else None,
            beta_gradient=gradient_ratio(i_all) if whole else None,
            drift=self.drift,
            at_bound=[*method.prior.at_bound(beta), *method.phi_at_bound(phi.detach())],
        )
        chains = ChainDiagnostics(names, torch.tensor(rhats), torch.tensor(esses))
        return Diagnostics(chains, theta)

    def __str__(self) -> str:
        train = None if self.federation is None else self.federation.train
        lines = [f"{self.algorithm.label} population: {self._whose}"]
        if train is not None:
            sizes = train.sizes
            lines[0] += f", {int(sizes.sum())} examples ({int(sizes.min())} to {int(sizes.max())} each)"
        lines[0] += f", {self.rounds} rounds"
        lines.append(f"  model    {self.model!r}")
        if isinstance(self.algorithm, FedSOUK):
            words = self.algorithm.prior.lines(self.published["beta"], self.published)
            lines += [f"  {'prior' if i == 0 else '':8} {line}" for i, line in enumerate(words)]
            if isinstance(self.model.z_layout, LinkedLayout):
                lines += self._named_lines()
            steps = describe_steps(self.algorithm.local_steps)
            lines.append(f"  kernel   {self.algorithm.markov_kernel}, {steps}")
        if self.totals:
            up, down = self.totals.get("bytes_up", 0), self.totals.get("bytes_down", 0)
            lines.append(
                f"  cost     {up / 1e6:.2f} MB up, {down / 1e6:.2f} MB down, "
                f"{self.totals.get('seconds', 0):.1f} s"
            )
        if self.store is not None and self.store.used and not isinstance(self.algorithm, FedSOUK):
            each = sum(t[0].numel() * t.element_size() for t in self.store.tensors.values())
            lines.append(
                f"  kept     {self.store.used} client(s) that took part hold {each / 1e6:.3g} MB each, "
                f"{each * self.store.used / 1e6:.3g} MB together"
            )
        left_out = sorted({name for m in self.history for name in m.get("left_out", [])})
        if left_out:
            shown = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
            lines.append(f"  warning  updates that were not finite were left out, of {shown}")
        events = sum(m.get("divergences", 0) for m in self.history)
        if events:
            lines.append(f"  chains   {events:.0f} transition(s) diverged in training and were undone")
        if isinstance(self.algorithm, FedSOUK) and self.federation is not None:
            lines += ["  " + line for line in str(self.diagnostics()).splitlines()]
        return "\n".join(lines)

    def _named_lines(self) -> list[str]:
        """phi and the typical client in natural units, and how far clients differ on the free scale."""
        layout = self.model.z_layout
        assert isinstance(layout, LinkedLayout)
        spread = Layout.views(layout, self.prior_sd)
        free = {layout.link_of(n).free_name.format(n): v for n, v in spread.items()}
        parts = {"phi": self.phi, "typical": self.typical, "spread": free}
        return [f"  {label:<8} {_numbers(named)}" for label, named in parts.items() if named]

    # --- files -------------------------------------------------------------------------------

    def public(self) -> Population:
        """theta alone: no data, no chains; it can still make models for new clients."""
        return Population(
            self.algorithm,
            dict(self.published),
            self.key,
            None,
            rounds=self.rounds,
            learned_from=self.learned_from,
        )

    def save(self, path: str | Path, *, posteriors: str = "auto") -> Path:
        """Write theta to ``theta.safetensors`` and each client's own model to a file under ``clients/``.

        ``posteriors`` says whose: ``"all"``, those ``"computed"`` so far, or all up to 1,000
        clients (``"auto"``).
        """
        if posteriors not in ("auto", "all", "computed"):
            raise SettingsError(f"posteriors is 'auto', 'all' or 'computed', not {posteriors!r}")
        folder = writable_folder(path)
        everyone = posteriors == "all" or (posteriors == "auto" and len(self) <= 1000)
        if everyone and self.federation is not None:
            self.sample_all()
        digest = write_tensors(folder / "theta.safetensors", self.published)
        if self._personal:
            writable_folder(folder / "clients")
        for i, state in self._personal.items():
            write_tensors(folder / "clients" / f"{i:08d}.safetensors", state)
        for file in (folder / "clients").glob("*.safetensors"):
            if int(file.stem) not in self._personal:
                file.unlink()  # of a population that was saved here before
        from fedpop.models.spec import model_spec

        write_json(
            folder / "population.json",
            {
                "version": __version__,
                "method": type(self.algorithm).__name__,
                "algorithm": self.algorithm.describe(),
                "model": model_spec(self.model),
                "theta": digest,
                "seed": self.key.seed,
                "clients": self.names,
                "learned_from": self.learned_from,
                "rounds": self.rounds,
                "drift": self.drift,
                "totals": self.totals,
            },
        )
        if self.history:
            from fedpop.files import write_bytes

            lines = "".join(json.dumps(m) + "\n" for m in self.history)
            write_bytes(folder / "history.jsonl", lines.encode())
        return folder


def load(
    path: str | Path, *, model: Model | None = None, clients: Any = None, prior: Prior | None = None
) -> Population:
    """Read a population back. ``model`` (or an energy ``prior``) is needed when its modules are not torch's
    own layers, or when it is a function (``CustomModel``), which cannot be kept in a file without code;
    ``clients`` gives back the data, for clients whose draws were not saved.

    >>> import tempfile, torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> population = fp.FedSOUL(model).fit([(torch.ones(3, 1), torch.ones(3))], rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = fp.load(population.save(folder))
    >>> again
    Population(FedSOUL, 1 clients, 2 rounds)
    """
    from fedpop.algorithms import rebuild
    from fedpop.models.spec import model_from, require_same

    folder = Path(path)
    if not (folder / "population.json").exists():
        raise CheckpointError(f"{folder} holds no saved population (no population.json)")
    saved = read_json(folder / "population.json")
    if model is None:
        model = model_from(saved["model"])
    else:
        require_same(saved["model"], model)
    model = model.at_precision(model.chosen_precision())
    given = {} if prior is None else {"prior": prior}
    algorithm = rebuild(saved["algorithm"], saved["method"], model, **given)
    device = model.initial_phi().device
    theta = read_tensors(folder / "theta.safetensors", saved["theta"])
    published = {n: t.to(device) for n, t in theta.items()}
    for name, layout in (("phi", model.phi_layout),):
        if published[name].shape != (layout.size,):
            raise CheckpointError(f"the saved {name} does not fit this model")
    federation = None if clients is None else model.prepare(Federation.of(clients))
    history = []
    if (folder / "history.jsonl").exists():
        history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    population = Population(
        algorithm=algorithm,
        published=published,
        key=Key(saved["seed"]),
        federation=federation,
        history=history,
        totals=saved["totals"],
        rounds=saved["rounds"],
        drift=saved["drift"],
        names=saved["clients"],
        learned_from=saved.get("learned_from", len(saved["clients"])),
    )
    for file in sorted((folder / "clients").glob("*.safetensors")):
        name = saved["clients"][int(file.stem)]
        if name in population.names:  # clients may come back in another order
            state = {n: t.to(device) for n, t in read_tensors(file).items()}
            population._personal[population.names.index(name)] = state
    return population


def _numbers(named: dict[str, Tensor]) -> str:
    """Names and values in a line; long tensors by their size."""
    return ", ".join(
        f"{n} {v.item():.4g}"
        if v.numel() == 1
        else f"{n} {[round(u, 4) for u in v.flatten().tolist()] if v.numel() <= 4 else list(v.shape)}"
        for n, v in named.items()
    )


def _inputs(model: Model, x: Any) -> Inputs:
    phi = model.initial_phi()

    def cast(leaf: Tensor) -> Tensor:
        return narrowed(leaf, phi.dtype, lambda row: f"prediction, row {row}: x").to(phi.device)

    inputs = as_inputs(x, "prediction")
    require_finite(inputs, "prediction")
    return map_inputs(cast, inputs)
