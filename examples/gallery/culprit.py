"""One column in another unit at one client: the guard leaves it out and names it."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(5)
TRUTH = torch.tensor([1.0, -1.0, 0.5])
clients = {}
for i in range(20):
    x = torch.randn(10, 3, generator=rng)
    y = x @ TRUTH + 0.2 * torch.randn(10, generator=rng)
    clients[f"site-{i:02d}"] = (x, y)
x, y = clients["site-07"]
clients["site-07"] = (x, y * 1e6)  # in micrograms, where the others have grams

head = nn.Linear(3, 1, bias=False)
nn.init.zeros_(head.weight)
model = fp.Composition(None, head, fp.likelihoods.Normal(variance=1.0))


class Follow(fp.callbacks.Callback):
    """How far the shared weights are from the truth, round by round."""

    def __init__(self):
        self.path = []

    def after_round(self, run, metrics):
        weights = run.algorithm.publish(run.server)["z"]  # all of the model is in its head
        self.path.append(float((weights - TRUTH).norm()))


paths = {}
for name, guard in (("guarded", 1e3), ("unguarded", None)):
    follow = Follow()
    method = fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=0.05), guard=guard)
    population = method.fit(clients, rounds=15, callbacks=[follow])
    paths[name] = follow.path
    named = sorted({n for m in population.history for n in m.get("out_of_proportion", [])})
    print(f"{name}: {follow.path[-1]:.2g} from the truth; left out: {', '.join(named) or 'nobody'}")
