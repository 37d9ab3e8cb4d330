"""LG-FedAvg (Liang et al., 2020): private bodies under a shared head, FedPer's mirror image.

    client   (body_i, head_i) after E epochs of SGD on f_i, from (body_i, z);  keeps body_i,
             sends n_i (head_i - z) and n_i
    server   z += sum n_i (head_i - z) / sum n_i

A client predicts with its own body and the server's head. One that took part in no round trains a body under
that head, which stays fixed, from the body as it was given. The authors' code starts from a model that FedAvg
trained and counts clients alike; here the model starts as it was given (give FedAvg's to do the same), and
the mean is weighted by n_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedpop.client.losses import body_loss
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.base import About
from fedpop.methods.fedper import SharedPart
from fedpop.methods.whole import require_data


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedPart):
    """A shared head over private bodies.

    Args:
        model: What is fitted, such as ``fp.Composition(backbone, head, likelihood)``.
        local: How clients train in a round; ``fp.LocalSGD()`` by default: one epoch, rate 0.01, one
            batch.
        newcomer: How a client that took part in no round trains its body; ``fp.LocalSGD(epochs=10)``
            by default.
        schedule: What the rates of local steps are multiplied by over the rounds, such as
            ``fp.steps.Cosine()``; ``fp.steps.Constant()`` by default.
        compressor: Of n_i (z_i - z), which clients send: one of ``fp.compressors`` or its name, or a
            mapping from clients' names to them. "identity" (the default) sends it as it is.
        clip: The largest norm of it; longer ones are shortened, which biases their mean. None (the
            default) does not.
        guard: How many times the usual norm makes a client's message absurd, so that it is left out;
            1000 by default, None for never.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> body, head = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> for layer in (body, head):
    ...     _ = torch.nn.init.ones_(layer.weight)
    >>> model = fp.Composition(body, head, fp.likelihoods.Normal(1.0))
    >>> method = fp.LGFedAvg(model, local=fp.LocalSGD(epochs=5, rate=0.1))
    >>> population = method.fit([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], rounds=50)
    >>> [round(population.predict(i, [[1.0]]).mean.item(), 2) for i in (0, 1)]
    [2.0, 4.0]
    """

    name: ClassVar[str] = "LG-FedAvg"
    about: ClassVar[About] = About("Liang et al., 2020", personalised=True)
    private: ClassVar[tuple[str, ...]] = ("phi",)
    guarded: ClassVar[tuple[str, ...]] = ("dz",)
    private_sums: ClassVar[tuple[str, ...]] = ("dz",)
    compressed: ClassVar[tuple[str, ...]] = ("dz",)
    shared: ClassVar[str] = "z"
    own: ClassVar[str] = "phi"

    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        z = published["z"].expand(len(cohort), -1)
        if local is not None:
            return {"phi": local["phi"], "z": z}
        require_data(cohort, self, "the head is shared, but its body would be as it was given")
        phi, loss = published["phi"].expand(len(cohort), -1), body_loss(self.model, cohort.embedded)
        now = key.at(purpose="newcomer")
        own = self.train(self.newcomer, phi, cohort, now, aux=z.unsqueeze(1), loss=loss)
        return {"phi": own.w, "z": z}
