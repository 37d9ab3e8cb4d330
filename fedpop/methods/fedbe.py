"""FedBE (Chen and Chao, 2021): a Gaussian over the clients' models, and an ensemble drawn from it.

    client   w_i = w after E epochs of SGD on f_i;  sends n_i (w_i - w), n_i (w_i - w)^2 and n_i
    server   mu = w + sum n_i (w_i - w) / sum n_i
             Sigma = diag(sum n_i (w_i - w)^2 / sum n_i - (mu - w)^2)
             w_s ~ N(mu, Sigma), s = 1, ..., S;  the ensemble predicts mean_s p(y | x, w_s)
             w = mu, or mu after epochs of SGD on unlabelled x with the ensemble's predictions for targets

Moments are about w and travel in double precision: raw squares n_i w_i^2 lose the variance, which is far
smaller than w^2, to cancellation. They are not linear in w_i, so a compressor is refused.

Left out of the published method, which hands the clients' own models to the server: these models as further
members, and Dirichlet mixtures of them (they would need weights drawn beforehand); its stochastic weight
averaging while distilling (SWA) is plain SGD here. Its public code, read beside the paper, draws about
directions normalised layer by layer, with the noise scaled by a tuned factor; ours is the paper's text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import Few
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import finite, mean_where, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Paced, Round
from fedpop.methods.samples import Ensemble
from fedpop.methods.whole import split_w
from fedpop.models.modules import RowKeys
from fedpop.settings import Setting


@dataclass(frozen=True)
class Distillation(Setting):
    """Unlabelled examples ``x`` on the server, and how the student is trained on them each round.

    >>> import torch
    >>> Distillation(torch.zeros(100, 3)).local.epochs
    20
    """

    x: Tensor | str
    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=20, rate=1e-3, batch=128))

    def __post_init__(self) -> None:
        super().__post_init__()
        # A method read back from a file knows of its examples only what they were.
        if isinstance(self.x, Tensor) and (self.x.dim() < 2 or len(self.x) == 0):
            raise SettingsError(
                f"distillation needs unlabelled examples [n, ...], not a tensor of {tuple(self.x.shape)}"
            )
        if isinstance(self.x, Tensor) and not bool(torch.isfinite(self.x).all()):
            raise SettingsError("the unlabelled examples hold NaN or infinite numbers; leave those rows out")


@dataclass(frozen=True, kw_only=True)
class FedBE(Paced, Ensemble):
    """An ensemble of global models.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        samples: How many models are drawn anew in every round; 10 by default, as published. Predictions
            average over them.
        distil: ``fedpop.methods.Distillation(x)`` with unlabelled examples on the server, on which
            the next model learns from the ensemble; None (the default) goes on from the mean of the
            clients' models.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Stays "identity": what clients send holds squares, which a compressor would bias.
        clip: Stays None, for the same reason.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedBE(model, local=fp.LocalSGD(epochs=20, rate=1.0), samples=1000)
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=5)
    >>> p = population.predict(0, [[1.0]])  # clients end at 2 and 4
    >>> round(p.mean.item(), 1), round(p.means.std().item(), 1)
    (3.0, 1.0)
    """

    local: LocalSGD = field(default_factory=LocalSGD)
    samples: Few = 10
    distil: Distillation | None = None

    name: ClassVar[str] = "FedBE"
    guarded: ClassVar[tuple[str, ...]] = ("dw",)
    as_it_is: ClassVar[str] = "it holds squares that belong to the moves beside them"
    about: ClassVar[About] = About(
        "Chen and Chao, ICLR 2021", personalised=False, bounds=False, memory="M (d + d_phi)"
    )

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w = round.broadcast["w"].expand(len(cohort), -1)
        new = self.train(self.local, w, cohort, round.key, pace=round.pace)
        n, dw = cohort.sizes.double().unsqueeze(1), new.w.double() - w.double()
        good, passes = finite(new.w), self.local.steps(cohort)
        cost = training_cost(cohort, new.loss, good, passes, passes)
        return Answer(good, {"dw": n * dw, "dw^2": n * dw.square(), "n": n}, cost=cost)

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        moments = self.moments(server["w"], total)
        if moments is None:
            return server
        mu, variance = moments
        each = torch.arange(self.samples, device=mu.device)
        xi = key.at(purpose="ensemble").normal(each, tuple(mu.shape), mu.dtype)
        members = (mu + variance.sqrt() * xi).to(server["w"].dtype)
        mean = mu.to(members.dtype)
        w = mean if self.distil is None else self._student(self.distil, mean, members, key)
        new = server | {"w": w}
        for s, member in enumerate(members):
            new |= self.put(s, member.clone())
        return new

    def moments(self, w: Tensor, total: Total) -> tuple[Tensor, Tensor] | None:
        """mu and the diagonal of Sigma, in double precision; None over nothing."""
        step, square = (total.mean(name, by="n") for name in ("dw", "dw^2"))
        if step is None or square is None:
            return None
        # Rounding may leave a variance of zero just below it.
        return w.double() + step, (square - step.square()).clamp(min=0)

    def _student(self, distil: Distillation, w: Tensor, members: Tensor, key: Key) -> Tensor:
        """w trained on E log p(y | w), y from the ensemble, of which its mean is enough: every likelihood is
        linear in y, given its own parameters, which stay at their mean."""
        if not isinstance(distil.x, Tensor):
            raise SettingsError("the unlabelled examples are not in the file; give distil=... again to go on")
        x = distil.x.to(device=w.device)
        x = x.to(w.dtype) if x.is_floating_point() else x
        likelihood, size = self.model.likelihood, self.model.phi_layout.size
        params = self.model.params(w[:size])
        taught = likelihood.mean(self.outputs(members, x), self.likelihood_params(members)).mean(0)

        def loss(
            w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
        ) -> Tensor:
            phi, z = torch.split_with_sizes(w, [size, len(w) - size])
            eta = self.model.head_at(phi, z, self.model.embed(phi, x, rows), rows)
            value = likelihood.log_prob(eta, y, params)
            return -mean_where(value, mask)

        key = key.at(purpose="distil")
        one = key.server(w.device)
        examples = Cohort(one, torch.full_like(one, len(x)), x, taught, len(x))
        student = w.unsqueeze(0)
        most = self.model.rows_side_by_side
        trained = distil.local.run(loss, student, student[:, :0], x, examples, key, most_rows=most).w[0]
        return trained if bool(torch.isfinite(trained).all()) else w

    def publish(self, server: Tensors) -> Tensors:
        """The ensemble; phi and z are those of the server's w, the mean or the student."""
        return super().publish(server) | split_w(self.model, server["w"])
