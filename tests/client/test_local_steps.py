"""M may vary per round and per client: nobody's draws, and no sum, depend on who was worked on together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms.base import Facts, Info, Message
from fedpop.channel import Channel
from fedpop.client.local_steps import most_steps, steps_of
from fedpop.client.plan import plan_for
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from tests.helpers import cohort_of, linear_model, ragged, seeded, train_key

SIZES = (3, 0, 5, 1)
STEPS = (2, 7, 2, 4)
FACTS = Facts(4, 10)


def classes() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 2), nn.Tanh())
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, fp.likelihoods.Normal(0.5))


METHODS: dict[str, Any] = {
    "exact": lambda **s: fp.FedSOUL(linear_model(), start="random", **s),
    "hmc": lambda **s: fp.FedSOUL(classes(), **s),
    "mass matrix": lambda **s: fp.FedSOUL(curved(), **s),
    "sgld": lambda **s: fp.FedSOUL(classes(), kernel=fp.kernels.SGLD(batch=2), **s),
    "stateless mini-batches": lambda **s: fp.FedSOUL(
        linear_model(), start="random", kernel="hmc", stateful=False, phi_batch=2, chains=3, **s
    ),
}


def clients_for(method: Any) -> list[tuple[Tensor, Tensor]]:
    clients = ragged(SIZES)
    if method.model.likelihood.name == "categorical":
        return [(x, torch.arange(len(x)) % 3) for x, _ in clients]
    return clients


def one_round(
    method: Any, ids: list[int], round: int = 3, channel: Channel | None = None
) -> tuple[dict[str, Tensor], Message, Info, Cohort]:
    """A round of these clients from their first states."""
    cohort = cohort_of(method.model, clients_for(method), torch.tensor([1.0, 2.0, 0.5, 3.0]))
    cohort = cohort.select(torch.tensor(ids))
    server = method.init(FACTS, train_key())
    broadcast = method.broadcast("train", server)
    local = method.enter(cohort.ids, broadcast, train_key())
    channel = Channel() if channel is None else channel
    new, message, info = method.local_round("train", broadcast, cohort, local, channel, train_key(round))
    return new, message, info, cohort


@pytest.mark.parametrize("name", METHODS)
def test_each_client_does_what_it_would_do_alone(name: str) -> None:
    together, total, info, _ = one_round(METHODS[name](local_steps=STEPS), [0, 1, 2, 3])
    alone = [one_round(METHODS[name](local_steps=STEPS[i]), [i]) for i in range(4)]
    for i, (state, _, _, _) in enumerate(alone):
        assert state.keys() == together.keys()
        for key, value in state.items():
            torch.testing.assert_close(together[key][i], value[0], rtol=1e-4, atol=1e-5)
    # The message is the sum of theirs, and so is what it cost.
    summed = alone[0][1] + alone[1][1] + alone[2][1] + alone[3][1]
    assert total.count == summed.count == 4
    assert total.sums.keys() == summed.sums.keys()
    for key, value in total.sums.items():
        torch.testing.assert_close(value, summed.sums[key], rtol=1e-4, atol=1e-4)
    cost = alone[0][2] + alone[1][2] + alone[2][2] + alone[3][2]
    assert info.sums == pytest.approx(cost.sums, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_number_for_all_is_that_number(name: str) -> None:
    """Bit for bit, and with the same bytes."""
    channels = [Channel(), Channel()]
    settings: list[Any] = [5, (5, 5, 5, 5)]
    runs = [
        one_round(METHODS[name](local_steps=m), [0, 1, 2, 3], channel=c)
        for m, c in zip(settings, channels, strict=True)
    ]
    for key, value in runs[0][0].items():
        assert torch.equal(value, runs[1][0][key])
    for key, value in runs[0][1].sums.items():
        assert torch.equal(value, runs[1][1].sums[key])
    assert runs[0][2] == runs[1][2]
    assert channels[0].bytes_up == channels[1].bytes_up


def test_gradient_evaluations_are_counted_client_by_client() -> None:
    method = METHODS["hmc"](local_steps=STEPS, chains=2)
    _, _, info, cohort = one_round(method, [0, 1, 2, 3])
    evaluations = [1 + 5 * m for m in STEPS]
    assert info.sums["gradient_evaluations"] == 2 * sum(evaluations)
    assert info.sums["head_steps"] == 2 * sum(
        e * n for e, n in zip(evaluations, cohort.sizes.tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("steps", "path"),
    [(fp.chains.Steps(2, 10, over=4), [2, 4, 6, 8, 10, 10, 10]), (fp.chains.Steps(7, 1, over=2), [7, 4, 1, 1])],
    ids=["growing", "falling"],
)
def test_a_schedule_over_rounds(steps: fp.chains.Steps, path: list[int]) -> None:
    assert [steps.at(k) for k in range(len(path))] == path
    history = (
        METHODS["hmc"](local_steps=steps)
        .fit(clients_for(METHODS["hmc"]()), rounds=len(path), progress=False)
        .history
    )
    assert [h["gradient_evaluations"] for h in history] == [4 * (1 + 5 * m) for m in path]
    assert steps_of(steps, torch.arange(2), 1) == [path[1]] * 2


def test_numbers_follow_the_clients_whoever_is_active() -> None:
    """With three of four clients per round, and cut into cohorts of one."""
    method = METHODS["hmc"](local_steps=STEPS)
    settings: dict[str, Any] = {"rounds": 6, "participation": 3, "progress": False}
    runs = [method.fit(clients_for(method), memory=memory, **settings) for memory in ("1GiB", "1KiB")]
    torch.testing.assert_close(runs[0].published, runs[1].published, rtol=1e-4, atol=1e-5)
    counts = [[h["gradient_evaluations"] for h in run.history] for run in runs]
    assert counts[0] == counts[1]
    everyone = sum(1 + 5 * m for m in STEPS)
    assert set(counts[0]) <= {everyone - (1 + 5 * m) for m in STEPS}


def test_a_broken_client_is_left_out_of_its_group_only() -> None:
    method = METHODS["exact"](local_steps=STEPS)
    clients = ragged(SIZES)
    clients[2] = (clients[2][0] * 1e30, clients[2][1])
    population = method.fit(dict(zip("abcd", clients, strict=True)), rounds=2, progress=False)
    assert [h["left_out"] for h in population.history] == [["c"], ["c"]]
    assert all(bool(torch.isfinite(t).all()) for t in population.published.values())


def test_a_population_with_steps_comes_back_and_says_so(tmp_path: Any) -> None:
    for number, steps, words in ((0, STEPS, "2 to 7 per round"), (1, fp.chains.Steps(3, 9, 5), "3 to 9 per round")):
        method = METHODS["exact"](local_steps=list(steps) if isinstance(steps, tuple) else steps)
        assert method.local_steps == steps
        population = method.fit(ragged(SIZES), rounds=2, progress=False)
        population.save(tmp_path / str(number))
        again = fp.load(tmp_path / str(number))
        assert again.algorithm.local_steps == steps
        assert words in str(population)


def test_memory_is_planned_for_the_largest_number() -> None:
    federation = linear_model().prepare(fp.Federation.of(ragged(SIZES)))
    plans = [
        plan_for(METHODS["exact"](local_steps=m), federation, 10**9)
        for m in (7, STEPS, fp.chains.Steps(1, 7, 3), fp.chains.Steps(7, 2, 3))
    ]
    assert all(plan == plans[0] for plan in plans)
    assert most_steps((3,)) == 3


def test_resume_goes_on_with_the_schedule(tmp_path: Any) -> None:
    def run(folder: str, rounds: int, resume: bool = False) -> fp.Population:
        method = METHODS["hmc"](local_steps=fp.chains.Steps(1, 6, 5), phi_step=fp.steps.Adam(0.01, fp.steps.Constant()))
        callbacks = [] if rounds == 6 else [Stop(rounds)]
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
    with pytest.raises(KeyboardInterrupt):
        run("part", 3)
    again = run("part", 6, resume=True)
    assert torch.equal(whole.published["phi"], again.published["phi"])


class Stop(fp.callbacks.Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        if run.round == self.rounds:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize(
    ("settings", "message"),
    [((0, 3), "at least 1, not 0"), ((3, 1.5), "whole number"), ((1, 2, 0), "at least one round, not 0")],
    ids=["no steps", "half a step", "no rounds"],
)
def test_impossible_schedules_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fp.chains.Steps(*settings)
