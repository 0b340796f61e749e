"""Prefill hands its KV cache to decode, in two processes: `python examples/prefill_to_decode.py`.

The prefill process computes the blocks of a prompt and offers them. The decode process reads the blocks that it lacks
straight from the other's memory, and says when it has them. No daemon is needed. Between two hosts, use `tcp://`
addresses and one secret file.
"""

import json
import multiprocessing
import tempfile
from pathlib import Path

from forebay.transfer import Endpoint, Segment

BLOCK_BYTES = 256 << 10
BLOCKS = 16


def prefill(address: str) -> None:
    """Serves one request. Its memory is free again when decode says so, or is gone."""
    with Endpoint(listen=address) as endpoint:
        cache = endpoint.allocate(BLOCKS * BLOCK_BYTES)
        decode = endpoint.accept(timeout=30)
        assert decode is not None and cache.view is not None
        for block in range(BLOCKS):
            begin = block * BLOCK_BYTES
            cache.view[begin : begin + BLOCK_BYTES] = bytes([block + 1]) * BLOCK_BYTES
        offer = {"descriptor": cache.descriptor.hex(), "blocks": BLOCKS}
        decode.send(json.dumps(offer).encode())
        assert decode.notice(timeout=30) == b"done"
        cache.deregister()


def decode(address: str) -> None:
    with Endpoint() as endpoint:
        peer = endpoint.connect(address)
        offer = json.loads(peer.recv(timeout=30) or b"{}")
        remote = peer.memory(bytes.fromhex(offer["descriptor"]))
        # Its own blocks lie in another order; all move as one transfer.
        cache = endpoint.register(bytearray(BLOCKS * BLOCK_BYTES), read=False)
        wanted = [block for block in range(offer["blocks"]) if block % 4]
        segments = [
            Segment(cache, at * BLOCK_BYTES, remote, block * BLOCK_BYTES, BLOCK_BYTES)
            for at, block in enumerate(wanted)
        ]
        peer.readv_async(segments).result(timeout=30)
        peer.notify(b"done")
        print(f"decode read {len(wanted)} blocks of {BLOCK_BYTES} bytes")


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as home:
        address = f"shm://{Path(home, 'prefill.sock')}"
        first = processes.Process(target=prefill, args=(address,))
        first.start()
        while not Path(home, "prefill.sock").exists():
            assert first.is_alive(), "prefill has ended"
            first.join(0.01)
        second = processes.Process(target=decode, args=(address,))
        second.start()
        for process in (second, first):
            process.join(60)
            assert process.exitcode == 0, f"{process.name} failed"


if __name__ == "__main__":
    main()
