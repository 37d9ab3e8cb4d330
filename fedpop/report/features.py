"""``fedpop methods``: the paper's feature table, out of the code, and a live client's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fedpop.client.final import Final
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods import METHODS
from fedpop.methods.base import Algorithm
from fedpop.models.composition import Composition
from fedpop.models.likelihoods import Categorical, Normal
from fedpop.population import Population
from fedpop.report import terminal
from fedpop.report.counted import COUNTED
from fedpop.report.html import Sheet
from fedpop.settings import ours

COUNTED_DRAWS = 5
"""The M of the table: draws of z, or samples of w, that predictions average over."""
CLIENTS, EXAMPLES, INPUTS, FEATURES = 4, 6, 7, 3


@dataclass(frozen=True)
class Features:
    """A row: words from the method's class, numbers counted on a client of a small federation."""

    name: str
    reference: str
    participation: str
    personalised: bool
    bounds: bool
    uncertainty: bool
    communication: str
    memory: str
    secure: bool
    """Sums of messages will do: nobody has to see single ones."""
    instance: str
    to_predict: int
    """Numbers that a client's predictions read, model and draws."""
    between_rounds: int
    """Numbers that a client holds from one round to the next."""


class _Read(dict[str, Tensor]):
    """Tensors that note which of them were asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def numbers(self) -> int:
        return sum(super(_Read, self).__getitem__(name).numel() for name in self.names)


def small_model(classes: bool = False) -> Composition:
    """d = 3 and d_phi = 21, in double precision so that no step size overflows by accident; d = 8 for two
    ``classes``, with biases."""
    backbone = nn.Linear(INPUTS, FEATURES, bias=False, dtype=torch.float64)
    head = nn.Linear(FEATURES, 1 + classes, bias=classes, dtype=torch.float64)
    key, server = Key(0, purpose="features"), Key(0).server()
    with torch.no_grad():
        for name, p in (("backbone", backbone.weight), ("head", head.weight)):
            p.copy_(key.at(purpose=name).normal(server, tuple(p.shape), torch.float64)[0])
        if classes:
            head.bias.zero_()
    return Composition(backbone, head, Categorical() if classes else Normal(1.0))


def live(method: type[Algorithm], model: Composition) -> Population:
    """A method after a few rounds with a few clients, with ``COUNTED_DRAWS`` draws where it draws."""
    key, ids = Key(0, purpose="data"), torch.arange(CLIENTS)
    x = key.at(purpose="x").normal(ids, (EXAMPLES, INPUTS), torch.float64)
    y = key.at(purpose="y").normal(ids, (EXAMPLES,), torch.float64)
    y = (y > 0).long() if method.of_classes else y
    known = {f.name for f in fields(method)}
    wanted: dict[str, Any] = {
        "final": Final(chains=1, draws=COUNTED_DRAWS),
        "samples": COUNTED_DRAWS,
        "draws": COUNTED_DRAWS,
        "burn_in": 0,
        "thin": 1,
    }
    if "final" in known:
        wanted.pop("burn_in")
    settings = {name: value for name, value in wanted.items() if name in known}
    clients = list(zip(x, y, strict=True))
    return method(model, **settings).fit(clients, rounds=2 * COUNTED_DRAWS, progress=False)


def features(method: type[Algorithm], model: Composition) -> Features:
    """One method's row.

    >>> import fedpop as fp
    >>> row = features(fp.FedSOUL, small_model())
    >>> row.memory, row.to_predict  # five draws of three numbers, and phi
    ('M d + d_phi', 36)
    """
    stored = COUNTED.get(method.name) if ours(method) else None
    to_predict, between_rounds = counted(method, model) if stored is None else stored
    about = method.about
    scheme = {(True, True): "both", (True, False): "local steps", (False, True): "compression"}
    return Features(
        name=method.name,
        reference=about.reference,
        participation=method.participation,
        personalised=about.personalised,
        bounds=about.bounds,
        uncertainty=method.uncertainty,
        communication=scheme.get((about.local_steps, bool(method.compressed)), "-"),
        memory=about.memory,
        secure=not method.needs_single(),
        instance=about.instance,
        to_predict=to_predict,
        between_rounds=between_rounds,
    )


def counted(method: type[Algorithm], model: Composition) -> tuple[int, int]:
    """Numbers that a live client's predictions read, and those that it holds between rounds."""
    population = live(method, model)
    assert population.store is not None
    client = int((population.store.slots >= 0).nonzero()[0]) if population.store.used else 0
    published, personal = _Read(population.published), _Read(population._model_of(client))
    population.algorithm.predict(published, personal, torch.ones(1, INPUTS, dtype=torch.float64), Key(0))
    held = sum(t[0].numel() for t in population.store.tensors.values())
    return published.numbers() + personal.numbers(), held


