"""Keys and certificates: a federation's authority, its server's certificate, and sites' key pairs."""

from __future__ import annotations

import datetime as dt
import http.client
import ipaddress
import re
import socket
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpop.errors import SettingsError
from fedpop.files import write_bytes

AUTHORITY_YEARS = 10
"""How long the authority is valid; a server's certificate is valid for a year."""
CLOCK_SKEW = dt.timedelta(hours=1)
"""Clocks that are as far behind as this do not matter."""

CLOCK_AHEAD, BEHIND = 6.0, 305.0
"""Seconds that a site's clock may be ahead of the server's, or behind it: Flower's bounds, rounded up."""
LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*")
MOST_DAYS = 36_500
"""Days of a certificate: dates end, and keys should long before."""
CURVE_BITS = 0o600
"""A private key is its owner's to read."""

Private = ec.EllipticCurvePrivateKey


def make_authority(folder: Path, name: str) -> None:
    """``ca.crt`` and ``ca.key``, which sign the server's certificate and nothing else."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _name(f"{name} federation")
    now = dt.datetime.now(dt.UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _begun(subject, subject, key, now, 365 * AUTHORITY_YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_private(folder / "ca.key", key)
    write_bytes(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(
    folder: Path, hosts: list[str], days: int = 365, start: dt.datetime | None = None
) -> None:
    """``server.crt`` and ``server.key`` for these names or addresses, signed by the folder's authority."""
    if not 0 < days <= MOST_DAYS:
        raise SettingsError(f"a certificate is valid for 1 to {MOST_DAYS:,} days, not {days}")
    names = [
        named_host(host.strip("[]")) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])
    ]
    authority = x509.load_pem_x509_certificate(_read(folder / "ca.crt"))
    signer = read_private(folder / "ca.key")
    key = ec.generate_private_key(ec.SECP384R1())
    now = dt.datetime.now(dt.UTC) if start is None else start
    certificate = (
        _begun(_name(hosts[0]), authority.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA384())
    )
    _write_private(folder / "server.key", key)
    write_bytes(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_site_key(folder: Path) -> Path:
    """``node.key``, which stays, and ``node.pub``, which the server is to admit; made once."""
    private, public = folder / "node.key", folder / "node.pub"
    if not private.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        data = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        write_bytes(private, data, CURVE_BITS)
        line = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_bytes(public, line + b"\n")
    return public


def read_site_key(folder: Path) -> Private:
    """A site's private key."""
    data = _read(folder / "node.key")
    try:
        key = serialization.load_ssh_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{folder / 'node.key'} is not a site's key ({error}); enrol it again") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{folder / 'node.key'} is not an elliptic-curve key; enrol the site again")
    return key


def check_site_key(folder: Path) -> None:
    """Raise unless the site's key pair can be read."""
    read_site_key(folder)
    check_public_key(folder / "node.pub")


def check_public_key(path: Path) -> None:
    """Raise unless this is a site's public key."""
    try:
        key = serialization.load_ssh_public_key(_read(path).strip())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{path} is not a site's public key (node.pub): {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SettingsError(f"{path} is not an elliptic-curve key; fedpop site enrol makes one")


def check_server_certificate(folder: Path) -> None:
    """Raise unless the server's certificate is valid now and goes with its key."""
    certificate = read_certificate(folder / "server.crt")
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        raise SettingsError(
            f"the server's certificate {folder / 'server.crt'} expired on "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}; fedpop server certificate makes a new one"
        )
    if now < certificate.not_valid_before_utc:
        raise SettingsError(
            f"the server's certificate is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, "
            f"and this machine's clock says {now:%Y-%m-%d %H:%M}: set the clock"
        )
    private = read_private(folder / "server.key").public_key().public_numbers()
    public = certificate.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.public_numbers() != private:
        raise SettingsError(f"{folder / 'server.key'} is not the key of server.crt beside it")


def check_connection(server: str, ca: Path, timeout: float = 5.0) -> bool:
    """Whether the server is there; raise where it is, and is not the one that the authority signed for."""
    host, port = split_address(server)
    read_certificate(ca)
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with (
            socket.create_connection((host, port), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(_why(error, server, ca)) from error
    except ssl.SSLError as error:
        raise SettingsError(
            f"{server} does not speak TLS ({error.reason}): is it a federation's server?"
        ) from error
    except OSError:
        return False


def require_plain(server: str, timeout: float = 5.0) -> None:
    """Raise where the server speaks TLS: a site without it would knock for ever."""
    host, port = split_address(server)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whoever it is, nothing is sent
    try:
        with socket.create_connection((host, port), timeout) as plain, context.wrap_socket(plain):
            pass
    except OSError:
        return
    raise SettingsError(
        f"{server} speaks TLS, and this site was enrolled without it: enrol it in a new folder with --ca"
    )


def check_clock(server: str, ca: Path, timeout: float = 5.0) -> None:
    """Raise where the clocks here and at the server differ by more than Flower allows a node's signature."""
    host, port = split_address(server)
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        connection.request("GET", "/health")
        there = parsedate_to_datetime(connection.getresponse().headers["Date"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return  # it sends no time; the node will find out
    finally:
        connection.close()
    ahead = (dt.datetime.now(dt.UTC) - there).total_seconds()
    if not -BEHIND < ahead < CLOCK_AHEAD:
        words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
        raise SettingsError(
            f"the clock here is {words} that of {server}, which would take this site's signature for forged: "
            "set both clocks, best by NTP"
        )


def _why(error: ssl.SSLCertVerificationError, server: str, ca: Path) -> str:
    now = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC"
    reason = error.verify_message or ""
    if "expired" in reason:
        return (
            f"the certificate of {server} has expired, or the clock here ({now}) is ahead: ask its operator"
        )
    if "not yet valid" in reason:
        return f"the certificate of {server} is not yet valid: the clock here says {now}, which may be behind"
    if "mismatch" in reason or "not valid for" in reason:
        return (
            f"the certificate of {server} is not for that name or address: use the one that it was made for"
        )
    return f"the certificate of {server} was not signed by {ca}: take ca.crt from its operator ({reason})"


def check_name(name: str) -> None:
    """Raise unless a site, or a federation, can be called so: its name is a folder's, too."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", name):
        raise SettingsError(
            f"a name has letters, digits, '-', '_' and '.', at most 64 and no dot first, not {name!r}"
        )


def split_address(address: str) -> tuple[str, int]:
    """
    >>> split_address("127.0.0.1:8000")
    ('127.0.0.1', 8000)
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise SettingsError(f"an address is host:port, such as 192.0.2.7:8000, not {address!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed != (":" in host):
        raise SettingsError(f"an address of colons stands in brackets, [::1]:8000, not as in {address!r}")
    named_host(host.strip("[]"))
    return host, int(port)


def read_private(path: Path) -> Private:
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path} is not a readable key ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{path} is not an elliptic-curve key")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise SettingsError(f"{path} is not a readable certificate ({error})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from error


def _write_private(path: Path, key: Private) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_bytes(path, data, CURVE_BITS)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def named_host(host: str) -> x509.GeneralName:
    """A name or an address as certificates have them, or the error for what is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) < 254 and HOST.fullmatch(host) and not host.rpartition(".")[2].isdecimal():
            return x509.DNSName(host)
    raise SettingsError(
        f"{host!r} is neither a host's name nor an address: letters, digits, '-' and '.' (a name of other "
        "letters in its form xn--...), or numbers such as 192.0.2.7"
    )


def _begun(
    subject: x509.Name, issuer: x509.Name, key: Private, now: dt.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
    )
