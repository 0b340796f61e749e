"""The worker's side: passes the scheduler's jobs to the copy engine and collects their results.

Invariants: every job is reported exactly once, and to vLLM always as a success, which it asserts. A failed store
has no birth records, so the daemon never names its blocks. A failed load is reported once: by its request in
`take_failed_loads` or, where its request does not wait for it, by its blocks in `take_failed_blocks`. A flush
returns only when its copies have ended, since the blocks are overwritten next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from forebay.vllm.guard import Breaker, guarded, logger, nothing
from forebay.vllm.session import AbsentEngine, CopyEngine, flush, open_engine
from forebay.vllm.settings import bounded_engine_id
from forebay.vllm.slots import PoolSlots

if TYPE_CHECKING:
    import torch

    from forebay.vllm.spec import ForebaySpec


MOST_TROUBLES = 8  # that one worker logs


class ForebayWorker(OffloadingWorker):
    """One rank's copies."""

    def __init__(
        self, engine: CopyEngine, kv_caches: CanonicalKVCaches, spec: ForebaySpec, device: torch.device | None = None
    ):
        self.breaker = Breaker()
        self._device = device  # whose stream the copies follow; None of the host
        self._told: set[str] = set()  # what hindered the copies of a device
        self._engine = engine
        self._kv_caches = kv_caches  # the engine copies from and to this memory
        self._group_ids = [group.group_id for group in spec.config.groups]
        self._blocks_per_chunk = spec.blocks_per_chunk
        self._loads: dict[int, str] = {}  # job to request
        self._refused: list[int] = []  # jobs that never reached the engine
        self._failed_loads: set[str] = set()
        self._expedited: dict[int, list[int]] = {}  # job to the blocks that its step needs
        self._failed_blocks: set[int] = set()

    @classmethod
    def open(cls, spec: ForebaySpec, kv_caches: CanonicalKVCaches) -> ForebayWorker:
        """Attaches in the background. Returns at once."""
        devices = {tensor.tensor.device for tensor in kv_caches.tensors}
        if reason := _obstacle(devices, spec):
            logger.warning("forebay stores nothing in this engine: %s", reason)
            return cls(AbsentEngine(), kv_caches, spec)
        device = next(iter(devices))
        groups = [
            (group.group_id, spec.replicated_layout, [(ref.tensor_idx, ref.page_size_bytes) for ref in refs])
            for group, refs in zip(spec.config.groups, kv_caches.group_data_refs, strict=True)
        ]
        parallel = spec.config.parallel
        engine = open_engine(
            spec.settings,
            bounded_engine_id(spec.config.engine_id),
            spec.incarnation,
            parallel.rank,
            parallel.world_size,
            [_extent(tensor.tensor, tensor.page_size_bytes) for tensor in kv_caches.tensors],
            groups,
            spec.blocks_per_chunk,
            device=device.index if device.type == "cuda" else None,
            stages=not spec.may_sleep,
        )
        return cls(engine, kv_caches, spec, device if device.type == "cuda" else None)

    @guarded(lambda self, job_id, *_: self._refuse(job_id))
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, PoolSlots)
        self._engine.submit_store(job_id, dst_spec.pool, list(self._groups(dst_spec, src_spec)), *self._stream())
        return True

    @guarded(lambda self, job_id, *_, **__: self._refuse(job_id))
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        assert isinstance(src_spec, PoolSlots)
        self._loads[job_id] = src_spec.request
        if expedited:
            self._expedited[job_id] = dst_spec.block_ids.tolist()
        if not src_spec.groups:
            return self._refuse(job_id)
        self._engine.submit_load(job_id, src_spec.pool, list(self._groups(src_spec, dst_spec)), *self._stream())
        return True

    @guarded(lambda *_: [])
    def get_finished(self) -> list[TransferResult]:
        refused, self._refused = self._refused, []
        self._tell_trouble()
        finished = [(job, False, 0, 0.0) for job in refused] + self._engine.finished()
        for job, is_copied, _, _ in finished:
            request, blocks = self._loads.pop(job, None), self._expedited.pop(job, None)
            if request is None or is_copied:
                continue
            if blocks is None:
                self._failed_loads.add(request)
            else:
                self._failed_blocks.update(blocks)
        return [TransferResult(job, True, size, seconds) for job, _, size, seconds in finished]

    def take_failed_loads(self) -> set[str]:
        """Requests whose load failed since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that a load within its step did not fill, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(nothing)
    def wait(self, job_ids: set[int]) -> None:
        flush(self._engine, job_ids)

    @guarded(nothing)
    def shutdown(self) -> None:
        self._engine.shutdown()

    def _refuse(self, job_id: int) -> bool:
        self._refused.append(job_id)
        return True

    def _stream(self) -> tuple[int, ...]:
        """The stream on which the engine's thread has queued what comes before a copy: what has computed the blocks of a
        store, and what reads or zeroes those of a load."""
        if self._device is None:
            return ()
        import torch

        return (torch.cuda.current_stream(self._device).cuda_stream,)

    def _tell_trouble(self) -> None:
        """Logs what hinders the copies of a device: each reason once, since a lost device comes after a slow one."""
        if self._device is None or len(self._told) == MOST_TROUBLES:
            return
        trouble = self._engine.report()["trouble"]
        if trouble is not None and trouble not in self._told:
            self._told.add(trouble)
            logger.warning("forebay copies slowly or not at all: %s", trouble)

    def _groups(self, slots: PoolSlots, blocks: GPULoadStoreSpec) -> Iterator[tuple[int, bytes, bytes, bytes, int]]:
        """The job by group: slots, generations, block ids, and number of sub-blocks missing at the start of the
        first chunk."""
        by_group = {group: (some, generations) for group, some, generations in slots.groups}
        start = 0
        for group, size, index in zip(self._group_ids, blocks.group_sizes, blocks.block_indices, strict=True):
            ids = blocks.block_ids[start : start + size]
            start += size
            if not size:
                continue
            some, generations = by_group[group]
            skipped = index % self._blocks_per_chunk
            chunks = -(-(skipped + size) // self._blocks_per_chunk)
            assert chunks * 4 == len(some), f"{size} blocks of group {group} do not fit {len(some) // 4} slots"
            yield group, some, generations, ids.tobytes(), skipped


def _obstacle(devices: set[torch.device], spec: ForebaySpec) -> str | None:
    """Why tensors of these devices are not copied."""
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return None
    if kinds != {"cuda"} or len(devices) != 1:
        return f"it cannot copy from {', '.join(sorted(map(str, devices))) or 'no tensors'}"
    if spec.settings.gpu_copies:
        logger.warning("forebay copies from and to a GPU, which was tested on a fake driver and never run on a GPU")
        return None
    return (
        "its copies from GPUs were never run on a GPU; "
        'hint: use ForebayTieringConnector, or try them with `"gpu_copies": true` in `kv_connector_extra_config`'
    )


def _extent(tensor: torch.Tensor, page_bytes: int) -> tuple[int, int, int, int]:
    """(address, rows, row stride in bytes, page bytes)"""
    return tensor.data_ptr(), tensor.shape[0], tensor.stride(0) * tensor.element_size(), page_bytes
