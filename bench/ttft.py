"""Time to first token of a prefix that is computed against one that is loaded from the pool, and the throughput of short
requests against the hit rate, on a model of the shape of Llama-3.1-8B with random weights.

`python bench/ttft.py [--shape 8b|tiny] [--device cuda:0] [--lengths N,N,...] [--repeats N] [--requests N] [--json FILE]
[--plot FILE.svg]`, with PYTHONPATH=python:tests and a built `forebay`. It needs PyTorch, and no vLLM.

The model is plain PyTorch over a paged KV cache; the copies are those of the engine's worker, between the cache's
tensors and the pool of a daemon that is started here. A prompt is computed as a whole. A loaded prompt is looked up,
its prefix is loaded, and what is left of it, at most a block, is computed over the loaded KV. For that step PyTorch
gathers the pages, which the attention of an engine reads where they are: so loads are shown slower than they are.
Throughput is that of one request after another, each of 512 tokens; the next request's prefix is loaded meanwhile, and
what was computed is stored. The line "no cache" neither looks up nor stores. On the fake driver or a CPU the figures
say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from forebay import EngineSession, Ticket, WorkerEngine
from forebay.compare import chart
from rig.daemon import Daemon
from rig.process import wait_until
from torch.nn import functional

SECONDS = 120.0
BLOCK_TOKENS = 16
REQUEST_TOKENS = 512
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Requests whose blocks are in the cache at once, so that copies of one pass beside the computation of another.
PLACES = 4
STOCK_BLOCKS = 256


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int

    @property
    def page(self) -> tuple[int, ...]:
        """A layer's share of a block: keys and values."""
        return (2, BLOCK_TOKENS, self.kv_heads, self.head)


SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 512),
}


