"""One column in another unit at one client: the guard leaves it out and names it."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(5)
clients = {}
for i in range(20):
    x = torch.randn(10, 3, generator=rng)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.2 * torch.randn(10, generator=rng)
    clients[f"site-{i:02d}"] = (x, y)
x, y = clients["site-07"]
clients["site-07"] = (x, y * 1e6)  # in micrograms, where the others have grams

model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(variance=1.0))
local = fp.LocalSGD(epochs=2, rate=0.05)
paths = {}
for name, guard in (("guarded", 1e3), ("unguarded", None)):
    watched = fp.callbacks.Watch(every=1, split="train")
    method = fp.FedAvg(model, local=local, guard=guard)
    population = method.fit(clients, rounds=15, callbacks=[watched])
    paths[name] = population.history
    named = sorted({n for m in population.history for n in m.get("out_of_proportion", [])})
    print(f"{name}: weights {population.phi['head.weight'].norm():.3g}, named: {named}")
