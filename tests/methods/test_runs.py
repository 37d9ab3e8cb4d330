"""Runs of every method: resumed, absent, broken, empty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.message import Tensors, Total
from fedpop.run import checkpoint
from fedpop.run.members import active_units
from tests.crash import Crash, CrashAt
from tests.methods.conformance import (
    ADAPTED,
    CPU,
    EVERYONE,
    NAMES,
    Stage,
    every,
    fit,
    fitted,
    made,
    partial,
    same,
)

# --- runs --------------------------------------------------------------------------------------


def last_state(folder: Path) -> tuple[checkpoint.Checkpoint, list[dict[str, Any]]]:
    saved = checkpoint.read(folder / "checkpoints")
    assert saved is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return saved, [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@every("softmax")
def test_a_run_that_was_stopped_resumes_to_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    """Server, clients and metrics; stopped between two checkpoints."""
    settings: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2}
    fit(name, kind, out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fit(name, kind, out=tmp_path / "broken", callbacks=[CrashAt(3)], **settings)
    fit(name, kind, out=tmp_path / "broken", resume=True, **settings)
    (one, lines), (other, more) = (last_state(tmp_path / f) for f in ("whole", "broken"))
    assert one.round == other.round == 5
    assert one.tensors.keys() == other.tensors.keys()
    assert [n for n in one.tensors if not torch.equal(one.tensors[n], other.tensors[n])] == []
    assert lines == more


def state_of(population: fp.Population) -> Tensors:
    """Everything that a run ended with."""
    assert population.store is not None
    return population.published | population.store.state()


@every("linear")
def test_the_seed_is_the_run(name: str, kind: str) -> None:
    one, again, other = fitted(name, kind), fit(name, kind), fitted(name, kind, seed=1)
    assert state_of(one).keys() == state_of(again).keys()
    assert all(torch.equal(state_of(one)[n], state_of(again)[n]) for n in state_of(one))
    for a, b in zip(one.history, again.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    a, b = state_of(one), state_of(other)
    if name == "MaximumMarginalLikelihood":  # it draws nothing
        assert all(torch.equal(a[n], b[n]) for n in a)
        return
    assert a.keys() != b.keys() or any(
        a[n].shape != b[n].shape or not torch.equal(a[n], b[n]) for n in a if a[n].is_floating_point()
    )


@every("linear", participation=("any", "one"))
def test_absent_clients_stay_as_they_were(name: str, kind: str) -> None:
    rule = partial(name)
    run = Stage(made(name, kind), kind, 0, rule).run
    changed = False
    for k in range(6):
        store = run.sites.store
        before = {
            i: store.get(EVERYONE[i : i + 1], CPU) for i in range(len(NAMES)) if store.seen(EVERYONE[i])
        }
        active = active_units(rule, run.federation, run.key, k).ids.tolist()
        run.train_round()
        for i, state in before.items():
            now = store.get(EVERYONE[i : i + 1], CPU)
            alike = all(torch.equal(now[n], state[n]) for n in state)
            assert alike or i in active
            changed = changed or not alike
        assert set(active) | set(before) >= {i for i in range(len(NAMES)) if store.seen(EVERYONE[i])}
    # Those who are there do change, where there is something to keep that is not fitted once and for all.
    assert changed or not run.sites.store.tensors or name == "FSGLD"


@every("linear", "softmax")
def test_a_client_that_is_not_finite_is_left_out_and_named(name: str, kind: str) -> None:
    """It keeps its state, and the others go on as if it were not there."""
    stage = Stage(made(name, kind), kind)
    others = EVERYONE[EVERYONE != 2]
    alone = stage.method.participation == "one"
    ids = EVERYONE[2:3] if alone else EVERYONE
    for _ in range(12):  # a round that does not look at data cannot know
        before, healthy = stage.before(ids), stage.run.sites.federation
        packed = healthy.train
        rows = slice(int(packed.starts[2]), int(packed.starts[2] + packed.sizes[2]))
        x = packed.x.clone()
        x[rows] = torch.nan
        stage.run.sites.federation = replace(healthy, splits={"train": replace(packed, x=x)})
        stage.run.sites._everyone = None
        done = stage.work(ids)
        stage.run.sites.federation, stage.run.sites._everyone = healthy, None
        if done.left_out:
            break
        stage.run.train_round()
    assert done.left_out == (2,)
    place, after = (0 if alone else 2), stage.after(done)
    for n in after.keys() - ADAPTED.get(name, set()):
        assert torch.equal(after[n][place], before[n][place])
    total = done.total
    assert all(bool(torch.isfinite(v).all()) for v in total.weighted.values())
    assert total.count == (0 if alone else len(NAMES) - 1)
    key = stage.run.key.at(round=stage.run.round, purpose="train")
    server = stage.method.server_round(stage.run.server, total, stage.run.facts, key)
    # A line search may not have found the other end of its bracket yet.
    floats = [t for n, t in server.items() if t.is_floating_point() and not n.startswith("search.")]
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    if not alone:
        rest = stage.work(others)
        same(total.weighted, rest.total.weighted)
        same({n: t[others] for n, t in after.items()}, stage.after(rest))
        for n in ("log_likelihood", "examples"):
            if n in rest.total.numbers:
                assert done.total.numbers[n] == pytest.approx(rest.total.numbers[n], rel=1e-9)


@every("linear", participation=("any", "full"))
def test_a_round_of_nobody(name: str, kind: str) -> None:
    """Under b/|A| weights nothing moves; under 1/p_i weights everything stays finite."""
    stage = Stage(made(name, kind), kind)
    key = stage.run.key.at(round=stage.run.round, purpose="train")
    for ratio in (True, False):
        nobody = Total.of_nobody(len(NAMES), ratio)
        server = stage.method.server_round(stage.run.server, nobody, stage.run.facts, key)
        for n, v in server.items():
            if ratio and n in ("phi", "beta", "w", "z", "c", "memory"):
                assert torch.equal(v, stage.run.server[n])
            assert (
                not v.is_floating_point()
                or n.startswith("search.")
                or bool((torch.isfinite(v) | torch.isnan(stage.run.server[n])).all())
            )
