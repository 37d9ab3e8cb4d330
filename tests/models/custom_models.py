"""Models by functions that several tests share: the linear Normal one, and a curve."""

from typing import Any

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.methods.base import Facts
from tests.helpers import generator, seeded

WIDE = torch.float64
Named = dict[str, Tensor]
positive, unit = fp.links.positive, fp.links.unit
FACTS = Facts(clients=3, rounds=10)

SHORT = fp.chains.Final(draws=40, burn_in=20)  # how many draws users see does not matter here, only which
BURNT_IN = fp.chains.Chain(burn_in=5)
QUICK: dict[str, Any] = {"local_steps": 2, "chain": BURNT_IN, "final": SHORT}


# --- the linear Normal model, written twice -----------------------------------------------------

VARIANCE = 0.3


def linear_log_likelihood(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    eta = x @ phi["w"].mT @ z["v"]
    return -0.5 * ((y - eta) ** 2 / VARIANCE + torch.log(torch.tensor(2 * torch.pi * VARIANCE)))


def linear_outputs(phi: Named, z: Named, x: Tensor) -> Tensor:
    return x @ phi["w"].mT @ z["v"]


def backbone() -> nn.Module:
    return seeded(nn.Linear(3, 2, bias=False).to(WIDE), 1)


def composition(nested: bool) -> fp.Composition:
    head: nn.Module = nn.Linear(2, 1, bias=False).to(WIDE)
    with torch.no_grad():
        head.weight.zero_()
    return fp.Composition(
        backbone(), nn.Sequential(head) if nested else head, fp.likelihoods.Normal(VARIANCE)
    )


def custom(whole: bool) -> fp.CustomModel:
    """``whole``: the function gives the log-likelihood itself, else the outputs of one."""
    phi, z = {"w": backbone().weight.detach()}, {"v": [0.0, 0.0]}
    if whole:
        return fp.CustomModel(linear_log_likelihood, phi=phi, z=z)
    return fp.CustomModel(outputs=linear_outputs, likelihood=fp.likelihoods.Normal(VARIANCE), phi=phi, z=z)


# --- a nonlinear one, by hand -------------------------------------------------------------------


def growth(phi: Named, z: Named, x: Named) -> Tensor:
    """A curve with a parameter of each kind; not defined at time zero, which padding with zeros would be."""
    rise = torch.log(x["time"]) * phi["rate"] / torch.sqrt(x["time"])
    return z["share"] * rise + (z["slope"] * x["dose"]).sum(-1) + phi["level"]


def growth_model(**options: Any) -> fp.CustomModel:
    return fp.CustomModel(
        outputs=growth,
        likelihood=options.pop("likelihood", fp.likelihoods.Normal(0.5)),
        phi={"rate": positive(0.7), "level": 0.2},
        z={"share": unit(0.3), "slope": positive([0.5, 1.5])},
        **options,
    )


def growth_data(sizes: tuple[int, ...] = (3, 0, 5, 1)) -> list[tuple[Named, Tensor]]:
    g = generator(8)
    return [
        (
            {
                "time": 0.5 + 3 * torch.rand(n, generator=g, dtype=WIDE),
                "dose": torch.randn(n, 2, generator=g, dtype=WIDE),
            },
            torch.randn(n, generator=g, dtype=WIDE),
        )
        for n in sizes
    ]
