"""One absurd message must not move everybody: what is out of all proportion is left out, and named.

A message is out of proportion when its norm is more than so many times what is usual, as a whole and per
example. Usual is the median over the messages of a round, the largest of all rounds so far: the majority can
never be out of proportion, and a run that converges does not become more suspicious. What is usual is
broadcast, so that a site can judge its own message before it sends it; the server judges what arrives. A site
that holds a message back tells its norm, which counts in what is usual: it cannot shut itself out for longer
than the others do. Where only a sum over clients is made, one that is far larger than usual is made again
client by client.

A norm sees what is too large. It does not see a message of the usual size with the wrong sign, noise of the
usual size, or one that is sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedpop.channel.message import Answer, Tensors

LEAST = 5
"""Messages below which a median says nothing."""
LOOK = 10.0
"""Times what is usual of a sum at which it is made again, client by client: that costs time, nothing else."""
FIRST = 10.0
"""What is usual of a sum per example before anything is known; in the units of a log-likelihood."""


class Guard:
    """What is usual of the vectors of these names, and whether one of a round is."""

    def __init__(
        self, multiple: float, names: tuple[str, ...], told: Mapping[str, Tensor], messages: int
    ) -> None:
        self.multiple = multiple
        self.names = names if messages >= LEAST else ()
        self._usual = {n: told[f"usual.{n}"] for n in names if f"usual.{n}" in told}
        self._sums = {n: float(told[f"usual.sum.{n}"]) for n in names if f"usual.sum.{n}" in told}
        self._seen: dict[str, list[Tensor]] = {n: [] for n in self.names}
        self._fused: dict[str, float] = {}
        self._sound: list[Answer] = []

    def suspects(self, name: str, vectors: Tensor, examples: Tensor, there: Tensor) -> Tensor:
        """Which of these messages ``[S, D]`` of so many examples ``[S]`` are out of proportion, ``[S]``."""
        both = _sizes(vectors, examples)
        self._seen[name].append(both[:, there & (both[0] > 0)])
        usual = _median(torch.cat(self._seen[name], 1))
        if name in self._usual:
            earlier = self._usual[name].to(both)
            usual = earlier if usual is None else torch.maximum(usual, earlier)
        if usual is None:
            return torch.zeros_like(there)
        return there & (both > self.multiple * usual.unsqueeze(1)).all(0)

    def suspected(self, norms: Mapping[str, Mapping[str, float]], examples: Mapping[str, int]) -> set[str]:
        """Who of a round is out of proportion, by the norms of everyone's vectors: ``norms[who][vector]``."""
        found = set[str]()
        for name in self.names:
            who = [n for n, own in norms.items() if name in own]
            if not who:
                continue
            sizes = torch.tensor([[norms[n][name]] for n in who], dtype=torch.float64)
            count, there = torch.tensor([examples[n] for n in who]), torch.ones(len(who), dtype=torch.bool)
            odd = self.suspects(name, sizes, count, there).tolist()
            found |= {n for n, out in zip(who, odd, strict=True) if out}
        return found

    def odd(self, answer: Answer, examples: Tensor) -> bool:
        """Whether somebody's vector is out of proportion, or a sum that was made of all at once; each answer
        is looked at once, and what it shows counts if nothing is odd."""
        if any(answer is one for one in self._sound):
            return False
        names = [n for n in self.names if n in answer.vectors and not self._quiet(n, answer.vectors[n])]
        found = [self.suspects(n, answer.vectors[n], examples, answer.good) for n in names]
        odd = any(bool(f.any()) for f in found) or self._odd_sum(answer, examples)
        if odd:  # it will be looked at again, one by one
            for name in names:
                self._seen[name].pop()
        else:
            self._sound.append(answer)
        return odd

    def _quiet(self, name: str, vectors: Tensor) -> bool:
        """Neither is one of them too long nor most of them longer than usual: nothing to see, nothing to
        learn. Two numbers tell, which is what a usual round pays."""
        if name not in self._usual:
            return False
        norm = torch.linalg.vector_norm(vectors, dim=1)
        most, middle = torch.stack((norm.amax(), norm.median())).tolist()
        usual = float(self._usual[name][1])
        return bool(most <= self.multiple * usual and middle <= usual)

    def _odd_sum(self, answer: Answer, examples: Tensor) -> bool:
        sizes = {n: float(torch.linalg.vector_norm(answer.sums[n])) for n in self.names if n in answer.sums}
        count = max(float(examples.sum()), 1.0) if sizes else 1.0
        if any(not v / count <= LOOK * self._sums.get(n, FIRST) for n, v in sizes.items()):
            return True
        for name, size in sizes.items():
            self._fused[name] = max(size / count, self._fused.get(name, 0.0))
        return False

    def learned(self) -> Tensors:
        """What is usual after this round."""
        out: Tensors = {f"usual.{n}": v for n, v in self._usual.items()}
        for name, parts in self._seen.items():
            now = _median(torch.cat(parts, 1)) if parts else None
            if now is not None:
                now = now.cpu()
                out[f"usual.{name}"] = torch.maximum(now, self._usual[name]) if name in self._usual else now
        out |= {f"usual.sum.{n}": torch.tensor(v, dtype=torch.float64) for n, v in self._sums.items()}
        for name, size in self._fused.items():
            most = max(size, self._sums.get(name, 0.0))
            out[f"usual.sum.{name}"] = torch.tensor(most, dtype=torch.float64)
        return out


def norm_of(vector: Tensor) -> float:
    """What the guard looks at, of one vector."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _sizes(vectors: Tensor, examples: Tensor) -> Tensor:
    """Norms per example and as they are, ``[2, S]``; those that are not finite are judged elsewhere."""
    norm = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)
    return torch.stack((norm / examples.clamp(min=1), norm))


def _median(sizes: Tensor) -> Tensor | None:
    """Of the columns of ``[2, S]``, where there are enough."""
    return sizes.median(1).values if sizes.shape[1] >= LEAST else None
