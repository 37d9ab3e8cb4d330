"""Several clients at one site: they send one message together, and what is learned is the same."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key, unit_of
from fedpop.message import Answer, Channel
from fedpop.run.run import Run, Settings
from tests.helpers import FRAME, federation_of, linear_model, ragged, seeded
from tests.tally import Tally

SITES = {
    "north": ["client-0", "client-3", "client-4"],
    "south": ["client-5", "client-1"],
    "west": ["client-2"],
}
CLIENTS = ragged((3, 0, 5, 1, 2, 4))


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 2), nn.Tanh())
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, fp.likelihoods.Normal(0.5))


STEPS = {f"client-{i}": 1 + i % 3 for i in range(6)}
SGD = fp.LocalSGD(epochs=2, rate=0.02, batch=2)
METHODS: dict[str, Any] = {
    "exact": lambda: fp.FedSOUL(linear_model()),
    "closed form": lambda: fp.FedSOUL(linear_model(), chain=fp.chains.Chain(rao_blackwell=True)),
    "mini-batches": lambda: fp.FedSOUL(linear_model(), phi_step=fp.steps.PhiStep(batch=2)),
    "random start": lambda: fp.FedSOUL(linear_model(), start="random"),
    "own steps": lambda: fp.FedSOUL(linear_model(), local_steps=STEPS),
    "epochs on phi": lambda: fp.FedSOUL(linear_model(), phi_step=fp.steps.PhiStep(local=SGD)),
    "mass matrix": lambda: fp.FedSOUL(curved(), local_steps=2, chain=fp.chains.Chain(burn_in=5)),
    "paper": lambda: fp.FedSOUL.paper(linear_model(), rate=1e-2),
    "FedAvg": lambda: fp.FedAvg(linear_model(), local=SGD),
    "FedRep": lambda: fp.FedRep(linear_model(), head=SGD, body=SGD),
    "SCAFFOLD": lambda: fp.SCAFFOLD(linear_model(), local=SGD),
    "QLSD": lambda: fp.QLSD(linear_model(), step=1e-3),
}


@pytest.mark.parametrize("participation", [None, 4], ids=["everyone", "some"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_learned_does_not_depend_on_who_shares_a_site(name: str, participation: Any) -> None:
    """Sums of sums are sums, to rounding: theta, what clients keep, losses, and who was active."""
    alone, together = (
        METHODS[name]().fit(CLIENTS, rounds=5, participation=participation, sites=sites)
        for sites in (None, SITES)
    )
    torch.testing.assert_close(together.published, alone.published, rtol=1e-4, atol=1e-5)
    assert together.store is not None
    assert alone.store is not None
    assert torch.equal(together.store.entered, alone.store.entered)
    stored = alone.store.entered.nonzero().squeeze(1)
    theirs, units_alone = (p.store.get(stored, torch.device("cpu")) for p in (together, alone))
    torch.testing.assert_close(theirs, units_alone, rtol=1e-3, atol=1e-4)
    for a, b in zip(alone.history, together.history, strict=True):
        assert a["active"] == b["active"]
        assert (a["loss"] is None) == (b["loss"] is None)
        assert a["loss"] is None or a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    for work in ("head_steps", "gradient_evaluations"):  # a cohort burns in as long as one of it is new
        assert together.totals[work] == alone.totals[work] or (name, participation) == ("mass matrix", 4)
    # J of each client is made by itself then: one forward pass more than one backward pass for all takes.
    ratio = together.totals["backbone_passes"] / alone.totals["backbone_passes"]
    assert 1 - 1e-9 < ratio < 4 / 3 + 1e-9


def test_a_site_sends_and_receives_once_whoever_is_there() -> None:
    """Six clients at three sites: half of the bytes, in the questions before round one and in each round."""
    method = fp.FedSOUL(linear_model(), beta_step=fp.steps.Adam(), guard=None)
    alone, together = (method.fit(CLIENTS, rounds=3, sites=sites) for sites in (None, SITES))
    # Second moments (9 entries and a count), cross products (twice 9 and a count), then J (6) and I (3), of 4
    # bytes each; the size of y (a square and a count) in double precision; every vector in its frame.
    before = 3 * (6 * FRAME + 4 * (10 + 19) + 8 * 2)
    for k, (a, b) in enumerate(zip(alone.history, together.history, strict=True), 1):
        assert b["bytes_up"] == before + k * 3 * (2 * FRAME + 4 * (6 + 3))
        assert 2 * b["bytes_up"] == a["bytes_up"]
        assert 2 * b["bytes_down"] == a["bytes_down"]


def test_a_site_of_which_nobody_takes_part_sends_nothing() -> None:
    method = fp.FedAvg(linear_model())
    population = method.fit(CLIENTS, rounds=20, participation=0.3, sites=SITES)
    federation, rule = fp.Federation.of(CLIENTS), fp.participation.Bernoulli(0.3)
    where = {name: site for site, names in SITES.items() for name in names}
    up = down = 0
    for k, line in enumerate(population.history):
        ids = rule.draw(federation.roster, Key(0).at(round=k, purpose="participation")).ids.tolist()
        there = {where[federation.names[i]] for i in ids}
        up, down = up + len(there) * (2 * FRAME + 4 * (8 + 1)), down + len(there) * 4 * 8
        assert (line["bytes_up"], line["bytes_down"]) == (up, down)
    assert len({line["active"] for line in population.history}) > 2


# --- through a compressor -----------------------------------------------------------------------


def test_a_compressor_meets_the_sum_of_a_site_under_the_sites_name() -> None:
    channel, key = Channel(fp.compressors.QSGD(levels=3), ("J",)), Key(4, round=2)
    j, n = Key(1).normal(torch.arange(5), (40,)), torch.arange(1.0, 6).unsqueeze(1)
    north, south = unit_of("north"), unit_of("south")
    sites = torch.tensor([north, south, north, north, south])
    tally = Tally(channel, key)
    good = torch.tensor([True, True, False, True, True])
    received = tally.add(Answer(good, {"J": j, "n": n}), torch.arange(5), torch.ones(5), sites)
    assert torch.equal(received.heard, good)
    total = tally.total(5, ratio=True)
    sums, names = torch.stack((j[0] + j[3], j[1] + j[4])), torch.tensor([north, south])
    seen, size = channel.carry("J", sums, names, key)
    torch.testing.assert_close(total.plain["J"], seen.sum(0))
    assert float(total.plain["n"]) == 1 + 4 + 2 + 5  # nobody compresses that
    assert tally.bytes_up == size + 2 * (FRAME + 4)
    assert (total.count, total.weight) == (4, 4.0)


def test_sites_of_one_with_their_clients_names_are_no_sites_at_all() -> None:
    """Compressed under the same name, so that what arrives is the same."""
    method = fp.FedSOUL(linear_model(), compressor=fp.compressors.QSGD(levels=7))
    units_alone = {f"client-{i}": [f"client-{i}"] for i in range(6)}
    alone, named = (method.fit(CLIENTS, rounds=5, sites=sites) for sites in (None, units_alone))
    torch.testing.assert_close(named.published, alone.published, rtol=1e-4, atol=1e-5)
    assert named.totals["bytes_up"] == alone.totals["bytes_up"]


def test_a_compressor_saves_bytes_for_each_site() -> None:
    method = fp.FedSOUL(linear_model(), beta_step=fp.steps.Adam(), compressor="qsgd")
    population = method.fit(CLIENTS, rounds=3, sites=SITES)
    size = fp.compressors.QSGD().encoded_bytes(6)
    lines = [line["bytes_up"] for line in population.history]
    assert [b - a for a, b in pairwise(lines)] == [3 * (size + FRAME + 4 * 3)] * 2


def test_memories_of_one_site_add_up_to_what_the_server_has_of_them() -> None:
    """QLSD++: the server's memory is the sum of what it saw, which a site's clients share evenly."""
    compressor = fp.compressors.QSGD(levels=3)
    method = fp.QLSD(linear_model(), variant="++", step=1e-3, compressor=compressor)
    settings = Settings(4, 0, fp.participation.Uniform(4), sites=SITES)
    run = Run(method, federation_of(method.model, CLIENTS), settings)
    run.begin()
    for _ in range(4):
        run.train_round()
        stored = run.sites.store.entered.nonzero().squeeze(1)
        units_alone = run.sites.store.get(stored, torch.device("cpu"))["memory"]
        torch.testing.assert_close(units_alone.sum(0), run.server["memory"], rtol=1e-4, atol=1e-5)
    assert float(run.server["memory"].abs().max()) > 0.1


# --- weights ------------------------------------------------------------------------------------


def test_units_of_a_site_that_count_differently_are_refused() -> None:
    mixed = fp.participation.Bernoulli((0.9, 0.9, 0.9, 0.8, 0.9, 0.9))  # client-3 is in the north
    with pytest.raises(SettingsError, match="units of one site take part with different probabilities"):
        fp.FedSOUL(linear_model()).fit(CLIENTS, rounds=20, participation=mixed, sites=SITES)


def test_sites_may_count_differently() -> None:
    rule = fp.participation.Bernoulli((0.9, 0.5, 0.8, 0.9, 0.9, 0.5))  # alike within each site
    method = fp.FedSOUL(linear_model())
    alone, together = (
        method.fit(CLIENTS, rounds=8, participation=rule, sites=sites) for sites in (None, SITES)
    )
    torch.testing.assert_close(together.published, alone.published, rtol=1e-4, atol=1e-5)


# --- clients that break, and sites that cannot be --------------------------------------------------


@pytest.mark.parametrize("build", [fp.FedSOUL, fp.FedAvg], ids=["FedSOUL", "FedAvg"])
def test_a_broken_client_is_left_out_and_the_others_of_its_site_are_heard(build: Any) -> None:
    def broken(size: float) -> list[Any]:
        return [(x * size if i == 3 else x, y) for i, (x, y) in enumerate(CLIENTS)]

    runs = [build(linear_model()).fit(broken(size), rounds=3, sites=SITES) for size in (1e30, 1e36)]
    for population in runs:
        assert [line["left_out"] for line in population.history] == [["client-3"]] * 3
    assert torch.equal(runs[0].published["phi"], runs[1].published["phi"])
    alone = build(linear_model()).fit(broken(1e30), rounds=3)
    torch.testing.assert_close(runs[0].published, alone.published, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"north": ["client-0", "client-1"]}, "client 'client-2' is at no site"),
        (SITES | {"east": ["client-2"]}, "client 'client-2' is at two sites"),
        (SITES | {"east": ["nobody"]}, "no client 'nobody'"),
    ],
    ids=["at none", "at two", "unknown"],
)
def test_sites_that_cannot_be_are_refused_before_anything_is_created(
    tmp_path: Path, sites: dict[str, list[str]], message: str
) -> None:
    with pytest.raises((SettingsError, DataError), match=message):
        fp.FedSOUL(linear_model()).fit(CLIENTS, rounds=2, sites=sites, out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_compressor_for_each_client_is_refused_where_sites_compress() -> None:
    each = {f"client-{i}": "qsgd" for i in range(6)}
    with pytest.raises(SettingsError, match="a site of several clients has one compressor"):
        fp.FedSOUL(linear_model(), compressor=each).fit(CLIENTS, rounds=1, sites=SITES)
