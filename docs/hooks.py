"""What pages are made of that nobody should type twice: public names, and measured numbers.

The reference is made from ``fedpop.__all__``; a line ``<!-- bench: name -->`` becomes the table of that
benchmark from ``benchmarks/results``, ``<!-- tables: name -->`` all that the benchmark prints, a line
``<!-- features -->`` what ``fedpop methods`` prints, a line ``<!-- declared: what -->`` the names that may
leave a site, a line ``<!-- example: name -->`` an example of the gallery with what it prints and its picture.
The page on experiments is ``research/README.md``.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedpop
from fedpop.message import declared
from fedpop.report.html import Sheet, markdown

ROOT = Path(__file__).parents[1]
GROUPS = {
    "models": ("Models", "What is learned: p(D | phi, z)."),
    "methods": ("Methods", "Federated methods, under one contract; `fit` runs them on one machine."),
    "priors": ("Priors", "The population p(z | beta), and the hyperprior on theta."),
    "kernels": ("Markov kernels", "How a client draws z."),
    "chains": ("Chains", "How many draws of z there are, in a round and after training."),
    "steps": ("Steps of theta", "How theta moves and where it starts."),
    "client": ("Local training", "How clients train, in the methods that do so by SGD."),
    "compressors": ("Compression", "What happens to a message on its way."),
    "federation": ("Clients", "Data, by client."),
    "participation": ("Participation", "Who takes part in a round."),
    "layers": ("Layers", "Layers that keep clients apart, and do without a global generator."),
    "run": ("Running", "The simulator."),
    "callbacks": ("Between rounds", "What may happen between two rounds."),
    "population": ("Populations", "What `fit` returns, and scores of every client under one protocol."),
    "comparison": ("Comparisons", "Methods side by side."),
    "errors": ("Errors", ""),
}
"""Parts of fedpop that define public names: packages, and modules that are public themselves."""
ANSWERS = [
    "fedpop.models.predictive.Predictive",
    "fedpop.population.Posterior",
    "fedpop.population.Newcomer",
    "fedpop.decisions.Decision",
    "fedpop.evaluation.diagnostics.Diagnostics",
    "fedpop.evaluation.scores.Evaluation",
    "fedpop.comparison.Comparison",
    "fedpop.mixed.fit.MixedFit",
]
"""What a population answers with: nobody makes one, everybody reads them."""


MISSING = "*Not in `benchmarks/results` yet: run `make bench`.*"


def measured(name: str) -> list[dict[str, Any]]:
    """The records of a benchmark."""
    path = ROOT / "benchmarks" / "results" / "results.json"
    records = json.loads(path.read_text()) if path.exists() else []
    return [r for r in records if r["setting"].get("benchmark") == name]


def printed(name: str) -> str:
    """The tables that a benchmark prints, each under its title."""
    records = measured(name)
    if not records:
        return MISSING
    out = []
    for table in import_module(f"benchmarks.{name.replace(' ', '_')}").tables(records):
        rows = [[str(cell) for cell in row] for row in zip(*(c.cells for c in table.columns), strict=True)]
        sheet = Sheet([str(column.header) for column in table.columns], rows)
        caption = f" ({table.caption})" if table.caption else ""
        out.append(f"**{table.title}**{caption}\n\n{markdown(sheet)}")
    return "\n".join(out)


def bench(name: str) -> str:
    """The records of a benchmark that compare with something, as a table."""
    own = [r for r in measured(name) if "ratio" in r["metrics"]]
    judged = [r for r in own if "target" in r["metrics"]] or own
    if not judged:
        return MISSING
    keys = [k for k in judged[0]["setting"] if k != "benchmark"]
    keys += [k for r in judged for k in r["setting"] if k not in (*keys, "benchmark")]
    shown = [k for k in dict.fromkeys(keys) if len({str(r["setting"].get(k)) for r in judged}) > 1]
    methods = len({r["method"] for r in judged}) > 1
    speed = all("rounds_per_second" in r["metrics"] for r in judged)
    head = [*(["method"] if methods else []), *(k.replace("_", " ") for k in shown), "ratio (range)"]
    head += ["rounds per second"] if speed else []
    head += ["target"] if "target" in judged[0]["metrics"] else []
    rows = [head, ["---"] * len(head)]
    for r in judged:
        m = r["metrics"]
        row = [r["method"]] if methods else []
        row += [_number(r["setting"].get(k, "")) for k in shown]
        row.append(f"{m['ratio']:.2f} ({m['ratio_low']:.2f} to {m['ratio_high']:.2f})")
        row += [f"{m['rounds_per_second']:.0f}"] if speed else []
        row += [f"{m['target']:.2f}"] if "target" in m else []
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def feature_table() -> str:
    """What ``fedpop methods`` prints."""
    from fedpop.report.features import feature_sheets

    table, references, note = feature_sheets()
    return f"{markdown(table)}\n{note}\n\n{markdown(references)}"


def declared_table(what: str) -> str:
    """Everything that may leave a site, by name: "vectors", "numbers" or "header"."""
    sent = {"vectors": declared.VECTORS, "numbers": declared.NUMBERS, "header": declared.HEADER}[what]
    clear = what == "vectors" and any(s.clear for s in sent.values())
    rows = ["| name | what it is |" + (" the server needs |" if clear else "")]
    rows.append("|---|---|" + ("---|" if clear else ""))
    for name, s in sent.items():
        need = f" {'single values' if s.clear else 'the sum'} |" if clear else ""
        rows.append(f"| `{name}` | {s.what} |{need}")
    return "\n".join(rows)


def gallery(name: str) -> str:
    """An example's code, the lines that it printed when its picture was drawn, and the picture."""
    code = (ROOT / "examples" / "gallery" / f"{name}.py").read_text()
    words, code = re.split(r'(?<=""")\n\n', code, maxsplit=1)
    printed = (ROOT / "docs" / "pictures" / f"{name}.txt").read_text()
    alt = words.strip('"')
    return f"```python\n{code}```\n\n```text\n{printed}```\n\n![{alt}](pictures/{name}.svg)"


