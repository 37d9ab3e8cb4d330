"""What may leave a site, by name: what each number is, and who needs to see it.

A message holds vectors and numbers beside them. Those of fedpop's methods and questions are listed here;
a user's method or question lists further ones in ``sends``. What is not declared does not leave
(``require_declared``). Of all of them a sum over sites is wanted and nothing else, unless ``clear`` says that
single values are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from fedpop.errors import SettingsError
from fedpop.message.guard import COUNTS
from fedpop.message.message import Message, base_name


@dataclass(frozen=True)
class Sent:
    """One name in a message.

    Args:
        what: What the numbers are.
        bound: The largest absolute value of an entry that one unit adds, where there is one.
        clear: The server needs each site's value by itself, not only the sum.
    """

    what: str
    bound: float | None = None
    clear: bool = False


VECTORS: Mapping[str, Sent] = {
    # Rounds.
    "I": Sent("mean score of the population prior along the chain (Algorithm 1, line 17)"),
    "J": Sent("mean gradient of the log-likelihood in phi (line 18), or the local move that takes its place"),
    "curvature": Sent("trace of a bound on the likelihood's curvature in z; or its largest eigenvalue"),
    "examples": Sent("number of training examples"),
    "departure": Sent("how far data lie from what theta expects of them, r' V^-1 r"),
    "evidence": Sent("log marginal likelihood, and its parts"),
    "gradient": Sent("gradient of the log marginal likelihood in theta"),
    "hessian": Sent("lower triangle of its Hessian"),
    "n": Sent("number of training examples"),
    "dw": Sent("move of the shared weights, times n"),
    "dv": Sent("move of the means and scales of the shared posterior (pFedBayes), times n"),
    "dw^2": Sent("squares of that move, times n"),
    "dphi": Sent("move of the backbone, times n"),
    "dbody": Sent("move of the shared layers, times n"),
    "dhead": Sent("move of the shared head, times n"),
    "dz": Sent("move of the shared head (LG-FedAvg), times n"),
    "dy": Sent("move of the shared weights (SCAFFOLD)"),
    "dc": Sent("change of the control variate (SCAFFOLD)"),
    "x": Sent("the client's own weights (L2GD's average)"),
    "w": Sent("state of the travelling chain (FSGLD), or weights; the relay needs it as it is", clear=True),
    "precision": Sent("precision of the client's Gaussian surrogate (FSGLD)"),
    "shift": Sent("the same, times its mean"),
    "means": Sent("class means of features, a client's own and the shared ones interpolated, times n"),
    "covariance": Sent("covariance of features within classes, interpolated likewise, times n"),
    "dm": Sent("move of the mean of the head's posterior, over its squared spread (pFedVEM)"),
    "1/rho^2": Sent("one over that spread"),
    "mean": Sent("mean features of the client's data (FedDBE), times n, in the first round"),
    "z/rho": Sent("the client's auxiliary variable over its tolerance (DG-LMC)"),
    "1/rho": Sent("one over the tolerance"),
    "U": Sent("gradient of the potential, less what the server remembers (QLSD)"),
    "reference": Sent("gradient of the potential at w* (QLSD*)"),
    "bit.*": Sent("whether a unit's vector was inside its bound (1/2, else -1/2)"),
    # Questions.
    "second": Sent("second moments of inputs"),
    "count": Sent("number of rows, or of units"),
    "cross": Sent("cross products of inputs and targets (spectral start)"),
    "even": Sent("their part with equal indices"),
    "pairs": Sent("number of pairs of rows"),
    "size": Sent("sum of squares, of features or of targets, and how many"),
    "moments": Sent("products of features and targets"),
    "sums": Sent("sums of columns, or of their products"),
    "gram": Sent("products of centred columns"),
    "ww": Sent("products of fixed-effect columns and response"),
    "rows": Sent("number of rows"),
    "score": Sent("gradient of the log marginal likelihood; of validation, summed log-probability and count"),
    "scores": Sent("held-out log-probabilities by width of the prior"),
    "share": Sent("how much of z the data decide"),
    "information": Sent("observed information of theta"),
    "slope": Sent("gradient of the log marginal likelihood"),
    "noise": Sent("covariance of the score that is due to a finite number of draws"),
    "errors": Sent("the score of each part of the chains"),
    "counts": Sent("units by R-hat and effective draws"),
    "value": Sent("log marginal likelihood"),
    "log_det": Sent("log-determinants of the units' covariances"),
    "explained": Sent("what random effects explain of the products W'W"),
    "s1": Sent("derivatives of what is left of them, in the covariance of random effects"),
    "d1": Sent("those of the log-determinants"),
    "s2": Sent("second derivatives of what is left"),
    "d2": Sent("those of the log-determinants"),
    "start *": Sent("the same sums at the stage's first theta, where rounds close on a quorum"),
    "bins": Sent("sites that have a group in a bin, addressed by HMAC(their common key, its name)"),
    "keys": Sent("groups of sites that have such a key, by a keyed hash that says which key it is"),
    "left out": Sent("rows of tables that were left out because something is missing in them"),
    "[*": Sent(
        "rows, sums and squares of a column, rows in which it is missing, rows of a level and its place in "
        "the table's order, or sites by what a column holds or by its size and spread, by names as a JSON "
        "list; and a checksum of the numbers of rows"
    ),
    "{*": Sent("a one for the form of its examples, which the name is"),
    # Secure sums.
    "masked": Sent("all of the above as whole numbers under masks; what they are called is in the clear"),
    "unmasked": Sent("shares and pair keys that open the sum of an attempt"),
}
"""Vectors of the library's methods and questions; a name that ends with a star stands for all that begin
so."""

NUMBERS: Mapping[str, Sent] = {
    "log_likelihood": Sent("training log-likelihood, for the progress line"),
    "examples": Sent("examples that it is of"),
    "acceptance": Sent("acceptance rates, summed over units", bound=1.0),
    "clients": Sent("units that they are of", bound=1.0),
    "divergences": Sent("chains that diverged"),
    "gradient_evaluations": Sent("work: gradients in z"),
    "head_steps": Sent("work: examples through heads"),
    "backbone_passes": Sent("work: forward and backward passes of one example"),
    "weight": Sent("participation weights, summed over units"),
    COUNTS + "*": Sent("messages, or units of a site, by the power of two of their norms", bound=1.0),
    "units withheld": Sent("units that their site left out, out of all proportion", bound=1.0),
}
"""What travels beside the vectors."""

HEADER: Mapping[str, Sent] = {
    "site": Sent("the site's name", clear=True),
    "version": Sent("of fedpop", clear=True),
    "protocol": Sent("its number: both sides have the same", clear=True),
    "experiment": Sent("which run the message belongs to", clear=True),
    "round": Sent("its number", clear=True),
    "question": Sent("its name", clear=True),
    "digest": Sent("of the broadcast that the message answers", clear=True),
    "study": Sent("digest of the study that the site received", clear=True),
    "units": Sent("how many units the site has, or speaks for", clear=True),
    "examples": Sent("how many training examples it has", clear=True),
    "splits": Sent("kinds of examples that it has", clear=True),
    "hashes": Sent("of its units' names, where a rule draws among them", clear=True),
    "withheld": Sent("the site withheld its message: it was out of all proportion", clear=True),
    "weighted": Sent("participation weights were applied at the site", clear=True),
    "refused": Sent("code and words of a refusal", clear=True),
    "offer": Sent("the key of its session of secure sums, signed", clear=True),
    "attempt": Sent("the number of its last attempt at a secure sum", clear=True),
    "names": Sent(
        "of a question whose vectors differ: what they are called and how long they are", clear=True
    ),
    "gone": Sent("the site's node does not answer", clear=True),
}
"""What a message between machines says of itself; none of it depends on values in the data."""


def require_declared(message: Message, sends: Mapping[str, object]) -> None:
    """Raise where a message holds something that neither this page nor the sender's ``sends`` declares."""
    for name in chain(message.vectors, message.sums, message.payloads):
        if name not in VECTORS and not _listed(base_name(message, name), VECTORS, sends):
            raise _undeclared("vector", name)
    for name in message.numbers:
        if name not in NUMBERS and not _listed(name, NUMBERS, sends):
            raise _undeclared("number", name)


def _listed(name: str, *lists: Mapping[str, object]) -> bool:
    return any(
        name == entry or (entry.endswith("*") and name.startswith(entry[:-1]))
        for entries in lists
        for entry in entries
    )


def _undeclared(what: str, name: str) -> SettingsError:
    return SettingsError(
        f"a {what} {name!r} would leave a site that is not declared: name it in sends, as in "
        f'sends = {{"{name}": Sent("what it is")}}'
    )
