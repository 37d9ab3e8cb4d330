"""Settings files of ``fedpop compare`` and ``fedpop tune``: a task, the terms, and methods.

[task]                       what methods are compared on: kind and its settings
[run]                        rounds or passes, seeds, participation, every, last, precision
[tune]                       trials, metric, seeds (for fedpop tune)
[[method]]                   name, label, settings; [method.search] for fedpop tune
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedpop.checked import Checked, Count, Few, Positive, Seed
from fedpop.data.csv_task import CsvTask
from fedpop.data.image_task import FullImageTask, ImageTask
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import FedpopError, SettingsError
from fedpop.experiments.comparison.terms import Source, Subject, Terms, check_labels, seeds_of
from fedpop.experiments.methods import Entry, entry_from
from fedpop.federation.clients import Federation

KINDS: dict[str, Any] = {
    "synthetic": SyntheticTask,
    "images": ImageTask,
    "full-images": FullImageTask,
    "csv": CsvTask,
}
TASK: dict[str, dict[str, Any]] = {
    "synthetic": {"validation": 20, "new_clients": 0},
    "images": {"data": None, "new_clients": 0},
    "full-images": {"data": None, "new_clients": 0},
    "csv": {"new_clients": 0},
}
"""Settings beside those of the task's class, with their defaults."""
RUN = ("rounds", "passes", "seeds", "participation", "every", "last", "precision")
TUNE = ("trials", "metric", "seed", "seeds", "rounds", "passes")


@dataclass(frozen=True)
class Task(Source):
    """A task by name; the seed draws its data and the model's start."""

    kind: str
    task: Any
    more: Mapping[str, Any]

    def make(self, seed: int) -> Subject:
        new = self.more["new_clients"]
        if self.kind == "synthetic":
            clients = self.task.make(seed, self.more["validation"]).clients
            newcomers = self.task.newcomers(seed, new) if new else []
            return Subject(Federation.of(clients), newcomers, self.task.model(seed))
        where = (self.more["data"],) if "data" in self.more else ()
        clients, newcomers = self.task.split(*where, seed, new)
        return Subject(clients, newcomers, self.task.model(seed))

    def describe(self) -> dict[str, Any]:
        more = {k: v for k, v in self.more.items() if k != "data"}  # a folder may move
        plain: dict[str, Any] = json.loads(json.dumps({"kind": self.kind} | asdict(self.task) | more))
        return plain


@dataclass(frozen=True)
class Tune(Checked):
    """How settings are searched for."""

    trials: Count = 8
    metric: str = ""
    seed: Seed = 0
    seeds: Few | Sequence[Seed] = 1
    rounds: Count | None = None
    passes: Positive | None = None


@dataclass(frozen=True)
class Config:
    """A settings file, read and checked."""

    path: Path
    task: Task
    terms: Terms
    seeds: list[int]
    entries: list[Entry]
    tune: Tune = field(default_factory=Tune)
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem


