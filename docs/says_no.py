"""For the page "When it says no": every error that fedpop raises on purpose, read off the code.

What stands in braces in the code stands in angle brackets on the page, under its own name. What to do is what
the message says after its semicolon; where it says nothing, ``REMEDIES`` has a word for its kind.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedpop import errors

ROOT = Path(__file__).parents[1] / "fedpop"
AREAS = {
    "federation": ("Data of clients", "Before the first round, and whenever data are given to a population."),
    "data": ("Images and files of data", "Data sets that are fetched, decoded and dealt to clients."),
    "models": ("Models and predictions", "When a model is made, first used, or asked for a prediction."),
    "priors": ("Priors", "What the population p(z | beta) is made of."),
    "kernels": ("Markov kernels", "How a client draws z."),
    "methods": ("Methods", "Settings of a method, and settings files."),
    "client": ("Work at a client", "Local training and the chains."),
    "server": ("Steps of theta", "What the server does with a round's sum."),
    "message": ("Messages", "What happens between a client and the server."),
    "questions": (
        "Questions before and between rounds",
        "Moments, scales and scores that everyone is asked for.",
    ),
    "privacy": ("Privacy", "Secure sums between sites, and budgets of differential privacy."),
    "run": ("Runs", "`fit`, checkpoints, resuming, callbacks."),
    "flower": ("Across machines", "`fedpop server` and `fedpop site`."),
    "evaluation": ("Estimates and diagnostics", "What is computed after training."),
    "population": ("Populations", "Asking, saving and loading."),
    "mixed": ("Mixed models", "`mixed_model` and `fedpop fit`."),
    "comparison": ("Comparisons", "`compare`, `fedpop compare` and `fedpop tune`."),
    "report": ("Reports", "Pages and pictures."),
    "": ("Everywhere", "Settings, files and optional packages."),
}
"""By the package that raises: a heading, and when it is."""
FIRST = {
    "DataError": "Look at the client, row or column that is named; data are used as they are or not at all.",
    "SchemaError": "A site's data differ from what the federation agreed on: mend them at that site.",
    "ScaleError": "A column is in another unit, or a cell out of all proportion: mend it at that site.",
    "ModelError": "The model, its head or its likelihood do not fit together: the words name the part.",
    "SettingsError": "Change the setting that is named; nothing has run yet.",
    "CheckpointError": "A folder is not what it should be: give another one, or make it again.",
    "OtherSettingsError": "Go on with the settings that the run was begun with, or begin in another folder.",
    "PayloadError": "A message cannot be sent or read: finite numbers, and one version on both sides.",
    "TrainingError": "Training broke down at the round and client that are named: look at those data first.",
    "EstimateError": "What was asked for cannot be had from what is there; the words say what would help.",
    "SecureSumError": "A site's log and the server's say who asked for what; nothing was revealed.",
    "PrivacyError": "Private runs see data through noised sums only: leave out what is named.",
    "ExtraError": "Install the optional package that is named.",
}
"""By the class: what to do first."""
REMEDIES = (
    (r"not readable|cannot (be )?read|damaged|unpacked|broke off|cut short", "Make or fetch the file again."),
    (r"unknown|known are|there are ‹list", "Use one of the names that it lists."),
    (
        r"NaN|infinite|not finite|is missing|missing value",
        "Mend or leave out what is named: nothing is guessed.",
    ),
    (r"cannot write", "Give a folder that can be written to, on a disk with room."),
    (r"too few|too small|fewer than|no examples|is empty", "Give more, or ask for less."),
    (r"rows but|equal length|different numbers|have shape|other parts", "Make lengths and shapes agree."),
    (r"twice|more than one", "Give it once."),
    (r"not a posterior|has no posterior", "Ask a method that has it, such as FedSOUL."),
    (r"is not the saved|differ from|of another", "Use what it was made with, or start in another folder."),
    (r"\bmust\b|needs?\b|takes?\b|is one of|lies? in|not a |not an ", "Give what it asks for."),
)
"""By what the words are like, the first that fits; else ``FIRST`` of the class."""
DO = re.compile(
    r"(?:[:,.]| \()\s?(?=(?:use|give|make|check|stop|set|put|write|update|rescale|remove|leave|turn|name"
    r"|choose|ask|run|delete|start|load|import|look|fetch|enrol|call|pip install|take|mend|try) )",
    re.IGNORECASE,
)
"""Where a message goes over to what is to be done."""


@dataclass(frozen=True, order=True)
class Says:
    """One thing that may be said."""

    area: str
    kind: str
    words: str
    remedy: str


# --- out of the code -------------------------------------------------------------------------


@cache
def code() -> dict[Path, ast.Module]:
    """Every file of the package, read once."""
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def constants() -> dict[str, str]:
    """Texts with a name of their own, such as the remedy for every damaged file."""
    found = {}
    for tree in code().values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
                if name.isupper() and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[name] = value.value
    return found


def words_of(node: ast.expr, known: dict[str, str]) -> str | None:
    """A message with its placeholders as ‹name›; None where it is made elsewhere.

    >>> words_of(ast.parse("f'{where}: {len(x)} rows but {type(y).__name__}'", mode="eval").body, {})
    '‹where›: ‹number of x› rows but ‹type›'
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(words_of(p, known) or "‹...›" for p in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in known:
            return known[name]
        case ast.FormattedValue(value=value):
            return f"‹{name_of(value)}›"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = words_of(left, known), words_of(right, known)
            return (
                None
                if first is None and second is None
                else f"{first or _made(left)}{second or _made(right)}"
            )
        case ast.IfExp(body=body, orelse=other):
            return words_of(body, known) or words_of(other, known)
    return None


def _made(node: ast.expr) -> str:
    return f"‹{name_of(node)}›"


def name_of(node: ast.expr) -> str:
    """What a placeholder is called: the name that the code has for it, in words."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr="__name__", value=ast.Name(id=name)):
            return name.strip("_").lower().replace("_", " ")
        case ast.Attribute(attr="__name__"):
            return "type"
        case ast.Attribute(attr=name):
            return name.strip("_").replace("_", " ")
        case ast.Call(func=ast.Name(id="len"), args=[one]):
            return f"number of {name_of(one)}"
        case ast.Call(func=ast.Attribute(attr="join"), args=[one]):
            return f"list of {name_of(one)}"
        case ast.Call(
            func=ast.Name(id="list" | "tuple" | "str" | "int" | "float" | "sorted" | "repr"), args=[one]
        ):
            return name_of(one)
        case ast.Call(func=ast.Name(id="map"), args=[_, one]):
            return name_of(one)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Name(id=name), args=args):
            return name_of(args[0]) if args else name.strip("_").replace("_", " ")
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            return (
                name_of(value) if name in ("sum", "item", "argmax", "nonzero", "min", "max", "any") else name
            )
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return name_of(first.iter)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=value) | ast.UnaryOp(operand=value) | ast.Starred(value=value):
            return name_of(value)
        case ast.BinOp(left=ast.Constant(), right=right):
            return name_of(right)
        case ast.BinOp(left=left, right=ast.Constant(value=str(name))):
            return f"{name_of(left)}/{name}"
        case ast.BinOp(left=left) | ast.Compare(left=left):
            return name_of(left)
        case ast.BoolOp(values=[first, *_]):
            return name_of(first)
        case ast.IfExp(body=body):
            return name_of(body)
        case ast.Constant(value=value):
            return str(value)
    return "..."


def raised(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Classes of fedpop's errors and the words they are made with."""
    kinds = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.FedpopError)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[first, *_]) if kind in kinds:
                words = words_of(first, known)
                if words is not None and re.search(r"[a-z]{3}", re.sub("‹.*?›", "", words)):
                    yield kind, " ".join(words.split())


