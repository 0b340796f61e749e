"""What a backend writes into a page is in the namespace: two that order or scale the bytes otherwise never share.

The layers and the backends are vLLM's own, made as its workers make them, without a model around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forebay.vllm.probe import MAX_FIELD, Weight, pages_of, probe, weight_of
from harness import Shape, vllm_config
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 6, 32, 4, 32
Write = Callable[..., None]


@pytest.fixture
def worker() -> Iterator[Any]:
    """One rank with two layers of attention, each with a cache in the layout of vLLM's CPU backend."""
    config = vllm_config(Shape(block_size=BLOCK_SIZE))
    with set_current_vllm_config(config):
        layers = [
            Attention(HEADS, HEAD_SIZE, 1.0, num_kv_heads=HEADS, cache_config=config.cache_config, prefix=f"{at}.attn")
            for at in range(2)
        ]
        for layer in layers:
            layer.isa = "vec"
            layer.kv_cache = torch.full((BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), 7.0)
        groups = [SimpleNamespace(layer_names=[layer.layer_name for layer in layers])]
        cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
        yield SimpleNamespace(model_runner=SimpleNamespace(vllm_config=config, kv_cache_config=cache), layers=layers)


def patched(monkeypatch: pytest.MonkeyPatch, then: Callable[[torch.Tensor], object]) -> None:
    """vLLM's CPU backend, with something done to the cache after each write."""
    write: Write = CPUAttentionBackendImpl.do_kv_cache_update

    def other(self: Any, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slots: Any) -> None:
        write(self, layer, key, value, kv_cache, slots)
        then(kv_cache)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", other)


def test_the_same_backend_twice_says_the_same(worker: Any) -> None:
    first = probe(worker)
    assert "CPUAttentionBackendImpl:" in first and "unprobed" not in first and "+" not in first
    assert probe(worker) == first


@pytest.mark.parametrize(
    "then",
    [
        lambda cache: cache.copy_(cache.flip(-1).clone()),
        lambda cache: _swap_tokens(cache),
        lambda cache: cache.copy_(cache.to(torch.bfloat16).float()),
    ],
    ids=["bytes in another order", "two tokens swapped", "rounded"],
)
def test_a_backend_that_writes_other_bytes_is_another_namespace(
    then: Callable[[torch.Tensor], object], worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = probe(worker)
    patched(monkeypatch, then)
    other = probe(worker)
    assert other != usual and "unprobed" not in other


def _swap_tokens(cache: torch.Tensor) -> None:
    cache[:, :, [0, 1]] = cache[:, :, [1, 0]].clone()


def test_another_order_of_dimensions_is_another_namespace(worker: Any) -> None:
    usual = probe(worker)
    for layer in worker.layers:
        layer.kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    assert probe(worker) != usual


def test_more_memory_for_kv_is_the_same_namespace(worker: Any) -> None:
    usual = probe(worker)
    for layer in worker.layers:
        layer.kv_cache = torch.zeros(2 * BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    worker.model_runner.kv_cache_config.num_blocks = 2 * BLOCKS
    assert probe(worker) == usual


def test_the_live_cache_is_not_touched(worker: Any) -> None:
    probe(worker)
    assert all(bool((layer.kv_cache == 7.0).all()) for layer in worker.layers)


def test_layers_that_differ_are_all_told(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = probe(worker)
    worker.layers[1].kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.float64)
    both = probe(worker)
    assert usual in both.split("+") and len(both.split("+")) == 2


def _fails(cache: torch.Tensor) -> None:
    raise RuntimeError("boom")


def test_a_backend_that_cannot_be_driven_goes_by_its_name_and_version(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, _fails)
    told = probe(worker)
    assert told.startswith("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl:unprobed:0.")
    assert told.endswith(":RuntimeError")


def test_a_backend_that_writes_nothing_is_not_called_probed(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda cache: cache.zero_())
    assert ":unprobed:" in probe(worker)


def test_states_that_are_no_pages_go_by_name(worker: Any) -> None:
    worker.layers[1].kv_cache = [torch.zeros(3), torch.zeros(3)]
    assert ":unprobed:" in probe(worker)


def test_all_ranks_are_told_within_what_the_daemon_takes() -> None:
    def engine(*told: str) -> Any:
        return SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda function: list(told)))

    assert pages_of(engine("a", "a")) == "a"
    assert pages_of(engine("a", "b")) == "a|b" != pages_of(engine("b", "a"))
    many = [pages_of(engine(*["vllm.some.backend:0123456789abcdef"] * 64, last)) for last in "xy"]
    assert many[0] != many[1] and all(len(told) < MAX_FIELD + 20 for told in many)


def test_workers_that_cannot_be_asked_do_not_hurt_the_engine() -> None:
    broken = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda function: 1 / 0))
    assert ":unprobed:" in pages_of(broken)


def test_weights_that_not_every_worker_can_tell_whole_are_not_told() -> None:
    def core(*told: Weight | None) -> Any:
        return SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda function: list(told)))

    one, other = Weight("one", is_whole=True), Weight("other", is_whole=True)
    assert weight_of(core(one, other)) == weight_of(core(one, other)) is not None
    assert len({weight_of(core(*told)) for told in [(one,), (other,), (one, other), (other, one)]}) == 4
    broken = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda function: 1 / 0))
    for blind in (None, broken, core(), core(one, None), core(one, Weight("packed", is_whole=False))):
        assert weight_of(blind) is None
