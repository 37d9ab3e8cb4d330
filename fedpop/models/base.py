"""The model p(D | phi, z), split where the cost is: ``embed`` once a round, the head at every step."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedpop.decisions import Decision
from fedpop.devices import device_named, has_double
from fedpop.errors import DataError, FedpopError, ModelError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Example, Inputs, leaves, map_inputs, narrowed
from fedpop.keys import Key
from fedpop.models.likelihoods import Likelihood, Params
from fedpop.models.local import GeneralLikelihood, LinearLikelihood, LocalLikelihood
from fedpop.models.modules import Layout, NetworkPass, RowKeys, has_dropout
from fedpop.models.probe import (
    ANY_ROWS,
    USERS,
    check_codes,
    check_derivative,
    check_rows,
    first_taken,
    not_accepted,
    outputs_at,
    rows_side_by_side,
    twice_in_double,
    vectorises_head,
)
from fedpop.models.weighted import Weighted
from fedpop.precision import check as check_precision


@dataclass(frozen=True)
class LinearLayout(Layout):
    """z of a linear head: one row ``[weights, bias]`` per output, so that the bias is a feature."""

    @property
    def bias(self) -> bool:
        return len(self.shapes) == 2

    @property
    def outputs(self) -> int:
        return self.shapes[0][0]

    @property
    def inputs(self) -> int:
        return self.shapes[0][1]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        rows = flat.unflatten(-1, (self.outputs, -1))
        if not self.bias:
            return {self.names[0]: rows}
        return {self.names[0]: rows[..., :-1], self.names[1]: rows[..., -1]}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [tensors[name] for name in self.names]
        if self.bias:
            parts[1] = parts[1].unsqueeze(-1)
        return torch.cat(parts, dim=-1).reshape(-1)

    def spans(self) -> dict[str, slice]:
        raise ModelError("the names of a linear head are interleaved in the flat vector; use views()")


class Model(ABC):
    """What is learned. Subclasses say how modules make features and head outputs."""

    likelihood: Likelihood
    phi_layout: Layout
    z_layout: Layout
    linear: bool
    """The head is linear in its features: batched products, curvature, exact preconditioning."""
    outputs: int
    offsets: int = 0
    """The last so many columns of features are added to the head's outputs: what phi alone says of them."""
    network: bool = False
    """phi is the weights of a nonlinear network, which wants smaller steps than a linear map."""
    rows_side_by_side: int = ANY_ROWS
    """Examples of each client up to which steps on clients' own copies of the model are worked on side by
    side, by vmap; 0 where a layer does not know it."""
    heads_side_by_side: bool = True
    """Heads that are not linear are worked on side by side by vmap, and else one after the other."""
    twice_in_double: bool = True
    """Features have second derivatives in phi, in double precision too."""
    labels: tuple[str, ...] = ()
    """What classes are called, where targets were words."""
    precision: str = "auto"
    """As it was given: a model that is saved asks again where it is read."""
    device: torch.device
    dtype: torch.dtype
    _pass: NetworkPass | None = None
    """How the network is run, of models that have one."""

    @abstractmethod
    def initial_phi(self) -> Tensor:
        """The modules' own values as one flat vector."""

    @abstractmethod
    def initial_z(self) -> Tensor:
        """The head's own values as one flat vector ``[d]``."""

    @abstractmethod
    def embed(self, phi: Tensor, x: Inputs, rows: RowKeys | None = None) -> Inputs:
        """Everything in phi that z never touches. Dropout is on when ``rows`` name the examples."""

    @abstractmethod
    def head_at(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        """Head outputs ``[n, o]`` of one client's examples at one z ``[d]``."""

    def bind(
        self, phi: Tensor, features: Inputs, cohort: Cohort, rows: RowKeys | None = None
    ) -> LocalLikelihood:
        """The cohort's likelihood as a function of z, at these features."""
        if self.linear and isinstance(self.z_layout, LinearLayout):
            return self.bind_linear(phi, features, cohort, self.z_layout.bias)

        def log_prob(z: Tensor, x: Inputs, y: Tensor, *ids: Tensor) -> Tensor:
            return self.log_prob_at(phi, z, x, y, None if rows is None else RowKeys(rows.key, *ids))

        extra = () if rows is None else (rows.clients, rows.positions)
        y = self.likelihood.encode(cohort.y, self.outputs, phi.dtype)
        return GeneralLikelihood(log_prob, features, y, cohort, extra, self.heads_side_by_side)

    def log_prob_at(
        self, phi: Tensor, z: Tensor, features: Inputs, y: Tensor, rows: RowKeys | None = None
    ) -> Tensor:
        """log p(y_j | x_j, z) ``[n]`` of one client's examples at one z ``[d]``; y as encoded."""
        return self.likelihood.log_prob(self.head_at(phi, z, features, rows), y, self.params(phi))

    def head_outputs(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        """Head outputs ``[L, n, o]`` of n examples for L values of z ``[L, d]``."""
        if self.linear and isinstance(self.z_layout, LinearLayout) and isinstance(features, Tensor):
            features, offset = self.split_offset(features)
            eta = linear_outputs(z, features, self.outputs, self.z_layout.bias)
            return eta if offset is None else eta + offset
        if not self.heads_side_by_side:
            return torch.stack([self.head_at(phi, one, features, rows) for one in z])
        return torch.func.vmap(lambda one: self.head_at(phi, one, features, rows))(z)

    def log_prob(
        self, phi: Tensor, z: Tensor, features: Inputs, y: Tensor, rows: RowKeys | None = None
    ) -> Tensor:
        """log p(y_j | x_j, z) ``[L, n]`` for L values of z ``[L, d]``; y as stored."""
        encoded = self.likelihood.encode(y, self.outputs, phi.dtype)
        return self.likelihood.log_prob(self.head_outputs(phi, z, features, rows), encoded, self.params(phi))

    def features_at(self, phi: Tensor, x: Inputs) -> Inputs:
        """What z acts on, at new examples."""
        try:
            with torch.no_grad():
                return self.embed(phi, x)
        except USERS as error:
            if isinstance(error, FedpopError):
                raise
            raise not_accepted(x, error) from error

    def outputs_at(self, phi: Tensor, z: Tensor, x: Inputs) -> Tensor:
        """Head outputs ``[L, n, o]`` at new examples."""
        try:
            return self.head_outputs(phi, z, self.embed(phi, x))
        except USERS as error:
            if isinstance(error, FedpopError):
                raise
            raise not_accepted(x, error) from error

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules that make up the model."""

    @property
    def deep(self) -> bool:
        """z is inside a network, so that every gradient of a chain is a pass through it."""
        return False

    @property
    def affine(self) -> bool:
        """Features, and what is added to outputs, are affine maps of x."""
        return False

    @property
    def convolutional(self) -> bool:
        return self._pass is not None and self._pass.convolutional

    @property
    def frozen(self) -> bool:
        """Features never change, so they are computed once."""
        return False

    def on_features(self) -> Self:
        """This model for examples whose features were computed already."""
        out = copy.copy(self)
        setattr(out, "embed", lambda phi, x, rows=None: x)  # noqa: B010 (a method of this copy alone)
        return out

    # --- in which type the network runs --------------------------------------------------------

    @property
    def autocast(self) -> torch.dtype | None:
        """What the network's products are rounded to; None in the parameters' own type."""
        return None if self._pass is None else self._pass.autocast

    def chosen_precision(self) -> str:
        """``bfloat16``, or the parameters' own type. Where ``auto`` left it open for a large network, the
        first call on a machine takes seconds to find out; constructing a model never does."""
        like = self.initial_z()
        rounded = self._pass is not None and self._pass.chosen(like.device) == "bfloat16"
        return "bfloat16" if rounded else name_of(like.dtype)

    def on(self, device: str | torch.device) -> Self:
        """A copy on this device. On one without double precision the network alone runs there; all else of
        the model is then on the CPU."""
        asked = device_named(device)
        single = not has_double(asked)
        if single and self.dtype == torch.float64:
            raise SettingsError(
                f"device '{asked}' has no double precision, and the model is of float64: use "
                "module.float(), or device='cpu'"
            )
        where, beside = (torch.device("cpu"), asked if self.network else None) if single else (asked, None)
        if where == self.initial_z().device and beside == (self._pass and self._pass.device):
            return self
        out = copy.deepcopy(self)
        for module in out.modules():
            module.to(where)
        out.device, out._pass = where, out._pass and replace(out._pass, device=beside)
        return out

    def at_precision(self, precision: str) -> Self:
        """A copy that computes in this: ``bfloat16``, or ``float32`` for the parameters' own type, which may
        also be named."""
        if precision == name_of(self.initial_z().dtype):
            precision = "float32"
        check_precision(precision)
        if self._pass is None and precision == "bfloat16":
            raise SettingsError(f"{type(self).__name__} has no network to run in bfloat16; leave it out")
        out = copy.copy(self)
        out._pass = self._pass and self._pass.at(precision)
        return out

    def asking_for(self, precision: str) -> Self:
        """A copy for which this was asked for, in place of what it was made with."""
        out = self.at_precision(precision)
        out.precision = precision
        return out

    def decisions(self) -> Sequence[Decision]:
        """What was decided on where settings left it open: the type that a network runs in, and where."""
        if not self.network or self._pass is None:
            return ()
        out = []
        if self._pass.device is not None:
            why = "it has no double precision, so that the network alone runs there, all else on the CPU"
            out.append(Decision("device", str(self._pass.device), why, unusual=True))
        if self.precision == "auto" != self._pass.precision:  # which a run has chosen
            rounded, like = self.autocast is not None, self.initial_z()
            chosen = "bfloat16" if rounded else name_of(like.dtype)
            out.append(Decision("precision", chosen, self._pass.because(like.device), unusual=rounded))
        return out

    # --- where a population prior starts ------------------------------------------------------

    def prior_centre(self) -> Tensor:
        """The mean of z that a prior starts from, ``[d]``: zero, as for a network's weights."""
        return torch.zeros_like(self.initial_z())

    def prior_covariance(self) -> str:
        """The covariance of a Normal prior that nothing more was said about."""
        return "isotropic"

    def covariance_decision(self) -> Decision:
        """The same, and why."""
        found = self.prior_covariance()
        because = {
            "isotropic": "weights of a module, as in the paper",
            "diagonal": "named parameters have no unit in common",
            "full": "few weights of a linear head on columns that are not learned, with normal targets",
        }
        return Decision("prior covariance", found, because.get(found, "it suits the model"))

    @property
    def scale_from_features(self) -> bool:
        """The size of the features says at which scale of z outputs have variance one."""
        return True

    def check_start(self, federation: Federation) -> None:  # noqa: B027
        """Raise where the model cannot start on these (prepared) data."""

    def params(self, phi: Tensor) -> Params:
        """The likelihood's own parameters inside phi."""
        names = self.likelihood.initial_params()
        if not names:
            return {}
        views = self.phi_layout.views(phi)
        return {name: views[f"likelihood.{name}"] for name in names}

    @property
    def weights(self) -> int:
        """How many of phi's coordinates, the first ones, are weights: fixed effects and a likelihood's own
        parameters follow them, which weight decay leaves alone."""
        sizes = zip(self.phi_layout.names, self.phi_layout.sizes, strict=True)
        return sum(size for name, size in sizes if not name.startswith(("fixed.", "likelihood.")))

    @property
    def learns_features(self) -> bool:
        """A head works on features that change with phi."""
        of_backbone = any(name.startswith("backbone.") for name in self.phi_layout.names)
        return self.weights > 0 and (self.network or of_backbone)

    def at_noise(self, variance: float | None) -> Self:
        """This model in a round with this noise variance, whatever it says of it; itself for None."""
        if variance is None:
            return self
        out = copy.copy(self)
        out.likelihood = self.likelihood.with_noise(variance)
        return out

    @property
    def intercept(self) -> bool:
        """Outputs can all be the same number, whatever x is."""
        names = [name for module in self.modules() for name, _ in module.named_parameters()]
        return not names or any(name.endswith("bias") for name in names)

    def dropout_keys(self, cohort: Cohort, key: Key) -> RowKeys | None:
        """Names for a cohort's examples, where the model has dropout to draw for them."""
        return self.row_keys(cohort, key) if self._drops else None

    @cached_property
    def _drops(self) -> bool:
        return any(has_dropout(m) for m in self.modules())

    def row_keys(self, cohort: Cohort, key: Key) -> RowKeys:
        return RowKeys(key, cohort.units[cohort.owner], cohort.position)

    def features(self, phi: Tensor, cohort: Cohort, rows: RowKeys | None = None) -> Inputs:
        """``embed`` of a cohort's examples, or what was computed before if phi cannot change it."""
        return cohort.x if cohort.embedded else self.embed(phi, cohort.x, rows)

    def split_offset(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features that the head sees, and what is added to its outputs."""
        if not self.offsets:
            return features, None
        return features[..., : -self.offsets], features[..., -self.offsets :]

    def pulls_back(self, cohort: Cohort) -> bool:
        """A derivative in the features of these examples becomes one in phi without a backward pass."""
        return False

    def pulled_back(self, cohort: Cohort, slope: Tensor) -> dict[str, Tensor]:
        """Then, what a derivative ``[n, *]`` in the features is in the backbone's parameters, by their names
        in phi."""
        raise ModelError(f"{type(self).__name__} has no closed form for this; use a backward pass")

    def fixed_design(self, x: Inputs) -> Tensor | None:
        """The columns ``[n, p]`` of which phi adds a linear map to outputs, where that is what it adds."""
        return None

    def with_fixed(self, phi: Tensor, weight: Tensor) -> Tensor:
        """phi with this map ``[outputs, p]`` of those columns."""
        return phi

    def prepared(self, example: Example) -> Self:
        """This model for examples of this kind: what the modules alone do not tell (how many outputs there
        are, what comes last) is found by one pass of two examples of zeros, so that a server without data
        and a site without the others find the same."""
        phi = self.initial_phi()
        out = copy.copy(self)
        out.labels = example.labels or self.labels
        like = example.at_least(first_taken(self, example, phi))
        out._look(like.zeros(2, phi.device, phi.dtype), phi)
        if self.modules():
            check_rows(out, like)
            check_derivative(out, like)
            out.twice_in_double = twice_in_double(out, like, phi)
            out.rows_side_by_side = rows_side_by_side(out, like, phi)
        return out

    def _look(self, x: Inputs, phi: Tensor) -> None:
        """What a copy of a model learns from two examples."""
        self.outputs = self._outputs_at(x, phi)
        self.likelihood.check_head(self.outputs)
        if self.modules() and not self.linear:
            self.heads_side_by_side = vectorises_head(self, x, phi)

    def known(self) -> dict[str, Any]:
        """What ``prepared`` found, for a file."""
        known: dict[str, Any] = {"outputs": self.outputs, "linear": self.linear}
        known |= {"rows_side_by_side": self.rows_side_by_side, "heads_side_by_side": self.heads_side_by_side}
        known |= {"twice_in_double": self.twice_in_double}
        return known | {"labels": list(self.labels)} if self.labels else known

    def knowing(self, known: Mapping[str, Any]) -> Self:
        """This model with what another one like it has found."""
        out = copy.copy(self)
        out.outputs, out.linear = int(known["outputs"]), bool(known["linear"])
        out.labels = tuple(known.get("labels", ()))
        out.rows_side_by_side = int(known.get("rows_side_by_side", self.rows_side_by_side))
        out.twice_in_double = bool(known.get("twice_in_double", self.twice_in_double))
        out.heads_side_by_side = bool(known.get("heads_side_by_side", self.heads_side_by_side))
        return out

    def checked(self, federation: Federation) -> Federation:
        """Data checked against this (prepared) model: targets and types; features of a frozen backbone."""
        phi, federation = self.initial_phi(), self.with_targets(federation)
        if not federation.embedded:
            check_codes(self, federation)
        if self.frozen and not federation.embedded:
            federation = federation.map_inputs(lambda x: self._embed_all(phi, x))
        return federation

    def with_targets(self, federation: Federation) -> Federation:
        """Targets as this (prepared) model takes them, or the first that it does not."""
        phi = self.initial_phi()
        if federation.labels:
            self._check_labels(federation.labels)

        def check(y: Tensor, where: str) -> Tensor:
            y = self.likelihood.check_targets(y, self.outputs, where)
            return narrowed(y, phi.dtype, lambda row: f"{where}, row {row}: y")

        return federation.map_targets(check, phi.dtype)

    def _check_labels(self, labels: tuple[str, ...]) -> None:
        shown = ", ".join(map(repr, labels[:5])) + (", ..." if len(labels) > 5 else "")
        if not self.likelihood.discrete or self.likelihood.ordered:
            raise DataError(f"y holds words ({shown}), but a {self.likelihood.name} target is a number")
        most = self.outputs if self.likelihood.shifts else 2
        if len(labels) > most:
            raise DataError(f"y holds {len(labels)} labels ({shown}), but the model has {most} classes")

    def _embed_all(self, phi: Tensor, x: Inputs, chunk: int = 1024) -> Inputs:
        rows = leaves(x)[0].shape[0]
        parts = []
        with torch.no_grad():
            for start in range(0, max(rows, 1), chunk):  # without rows, one part says what features look like
                part = map_inputs(lambda v, s=start: v[s : s + chunk].to(phi.device), x)
                parts.append(self.embed(phi, part))
        return map_inputs(lambda *v: torch.cat(v), *parts)

    def _outputs_at(self, x: Inputs, phi: Tensor) -> int:
        """One forward pass: does the model accept such examples, and how many outputs come out?"""
        return outputs_at(self, x, phi)

    def bind_linear(self, phi: Tensor, features: Inputs, cohort: Cohort, bias: bool) -> LocalLikelihood:
        """The native path: a padded feature block with a column of ones."""
        if not isinstance(features, Tensor):
            raise ModelError("a linear head needs one tensor of features per example")
        features, offset = self.split_offset(features)
        if bias:
            features = with_ones(features)
        how = (self.likelihood.name, self.outputs, phi.dtype)
        y = cohort.padded_targets(how, lambda y: self.likelihood.encode(y, self.outputs, phi.dtype))
        added = None if offset is None else cohort.pad(offset)
        mask = cohort.mask
        if isinstance(self.likelihood, Weighted):
            y, mask = y[..., :1], y[..., 1]  # zero where there is no example
        return LinearLikelihood(cohort.pad(features), y, mask, self.likelihood, self.params(phi), added)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_ones(features: Tensor) -> Tensor:
    return torch.cat((features, features.new_ones((*features.shape[:-1], 1))), dim=-1)


def linear_outputs(z: Tensor, features: Tensor, outputs: int, bias: bool) -> Tensor:
    """``[L, n, o]`` outputs of a linear head for z ``[L, d]``."""
    if bias:
        features = with_ones(features)
    if z.shape[0] == 1:  # a point estimate, in every step of local training: einsum takes its time to plan
        return (features @ z.reshape(outputs, -1).mT).unsqueeze(0)
    return torch.einsum("nq,loq->lno", features, z.unflatten(-1, (outputs, -1)))


def likelihood_layout(likelihood: Likelihood) -> dict[str, tuple[int, ...]]:
    return {f"likelihood.{name}": () for name in likelihood.initial_params()}


def initial_params(likelihood: Likelihood, like: Tensor) -> list[Tensor]:
    return [like.new_full((1,), v) for v in likelihood.initial_params().values()]


def trainable(module: nn.Module) -> dict[str, Any]:
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
