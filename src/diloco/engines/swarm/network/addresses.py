"""Addresses of peers: libp2p's multiaddrs as text and as bytes, peer ids, and what a user may write for an address.

Only the parts that p2pd uses are known; anything else in an address is refused, with its name. Nothing is connected to
here, and only names that the user has written are looked up.
"""

import ipaddress
import re
import socket

from diloco.errors import ConfigError

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_CODES = {
    "ip4": 4, "tcp": 6, "ip6": 41, "ip6zone": 42, "dns": 53, "dns4": 54, "dns6": 55, "dnsaddr": 56,
    "udp": 273, "p2p-circuit": 290, "unix": 400, "p2p": 421, "quic": 460, "quic-v1": 461,
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_BARE = {"p2p-circuit", "quic", "quic-v1"}
_SIZES = {"ip4": 4, "ip6": 16, "tcp": 2, "udp": 2}
CIRCUIT = "/p2p-circuit"
_CALLABLE = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/[0-9]+(/|$)")


def base58(data: bytes) -> str:
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def from_base58(text: str) -> bytes:
    number = 0
    for letter in text:
        digit = _ALPHABET.find(letter)
        if digit < 0:
            raise ConfigError(f"{text!r} is not a peer id: {letter!r} is no base58 letter")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8)


def varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def take_varint(data: bytes) -> tuple[int, bytes]:
    number = 0
    for i, byte in enumerate(data[:9]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, data[i + 1 :]
    raise ConfigError("an address is cut off")


def to_bytes(address: str) -> bytes:
    """A multiaddr as text, packed as p2pd wants it."""
    if not address.startswith("/"):
        raise ConfigError(f"{address!r} is not a multiaddr: one looks like /ip4/203.0.113.7/tcp/4000")
    names, data = iter(address.strip("/").split("/")), bytearray()
    for name in names:
        if name not in _CODES:
            raise ConfigError(f"address {address!r}: {name!r} is not known here; known are {', '.join(sorted(_CODES))}")
        data += varint(_CODES[name])
        if name == "unix":
            path = ("/" + "/".join(names)).encode()
            return bytes(data + varint(len(path)) + path)
        if name not in _BARE:
            data += _pack(address, name, next(names, ""))
    return bytes(data)


def _pack(address: str, name: str, value: str) -> bytes:
    try:
        if name in ("ip4", "ip6"):
            return ipaddress.IPv4Address(value).packed if name == "ip4" else ipaddress.IPv6Address(value).packed
        if name in ("tcp", "udp"):
            return int(value).to_bytes(2)
        raw = from_base58(value) if name == "p2p" else value.encode()
        if not raw:
            raise ValueError("nothing follows")
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"address {address!r}: {value!r} is not a value for {name} ({error})") from error
    return varint(len(raw)) + raw


def to_text(data: bytes) -> str:
    """Undoes `to_bytes`."""
    text = ""
    while data:
        code, data = take_varint(data)
        name = _NAMES.get(code)
        if name is None:
            raise ConfigError(f"an address has a part of unknown kind {code}")
        text += f"/{name}"
        if name in _BARE:
            continue
        size, data = (_SIZES[name], data) if name in _SIZES else take_varint(data)
        value, data = data[:size], data[size:]
        if len(value) != size:
            raise ConfigError("an address is cut off")
        text += _unpack(name, value)
    return text


def _unpack(name: str, value: bytes) -> str:
    if name in ("ip4", "ip6"):
        return f"/{ipaddress.ip_address(value)}"
    if name in ("tcp", "udp"):
        return f"/{int.from_bytes(value)}"
    if name == "p2p":
        return f"/{base58(value)}"
    text = value.decode(errors="replace")
    return text if name == "unix" else f"/{text}"


def split_peer(address: str) -> tuple[str, str]:
    """("/ip4/.../tcp/4000", PEER) of "/ip4/.../tcp/4000/p2p/PEER"."""
    way, found, peer = address.rpartition("/p2p/")
    if not found or not peer or "/" in peer:
        raise ConfigError(f"address {address!r} does not end in /p2p/PEER, so nobody could tell whom it reaches")
    return way, peer


def way_to(peer: str, address: str) -> str | None:
    """The same without the peer; None if it leads to another, or is not one that p2pd takes. May come from anybody."""
    try:
        way, name = split_peer(address)
        to_bytes(way)
        from_base58(name)
    except ConfigError:
        return None
    return way if name == peer else None


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address at the start of a multiaddr; None if it begins with a name."""
    parts = address.split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        return ipaddress.ip_address(parts[2])
    return None


def is_public(address: str) -> bool:
    """Whether a multiaddr may be reached from anywhere, as far as one can tell by looking at it."""
    ip = ip_of(address)
    return CIRCUIT in address or ip is None or ip.is_global


def listening(host: str | None, port: int | None) -> list[str]:
    """What to listen at: everything, IPv4 and IPv6, or one address or name of this machine."""
    number = _checked_port(port, "port") if port is not None else 0
    if host is None:
        return [f"/ip4/0.0.0.0/tcp/{number}", f"/ip6/::/tcp/{number}"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address or name of this machine ({error}); leave it out") from error
    addresses = dict.fromkeys(ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in found)
    return [f"/ip{ip.version}/{ip}/tcp/{number}" for ip in addresses]


def announced(text: str, port: int | None) -> str:
    """What a user asked to announce, as a multiaddr: ADDRESS, ADDRESS:PORT, [IPV6]:PORT or a multiaddr."""
    if text.startswith("/"):
        return _announced_multiaddr(text)
    name, number = _name_and_port(text, port)
    try:
        ip = ipaddress.ip_address(name)
        way = f"/ip{ip.version}/{ip}"
    except ValueError:
        parts = name.rstrip(".").split(".")
        if not all(part.replace("-", "").isalnum() for part in parts) or parts[-1].isdecimal():
            raise ConfigError(f"announce {text!r} is not ADDRESS, ADDRESS:PORT or a multiaddr") from None
        way = f"/dns/{name}"
    if number is None:
        raise ConfigError(f"announce {text!r} has no port and none was chosen: write {text}:PORT or set the port too")
    return f"{way}/tcp/{number}"


def _announced_multiaddr(text: str) -> str:
    to_bytes(text)
    if "/tcp/0" in text:
        raise ConfigError(f"announce {text!r}: name the port that others must call, not 0")
    if not _CALLABLE.match(text):
        raise ConfigError(f"announce {text!r} does not say where to call: write /ip4/ADDRESS/tcp/PORT, say")
    return text.partition("/p2p/")[0]


def check_name(address: str) -> None:
    """ConfigError if a name in an address that is to be announced is known to be nobody's."""
    found = _CALLABLE.match(address)
    if found is None or not found["kind"].startswith("dns"):
        return
    try:
        socket.getaddrinfo(found["host"], None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise ConfigError(f"announce {found['host']!r}: no machine of that name is known") from error


def _name_and_port(text: str, port: int | None) -> tuple[str, int | None]:
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        return name, _checked_port(rest[1:], f"announce {text!r}: port") if rest else port
    if text.count(":") == 1:
        name, _, rest = text.partition(":")
        return name, _checked_port(rest, f"announce {text!r}: port")
    return text, port


def _checked_port(port: int | str, what: str) -> int:
    try:
        number = int(port)
    except ValueError:
        number = 0
    if not 0 < number < 65536:
        raise ConfigError(f"{what} {port!r} is not between 1 and 65535")
    return number
