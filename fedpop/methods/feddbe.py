"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a shift of each client's own in feature space.

    client   w_i = (phi_i, z_i) and t_i after E epochs of SGD, from w and its own t_i, on the mean loss of
                 head_z(f_phi(x) + t)   and   kappa/2 mean_k (fbar_k - g_k)^2,
             fbar the mean features of a batch;  sends n_i (w_i - w) and n_i;  keeps t_i
    server   w += sum n_i (w_i - w) / sum n_i
    first    until there is a g: epochs without t and without the pull, and n_i times the mean features of w_i
             are sent, too;  g = sum n_i fbar_i / sum n_i, which stays
    predicts with head_z(f_phi(x) + t_i); without data, t = 0

The authors' code (PFLlib) was read beside the paper. It has everybody train once for g, before the rounds,
and throws that work away; here it is the first round, of those who are in it. Its mean over batches has a
momentum, 1 - mu of what was before; here it is the batch's own (mu = 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.checked import NotNegative
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.losses import Loss, finite, mean_where, training_cost
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import About, Facts, Paced, Round
from fedpop.methods.whole import WholeModel, join_w, split_w
from fedpop.models.base import LinearLayout
from fedpop.models.modules import RowKeys
from fedpop.models.predictive import Predictive, unit_by_unit


