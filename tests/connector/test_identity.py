"""Every difference that changes blocks is another namespace, and nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.vllm import loaded
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import Identity
from harness import Shape, kv_cache_config, vllm_config
from rig import models
from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.model_executor import model_loader
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


def fields(shape: Shape | None = None, change: Callable[[VllmConfig], Any] = id, tenant: str = "") -> dict[str, str]:
    init_none_hash(sha256)
    shape = shape or Shape()
    config, groups = vllm_config(shape), kv_cache_config(shape)
    change(config)
    named = Identity(config, groups, build_offloading_config(config, groups), tenant).fields()
    assert named is not None
    return named


@pytest.fixture(scope="module")
def usual() -> dict[str, str]:
    return fields()


def with_model(path: Path, **more: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config = ModelConfig(str(path), dtype="float32", max_model_len=2048, **more)

    return change


def test_the_same_engine_twice_is_the_same(usual: dict[str, str]) -> None:
    assert fields(Shape(engine_id="another")) == usual


def test_fields_are_what_the_daemon_takes(usual: dict[str, str]) -> None:
    assert all(re.fullmatch("[a-z0-9_.]+", name) for name in usual)
    assert all(isinstance(value, str) for value in usual.values())
    assert sum(len(name) + len(value) + 16 for name, value in usual.items()) < 2048


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("group.0", Shape(block_size=32)),
        ("group.1", Shape(groups="hybrid")),
        ("group.1", Shape(groups="hybrid", window=80)),
        ("layout", Shape(extra={"blocks_per_chunk": 2})),
        ("parallel", Shape(ranks=2)),
    ],
)
def test_another_layout_is_another_namespace(name: str, shape: Shape, usual: dict[str, str]) -> None:
    other = fields(shape)
    assert other.get(name) != usual.get(name)


def test_windows_of_different_size_differ() -> None:
    assert fields(Shape(groups="hybrid"))["group.1"] != fields(Shape(groups="hybrid", window=80))["group.1"]


def test_tenants_differ(usual: dict[str, str]) -> None:
    assert fields(tenant="blue") == usual | {"tenant": "blue"}


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "npcache", "a_plugins"])
def test_what_a_loader_reads_elsewhere_goes_by_what_the_workers_have(load_format: str) -> None:
    def named(weight: str | None) -> str:
        config, groups = vllm_config(Shape()), kv_cache_config(Shape())
        config.load_config.load_format = load_format
        identity = Identity(config, groups, build_offloading_config(config, groups), "", weigh=lambda: weight)
        told = identity.fields()
        assert told is not None
        return told["weights"]

    init_none_hash(sha256)
    assert named("a") == named("a") != named("b")
    with pytest.raises(IdentityError, match=f"{load_format}.*hint"):
        named(None)


def test_weights_in_object_storage_are_told_in_the_workers_whatever_lies_beside_the_configuration(
    tmp_path: Path,
) -> None:
    shutil.copytree(models.directory(models.LLAMA), tmp_path / "pulled")
    (tmp_path / "pulled" / "model-q4.gguf").write_bytes(b"what no worker reads")

    def pulled(config: VllmConfig) -> None:
        with_model(tmp_path / "pulled", model_weights="s3://bucket/model")(config)
        config.load_config.load_format = "runai_streamer"

    with pytest.raises(IdentityError, match="runai_streamer.*hint"):
        fields(change=pulled)


def test_an_engine_whose_weights_vanish_and_come_again_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the old ones in its workers, and others may be in their place."""
    copy = tmp_path / "m"
    shutil.copytree(models.directory(models.LLAMA), copy)
    config, groups = vllm_config(Shape()), kv_cache_config(Shape())
    with_model(copy)(config)
    init_none_hash(sha256)
    read = loaded.fingerprint

    def late(*paths: Path, **how: Any) -> str:
        (copy / "model.safetensors").unlink()
        shutil.copy(models.directory(models.OTHER_LLAMA) / "model.safetensors", copy)
        return read(*paths, **how)

    monkeypatch.setattr(loaded, "fingerprint", late)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("forebay.vllm.identity.START_SECONDS", 0.0)
    identity = Identity(config, groups, build_offloading_config(config, groups), "")
    end = time.monotonic() + 60
    with pytest.raises(IdentityError, match="changed after they were loaded.*hint"):
        while time.monotonic() < end:
            assert identity.fields() is None


# ---- the hub's cache -------------------------------------------------------------------------------------------------