def on_page_markdown(markdown: str, **_: Any) -> str:
    if "<!-- features -->" in markdown:
        markdown = markdown.replace("<!-- features -->", feature_table())
    for what, made in (
        ("bench", bench),
        ("tables", printed),
        ("declared", declared_table),
        ("example", gallery),
    ):
        markdown = re.sub(
            rf"^<!-- {what}: (.+) -->$", lambda m, made=made: made(m[1]), markdown, flags=re.MULTILINE
        )
    return markdown


def groups() -> dict[str, dict[str, str]]:
    """Public names, each with where it is documented, by the part of fedpop that defines them."""
    package = griffe.load("fedpop", search_paths=[str(ROOT)], resolve_aliases=True)
    out: dict[str, dict[str, str]] = {}
    for name in fedpop.__all__:
        member, value = package.members[name], getattr(fedpop, name)
        path = member.final_target.path if member.is_alias else member.path
        where = path if inspect.ismodule(value) else f"fedpop.{name}"
        if path != value.__name__ and package.modules_collection[path].is_module:
            where = f"{value.__module__}.{value.__qualname__}"  # a function in a module of its own name
        out.setdefault(path.split(".")[1], {})[name] = where
    unknown = set(out) - set(GROUPS)
    for part in unknown:  # a part that nobody described yet is shown under its own name
        GROUPS[part] = (part.capitalize(), "")
    return {part: out[part] for part in GROUPS if part in out} | {"errors": {}}


def page(part: str, names: dict[str, str]) -> str:
    title, text = GROUPS[part]
    lines = [f"# {title}", "", text, ""]
    for name in sorted(names, key=lambda n: (n.islower(), n.lower())):
        lines += [f"::: {names[name]}", ""]
        if inspect.ismodule(getattr(fedpop, name)):
            lines += ["    options:", "      show_root_full_path: true"]
            lines += ["      summary: {attributes: true, classes: true, functions: true}", ""]
        if name == "Population":  # ``fit`` makes it
            lines += ["    options:", "      merge_init_into_class: false", ""]
            for answer in ANSWERS:
                lines += [f"::: {answer}", "    options:", "      merge_init_into_class: false", ""]
    if part == "errors":
        lines += ["::: fedpop.errors", "    options:", "      show_root_heading: false", ""]
    return "\n".join(lines)


def experiments() -> str:
    """The experiments' own README; of its links those to pages are kept, the site has no other files."""
    text = (ROOT / "research" / "README.md").read_text().replace("](../docs/", "](")
    return re.sub(r"\[([^]]+)\]\((?![\w-]+\.md\b|https?:|#)[^)]*\)", r"\1", text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    nav: list[Any] = list(config.nav or [])
    nav.append({"Reference": [{GROUPS[part][0]: f"reference/{part}.md"} for part in groups()]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for part, names in groups().items():
        files.append(File.generated(config, f"reference/{part}.md", content=page(part, names)))
    files.append(File.generated(config, "experiments.md", content=experiments()))
    return files
