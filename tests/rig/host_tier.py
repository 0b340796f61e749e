"""vLLM's own tiering with the CPU in the place of the GPU.

Holds true: all of it is vLLM's, the shared region included, but for the one class that vLLM has for CUDA and XPU alone: the
worker that copies between the device's memory and a row of the host tier. So `spec_name` and `spec_module_path` bring it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

NAMED = {"spec_name": "HostSpec", "spec_module_path": "rig.host_tier"}


class HostSpec(TieringOffloadingSpec):
    """What `TieringOffloadingSpec` is on a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, self.blocks_per_chunk, region)


class HostWorker(OffloadingWorker):
    """Copies as vLLM's CUDA worker does, at once and by the processor."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion):
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._sizes = [each.page_size_bytes for each in kv_caches.tensors]
        self._device = [each.tensor.view(-1, each.page_size_bytes).numpy() for each in kv_caches.tensors]
        self._host = [region.create_next_worker_view(size * blocks_per_chunk).numpy() for size in self._sizes]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for tensor, block, chunk, span in self._pages(src_spec, dst_spec):
            self._host[tensor][chunk, span] = self._device[tensor][block]
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, *_: Any) -> bool:
        for tensor, block, chunk, span in self._pages(dst_spec, src_spec):
            self._device[tensor][block] = self._host[tensor][chunk, span]
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _pages(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Iterator[tuple[int, int, int, slice]]:
        """(tensor, block on the device, chunk, its bytes in the tensor's part of the chunk)"""
        assert isinstance(host, BlockIDsLoadStoreSpec)
        at = chunk_at = 0
        for size, index, refs in zip(device.group_sizes, device.block_indices, self._refs, strict=True):
            skipped = index % self._per_chunk
            for nth, block in enumerate(device.block_ids[at : at + size], skipped):
                for ref in refs:
                    start = nth % self._per_chunk * self._sizes[ref.tensor_idx]
                    span = slice(start, start + self._sizes[ref.tensor_idx])
                    yield ref.tensor_idx, block, host.block_ids[chunk_at + nth // self._per_chunk], span
            at += size
            chunk_at += -(-(skipped + size) // self._per_chunk) if size else 0
