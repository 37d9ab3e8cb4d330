"""Makes the reference from fedpop's public names, so that no page can forget one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OPTIONAL = {"extending.md": "Add your own", "defaults.md": "Why these defaults"}
GROUPS = {
    "models": ("Models", "What is learned: p(D | phi, z)."),
    "algorithms": ("Methods", "Federated methods, under one contract; `fit` runs them on one machine."),
    "priors": ("Priors", "The population p(z | beta), and the hyperprior on theta."),
    "kernels": ("Markov kernels", "How a client draws z."),
    "server": ("Server steps", "How theta moves: optimisers, schedules, averages, starts."),
    "channel": ("Compression", "What happens to a message on its way."),
    "federation": ("Clients", "Data, and who takes part in a round."),
    "population": ("Populations", "What `fit` returns."),
    "runtime": ("Running", "The simulator and what may happen between rounds."),
}


def groups() -> dict[str, list[str]]:
    """Public names by the part of fedpop that defines them."""
    package = griffe.load("fedpop", search_paths=[str(ROOT)], resolve_aliases=True)
    out: dict[str, list[str]] = {}
    for name in package.exports or []:
        target = package.members[str(name)]
        path = target.final_target.path if target.is_alias else target.path
        out.setdefault(path.split(".")[1], []).append(str(name))
    unknown = set(out) - set(GROUPS)
    for part in unknown:  # a part that nobody described yet is shown under its own name
        GROUPS[part] = (part.capitalize(), "")
    return {part: out[part] for part in GROUPS if part in out}


def page(part: str, names: list[str]) -> str:
    title, text = GROUPS[part]
    lines = [f"# {title}", "", text, ""]
    for name in sorted(names, key=lambda n: (n.islower(), n.lower())):
        module = (ROOT / "fedpop" / part / f"{name}.py").exists() or name in ("likelihoods", "links")
        where = f"fedpop.{part}.{name}" if module else f"fedpop.{name}"
        lines += [f"::: {where}", ""]
        if module:
            lines += ["    options:", "      show_root_full_path: true", "      summary: true", ""]
    return "\n".join(lines)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    nav: list[Any] = list(config.nav or [])
    nav += [{title: name} for name, title in OPTIONAL.items() if (docs / name).exists()]
    nav.append({"Reference": [{GROUPS[part][0]: f"reference/{part}.md"} for part in groups()]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for part, names in groups().items():
        files.append(File.generated(config, f"reference/{part}.md", content=page(part, names)))
    return files
