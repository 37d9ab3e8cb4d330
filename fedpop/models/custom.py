"""Any function as a model: log p(y | phi, z, x) written down, with named parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedpop.blocks import CLIENTS_AT_ONCE
from fedpop.checked import checked
from fedpop.errors import DataError, FedpopError, ModelError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs, map_inputs, rows_of
from fedpop.models import likelihoods
from fedpop.models.base import Model
from fedpop.models.likelihoods import Likelihood, Params
from fedpop.models.links import LinkedLayout, Parameter, real
from fedpop.models.modules import RowKeys
from fedpop.models.probe import global_generator, rounding

Named = dict[str, Tensor]


@dataclass(frozen=True)
class GivenDensity(Likelihood):
    """The stand-in where only a log-likelihood was given: outputs, if any, are means."""

    name: ClassVar[str] = "custom"
    by_name: ClassVar[bool] = False

    def check_targets(self, y: Tensor, outputs: int, where: str) -> Tensor:
        if torch.is_floating_point(y):
            good = torch.isfinite(y.unsqueeze(-1)).flatten(1).all(1)
            if not bool(good.all()):
                raise DataError(f"{where}, row {int((~good).nonzero()[0, 0])}: y is NaN or infinite")
        return y

    def encode(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        return y.to(dtype) if torch.is_floating_point(y) else y

    def mean(self, eta: Tensor, params: Params) -> Tensor:
        return eta

    def _missing(self) -> ModelError:
        return ModelError(
            "this model was given as a log-likelihood, which says nothing of how to draw y or what its "
            "spread is: there are only means and intervals of means (of='mean'). Give outputs= and "
            "likelihood= instead of the function"
        )

    def log_prob(self, eta: Tensor, y: Tensor, params: Params) -> Tensor:
        raise self._missing()

    def value_and_grad(self, eta: Tensor, y: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        raise self._missing()

    def bound(self, params: Params) -> None:
        return None

    def curvature(self, eta: Tensor, params: Params) -> Tensor:
        raise self._missing()

    def draw(self, eta: Tensor, params: Params, uniform: Tensor, normal: Tensor) -> Tensor:
        raise self._missing()


class CustomModel(Model):
    """A model from a function of (phi, z, data): a growth curve, a pharmacokinetic model, anything.

    Give ``log_likelihood``, or ``outputs`` and ``likelihood``, with which predictions have everything.
    phi and z live on the free scale, where the population prior is Normal; the prior's mean starts at
    z's initial values or, with normal targets, at the one z that fits everyone best, searched from there.
    ``phi``, ``z`` and the posterior come back under their names on the natural scale.

    The functions see one client's rows at a time, as plain tensors in dictionaries, and run under
    ``torch.func.vmap``: no ``if`` on values (``torch.where`` instead), no in-place writes. Rows may be
    followed by copies of the last one, which do not count.

    Args:
        log_likelihood: ``log_likelihood(phi, z, x, y)`` gives one value per example, ``[n]``. An unknown
            residual standard deviation is a positive parameter in phi.
        z: The private parameters by name, each with its initial value on the natural scale and its link:
            ``fedpop.links.real(...)``, ``positive(...)`` or ``unit(...)``; a bare number is real.
        phi: The shared parameters, in the same way; None (the default) is none.
        outputs: ``outputs(phi, z, x)``, ``[n]`` or ``[n, o]``: the linear predictor of ``likelihood``,
            or, beside ``log_likelihood``, the mean of y, for predictions of means.
        likelihood: One of ``fedpop.likelihoods``, or its name, of which outputs are the linear
            predictor.
        dtype: What is computed in (default: double precision).
        device: Where it is computed (default: the CPU).

    >>> import torch, fedpop as fp
    >>> def decay(phi, z, x):
    ...     return z["height"] * torch.exp(-phi["rate"] * x)
    >>> phi, z = {"rate": fp.links.positive(0.5)}, {"height": 1.0}
    >>> fp.CustomModel(outputs=decay, likelihood="normal", phi=phi, z=z)
    CustomModel(decay, phi: rate (positive), z: height (real), likelihood: normal)
    """

    @checked
    def __init__(
        self,
        log_likelihood: Callable[[Named, Named, Any, Tensor], Tensor] | None = None,
        *,
        z: Mapping[str, Any],
        phi: Mapping[str, Any] | None = None,
        outputs: Callable[[Named, Named, Any], Tensor] | None = None,
        likelihood: Likelihood | str | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if log_likelihood is not None and likelihood is not None:
            raise ModelError("give log_likelihood, or outputs and likelihood: two likelihoods may disagree")
        if log_likelihood is None and (outputs is None or likelihood is None):
            raise ModelError("a model needs log_likelihood, or outputs together with likelihood")
        _takes(log_likelihood, "log_likelihood", ("phi", "z", "x", "y"))
        _takes(outputs, "outputs", ("phi", "z", "x"))
        self._function, self._outputs = log_likelihood, outputs
        self.likelihood = GivenDensity() if likelihood is None else likelihoods.resolve(likelihood)
        shared, personal = _parameters(phi or {}, "phi"), _parameters(z, "z")
        if not personal:
            raise ModelError("z is empty, so nothing would be personal; name at least one parameter")
        both = [name for name in shared if name in personal]
        if both:
            raise ModelError(f"{both[0]!r} is named in phi and in z; a parameter is shared or personal")
        learned = {f"likelihood.{n}": real(v) for n, v in self.likelihood.initial_params().items()}
        self._start = (shared | learned, personal)
        self.phi_layout: LinkedLayout = LinkedLayout.of_parameters(shared | learned)
        self.z_layout: LinkedLayout = LinkedLayout.of_parameters(personal)
        self._named = tuple(shared)
        if not dtype.is_floating_point:
            raise SettingsError(
                f"CustomModel: dtype must be a floating type such as torch.float64, not {dtype}"
            )
        try:
            self.dtype, self.device = dtype, torch.empty(0, device=device or "cpu").device
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(f"CustomModel: device {device!r} is not here: {error}") from error
        self.linear = False
        self.outputs = 1  # until it has seen an example

    def __repr__(self) -> str:
        function = self._outputs if self._function is None else self._function
        parts = [getattr(function, "__name__", type(function).__name__)]
        if self._named:
            parts.append(f"phi: {_listed(self.phi_layout, self._named)}")
        parts += [f"z: {_listed(self.z_layout, self.z_layout.names)}", f"likelihood: {self.likelihood.name}"]
        return f"CustomModel({', '.join(parts)})"

    def modules(self) -> list[nn.Module]:
        return []

    def initial_phi(self) -> Tensor:
        return self._flat(self.phi_layout, self._start[0])

    def initial_z(self) -> Tensor:
        return self._flat(self.z_layout, self._start[1])

    def _flat(self, layout: LinkedLayout, start: Mapping[str, Parameter]) -> Tensor:
        free = layout.flatten({name: parameter.value for name, parameter in start.items()})
        return free.to(self.device, self.dtype)

    def prior_centre(self) -> Tensor:
        return self.initial_z()

    def prior_covariance(self) -> str:
        return "diagonal"  # a rate and a volume have no common unit

    @property
    def scale_from_features(self) -> bool:
        return False

    def embed(self, phi: Tensor, x: Inputs, rows: RowKeys | None = None) -> Inputs:
        return x

    def head_at(self, phi: Tensor, z: Tensor, features: Inputs, rows: RowKeys | None = None) -> Tensor:
        if self._outputs is None:
            raise ModelError(
                "this model has a log-likelihood only, so it cannot predict: give outputs=, a function "
                "(phi, z, x) -> mean of y, beside it, or outputs= and likelihood= in its place"
            )
        out = self._outputs(self._shared(phi), self.z_layout.views(z), features)
        return _column(_per_row(out, features, "outputs", wide=True))

    def log_prob_at(
        self, phi: Tensor, z: Tensor, features: Inputs, y: Tensor, rows: RowKeys | None = None
    ) -> Tensor:
        if self._function is None:
            return super().log_prob_at(phi, z, features, y, rows)
        value = self._function(self._shared(phi), self.z_layout.views(z), features, y)
        return _per_row(value, features, "log_likelihood")

    def log_prob(
        self, phi: Tensor, z: Tensor, features: Inputs, y: Tensor, rows: RowKeys | None = None
    ) -> Tensor:
        encoded = self.likelihood.encode(y, self.outputs, phi.dtype)
        out: Tensor = torch.func.vmap(lambda one: self.log_prob_at(phi, one, features, encoded, rows))(z)
        return out

    def _shared(self, phi: Tensor) -> Named:
        views = self.phi_layout.views(phi)
        return {name: views[name] for name in self._named}

    def _outputs_at(self, x: Inputs, phi: Tensor) -> int:
        return self.outputs if self._outputs is None else super()._outputs_at(x, phi)

    # --- before the first round ---------------------------------------------------------------

    def check_start(self, federation: Federation) -> None:
        """Raise, with the client's name, unless every log-likelihood and its gradients are finite."""
        phi, z = self.initial_phi(), self.initial_z()
        for ids in torch.arange(len(federation)).split(CLIENTS_AT_ONCE):
            cohort = federation.cohort(ids, phi.device)
            try:
                bad = self._not_finite(phi, z, cohort)
                seen = None if bad is not None else self._sees_copies(phi, z, cohort)
            except Exception as error:  # the function is not ours
                if isinstance(error, FedpopError):
                    raise
                raise _under_vmap(error) from error
            if seen is not None:
                raise ModelError(
                    f"client {federation.names[int(ids[seen])]!r}: the log-likelihood of its rows changes "
                    "with copies of the last one after them, which do not count: the function lets rows see "
                    "those that follow (a mean or a sum over rows), so that theta would go by how clients "
                    "are grouped"
                )
            if bad is not None:
                client, what = bad
                raise ModelError(
                    f"client {federation.names[int(ids[client])]!r}{what} at the initial values "
                    f"({_values(self._start[0] | self._start[1])}): start elsewhere, or look for a "
                    "division by zero, a logarithm or a root of zero in the function"
                )

    def _not_finite(self, phi: Tensor, z: Tensor, cohort: Cohort) -> tuple[int, str] | None:
        """The first client without a finite value, or gradient, and what is wrong with it."""
        at = z.expand(len(cohort), 1, -1)
        value, grad = self.bind(phi, cohort.x, cohort).value_and_grad(at)
        for c in (~torch.isfinite(value[:, 0])).nonzero().flatten().tolist():
            one = cohort.select(torch.tensor([c], device=cohort.device))
            rows = self.log_prob(phi, z.unsqueeze(0), one.x, one.y)[0]
            row = int((~torch.isfinite(rows)).nonzero()[0, 0])
            return c, f", row {row}: the log-likelihood is {float(rows[row]):g}"
        for c in (~torch.isfinite(grad).all(-1)[:, 0]).nonzero().flatten().tolist():
            return c, f": the gradient in {self._culprit(self.z_layout, grad[c, 0])} is not finite"
        if not bool(torch.isfinite(self._phi_grad(phi, z, cohort)).all()):
            for c in range(len(cohort)):
                own = self._phi_grad(phi, z, cohort.select(torch.tensor([c], device=cohort.device)))
                if not bool(torch.isfinite(own).all()):
                    return c, f": the gradient in {self._culprit(self.phi_layout, own)} is not finite"
        return None

    def _sees_copies(self, phi: Tensor, z: Tensor, cohort: Cohort) -> int | None:
        """The first client with several rows, where its likelihood changes with rows that do not count."""
        several = (cohort.sizes > 1).nonzero().flatten()
        if not len(several):
            return None
        one = cohort.select(several[:1])
        longer = map_inputs(lambda v: torch.cat((v, v[-1:])), one.x)
        alone = self.log_prob(phi, z.unsqueeze(0), one.x, one.y)
        beside = self.log_prob(phi, z.unsqueeze(0), longer, torch.cat((one.y, one.y[-1:])))[:, :-1]
        near = rounding(phi.dtype) * float(alone.abs().max())
        return None if torch.allclose(alone, beside, 0.0, near) else int(several[0])

    def _phi_grad(self, phi: Tensor, z: Tensor, cohort: Cohort) -> Tensor:
        free = phi.clone().requires_grad_(phi.numel() > 0)
        value = self.bind(free, cohort.x, cohort).value(z.expand(len(cohort), 1, -1)).sum()
        if not value.requires_grad:
            return torch.zeros_like(phi)
        (grad,) = torch.autograd.grad(value, free)
        return grad

    @staticmethod
    def _culprit(layout: LinkedLayout, grad: Tensor) -> str:
        bad = {n for n, s in layout.spans().items() if not bool(torch.isfinite(grad[s]).all())}
        return ", ".join(sorted(bad))


