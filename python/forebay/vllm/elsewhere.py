"""Models that compute from files which the digest of their directory does not hold.

Holds true: a model in `ELSEWHERE` has no name, nor has a class that is not vLLM's own unless its workers tell the weights. A
test walks the sources of the installed vLLM, and fails on a model that reads files and is neither here nor in its own list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_PACKAGES = ("vllm.model_executor.models", "vllm.models")

# By vLLM's module, or the package that it is in.
ELSEWHERE: Mapping[str, str] = {
    "vllm.model_executor.models.cosmos3": "its weights are in folders of its directory",
    "vllm.model_executor.models.cosmos3_edge": "its weights are in folders of its directory",
    "vllm.model_executor.models.funaudiochat": "its speech tokenizer is in a folder of its directory",
    "vllm.model_executor.models.jina": "it adds adapters from folders of its directory to its weights",
    "vllm.model_executor.models.kimi_audio": "its audio encoder is in a folder of its directory",
    "vllm.model_executor.models.mimo_audio": "its audio tokenizer is in a folder of its directory",
    "vllm.model_executor.models.mimo_v2_omni": "its audio tokenizer is in a folder of its directory",
    "vllm.model_executor.models.ultravox": "`audio_model_id` or `text_model_id` of its configuration names another model",
    "vllm.models.deepseek_v41": "it computes from what its tokenizer's files say",
    "vllm.models.flint": "it takes weights of GGUF where there are safetensors too",
}
# Some checkpoints hold all weights, and these keys of their configuration are empty.
_KEYS: Mapping[str, tuple[str, ...]] = {"vllm.model_executor.models.ultravox": ("audio_model_id", "text_model_id")}


def module_of(model: ModelConfig) -> str:
    """The module with the class that vLLM makes of this model."""
    registered = model.registry.models.get(model.architecture)
    return str(getattr(registered, "module_name", None) or getattr(registered, "model_cls", object).__module__)


def is_of_transformers(model: ModelConfig) -> bool:
    """Whether vLLM runs the model's class of Transformers and has none of its own."""
    return module_of(model).startswith("vllm.model_executor.models.transformers")


def is_own(module: str) -> bool:
    """Whether a class of this module is vLLM's: one of a plugin may read anything."""
    return module.startswith(tuple(f"{package}." for package in _PACKAGES))


def listed(module: str) -> str | None:
    """The entry of `ELSEWHERE` that holds for this module."""
    return next((name for name in ELSEWHERE if module == name or module.startswith(f"{name}.")), None)


def why_elsewhere(model: ModelConfig) -> str | None:
    """What this model reads beside the files of its directory, if it does."""
    name = listed(module_of(model))
    if name is None or name in _KEYS and not any(getattr(model.hf_config, key, None) for key in _KEYS[name]):
        return None
    return ELSEWHERE[name]
