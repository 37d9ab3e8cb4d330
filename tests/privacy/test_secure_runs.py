"""Runs whose messages are added up as secure sums do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.participation import Bernoulli
from fedpop.message import Total
from fedpop.message.fixed_point import SCALE, FixedPoint
from fedpop.methods import METHODS
from fedpop.methods.base import usual_participation
from fedpop.run.run import Run, Settings
from tests.helpers import generator, seeded

ABLE = [name for name, method in METHODS.items() if not method.needs_single()]


def clients(count: int = 6, rows: int = 12) -> dict[str, fp.Client]:
    g = generator(0)
    out = {}
    for i in range(count):
        x = torch.randn(rows, 3, generator=g)
        w = torch.randn(3, generator=g)
        out[f"c{i}"] = fp.Client(x, x @ w + 0.1 * torch.randn(rows, generator=g))
    return out


def model() -> fp.Composition:
    body, head = seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2)
    return fp.Composition(body, head, fp.likelihoods.Normal(0.5))


def learned(name: str, **more) -> list[torch.Tensor]:
    method = METHODS[name](model())
    population = method.fit(clients(), rounds=4, progress=False, **more)
    return [t.double() for t in population.published.values() if t.is_floating_point()]


@pytest.mark.parametrize("name", [n for n in ABLE if n != "PFedFDA"])  # that one is for classes
def test_every_method_that_needs_sums_learns_the_same_from_secure_ones(name: str) -> None:
    plain, secure = learned(name), learned(name, secure=True)
    for a, b in zip(plain, secure, strict=True):
        assert torch.allclose(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "SCAFFOLD"])
def test_unequal_weights_act_at_the_sites(name: str) -> None:
    rule = Bernoulli({f"c{i}": 0.5 + 0.08 * i for i in range(6)})
    plain, secure = learned(name, participation=rule), learned(name, participation=rule, secure=True)
    for a, b in zip(plain, secure, strict=True):
        assert torch.allclose(a, b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", ["FedSOUK", "FedAvg", "QLSD"])
def test_how_units_are_cut_changes_no_bit(name: str) -> None:
    """Of the totals: what a unit computes differs in its last bits between cohorts of other sizes, so it is
    the sum of given messages that is compared."""
    one, other = learned(name, secure=True), learned(name, secure=True, seed=0)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_those_that_read_single_messages_are_refused_by_name() -> None:
    assert sorted(set(METHODS) - set(ABLE)) == ["FSGLD"]
    with pytest.raises(SettingsError, match="FSGLD is a relay"):
        fp.FSGLD(model()).fit(clients(), rounds=2, secure=True)


@pytest.mark.parametrize("compressor", ["qsgd", "rand_k", "natural"])
def test_compressors_whose_scale_differs_are_refused(compressor: str) -> None:
    with pytest.raises(SettingsError, match="fewer bits"):
        fp.FedAvg(model(), compressor=compressor).fit(clients(), rounds=2, secure=True)


def rounds_of(method, more: dict[str, fp.Client], count: int, **settings) -> list[Total]:
    rule = usual_participation(method)
    run = Run(method, fp.Federation.of(more), Settings(count, 0, rule, secure=FixedPoint(), **settings))
    totals, made = [], run.members.round
    run.members.round = lambda *a: totals.append(made(*a)) or totals[-1]
    run.begin()
    for _ in range(count):
        run.train_round()
    return totals


def test_scales_are_known_after_the_first_round_and_bytes_fall_to_four_an_entry() -> None:
    totals = rounds_of(fp.FedAvg(model()), clients(), 3)
    size = 3 * 2 + 2 + 2 + 1
    weight, n = 24, 24
    assert [t.bytes_up for t in totals] == [6 * (24 * size + weight + n)] + 2 * [6 * (4 * size + weight + n)]
    assert f"{SCALE}dw" in totals[0].usual


def test_what_does_not_fit_is_left_out_counted_and_fits_in_the_next_round() -> None:
    many, method = clients(8), fp.FedAvg(model())
    run = Run(
        method, fp.Federation.of(many), Settings(3, 0, usual_participation(method), secure=FixedPoint())
    )
    run.begin()
    run.train_round()
    run.usual = {n: (t - 30 if n.startswith(SCALE) else t) for n, t in run.usual.items()}
    before = run.server["w"]
    assert sorted(run.train_round()["left_out"]) == sorted(many)
    assert run.server["w"].equal(before)
    assert run.train_round()["left_out"] == []  # by the counts that came without the messages


def test_a_run_resumes_to_the_same_bits(tmp_path) -> None:
    def fit(rounds: int, where, resume: bool = False) -> fp.Population:
        return fp.FedAvg(model()).fit(
            clients(), rounds=rounds, out=where, resume=resume, secure=True, checkpoint_every=1
        )

    whole = fit(5, tmp_path / "whole").published["phi"]

    class Stop(Exception):
        pass

    class After(fp.callbacks.Callback):
        def recorded(self, run, metrics):
            if metrics["round"] == 3:
                raise Stop

    with pytest.raises(Stop):
        fp.FedAvg(model()).fit(clients(), rounds=5, out=tmp_path / "cut", secure=True, checkpoint_every=1,
                               callbacks=[After()])  # fmt: skip
    assert fit(5, tmp_path / "cut", resume=True).published["phi"].equal(whole)


def test_sixteen_bits_are_noisier_and_unbiased_enough() -> None:
    plain, coarse = learned("FedAvg"), learned("FedAvg", secure=16)
    assert not all(a.equal(b) for a, b in zip(plain, coarse, strict=True))
    for a, b in zip(plain, coarse, strict=True):
        assert torch.allclose(a, b, atol=0.05)
