"""Distances up to what cannot be told apart."""

import math

import pytest
import torch

from fedpop.evaluation.subspace import aligned_error, principal_angle
from tests.helpers import generator

WIDE = torch.float64


@pytest.mark.parametrize("angle", [0.0, 0.1, 1.0, math.pi / 2])
def test_principal_angle_of_a_known_rotation(angle: float) -> None:
    a = torch.eye(5, dtype=WIDE)[:, :2]
    b = a.clone()
    b[:, 1] = math.cos(angle) * a[:, 1] + math.sin(angle) * torch.eye(5, dtype=WIDE)[:, 3]
    assert principal_angle(a, b) == pytest.approx(math.sin(angle), abs=1e-12)


def test_principal_angle_sees_spaces_not_bases() -> None:
    g = generator(0)
    a, b = torch.randn(6, 2, generator=g, dtype=WIDE), torch.randn(6, 2, generator=g, dtype=WIDE)
    mixed = a @ torch.tensor([[2.0, 1.0], [0.5, -3.0]], dtype=WIDE)
    assert principal_angle(mixed, b) == pytest.approx(principal_angle(a, b))
    assert principal_angle(a, b) == pytest.approx(principal_angle(b, a))
    assert 0 < principal_angle(a, b) <= 1


def test_aligned_error_is_blind_to_the_gauge_and_to_nothing_else() -> None:
    g = generator(1)
    phi, z = torch.randn(6, 2, generator=g, dtype=WIDE), torch.randn(9, 2, generator=g, dtype=WIDE)
    a = torch.tensor([[2.0, 1.0], [0.5, -3.0]], dtype=WIDE)
    same = aligned_error(phi, phi @ a, z, z @ torch.linalg.inv(a).T)
    assert same == pytest.approx(0.0, abs=1e-12)
    assert aligned_error(phi, phi, z, z + torch.tensor([3.0, 4.0], dtype=WIDE)) == pytest.approx(5.0)
