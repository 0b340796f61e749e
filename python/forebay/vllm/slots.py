"""The message from the scheduler to the workers about one job: which slots of which pool."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True)
class PoolSlots(LoadStoreSpec):
    """Slots in the order of the job's keys. Pickled to every worker each step, hence plain bytes.

    A load without groups is impossible; the worker fails it, and the request is computed instead.
    """

    serial: int  # of the transfer, unique in the scheduler's process
    request: str
    pool: bytes
    groups: tuple[tuple[int, bytes, bytes], ...]  # (group, slots, generations), little-endian u32
