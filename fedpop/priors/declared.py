"""A prior with a density of its own says all that goes with it: another one's closed forms would be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpop.errors import SettingsError

if TYPE_CHECKING:
    from fedpop.priors.base import Prior

GOES_WITH = {
    "component": "component = None, unless posteriors are Gaussian",
    "em": "em = False, unless it has an em_step",
    "forms": 'forms = ("left",), the forms of I that score can make',
    "score": "score(), what a client sends of beta",
    "sd": "sd(), its standard deviations",
    "sample": "sample(), its draws from standard normal noise",
}
"""What belongs to one density and no other, and how it is said."""


def check_declared(prior: Prior) -> None:
    """Raise where a class has a density of its own and would inherit what belongs to another's."""
    cls = type(prior)
    order = [c for c in cls.__mro__ if "value_and_grad" in vars(c)]
    own = order[0]
    if own.__module__.startswith("fedpop."):
        return
    needed = dict(GOES_WITH)
    if cls.em:
        needed["em_step"] = "em_step(), since it says em = True"
    if prior.component is not None:
        needed["expected_score"] = "expected_score(), since it says that posteriors are Gaussian"
    heir = next(
        (c for c in order[1:] if not getattr(vars(c)["value_and_grad"], "__isabstractmethod__", 0)), None
    )
    if heir is None:  # from Prior itself, whose abstract methods have asked for most of this
        needed = {n: told for n, told in needed.items() if n in ("em_step", "expected_score")}
        needed |= {"draw": "draw(), or normalised = False"} if cls.normalised else {}
    theirs = cls.__mro__[cls.__mro__.index(heir or order[-1]) :]
    missing = [told for n, told in needed.items() if not _said(cls, n, theirs)]
    if missing:
        whose = "nobody" if heir is None else heir.__name__
        raise SettingsError(
            f"{cls.__name__} has a density of its own (value_and_grad), and would have from {whose} what "
            f"does not belong to it; let it say too: {'; '.join(missing)}"
        )


def _said(cls: type, name: str, theirs: tuple[type, ...]) -> bool:
    names = (name, "draw") if name == "sample" else (name,)
    return any(n in vars(c) for c in cls.__mro__ if c not in theirs for n in names)
