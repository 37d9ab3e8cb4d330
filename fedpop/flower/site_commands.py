"""A site's commands that meet its server: enrol, join. They need no torch: the node is another process."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from fedpop.errors import SettingsError
from fedpop.federation.table_format import USUAL_TABLE, TableFormat, other_separator
from fedpop.files import writable_folder, write_bytes
from fedpop.flower import certificates
from fedpop.flower.certificates import check_name
from fedpop.flower.processes import (
    INSECURE,
    LogTail,
    Supervised,
    alone,
    environment,
    free_port,
    make_private,
    program,
    require_flower,
    require_free,
)
from fedpop.flower.site_folder import (
    SETTINGS,
    SiteSettings,
    make_secret,
    read_secret,
    read_site,
)
from fedpop.flower.stock import TRUSTED
from fedpop.flower.table_form import first_rows, keep_form

Say = Callable[[str], None]


def enrol(root: Path, name: str, server: str, data: str, ca: Path | None, insecure: bool, say: Say) -> None:
    """Make a site's folder: settings, secret, key pair. What is there already stays."""
    check_name(name)
    certificates.split_address(server)
    if ca is None and not insecure:
        raise SettingsError("give --ca, the federation's ca.crt, so that this site knows its server")
    where = checked_data(data, name)
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
    keep_form(folder, where, USUAL_TABLE)
    make_private(folder, lambda words: None)
    for words in _written_otherwise(Path(where), folder / SETTINGS):
        say(words)
    if not insecure:
        say(f"send {folder / 'node.pub'} to the server's operator, who runs")
        say(f"  fedpop server admit DIR {name} node.pub")
    say(f"then: fedpop site join {root}")


def trust(root: Path, given: str | None, say: Say) -> None:
    """Say which list of sites there is; confirm it where its fingerprint was given."""
    read_site(root)
    secure = import_module("fedpop.flower.secure_site")
    fingerprint = import_module("fedpop.privacy.secure").fingerprint
    offered, confirmed = secure.offered(root), secure.trusted(root)
    sites = confirmed if offered is None else offered
    if sites is None:
        raise SettingsError(
            f"no server has offered a list of sites here yet: fedpop site join {root}, and look again"
        )
    for name in sorted(sites):
        changed = " (changed)" if confirmed is not None and confirmed.get(name) != sites[name] else ""
        say(f"{name}{changed}")
    for name in sorted((confirmed or {}).keys() - sites.keys()):
        say(f"{name} is no longer among them")
    mark = fingerprint(sites)
    say(f"fingerprint: {mark}")
    if given is not None:
        if given.replace(" ", "").lower() != mark.replace(" ", ""):
            raise SettingsError(
                "the fingerprint is another one: do not take part, and ask the server's operator"
            )
        secure.confirm(root, sites)
        say("confirmed: this site takes part in secure sums between these sites, and answers nothing else")
    elif sites == confirmed:
        say("confirmed")
    else:
        say("not confirmed: ask the server's operator, and other sites, for theirs; if it is the same")
        say(f'  fedpop site trust {root} --fingerprint "{mark}"')


def checked_data(data: str, site: str, folder: Path | None = None, table: TableFormat | None = None) -> str:
    """Where data are, whatever folder the node is started in; there must be some."""
    if not _plain_table(Path(data)):
        import_module("fedpop.federation.reading").require_some(
            data, site, folder, *([] if table is None else [table])
        )
    return data if ":" in data else str(Path(data).absolute())


def _plain_table(path: Path) -> bool:
    """Whether these are rows of a CSV file that all have the same fields; what looks otherwise is looked at
    with all that reading takes."""
    rows = first_rows(path, USUAL_TABLE)
    usual = path.suffix in (".csv", ".txt") and len(rows) > 1 and len(set(rows[0])) == len(rows[0]) > 1
    return usual and all(name.strip() for name in rows[0]) and all(len(r) == len(rows[0]) for r in rows)


def _written_otherwise(path: Path, settings: Path) -> list[str]:
    """What the site's settings should say of a table that looks as if commas did not separate its values."""
    rows = first_rows(path, USUAL_TABLE)
    other = other_separator(rows[0], rows[1], USUAL_TABLE.separator) if len(rows) > 1 else None
    if other is None:
        return []
    told = f'separator = {json.dumps(other)}, and decimal = "," where its numbers have decimal commas'
    return [f"{path} looks as if {other!r} separated its values: say {told}, in {settings}"]


def with_data(settings: SiteSettings, where: str) -> SiteSettings:
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
    require_flower()
    settings = read_site(root.absolute())
    if data is not None:
        settings = with_data(settings, checked_data(data, settings.name, settings.folder, settings.table))
    read_secret(settings.folder)
    checked_data(settings.where, settings.name, settings.folder, settings.table)
    keep_form(settings.folder, settings.where, settings.table)
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