@dataclass(frozen=True, kw_only=True)
class FedDBE(Paced, WholeModel):
    """One model for all, but for a shift of each client's features.

    Args:
        model: What is fitted, with a linear head, as in
            ``fp.Composition(backbone, nn.Linear(q, K), "categorical")``.
        kappa: How strongly mean features are drawn to everybody's, 0 or more; 50 by default, as published
            for small convolutional networks.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round finds its shift, all else standing still;
            ``fp.LocalSGD(epochs=10)`` by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (w_i - w), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedDBE(model, local=fp.LocalSGD(epochs=20, rate=0.2))
    >>> population = method.fit([(x, x[:, 0] + 1), (x, x[:, 0] - 1)], rounds=20)
    >>> [round(population.predict(i, [[0.0]]).mean.item(), 1) for i in (0, 1)]
    [1.0, -1.0]
    """

    kappa: NotNegative = 50.0
    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10))

    name: ClassVar[str] = "FedDBE"
    about: ClassVar[About] = About(
        "Zhang et al., NeurIPS 2023", personalised=True, bounds=False, memory="q + d + d_phi"
    )
    private: ClassVar[tuple[str, ...]] = ("t",)
    guarded: ClassVar[tuple[str, ...]] = ("dw",)
    compressed: ClassVar[tuple[str, ...]] = ("dw",)
    not_private: ClassVar[str] = "mean features have no bound that holds whatever the data are"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.model.linear and isinstance(self.model.z_layout, LinearLayout)):
            raise SettingsError(
                "FedDBE shifts the features that a linear head sees, and this model has no such head: it "
                "needs fp.Composition(backbone, nn.Linear(q, K), ...)"
            )

    @property
    def features(self) -> int:
        layout = self.model.z_layout
        assert isinstance(layout, LinearLayout)
        return layout.inputs

    # --- a client's round --------------------------------------------------------------------

    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        # No g yet: what has no length is no mean of anything.
        return {"w": self.initial_w(), "g": self.initial_w().new_zeros(0)}

    def broadcast(self, server: Tensors) -> Tensors:
        return server

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        return {"t": broadcast["w"].new_zeros((len(units), self.features))}

    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer:
        w, g, key = round.broadcast["w"].expand(len(cohort), -1), round.broadcast["g"], round.key
        n, passes = cohort.sizes.to(w.dtype).unsqueeze(1), self.local.steps(cohort)
        if not len(g):
            new = self.train(self.local, w, cohort, key, pace=round.pace)
            mean, good = self.mean_features(new.w, cohort), finite(new.w)
            good = good & finite(mean)
            vectors = {"dw": n * (new.w - w), "n": n, "mean": n * mean}
            cost = training_cost(cohort, new.loss, good, passes + cohort.examples / 3, passes)
            return Answer(good, vectors, local, cost)
        both, loss = torch.cat((w, local["t"]), 1), self.shifted_loss(g, cohort.embedded)
        new = self.train(self.local, both, cohort, key, loss=loss, pace=round.pace)
        moved, t = new.w.split([w.shape[1], self.features], 1)
        good, cost = finite(new.w), training_cost(cohort, new.loss, finite(new.w), passes, passes)
        return Answer(good, {"dw": n * (moved - w), "n": n}, {"t": t.contiguous()}, cost)

    def shifted_loss(self, g: Tensor, embedded: bool) -> Loss:
        """Mean loss of one client in (phi, z, t), and the pull of its features' mean towards g."""
        sizes = [self.model.phi_layout.size, self.model.z_layout.size, self.features]

        def loss(
            w: Tensor, aux: Tensor, x: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
        ) -> Tensor:
            phi, z, t = torch.split_with_sizes(w, sizes)
            f = x if embedded else self.model.embed(phi, x, rows)
            assert isinstance(f, Tensor)
            own = f[..., : self.features]
            there = None if mask is None else mask.unsqueeze(-1)
            mean = own.mean(0) if there is None else torch.where(there > 0, own, 0).sum(0) / there.sum()
            value = self.model.log_prob(phi, z.unsqueeze(0), self.shifted(f, t), y, rows)[0]
            return 0.5 * self.kappa * (mean - g).square().mean() - mean_where(value, mask)

        return loss

    def shift_loss(self, phi: Tensor, z: Tensor) -> Loss:
        """Mean loss of one client in t alone, on features that do not change."""

        def loss(
            t: Tensor, aux: Tensor, f: Inputs, y: Tensor, mask: Tensor | None, rows: RowKeys | None
        ) -> Tensor:
            value = self.model.log_prob(phi, z.unsqueeze(0), self.shifted(f, t), y, rows)[0]
            return -mean_where(value, mask)

        return loss

    def shifted(self, f: Inputs, t: Tensor) -> Tensor:
        """Features with t added to those that the head sees; what is added to its outputs stays."""
        assert isinstance(f, Tensor)
        return f + torch.nn.functional.pad(t, (0, self.model.offsets))

    def mean_features(self, w: Tensor, cohort: Cohort) -> Tensor:
        """Everyone's mean features at its own w, ``[C, q]``; zero without data."""
        phi, means = split_w(self.model, w)["phi"], w.new_zeros((len(cohort), self.features))
        with torch.no_grad():
            for c, one in enumerate(cohort.one_by_one()):
                if len(one.y):
                    f = self.model.features(phi[c], one)
                    assert isinstance(f, Tensor)
                    means[c] = f[..., : self.features].mean(0)
        return means

    # --- the server's, and predictions -------------------------------------------------------

    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        move = total.mean("dw", by="n")
        if move is None:
            return server
        mean = total.mean("mean", by="n") if "mean" in total.weighted else None
        return {"w": server["w"] + move, "g": server["g"] if mean is None else mean}

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        phi, z = published["phi"], published["z"]
        if local is not None:
            t = local["t"]
        else:
            t = self.enter(cohort.units, {"w": join_w(phi, z)}, key)["t"]
            if cohort.longest:
                with torch.no_grad():
                    f = self.model.features(phi, cohort)
                loss, now = self.shift_loss(phi, z), key.at(purpose="newcomer")
                t = self.newcomer.run(loss, t, t[:, :0], f, cohort, now, dropout=False).w
        return {"t": t}

    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        phi = published["phi"]
        with torch.no_grad():
            f = self.shifted(self.model.embed(phi, x), personal["t"][0])
            eta = self.model.head_outputs(phi, published["z"].unsqueeze(0), f)
        return Predictive(eta, self.model.likelihood, self.model.params(phi), key, plug_in=True)

    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        phi, t = published["phi"], self.personalise(published, cohort, local, key)["t"]
        heads, out = published["z"].expand(len(cohort), 1, -1), []
        with torch.no_grad():
            features = self.model.features(phi, held_out)
            for c, (z, f, y) in enumerate(unit_by_unit(heads, features, held_out)):
                out.append(self.model.log_prob(phi, z, self.shifted(f, t[c]), y)[0].sum())
        return torch.stack(out).double(), held_out.sizes.double()
