"""A site's commands: enrol, join, predict, personalise. The last two need no network."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedpop.errors import CheckpointError, SchemaError, SettingsError
from fedpop.federation.cells import require_good_cells
from fedpop.federation.reading import (
    USUAL_TABLE,
    encoded,
    from_function,
    from_images,
    read_columns,
    read_data,
    require_some,
)
from fedpop.files import DAMAGED, read_bytes, read_sealed, read_tensors, writable_folder, write_bytes
from fedpop.flower import certificates
from fedpop.flower.processes import (
    LogTail,
    Supervised,
    alone,
    environment,
    free_port,
    make_private,
    program,
    require_free,
)
from fedpop.flower.server_commands import INSECURE
from fedpop.flower.site import SEALED, THETA, SiteExperiment, read_theta
from fedpop.flower.site_folder import (
    SETTINGS,
    SiteSettings,
    check_name,
    make_secret,
    open_site,
    read_secret,
    read_site,
)
from fedpop.flower.stock import TRUSTED
from fedpop.message import Tensors
from fedpop.models.predictive import Predictive
from fedpop.population import Population
from fedpop.site.store import LocalStore

Say = Callable[[str], None]
WHOLE = ("model.safetensors", "method.json", THETA, SEALED)
"""What a theta for sites that come later is made of; its seal last, as it says that all is there."""


def enrol(root: Path, name: str, server: str, data: str, ca: Path | None, insecure: bool, say: Say) -> None:
    """Make a site's folder: settings, secret, key pair. What is there already stays."""
    check_name(name)
    certificates.split_address(server)
    if ca is None and not insecure:
        raise SettingsError("give --ca, the federation's ca.crt, so that this site knows its server")
    where = _checked_data(data, name)
    if ca is not None:
        certificates.read_certificate(ca)
    if (root / SETTINGS).exists():
        raise SettingsError(
            f"{root} is a site's folder already; edit {root / SETTINGS}, or choose another one"
        )
    folder = writable_folder(root)
    make_secret(folder)
    if insecure:
        say(INSECURE)
    else:
        assert ca is not None
        certificates.make_site_key(folder)
        write_bytes(folder / "ca.crt", ca.read_bytes())
    lines = {"name": name, "data": where, "server": server, "insecure": insecure}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    write_bytes(folder / SETTINGS, text.encode())
    make_private(folder, lambda words: None)
    if not insecure:
        say(f"send {folder / 'node.pub'} to the server's operator, who runs")
        say(f"  fedpop server admit DIR {name} node.pub")
    say(f"then: fedpop site join {root}")


def _checked_data(data: str, site: str, folder: Path | None = None) -> str:
    """Where data are, whatever folder the node is started in; there must be some."""
    require_some(data, site, folder)
    return data if ":" in data else str(Path(data).absolute())


def _with_data(settings: SiteSettings, where: str) -> SiteSettings:
    """The settings with data from elsewhere, in their file, too."""
    if where == settings.data:
        return settings
    file, line = settings.folder / SETTINGS, f"data = {json.dumps(where)}"
    write_bytes(file, re.sub(r"(?m)^\s*data\s*=.*$", lambda _: line, file.read_text(), count=1).encode())
    return read_site(settings.folder)


def join(
    root: Path, data: str | None, insecure: bool, say: Say, seconds: float | None = None, stock: bool = False
) -> None:
    """Take part, until somebody stops it: the node is started again whatever ends it."""
    settings = read_site(root.absolute())
    if data is not None:
        settings = _with_data(settings, _checked_data(data, settings.name, settings.folder))
    read_secret(settings.folder)
    require_some(settings.where, settings.name, settings.folder, settings.table)
    if settings.insecure != insecure:
        how = (
            "without TLS and keys: say --insecure" if settings.insecure else "with TLS: leave --insecure out"
        )
        raise SettingsError(f"this site was enrolled {how}")
    make_private(settings.folder, say)
    if insecure:
        say(INSECURE)
        certificates.require_plain(settings.server)
    else:
        certificates.check_site_key(settings.folder)
        if not certificates.check_connection(settings.server, settings.folder / "ca.crt"):
            say(f"the server {settings.server} is not there yet; the site waits for it")
        certificates.check_clock(settings.server, settings.folder / "ca.crt")
    writable_folder(settings.folder / "logs").chmod(0o700)
    if stock:
        say(STOCK)
    command = (
        stock_node(settings) if stock else [sys.executable, "-m", "fedpop.flower.node", str(settings.folder)]
    )
    with alone(settings.folder / "node", f"another process takes part for {settings.folder} already"):
        node = Supervised(
            lambda: command,
            environment(settings.folder / "flower"),
            settings.folder / "logs" / "node.log",
            lambda words: say(f"node: {words}"),
        )
        log = settings.folder / "site.log"
        tail = LogTail(log, ("WARNING", "ERROR"))
        say(f"site {settings.name} takes part; its log is {log}")
        end = None if seconds is None else time.monotonic() + seconds
        with node:
            while end is None or time.monotonic() < end:
                node.check()
                for words in tail.new():
                    say(words)
                time.sleep(0.5)


