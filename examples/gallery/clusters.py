"""Two kinds of clients: a mixture prior finds them, and says which kind a client is of."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(4)
centres = torch.tensor([[-2.0, 0.0], [2.0, 1.0]])
kinds = [i % 2 for i in range(60)]
truth = torch.stack([centres[k] + 0.4 * torch.randn(2, generator=rng) for k in kinds])
clients = []
for own in truth:
    x = torch.randn(5, 2, generator=rng)
    clients.append((x, x @ own + 0.5 * torch.randn(5, generator=rng)))

model = fp.Composition(None, nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(variance=0.25))
prior = fp.priors.Mixture(2)
population = fp.FedSOUL(model, prior=prior).fit(clients, rounds=100, seed=0)
z = torch.stack([population.posterior(i).mean for i in range(len(clients))])
sides = (z[:, 0] > 0).int().tolist()
right = sum(a == b for a, b in zip(sides, kinds, strict=True))
print(f"{right} of {len(kinds)} clients on the side of their own kind")
