"""Few examples each: clients borrow from the population what they do not know themselves."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(0)
clients, truth = {}, {}
for i in range(24):
    slope = 2 + 0.6 * torch.randn((), generator=rng)
    x = 2 * torch.rand(2 + 2 * (i % 4), 1, generator=rng)
    y = slope * x[:, 0] + torch.randn(len(x), generator=rng)
    clients[f"client-{i:02d}"], truth[f"client-{i:02d}"] = (x, y), float(slope)

model = fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(variance=1.0))
population = fp.FedSOUL(model).fit(clients, rounds=100)

alone = {name: float((x[:, 0] @ y) / (x[:, 0] @ x[:, 0])) for name, (x, y) in clients.items()}
shared = {name: float(population.posterior(name).mean) for name in clients}
error = {
    what: sum((found[n] - truth[n]) ** 2 for n in truth) / len(truth)
    for what, found in (("alone", alone), ("shared", shared))
}
print(f"mean squared error of the slopes: {error['alone']:.2f} alone, {error['shared']:.2f} shared")