def by_formula(memory: str, d: int, d_phi: int, draws: int = COUNTED_DRAWS) -> int:
    """The number that a formula in M, d, d_phi and q, the features of a small model, stands for."""
    known = {
        "d + d_phi": d + d_phi,
        "2 (d + d_phi)": 2 * (d + d_phi),
        "M (d + d_phi)": draws * (d + d_phi),
        "M d + d_phi": draws * d + d_phi,
        "q + d + d_phi": FEATURES + d + d_phi,
    }
    return known[memory]


# --- what is told of it ----------------------------------------------------------------------

COLUMNS = (
    "method",
    "in a round",
    "own model",
    "says how sure",
    "proved",
    "saves messages by",
    "secure sums",
    "a client holds",
    "counted",
    "kept",
    "as a case of FedPop",
)
WHO = {"any": "some clients", "full": "everyone", "one": "one client"}


def feature_sheets(methods: Iterable[type[Algorithm]] | None = None) -> tuple[Sheet, Sheet, str]:
    """Features, references, and the words that explain the numbers.

    >>> import fedpop as fp
    >>> feature_sheets([fp.FedSOUL])[0].rows[0][:6]
    ('FedSOUL', 'some clients', 'yes', 'yes', 'yes', 'both')
    """
    model = small_model()
    d, d_phi = model.z_layout.size, model.phi_layout.size
    chosen = list(METHODS.values() if methods is None else methods)
    models = {False: model, True: small_model(classes=True)}
    measured = [features(m, models[m.of_classes]) for m in chosen]
    sizes = [(models[m.of_classes].z_layout.size, d_phi) for m in chosen]
    note = (
        "in a round: who has to answer for it to count. own model: clients predict differently. says how "
        "sure: predictions carry the uncertainty about parameters, not the noise alone. proved: there is a "
        "theorem that it converges as published (FedSOUL as FedSOUL.paper() has it). saves messages by: "
        "several local steps between two messages, unbiased "
        "compression of what is sent, or both. secure sums: the server needs no single message"
        f"{_single(measured)}. a client holds: how many numbers its predictions read, where "
        "d are a client's own parameters, d_phi the shared ones and M the draws; counted on a live client "
        f"with d = {d} ({models[True].z_layout.size} where targets have to be classes), d_phi = {d_phi}, q = "
        f"{FEATURES} features and M = {COUNTED_DRAWS}, and in brackets what the formula gives. "
        "kept: numbers that it holds between rounds."
    )
    formulas = [by_formula(f.memory, *both) for f, both in zip(measured, sizes, strict=True)]
    table = Sheet(COLUMNS, [_row(f, n) for f, n in zip(measured, formulas, strict=True)])
    return table, Sheet(("method", "reference"), [(f.name, f.reference) for f in measured]), note


def _single(measured: Iterable[Features]) -> str:
    """Those for which sums will not do, and why."""
    why = [f"{f.name} {METHODS[f.name].needs_single()}" for f in measured if not f.secure]
    return f" (but {'; '.join(why)})" if why else ""


def _row(f: Features, formula: int) -> tuple[str, ...]:
    marks = ("yes" if flag else "no" for flag in (f.personalised, f.uncertainty, f.bounds))
    numbers = (f.memory, f"{f.to_predict} ({formula})", str(f.between_rounds))
    return (
        f.name,
        WHO[f.participation],
        *marks,
        f.communication,
        "yes" if f.secure else "no",
        *numbers,
        f.instance or "-",
    )


def show() -> None:
    """Both tables on the terminal."""
    torch.set_num_threads(1)
    console = Console()
    if console.width < terminal.WIDTH:
        console = Console(width=terminal.WIDTH)  # a row that is cut tells less than one that wraps
    table, references, note = feature_sheets()
    terminal.show(table, "Methods", console)
    console.print(note, style="dim")
    console.print()
    terminal.show(references, "References", console)
