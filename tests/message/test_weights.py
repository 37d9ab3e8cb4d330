"""Participation weights at the site, before a message is compressed, or at the server, after decoding: the
same sums to rounding where compression does not see the size of a vector, the same in expectation where it
rounds to powers of two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.keys import Key
from fedpop.message import Answer, Channel, Message, Total
from fedpop.message.compressors import QSGD, Compressor, Identity, Natural, RandK
from fedpop.message.message import PLAIN
from fedpop.methods import METHODS
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from tests.apart import Apart
from tests.helpers import generator
from tests.methods.conformance import clients, made
from tests.tally import Tally

UNITS = torch.arange(100, 107)
WEIGHTS = torch.tensor([1.0, 3.7, 0.21, 12.5, 1.0, 2.0, 0.9], dtype=torch.float64)
GOOD = torch.tensor([True, True, False, True, True, True, True])
SAME = {"identity": Identity(), "rand-k": RandK(10), "qsgd": QSGD(levels=15)}
ROUNDING = {"identity": 1e-12, "rand-k": 1e-12, "qsgd": 2**-23}
"""Relative to the sum of absolute values; QSGD sends norms in float32."""


def answer(good: Tensor = GOOD) -> Answer:
    vectors = {
        "J": torch.randn(7, 40, generator=generator(1), dtype=torch.float64),
        "n": torch.arange(1.0, 8.0, dtype=torch.float64).unsqueeze(1),
    }
    by = torch.tensor([0.0, 2.0, 1.0, 0.5, 0.0, 1.0, 3.0], dtype=torch.float64)
    return Answer(good, vectors, named={"later": ("J", by)})


def summed(
    compressor: Compressor, weigh: bool, seed: int = 0, sites: Tensor | None = None, **more: Any
) -> Total:
    channel = Channel(compressor, ("J",), **more)
    tally = Tally(channel, Key(seed), weigh=weigh, plain=("J", "n"))
    weights = WEIGHTS if sites is None else WEIGHTS[sites]
    tally.add(replace(answer(), named={}) if sites is not None else answer(), UNITS, weights, sites)
    return tally.total(9, ratio=False)


def rounding(compressor: Compressor, name: str) -> float:
    """How far two sums may be apart, each entry of which is at most the norm of its vector."""
    norms = torch.linalg.vector_norm(answer().vectors["n" if name == "n" else "J"], dim=1)
    return ROUNDING[compressor.name] * 3 * float(norms @ WEIGHTS)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("compressor", SAME.values(), ids=SAME)
def test_weights_at_the_site_or_after_decoding(compressor: Compressor, clip: float | None) -> None:
    here, there = (summed(compressor, weigh, clip=clip) for weigh in (True, False))
    assert here.count == there.count == 6
    assert here.weight == pytest.approx(there.weight, rel=1e-12)
    for which in ("weighted", "plain", "named"):
        ours, theirs = getattr(here, which), getattr(there, which)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=rounding(compressor, name))


@pytest.mark.parametrize("compressor", SAME.values(), ids=SAME)
def test_weights_of_sites_with_several_units(compressor: Compressor) -> None:
    """A site has one weight, that of each of its units."""
    sites = torch.tensor([5, 5, 5, 2, 2, 6, 6])
    here, there = (summed(compressor, weigh, sites=sites) for weigh in (True, False))
    assert here.count == there.count
    assert here.weight == pytest.approx(there.weight, rel=1e-12)
    for which in ("weighted", "plain"):
        for name, total in getattr(there, which).items():
            atol = rounding(compressor, name)
            torch.testing.assert_close(getattr(here, which)[name], total, rtol=0, atol=atol)


def test_natural_compression_has_the_same_expectation_either_way() -> None:
    """Its draws differ, since powers of two do: over many keys each mean is within five standard errors of
    the uncompressed sum (the variance of an entry is at most an eighth of its square)."""
    seeds = 400
    exact = summed(Identity(), weigh=False).weighted["J"]
    good = answer().vectors["J"][GOOD] * WEIGHTS[GOOD].unsqueeze(1)
    error = (good.square().sum(0) / 8 / seeds).sqrt()
    for weigh in (True, False):
        mean = torch.stack([summed(Natural(), weigh, seed).weighted["J"] for seed in range(seeds)]).mean(0)
        assert bool(((mean - exact).abs() <= 5 * error).all())


def test_plain_sums_are_sent_beside_weighted_ones_only_where_they_are_wanted() -> None:
    tally = Tally(Channel(), Key(0), weigh=True, plain=("n",))
    message = tally.sending.sent(Message.of(answer(), UNITS), WEIGHTS, torch.ones_like(UNITS))
    assert set(message.vectors) == {"J", "n", PLAIN + "n", "named.later"}
    assert message.weighted


# --- whole runs ------------------------------------------------------------------------------------

RULE = fp.participation.Bernoulli([0.5, 0.8, 1.0, 0.35, 0.9, 1.0, 0.6])
ANY = [n for n, m in METHODS.items() if m.participation == "any"]
CASES = [
    (n, c) for n in ANY for c in ("identity", "rand-k", "qsgd") if c == "identity" or METHODS[n].compressed
]


LOOSE = {"rtol": 1e-5, "atol": 1e-6}
"""QSGD's norms are float32."""


def after(method: fp.FedAvg, weigh: str, rounds: int = 3) -> dict[str, Tensor]:
    federation = fp.Federation.of(clients("softmax"))
    method = method.prepared(federation.example)
    run = Run(method, method.model.checked(federation), Settings(20, 0, RULE, weigh=weigh))
    run.begin()
    for _ in range(rounds):
        run.train_round()
    return run.server


@pytest.mark.parametrize(("name", "compressor"), CASES)
def test_a_run_is_the_same(name: str, compressor: str) -> None:
    """The simulator both ways, and sites of one whose weighted messages go through bytes."""
    method = made(name, "softmax", compressor=compressor)
    server = after(method, "server")
    apart = Apart(method, clients("softmax"), rule=RULE, weigh=True)
    for _ in range(3):
        apart.train_round()
    close = LOOSE if compressor == "qsgd" else {"rtol": 1e-7, "atol": 1e-9}
    for other in (after(method, "site"), apart.server):
        assert other.keys() == server.keys()
        for n in server:
            torch.testing.assert_close(other[n], server[n], **close, equal_nan=True)


@pytest.mark.parametrize("variant", ["star", "++"])
def test_what_qlsd_remembers_is_what_the_server_saw(variant: str) -> None:
    method = made("QLSD", "softmax", variant=variant, batch=2, compressor="qsgd", refresh=2)
    server, other = after(method, "server"), after(method, "site")
    for n in server:
        torch.testing.assert_close(other[n], server[n], **LOOSE, equal_nan=True)