def _parameters(given: Mapping[str, Any], where: str) -> dict[str, Parameter]:
    out = {}
    for name, value in given.items():
        if not isinstance(name, str) or not name or name.startswith("likelihood."):
            raise ModelError(f"{where}: {name!r} cannot be the name of a parameter")
        try:
            parameter = value if isinstance(value, Parameter) else real(value)
        except ModelError as error:
            raise ModelError(f"{where}[{name!r}]: {error}") from error
        if parameter.value.numel() == 0:
            raise ModelError(f"{where}[{name!r}] is empty")
        out[name] = parameter
    return out


def _takes(function: Callable[..., Any] | None, label: str, names: tuple[str, ...]) -> None:
    """Raise unless the function can be called with so many arguments."""
    if function is None:
        return
    if not callable(function):
        raise ModelError(f"{label} must be a function of ({', '.join(names)}), not {function!r}")
    try:
        inspect.signature(function).bind(*names)
    except ValueError:
        return  # a built-in that does not tell
    except TypeError as error:
        raise ModelError(f"{label} is called as {label}({', '.join(names)}): {error}") from error


def _per_row(value: Any, x: Inputs, label: str, wide: bool = False) -> Tensor:
    n = rows_of(x)
    allowed = f"({n},)" + (f" or ({n}, outputs)" if wide else "")
    if not isinstance(value, Tensor):
        raise ModelError(f"{label} must return a tensor of shape {allowed}, not {type(value).__name__}")
    if value.shape[:1] != (n,) or value.dim() > 1 + wide:
        raise ModelError(
            f"{label} returned shape {tuple(value.shape)} for {n} example(s); it must return one value per "
            f"example, shape {allowed}, not their sum"
        )
    return value


def _column(value: Tensor) -> Tensor:
    return value.unsqueeze(-1) if value.dim() == 1 else value


def _listed(layout: LinkedLayout, names: tuple[str, ...]) -> str:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return ", ".join(f"{n}{list(shapes[n]) if shapes[n] else ''} ({layout.link_of(n).name})" for n in names)


def _values(start: Mapping[str, Parameter]) -> str:
    return ", ".join(
        f"{n} {p.value.item():g}" if p.value.numel() == 1 else f"{n} {p.value.flatten()[:3].tolist()}..."
        for n, p in start.items()
    )


def _under_vmap(error: Exception) -> ModelError:
    text = (str(error) or type(error).__name__).splitlines()[0]
    if not isinstance(error, RuntimeError):
        return ModelError(f"the function failed: {type(error).__name__}: {text}")
    if "randomness" in text:
        return global_generator()
    return ModelError(
        f"the function failed under torch.func.vmap, which runs it for many clients at once: {text} (no `if` "
        "or `.item()` on values: use torch.where; no writing into tensors)"
    )
