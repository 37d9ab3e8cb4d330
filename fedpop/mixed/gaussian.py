"""Linear mixed models, exactly: the likelihood in the relative factor alone, all else in closed form.
 With y = X b + Z u + e, u ~ N(0, s2 Lambda Lambda') in each group, b and s2 have a closed form for any
Lambda (Bates et al., 2015): of W = (X, y) the server needs S = sum W_i' V_i^-1 W_i and D = sum log det
V_i, with V_i = I + Z_i Lambda Lambda' Z_i'. Both are sums over groups, as are their derivatives:

    P = (Sigma^-1 + M)^-1,  M = Z'Z,  R = Z'W:   S_i = W'W - R'P R,      D_i = log det(I + Lambda' M Lambda)
    K = (I - M P) R,        N = M - M P M:       dS_i = -K' dSigma K,    dD_i = tr(N dSigma)
    dK = -N dSigma K,       dN = -N dSigma N
 A site keeps M and R of its groups; nothing here needs Sigma to be invertible. REML adds log det of the
part of S that belongs to X.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import EstimateError
from fedpop.evaluation.information import rows_of_jacobian
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.mixed.factor import Factor
from fedpop.mixed.groups import Coordinates, columns, everyone
from fedpop.questions import Question, Units

TOGETHER = 2**20
"""Numbers of groups' moments that are worked on at once."""


