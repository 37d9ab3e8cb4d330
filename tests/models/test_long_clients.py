"""A client with more examples than fit at once: looked at in blocks, to the same posterior."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedpop as fp
from fedpop.models import local
from tests.helpers import federation_of, generator, seeded

MODELS: dict[str, Any] = {
    "normal": lambda: fp.Composition(None, seeded(nn.Linear(3, 1)), fp.likelihoods.Normal(0.5)),
    "with fixed effects": lambda: fp.Composition(
        None, seeded(nn.Linear(3, 1)), fp.likelihoods.Normal(0.5), fixed=seeded(nn.Linear(3, 1), 1)
    ),
    "poisson": lambda: fp.Composition(None, seeded(nn.Linear(3, 1)), "poisson"),
    "categorical": lambda: fp.Composition(nn.Linear(3, 2), seeded(nn.Linear(2, 3)), "categorical"),
    "network": lambda: fp.Composition(
        nn.Linear(3, 2), nn.Sequential(seeded(nn.Linear(2, 2)), nn.Tanh(), seeded(nn.Linear(2, 1))), "normal"
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_add_up_to_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 23 numbers in another order: within a few roundings of float32."""
    model = MODELS[name]()
    g = generator(3)
    clients = [(torch.randn(n, 3, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in (23, 4, 0)]
    federation = federation_of(model, [(x, y if name == "categorical" else y.float()) for x, y in clients])
    model = model.prepared(federation.example)
    cohort, phi = federation.cohort(torch.arange(3), torch.device("cpu")), model.initial_phi()
    z = torch.randn(3, 2, model.z_layout.size, generator=g).to(phi.dtype)

    def seen() -> list[Tensor]:
        bound = model.bind(phi, model.features(phi, cohort), cohort, None)
        out = [bound.value(z), *bound.value_and_grad(z), bound.grad(z)]
        if isinstance(bound, local.LinearLikelihood):
            out.append(bound.curvature_at(z[:, 0]))
        return [t.detach() for t in out]

    whole = seen()
    monkeypatch.setattr(local, "ROWS_AT_ONCE", 5)
    for one, other in zip(whole, seen(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most entries that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                # A view takes nothing; what it is a view of was counted.
                self.entries = max(self.entries, one.untyped_storage().nbytes() // one.element_size())
        return out


def test_the_final_pass_of_a_long_client_holds_a_block_at_a_time() -> None:
    """1,000 draws of a client with 40,000 examples would have 40 million outputs."""
    rows = 40_000
    x = torch.randn(rows, 2, generator=generator(1))
    model = fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    population = fp.FedSOUL(model).fit({"long": (x, x.sum(1))}, rounds=1)
    with Largest() as largest:
        draws = population.posterior("long").draws
    assert draws.shape[:2] == (4, 250)
    assert largest.entries <= local.ROWS_AT_ONCE * 1000
