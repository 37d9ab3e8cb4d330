"""What sites are asked once theta is there: how likely their data are, how sure theta is, how chains mixed.

Each answer is a sum over sites. What cannot be computed says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fedpop.errors import FedpopError, SettingsError
from fedpop.evaluation.information import Information, require_small, standard_errors
from fedpop.evaluation.newcomers import widths_in_words
from fedpop.kernels.target import Hierarchy
from fedpop.methods.base import hierarchy_of
from fedpop.population import Population

log = logging.getLogger("fedpop.server")


def _diagnostics(population: Population, hierarchy: Hierarchy) -> dict[str, Any]:
    found = population.diagnostics()
    return {"words": str(found.chains), "chains": asdict(found.chains), "warnings": found.warnings}


def _likelihood(population: Population, hierarchy: Hierarchy) -> dict[str, Any]:
    found = population.log_likelihood()
    return {"words": str(found)} | asdict(found)


def _errors(population: Population, hierarchy: Hierarchy) -> dict[str, Any]:
    require_small(hierarchy, population.published["beta"])
    found = standard_errors(hierarchy, population.published, population.ask(Information(hierarchy)))
    words = [
        f"{name} {', '.join(f'{v:.3g}' for v in values)}"
        for name, values in found.items()
        if len(values) <= 12
    ]
    words += [f"{name} ({len(values)} of them)" for name, values in found.items() if len(values) > 12]
    return {"words": "; ".join(words), "of": found}


def _newcomers(population: Population, hierarchy: Hierarchy) -> dict[str, Any]:
    return {"words": widths_in_words(population.newcomers), "of": population.newcomers}


NEWCOMERS = "newcomers"
"""Changes what newcomers are given, and so it is asked only where it is wanted."""
ASKED: dict[str, Callable[[Population, Hierarchy], dict[str, Any]]] = {
    "diagnostics": _diagnostics,
    "log_likelihood": _likelihood,
    "standard_errors": _errors,
    NEWCOMERS: _newcomers,
}
USUAL = tuple(name for name in ASKED if name != NEWCOMERS)


def check_asked(names: Sequence[str]) -> tuple[str, ...]:
    """Raise unless these can be asked."""
    if isinstance(names, str) or not all(name in ASKED for name in names):
        raise SettingsError(f"afterwards is a list of {', '.join(ASKED)}, not {names!r}")
    return tuple(names)


def answers(population: Population, names: Sequence[str]) -> tuple[dict[str, dict[str, Any]], Population]:
    """What was found, by name, and the population with what newcomers need; of a method without a population
    prior nothing."""
    hierarchy, found = hierarchy_of(population.algorithm), dict[str, dict[str, Any]]()
    for number, name in enumerate(names if hierarchy is not None else (), 1):
        assert hierarchy is not None
        log.info("afterwards, %d of %d: sites are asked for %s", number, len(names), name.replace("_", " "))
        begun = time.monotonic()
        try:
            population = population.for_newcomers() if name == NEWCOMERS else population
            found[name] = ASKED[name](population, hierarchy)
        except FedpopError as error:
            found[name] = {"words": f"not computed: {error}"}
        log.info("%s (%.0f s): %s", name.replace("_", " "), time.monotonic() - begun, found[name]["words"])
    return found, population
