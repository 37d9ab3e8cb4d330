"""Classes, with confidence that can be believed: FedSOUL beside a method that fits each client's head."""

import torch
from torch import nn

import fedpop as fp

rng = torch.Generator().manual_seed(3)
clients = []
for _ in range(40):
    own = torch.randn(2, 3, generator=rng)
    x = torch.randn(60, 2, generator=rng)
    y = (1.5 * x @ own + torch.randn(60, 3, generator=rng)).argmax(1)
    clients.append(fp.Client(x[:8], y[:8], test=(x[8:], y[8:])))

model = fp.Composition(None, nn.Linear(2, 3), "categorical")
local = fp.LocalSGD(epochs=10, rate=0.3)
methods = {
    "FedSOUL": fp.FedSOUL(model, final=fp.chains.Final(chains=2, burn_in=100, draws=100)),
    "LocalOnly": fp.LocalOnly(model, local=local),
    "FedAvg": fp.FedAvg(model, local=local),
}
judged = {name: fp.evaluate(m.fit(clients, rounds=30), "test") for name, m in methods.items()}
for name, found in judged.items():
    summary = found.summary()
    print(f"{name:10} accuracy {summary['accuracy']:.2f}, calibration error {summary['pooled_ece']:.3f}")
