"""A model has a name only where the files that name it are all that it computes from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm
from forebay.vllm.elsewhere import ELSEWHERE, listed
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import Identity
from harness import Shape, kv_cache_config, vllm_config
from packaging.version import Version
from rig import models
from test_identity import fields, with_drafter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

ROOT = Path(vllm.__file__).parent
# By these a model of vLLM reads files beside what the loader gives it, or tells the loader to read others.
READS = frozenset(
    (
        "Source",
        "allow_patterns_overrides",
        "secondary_weights",
        "subfolder",
        "from_pretrained",
        "cached_file",
        "read_bytes",
    )
    + (
        "get_hf_file_bytes",
        "get_hf_file_to_dict",
        "hf_hub_download",
        "snapshot_download",
        "load_file",
        "safe_open",
        "read_text",
    )
)
READ_MODULES = frozenset({"torch.load", "np.load", "numpy.load", "np.fromfile", "torch.from_file"})
# What they read is digested, or is behind the last layer with KV.
BESIDE = {
    "vllm.model_executor.models.adapters": "the layers behind a pooling model",
    "vllm.model_executor.models.clef_flash": "`joint_head.safetensors` beside the weights",
    "vllm.model_executor.models.clef_omni": "`joint_head.safetensors` beside the weights",
    "vllm.model_executor.models.colmodernvbert": "the image processor's configuration",
    "vllm.model_executor.models.d3": "`readout.safetensors` and `decision_config.json` beside the weights",
    "vllm.model_executor.models.llava_onevision2": "the image processor's configuration",
    "vllm.model_executor.models.moss_audio": "the processor's configuration",
    "vllm.model_executor.models.nemotron_vl": "the processor's configuration",
    "vllm.model_executor.models.qwen3_dflash": "`mask_embedding.pt` beside the weights",
    "vllm.model_executor.models.roberta": "`sparse_linear.pt` and `colbert_linear.pt` beside the weights",
    "vllm.models.deepseek_v4.amd.mono": "the source of its kernels, which is of vLLM's release",
    "vllm.models.dots3_note": "the processor's configuration, and which token stands for an image",
    "vllm.models.kimi_k3.amd.specialized_decode": "the source of its kernels, which is of vLLM's release",
    "vllm.models.minimax_m3.amd.specialized_decode": "kernels of DeepSeek V4.1 and their source, which are of vLLM's release",
}
# The first minor release of vLLM with a module that the oldest one supported has not.
SINCE = {"vllm.models.flint": (0, 33)}
INSTALLED = Version(vllm.__version__).release[:2]


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("model_executor/models", "models"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join(("vllm", *file.relative_to(ROOT).with_suffix("").parts)), ast.parse(file.read_text())


def reads(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open")):
                return True
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                if name in READS or isinstance(node, ast.Attribute) and ast.unparse(node) in READ_MODULES:
                    return True
    return False


def imported(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            place = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (place, *(f"{place}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def judged(module: str) -> bool:
    return listed(module) is not None or any(module == name or module.startswith(f"{name}.") for name in BESIDE)


def test_each_model_of_the_installed_vllm_that_reads_files_of_its_own_was_judged() -> None:
    found = {module for module, tree in sources() if reads(tree)} - {"vllm.model_executor.models.registry"}
    assert "vllm.model_executor.models.ultravox" in found and "vllm.model_executor.models.llama" not in found
    assert not [module for module in found if not judged(module)], "judge them: is what they read in the digest?"


def test_each_model_that_builds_on_one_that_reads_elsewhere_was_judged() -> None:
    building = {module for module, tree in sources() if any(listed(name) for name in imported(module, tree))}
    assert "vllm.model_executor.models.mimo_v2_omni" in building
    assert not [module for module in building if not judged(module)]


def test_the_list_names_modules_of_the_installed_vllm_and_of_newer_ones() -> None:
    modules = {module for module, _ in sources()}
    missing = {name for name in ELSEWHERE if not modules & {name, f"{name}.__init__"}}
    assert missing == {name for name, first in SINCE.items() if first > INSTALLED}


def of_class(architecture: str, **configured: str) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config._architecture = architecture
        for key, value in configured.items():
            setattr(config.model_config.hf_config, key, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        of_class("MoonshotKimiaForCausalLM"),
        of_class("Cosmos3ForConditionalGeneration"),
        of_class("UltravoxModel", text_model_id="org/text"),
        of_class("UltravoxModel", audio_model_id="org/audio"),
        *([of_class("FlintForCausalLM")] if INSTALLED >= SINCE["vllm.models.flint"] else []),
    ],
)
def test_a_model_with_weights_elsewhere_has_no_name(change: Callable[[VllmConfig], None]) -> None:
    with pytest.raises(IdentityError, match="do not identify its KV.*hint: run"):
        fields(change=change)


def test_a_checkpoint_that_holds_the_weights_of_all_parts_has_one() -> None:
    assert fields(change=of_class("UltravoxModel"))["weights"].startswith("files:")


def test_a_drafter_with_weights_elsewhere_has_no_name() -> None:
    def change(config: VllmConfig) -> None:
        with_drafter(method="draft_model", model=str(models.directory(models.OTHER_LLAMA)))(config)
        assert config.speculative_config is not None
        config.speculative_config.draft_model_config._architecture = "MoonshotKimiaForCausalLM"

    with pytest.raises(IdentityError, match="hint: run"):
        fields(change=change)


class Mine(LlamaForCausalLM):
    """A plugin's class, which may read what it likes."""


def test_the_weights_of_a_class_that_is_not_vllms_are_told_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("MineForCausalLM", Mine)

    def named(weight: str | None) -> str:
        config, groups = vllm_config(Shape()), kv_cache_config(Shape())
        config.model_config._architecture = "MineForCausalLM"
        identity = Identity(config, groups, build_offloading_config(config, groups), "", weigh=lambda: weight)
        told = identity.fields()
        assert told is not None
        return told["weights"]

    init_none_hash(sha256)
    assert named("a") == named("a") != named("b")
    with pytest.raises(IdentityError, match="test_elsewhere.*not vLLM's.*hint"):
        named(None)
