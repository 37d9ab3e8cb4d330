"""Keyed random numbers: Random123's known answers for Philox, moments, a KS test, and addressing.

Nothing in the package may draw from global state: its source is searched, and a run is watched.
"""

import ast
import math
import random
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fedpop as fp
from fedpop.keys import NEWCOMER, SERVER, Key, philox, unit_of, units_of
from tests.oracles import DOUBLE, assert_mean, gaussian_noise

# Random123, kat_vectors: philox4x32, 10 rounds.
KNOWN = [
    ([0x0] * 4, (0x0, 0x0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter, key, answer):
    out = philox(torch.tensor(counter, dtype=torch.int64).reshape(4, 1), key)
    assert out.flatten().tolist() == answer
    # The same among others, in any shape.
    block = torch.tensor(counter, dtype=torch.int64).reshape(4, 1, 1).expand(4, 3, 2)
    assert philox(block, key)[:, 2, 1].tolist() == answer


def test_bits_are_philox_of_the_address():
    """The cipher's key is a hash of seed, round and purpose, its counter the block and the unit."""
    key = Key(seed=(5 << 32) | 7, round=3, purpose="chain")
    both = blake2b(f"{(5 << 32) | 7}|3|chain".encode(), digest_size=8).digest()
    cipher = tuple(int.from_bytes(half, "little") for half in (both[:4], both[4:]))
    for unit in (9, 9 << 32, unit_of("anna"), SERVER, NEWCOMER):
        bits = key.bits(torch.tensor([unit]), 6, start=2)
        low, high = unit & 0xFFFFFFFF, unit >> 32 & 0xFFFFFFFF
        for block in range(2):
            counter = torch.tensor([2 + block, 0, low, high], dtype=torch.int64).reshape(4, 1)
            wanted = philox(counter, cipher).flatten().tolist()
            assert bits[0, 4 * block : 4 * block + 4].tolist() == wanted[: 6 - 4 * block][:4]
    far = key.bits(torch.tensor([9]), 4, start=(1 << 32) + 6)
    counter = torch.tensor([6, 1, 9, 0], dtype=torch.int64).reshape(4, 1)
    assert far[0].tolist() == philox(counter, cipher).flatten().tolist()


@pytest.mark.parametrize("clients", [0, 1, 7, 5000])
@pytest.mark.parametrize("count", [0, 1, 4, 30])
def test_arrays_and_tensors_give_the_same_bits(clients, count):
    """A start for each unit takes tensors, one for all arrays where there are few numbers."""
    key, units = Key(3, 5, "both"), units_of(f"client-{i}" for i in range(clients))
    here = key.bits(units, count, 3)
    there = key.bits(units, count, torch.full((clients,), 3))
    assert here.shape == (clients, count)
    assert torch.equal(here, there)


def test_a_unit_is_a_stable_hash_of_its_name():
    """Of 63 bits: never one of the server's numbers, and the same on every machine."""
    names = [f"client-{i}" for i in range(20_000)] + ["anna", "ben", "", "ünïcode", "a\nb"]
    units = units_of(names)
    assert units.dtype == torch.int64
    assert len(units.unique()) == len(names)
    assert int(units.min()) >= 0
    assert unit_of("anna") == int.from_bytes(blake2b(b"anna", digest_size=8).digest(), "little") >> 1
    assert units[20_000] == unit_of("anna") == 5054518887337042536
    assert SERVER < 0
    assert NEWCOMER < 0
    assert SERVER != NEWCOMER
    # All 63 bits are used, each about half of the time.
    ones = torch.stack([(units >> b & 1).double().mean() for b in range(63)])
    assert bool(((ones - 0.5).abs() < 5 * 0.5 / len(names) ** 0.5).all())


def test_nobodys_draws_depend_on_who_else_is_there():
    """Nor on the order in which they were given: positions do not enter."""
    clients = {name: (torch.zeros(1, 2), torch.zeros(1)) for name in ("anna", "ben", "cara")}
    draws = {}
    for names in (["anna", "ben", "cara"], ["cara", "anna"], ["ben"]):
        federation = fp.Federation.of({name: clients[name] for name in names})
        for name, row in zip(names, Key(1, purpose="p").bits(federation.units, 8), strict=True):
            assert torch.equal(draws.setdefault(name, row), row)


# --- distributions ---------------------------------------------------------------------------

IDS = torch.arange(20_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers(dtype):
    u = Key(1, purpose="u").uniform(IDS, (50,), dtype)
    assert u.dtype == dtype
    assert u.min() > 0
    assert u.max() <= 1
    u = u.double()
    powers = torch.stack([u**p for p in (1, 2, 3, 4)], -1).mean(1)
    assert_mean(powers, torch.tensor([1 / 2, 1 / 3, 1 / 4, 1 / 5], dtype=DOUBLE), "moments")
    # The smallest p-value that one test in ten thousand would show by chance.
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers(dtype):
    z = Key(1, purpose="z").normal(IDS, (50,), dtype)
    assert z.dtype == dtype
    z = z.double()
    powers = torch.stack([z**p for p in (1, 2, 3, 4, 6)], -1).mean(1)
    assert_mean(powers, torch.tensor([0.0, 1.0, 0.0, 3.0, 15.0], dtype=DOUBLE), "moments")
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-4


def test_normal_numbers_are_uncorrelated_within_and_across():
    key, n = Key(1, purpose="z"), 20_000
    z = key.normal(torch.arange(n), (6,), DOUBLE)
    later = key.at(round=1).normal(torch.arange(n), (6,), DOUBLE)
    other = key.at(purpose="else").normal(torch.arange(n), (6,), DOUBLE)
    shifted = z.roll(1, 0)  # the neighbouring client
    eye = torch.eye(6, dtype=DOUBLE)
    for name, second, truth in (
        ("within a call", z, eye),
        ("squares", z.square() - 1, 2 * eye),
        ("rounds", later, 0 * eye),
        ("purposes", other, 0 * eye),
        ("clients", shifted, 0 * eye),
        ("seeds", Key(2, purpose="z").normal(torch.arange(n), (6,), DOUBLE), 0 * eye),
    ):
        first = z.square() - 1 if name == "squares" else z
        assert_mean(first.unsqueeze(2) * second.unsqueeze(1), truth, name)


# --- addressing ------------------------------------------------------------------------------


def same(draw, one, other):
    """To the bit, or for normal numbers up to the rounding of logarithms and cosines, which may depend on
    where in a vector of the processor a number stands."""
    eps = 0.0 if draw == "uniform" else 8 * torch.finfo(one.dtype).eps
    torch.testing.assert_close(one, other, rtol=eps, atol=eps)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (4, 2)], ids=str)
def test_many_steps_at_once_are_the_single_calls(draw, shape):
    key, ids = Key(4, round=2, purpose="p"), torch.tensor([3, 1, 8])
    method = getattr(key, draw)
    bulk = method(ids, shape, DOUBLE, 5, 7)
    assert bulk.shape == (3, 7, *shape)
    for j in range(7):
        same(draw, bulk[:, j], method(ids, shape, DOUBLE, 5 + j))


@pytest.mark.parametrize("draw", ["uniform", "normal"])
def test_a_client_draws_the_same_in_any_company(draw):
    method = getattr(Key(4, purpose="p"), draw)
    everyone = method(torch.arange(100), (7,))
    for ids in ([13], [13, 2], [99, 13, 0]):
        same(draw, method(torch.tensor(ids), (7,)), everyone[ids])


def test_addresses_do_not_collide():
    """Seeds, rounds, clients, purposes, steps and the server: all different numbers."""
    base = Key(0, 0, "a")
    ids = torch.tensor([0])
    keys = [
        base,
        Key(1, 0, "a"),
        Key(1 << 32, 0, "a"),
        base.at(round=1),
        Key(0, 0, "b"),
        base.at(purpose="b"),
    ]
    seen = [key.normal(ids, (4,), DOUBLE) for key in keys]
    seen += [base.normal(torch.tensor([1]), (4,), DOUBLE), base.normal(base.server(), (4,), DOUBLE)]
    seen += [base.normal(ids, (4,), DOUBLE, step) for step in (1, 2)]
    values = torch.cat(seen).flatten()
    assert len(values.unique()) == len(values)
    assert int(base.server()) == SERVER


def test_purposes_nest():
    key = Key(0).at(purpose="train").at(round=4, purpose="chain")
    assert key == Key(0, 4, "/train/chain")


# --- words for rounding ----------------------------------------------------------------------


def hashed(first: int, second: int, j: int) -> int:
    """lowbias32 of j, in whole numbers."""
    mask = 2**32 - 1
    h = (j * 0x9E3779B9 + first) & mask
    h = ((h ^ h >> 16) * 0x7FEB352D + second) & mask
    h = ((h ^ h >> 15) * 0x846CA68B) & mask
    return h ^ h >> 16


def test_words_are_a_hash_of_their_position():
    key, ids = Key(9, 2, "words"), torch.tensor([5, 70_000])
    seeds = key.bits(ids, 2).tolist()
    for start in (0, 3, 2**31 - 4):
        block = key.words(ids).block(slice(0, 2), start, 8).to(torch.int64) & (2**32 - 1)
        assert block.tolist() == [[hashed(*s, start + j) for j in range(8)] for s in seeds]
    assert torch.equal(
        key.words(ids).block(slice(1, 2), 100, 5), key.words(ids[1:]).block(slice(0, 1), 100, 5)
    )


def test_words_are_even_and_uncorrelated():
    n = 2000
    words = Key(9, 2, "words").words(torch.arange(n)).block(slice(0, n), 0, 500).to(torch.int64)
    unit = ((words & (2**32 - 1)).to(DOUBLE) + 0.5) / 2**32
    assert stats.kstest(unit.flatten().numpy(), "uniform").pvalue > 1e-4
    for shift in range(0, 32, 8):  # each byte by itself
        counts = torch.bincount(((words >> shift) & 255).flatten(), minlength=256).numpy()
        assert stats.chisquare(counts).pvalue > 1e-5
    centred = (unit - 0.5) * 12**0.5
    for lag in (1, 2, 3, 64):  # neighbours in a client, and the same position in the next client
        assert_mean((centred[:, lag:] * centred[:, :-lag]).mean(1), torch.tensor(0.0, dtype=DOUBLE), "lag")
        assert_mean((centred[lag:] * centred[:-lag]).mean(1), torch.tensor(0.0, dtype=DOUBLE), "clients")


# --- no global state -------------------------------------------------------------------------

FORBIDDEN = {"random", "numpy.random", "torch.random"}
TORCH_DRAWS = {
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "manual_seed", "seed", "initial_seed", "set_rng_state",
}  # fmt: skip
IN_PLACE = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip


def global_draws(source: str) -> list[str]:
    """Where code imports or calls something that draws from a global generator."""
    found, aliases = [], {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.split(".")[0]] = (
                    name.name if name.asname else name.name.split(".")[0]
                )
                if name.name in FORBIDDEN:
                    found.append(f"line {node.lineno}: import {name.name}")
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                if node.module in FORBIDDEN or whole in FORBIDDEN:
                    found.append(f"line {node.lineno}: from {node.module} import {name.name}")
                if node.module == "torch" and name.name in TORCH_DRAWS:
                    found.append(f"line {node.lineno}: from torch import {name.name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        path, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        root = aliases.get(inner.id, inner.id) if isinstance(inner, ast.Name) else ""
        if (
            root == "torch"
            and (path[-1] in TORCH_DRAWS or path[0] == "random")
            and "distributions" not in path
        ):
            found.append(f"line {node.lineno}: torch.{'.'.join(path)}")
        elif (root == "numpy" and path[0] == "random") or root in FORBIDDEN:
            found.append(f"line {node.lineno}: {root}.{'.'.join(path)}")
        elif path[-1] in IN_PLACE:
            found.append(f"line {node.lineno}: .{path[-1]}()")
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.randn(3)",
        "import torch as t\nt.manual_seed(0)",
        "from torch import randperm",
        "import numpy as np\nnp.random.default_rng()",
        "import random",
        "from random import choice",
        "from numpy import random",
        "import torch\ntorch.empty(3).normal_()",
        "import torch\ntorch.random.manual_seed(1)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert global_draws(code)


def test_no_code_draws_from_global_state():
    files = sorted(Path(fp.__file__).parent.rglob("*.py"))
    assert len(files) > 40
    found = {file.name: hits for file in files if (hits := global_draws(file.read_text()))}
    # A user's function that makes a model is lent the generator, which is as before afterwards.
    lent = [hit.split(": ")[1] for hit in found.pop("entries.py")]
    assert sorted(lent) == ["torch.default_generator.manual_seed", "torch.random", "torch.random.fork_rng"]
    assert not found


def test_a_run_leaves_the_global_generators_alone():
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5))
    model = fp.Composition(backbone, nn.Linear(4, 3), "categorical")
    clients = [(gaussian_noise(i, 6, 3).float(), torch.arange(6) % 3) for i in range(4)]
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    method = fp.FedSOUL(model, phi_step=fp.steps.PhiStep(batch=4), local_steps=2)
    population = method.fit(clients, rounds=3, participation=0.5, progress=False)
    population.predict(0, clients[0][0]).samples  # noqa: B018
    population.posterior(1)
    fp.FedRep(model).fit(clients, rounds=2, progress=False)
    fp.FedAvg(model).fit(clients, rounds=2, progress=False)
    assert torch.equal(before[0], torch.get_rng_state())
    after = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after, strict=True))
    assert before[2] == random.getstate()


def test_the_tail_of_a_normal_is_finite():
    """The smallest uniform number is 2^-33, so a normal one never exceeds sqrt(66 log 2)."""
    z = Key(1).normal(torch.arange(50_000), (8,), torch.float32)
    assert z.abs().max() < math.sqrt(66 * math.log(2)) + 1e-6
    assert z.abs().max() > 4
