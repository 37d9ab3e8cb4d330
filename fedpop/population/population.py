"""theta, and each client's own model, made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn

from fedpop.blocks import CLIENTS_AT_ONCE
from fedpop.checked import Count, Few, OneOf, Whole, checked
from fedpop.decisions import Decision
from fedpop.errors import CheckpointError, DataError, EstimateError, SettingsError
from fedpop.evaluation.convergence import ToTheOptimum, small
from fedpop.evaluation.diagnostics import ChainsAndGradient, Diagnostics, rhat_and_ess
from fedpop.evaluation.information import Information, require_small, theta_draws
from fedpop.evaluation.marginal import LogLikelihood, MarginalLikelihood
from fedpop.evaluation.newcomers import PUBLISHED, DataShare, NewcomerWidth, judges
from fedpop.evaluation.verdict import Verdict, loss_trend
from fedpop.federation.clients import SPLITS, Federation
from fedpop.kernels import Hierarchy
from fedpop.keys import PUBLIC, Key
from fedpop.message import Tensors
from fedpop.methods.base import Algorithm, PopulationPrior, hierarchy_of, role_of
from fedpop.models.base import Model
from fedpop.models.predictive import Predictive
from fedpop.population.client_models import ClientModels
from fedpop.population.posterior import (
    Newcomer,
    Posterior,
    checked_inputs,
    embedded,
    finite,
    in_pieces,
    newcomer,
)
from fedpop.population.saving import draws_that_fit, save, thinned
from fedpop.population.served import served
from fedpop.population.summary import summary
from fedpop.population.theta import ThetaDraws
from fedpop.priors.base import moments, widened
from fedpop.questions import Question
from fedpop.site.store import LocalStore
from fedpop.threads import threads

R = TypeVar("R")
Split = Annotated[str, OneOf(*SPLITS)]
Judged = tuple[int, Predictive | None, Tensor]
Kept = Annotated[str, OneOf("auto", "all", "computed")]


@dataclass(repr=False)
class Population(ClientModels):
    """What was learned, and every client's own model; ``fit`` and ``fp.load`` make it.

    Args:
        algorithm: The method that learned it, with its settings.
        published: theta, as tensors: what predictions use.
        key: What the sites draw with; draws of z are theirs.
        federation: The clients' data, or None where they are not here.
        store: What clients store from one round to the next.
        history: A dictionary of numbers for each round, as in ``metrics.jsonl``.
        totals: What the run cost: bytes, passes, steps, seconds.
        rounds: How many there were.
        drift: The relative change of theta between the halves of the averaged rounds.
        names: The clients'; those of the data where they are here.
        learned_from: How many clients theta was learned from, also where they are not here.
        convergence: Whether theta had converged when the run ended, where that was checked.
        best_round: The round whose theta this is, where validation data chose it (``callbacks.EarlyStop``).
        how: How theta was found, in words under short titles, as ``print`` tells it.
        decisions: What the run decided where a setting left it open, and why.
        elsewhere: Asks clients that are at their sites, as long as the run goes on.
        threads: How many torch works with for it; None (the default) leaves that to torch.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> clients = {"anna": (x, 2 * x[:, 0]), "ben": (x, 4 * x[:, 0])}
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    >>> population = fp.FedSOUL(model, engine="sampled").fit(clients, rounds=50)
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
    convergence: Verdict | None = None
    best_round: int | None = None
    how: list[tuple[str, str]] = field(default_factory=list)
    decisions: Sequence[Decision] = ()
    elsewhere: Callable[[Question[Any]], Any] | None = field(default=None, repr=False)
    threads: int | None = None
    _personal: dict[int, Tensors] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.federation is not None:
            self.names = list(self.federation.names)
        self.learned_from = self.learned_from or len(self.names)
        learned = role_of(self.algorithm, PopulationPrior)
        self.how = self.how or ([] if learned is None else learned.how())

    def __repr__(self) -> str:
        return f"Population({self.algorithm.label}, {self.whose}, {self.rounds} rounds)"

    def __str__(self) -> str:
        return summary(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def engine(self) -> str:
        """Which engine found theta, and why that one, where the method had more than one."""
        return dict(self.how).get("engine", "")

    @property
    def whose(self) -> str:
        """Of how many clients, in words."""
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
        return self._moments[0]

    @property
    def prior_sd(self) -> Tensor:
        """Marginal standard deviations of the population prior."""
        return self._moments[1]

    @property
    def _moments(self) -> tuple[Tensor, Tensor]:
        return moments(self._hierarchy("population prior").prior, self.published["beta"], self.published)

    @property
    def at_bound(self) -> list[str]:
        """A word about each parameter on the edge of its projection set."""
        learned = role_of(self.algorithm, PopulationPrior)
        return [] if learned is None else learned.at_bound(self.published)

    def _hierarchy(self, what: str) -> Hierarchy:
        hierarchy = hierarchy_of(self.algorithm)
        if hierarchy is None:
            raise SettingsError(f"{self.algorithm.label} has no {what}")
        return hierarchy

    # --- clients -----------------------------------------------------------------------------

    @checked
    def predict(self, client: str | int, x: Any, *, theta_uncertainty: bool = False) -> Predictive:
        """The predictive distribution of a client of the federation at x.

        Intervals are conditional on theta unless ``theta_uncertainty``, which draws theta from its asymptotic
        law (in closed form for linear heads with a normal likelihood, else from posterior draws, for models
        of up to 200 parameters). All draws are in memory, 4 GB for 1,000 of a million rows: give such x in
        parts, since what is said of a row does not depend on the others.

        Args:
            client: Its name, or its number in the order in which clients were given.
            x: Rows to predict for, as in training: a row for each, whatever a row is.
            theta_uncertainty: Draw theta, too (default: False). Give it where clients are few.
        """
        i = self._index(client)
        inputs, key = checked_inputs(self.model, x), self._predict_key(i)
        if theta_uncertainty:
            return self._theta.predict(i, inputs, key)
        found = self.algorithm.predict(self.published, self._model_of(i), inputs, key)
        return finite(replace(found, labels=self.model.labels), repr(self.names[i]))

    @checked
    def predict_many(self, x: Mapping[str | int, Any]) -> dict[str, Predictive]:
        """Predictions of many clients at once, the same as of each by itself: the final pass of those that
        were not asked before is made together, and all rows go through a shared network in one pass.

        Args:
            x: The rows of each client that is asked, by its name or number.

        Returns:
            A prediction for each of them, by its name.

        >>> import torch, fedpop as fp
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
        >>> population = fp.FedSOUL(model).fit({"anna": (x, 2 * x[:, 0]), "ben": (x, 4 * x[:, 0])}, rounds=5)
        >>> population.predict_many({"ben": [[1.0]], "anna": [[1.0], [2.0]]})["anna"]
        Predictive(2 examples, normal, from 1000 draws of z)
        """
        asked = {self._index(client): checked_inputs(self.model, rows) for client, rows in x.items()}
        if not asked:
            return {}
        ids, method = torch.tensor(list(asked)), self.algorithm
        for some in ids.split(CLIENTS_AT_ONCE):
            self._personalise(some)
        if not any("phi" in self._personal[i] for i in asked):  # else each has a network of its own
            features = embedded(self.model, self.published["phi"], list(asked.values()))
            asked, method = (
                dict(zip(asked, features, strict=True)),
                method.replace(model=self.model.on_features()),
            )
        return {
            self.names[i]: finite(
                replace(
                    method.predict(self.published, self._personal[i], rows, self._predict_key(i)),
                    labels=self.model.labels,
                ),
                repr(self.names[i]),
            )
            for i, rows in asked.items()
        }

    def _predict_key(self, i: int) -> Key:
        return self.key.at(purpose=f"predict.{self.names[i]}")

    @checked
    def posterior(self, client: str | int) -> Posterior:
        """Draws from p(z | D_i, theta): a pass of its own, with theta frozen at the returned value.

        Args:
            client: Its name, or its number in the order in which clients were given.
        """
        self._hierarchy("posterior of z")
        return Posterior(self._model_of(self._index(client))["draws"][0], self.model.z_layout)

    @checked
    def mixing(self, client: str | int) -> tuple[float, float]:
        """R-hat and effective draws of a client's chains, the worst over the coordinates of z.

        Args:
            client: Its name, or its number in the order in which clients were given.
        """
        return rhat_and_ess(self.posterior(client).draws)

    @checked
    def personal(self, client: str | int) -> dict[str, Tensor]:
        """The client's head parameters: the posterior mean, or the point estimate.

        Args:
            client: Its name, or its number in the order in which clients were given.
        """
        state = self._model_of(self._index(client))
        if "draws" not in state:
            return self.model.z_layout.views(state["z"][0])
        return {n: v.mean((0, 1)) for n, v in self.model.z_layout.views(state["draws"][0]).items()}

    @checked
    def module(self, client: str | int, *, draws: Few | None = None) -> nn.Module:
        """A client's network as a plain module of torch, a copy: to be served, exported, or looked into.

        At the posterior mean it gives the network's outputs (logits, for classes) by one pass. That is not
        the posterior's mean prediction: it is surer than ``predict``. With ``draws`` it is an ensemble that
        gives the mean of y, or class probabilities, as ``predict(...).mean`` does.

        Args:
            client: Its name, or its number in the order in which clients were given.
            draws: How many networks make the ensemble; None (the default) is one, at the posterior mean.

        >>> import torch, fedpop as fp
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
        >>> population = fp.FedSOUL(model).fit({"anna": (x, 2 * x[:, 0]), "ben": (x, 4 * x[:, 0])}, rounds=5)
        >>> population.module("ben")(torch.ones(1, 1)).shape
        torch.Size([1, 1])
        """
        return served(self.model, self.published, self._model_of(self._index(client)), draws)

    @checked
    def new_client(self, x: Any = None, y: Any = None) -> Newcomer:
        """A client never seen before: nothing is trained or sent.

        Without data its z is drawn from the population prior; with a few examples, from its posterior
        with theta fixed. ``for_newcomers`` asks clients how wide that prior should be.

        Args:
            x: Its examples, as in training; None (the default) where it has none.
            y: Their targets; None where there are none.
        """
        return newcomer(self.algorithm, self.published, x, y, PUBLIC.at(purpose="newcomer"))

    @checked
    def for_newcomers(
        self, examples: tuple[Whole, ...] = (0, 1, 5, 25), *, split: Split | None = None, limit: Count = 1000
    ) -> Population:
        """This population with a prior that is as wide for new clients as predicts best.

        Clients are asked once: each plays a newcomer with so many of its own examples and scores others,
        under priors of a sixteenth to twice the width. ``new_client`` then has the width for its number of
        examples; clients of the federation are as they were. It is for heads of networks, where the learned
        prior is often too wide for a client with few examples or none, whose predictions are too modest then.

        Args:
            examples: Numbers of examples (default: (0, 1, 5, 25)). In between widths are interpolated; with
                more than the most of them the last one stays.
            split: Which examples are scored: by default "validation" where half of the clients have such,
                else "train" (across machines always), those that a client has not given itself. A network
                that memorised its few training examples is too sure of them, and newcomers would be.
            limit: Clients that are asked at most (default: 1000); across machines all of them are.

        >>> import torch, fedpop as fp
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
        >>> wide = fp.priors.Normal(scale=20.0, learn_scale=False)
        >>> clients = [(x, slope * x[:, 0]) for slope in (1, 2, 3, 4, 5, 6)]
        >>> population = fp.FedSOUL(model, prior=wide).fit(clients, rounds=5).for_newcomers((0,))
        >>> population.newcomers[0] < 0.5
        True
        """
        hierarchy = self._hierarchy("population prior")
        widened(hierarchy.prior, self.published["beta"], 1.0)  # or raises
        if not examples:
            raise SettingsError("Population.for_newcomers: examples are numbers of them, such as (0, 5)")
        split = judges(self.model, self.federation) if split is None else split
        among, shares = self._some(limit), 0.0
        if 0 in examples and self.key != PUBLIC:  # those of a public population are all new to it
            shares = self.ask(DataShare(hierarchy), among) * (1 if among is None else len(self) / limit)
        asked = tuple(sorted(set(examples)))
        question = NewcomerWidth(self.algorithm, asked, split, shares, self.learned_from)
        return replace(self, published=self.published | {PUBLISHED: self.ask(question, among)})

    @property
    def newcomers(self) -> dict[int, float]:
        """What the prior's standard deviations are multiplied by for a new client, by its number of examples;
        empty unless clients were asked (``for_newcomers``)."""
        known = self.published.get(PUBLISHED)
        return {} if known is None else {int(count): factor for count, factor in known.tolist()}

    def sample_all(self) -> Population:
        """Run the final pass for every client now, many at a time, rather than when one is asked for."""
        for ids in torch.arange(len(self)).split(CLIENTS_AT_ONCE):
            self._personalise(ids)
        return self

    @checked
    def held_out(self, split: Split, *, theta_uncertainty: bool = False) -> Iterator[Judged]:
        """Of every client with examples in a split: its position, what is predicted for them, and targets.

        Of one with very many in pieces that fit into memory; None where a client has no model.

        Args:
            split: Which examples, such as "test".
            theta_uncertainty: As for ``predict``.
        """
        if self.federation is None or split not in self.federation.splits:
            raise DataError(f"there are no {split} data here to be judged on")
        sizes, method = self.federation.splits[split].sizes, self.algorithm
        if self.federation.embedded:  # what is held are features already
            method = method.replace(model=self.model.on_features())
        for i in self._one_by_one((sizes > 0).nonzero().squeeze(1)):
            own = self.federation.cohort(torch.tensor([i]), self.device, split)
            try:
                for x, y in in_pieces(own.x, own.y, method.footprint.final_draws * self.model.outputs):
                    if theta_uncertainty:
                        yield i, self.predict(i, x, theta_uncertainty=True), y
                        continue
                    yield i, method.predict(self.published, self._model_of(i), x, self._predict_key(i)), y
            except DataError:
                yield i, None, own.y

    # --- questions to everyone ---------------------------------------------------------------

    @checked
    def ask(self, question: Question[R], among: Tensor | None = None) -> R:
        """What is made of everyone's answers at the returned theta.

        Args:
            question: One of ``fedpop.questions``, of ``fedpop.evaluation`` or user-defined.
            among: Positions of the clients that are asked; None (the default) for everyone.
        """
        if self.sites is None and self.elsewhere is not None:
            found: R = self.elsewhere(question)
            return found
        if self.sites is None:
            raise CheckpointError("this needs the clients' data; load the population with clients=...")
        personal = self._models_of
        with threads(self.threads):
            return self.sites.ask(question, self.published, self.key, self._final_plan, personal, among)[0]

    def _some(self, limit: int) -> Tensor | None:
        """Positions of so many clients, evenly spaced; None where there are no more."""
        return torch.linspace(0, len(self) - 1, limit).long() if len(self) > limit else None

    @checked
    def log_likelihood(self, proposals: Few = 1000) -> LogLikelihood:
        """The marginal log-likelihood of all clients at the returned theta, with its error.

        Args:
            proposals: Importance draws for each client, where nothing is closed-form (default: 1000). The
                error falls with their root.
        """
        return self.ask(MarginalLikelihood(self._hierarchy("marginal likelihood"), proposals))

    @checked
    def diagnostics(self, limit: Count = 1000) -> Diagnostics:
        """R-hat and ESS of the final pass; theta's gradient and, of a small model, distance from an optimum.

        Args:
            limit: Clients at most (default: 1000); with more of them nothing is said of theta.
        """
        hierarchy, among = self._hierarchy("chains"), self._some(limit)
        question = ChainsAndGradient(hierarchy, self.drift, tuple(self.at_bound), among is None)
        found, verdict = self.ask(question, among), self._judged() if among is None else self.convergence
        return replace(found, theta=replace(found.theta, verdict=verdict))

    def _judged(self) -> Verdict | None:
        """Whether the returned theta has converged: from the final draws, or from the training loss."""
        hierarchy, phi, beta = self._hierarchy("chains"), self.published["phi"], self.published["beta"]
        if small(hierarchy, phi, beta):
            with suppress(EstimateError):
                return self.ask(ToTheOptimum(hierarchy)).distance
        return self.convergence or loss_trend(self.history)

    def theta_draws(self) -> list[tuple[Tensor, Tensor]]:
        """Draws of theta from its asymptotic normal law; computed once."""
        return self._theta.thetas

    @cached_property
    def _theta(self) -> ThetaDraws:
        hierarchy = self._hierarchy("uncertainty about theta")
        require_small(hierarchy, self.published["beta"])
        total = self.ask(Information(hierarchy))
        thetas = theta_draws(hierarchy, self.published, total, self.key)
        draws = lambda ids: self._models_of(ids)["draws"].flatten(1, 2)  # noqa: E731
        return ThetaDraws(hierarchy, self.published, thetas, self.names, self._cohort, draws, self.key)

    # --- files -------------------------------------------------------------------------------

    def public(self) -> Population:
        """theta alone, to be given away: no data, no chains, and not the key that the sites draw with; it can
        still make models for new clients, the same ones as this population."""
        alone = replace(self, federation=None, store=None, names=[], elsewhere=None, _personal={}, drift=None)
        return replace(alone, published=dict(self.published), key=PUBLIC, history=[], totals={})

    @checked
    def save(self, path: str | Path, *, posteriors: Kept | Few = "auto") -> Path:
        """Write the population into a folder, in few files and without pickle; ``fp.load`` reads it.

        The folder is for those who may see the clients' models: it holds their draws and the sites' own key.
        What may be seen by all is ``public().save(...)``. Saving over another population takes its place in
        one step: a process that dies before leaves the old one.

        Args:
            path: The folder; it is made where there is none, and other files in it stay.
            posteriors: Whose own models are saved: ``"all"``, those ``"computed"`` so far, or all up to 1,000
                clients (``"auto"``), of whose draws so many are saved, evenly spaced, as take 16 MiB, but a
                hundred of each at least. A number saves all clients, each with so many of its draws: with a
                hundred a 5 % quantile is known to .2 posterior standard deviations, with a thousand to .07.
        """
        many = posteriors if isinstance(posteriors, int) else None
        everyone = many is not None or posteriors == "all" or (posteriors == "auto" and len(self) <= 1000)
        if everyone and self.federation is not None:
            self.sample_all()
        if posteriors == "auto":
            many = draws_that_fit(self._personal)
        about = {n: getattr(self, n) for n in ("learned_from", "rounds", "best_round", "drift", "totals")}
        about |= {"clients": self.names, "convergence": self.convergence and self.convergence.plain()}
        about |= {"how": [list(row) for row in self.how]}
        about |= {"decisions": [decision.plain() for decision in self.decisions]}
        own = {"seed": self.key.seed, "purpose": self.key.purpose}
        private = None if self.key == PUBLIC else own
        models = self._personal if many is None else {i: thinned(m, many) for i, m in self._personal.items()}
        return save(path, self.algorithm, self.published, models, about, private, self.history)