class Model:
    """A decoder of this shape. `cache` has a tensor for each layer, whose rows are blocks."""

    def __init__(self, shape: Shape, device: torch.device, blocks: int):
        self.shape, self.device = shape, device
        self.type = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(1)
        wide, narrow = shape.heads * shape.head, 2 * shape.kv_heads * shape.head
        self.layers = [
            (
                self._weights(wide + narrow, shape.hidden),
                self._weights(shape.hidden, wide),
                self._weights(2 * shape.inner, shape.hidden),
                self._weights(shape.hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = self._weights(shape.vocabulary, shape.hidden)
        self.head = self._weights(shape.vocabulary, shape.hidden)
        self.cache = [torch.zeros((blocks, *shape.page), dtype=self.type, device=device) for _ in range(shape.layers)]

    def _weights(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.type, device=self.device).normal_(std=0.02)

    @torch.inference_mode()
    def first_token(self, tokens: Sequence[int], blocks: range, known: int) -> int:
        """The token after `tokens`, whose first `known` are in the cache. Writes the others there. Waits for the device."""
        shape, new = self.shape, torch.tensor(tokens[known:], device=self.device)
        state = self.embedding[new]
        turn = self._turn(known, len(tokens))
        for (qkv, out, gate, down), cache in zip(self.layers, self.cache, strict=True):
            parts = functional.linear(_normal(state), qkv).view(len(new), -1, shape.head)
            query, key, value = parts.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
            query, key = _turned(query, turn), _turned(key, turn)
            self._write(cache, blocks, known, key, value)
            attended = self._attend(cache, blocks, query, key, value, known)
            state = state + functional.linear(attended.reshape(len(new), -1), out)
            opened, passed = functional.linear(_normal(state), gate).chunk(2, dim=-1)
            state = state + functional.linear(functional.silu(opened) * passed, down)
        return int(functional.linear(_normal(state[-1]), self.head).argmax().item())

    def _turn(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.shape.head // 2
        speeds = 500_000.0 ** (-torch.arange(half, device=self.device, dtype=torch.float32) / half)
        angles = torch.arange(start, end, device=self.device, dtype=torch.float32)[:, None, None] * speeds
        return angles.cos().to(self.type), angles.sin().to(self.type)

    def _write(self, cache: torch.Tensor, blocks: range, known: int, key: torch.Tensor, value: torch.Tensor) -> None:
        at = torch.arange(known, known + len(key), device=self.device)
        rows, places = blocks.start + at // BLOCK_TOKENS, at % BLOCK_TOKENS
        cache[rows, 0, places], cache[rows, 1, places] = key, value

    def _attend(
        self,
        cache: torch.Tensor,
        blocks: range,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        known: int,
    ) -> torch.Tensor:
        if known == 0:
            heads_first = [part.transpose(0, 1)[None] for part in (query, key, value)]
            attended = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            return attended[0].transpose(0, 1)
        # A few queries over many keys: as products of the query heads that share a KV head, without copies of it.
        shape, new, total = self.shape, len(query), known + len(query)
        pages = cache[blocks.start : blocks.start + -(-total // BLOCK_TOKENS)]
        keys, values = (
            pages[:, part].reshape(-1, shape.kv_heads, shape.head)[:total].transpose(0, 1) for part in (0, 1)
        )
        shared = (
            query.view(new, shape.kv_heads, -1, shape.head).permute(1, 2, 0, 3).reshape(shape.kv_heads, -1, shape.head)
        )
        scores = (shared @ keys.transpose(1, 2)).float().view(shape.kv_heads, -1, new, total) * shape.head**-0.5
        later = torch.arange(total, device=self.device) > torch.arange(known, total, device=self.device)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1).to(self.type)
        attended = weights.view(shape.kv_heads, -1, total) @ values
        return attended.view(shape.kv_heads, -1, new, shape.head).permute(2, 0, 1, 3)


def _normal(state: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(state, state.shape[-1:])


def _turned(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (cos, sin), (first, second) = turn, heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True)
class Prompt:
    name: str
    tokens: list[int]

    @classmethod
    def draw(cls, name: str, length: int, vocabulary: int) -> Prompt:
        return cls(name, random.Random(name).choices(range(vocabulary), k=length))

    @property
    def keys(self) -> list[bytes]:
        """Of the blocks before the last token, which is always computed."""
        count = (len(self.tokens) - 1) // BLOCK_TOKENS
        return [hashlib.sha256(f"{self.name} {block}".encode()).digest() for block in range(count)]


@dataclass
class Load:
    """A prefix on its way into the cache."""

    job: int
    ticket: Ticket
    tokens: int


@dataclass
class Cache:
    """Both halves of an engine of one rank on the model's tensors."""

    model: Model
    daemon: Daemon
    stored: dict[int, tuple[list[bytes], bytes | None, bytes, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, sockets, incarnation = self.model, str(self.daemon.socket.parent), os.urandom(16)
        self._jobs = itertools.count(1)
        self._done: dict[int, bool] = {}
        self._session = EngineSession(
            sockets, "ttft", 1, incarnation=incarnation, stock_blocks=STOCK_BLOCKS, deadline=SECONDS
        )
        page_bytes = model.cache[0][0].numel() * model.cache[0].element_size()
        self._worker = WorkerEngine(
            sockets,
            "ttft",
            0,
            1,
            incarnation=incarnation,
            tensors=[(each.data_ptr(), len(each), page_bytes, page_bytes) for each in model.cache],
            groups=[(0, False, [(layer, page_bytes) for layer in range(len(model.cache))])],
            device=model.device.index if model.device.type == "cuda" else None,
        )
        fields = {"model": f"ttft {model.shape}", "revision": "random"}
        self._session.set_namespace(fields, [(0, "full", BLOCK_TOKENS, False)])
        wait_until("the engine is ready", lambda: self._session.state() == self._worker.state() == "ready", SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._session.close()
        self._worker.shutdown()

    def store(self, prompt: Prompt, blocks: range) -> list[int]:
        """Queues what is computed, as far as there are slots; the jobs."""
        keys, jobs, at = prompt.keys, [], 0
        deadline = time.monotonic() + SECONDS
        while at < len(keys):
            slots, generations = self._session.reserve(0, len(keys) - at)
            count = len(slots) // 4
            if count == 0:
                assert time.monotonic() < deadline, "the pool gives no slots"
                time.sleep(0.001)
                continue
            job = next(self._jobs)
            rows = _words(blocks[at : at + count])
            self._worker.submit_store(job, self._session.pool, [(0, slots, generations, rows, 0)], *self._stream())
            self.stored[job] = (keys[at : at + count], keys[at - 1] if at else None, slots, generations)
            jobs.append(job)
            at += count
        return jobs

    def finish(self, jobs: Sequence[int]) -> None:
        """Waits for jobs; what was stored is named."""
        assert self._worker.wait(list(jobs), SECONDS), "copies take too long"
        for job, is_whole, _, _ in self._worker.finished():
            self._done[job] = is_whole
        for job in jobs:
            assert self._done.pop(job), "a copy failed"
            if job in self.stored:
                keys, predecessor, slots, generations = self.stored.pop(job)
                self._session.commit(0, keys, predecessor, slots, generations)

    def begin_load(self, prompt: Prompt, blocks: range) -> Load | None:
        """Looks the prompt up, and queues the copies of its prefix; None for a miss."""
        keys = prompt.keys
        ticket = self._session.lookup([(0, keys)])
        assert ticket.poll(SECONDS), "the daemon does not answer"
        hits = len(ticket.states(0)) - len(ticket.states(0).lstrip(b"\1"))
        if hits == 0:
            ticket.release()
            return None
        job, rows = next(self._jobs), _words(blocks[:hits])
        group = (0, ticket.slots(0)[: 4 * hits], ticket.generations(0)[: 4 * hits], rows, 0)
        self._worker.submit_load(job, ticket.pool, [group], *self._stream())
        return Load(job, ticket, hits * BLOCK_TOKENS)

    def end_load(self, load: Load | None) -> int:
        """How many tokens are in the cache now."""
        if load is None:
            return 0
        self.finish([load.job])
        load.ticket.release()
        return load.tokens

    def wait_named(self, prompt: Prompt) -> None:
        """Until a lookup finds all of it."""

        def is_there() -> bool:
            ticket = self._session.lookup([(0, prompt.keys)])
            found = ticket.poll(SECONDS) and set(ticket.states(0)) == {1}
            ticket.release()
            return found

        wait_until("what was stored is found", is_there, SECONDS)

    def _stream(self) -> tuple[int, ...]:
        device = self.model.device
        return (torch.cuda.current_stream(device).cuda_stream,) if device.type == "cuda" else ()


def _words(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    shape = SHAPES[options.shape]
    lengths = [int(part) for part in options.lengths.split(",")]
    longest = max(*lengths, PLACES * REQUEST_TOKENS)
    model = Model(shape, device, -(-longest // BLOCK_TOKENS))
    block_bytes = sum(each[0].numel() * each.element_size() for each in model.cache)
    # A prompt, or the requests that are known and those that are computed at each hit rate; and what is reserved.
    tokens = max(longest, (1 + math.ceil(sum(1 - rate for rate in HIT_RATES))) * options.requests * REQUEST_TOKENS)
    capacity = max(64 << 20, (tokens // BLOCK_TOKENS + 2 * STOCK_BLOCKS) * block_bytes * 5 // 4)
    with Daemon(-(-capacity // (16 << 20)) * (16 << 20)).start() as daemon, Cache(model, daemon) as cache:
        first = list(times(model, cache, lengths, options.repeats))
        rates = list(throughput(model, cache, options.requests))
    show(first, rates)
    if options.json:
        what = {"shape": options.shape, "device": described(device), "ttft": first, "throughput": rates}
        options.json.write_text(json.dumps(what, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(first, rates))
    return 0


def arguments() -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b" if has_gpu else "tiny")
    parser.add_argument("--device", default="cuda:0" if has_gpu else "cpu")
    lengths = "1024,2048,4096,8192,16384,32768,90112" if has_gpu else "256,512,1024,2048"
    parser.add_argument("--lengths", default=lengths, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--requests", type=int, default=32, help="requests at each hit rate")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def times(model: Model, cache: Cache, lengths: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """By length and prompt: computed, loaded, and how much of the latter the copies took, in ms."""
    blocks = range(len(model.cache[0]))
    for length in lengths:
        # Kernels and buffers of this length; the second time over a known prefix.
        warm = Prompt.draw(f"warm {length}", length, model.shape.vocabulary)
        for known in (0, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
            model.first_token(warm.tokens, blocks, known)
        for number in range(repeats):
            prompt = Prompt.draw(f"prompt {number} of {length}", length, model.shape.vocabulary)
            computed_ms, token = timed(lambda prompt=prompt: model.first_token(prompt.tokens, blocks, 0))
            cache.finish(cache.store(prompt, blocks))
            cache.wait_named(prompt)
            samples = [0, len(prompt.keys) // 2, len(prompt.keys) - 1]
            wanted = [[layer[block].clone() for block in samples] for layer in model.cache]
            for layer in model.cache:
                layer.zero_()
            start = time.perf_counter()
            known = cache.end_load(cache.begin_load(prompt, blocks))
            copied_ms = (time.perf_counter() - start) * 1e3
            assert known == len(prompt.keys) * BLOCK_TOKENS, f"only {known} tokens of {length} were loaded"
            found = [[layer[block] for block in samples] for layer in model.cache]
            assert all(
                torch.equal(one, other)
                for each, others in zip(wanted, found, strict=True)
                for one, other in zip(each, others, strict=True)
            ), "loaded KV differs from what was computed"
            rest_ms, again = timed(lambda prompt=prompt, known=known: model.first_token(prompt.tokens, blocks, known))
            row = {
                "tokens": length,
                "computed_ms": computed_ms,
                "loaded_ms": copied_ms + rest_ms,
                "copied_ms": copied_ms,
            }
            # Makes room: the pool has none for the prompts of all lengths.
            cache.daemon.purge(tenant="")
            # In another order of additions another token can come out, though the KV is right.
            yield {**row, "is_same_token": token == again}


def timed(run: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    token = run()
    return (time.perf_counter() - start) * 1e3, token


def throughput(model: Model, cache: Cache, requests: int) -> Iterator[dict[str, Any]]:
    """Tokens of prompts a second, by hit rate; first without a cache."""
    vocabulary = model.shape.vocabulary
    warm = [Prompt.draw(f"known {number}", REQUEST_TOKENS, vocabulary) for number in range(requests)]
    for prompt in warm:
        model.first_token(prompt.tokens, place(0), 0)
        cache.finish(cache.store(prompt, place(0)))
        cache.wait_named(prompt)
    for rate in (None, *HIT_RATES):
        hits = [int((number + 1) * (rate or 0)) > int(number * (rate or 0)) for number in range(requests)]
        fresh = [Prompt.draw(f"fresh {rate} {number}", REQUEST_TOKENS, vocabulary) for number in range(requests)]
        prompts = [known if is_hit else new for known, new, is_hit in zip(warm, fresh, hits, strict=True)]
        start = time.perf_counter()
        hit_tokens = serve(model, None if rate is None else cache, prompts)
        seconds = time.perf_counter() - start
        assert hit_tokens == sum(hits) * len(warm[0].keys) * BLOCK_TOKENS, "other requests hit than should"
        yield {"hit_rate": rate, "tokens_per_s": requests * REQUEST_TOKENS / seconds, "hit_tokens": hit_tokens}


def place(number: int) -> range:
    """The blocks of a request in the model's cache."""
    each = REQUEST_TOKENS // BLOCK_TOKENS
    start = number % PLACES * each
    return range(start, start + each)


def serve(model: Model, cache: Cache | None, prompts: Sequence[Prompt]) -> int:
    """One after another; returns how many tokens came from the pool."""
    stores: dict[int, list[int]] = {}
    loads: dict[int, Load | None] = {}
    hit_tokens = 0

    def begin(number: int) -> None:
        if cache is not None and number < len(prompts):
            # What is there may still be on its way to the pool.
            cache.finish(stores.pop(number % PLACES, []))
            loads[number] = cache.begin_load(prompts[number], place(number))

    begin(0)
    for number, prompt in enumerate(prompts):
        known = cache.end_load(loads.pop(number)) if cache is not None else 0
        begin(number + 1)
        model.first_token(prompt.tokens, place(number), known)
        hit_tokens += known
        if cache is not None and known == 0:
            stores[number % PLACES] = cache.store(prompt, place(number))
    if cache is not None:
        for jobs in stores.values():
            cache.finish(jobs)
    return hit_tokens


def medians(first: Sequence[dict[str, Any]], what: str) -> list[tuple[int, float]]:
    lengths = list(dict.fromkeys(row["tokens"] for row in first))
    return [(each, statistics.median(row[what] for row in first if row["tokens"] == each)) for each in lengths]


def show(first: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]]) -> None:
    print(
        "median TTFT in ms\n\n| tokens | computed | loaded | of which copies | times as fast |\n|---|---|---|---|---|"
    )
    columns = [medians(first, what) for what in ("computed_ms", "loaded_ms", "copied_ms")]
    for (tokens, computed), (_, loaded), (_, copied) in zip(*columns, strict=True):
        print(f"| {tokens:,} | {computed:.1f} | {loaded:.1f} | {copied:.1f} | {computed / loaded:.1f} |")
    print(f"\nrequests of {REQUEST_TOKENS} tokens, one after another\n\n| hit rate | tokens/s |\n|---|---|")
    for row in rates:
        name = "no cache" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        print(f"| {name} | {row['tokens_per_s']:,.0f} |")


def plot(first: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]]) -> str:
    lines = [
        chart.Line(name, style, tuple(medians(first, what)))
        for style, (name, what) in enumerate((("computed", "computed_ms"), ("loaded from the pool", "loaded_ms")))
    ]
    x = chart.Axis("input tokens", max(row["tokens"] for row in first))

    def panel(title: str, shown: Sequence[chart.Line]) -> chart.Panel:
        highest = max(y for line in shown for _, y in line.points)
        return chart.Panel(title, x, chart.Axis("median TTFT, ms", highest), tuple(shown))

    by_rate = tuple((row["hit_rate"], row["tokens_per_s"]) for row in rates if row["hit_rate"] is not None)
    without = next(row["tokens_per_s"] for row in rates if row["hit_rate"] is None)
    served = (chart.Line("with the pool", 1, by_rate), chart.Line("no cache", 2, ((0.0, without), (1.0, without))))
    most = max(row["tokens_per_s"] for row in rates)
    title = f"requests of {REQUEST_TOKENS} tokens"
    last = chart.Panel(title, chart.Axis("hit rate", 1.0, is_share=True), chart.Axis("tokens/s", most), served)
    return chart.draw(
        "prefill computed and loaded", [[panel("computed and loaded", lines), panel("loaded", lines[1:]), last]]
    )


if __name__ == "__main__":
    sys.exit(main())
