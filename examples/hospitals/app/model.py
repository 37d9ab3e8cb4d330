"""How long patients stay: a linear model whose coefficients differ between hospitals."""

from torch import nn

import fedpop as fp


def model(inputs: int) -> fp.Composition:
    return fp.Composition(None, nn.Linear(inputs, 1), fp.likelihoods.Normal())
