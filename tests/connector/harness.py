"""A real vLLM scheduler and real connectors around a model that writes what it should have computed.

Holds true: the "KV" of a block is a function of the layer, the rank and all tokens and images up to the block's end, and
the next token is a function of all tokens. Each step first checks every block that a request relies on, whoever put it there, so that a
wrong, stale, torn or missing load fails the test that caused it. Freed blocks keep their bytes; `poison` overwrites them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from fake import FakeDaemon, FakeEngine, FakeSession
from forebay.vllm import register
from forebay.vllm import session as sessions
from forebay.vllm.connector import ForebayConnector
from rig import models
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

register()

MAX_STEPS = 2000
PATIENT = {"socket": "/nowhere", "lookup_deadline_ms": 60_000, "promotion_lag": 1e6}
HEADS, HEAD_SIZE = 4, 8


@dataclass
class Shape:
    """What the engine looks like."""

    groups: str = "full"  # or "hybrid", or "mixed": a window group whose blocks are twice as long
    blocks: int = 64
    block_size: int = 16
    window: int = 40
    ranks: int = 1
    prefix_caching: bool = True
    max_tokens_per_step: int = 128
    max_requests: int = 16
    extra: dict[str, Any] = field(default_factory=dict)
    hash_algorithm: Literal["sha256", "xxhash"] = "sha256"
    engine_id: str = "engine"
    # What stands beside `ForebayConnector` below a `MultiConnector`, before and behind it; and what is said at the top.
    before: tuple[dict[str, Any], ...] = ()
    behind: tuple[dict[str, Any], ...] = ()
    top: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    """Two layers a group, all groups over the same bytes, as vLLM lays them out."""
    full = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=HEADS // shape.ranks, head_size=HEAD_SIZE, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["full.0", "full.1"], full)]
    if shape.groups != "full":
        longer = shape.groups == "mixed"
        window = SlidingWindowSpec(
            block_size=shape.block_size * (2 if longer else 1),
            num_kv_heads=HEADS // shape.ranks // (2 if longer else 1),
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            sliding_window=shape.window,
        )
        groups.append(KVCacheGroupSpec(["window.0", "window.1"], window))
    page = full.page_size_bytes
    size = page * shape.blocks * 2
    tensors = [KVCacheTensor(size, group.layer_names, page * shape.blocks, page) for group in groups]
    return KVCacheConfig(shape.blocks, tensors, groups, kv_cache_layout="LBNHC")


def vllm_config(shape: Shape, rank: int = 0) -> VllmConfig:
    # Nothing ends a wait by accident, however slow the machine; tests of deadlines set their own.
    forebay = {
        "kv_connector": "ForebayConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": PATIENT | shape.extra,
    }
    top = forebay
    if shape.before or shape.behind:
        connectors = [*shape.before, forebay, *shape.behind]
        top = forebay | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    transfer = KVTransferConfig(**top | {"engine_id": shape.engine_id} | shape.top)
    parallel = ParallelConfig(tensor_parallel_size=shape.ranks, distributed_executor_backend="mp")
    parallel.rank = rank
    config = VllmConfig(
        model_config=ModelConfig(str(models.directory(models.LLAMA)), dtype="float32", max_model_len=2048),
        cache_config=CacheConfig(
            block_size=shape.block_size,
            enable_prefix_caching=shape.prefix_caching,
            prefix_caching_hash_algo=shape.hash_algorithm,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_requests,
            max_num_batched_tokens=shape.max_tokens_per_step,
            max_model_len=2048,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        parallel_config=parallel,
        kv_transfer_config=transfer,
    )
    config.cache_config.num_gpu_blocks = shape.blocks
    config.lora_config = LoRAConfig(max_loras=4) if shape.adapters else None
    return config


class Worker:
    """One rank: its KV memory and its half of the connector."""

    def __init__(self, shape: Shape, rank: int):
        self.rank = rank
        config = kv_cache_config(shape)
        self.pages: dict[str, torch.Tensor] = {}
        page = config.kv_cache_tensors[0].block_stride
        self.memory = torch.zeros(2 * shape.blocks * page, dtype=torch.int8)
        for table in config.kv_cache_tensors:
            for at, layer in enumerate(table.layers):
                start = at * table.layer_stride
                self.pages[layer] = self.memory[start : start + shape.blocks * page].view(shape.blocks, page)
        self.connector = KVConnectorFactory.create_connector(vllm_config(shape, rank), KVConnectorRole.WORKER, config)
        specs = {layer: group.kv_cache_spec for group in config.kv_cache_groups for layer in group.layer_names}
        views = {}
        for layer, pages in self.pages.items():
            spec = specs[layer]
            typed = pages.view(torch.float32)
            views[layer] = typed.view(shape.blocks, spec.block_size, spec.num_heads, -1).transpose(1, 2)
        self.connector.register_kv_caches(views)

    def fill(self, layer: str, block: int, content: bytes) -> None:
        self.pages[layer][block] = torch.frombuffer(bytearray(content), dtype=torch.int8)

    def read(self, layer: str, block: int) -> bytes:
        return bytes(self.pages[layer][block].numpy().tobytes())

    def poison(self) -> None:
        self.memory.fill_(0x55)

    @property
    def forebay(self) -> ForebayConnector:
        return _forebay(self.connector)

    @property
    def engine(self) -> FakeEngine:
        assert self.forebay.connector_worker is not None
        engine = self.forebay.connector_worker.worker._engine  # type: ignore[union-attr]
        assert isinstance(engine, FakeEngine)
        return engine


class Engine:
    """A scheduler, its workers, and the loop between them."""

    max_steps = MAX_STEPS

    def __init__(self, daemon: FakeDaemon, monkeypatch: Any, shape: Shape | None = None):
        self.shape = shape = shape or Shape()
        self.daemon = daemon
        _use_fakes(daemon, monkeypatch)
        init_none_hash(get_hash_fn_by_name(shape.hash_algorithm))
        self.config = vllm_config(shape)
        self.kv_config = kv_cache_config(shape)
        block_size, hash_size = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self._hasher = get_request_block_hasher(hash_size, get_hash_fn_by_name(shape.hash_algorithm))
        self.scheduler = Scheduler(
            self.config,
            self.kv_config,
            StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        self.workers = [Worker(shape, rank) for rank in range(shape.ranks)]
        self._aggregator = KVOutputAggregator(shape.ranks)
        self.hits: dict[str, int] = {}
        self.steps = 0
        self.preemptions = 0
        self.weights = 0  # which of them it computes with
        self.external_tokens = 0  # that vLLM counts as hits of its connector
        self.stats: dict[str, Any] = {}

    @property
    def connector(self) -> ForebayConnector:
        return _forebay(self.scheduler.connector)

    @property
    def session(self) -> FakeSession:
        session = self.connector.manager._session
        assert isinstance(session, FakeSession)
        return session

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
        extra, adapter = more.pop("kv_transfer_params", None), more.pop("lora_request", None)
        images = more.pop("images", None)
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": extra} if extra else None, **more
        )
        request = Request(
            name,
            list(tokens),
            params,
            None,
            block_hasher=self._hasher,
            lora_request=adapter,
            mm_features=images,
        )
        self.scheduler.add_request(request)
        return request

    def run(self, *requests: Request) -> dict[str, list[int]]:
        """Steps until these requests are done and nothing is under way any more; their output tokens."""
        while any(not request.is_finished() for request in requests) or self.scheduler.has_requests():
            self.step()
        return {request.request_id: list(request.output_token_ids) for request in requests}

    def generate(self, name: str, tokens: Sequence[int], max_tokens: int = 4, **more: Any) -> list[int]:
        return self.run(self.add(name, tokens, max_tokens, **more))[name]

    def step(self) -> None:
        self.steps += 1
        assert self.steps < self.max_steps, "the engine does not come to an end"
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        outputs: list[ModelRunnerOutput | None] = [self._work(worker, output) for worker in self.workers]
        whole = self._aggregator.aggregate(outputs)
        assert whole is not None
        for core in self.scheduler.update_from_output(output, whole).values():
            if core.scheduler_stats and (counted := core.scheduler_stats.connector_prefix_cache_stats):
                self.external_tokens += counted.hits + counted.preempted_hits
            if core.scheduler_stats and core.scheduler_stats.kv_connector_stats:
                self._count(core.scheduler_stats.kv_connector_stats)

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Empties the engine's own prefix cache and overwrites its memory: only Forebay can hit now, and only truly."""
        assert self.scheduler.reset_prefix_cache()
        for worker in self.workers:
            worker.poison()

    def assert_nothing_is_held(self) -> None:
        manager = self.connector.manager
        assert not (manager._requests or manager._leased or manager._promoting or manager._loads or manager._jobs)
        assert len(manager._stores) == 0
        assert not manager._waiting and not self.session.waiting
        assert self.daemon.leased == 0
        assert self.daemon.reserved == 0

    def assert_no_faults(self) -> None:
        for connector in [self.connector, *(worker.forebay for worker in self.workers)]:
            assert connector.breaker.faults == 0 and not connector.breaker.is_off

    def _work(self, worker: Worker, output: Any) -> ModelRunnerOutput:
        connector = worker.connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        tokens = self._forward(worker, output)
        connector.start_load_kv(None)  # type: ignore[arg-type]
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[tokens[name] for name in names],
            kv_connector_output=kv_output,
        )

    def _forward(self, worker: Worker, output: Any) -> dict[str, list[int]]:
        """Writes what each request computes, then checks all it relies on, as attention reads after the writes."""
        for is_check in (False, True):
            for name, scheduled in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                end = request.num_computed_tokens  # `schedule` has already advanced it
                start = 0 if is_check else end - scheduled
                for layer, block, content in self._blocks(worker, request, start, end, only_seen=is_check):
                    if not is_check:
                        worker.fill(layer, block, content)
                        continue
                    found = worker.read(layer, block)
                    assert found == content, f"{name} relies on block {block} of {layer}, which holds {found[:8].hex()}"
        requests = {name: self.scheduler.requests[name] for name in output.num_scheduled_tokens}
        return {
            name: [_next_token(request.all_token_ids)] if request.num_computed_tokens >= request.num_tokens else []
            for name, request in requests.items()
        }

    def _blocks(
        self, worker: Worker, request: Request, start: int, end: int, *, only_seen: bool
    ) -> Iterable[tuple[str, int, bytes]]:
        """(layer, block, content) of the whole blocks that end in (start, end], or those that the next token sees."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = list(request.all_token_ids)
        for group, table in zip(self.kv_config.kv_cache_groups, tables, strict=True):
            size = group.kv_cache_spec.block_size
            window = getattr(group.kv_cache_spec, "sliding_window", None)
            for at, block in enumerate(table):
                block_end = (at + 1) * size
                is_seen = window is None or block_end > end - window
                if block == 0 or not start < block_end <= end or (only_seen and not is_seen):
                    continue
                seen = [*tokens[:block_end], *_pictures(request, block_end), *self._weights()]
                for layer in group.layer_names:
                    yield layer, block, _content(layer, worker, seen, worker.pages[layer].shape[1])

    def _weights(self) -> Iterable[object]:
        return [("weights", self.weights)] if self.weights else []

    def _count(self, stats: dict[str, Any]) -> None:
        if "data" not in stats:  # of a `MultiConnector`, by the name of the child
            stats = stats.get("ForebayConnector", {"data": {}})
        for name, by_label in stats["data"].items():
            for value in by_label.values():
                old = self.stats.get(name)
                is_sum = stats["types"][name] == "counter" or isinstance(value, list)
                self.stats[name] = old + value if old is not None and is_sum else value


def _forebay(connector: KVConnectorBase_V1 | None) -> ForebayConnector:
    """The connector, or the one of ours below it."""
    children = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
    (ours,) = (child for child in children if isinstance(child, ForebayConnector))
    return ours


def left_a_window(engine: Engine) -> Request:
    """A request that runs, and whose window has left blocks that hold other requests' KV by now. For an engine of 44 blocks."""
    runs = engine.add("runs", prompt(1, 150), max_tokens=60)
    while not runs.output_token_ids:
        engine.step()
    for at in range(3):
        other = engine.add(f"other-{at}", prompt(2 + at, 100), max_tokens=3)
        while not other.is_finished():
            engine.step()
    assert not runs.is_finished() and not engine.preemptions
    return runs