def read_config(path: str | Path, data: str | Path | None = None) -> Config:
    """Read a settings file; ``data`` is where images are, in place of what it says."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text ({error}); save the file as UTF-8") from error
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not readable TOML: {error}") from error
    return config_from(raw, path, data)


def config_from(raw: Mapping[str, Any], path: Path, data: str | Path | None = None) -> Config:
    """Settings as TOML has them, checked."""
    _only(raw, ("task", "run", "tune", "method"), str(path))
    tables = raw.get("method", [])
    if not isinstance(tables, list) or not tables:
        raise SettingsError(f"{path}: give at least one method, [[method]] with a name")
    entries = [entry_from(table, str(path)) for table in tables]
    check_labels(entries, f"{path}: ")
    run = _table(raw, "run", RUN, path)
    tune = _table(raw, "tune", TUNE, path)
    seeds = run.pop("seeds", 1)
    with _naming(f"{path}, [run]"):
        terms = Terms(**run)
        chosen = seeds_of(seeds)
    with _naming(f"{path}, [tune]"):
        how = Tune(**tune)
        seeds_of(how.seeds)
        if how.rounds is not None or how.passes is not None:
            Terms(rounds=how.rounds, passes=how.passes)
    return Config(path, _task(raw, path, data), terms, chosen, entries, how, raw)


def _task(raw: Mapping[str, Any], path: Path, data: str | Path | None) -> Task:
    where = f"{path}, [task]"
    table = raw.get("task")
    if not isinstance(table, Mapping) or table.get("kind") not in KINDS:
        told = table.get("kind") if isinstance(table, Mapping) else None
        raise SettingsError(f"{where}: kind is one of {', '.join(KINDS)}, not {told!r}")
    kind = table["kind"]
    own = {f.name for f in fields(KINDS[kind])}
    _only(table, ("kind", *sorted(own), *TASK[kind]), where)
    more = {k: table.get(k, default) for k, default in TASK[kind].items()}
    settings = {k: v for k, v in table.items() if k in own}
    if data is not None and "data" in more:
        more["data"] = str(data)
    for name in ("data", "file"):  # beside the settings file, unless there is such a place from here
        place = more if name in more else settings
        if isinstance(place.get(name), str) and data is None:
            place[name] = str(_beside(path, place[name]))
    for name in ("new_clients", "validation"):
        if name in more and (isinstance(more[name], bool) or not isinstance(more[name], int)):
            raise SettingsError(f"{where}: {name} is a whole number, not {more[name]!r}")
    with _naming(where):
        return Task(kind, KINDS[kind](**settings), more)


def _beside(path: Path, told: str) -> Path:
    beside = path.parent / told
    return beside if beside.exists() else Path(told)


def _table(raw: Mapping[str, Any], name: str, known: tuple[str, ...], path: Path) -> dict[str, Any]:
    table = raw.get(name, {})
    if not isinstance(table, Mapping):
        raise SettingsError(f"{path}: {name} is a table, [{name}]")
    _only(table, known, f"{path}, [{name}]")
    return dict(table)


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise SettingsError(f"{where}: unknown setting {key!r}; known are {', '.join(known)}")


class _naming:
    """Errors inside begin with where they were made."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        known = FedpopError | TypeError | ValueError | AttributeError | LookupError | ArithmeticError
        if isinstance(error, known):
            raise SettingsError(f"{self.where}: {error}") from error


# --- writing ---------------------------------------------------------------------------------


def with_settings(config: Config, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content with these settings of its methods, and nothing left to search for."""
    tables = []
    for table, entry in zip(config.raw["method"], config.entries, strict=True):
        kept = {k: table[k] for k in ("name", "label") if k in table}
        tables.append(kept | dict(chosen.get(entry.label, entry.settings)))
    rest = {k: v for k, v in config.raw.items() if k not in ("method", "tune")}
    task = dict(rest["task"])
    for name in ("data", "file"):
        held = config.task.more.get(name) or getattr(config.task.task, name, None)
        if held:
            task[name] = str(Path(held).resolve())
    return rest | {"task": task, "method": tables}


def to_toml(raw: Mapping[str, Any]) -> str:
    """Tables, arrays of tables and values as TOML.

    >>> print(to_toml({"run": {"rounds": 3}, "method": [{"name": "FedAvg", "local": {"rate": 0.1}}]}))
    [run]
    rounds = 3
    <BLANKLINE>
    [[method]]
    name = "FedAvg"
    local = {rate = 0.1}
    <BLANKLINE>
    """
    parts = []
    for name, value in raw.items():
        if isinstance(value, list):
            parts += [_block(f"[[{name}]]", table) for table in value]
        else:
            parts.append(_block(f"[{name}]", value))
    return "\n".join(parts)


def _block(head: str, table: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{_key(k)} = {_toml(v)}" for k, v in table.items())]) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(_toml(v) for v in value) + "]"


def changed(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Settings with one of them changed, ``local.rate`` being rate inside local.

    >>> changed({"local": {"epochs": 1}}, "local.rate", 0.1)
    {'local': {'epochs': 1, 'rate': 0.1}}
    """
    head, _, rest = key.partition(".")
    if not rest:
        return dict(settings) | {head: value}
    inner = settings.get(head, {})
    return dict(settings) | {head: changed(inner if isinstance(inner, Mapping) else {}, rest, value)}


def with_entry(entry: Entry, settings: Mapping[str, Any]) -> Entry:
    return replace(entry, settings=dict(settings), search={})
