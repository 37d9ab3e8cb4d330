"""Distances between what was learned and what was true, up to what cannot be told apart."""

from __future__ import annotations

import torch
from torch import Tensor


def principal_angle(a: Tensor, b: Tensor) -> float:
    """sin of the largest principal angle between the column spaces of two k x d matrices.

    This is the distance of Collins et al. (2021), definition 1: norm(A_perp' B) for orthonormal bases.

    >>> import torch
    >>> eye = torch.eye(4)
    >>> principal_angle(eye[:, :2], eye[:, :2] @ torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    0.0
    """
    qa, qb = (torch.linalg.qr(m.double())[0] for m in (a, b))
    outside = qb - qa @ (qa.mT @ qb)
    return float(torch.linalg.matrix_norm(outside, ord=2))


def aligned_error(phi_true: Tensor, phi_hat: Tensor, z_true: Tensor, z_hat: Tensor) -> float:
    """Mean over clients of norm(P z_hat - z_true), with P = pinv(phi_true) phi_hat (k x d matrices).

    phi z is identified, phi and z alone only up to an invertible matrix: P carries z_hat over.
    """
    phi_true, phi_hat = phi_true.double(), phi_hat.double()
    p = torch.linalg.pinv(phi_true) @ phi_hat
    return float((z_hat.double() @ p.mT - z_true.double()).norm(dim=1).mean())
