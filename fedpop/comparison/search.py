"""A method's settings found by random search, on validation examples only: ``fedpop tune`` in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any

from fedpop.checked import Count, OneOf, Seed, checked
from fedpop.comparison.tune import METRIC, draw
from fedpop.errors import DataError, FedpopError, SettingsError
from fedpop.evaluation.scores import CLASSES, HIGH_IS_GOOD, REAL
from fedpop.federation.clients import Federation
from fedpop.keys import Key
from fedpop.methods.base import Algorithm
from fedpop.population import evaluate


@dataclass(frozen=True)
class Tuned:
    """What a search came to.

    Args:
        method: The method with the settings that are best.
        score: Its validation score.
        trials: The settings of every trial with their score, None where it failed; the first is the method as
            it was given.
    """

    method: Algorithm
    score: float
    trials: tuple[tuple[Mapping[str, Any], float | None], ...]


@checked
def tune(
    method: Algorithm,
    search: Mapping[str, Any],
    clients: Any,
    *,
    trials: Count = 8,
    rounds: Count | None = None,
    metric: Annotated[str, OneOf(*dict.fromkeys((*CLASSES, *REAL)))] = METRIC,
    seed: Seed = 0,
    participation: Any = None,
) -> Tuned:
    """Search for a method's settings on the clients' validation examples; test examples are taken away.

    Args:
        method: With the settings that are tried first.
        search: What to search for by name, ``local.rate`` for the rate of ``local``: a list of values, or
            ``{"log": [0.001, 0.1]}``, ``{"linear": [a, b]}``, ``{"whole": [a, b]}``.
        clients: As for ``fp.fit``, with ``validation`` sets (``fp.hold_out`` sets some aside).
        trials: How many settings are tried, 8 by default.
        rounds: Of each; None (the default) as ``fit`` has it.
        metric: Which score is best, "nll" by default.
        seed: Of the search and of all runs, 0 by default.
        participation: Who takes part in a round, as for ``fp.fit``.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> clients = fp.hold_out([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])], validation=0.25)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(0.1))
    >>> space = {"personal.rate": {"log": [0.01, 0.5]}}
    >>> found = tune(fp.Ditto(model, personal=fp.LocalSGD(rate=1e-4)), space, clients, trials=3, rounds=5)
    >>> len(found.trials), found.method.personal.rate > 1e-4
    (3, True)
    """
    federation = Federation.of(clients)
    if "validation" not in federation.splits:
        raise DataError("settings are searched for on validation examples, and there are none: fp.hold_out")
    splits = {name: packed for name, packed in federation.splits.items() if name != "test"}
    federation = replace(federation, splits=splits)
    sign = 1.0 if metric in HIGH_IS_GOOD else -1.0
    best: tuple[float, Algorithm] | None = None
    tried: list[tuple[Mapping[str, Any], float | None]] = []
    for t in range(trials if search else 1):
        settings: dict[str, Any] = {}
        if t:
            for name, space in search.items():
                key = Key(seed, round=t, purpose=f"tune/{method.label}/{name}")
                settings[name] = draw(space, key, f"tune: search {name!r}")
        else:
            for name in search:
                _setting(method, name)  # it is there, or an error before any run
        candidate = method
        for name, value in settings.items():
            candidate = _with(candidate, name.split("."), value)
        score = _score(candidate, federation, rounds, seed, participation, metric)
        tried.append((settings, score))
        if score is not None and (best is None or sign * score > sign * best[0]):
            best = (score, candidate)
    if best is None:
        raise SettingsError(
            f"{method.label}: none of its {len(tried)} trials has a finite validation {metric}; search "
            "elsewhere (smaller steps?)"
        )
    return Tuned(best[1], best[0], tuple(tried))


def _score(
    method: Algorithm, clients: Federation, rounds: int | None, seed: int, participation: Any, metric: str
) -> float | None:
    try:
        population = method.fit(
            clients, rounds=rounds, seed=seed, participation=participation, progress=False
        )
        return evaluate(population, "validation").summary().get(metric)
    except FedpopError:
        return None


def _setting(of: Any, name: str) -> Any:
    for part in name.split("."):
        if not is_dataclass(of) or part not in {f.name for f in fields(of)}:
            raise SettingsError(f"tune: {type(of).__name__} has no setting {part!r} ({name!r})")
        of = getattr(of, part)
    return of


def _with(of: Any, path: list[str], value: Any) -> Any:
    """A copy with this setting."""
    inner = value if len(path) == 1 else _with(getattr(of, path[0]), path[1:], value)
    return replace(of, **{path[0]: inner})