def prompt(seed: int, length: int) -> list[int]:
    digest = hashlib.sha256(str(seed).encode()).digest()
    return [16 + (digest[at % 32] + 31 * at * (seed + 1)) % 2000 for at in range(length)]


def _use_fakes(daemon: FakeDaemon, monkeypatch: Any) -> None:
    from forebay.vllm import connector, worker

    def open_session(settings: Any, engine_id: str, incarnation: bytes, ranks: int, stock_blocks: int) -> FakeSession:
        return FakeSession(daemon, engine_id, ranks, stock_blocks)

    def open_engine(
        settings: Any,
        engine_id: str,
        incarnation: bytes,
        rank: int,
        ranks: int,
        tensors: Any,
        groups: Any,
        per_chunk: int,
        **_: Any,
    ) -> FakeEngine:
        return FakeEngine(daemon, engine_id, rank, tensors, groups, per_chunk)

    monkeypatch.setattr(connector, "open_session", open_session)
    monkeypatch.setattr(worker, "open_engine", open_engine)
    monkeypatch.setattr(sessions, "open_session", open_session)


def _pictures(request: Request, end: int) -> Iterable[object]:
    """What the images before `end` show, whatever vLLM calls them."""
    return (feature.data for feature in request.mm_features if feature.mm_position.offset < end)


def _content(layer: str, worker: Worker, seen: Sequence[object], size: int) -> bytes:
    digest = hashlib.sha256(f"{layer}/{worker.rank}/{list(seen)}".encode()).digest()
    return (digest * (size // 32 + 1))[:size]


def _next_token(tokens: Sequence[int]) -> int:
    return 16 + int.from_bytes(hashlib.sha256(str(list(tokens)).encode()).digest()[:4], "big") % 2000
