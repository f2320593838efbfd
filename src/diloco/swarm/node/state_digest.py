"""The digest of a state: what all members have alike, whichever of them serves it.

That is the anchors and the outer momentum, the next round and how many rounds each fragment has had. What a state has
besides is the serving worker's own (its position, the buffers of its model) and not in the digest.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import Snapshot

_OWN = "start."
_MAX_HEADER_BYTES = 1 << 26


def state_digest(snapshot: Snapshot) -> bytes:
    """32 bytes. Raises Malformed if the data is no safetensors file."""
    taken = hashlib.sha256()
    agreed = {
        name: number for name, number in snapshot.numbers.items() if name == "sequence" or name.endswith(".rounds")
    }
    taken.update(json.dumps([snapshot.layout_digest, sorted(agreed.items())]).encode())
    view = snapshot.data.view
    header, start = _read_header(view)
    for name in sorted(header):
        if not name.startswith(_OWN) and name != "__metadata__":
            first, last = _place(header[name], len(view) - start)
            taken.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
            taken.update(view[start + first : start + last])
    return taken.digest()


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(view) - 8):
        raise Malformed("a state that is no safetensors file")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise Malformed("a state that is no safetensors file") from error
    if not isinstance(header, dict):
        raise Malformed("a state that is no safetensors file")
    return header, 8 + size


def _place(tensor: object, size: int) -> tuple[int, int]:
    if isinstance(tensor, Mapping) and {"dtype", "shape", "data_offsets"} <= tensor.keys():
        offsets = tensor["data_offsets"]
        if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(one, int) for one in offsets):
            first, last = offsets
            if 0 <= first <= last <= size:
                return first, last
    raise Malformed("a state whose tensors are not in it")
