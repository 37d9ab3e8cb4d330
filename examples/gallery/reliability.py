"""Classes, with confidence that can be believed: FedSOUL beside a method that fits each client's head."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(3)
clients = []
for _ in range(30):
    own = torch.randn(2, 3, generator=rng)
    x = torch.randn(60, 2, generator=rng)
    y = (1.5 * x @ own + torch.randn(60, 3, generator=rng)).argmax(1)
    clients.append(fp.Client(x[:8], y[:8], test=(x[8:], y[8:])))

head = nn.Linear(2, 3, bias=False)
nn.init.zeros_(head.weight)
model = fp.Composition(None, head, "categorical")
local = fp.LocalSGD(epochs=5, rate=0.3)
methods = {
    "FedSOUL": fp.FedSOUL(model, final=fp.chains.Final(chains=2, burn_in=60, draws=60)),
    "LocalOnly": fp.LocalOnly(model, local=local),
    "FedAvg": fp.FedAvg(model, local=local),
}
judged = {name: fp.evaluate(m.fit(clients, rounds=15), "test") for name, m in methods.items()}
for name, found in judged.items():
    summary = found.summary()
    print(f"{name:10} accuracy {summary['accuracy']:.2f}, calibration error {summary['pooled_ece']:.3f}")
