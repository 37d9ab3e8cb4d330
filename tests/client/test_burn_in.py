"""Burn-in: transitions before a client's first round that change nobody else."""

import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.kernels import Tuning
from fedpop.keys import Key
from tests.helpers import cohort_of, train_key
from tests.models.custom_models import FACTS, WIDE, composition, growth_data, growth_model


def test_burn_in_is_for_a_clients_first_round_only() -> None:
    """Whoever was there before does not move by it, and its cost is counted."""
    method = fp.FedSOUL(growth_model(), local_steps=2, chain=fp.chains.Chain(burn_in=15))
    assert method.sampler.burn_in == 15
    assert fp.FedSOUL(growth_model()).sampler.burn_in == 100
    assert fp.FedSOUL(composition(False)).sampler.burn_in == 0
    assert fp.FedSOUL.paper(growth_model(), rate=0.1).sampler.burn_in == 0
    history = method.fit(growth_data((3, 4)), rounds=3).history
    evaluations = [line["gradient_evaluations"] for line in history]
    assert evaluations == [2 * ((1 + 10 * 5) + (1 + 5 * 5) + (1 + 2 * 5)), 2 * (1 + 2 * 5), 2 * (1 + 2 * 5)]
    with pytest.raises(SettingsError, match="burn_in must be a whole number, 0 or more"):
        fp.chains.Chain(burn_in=-1)


def test_burn_in_leaves_those_who_were_there_alone() -> None:
    method = fp.FedSOUL(growth_model(), local_steps=2, chain=fp.chains.Chain(burn_in=15))
    cohort, hierarchy = cohort_of(method.model, growth_data((3, 4))), method.hierarchy
    beta = method.init(FACTS, Key(0), {})["beta"]
    target = hierarchy.target(method.model.initial_phi(), beta, cohort.x, cohort)
    z = hierarchy.prior.draw(beta, cohort.units, train_key(), 1)
    tuning = Tuning(torch.full((2,), -3.0, dtype=WIDE), torch.tensor([0.0, 3.0], dtype=WIDE))
    burnt_in = method.sampler._burnt_in
    moved, tuned, _, _ = burnt_in(target, z, tuning, cohort, train_key())
    assert torch.equal(moved[1], z[1])
    assert not torch.equal(moved[0], z[0])
    assert tuned.updates.tolist() == [2.0, 3.0]
    alone = cohort.select(torch.tensor([0]))
    target = hierarchy.target(method.model.initial_phi(), beta, alone.x, alone)
    first = Tuning(tuning.log_step[:1], tuning.updates[:1])
    same, _, _, _ = burnt_in(target, z[:1], first, alone, train_key())
    torch.testing.assert_close(same[0], moved[0])
