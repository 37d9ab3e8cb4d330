"""Secure sums at a site: whole numbers, masks and shares of 1.2 million numbers, beside a round on images."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.images import IMAGES, pictures
from benchmarks.round import bare
from benchmarks.timing import Advance, Spread, in_turns, shown
from fedpop.data.image_task import ImageTask
from fedpop.files import write_bytes
from fedpop.keys import Key
from fedpop.message import Message
from fedpop.message.fixed_point import SCALE, FixedPoint
from fedpop.message.summed import SumForm, form_of, packed
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt, Memory, Mode, Policy, Session, public_key
from fedpop.report.results import Record, record

NAME = "secure sums"
ENTRIES, SITES = 1_200_000, (10, 100)
SECONDS, LEAST = 20.0, 5
GOALS = {10: 0.1, 100: 2.0}
"""Of 10 sites, the share of a round with one pass over a site's images; of 100, seconds of a site's core."""
BYTES, BYTES_A_SITE = 1.1, 150
"""Over float32, and for each site of the cohort beside."""


class AtSite:
    """The first of so many sites, in a session."""

    def __init__(self, sites: int, folder: Path) -> None:
        names = [f"s{i:03d}" for i in range(sites)]
        identity = {n: hashlib.sha256(n.encode()).digest() for n in names}
        self.admitted = {n: public_key(secret) for n, secret in identity.items()}
        sessions = [Session.begin("bench", n, identity[n]) for n in names]
        self.session, self.policy, self.folder, self.number = sessions[0], Policy(), folder, 0
        self.offers = tuple(s.offer for s in sessions)
        key = Key(0, purpose="bench")
        self.message = Message(
            torch.tensor([7]), torch.tensor([1]), {"dw": key.normal(key.server(), (ENTRIES,))}
        )
        self.broadcast, self.key = {SCALE + "dw": torch.tensor(6.0, dtype=torch.float64)}, key
        self.bytes = 0

        self.form, self.words = self.made()

    def made(self) -> tuple[SumForm, bytes]:
        """The message as words."""
        n = len(self.offers)
        sent = FixedPoint().words(self.message, torch.ones(1), n, ("dw",), self.broadcast, self.key)
        form = form_of(sent, {}, ("dw",))
        return form, packed(sent, form, n)

    def masked(self) -> Memory:
        """Masks and shares."""
        self.number += 1
        n = len(self.offers)
        attempt = Attempt("bench", "train", self.number, self.number, Mode.DROP_OUT, bytes(32), self.offers,
                          self.policy.colluders(n), 3)  # fmt: skip
        memory, reply = secure.send(
            attempt, self.words, self.form.layout, self.session, Memory(), self.policy, self.admitted,
            about=self.form.plain(),
        )  # fmt: skip
        self.bytes = len(reply)
        return memory

    def round(self) -> None:
        """All that a reply takes beside the round itself."""
        self.made()
        write_bytes(self.folder / "memory", self.masked().packed(), 0o600)


def measure(advance: Advance) -> list[Record]:
    model = ImageTask().model(seed=0)
    model = model.at_precision(model.chosen_precision())
    ((x, y),) = pictures(1, "train", IMAGES)
    passes = bare(model, x.reshape(1, IMAGES, 3, 32, 32).float() / 255, y.reshape(1, IMAGES), 100)
    with tempfile.TemporaryDirectory() as folder:
        there = {n: AtSite(n, Path(folder)) for n in SITES}
        programs = {"pass": passes} | {str(n): site.round for n, site in there.items()}
        programs |= {f"{n} masks": site.masked for n, site in there.items()}
        laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=advance)
    out, network = [], sum(v.numel() for v in model.backbone.parameters())
    for n, site in there.items():
        seconds = Spread.of([lap.cpu for lap in laps[str(n)]])
        each = {"masks": laps[f"{n} masks"], "share": laps[str(n)]}
        metrics = seconds.metrics("seconds")
        for what, those in each.items():
            over = [a.cpu / b.cpu for a, b in zip(those, laps["pass"], strict=True)]
            metrics |= Spread.of(over).metrics(what)
        metrics |= {"bytes": site.bytes, "over": site.bytes / (4 * ENTRIES), "repeats": len(laps[str(n)])}
        metrics |= {"goal": GOALS[n], "most_bytes": 4 * ENTRIES * BYTES + BYTES_A_SITE * n}
        setting = {"benchmark": NAME, "sites": n, "entries": ENTRIES, "images": IMAGES, "network": network}
        cost = {"seconds": sum(lap.wall for lap in laps[str(n)])}
        out.append(record("bench", setting, "a site's secure sum", 0, metrics, cost, {}))
    return json.loads(json.dumps(out))  # type: ignore[no-any-return]


def tables(records: list[Record]) -> list[Table]:
    table = Table(
        title=f"a site's part of a secure sum of {ENTRIES:,} numbers",
        caption=f"Processor seconds, median and quartiles of {records[0]['metrics']['repeats']} "
        f"turns; a round is one pass over {records[0]['setting']['images']} images; bytes over float32's",
    )
    for name in ("sites", "masks over a round", "all over a round", "all, seconds", "goal", "bytes"):
        table.add_column(name, justify="right")
    for r in records:
        m, n = r["metrics"], r["setting"]["sites"]
        goal = f"masks {m['goal']:.0%}" if n == min(SITES) else f"{m['goal']:g} s"
        shares = shown(m, "masks", 3), shown(m, "share", 3)
        table.add_row(str(n), *shares, shown(m, "seconds"), goal, f"{m['over']:.4f}")
    return [table]