def everything() -> list[Says]:
    """All that may be said, each once."""
    known, found = constants(), set()
    for path, tree in code().items():
        parts = path.relative_to(ROOT).parts
        area = "flower" if "flower" in parts else parts[0] if parts[0] in AREAS else ""
        for kind, words in raised(tree, known):
            found.add(Says(area, kind, *_split(kind, words)))
    return sorted(found)


def _split(kind: str, words: str) -> tuple[str, str]:
    """What is wrong, and what to do."""
    for mark in (re.compile("; "), DO):
        if found := mark.search(words):
            do = words[found.end() :].removesuffix(")")
            return words[: found.start()], do[0].upper() + do[1:]
    for pattern, remedy in REMEDIES:
        if re.search(pattern, words):
            return words, remedy
    return words, FIRST[kind]


# --- a page of it ----------------------------------------------------------------------------


def _shown(words: str) -> str:
    return re.sub("‹(.*?)›", r"<var>\1</var>", html.escape(words, quote=False))


def classes() -> str:
    """What the classes of errors are for."""
    rows = ["| class | what it means | what to do first |", "|---|---|---|"]
    for kind, first in FIRST.items():
        meaning = " ".join((getattr(errors, kind).__doc__ or "").split())
        rows.append(f"| {kind} | {meaning} | {first} |")
    return "\n".join(rows)


def tables() -> str:
    """By area and class; tables in HTML, since messages hold whatever Markdown would take for its own."""
    said, lines = everything(), []
    for area, (title, when) in AREAS.items():
        here = [s for s in said if s.area == area]
        if not here:
            continue
        lines += [f"\n## {title}\n", when, ""]
        for kind in dict.fromkeys(s.kind for s in here):
            lines += [f"\n**{kind}**\n", "<table><thead><tr><th>it says</th><th>what to do</th></tr></thead>"]
            rows = [(_shown(s.words), _shown(s.remedy)) for s in here if s.kind == kind]
            lines += [
                "<tbody>",
                *(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in rows),
                "</tbody></table>",
                "",
            ]
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    for marker, made in (("<!-- classes of errors -->", classes), ("<!-- errors -->", tables)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown
