"""A population in words, at once: what was learned, from whom, at what cost. Nothing is computed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fedpop.decisions import in_a_line
from fedpop.evaluation.newcomers import widths_in_words
from fedpop.methods.base import PopulationPrior, hierarchy_of, role_of
from fedpop.models.links import LinkedLayout
from fedpop.models.modules import Layout

if TYPE_CHECKING:
    from fedpop.population.population import Population


def summary(population: Population) -> str:
    """What ``print`` shows."""
    method, model = population.algorithm, population.model
    first = f"{method.label} population: {population.whose}"
    if population.federation is not None:
        sizes = population.federation.train.sizes
        first += f", {int(sizes.sum())} examples ({int(sizes.min())} to {int(sizes.max())} each)"
    rows, learned = [("model", repr(model))], role_of(method, PopulationPrior)
    rows += [] if learned is None else learned.lines(population.published)
    rows += population.how
    if isinstance(model.z_layout, LinkedLayout) and learned is not None:
        rows += _named(population, model.z_layout)
    if population.newcomers:
        rows.append(("new", f"clients have {widths_in_words(population.newcomers)}"))
    if population.totals:
        up, down, seconds = (population.totals.get(n, 0.0) for n in ("bytes_up", "bytes_down", "seconds"))
        rows.append(("cost", f"{up / 1e6:.2f} MB up, {down / 1e6:.2f} MB down, {seconds:.1f} s"))
    rows += _stored(population)
    left_out = sorted({name for m in population.history for name in m.get("left_out", [])})
    if left_out:
        shown = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        rows.append(("warning", f"updates that were not finite were left out, of {shown}"))
    events = sum(m.get("divergences", 0) for m in population.history)
    if events:
        rows.append(("chains", f"{events:.0f} transition(s) diverged in training and were undone"))
    rows += [("warning", word) for word in population.at_bound]
    if population.convergence is not None:
        rows.append(("theta", population.convergence.words))
    elif population.drift is not None:
        drift = f"moved by {100 * population.drift:.2f} % over the tail of the run"
        rows.append(("theta", f"{drift}; diagnostics() tells whether it and the chains have settled"))
    if population.best_round is not None:
        chosen = f"theta of round {population.best_round} returned, the best on validation data"
        rows.append(("rounds", f"{population.rounds} run, {chosen}"))
    if unusual := in_a_line(population.decisions):
        rows.append(("decided", unusual))
    lines = [f"{first}, {population.rounds} rounds"]
    return "\n".join(lines + [f"  {title:<8} {words}" for title, words in rows])


def _stored(population: Population) -> list[tuple[str, str]]:
    """What clients store between rounds, for methods where that is a model."""
    store = None if population.sites is None else population.sites.store
    if store is None or not store.used or hierarchy_of(population.algorithm) is not None:
        return []
    each = sum(t[0].numel() * t.element_size() for t in store.tensors.values())
    together = each * store.used / 1e6
    words = (
        f"{store.used} client(s) that took part store {each / 1e6:.3g} MB each, {together:.3g} MB together"
    )
    return [("stored", words)]


def _named(population: Population, layout: LinkedLayout) -> list[tuple[str, str]]:
    """phi and the typical client in natural units, and how far clients differ on the free scale."""
    spread = Layout.views(layout, population.prior_sd)
    free = {layout.link_of(n).free_name.format(n): v for n, v in spread.items()}
    parts = {"phi": population.phi, "typical": population.typical, "spread": free}
    return [(label, _numbers(named)) for label, named in parts.items() if named]


def _numbers(named: Mapping[str, Tensor]) -> str:
    """Names and values in a line; long tensors by their size."""
    return ", ".join(
        f"{n} {v.item():.4g}"
        if v.numel() == 1
        else f"{n} {[round(u, 4) for u in v.flatten().tolist()] if v.numel() <= 4 else list(v.shape)}"
        for n, v in named.items()
    )
