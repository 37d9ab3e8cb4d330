"""Where theta starts: what everyone is asked for it, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedpop.decisions import Decision
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.models.base import Model
from fedpop.priors import Prior
from fedpop.priors.base import normals_of
from fedpop.questions import least_squares, pooled, spectral
from fedpop.questions.base import Question
from fedpop.questions.features import FeatureMoments, FeatureScale
from fedpop.questions.least_squares import LeastSquares
from fedpop.questions.spectral import Spectral

STARTS = ("auto", "spectral", "random")


def questions(
    start: str | Spectral, model: Model, prior: Prior, phi: Tensor, restart: int = 0, anneals: bool = False
) -> Sequence[Question[Tensors]]:
    """The spectral start where it is asked for or applies; else, for normal targets, one in their units,
    of a linear head in one question, of a user's function in several;
    else the scale at which outputs have variance one, or the shape of a prior with more than one scale,
    unless it was given. A random start that was asked
    for is one; that of a restart is random in phi alone. After a spectral start the data's units are asked
    for where the noise is learned, or where the run ``anneals`` it."""
    fitted = least_squares.applies(model) and prior.component is not None
    moments = (LeastSquares(model, phi),) if fitted and (start != "random" or restart) else ()
    if isinstance(start, Spectral) or start == "spectral" or (start == "auto" and spectral.applies(model)):
        asked = (start if isinstance(start, Spectral) else Spectral()).questions(model)
        return (*asked, *moments) if anneals or model.likelihood.given_noise is None else asked
    pools = () if start == "random" or prior.component is None else pooled.questions(model, phi)
    known = prior.scale is not None or not model.scale_from_features
    if moments or pools or known:
        return moments or pools
    shaped = prior.covariance != "isotropic" and model.linear and not model.learns_features
    if not shaped:
        return (FeatureScale(model, phi, prior.bounds),)
    # One Normal of a full covariance takes the shape, others take what is in it of each coordinate.
    return (FeatureMoments(model, phi, whole=prior.covariance == "full" and prior.component is prior),)


def decision(asked: Sequence[Question[Tensors]], prior: Prior) -> Decision:
    """Where theta starts, by what everyone is asked for it."""
    known = {
        "second moments": ("spectral", "a linear backbone and a linear head with one output, without bias"),
        "least squares": ("least squares", "normal targets of a linear head"),
        "pooled fit": ("pooled least squares", "normal targets of a function of few parameters"),
        "feature scale": ("scale of the features", "outputs are to have variance one"),
        "feature moments": ("moments of the features", "outputs are to have variance one, in any units"),
    }
    found = [known[name] for name in dict.fromkeys(q.name for q in asked) if name in known]
    if not found:
        given = prior.scale is not None
        return Decision("start", "as given", f"the {'prior has its scale' if given else 'model has a place'}")
    return Decision("start", " and ".join(chosen for chosen, _ in found), found[0][1])


def theta(model: Model, prior: Prior, phi: Tensor, known: Tensors, key: Key) -> tuple[Tensor, Tensor]:
    """phi and beta from the answers, where there are any; what was given stays as it was given."""
    phi, spectral_start = known.get("phi", phi), "whitener" in known
    if "left" in known and "log_variance" in model.likelihood.initial_params():
        phi = phi.clone()
        phi[model.phi_layout.spans()["likelihood.log_variance"]] = float((0.5 * known["left"]).log())
    if "fixed" in known:
        phi = model.with_fixed(phi, known["fixed"])
    mu = model.prior_centre() + prior.mean
    normal = prior.component
    if (
        "centre" in known
        and not spectral_start
        and normal is not None
        and normal.learn_mean
        and not prior.mean
    ):
        mu = known["centre"].to(mu.dtype)
    beta = prior.init(mu, prior.scale or 1.0, key)
    if "scale" in known:
        beta = prior.rescaled(beta, float(known["scale"]))
    if "spread" in known and not spectral_start and prior.scale is None:
        sd, normals = known["spread"].double(), normals_of(prior)
        if normals is None:  # one scale that stands for them
            spread = prior.rescaled(beta.double(), float(sd.log().mean().exp()))
        else:
            spread = normals.spread_out(beta.double(), sd, known.get("shape"))
        beta = prior.project(spread.to(beta.dtype))
    return phi, beta
