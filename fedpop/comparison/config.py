"""Settings files of ``fedpop compare`` and ``fedpop tune``: a task, the terms, and methods.

[task]                       what methods are compared on: kind and its settings (``tasks``)
[model]                      entry, a ``module:function`` that makes the model in place of the task's own
[run]                        rounds or passes, seeds, participation, every, last, precision
[privacy]                    epsilon, delta, noise, clip, quantile, against, secure: of every run
[tune]                       trials, metric, seeds (for fedpop tune)
[[method]]                   name, label, settings; [method.search] for fedpop tune
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedpop.checked import Checked, Count, Few, Positive, Seed
from fedpop.comparison import REPORT
from fedpop.comparison.run import compare_all
from fedpop.comparison.runner import workers
from fedpop.comparison.tasks import Task, naming, only, task_from
from fedpop.comparison.terms import Entry, Terms, check_labels, entry_from, seeds_of
from fedpop.errors import SettingsError
from fedpop.extras import require_report
from fedpop.files import whole_file
from fedpop.privacy.gaussian import gaussian_from

RUN = ("rounds", "passes", "seeds", "participation", "every", "last", "precision")
TUNE = ("trials", "metric", "seed", "seeds", "rounds", "passes")


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
        raw = tomllib.loads(whole_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text ({error}); save the file as UTF-8") from error
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not readable TOML: {error}") from error
    return config_from(raw, path, data)


def config_from(raw: Mapping[str, Any], path: Path, data: str | Path | None = None) -> Config:
    """Settings as TOML has them, checked."""
    only(raw, ("task", "model", "run", "privacy", "tune", "method"), str(path))
    tables = raw.get("method", [])
    if not isinstance(tables, list) or not tables:
        raise SettingsError(f"{path}: give at least one method, [[method]] with a name")
    entries = [entry_from(table, str(path)) for table in tables]
    check_labels(entries, f"{path}: ")
    run = _table(raw, "run", RUN, path)
    tune = _table(raw, "tune", TUNE, path)
    seeds = run.pop("seeds", 1)
    about = _table(raw, "privacy", tuple(raw.get("privacy", {})), path)
    private, secure = gaussian_from(about, str(path), ("secure",)), about.get("secure", False)
    with naming(f"{path}, [run]"):
        terms = Terms(**run, privacy=private, secure=secure)
        chosen = seeds_of(seeds)
    with naming(f"{path}, [tune]"):
        how = Tune(**tune)
        seeds_of(how.seeds)
        if how.rounds is not None or how.passes is not None:
            Terms(rounds=how.rounds, passes=how.passes)
    return Config(path, task_from(raw, path, data), terms, chosen, entries, how, raw)


def _table(raw: Mapping[str, Any], name: str, known: tuple[str, ...], path: Path) -> dict[str, Any]:
    table = raw.get(name, {})
    if not isinstance(table, Mapping):
        raise SettingsError(f"{path}: {name} is a table, [{name}]")
    only(table, known, f"{path}, [{name}]")
    return dict(table)


# --- writing ---------------------------------------------------------------------------------


def with_settings(config: Config, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content with these settings of its methods, and nothing left to search for."""
    tables = []
    for table, entry in zip(config.raw["method"], config.entries, strict=True):
        kept = {k: table[k] for k in ("name", "label") if k in table}
        tables.append(kept | dict(chosen.get(entry.label, entry.settings)))
    rest = {k: v for k, v in config.raw.items() if k not in ("method", "tune")}
    places = {name: own for name, own in config.task.places().items() if name in rest}
    return rest | {name: dict(rest[name]) | own for name, own in places.items()} | {"method": tables}


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


# --- running ---------------------------------------------------------------------------------


def compare_file(
    path: Path,
    out: Path | None = None,
    data: Path | None = None,
    seeds: int | None = None,
    processes: int | None = None,
) -> None:
    """``fedpop compare``: run what is missing and tell of all; what is given here counts instead of the
    file's."""
    require_report()
    many = workers(processes)
    config = read_config(path, data)
    folder = out or Path("runs") / config.name
    chosen = config.seeds if seeds is None else seeds_of(seeds)
    results = compare_all(
        config.task, config.entries, config.terms, chosen, folder, resume=True, processes=many
    )
    REPORT.tell(results)
