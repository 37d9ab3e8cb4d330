"""M may vary per round and per client: nobody's draws, and no sum, depend on who was worked on together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client.sampler import most_steps, steps_of
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from tests.crash import Crash, CrashAt
from tests.helpers import (
    Answered,
    answers,
    by_name,
    cohort_of,
    federation_of,
    linear_model,
    plan_of,
    ragged,
    seeded,
    train_key,
)

SIZES = (3, 0, 5, 1)
STEPS = (2, 7, 2, 4)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])
FACTS = Facts(4, 10)


def classes() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 2), nn.Tanh())
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, fp.likelihoods.Normal(0.5))


METHODS: dict[str, Any] = {
    "exact": lambda **s: fp.FedSOUL(linear_model(), start="random", **s),
    "hmc": lambda **s: fp.FedSOUL(classes(), **s),
    "mass matrix": lambda **s: fp.FedSOUL(curved(), chain=fp.chains.Chain(burn_in=5), **s),
    "sgld": lambda **s: fp.FedSOUL(classes(), kernel=fp.kernels.SGLD(batch=2), **s),
    "stateless mini-batches": lambda **s: fp.FedSOUL(
        linear_model(),
        start="random",
        kernel="hmc",
        chain=fp.chains.Chain(chains=3, stateful=False),
        phi_step=fp.steps.PhiStep(batch=2),
        **s,
    ),
}


def clients_for(method: Any) -> list[tuple[Tensor, Tensor]]:
    clients = ragged(SIZES)
    if method.model.likelihood.name == "categorical":
        return [(x, torch.arange(len(x)) % 3) for x, _ in clients]
    return clients


def one_round(method: Any, ids: list[int], round: int = 3) -> Answered:
    """A round of these clients from their first states."""
    cohort = cohort_of(method.model, clients_for(method)).select(torch.tensor(ids))
    broadcast = method.broadcast(method.init(FACTS, train_key(), {}))
    local = method.enter(cohort.units, broadcast, train_key())
    return answers(method, cohort, local, broadcast, train_key(round), WEIGHTS[ids])


def summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(part.keys() == parts[0].keys() for part in parts)
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("name", METHODS)
def test_each_client_does_what_it_would_do_alone(name: str) -> None:
    together = one_round(METHODS[name](local_steps=by_name(STEPS)), [0, 1, 2, 3])
    alone = [one_round(METHODS[name](local_steps=STEPS[i]), [i]) for i in range(4)]
    for i, one in enumerate(alone):
        assert one.local.keys() == together.local.keys()
        for key, value in one.local.items():
            torch.testing.assert_close(together.local[key][i], value[0], rtol=1e-4, atol=1e-5)
    # What the server sees is the sum of theirs, and so is what it cost.
    total = together.total
    assert total.count == sum(one.total.count for one in alone) == 4
    assert total.weight == sum(one.total.weight for one in alone) == 6.5
    expected = summed([one.total.weighted for one in alone])
    assert total.weighted.keys() == expected.keys()
    for key, value in total.weighted.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)
    assert together.cost == pytest.approx(summed([one.cost for one in alone]), rel=1e-3, abs=1e-3)
    assert together.bytes_up == sum(one.bytes_up for one in alone)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_number_for_all_is_that_number(name: str) -> None:
    """Bit for bit, and with the same bytes."""
    settings: list[Any] = [5, by_name((5, 5, 5, 5))]
    one, other = (one_round(METHODS[name](local_steps=m), [0, 1, 2, 3]) for m in settings)
    for key, value in one.local.items():
        assert torch.equal(value, other.local[key])
    for key, value in one.total.weighted.items():
        assert torch.equal(value, other.total.weighted[key])
    assert (one.cost, one.left_out, one.bytes_up) == (other.cost, other.left_out, other.bytes_up)


def test_gradient_evaluations_are_counted_client_by_client() -> None:
    cost = one_round(
        METHODS["hmc"](local_steps=by_name(STEPS), chain=fp.chains.Chain(chains=2, follow=False)),
        [0, 1, 2, 3],
    ).cost
    evaluations = [1 + 5 * m for m in STEPS]
    assert cost["gradient_evaluations"] == 2 * sum(evaluations)
    assert cost["head_steps"] == 2 * sum(e * n for e, n in zip(evaluations, SIZES, strict=True))


@pytest.mark.parametrize(
    ("steps", "path"),
    [
        (fp.chains.Steps(2, 10, over=4), [2, 4, 6, 8, 10, 10, 10]),
        (fp.chains.Steps(7, 1, over=2), [7, 4, 1, 1]),
    ],
    ids=["growing", "falling"],
)
def test_a_schedule_over_rounds(steps: fp.chains.Steps, path: list[int]) -> None:
    assert [steps.at(k) for k in range(len(path))] == path
    history = (
        METHODS["hmc"](local_steps=steps, chain=fp.chains.Chain(follow=False))
        .fit(clients_for(METHODS["hmc"]()), rounds=len(path), progress=False)
        .history
    )
    assert [h["gradient_evaluations"] for h in history] == [4 * (1 + 5 * m) for m in path]
    assert steps_of(steps, torch.arange(2), 1) == [path[1]] * 2


def test_numbers_follow_the_clients_whoever_is_active() -> None:
    """With three of four clients per round, and cut into cohorts of one."""
    method = METHODS["hmc"](local_steps=by_name(STEPS), chain=fp.chains.Chain(follow=False))
    settings: dict[str, Any] = {"rounds": 6, "participation": 3, "progress": False}
    runs = [method.fit(clients_for(method), memory=memory, **settings) for memory in ("1GiB", "1KiB")]
    torch.testing.assert_close(runs[0].published, runs[1].published, rtol=1e-4, atol=1e-5)
    counts = [[h["gradient_evaluations"] for h in run.history] for run in runs]
    assert counts[0] == counts[1]
    everyone = sum(1 + 5 * m for m in STEPS)
    assert set(counts[0]) <= {everyone - (1 + 5 * m) for m in STEPS}


def test_a_broken_client_is_left_out_of_its_group_only() -> None:
    method = METHODS["exact"](local_steps=dict(zip("abcd", STEPS, strict=True)))
    clients = ragged(SIZES)
    clients[2] = (clients[2][0] * 1e30, clients[2][1])
    population = method.fit(dict(zip("abcd", clients, strict=True)), rounds=2, progress=False)
    assert [h["left_out"] for h in population.history] == [["c"], ["c"]]
    assert all(bool(torch.isfinite(t).all()) for t in population.published.values())


def test_a_population_with_steps_comes_back_and_says_so(tmp_path: Any) -> None:
    for number, steps, words in (
        (0, by_name(STEPS), "2 to 7 per round"),
        (1, fp.chains.Steps(3, 9, 5), "3 to 9 per round"),
    ):
        method = METHODS["exact"](local_steps=steps)
        assert method.local_steps == steps
        population = method.fit(ragged(SIZES), rounds=2, progress=False)
        population.save(tmp_path / str(number))
        again = fp.load(tmp_path / str(number))
        assert again.algorithm.local_steps == steps
        assert words in str(population)


def test_memory_is_planned_for_the_largest_number() -> None:
    federation = federation_of(linear_model(), ragged(SIZES))
    plans = [
        plan_of(METHODS["exact"](local_steps=m), federation, 10**9)
        for m in (7, by_name(STEPS), fp.chains.Steps(1, 7, 3), fp.chains.Steps(7, 2, 3))
    ]
    assert all(plan == plans[0] for plan in plans)
    assert most_steps({"anna": 3, "ben": 2}) == 3


def test_resume_goes_on_with_the_schedule(tmp_path: Any) -> None:
    def run(folder: str, rounds: int, resume: bool = False) -> fp.Population:
        method = METHODS["hmc"](
            local_steps=fp.chains.Steps(1, 6, 5), phi_step=fp.steps.Adam(0.01, fp.steps.Constant())
        )
        callbacks = [] if rounds == 6 else [CrashAt(rounds)]
        return method.fit(
            clients_for(method),
            rounds=6,
            out=tmp_path / folder,
            resume=resume,
            callbacks=callbacks,
            checkpoint_every=1,
            progress=False,
        )

    whole = run("whole", 6)
    with pytest.raises(Crash):
        run("part", 3)
    again = run("part", 6, resume=True)
    assert torch.equal(whole.published["phi"], again.published["phi"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 3), "start must be a whole number in .*, not 0"),
        ((3, 1.5), "whole number"),
        ((1, 2, 0), "over must be a whole number, 1 or more"),
    ],
    ids=["no steps", "half a step", "no rounds"],
)
def test_impossible_schedules_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fp.chains.Steps(*settings)