COMMITS = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of one model, of which `main` is the first."""
    hub = tmp_path / "hub" / "models--org--model"
    for commit, recipe in zip(COMMITS, (models.LLAMA, models.OTHER_LLAMA), strict=True):
        shutil.copytree(models.directory(recipe), hub / "snapshots" / commit)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(COMMITS[0])
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    return hub


def of_hub(commit: str, revision: str | None = None, cache: Path | None = None) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config.model, config.model_config.revision = "org/model", revision
        config.model_config.hf_config._commit_hash = commit
        config.load_config.download_dir = None if cache is None else str(cache)

    return change


def test_a_model_of_the_hub_is_told_as_the_same_files_elsewhere(usual: dict[str, str], hub: Path) -> None:
    for revision in (None, COMMITS[0]):
        assert fields(change=of_hub(COMMITS[0], revision)) == usual


def test_a_branch_that_moved_while_the_engine_started_does_not_name_it(usual: dict[str, str], hub: Path) -> None:
    (hub / "refs" / "main").write_text(COMMITS[1])
    assert fields(change=of_hub(COMMITS[0], COMMITS[0])) == usual
    with pytest.raises(IdentityError, match=f"{COMMITS[0]} in the configuration and {COMMITS[1]}.*moved.*hint"):
        fields(change=of_hub(COMMITS[0]))


def test_a_branch_that_moved_to_a_snapshot_without_configuration_does_not_name_the_engine(hub: Path) -> None:
    """vLLM's workers fetch the weights alone, and have them of the new commit."""
    (hub / "refs" / "main").write_text(COMMITS[1])
    (hub / "snapshots" / COMMITS[1] / "config.json").unlink()
    with pytest.raises(IdentityError, match="moved"):
        fields(change=of_hub(COMMITS[0]))


def test_a_branch_that_is_elsewhere_in_the_cache_of_the_weights_does_not_name_the_engine(
    hub: Path, tmp_path: Path, usual: dict[str, str]
) -> None:
    weights = tmp_path / "elsewhere" / hub.name
    shutil.copytree(hub, weights)
    assert fields(change=of_hub(COMMITS[0], cache=tmp_path / "elsewhere")) == usual
    (weights / "refs" / "main").write_text(COMMITS[1])
    with pytest.raises(IdentityError, match="moved"):
        fields(change=of_hub(COMMITS[0], cache=tmp_path / "elsewhere"))
    assert fields(change=of_hub(COMMITS[0], COMMITS[0], cache=tmp_path / "elsewhere")) == usual


def test_a_download_directory_does_not_change_the_name(usual: dict[str, str], hub: Path, tmp_path: Path) -> None:
    """vLLM has the weights there, and the configuration in the hub's cache."""
    weights = tmp_path / "elsewhere" / hub.name / "snapshots" / COMMITS[0]
    weights.mkdir(parents=True)
    shutil.move(hub / "snapshots" / COMMITS[0] / "model.safetensors", weights)
    assert fields(change=of_hub(COMMITS[0], cache=tmp_path / "elsewhere")) == usual


def test_files_that_vllm_does_not_read_do_not_change_the_name(usual: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "m"
    shutil.copytree(models.directory(models.LLAMA), copy)
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "q4.gguf",
        "trainer_state.json",
        "rng_state.pth",
        "all_results.json",
    ):
        (copy / name).write_bytes(b"{}")
    assert fields(change=with_model(copy)) == usual
    with pytest.raises(AssertionError):  # this loader reads another kind of file
        assert fields(change=lambda config: (with_model(copy)(config), _pt(config)))["weights"] == usual["weights"]


def _pt(config: VllmConfig) -> None:
    config.load_config.load_format = "pt"


def test_a_file_whose_name_is_no_text_is_told(tmp_path: Path) -> None:
    copy = tmp_path / "m"
    shutil.copytree(models.directory(models.LLAMA), copy)
    with open(os.fsencode(copy) + b"/notes-\xfc.json", "wb") as file:
        file.write(b"{}")
    assert fields(change=with_model(copy))["weights"].startswith("files:")


def test_a_loader_in_the_place_of_one_of_vllms_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "safetensors", type("Mine", (), {}))
    with pytest.raises(IdentityError, match="hint"):
        fields(change=lambda config: setattr(config.load_config, "load_format", "safetensors"))


def test_a_drafter_of_a_loader_of_its_own_is_told_by_that_loader() -> None:
    def change(config: VllmConfig) -> None:
        with_drafter(method="draft_model", model=str(models.directory(models.OTHER_LLAMA)))(config)
        assert config.speculative_config is not None
        config.speculative_config.draft_load_config = LoadConfig(load_format="tensorizer")

    with pytest.raises(IdentityError, match="tensorizer"):
        fields(change=change)


