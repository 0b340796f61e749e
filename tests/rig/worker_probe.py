"""What a test may ask of a worker process: mixed by vLLM into its worker class, in every rank.

Holds true: addresses come from vLLM's table of KV tensors (offset, layer stride and block stride in bytes of one
storage), so that they hold for every model and layout; nothing here runs unless a test calls it.
"""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import numpy as np
import torch

# Finite, so that attention over it stays finite and the harm shows as other tokens and not as a crash.
POISON = 3.0


class WorkerProbe:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    rank: int
    _probe_agent: Any

    def probe_pid(self) -> int:
        return os.getpid()

    def probe_poison(self) -> None:
        for storage in self._probe_storages().values():
            torch.tensor([], dtype=torch.float32).set_(storage).fill_(POISON)

    @torch.no_grad()
    def probe_scale_embeddings(self, factor: float) -> None:
        """Other weights in place: those of the linear layers cannot be written on a CPU, where kernels keep them."""
        embeddings = self.model_runner.get_model().get_parameter("model.embed_tokens.weight")
        embeddings.data.mul_(factor)

    def probe_connect(self, is_on: bool) -> None:
        """Takes the connector out of the worker, or puts it back."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        if kv_transfer_state._KV_CONNECTOR_AGENT is not None:
            self._probe_agent = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self._probe_agent if is_on else None

    def probe_page_digests(self, blocks: list[list[int]]) -> list[list[str | None]]:
        """Per group and block, a digest of the block's bytes in all layers of the group; None for the null block."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return [
            [self._probe_digest(group.layer_names, block) if block else None for block in ids]
            for group, ids in zip(groups, blocks, strict=True)
        ]

    def probe_stop_at(self, call: str, nth: int, when: str, rank: int) -> None:
        """Arms the trap of `Engine.stop_at` in the worker of that rank."""
        if rank != self.rank:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        worker = group.connector_worker.worker
        method = f"submit_{call}"
        # On the class lies what a trap of before replaced on the instance.
        original = getattr(type(worker), method).__get__(worker)
        left = nth

        def trapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and when == "before":
                os.kill(os.getpid(), signal.SIGSTOP)
            result = original(*args, **kwargs)
            if left == 0 and when == "after":
                os.kill(os.getpid(), signal.SIGSTOP)
            return result

        setattr(worker, method, trapped)

    def _probe_digest(self, layers: list[str], block: int) -> str:
        digest = hashlib.sha256()
        for layer in layers:
            digest.update(self._probe_page(layer, block).tobytes())
        return digest.hexdigest()[:32]

    def _probe_page(self, layer: str, block: int) -> np.ndarray:
        config = self.model_runner.kv_cache_config
        table = next(tensor for tensor in config.kv_cache_tensors if layer in tensor.layers)
        spec = next(group.kv_cache_spec for group in config.kv_cache_groups if layer in group.layer_names)
        start = table.offset + table.layers.index(layer) * table.layer_stride + block * table.block_stride
        storage = self._probe_storage(layer)
        whole = torch.tensor([], dtype=torch.uint8).set_(storage)
        page: np.ndarray = whole[start : start + spec.page_size_bytes].numpy()
        return page

    def _probe_storage(self, layer: str) -> torch.UntypedStorage:
        context = self.model_runner.vllm_config.compilation_config.static_forward_context
        storage: torch.UntypedStorage = context[layer].kv_cache.untyped_storage()
        return storage

    def _probe_storages(self) -> dict[int, torch.UntypedStorage]:
        layers = [layer for group in self.model_runner.kv_cache_config.kv_cache_groups for layer in group.layer_names]
        storages = [self._probe_storage(layer) for layer in layers]
        return {storage.data_ptr(): storage for storage in storages}
