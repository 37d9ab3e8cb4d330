"""What a method declares private is never in a message, beyond what is documented of I and J."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.methods.base import Algorithm, Asks, Facts
from tests.helpers import (
    Answered,
    answers,
    asked,
    cohort_of,
    linear_model,
    population_data,
    seeded,
    train_key,
)

FACTS = Facts(1, 5)


def softmax() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 2), 2), nn.Tanh(), seeded(nn.Linear(2, 3), 3))
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, "categorical")


METHODS: dict[str, Any] = {
    "exact": lambda: fp.FedSOUL(linear_model()),
    "left": lambda: fp.FedSOUL(linear_model(), beta_step=fp.steps.BetaStep(form="left")),
    "right": lambda: fp.FedSOUL(linear_model(), beta_step=fp.steps.BetaStep(form="right")),
    "closed form": lambda: fp.FedSOUL(linear_model(), chain=fp.chains.Chain(rao_blackwell=True)),
    "full covariance": lambda: fp.FedSOUL(linear_model(), prior="full"),
    "mixture": lambda: fp.FedSOUL(linear_model(), prior="mixture"),
    "energy": lambda: fp.FedSOUL(linear_model(), prior=fp.priors.Energy(hidden=4, chains=16)),
    "mini-batches": lambda: fp.FedSOUL(linear_model(), phi_step=fp.steps.PhiStep(batch=2)),
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
    """Local state before and after a round of a cohort of one, and what the server sees of every question and
    of the round, by the question's name or as ``train``: of one client, that is what it sends."""
    data, _, _ = population_data(1, 6, 3, 2, 0.5)
    if method.model.likelihood.name == "categorical":
        data = [(data[0][0], torch.arange(6) % 3)]
    cohort = cohort_of(method.model, data)
    messages, known, noted = {}, {}, {}
    for question in method.questions(FACTS, train_key()) if isinstance(method, Asks) else ():
        found, done = asked(question, cohort, known, train_key())
        messages[question.name] = seen(done)
        known, noted = known | found, noted | done.local
    server = method.init(FACTS, train_key(), known)
    broadcast = method.broadcast(server)
    local = method.enter(cohort.units, broadcast, train_key()) | noted
    done = answers(method, cohort, local, broadcast, train_key())
    return local, done.local, messages | {"train": seen(done)}


def seen(done: Answered) -> dict[str, Tensor]:
    """Everything that the server gets to know; of one client all sums are the same."""
    total = done.total
    assert total.plain.keys() == total.weighted.keys()
    assert not total.named
    return total.plain


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
    # A mass matrix is there for heads through vmap only, a mode for those whose chains follow one.
    private = set(method.private) & set(new)
    learned = {"head through vmap": "mass_", "hmc": ("mode", "width")}.get(name, "none")
    assert private == {n for n in method.private if n == "z" or n.startswith(learned)}
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
        prior = method.hierarchy.prior
        expected = {"I": prior.size(method.model.z_layout.size), "J": phi}
        if "curvature" in messages["train"]:  # one number, for EM steps with a linear head
            assert isinstance(method.on_beta.on(method.hierarchy), fp.steps.EM)
            expected["curvature"] = 1
    elif isinstance(method, fp.FedRep):
        expected = {"dphi": phi, "n": 1}
    else:
        expected = {"dw": phi + method.model.z_layout.size, "n": 1}
    assert {n: t.numel() for n, t in messages["train"].items()} == expected
    before = {
        "second moments": {"second", "count"},
        "cross products": {"cross", "even", "pairs"},
        "feature scale": {"size"},
        "target size": {"size"},
        "least squares": {"moments"},
    }
    assert set(messages) <= {"train", *before}
    for question, names in before.items():
        assert set(messages.get(question, names)) == names


@pytest.mark.parametrize("steps", [1, 7])
def test_what_i_reveals_is_the_mean_of_the_draws(steps: int) -> None:
    """As the docs say: mu + sigma^2 I_mu; with one transition that is the draw itself."""
    method = fp.FedSOUL(linear_model(), local_steps=steps, beta_step=fp.steps.BetaStep(form="left"))
    _, new, messages = one_client(method)
    # One client, so the message is its own; mu = 0 and sigma = 1 after a spectral start.
    revealed = messages["train"]["I"][:2]
    assert torch.allclose(revealed, new["z"][0, 0], atol=1e-5) is (steps == 1)


def test_holds_can_tell() -> None:
    """The check itself: it finds a vector inside another, and nothing where there is nothing."""
    assert holds(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([[1.0, 2.0]]))
    assert not holds(torch.tensor([0.0, 1.0, 2.5, 3.0]), torch.tensor([[1.0, 2.0]]))
