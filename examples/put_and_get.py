"""Blocks through the daemon, for any program: `python examples/put_and_get.py`."""

import hashlib

import forebay

BLOCK_BYTES = 65536

client = forebay.Client()
# The fields name everything that changes the bytes of a block; only equal namespaces share blocks.
namespace = client.open_namespace({"model": "put_and_get", "revision": "1"}, {0: BLOCK_BYTES})

# Each hash stands for the tokens of its block and of all blocks before it, so the order is that of the prompt.
prompt = ["the first 16 tokens", "the next 16 tokens", "16 more"]
hashes = [hashlib.sha256(" ".join(prompt[: end + 1]).encode()).digest() for end in range(len(prompt))]
blocks = [(key, bytes([number]) * BLOCK_BYTES) for number, key in enumerate(hashes)]

print("put:", client.put(namespace, 0, blocks))
print("lookup:", client.lookup(namespace, 0, [*hashes, b"\0" * 32]))
assert client.get(namespace, 0, hashes) == [data for _, data in blocks]
print("get: every block is what was put")
client.close()