STOCK = (
    "warning: Flower's stock node runs the app that the server sends, at this site, with this user's rights; "
    "it takes only one that the federation signed: whoever has the server's folder decides what runs here. "
    "It opens a port of this machine, whose other users can reach its tasks."
)


def stock_node(settings: SiteSettings) -> list[str]:
    """Flower's own node, which is told to run what the federation signed and nothing else."""
    trusted = settings.folder / TRUSTED
    if settings.insecure or not trusted.exists():
        raise SettingsError(
            f"--stock needs the federation's signature: copy {TRUSTED} from the server's folder DIR/tls to "
            f"{settings.folder}; the server runs with --stock, too, and with TLS"
        )
    if settings.port:
        require_free("127.0.0.1", settings.port, f"port in {settings.folder / SETTINGS}")
    begin = [program("flower-supernode"), "--superlink", settings.server, "--host", "127.0.0.1"]
    begin += ["--port", str(settings.port or free_port())]
    begin += ["--node-config", f"site={json.dumps(str(settings.folder))}"]
    files = {
        "--root-certificates": "ca.crt",
        "--auth-supernode-private-key": "node.key",
        "--trusted-entities": TRUSTED,
    }
    return begin + [part for flag, file in files.items() for part in (flag, str(settings.folder / file))]


# --- afterwards, offline -------------------------------------------------------------------------


def experiment_of(root: Path, name: str | None) -> SiteExperiment:
    """A site's experiment by name; the last one that was finished by default."""
    site = open_site(root.absolute())
    if name is not None:
        return SiteExperiment(site, name)
    folders = sorted(
        (f for f in (site.folder / "experiments").glob("*") if (f / THETA).exists()),
        key=lambda f: (f / THETA).stat().st_mtime,
    )
    if not folders:
        raise CheckpointError(f"site {site.name!r} has no theta yet: it comes at the end of a run")
    return SiteExperiment(site, folders[-1].name)


def population_at(experiment: SiteExperiment) -> Population:
    """The population that this site knows: theta, its data and its states."""
    if not (experiment.folder / THETA).exists():
        raise CheckpointError(f"site {experiment.site.name!r} has no theta yet: it comes at the end of a run")
    if not (experiment.folder / "method.json").exists():
        raise CheckpointError(f"{experiment.folder / 'method.json'} is missing; {DAMAGED}")
    method = experiment.method
    states = experiment.folder / "final.safetensors"
    store = LocalStore.restore(read_tensors(states)) if states.exists() else None
    device = method.model.initial_phi().device
    published: Tensors = {n: t.to(device) for n, t in read_theta(experiment.folder).items()}
    key = experiment.key(0, "site")
    return Population(method, published, key, experiment.federation, store)


def predict(root: Path, data: str, out: Path | None, level: float, name: str | None, say: Say) -> None:
    """Predictions for the rows of a table (or for images, or what a function returns), with intervals."""
    experiment = experiment_of(root, name)
    write_predictions(predicted(population_at(experiment), experiment, data), out, level, say)


Predicted = list[tuple[str, Sequence[int], Predictive]]
"""Unit, its rows in the file, and what is predicted for them."""


