"""Images whose names say nothing of what they show are never found again as another image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake import FakeDaemon
from harness import Engine, Shape, prompt
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

# As vLLM's renderer names them when it hashes no images: by a counter that starts anew with the process.
COUNTED = "renderer0-mm-1-image-0"
TOKENS = prompt(1, 80)


def engine_for_images(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, *, prefix_caching: bool, media: MultiModalConfig | None = None
) -> Engine:
    engine = Engine(daemon, monkeypatch, Shape(prefix_caching=prefix_caching))
    engine.config.model_config.multimodal_config = media
    # The model of these tests takes no images: the scheduler is given room for them.
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    return engine


def image(name: str, shows: Any) -> list[MultiModalFeatureSpec]:
    position = PlaceholderRange(offset=4, length=40)
    return [MultiModalFeatureSpec(data=shows, modality="image", identifier=name, mm_position=position)]


@pytest.mark.parametrize("media", [None, MultiModalConfig(mm_processor_cache_gb=0)])
def test_images_that_are_named_by_a_counter_are_left_out(
    media: MultiModalConfig | None, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine_for_images(daemon, monkeypatch, prefix_caching=False, media=media)
    first.generate("cat", TOKENS, images=image(COUNTED, "a cat"))
    # The harness fails where this one relies on what the cat left.
    restarted = engine_for_images(daemon, monkeypatch, prefix_caching=False, media=media)
    restarted.generate("dog", TOKENS, images=image(COUNTED, "a dog"))
    assert restarted.hits["dog"] == 0
    # Prompts without images go on as ever.
    restarted.generate("text", TOKENS)
    restarted.generate("text again", TOKENS)
    assert restarted.hits["text again"] == 79
    restarted.assert_nothing_is_held()


@pytest.mark.parametrize("is_static", [False, True])
def test_images_are_left_out_where_the_encoder_scales_by_those_before(
    is_static: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scales.json").write_text("{}")
    path = str(tmp_path / "scales.json") if is_static else None
    media = MultiModalConfig(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=path)
    engine = engine_for_images(daemon, monkeypatch, prefix_caching=True, media=media)
    for name in ("cold", "warm"):
        engine.generate(name, TOKENS, images=image("c" * 64, "a cat"))
        engine.forget()
    assert engine.hits["warm"] == (79 if is_static else 0)
    for name in ("text", "text again"):
        engine.generate(name, TOKENS)
        engine.forget()
    assert engine.hits["text again"] == 79
    engine.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("prefix_caching", "media"), [(True, MultiModalConfig(mm_processor_cache_gb=0)), (False, MultiModalConfig())]
)
def test_images_that_are_named_by_their_content_are_found(
    prefix_caching: bool, media: MultiModalConfig, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine_for_images(daemon, monkeypatch, prefix_caching=prefix_caching, media=media)
    first.generate("cat", TOKENS, images=image("c" * 64, "a cat"))
    restarted = engine_for_images(daemon, monkeypatch, prefix_caching=prefix_caching, media=media)
    restarted.generate("same", TOKENS, images=image("c" * 64, "a cat"))
    restarted.generate("dog", TOKENS, images=image("d" * 64, "a dog"))
    assert restarted.hits == {"same": 79, "dog": 0}


@pytest.mark.parametrize(
    "more",
    [
        # vLLM hashes the token 0 for each embedding: a prompt with that token in its place has the same hashes.
        {"prompt_embeds": torch.zeros(80, 4), "prompt_is_token_ids": [True, False] * 40},
        # A session of streamed input takes its last token back, and gets images that the connector is not told of.
        {"resumable": True},
    ],
    ids=["mixed with embeddings", "streamed"],
)
def test_prompts_whose_hashes_do_not_tell_all_are_left_out(
    more: dict[str, Any], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch)
    request = engine.add("r", TOKENS)
    manager = engine.connector.manager
    assert not manager._requests["r"].is_excluded
    for name, value in more.items():
        setattr(request, name, value)
    manager.new_request(request)
    assert manager._requests["r"].is_excluded
