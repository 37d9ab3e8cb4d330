"""pFedFDA (Mclaughlin and Su, NeurIPS 2024): Gaussian classes in feature space, each client's own between its
estimate and everybody's.

    client   head z_i = LDA(mu, Sigma, pi_i), pi_i its own shares of classes;
             phi_i = phi after E epochs of SGD on f_i with this head;
             (mu_i, Sigma_i) = class means and pooled covariance of its features at phi_i;
             b_i = the pair in [0, 1]^2 whose classifier does best across two folds of its own data;
             sends n_i of  phi_i - phi,  b_i1 mu_i + (1 - b_i1) mu,  b_i2 Sigma_i + (1 - b_i2) Sigma;  and n_i
    server   phi, mu, Sigma: means of these, weighted by n_i
    predicts with LDA of the interpolated moments at the final phi; a client without data, of (mu, Sigma)
             with all classes alike

    LDA      z_k = (Sigma^-1 mu_k,  log pi_k - mu_k' Sigma^-1 mu_k / 2)

The authors' code was read beside the paper. As there: classes of which a client has too few examples
(``fewest``) keep mu, those that it does not have a share of 1e-4; Sigma_i has the identity added (``ridge``);
Sigma is mixed with a 1e-4th of its mean variance before it is inverted; a client with no class of two
examples has b_i = 0. Otherwise than there: features are those of the trained body, once and without shifts or
dropout, where theirs are gathered over the epochs while it moves (an example counts once in each, so that few
become enough; not so where they predict); b_i is searched for on a grid, where theirs is found by L-BFGS from
(.5, .5); the last round does not wait for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.checked import Count, Positive
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import body_loss, finite, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Footprint, Paced, Round
from fedpop.methods.whole import WholeModel
from fedpop.models.base import LinearLayout
from fedpop.models.likelihoods import Categorical

ABSENT = 1e-4
"""The share of a class that a client does not have, before shares are made to add up to one."""
SHRINKAGE = 1e-4
"""How much of a covariance is replaced by its mean variance before it is inverted."""
GRID = 11
"""Values of each entry of b that are tried, from 0 to 1."""
FOLDS = 2


class Classes(NamedTuple):
    """Normal classes with one covariance: means ``[..., K, q]`` and ``[..., q, q]``."""

    means: Tensor
    covariance: Tensor

    def towards(self, other: Classes, of_means: Tensor, of_covariance: Tensor) -> Classes:
        """So much of the other's means and covariance, and the rest of these."""
        both = zip(self, other, (of_means, of_covariance), strict=True)
        return Classes(*(t + b[..., None, None] * (u - t) for t, u, b in both))

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(t).all()) for t in self)


def lda(classes: Classes, log_share: Tensor) -> Tensor:
    """The linear head ``[..., K, q + 1]``, biases last: log p(class | feature) but for a constant."""
    means, covariance = classes
    spread = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky((1 - SHRINKAGE) * covariance + SHRINKAGE * spread * eye)
    weight = torch.cholesky_solve(means.mT, root).mT
    return torch.cat((weight, (log_share - 0.5 * (means * weight).sum(-1)).unsqueeze(-1)), dim=-1)


def estimated(f: Tensor, y: Tensor, shared: Classes, ridge: float, fewest: int) -> Classes:
    """From a client's features ``[n, q]`` and labels ``[n]``; classes of fewer examples keep the shared mean,
    around which these then lie."""
    k, q = shared.means.shape
    one_hot = torch.nn.functional.one_hot(y, k).to(f.dtype)
    count = one_hot.sum(0).unsqueeze(1)
    means = torch.where(count >= fewest, one_hot.mT @ f / count.clamp(min=1), shared.means)
    centred = f - means[y]
    eye = torch.eye(q, dtype=f.dtype, device=f.device)
    return Classes(means, centred.mT @ centred / max(len(y) - 1, 1) + ridge * eye)


