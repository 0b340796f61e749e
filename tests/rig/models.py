"""Tiny random-weight models on which a wrong, stale or missing KV block changes the tokens.

Holds true: a model is a pure function of its recipe (config, seed, spread of the weights), and its directory is named
by the recipe's digest, so a changed recipe is another directory and never a stale one.

Weights are drawn with a standard deviation of 0.08. With the usual 0.02 greedy output hardly depends on the context,
and a comparison of tokens would prove nothing. The tokenizer is word-level: token `i` is the word `w<i>`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rig.paths import CACHE

VOCABULARY = 2048
FIRST_PLAIN_TOKEN = 16  # below it: unknown, begin, end, and room for more special words
HIDDEN = 256
FEED_FORWARD = 512
HEADS = 4
HEAD_SIZE = 32
WEIGHT_SPREAD = 0.08
SLIDING_WINDOW = 256


@dataclass(frozen=True)
class Recipe:
    """All that determines a model's bytes."""

    family: str  # llama, hybrid or mla
    layers: int
    seed: int
    spread: float = WEIGHT_SPREAD
    format: int = 1  # raised when this file draws other bytes from the same recipe

    @property
    def digest(self) -> str:
        text = json.dumps([asdict(self), self.config()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> dict[str, Any]:
        return _CONFIGS[self.family](self.layers)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and shape; vectors are the norms."""
        yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (HIDDEN,)
            attention = _mla_attention() if self.family == "mla" else _head_attention()
            yield from ((f"{at}.self_attn.{name}.weight", shape) for name, shape in attention)
            yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
            yield f"{at}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN)
            yield f"{at}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN)
            yield f"{at}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD)
        yield "model.norm.weight", (HIDDEN,)
        yield "lm_head.weight", (VOCABULARY, HIDDEN)


LLAMA = Recipe("llama", layers=4, seed=1)
OTHER_LLAMA = Recipe("llama", layers=4, seed=2)  # same shape, other weights: only the namespace tells them apart
HYBRID = Recipe("hybrid", layers=6, seed=3)
MLA = Recipe("mla", layers=4, seed=4)


def directory(recipe: Recipe) -> Path:
    """The model's directory; made on first use, in one rename, so that a half-written one is never seen."""
    final = CACHE / "models" / f"{recipe.family}-{recipe.digest}"
    if final.exists():
        return final
    draft = final.with_name(f"{final.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    _write(recipe, draft)
    try:
        draft.rename(final)
    except OSError:  # another process was first, and wrote the same bytes
        shutil.rmtree(draft)
    return final


def _write(recipe: Recipe, path: Path) -> None:
    files = {"config.json": recipe.config(), "tokenizer.json": _tokenizer(), "tokenizer_config.json": _TOKENIZER_CONFIG}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=1) + "\n")
    random = np.random.default_rng(recipe.seed)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else _matrix(random, shape, recipe.spread)
        for name, shape in recipe.tensors()
    }
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})


def _matrix(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    return random.standard_normal(math.prod(shape), dtype=np.float32).reshape(shape) * np.float32(spread)


def _head_attention() -> Iterator[tuple[str, tuple[int, int]]]:
    for name in ("q_proj", "k_proj", "v_proj"):
        yield name, (HEADS * HEAD_SIZE, HIDDEN)
    yield "o_proj", (HIDDEN, HEADS * HEAD_SIZE)


# The only latent sizes vLLM's CPU kernel for MLA has.
_LATENT = 512
_ROPE = 64


def _mla_attention() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "q_proj", (HEADS * (HEAD_SIZE + _ROPE), HIDDEN)
    yield "kv_a_proj_with_mqa", (_LATENT + _ROPE, HIDDEN)
    yield "kv_a_layernorm", (_LATENT,)
    yield "kv_b_proj", (HEADS * 2 * HEAD_SIZE, _LATENT)
    yield "o_proj", (HIDDEN, HEADS * HEAD_SIZE)


def _llama_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hybrid_config(layers: int) -> dict[str, Any]:
    """A Llama whose layers are two sliding to one full: vLLM makes three KV groups of it."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    layer_types = [kinds[layer % len(kinds)] for layer in range(layers)]
    return _llama_config(layers) | {"layer_types": layer_types, "sliding_window": SLIDING_WINDOW}


def _mla_config(layers: int) -> dict[str, Any]:
    """DeepSeek-V2 with every layer dense, so that only the attention differs from a Llama."""
    config = _llama_config(layers)
    del config["head_dim"], config["mlp_bias"]
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": _LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": HEAD_SIZE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": HEAD_SIZE,
        "first_k_dense_replace": layers,
    }


_CONFIGS = {"llama": _llama_config, "hybrid": _hybrid_config, "mla": _mla_config}


def _tokenizer() -> dict[str, Any]:
    special = [{"id": i, "content": f"w{i}", "special": True} for i in range(3)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token | flags for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCABULARY)}, "unk_token": "w0"},
    }


_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "w0",
    "bos_token": "w1",
    "eos_token": "w2",
    "model_max_length": 32768,
}
