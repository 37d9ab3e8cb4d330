"""A client's own network as a plain module of torch: to be served, exported, or looked into."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from fedpop.errors import SettingsError
from fedpop.message import Tensors
from fedpop.models.base import Model
from fedpop.models.composition import Composition
from fedpop.models.likelihoods import Likelihood, Params
from fedpop.models.split import Split


class NetworkEnsemble(nn.Module):
    """The mean of what several networks predict: class probabilities, or the mean of y."""

    def __init__(self, networks: list[nn.Module], likelihood: Likelihood, params: Params) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self._likelihood, self._params = likelihood, params

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        means = [self._likelihood.mean(network(*x, **named), self._params) for network in self.networks]
        return torch.stack(means).mean(0)


class Network(nn.Sequential):
    """A backbone and a head, called as the backbone is: with parts of x in order or by name."""

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        backbone, head = self
        out: Tensor = head(backbone(*x, **named))
        return out


def served(model: Model, published: Tensors, state: Tensors, draws: int | None) -> nn.Module:
    """The network of one unit's model: at its posterior mean, or an ensemble over so many of its draws."""
    phi = state["phi"][0] if "phi" in state else published["phi"]
    found = state.get("draws", state.get("z"))
    if found is None:
        raise SettingsError("this method's clients have more than parameters of their own: use predict")
    z = found.reshape(-1, found.shape[-1])
    if draws is None:
        return _network(model, phi, z.mean(0))
    if draws > len(z):
        raise SettingsError(f"Population.module: draws is at most {len(z)}, of which predictions are made")
    every = torch.linspace(0, len(z) - 1, draws).round().long()
    networks = [_network(model, phi, z[i]) for i in every.tolist()]
    return NetworkEnsemble(networks, model.likelihood, model.params(phi)).eval()


def _network(model: Model, phi: Tensor, z: Tensor) -> nn.Module:
    values = {
        n: v.detach().clone() for n, v in (model.phi_layout.views(phi) | model.z_layout.views(z)).items()
    }
    if isinstance(model, Split):
        network = deepcopy(model.module)
        network.load_state_dict(
            {n: v for n, v in values.items() if not n.startswith("likelihood.")}, strict=False
        )
        return network.eval()
    if not isinstance(model, Composition) or model.fixed is not None:
        raise SettingsError("a network has to be a Composition of backbone and head, or a Split: use predict")
    backbone, head = deepcopy(model.backbone), deepcopy(model.head)
    backbone.load_state_dict({n[9:]: v for n, v in values.items() if n.startswith("backbone.")}, strict=False)
    head.load_state_dict({n: values[n] for n in model.z_layout.names}, strict=False)
    return Network(backbone, head).eval()
