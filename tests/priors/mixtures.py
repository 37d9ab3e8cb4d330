"""A mixture of three Normals in the plane, for each form of covariance."""

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import fedpop as fp
from fedpop.priors.normal import COVARIANCES
from tests.oracles import DOUBLE, gaussian_noise

covariances = pytest.mark.parametrize("covariance", COVARIANCES)
D, K = 2, 3
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=DOUBLE)


def mixture_of(covariance, k=K, d=D):
    """A mixture, its beta and the same law in torch.distributions."""
    prior = fp.priors.Mixture(k, covariance)
    component = prior.component
    weights = WEIGHTS[:k] / WEIGHTS[:k].sum()
    betas = [0.4 * gaussian_noise(30 + i, component.size(d)) for i in range(k)]
    for i, own in enumerate(betas):
        own[:d] += 2 * gaussian_noise(40 + i, d)
    means = torch.stack([component.mu(b) for b in betas])
    covs = torch.stack([component.sigma(b) for b in betas])
    law = MixtureSameFamily(Categorical(weights), MultivariateNormal(means, covs))
    return prior, torch.cat((weights.log(), *betas)), law