def test_a_name_that_modelscope_resolves_is_refused_and_a_path_is_not(
    usual: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert fields() == usual

    def from_hub(config: VllmConfig) -> None:
        config.model_config.model = "org/model"
        config.model_config.hf_config._commit_hash = "abc123"

    with pytest.raises(IdentityError, match="ModelScope.*hint"):
        fields(change=from_hub)


def test_a_model_of_the_same_shape_with_other_weights_differs(usual: dict[str, str]) -> None:
    other = fields(change=with_model(models.directory(models.OTHER_LLAMA)))
    assert other["weights"] != usual["weights"]
    assert other["config"] == usual["config"]


def test_a_model_in_another_place_does_not_differ(usual: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "under-another-name"
    shutil.copytree(models.directory(models.LLAMA), copy)
    assert fields(change=with_model(copy)) == usual


def test_overrides_of_the_model_differ(usual: dict[str, str]) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    other = fields(change=with_model(models.directory(models.LLAMA), hf_overrides=rope))
    assert {name for name in other if other[name] != usual[name]} == {"config"}


def test_a_rope_that_depends_on_the_longest_prompt_brings_it_in(usual: dict[str, str]) -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    other = fields(change=with_model(models.directory(models.LLAMA), hf_overrides=rope))
    assert other["max_model_len"] == "2048"
    assert "max_model_len" not in usual


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dtype", lambda config: setattr(config.model_config, "dtype", "bfloat16")),
        ("kv_dtype", lambda config: setattr(config.cache_config, "cache_dtype", "fp8_e5m2")),
        ("quantization", lambda config: setattr(config.model_config, "quantization", "fp8")),
        ("weights", lambda config: setattr(config.load_config, "load_format", "dummy")),
    ],
)
def test_number_formats_and_ways_of_loading_differ(
    name: str, change: Callable[[VllmConfig], None], usual: dict[str, str]
) -> None:
    assert fields(change=change)[name] != usual[name]


def test_the_hash_algorithm_and_its_root_differ(usual: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    seeded = fields()
    assert seeded["hash"] != usual["hash"]
    assert seeded["hash"].startswith("sha256:")


def test_before_the_hash_root_is_set_there_is_no_name(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.NONE_HASH")
    assert identity.fields() is None


def test_a_hub_model_goes_by_its_revision() -> None:
    def from_hub(config: VllmConfig) -> None:
        config.model_config.model = "org/model"
        config.model_config.hf_config._commit_hash = "abc123"

    named = fields(change=from_hub)
    assert (named["model"], named["weights"]) == ("LlamaForCausalLM", "revision:abc123")

    def unpinned(config: VllmConfig) -> None:
        from_hub(config)
        config.model_config.hf_config._commit_hash = None

    with pytest.raises(IdentityError, match="pin it with `--revision`"):
        fields(change=unpinned)


@pytest.fixture
def identity() -> Identity:
    config, groups = vllm_config(Shape()), kv_cache_config(Shape())
    return Identity(config, groups, build_offloading_config(config, groups), "")


def test_a_drafter_is_part_of_the_identity_and_drafting_by_the_text_is_not(usual: dict[str, str]) -> None:
    drafter = fields(change=with_drafter(method="draft_model", model=str(models.directory(models.OTHER_LLAMA))))
    assert "draft" in drafter and "draft" not in usual
    for method in ("ngram", "ngram_gpu"):
        assert fields(change=with_drafter(method=method, prompt_lookup_max=4)) == usual


def test_drafting_by_the_text_changes_nothing_that_vllm_derives_from_it(usual: dict[str, str]) -> None:
    config, groups = vllm_config(Shape()), kv_cache_config(Shape())
    with_drafter(method="ngram", prompt_lookup_max=4)(config)
    sections = ("model_config", "cache_config", "scheduler_config", "parallel_config", "kv_transfer_config")
    remade = VllmConfig(
        **{name: getattr(config, name) for name in sections}, speculative_config=config.speculative_config
    )
    remade.cache_config.num_gpu_blocks = 64
    assert Identity(remade, groups, build_offloading_config(remade, groups), "").fields() == usual


def with_drafter(**options: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.speculative_config = SpeculativeConfig(
            num_speculative_tokens=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
            **options,
        )

    return change


def test_a_target_of_another_seed_does_not_make_another_drafter() -> None:
    """vLLM gives the drafter's configuration much of the target's."""
    drafter = with_drafter(method="draft_model", model=str(models.directory(models.OTHER_LLAMA)))

    def change(config: VllmConfig) -> None:
        config.model_config = ModelConfig(
            str(models.directory(models.LLAMA)), dtype="float32", max_model_len=1024, seed=7, served_model_name="other"
        )
        drafter(config)

    assert fields(change=change) == fields(change=drafter)
