"""Tensors live where the user's model lives: no factory call in a method's work leaves its device open."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fedpop as fp
from fedpop.message import Total
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, by_name, cohort_of, linear_model, ragged, seeded, train_key

PACKAGE = str(Path(fp.__file__).parent)
FACTORIES = {
    getattr(torch, name)
    for name in (
        "arange",
        "as_tensor",
        "blackman_window",
        "empty",
        "eye",
        "from_numpy",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    )
}


class Factories(TorchFunctionMode):
    """Records calls from the package that make a tensor without saying where."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.placed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            # as_tensor of a tensor stays where that tensor is.
            if kwargs.get("device") is not None or (args and isinstance(args[0], torch.Tensor)):
                self.placed += 1
            else:
                self._blame(func)
        return func(*args, **kwargs)

    def _blame(self, func: Any) -> None:
        frame = sys._getframe(2)
        while frame is not None and "torch" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            where = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.found.add(f"torch.{func.__name__} in {where}, line {frame.f_lineno}")


@contextmanager
def watched() -> Iterator[Factories]:
    mode = Factories()
    with mode:
        yield mode
    assert not mode.found, "factory calls without a device:\n" + "\n".join(sorted(mode.found))


def softmax(backbone: nn.Module | None = None) -> fp.Composition:
    body = seeded(nn.Linear(3, 2), 1) if backbone is None else backbone
    return fp.Composition(body, seeded(nn.Linear(2, 3), 2), "categorical")


CLOSED = fp.chains.Chain(rao_blackwell=True)
METHODS: dict[str, Any] = {
    "exact": lambda: fp.FedSOUL(linear_model()),
    "left": lambda: fp.FedSOUL(linear_model(), beta_step=fp.steps.BetaStep(form="left")),
    "right, diagonal": lambda: fp.FedSOUL(
        linear_model(), beta_step=fp.steps.BetaStep(form="right"), prior="diagonal"
    ),
    "full covariance": lambda: fp.FedSOUL(
        linear_model(), prior="full", hyperprior=fp.priors.Hyperprior(1.0, 1.0)
    ),
    "closed form": lambda: fp.FedSOUL(linear_model(variance="learned"), chain=CLOSED),
    "mixture": lambda: fp.FedSOUL(linear_model(), prior="mixture"),
    "mixture, closed form": lambda: fp.FedSOUL(
        linear_model(), prior=fp.priors.Mixture(3, "full"), chain=CLOSED
    ),
    "mixture, jumps": lambda: fp.FedSOUL(
        fp.Composition(None, nn.Linear(3, 1), "poisson"), prior="mixture", local_steps=2
    ),
    "energy": lambda: fp.FedSOUL(
        linear_model(), prior=fp.priors.Energy(hidden=3, chains=8, ship=4), local_steps=2
    ),
    "plain steps": lambda: fp.FedSOUL.paper(
        linear_model(), rate=1e-2, hyperprior=fp.priors.Hyperprior(1.0, 1.0, (0, 1))
    ),
    "mini-batches, stateless": lambda: fp.FedSOUL(
        linear_model(), phi_step=fp.steps.PhiStep(batch=2), chain=fp.chains.Chain(stateful=False)
    ),
    "hmc": lambda: fp.FedSOUL(softmax(), local_steps=2, beta_step=fp.steps.Adam()),
    "dropout": lambda: fp.FedSOUL(softmax(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))), local_steps=2),
    "poisson": lambda: fp.FedSOUL(fp.Composition(None, nn.Linear(3, 1), "poisson"), local_steps=2),
    "network head": lambda: fp.FedSOUL(
        fp.Composition(None, nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)), "categorical"),
        local_steps=1,
    ),
    "network head, paper": lambda: fp.FedSOUL.paper(
        fp.Composition(None, nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)), "categorical"),
        rate=1e-3,
    ),
    "split": lambda: fp.FedSOUL(
        fp.Split(nn.Sequential(nn.Linear(3, 3)), "0.bias", "categorical"), local_steps=1
    ),
    "epochs on phi": lambda: fp.FedSOUL(
        linear_model(), phi_step=fp.steps.PhiStep(local=fp.LocalSGD(epochs=2, batch=2))
    ),
    "own steps": lambda: fp.FedSOUL(linear_model(), local_steps=by_name([1, 2, 3, 2])),
    "random start": lambda: fp.FedSOUL(linear_model(), start="random"),
    "clipped": lambda: fp.FedSOUL(linear_model(), clip=1.0),
    "qsgd": lambda: fp.FedSOUL(linear_model(), compressor="qsgd"),
    "one compressor each": lambda: fp.FedSOUL(
        linear_model(), compressor=by_name(["natural", "rand-k", "identity", "natural"])
    ),
    "fedavg": lambda: fp.FedAvg(linear_model(), local=fp.LocalSGD(batch=2)),
    "fedrep": lambda: fp.FedRep(linear_model(), phi_step=fp.steps.Adam()),
    "l2gd": lambda: fp.L2GD(linear_model()),
    "per-fedavg": lambda: fp.PerFedAvg(linear_model(), local=fp.LocalSGD(batch=3)),
    "pfedme": lambda: fp.PFedMe(linear_model(), local=fp.LocalSGD(rate=0.01)),
    "qlsd": lambda: fp.QLSD(linear_model(), variant="++", compressor="qsgd"),
    "fedrep exact": lambda: fp.FedRep(linear_model(), heads="exact", start="spectral"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_of_a_round_says_where_it_lives(name: str) -> None:
    method = METHODS[name]()
    clients = ragged()
    if method.model.likelihood.name == "categorical":
        clients = [(x, torch.arange(len(x)) % 3) for x, _ in clients]
    elif method.model.likelihood.name == "poisson":
        clients = [(x, torch.arange(len(x)).float()) for x, _ in clients]
    method = method.prepared(fp.Federation.of(clients).example)
    cohort, facts = cohort_of(method.model, clients), Facts(4, 5)
    with watched() as mode:
        server, local = begun(method, cohort, facts, train_key())
        done = answers(method, cohort, local, method.broadcast(server), train_key())
        server = method.server_round(server, done.total, facts, train_key())
        method.server_round(server, Total.of_nobody(4, ratio=False), facts, train_key(1))
        published = method.publish(server)
        method.metrics(server, done.cost)
        method.score(published, cohort, cohort, done.local, train_key())
    assert mode.placed > 0 or isinstance(method, fp.FedAvg)


def test_the_final_pass_and_predictions_too() -> None:
    for method in (fp.FedSOUL(linear_model()), fp.FedRep(linear_model())):
        cohort = cohort_of(method.model, ragged((3, 2)))
        published = method.publish(method.init(Facts(2, 5), train_key(), {}))
        x = torch.zeros(2, 3)
        local = None if isinstance(method, fp.FedSOUK) else {"z": torch.zeros(2, 2)}
        with watched():
            personal = method.personalise(published, cohort, local, train_key())
            one = {n: t[:1] for n, t in personal.items()}
            p = method.predict(published, one, x, train_key())
            p.interval(0.9), p.samples, p.entropy, p.sd, p.interval(0.5, of="mean")


def test_the_watch_catches_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would pass for the wrong reason."""
    method = fp.FedSOUL(linear_model())
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", str(Path(__file__).parent))
    with pytest.raises(AssertionError, match=r"torch\.zeros in .*test_devices\.py"), watched():
        torch.zeros(3)
    with watched():
        torch.zeros(3, device="cpu")
        method.model.initial_phi().new_zeros(3)