@dataclass(frozen=True)
class GroupMoments(Question[Tensors]):
    """Each group's M and R in internal coordinates stay at its site; W'W leaves it as a sum."""

    units: Coordinates
    name: ClassVar[str] = "moments of groups"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        zz, zw, ww = moments(units.cohort, self.units)
        return Answer(everyone(units.cohort), local={"zz": zz, "zw": zw}, sums={"ww": ww.flatten()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size = len(self.units.x_names) + 1
        return {"ww": total.plain["ww"].reshape(size, size)}


def moments(cohort: Cohort, units: Coordinates) -> tuple[Tensor, Tensor, Tensor]:
    """M ``[C, q, q]`` and R ``[C, q, m]`` of groups, and the sum of their W'W ``[m, m]``."""
    x, z, y, offset, weight, _ = columns(cohort)
    root = weight.sqrt().unsqueeze(1)
    z = (z - units.z_centre) / units.z_scale * root
    x = (x - units.x_centre) / units.x_scale
    w = torch.cat((x, (y - offset - units.y_centre).unsqueeze(1)), dim=1) * root
    q, m = z.shape[1], w.shape[1]
    products = (z.unsqueeze(2) * torch.cat((z, w), dim=1).unsqueeze(1)).flatten(1)
    held = products.new_zeros((len(cohort), q * (q + m))).index_add(0, cohort.owner, products)
    held = held.unflatten(1, (q, q + m))
    return held[..., :q].contiguous(), held[..., q:].contiguous(), w.mT @ w


@dataclass(frozen=True)
class Profile(Question[Tensors]):
    """What S and D take from Lambda, with the sums that their derivatives are made of."""

    name: ClassVar[str] = "profile"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("factor", "curved")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        m, r, factor = units.local["zz"], units.local["zw"], asked["factor"]
        p, log_det = shrunk(m, factor)
        pr = p @ r
        k = r - m @ pr
        n = m - m @ p @ m
        flat = k.flatten(1)
        sums = {
            "explained": torch.einsum("cqi,cqj->ij", r, pr),
            "log_det": log_det.sum().reshape(1),
            "k": flat.mT @ flat,
            "n": n.sum(0),
        }
        if bool(asked["curved"]):
            outer = (flat.unsqueeze(2) * flat.unsqueeze(1)).flatten(1)
            sums["nk"] = n.flatten(1).mT @ outer
            sums["nn"] = n.flatten(1).mT @ n.flatten(1)
        return Answer(everyone(units.cohort), sums={name: v.flatten() for name, v in sums.items()})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


@dataclass(frozen=True)
class WholeProfile(Profile):
    """The profile of some groups with their own W'W and number of rows, made from their rows."""

    units: Coordinates
    name: ClassVar[str] = "profile of some"

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        zz, zw, ww = moments(units.cohort, self.units)
        local = {"zz": zz, "zw": zw}
        inner = super().answer(asked, Units(units.cohort, local, units.personal, units.split), key)
        rows = ww.new_tensor([float(units.cohort.examples)])
        return Answer(inner.good, sums=dict(inner.sums) | {"ww": ww.flatten(), "rows": rows})


@dataclass(frozen=True)
class Profiles(Question[Tensors]):
    """The same at many factors at once ``[T, q, q]``, without derivatives: what theta's law is made of."""

    name: ClassVar[str] = "profiles"

    def ask(self, known: Tensors) -> Tensors:
        return {"factors": known["factors"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        m, r, explained, log_det = units.local["zz"], units.local["zw"], [], []
        for some in asked["factors"].split(max(1, TOGETHER // max(r.numel(), 1))):
            p, own = shrunk(m, some.unsqueeze(1))
            explained.append(torch.einsum("cqi,tcqj->tij", r, p @ r))
            log_det.append(own.sum(1))
        sums = {"explained": torch.cat(explained).flatten(), "log_det": torch.cat(log_det)}
        return Answer(everyone(units.cohort), sums=sums)

    def finish(self, known: Tensors, total: Total) -> Tensors:
        return total.plain


def shrunk(m: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """P ``[..., C, q, q]`` and log det(I + Lambda' M Lambda) ``[..., C]``."""
    inner = factor.mT @ m @ factor + torch.eye(m.shape[-1], dtype=m.dtype)
    root, info = torch.linalg.cholesky_ex(inner)
    if bool((info != 0).any()):
        raise EstimateError("a group's covariance is not positive definite: its numbers are too far apart")
    half = torch.linalg.solve_triangular(root, factor.mT.expand(inner.shape), upper=False)
    return half.mT @ half, 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@dataclass(frozen=True)
class Taylor:
    """S and D about a theta, to second order."""

    s: Tensor
    s1: Tensor
    s2: Tensor
    d: Tensor
    d1: Tensor
    d2: Tensor

    def at(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Both at a small step."""
        bend = 0.5 * torch.einsum("a,b,abij->ij", step, step, self.s2)
        s = self.s + torch.einsum("a,aij->ij", step, self.s1) + bend
        return s, self.d + step @ self.d1 + 0.5 * step @ self.d2 @ step


@dataclass(frozen=True)
class Criterion:
    """Minus the profiled log-likelihood, or its restricted form, as the server finds it from sums."""

    factor: Factor
    ww: Tensor
    examples: int
    constant: float
    """Of the log-density, beside normal terms: half the sum of log-weights."""
    reml: bool
    log_scale: float
    """Sum of logarithms of the scales of X: log det of X' V^-1 X is that of the user's columns."""

    @property
    def degrees(self) -> int:
        return self.examples - (len(self.ww) - 1) * self.reml

    def value(self, s: Tensor, d: Tensor) -> Tensor:
        """From S ``[m, m]`` and D."""
        p, n = len(s) - 1, self.degrees
        root, info = torch.linalg.cholesky_ex(s)
        if int(info):
            return s.new_tensor(math.inf)
        left = 2 * root[p, p].log()
        out: Tensor = 0.5 * (n * (left - math.log(n) + 1 + math.log(2 * math.pi)) + d) - self.constant
        if self.reml:
            out = out + root.diagonal()[:p].log().sum() + self.log_scale
        return out

    def taylor(self, theta: Tensor, sums: Tensors, ww: Tensor | None = None) -> Taylor:
        """S and D with their derivatives in theta, of those whose sums these are."""
        factor, units = self.factor.matrix(theta), self.factor.units()
        q, m = len(factor), len(self.ww)
        k, n = sums["k"].reshape(q, m, q, m), sums["n"].reshape(q, q)
        s = (self.ww if ww is None else ww) - sums["explained"].reshape(m, m)
        moves = [e @ factor.mT + factor @ e.mT for e in units]
        s1 = torch.stack([-torch.einsum("aibj,ab->ij", k, v) for v in moves])
        d1 = torch.stack([(n * v).sum() for v in moves])
        count = len(moves)
        s2, d2 = s.new_zeros((count, count, m, m)), s.new_zeros((count, count))
        if "nk" in sums:
            nk, nn = sums["nk"].reshape(q, q, q, m, q, m), sums["nn"].reshape(q, q, q, q)
            for a in range(count):
                for b in range(a + 1):
                    bend = units[a] @ units[b].mT + units[b] @ units[a].mT
                    turn = torch.einsum("abcidj,ca,bd->ij", nk, moves[a], moves[b])
                    s2[a, b] = s2[b, a] = turn + turn.mT - torch.einsum("aibj,ab->ij", k, bend)
                    twice = torch.einsum("abcd,da,bc->", nn, moves[a], moves[b])
                    d2[a, b] = d2[b, a] = (n * bend).sum() - twice
        return Taylor(0.5 * (s + s.mT), s1, s2, sums["log_det"][0], d1, d2)

    def restricted(self, s: Tensor, d: Tensor, log_sigma: Tensor) -> Tensor:
        """The log-likelihood of the factor and sigma, b at its best (by REML integrated out), but for a
        constant."""
        root = torch.linalg.cholesky(s)
        left = root[-1, -1].square() * torch.exp(-2 * log_sigma)
        out: Tensor = -0.5 * (2 * self.degrees * log_sigma + d + left)
        return out - root.diagonal()[:-1].log().sum() if self.reml else out

    def at(self, theta: Tensor, sums: Tensors) -> tuple[float, Tensor, Tensor | None, Tensor]:
        """Value, gradient and, where sums for it are there, Hessian in theta; and S."""
        near = self.taylor(theta, sums)
        with torch.enable_grad():
            step = torch.zeros_like(theta).requires_grad_()
            value = self.value(*near.at(step))
            if not bool(torch.isfinite(value)):
                return math.inf, torch.zeros_like(theta), None, near.s
            (slope,) = torch.autograd.grad(value, step, create_graph=True)
            hessian = rows_of_jacobian(slope, step) if "nk" in sums else None
        return float(value.detach()), slope.detach(), hessian, near.s
