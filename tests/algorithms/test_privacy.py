"""What a method declares private is never in a message, beyond what is documented of I and J."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms.base import Algorithm, Facts
from tests.helpers import cohort_of, linear_model, population_data, seeded, train_key

FACTS = Facts(1, 5)


def softmax() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 2), 2), nn.Tanh(), seeded(nn.Linear(2, 3), 3))
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, "categorical")


METHODS: dict[str, Any] = {
    "exact": lambda: fp.FedSOUL(linear_model()),
    "left": lambda: fp.FedSOUL(linear_model(), form="left"),
    "right": lambda: fp.FedSOUL(linear_model(), form="right"),
    "closed form": lambda: fp.FedSOUL(linear_model(), rao_blackwell=True),
    "full covariance": lambda: fp.FedSOUL(linear_model(), prior="full"),
    "mixture": lambda: fp.FedSOUL(linear_model(), prior="mixture"),
    "energy": lambda: fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16)),
    "mini-batches": lambda: fp.FedSOUL(linear_model(), phi_batch=2),
    "qsgd": lambda: fp.FedSOUL(linear_model(), compressor="qsgd"),
    "rand-k": lambda: fp.FedSOUL(linear_model(), compressor=fp.compressors.RandK(k=3)),
    "natural": lambda: fp.FedSOUL(linear_model(), compressor="natural"),
    "paper": lambda: fp.FedSOUL.paper(linear_model(), rate=1e-2),
    "hmc": lambda: fp.FedSOUL(softmax(), local_steps=3),
    "head through vmap": lambda: fp.FedSOUL(curved(), local_steps=3),
    "fedrep": lambda: fp.FedRep(linear_model()),
    "fedrep exact": lambda: fp.FedRep(linear_model(), heads="exact", start="spectral"),
    "fedavg": lambda: fp.FedAvg(linear_model()),
}


def one_client(
    method: Algorithm,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Local state before and after a round of a cohort of one, and every phase's message."""
    data, _, _ = population_data(1, 6, 3, 2, 0.5)
    if method.model.likelihood.name == "categorical":
        data = [(data[0][0], torch.arange(6) % 3)]
    cohort = cohort_of(method.model, data)
    server = method.init(FACTS, train_key())
    messages, local, new = {}, {}, {}
    for phase in method.phases:
        broadcast = method.broadcast(phase, server)
        if phase == "train":
            local = method.enter(cohort.ids, broadcast, train_key())
        new, message, _ = method.local_round(
            phase, broadcast, cohort, local, method.channel(train_key()), train_key()
        )
        server = method.server_round(phase, server, message, FACTS, train_key())
        messages[phase] = message.sums
    return local, new, messages


def holds(vector: Tensor, secret: Tensor) -> bool:
    """Whether the secret's numbers appear, one after the other, anywhere in the vector."""
    vector, secret = vector.flatten().double(), secret.flatten().double()
    if len(secret) > len(vector) or not bool(secret.any()):
        return False
    return bool(torch.isclose(vector.unfold(0, len(secret), 1), secret, rtol=1e-5, atol=1e-7).all(1).any())


@pytest.mark.parametrize("name", METHODS)
def test_private_state_is_in_no_message(name: str) -> None:
    method = METHODS[name]()
    local, new, messages = one_client(method)
    # A mass matrix is there for heads through vmap only.
    private = set(method.private) & set(new)
    assert private == {n for n in method.private if n == "z" or name == "head through vmap"}
    for sums in messages.values():
        for vector in sums.values():
            for state in (local, new):
                assert not any(holds(vector, state[secret]) for secret in private)


@pytest.mark.parametrize("name", METHODS)
def test_messages_hold_what_is_documented_and_no_more(name: str) -> None:
    method = METHODS[name]()
    _, _, messages = one_client(method)
    phi = method.model.phi_layout.size
    if isinstance(method, fp.FedSOUK):
        expected = {"I": method.prior.size(method.model.z_layout.size), "J": phi}
        if "curvature" in messages["train"]:  # one number, for EM steps with a linear head
            assert isinstance(method.beta_step, fp.steps.EM)
            expected["curvature"] = 1
        if not method.prior.normalised:  # the client's weight, which the server knows
            expected["weight"] = 1
    elif isinstance(method, fp.FedRep):
        expected = {"dphi": phi, "n": 1}
    else:
        expected = {"dw": phi + method.model.z_layout.size, "n": 1}
    assert {n: t.numel() for n, t in messages["train"].items()} == expected
    before = {"moments": {"second", "count"}, "spectral": {"cross", "pairs"}, "scale": {"size"}}
    for phase, names in before.items():
        assert set(messages.get(phase, names)) == names


@pytest.mark.parametrize("steps", [1, 7])
def test_what_i_reveals_is_the_mean_of_the_draws(steps: int) -> None:
    """As the docs say: mu + sigma^2 I_mu; with one transition that is the draw itself."""
    method = fp.FedSOUL(linear_model(), local_steps=steps, form="left")
    _, new, messages = one_client(method)
    # One client, so the message is its own; mu = 0 and sigma = 1 after a spectral start.
    revealed = messages["train"]["I"][:2]
    assert torch.allclose(revealed, new["z"][0, 0], atol=1e-5) is (steps == 1)


def test_holds_can_tell() -> None:
    """The check itself: it finds a vector inside another, and nothing where there is nothing."""
    assert holds(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([[1.0, 2.0]]))
    assert not holds(torch.tensor([0.0, 1.0, 2.5, 3.0]), torch.tensor([[1.0, 2.0]]))
