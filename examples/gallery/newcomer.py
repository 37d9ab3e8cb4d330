"""A client never seen before: its interval starts as wide as the population and narrows with its own data."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(1)


def curve(own, n):
    x = 2 * torch.rand(n, 1, generator=rng) - 1
    return x, own[0] + own[1] * x[:, 0] + 0.3 * torch.randn(n, generator=rng)


clients = [curve(torch.tensor([1.0, 2.0]) + torch.randn(2, generator=rng), 6) for _ in range(40)]
model = fp.Composition(None, nn.Linear(1, 1), "normal")
population = fp.FedSOUL(model, prior=fp.priors.Normal("diagonal")).fit(clients, rounds=100)

grid = torch.linspace(-1, 1, 41)[:, None]
x, y = curve(torch.tensor([2.2, 0.5]), 12)
bands = {0: population.new_client().predict(grid).interval(0.9)}
for n in (2, 12):
    bands[n] = population.new_client(x[:n], y[:n]).predict(grid).interval(0.9)
for n, (low, high) in bands.items():
    print(f"{n:2d} examples: 90 % intervals {float((high - low).mean()):.2f} wide")
