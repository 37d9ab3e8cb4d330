"""Clients are found by name, whatever the order they come back in and whatever their names look like."""

import torch
from torch import nn

import fedpop as fp


def data():
    x = torch.arange(12.0).reshape(6, 2) / 10
    return {f"c{i}": (x + i, (x + i).sum(1)) for i in range(4)}


def fitted(clients):
    model = fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    return fp.FedSOUL(model).fit(clients, rounds=3)


def test_a_population_loaded_with_its_clients_in_another_order_knows_who_is_who(tmp_path):
    population = fitted(data())
    before = {name: population.posterior(name).mean for name in data()}
    population.save(tmp_path)
    turned = dict(reversed(data().items()))
    again = fp.load(tmp_path, clients=turned)
    for name, mean in before.items():
        assert torch.equal(again.posterior(name).mean, mean)


def test_whole_numbers_in_a_table_are_names():
    x = torch.cat([x for x, _ in data().values()])
    y = torch.cat([y for _, y in data().values()])
    population = fitted(fp.Table(x, y, torch.tensor([7, 1, 2, 3]).repeat_interleave(6)))
    assert population.names == ["1", "2", "3", "7"]
    assert torch.equal(population.posterior(1).mean, population.posterior("1").mean)
    assert torch.equal(population.posterior(7).mean, population.posterior("7").mean)