def folds(y: Tensor, uniform: Tensor) -> Tensor:
    """The fold of each example, every class dealt out evenly in random order; -1 for those of a class too
    small to be in all."""
    order = torch.argsort(y + uniform.to(torch.float64).clamp(max=1 - 1e-9))
    count = torch.bincount(y)
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y), device=y.device) - (count.cumsum(0) - count)[y[order]]
    return torch.where(count[y] >= FOLDS, rank % FOLDS, -1)


def interpolation(
    f: Tensor, y: Tensor, shared: Classes, log_share: Tensor, fold: Tensor, ridge: float, fewest: int
) -> Tensor:
    """b ``[2]``: the first pair of the grid under which held-out examples are most probable; 0 where there
    is nothing to hold out."""
    if not bool((fold >= 0).any()):
        return f.new_zeros(2)
    at = torch.linspace(0, 1, GRID, dtype=f.dtype, device=f.device)
    loss = f.new_zeros((GRID, GRID))
    for part in range(FOLDS):
        inside, outside = (fold >= 0) & (fold != part), fold == part
        own = estimated(f[inside], y[inside], shared, ridge, fewest)
        heads = lda(shared.towards(own, at.unsqueeze(1), at), log_share)  # [GRID, GRID, K, q + 1]
        eta = f[outside] @ heads[..., :-1].mT + heads[..., -1].unsqueeze(-2)
        rows = torch.arange(len(eta[0, 0]), device=eta.device)
        loss -= torch.log_softmax(eta, -1)[..., rows, y[outside]].mean(-1)
    best = int(loss.argmin())
    return torch.stack((at[best // GRID], at[best % GRID]))


@dataclass(frozen=True, kw_only=True)
class PFedFDA(Paced, WholeModel):
    """A shared body; heads that follow from where classes lie in its feature space.

    Args:
        model: A backbone, a linear head with biases and classes for targets:
            ``fp.Composition(backbone, nn.Linear(q, K), "categorical")``. The head's own values are not used.
        local: How clients train the body in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01,
            one batch.
        ridge: What is added to every variance of a client's own covariance of features; 1 by default, as
            in the authors' code.
        fewest: Examples of a class that a client needs for a mean of its own; 3 by default, as in the
            authors' code.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (phi_i - phi), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> y = torch.arange(40) % 2
    >>> x = torch.stack((6.0 * y - 3, 0.1 * torch.linspace(-1, 1, 40)), 1)
    >>> model = fp.Composition(None, torch.nn.Linear(2, 2), "categorical")
    >>> population = fp.PFedFDA(model).fit([(x, y), (-x, y)], rounds=3)  # classes lie the other way round
    >>> population.predict(0, [[3.0, 0.0]]).most_likely, population.predict(1, [[3.0, 0.0]]).most_likely
    (tensor([1]), tensor([0]))
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    ridge: Positive = 1.0
    fewest: Count = 3

    name: ClassVar[str] = "pFedFDA"
    of_classes: ClassVar[bool] = True
    about: ClassVar[About] = About("Mclaughlin and Su, NeurIPS 2024", personalised=True)
    guarded: ClassVar[tuple[str, ...]] = ("dphi",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)
    not_private: ClassVar[str] = "class means of features have no bound that holds whatever the data are"

    def __post_init__(self) -> None:
        super().__post_init__()
        layout, likelihood = self.model.z_layout, self.model.likelihood
        made = isinstance(layout, LinearLayout) and layout.bias and not self.model.offsets
        if not (self.model.linear and made and isinstance(likelihood, Categorical)):
            raise SettingsError(
                "PFedFDA makes its heads of class means: it needs a linear head with biases and a "
                'categorical likelihood, as in fp.Composition(backbone, nn.Linear(q, K), "categorical")'
            )

    @property
    def footprint(self) -> Footprint:
        return replace(super().footprint, compressed=self.model.phi_layout.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Classes and features."""
        layout = self.model.z_layout
        assert isinstance(layout, LinearLayout)
        return layout.outputs, layout.inputs

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        phi, (k, q) = self.model.initial_phi(), self.shape
        drawn = key.at(purpose="means").uniform(key.server(phi.device), (k * q,), phi.dtype)[0]
        return {"phi": phi, "means": drawn, "covariance": torch.eye(q, dtype=phi.dtype).flatten().to(phi)}

    def broadcast(self, server: Tensors) -> Tensors:
        return server

    # --- a client's round --------------------------------------------------------------------

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        phi, key, shared = round.broadcast["phi"], round.key, self.classes(round.broadcast)
        start, n = phi.expand(len(cohort), -1), cohort.sizes.to(phi.dtype).unsqueeze(1)
        heads = torch.stack([lda(shared, self.log_share(one)).flatten() for one in cohort.one_by_one()])
        loss, aux = body_loss(self.model, cohort.embedded), heads.to(phi.dtype).unsqueeze(1)
        body = self.train(self.local, start, cohort, key, aux=aux, loss=loss, pace=round.pace)
        good = finite(body.w)
        means, covariances = [], []
        with torch.no_grad():
            for c, one in enumerate(cohort.one_by_one()):
                own = shared
                if len(one.y) and bool(good[c]):
                    own = self.adapted(self.model.features(body.w[c], one), one, shared, key)
                    good[c] = own.finite
                means.append(own.means.flatten().to(phi.dtype))
                covariances.append(own.covariance.flatten().to(phi.dtype))
        vectors = {
            "dphi": n * (body.w - start), "means": n * torch.stack(means),
            "covariance": n * torch.stack(covariances), "n": n,
        }  # fmt: skip
        steps, examples = self.local.steps(cohort), cohort.examples
        cost = training_cost(cohort, body.loss, good, steps + examples / 3, steps + examples)
        return Answer(good, vectors, cost=cost)

    def adapted(self, features: Inputs, one: Cohort, shared: Classes, key: Key) -> Classes:
        """One client's classes: its own estimate and the shared one, interpolated."""
        assert isinstance(features, Tensor)
        f, uniform = features.double(), key.at(purpose="folds").uniform(one.units, (len(one.y),))[0]
        if not bool(torch.isfinite(f).all()):
            return Classes(*(torch.full_like(t, torch.nan) for t in shared))
        log_share, fold = self.log_share(one), folds(one.y, uniform)
        b = interpolation(f, one.y, shared, log_share, fold, self.ridge, self.fewest)
        return shared.towards(estimated(f, one.y, shared, self.ridge, self.fewest), *b)

    def log_share(self, one: Cohort) -> Tensor:
        """log pi ``[K]`` of one client; all alike without data."""
        count = torch.bincount(one.y, minlength=self.shape[0]).double()
        share = count / max(len(one.y), 1) + ABSENT
        return (share / share.sum()).log()

    def classes(self, shared: Tensors) -> Classes:
        """The shared ones, in double precision."""
        k, q = self.shape
        return Classes(shared["means"].double().reshape(k, q), shared["covariance"].double().reshape(q, q))

    # --- the server's ------------------------------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move, means, covariance = (total.mean(name, by="n") for name in ("dphi", "means", "covariance"))
        if move is None or means is None or covariance is None:
            return server
        return {"phi": server["phi"] + move, "means": means, "covariance": covariance}

    def publish(self, server: Tensors) -> Tensors:
        alike = torch.zeros(self.shape[0], dtype=torch.float64, device=server["phi"].device)
        z = lda(self.classes(server), torch.log_softmax(alike, -1))
        return server | {"z": z.flatten().to(server["phi"].dtype)}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        shared, heads = self.classes(published), []
        with torch.no_grad():
            for one in cohort.one_by_one():
                if not len(one.y):
                    heads.append(published["z"])
                    continue
                own = self.adapted(self.model.features(published["phi"], one), one, shared, key)
                heads.append(lda(own, self.log_share(one)).flatten().to(published["z"].dtype))
        return {"z": torch.stack(heads)}