def predicted(population: Population, experiment: SiteExperiment, data: str) -> Predicted:
    """What personal models predict; a unit that is new at this site gets the population's."""
    form, site = experiment.form, experiment.site.name
    if ":" in data or Path(data).is_dir():
        folder = experiment.site.folder
        found = from_function(data, site, folder) if ":" in data else from_images(Path(data), form, site)
        sizes = found.train.sizes.tolist()
        parts = [found.cohort(torch.tensor([i]), population.device).x for i in range(len(found))]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        rows = {n: list(range(s, s + k)) for n, s, k in zip(found.names, starts, sizes, strict=True)}
        inputs = dict(zip(found.names, parts, strict=True))
    elif not form.get("x"):
        raise SchemaError(f"the federation's data are not tables: {data} has no columns to predict from")
    else:
        group = form.get("group")
        columns = read_columns(
            Path(data), [*form["x"], *([group] if group else [])], site, experiment.site.table
        )
        require_good_cells(columns, form)
        x = encoded(columns, form)
        owners = [f"{site}/{g}" for g in columns[group]] if group else [population.names[0]] * len(x)
        rows = {}
        for i, owner in enumerate(owners):
            rows.setdefault(owner, []).append(i)
        inputs = {n: x[numbers] for n, numbers in rows.items()}
    known = set(population.names)
    return [
        (
            n,
            rows[n],
            population.predict(n, inputs[n]) if n in known else population.new_client().predict(inputs[n]),
        )
        for n in rows
    ]


def write_predictions(found: Predicted, out: Path | None, level: float, say: Say) -> None:
    """A table, in the order of the rows: unit, mean, and an interval; or the probability of each class."""
    if not 0 < level < 1:
        raise SettingsError(f"the level of an interval lies between 0 and 1, not {level}")
    first = found[0][2]
    classes = first.likelihood.classes(first.eta.shape[-1])
    head = [f"p{k}" for k in range(first.probs.shape[-1])] if classes else ["mean", "low", "high"]
    lines: dict[int, list[str]] = {}
    for unit, rows, p in found:
        values = p.probs if classes else torch.stack((p.mean, *p.interval(level)), -1)
        for i, row in zip(rows, values.tolist(), strict=True):
            lines[i] = [unit, *(f"{v:.6g}" for v in row)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["unit", *head])
    writer.writerows(lines[i] for i in sorted(lines))
    if out is None:
        sys.stdout.write(file.getvalue())
    else:
        write_bytes(out, file.getvalue().encode())
        say(f"{out} is written")


def personalise(
    root: Path, theta: Path, data: str, at: str | None, out: Path | None, level: float, say: Say
) -> None:
    """A brand-new site from theta alone: its model is made of its data, and nothing is sent."""
    method = _require_theta(theta)
    known = read_site(root.absolute()) if (root / SETTINGS).exists() else None
    name = root.absolute().name if known is None else known.name
    check_name(name)
    modules = None if known is None else known.folder
    where = _checked_data(data, name, modules)
    table = USUAL_TABLE if known is None else known.table
    read_data(where, method["study"]["form"], name, modules, table)  # an error comes before anything is made
    if known is None:
        folder = writable_folder(root)
        make_secret(folder)
        text = f"name = {json.dumps(name)}\ndata = {json.dumps(where)}\n"
        write_bytes(folder / SETTINGS, text.encode())
    else:
        _with_data(known, where)
    experiment = _adopted(root, theta, str(method["experiment"]))
    population = population_at(experiment).sample_all()
    say(f"a model for {', '.join(population.names)}: {experiment.federation}")
    if at is not None:
        write_predictions(predicted(population, experiment, at), out, level, say)


def _adopted(root: Path, theta: Path, name: str) -> SiteExperiment:
    """An experiment at a site that took no part, from a federation's folder ``run/theta``."""
    experiment = SiteExperiment(open_site(root.absolute()), name)
    sealed = experiment.folder / SEALED
    if not sealed.exists() or sealed.read_bytes() != (theta / SEALED).read_bytes():
        for file in WHOLE:
            write_bytes(experiment.folder / file, read_bytes(theta / file))
    return experiment


def _require_theta(theta: Path) -> dict[str, Any]:
    """The method's description; raises unless all of theta is there, and as it was written."""
    if not (theta / "method.json").exists():
        raise CheckpointError(f"{theta} holds no theta of a federation: it is the server's folder run/theta")
    found = read_sealed(theta / "method.json", "a method's description")
    read_tensors(theta / "model.safetensors", str(found.get("digest")))
    read_theta(theta)
    return found
