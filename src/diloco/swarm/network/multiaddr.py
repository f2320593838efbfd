"""libp2p's addresses (multiaddrs) and peer ids: text to bytes and back, and what an address says about its peer.

    /ip4/203.0.113.7/tcp/4000/p2p/12D3KooW...                          a peer that listens at a public address
    /ip4/203.0.113.7/tcp/4000/p2p/RELAY/p2p-circuit/p2p/12D3KooW...    a peer behind a router, reached through RELAY

Only the parts that p2pd uses are known; any other part is refused by name. Nothing is connected to or looked up here.
"""

import ipaddress

import base58

from diloco.errors import ConfigError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_CODES = {
    "ip4": 4, "tcp": 6, "ip6": 41, "ip6zone": 42, "dns": 53, "dns4": 54, "dns6": 55, "dnsaddr": 56,
    "udp": 273, "p2p-circuit": 290, "unix": 400, "p2p": 421, "quic": 460, "quic-v1": 461,
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_WITHOUT_VALUE = {"p2p-circuit", "quic", "quic-v1"}
_VALUE_BYTES = {"ip4": 4, "ip6": 16, "tcp": 2, "udp": 2}
CIRCUIT = "/p2p-circuit"
"""An address with this part leads through a relay."""


def peer_id_to_bytes(peer: str) -> bytes:
    try:
        return base58.b58decode(peer)
    except ValueError as error:
        raise ConfigError(f"{peer!r} is not a peer id: {error}") from error


def peer_id_to_text(data: bytes) -> str:
    return base58.b58encode(data).decode()


def varint(number: int) -> bytes:
    """Encode a number with 7 bits a byte, the lowest first; the top bit says that more follow (as in protobuf)."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def take_varint(data: bytes) -> tuple[int, bytes]:
    """Read the number at the start of `data`, and the bytes after it."""
    number = 0
    for i, byte in enumerate(data[:9]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, data[i + 1 :]
    raise ConfigError("an address is cut off")


def to_bytes(address: str) -> bytes:
    """Return the binary form of a multiaddr, as p2pd takes it."""
    if not address.startswith("/"):
        raise ConfigError(f"{address!r} is not a multiaddr: one looks like /ip4/203.0.113.7/tcp/4000")
    names = iter(address.strip("/").split("/"))
    data = bytearray()
    for name in names:
        if name not in _CODES:
            raise ConfigError(f"address {address!r}: {name!r} is not known here; known are {', '.join(sorted(_CODES))}")
        data += varint(_CODES[name])
        if name == "unix":
            path = ("/" + "/".join(names)).encode()
            return bytes(data + varint(len(path)) + path)
        if name not in _WITHOUT_VALUE:
            data += _pack(address, name, next(names, ""))
    return bytes(data)


def _pack(address: str, name: str, value: str) -> bytes:
    try:
        if name in ("ip4", "ip6"):
            return ipaddress.IPv4Address(value).packed if name == "ip4" else ipaddress.IPv6Address(value).packed
        if name in ("tcp", "udp"):
            return int(value).to_bytes(2)
        raw = peer_id_to_bytes(value) if name == "p2p" else value.encode()
        if not raw:
            raise ValueError("nothing follows")
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"address {address!r}: {value!r} is not a value for {name} ({error})") from error
    return varint(len(raw)) + raw


def to_text(data: bytes) -> str:
    """Return the text of a multiaddr that `to_bytes` has packed."""
    text = ""
    while data:
        code, data = take_varint(data)
        name = _NAMES.get(code)
        if name is None:
            raise ConfigError(f"an address has a part of unknown kind {code}")
        text += f"/{name}"
        if name in _WITHOUT_VALUE:
            continue
        if name in _VALUE_BYTES:
            size = _VALUE_BYTES[name]
        else:
            size, data = take_varint(data)
        value = data[:size]
        data = data[size:]
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
        return f"/{peer_id_to_text(value)}"
    text = value.decode(errors="replace")
    return text if name == "unix" else f"/{text}"


def split_peer(address: str) -> tuple[str, str]:
    """Split "/ip4/.../tcp/4000/p2p/PEER" into ("/ip4/.../tcp/4000", PEER)."""
    route, separator, peer = address.rpartition("/p2p/")
    if not separator or not peer or "/" in peer:
        raise ConfigError(f"address {address!r} does not end in /p2p/PEER: it must name the peer that it leads to")
    return route, peer


def route_to(peer: str, address: str) -> str | None:
    """Return the address without its /p2p/PEER; None if it is not valid or leads to another peer. Accepts any text."""
    try:
        route, name = split_peer(address)
        to_bytes(route)
        peer_id_to_bytes(name)
    except ConfigError:
        return None
    return route if name == peer else None


def ip_of(address: str) -> IpAddress | None:
    """Return the IP address at the start of a multiaddr; None if it begins with a name. Accepts any text."""
    parts = address.split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        try:
            return ipaddress.ip_address(parts[2])
        except ValueError:
            return None
    return None


def is_loopback(address: str) -> bool:
    ip = ip_of(address)
    return ip is not None and ip.is_loopback


def is_public(address: str) -> bool:
    """Return whether a peer anywhere could use this address, judged by the address alone."""
    ip = ip_of(address)
    return CIRCUIT in address or ip is None or ip.is_global
