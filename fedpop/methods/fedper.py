"""FedPer (Arivazhagan et al., 2019): a shared body under private heads, both trained together.

    client   (body_i, head_i) after E epochs of SGD on f_i, from (phi, head_i);  keeps head_i,
             sends n_i (body_i - phi) and n_i
    server   phi += sum n_i (body_i - phi) / sum n_i

A client predicts with the server's body and its own head. One that took part in no round trains a head on
that body, frozen, from the head as it was given. The rule is the paper's; its authors' code was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import About
from fedpop.methods.shared_part import SharedPart
from fedpop.methods.whole import require_data


@dataclass(frozen=True, kw_only=True)
class FedPer(SharedPart):
    """A shared body with private heads, trained jointly.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round fits its head; ``fp.LocalSGD(epochs=10)``
            by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (phi_i - phi), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedPer(model, local=fp.LocalSGD(epochs=10, rate=1.0))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=3)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    name: ClassVar[str] = "FedPer"
    about: ClassVar[About] = About("Arivazhagan et al., 2019", personalised=True, bounds=False)
    private: ClassVar[tuple[str, ...]] = ("z",)
    guarded: ClassVar[tuple[str, ...]] = ("dphi",)
    private_sums: ClassVar[tuple[str, ...]] = ("dphi",)
    compressed: ClassVar[tuple[str, ...]] = ("dphi",)
    shared: ClassVar[str] = "phi"
    own: ClassVar[str] = "z"

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        if local is not None:
            return {"z": local["z"]}
        require_data(cohort, self, "the body is shared, but its head would be as it was given")
        z = published["z"].expand(len(cohort), -1)
        return {"z": self.train_head(self.newcomer, published["phi"], z, cohort, key.at(purpose="newcomer"))}
