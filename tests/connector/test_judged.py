"""Every option of vLLM was judged, and the verdicts hold: what changes blocks moves the namespace, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fractions
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forebay.vllm import canonical, compat, judged
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import Identity
from harness import Engine, Shape, kv_cache_config, vllm_config
from rig import models
from test_identity import fields, with_model
from vllm import config as configs
from vllm import envs
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec


@pytest.fixture(scope="module")
def usual() -> dict[str, str]:
    return fields()


def class_of(name: str) -> type:
    found = [getattr(module, name) for module in [configs, configs.multimodal, configs.mamba] if hasattr(module, name)]
    return found[0]


@pytest.mark.parametrize("name", judged.COUNTS)
def test_each_option_of_the_installed_vllm_was_judged(name: str) -> None:
    names = frozenset(field.name for field in dataclasses.fields(class_of(name)))
    assert not judged.unjudged(name, names), "judge them: do they change the bytes of a block, or what its hash means?"
    counts = judged.COUNTS[name].split()
    idle = [field for names in judged.IDLE.get(name, {}).values() for field in names.split()]
    assert len(set(counts + idle)) == len(counts + idle), "judged twice"


def test_the_walk_finds_an_option_that_nobody_judged() -> None:
    assert judged.unjudged("CacheConfig", frozenset({"block_size", "num_gpu_blocks", "news"})) == {"news"}
    assert judged.unjudged("CacheConfig", frozenset({"block_size", "num_gpu_blocks"})) == set()


def test_an_option_that_nobody_judged_counts(usual: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judged._idle_fields, "CacheConfig", judged.idle("CacheConfig") - {"num_gpu_blocks"})
    assert fields()["settings.cache"] != usual["settings.cache"]


def test_each_variable_that_is_left_out_is_one_of_vllm() -> None:
    left_out = {name for names in judged.IDLE_VARIABLES.values() for name in names.split()}
    assert left_out <= set(envs.environment_variables)


def _set(path: str, value: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        *parts, last = path.split(".")
        found: Any = config
        for part in parts:
            found = getattr(found, part)
        assert hasattr(found, last), f"vLLM has no option `{path}`"
        assert getattr(found, last) != value, f"`{path}` is {value} already"
        setattr(found, last, value)

    return change


def _with_media(**options: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config.multimodal_config = MultiModalConfig(**options)

    return change


MOVES: list[tuple[str, str, Any]] = [
    ("settings.parallel", "parallel_config.cp_kv_cache_interleave_size", 16),
    ("settings.parallel", "parallel_config.dcp_kv_cache_interleave_size", 16),
    ("settings.parallel", "parallel_config.enable_expert_parallel", True),
    ("settings.parallel", "parallel_config.worker_cls", "mine.Worker"),
    ("settings.cache", "cache_config.mamba_cache_dtype", "float16"),
    ("settings.cache", "cache_config.mamba_ssm_cache_dtype", "bfloat16"),
    ("settings.cache", "cache_config.mamba_cache_mode", "align"),
    ("settings.cache", "cache_config.kv_cache_dtype_skip_layers", ["0", "2"]),
    ("settings.cache", "cache_config.cache_dtype", "fp8_e5m2"),
    ("settings.cache", "cache_config.replayssm_buffer_len", 8),
    ("settings.cache", "cache_config.kv_sharing_fast_prefill", True),
    ("settings.model", "model_config.dtype", torch.bfloat16),
    ("settings.model", "model_config.disable_sliding_window", True),
    ("settings.model", "model_config.quantization_config", {"linear": {"b": 1, "a": 2}}),
    ("settings.model", "model_config.model_impl", "transformers"),
    ("settings.model", "model_config.code_revision", "abc"),
    ("settings.model", "model_config.trust_remote_code", True),
    ("settings.attention", "attention_config.backend", AttentionBackendEnum.TRITON_ATTN),
    ("settings.attention", "attention_config.indexer_kv_dtype", "fp8"),
    ("settings.attention", "attention_config.backend_per_kind", {"mamba": AttentionBackendEnum.TRITON_ATTN}),
    ("settings.kernel", "kernel_config.linear_backend", "emulation"),
    ("settings.mamba", "mamba_config.enable_stochastic_rounding", True),
    ("settings.load", "load_config.load_format", "pt"),
    ("settings.load", "load_config.ignore_patterns", ["*.bin"]),
    ("settings.additional", "additional_config", {"a": {"b": 1}}),
]


@pytest.mark.parametrize(("field", "option", "value"), MOVES, ids=[option for _, option, _ in MOVES])
def test_what_changes_blocks_moves_the_namespace(field: str, option: str, value: Any, usual: dict[str, str]) -> None:
    other = fields(change=_set(option, value))
    assert other[field] != usual[field]


STAYS: list[tuple[str, Any]] = [
    ("cache_config.gpu_memory_utilization", 0.5),
    ("cache_config.num_gpu_blocks", 9999),
    ("cache_config.num_gpu_blocks_override", 9999),
    ("cache_config.kv_cache_memory_bytes", 1 << 30),
    ("cache_config.kv_cache_size_tokens", 12345),
    ("cache_config.kv_cache_max_concurrency", 3.5),
    ("cache_config.kv_offloading_size", 4.0),
    ("cache_config.enable_prefix_caching", False),
    ("cache_config.prefix_cache_retention_interval", None),
    ("scheduler_config.max_num_seqs", 3),
    ("scheduler_config.max_num_batched_tokens", 4096),
    ("scheduler_config.enable_chunked_prefill", False),
    ("scheduler_config.async_scheduling", True),
    ("scheduler_config.policy", "priority"),
    ("model_config.max_model_len", 512),
    ("model_config.seed", 7),
    ("model_config.served_model_name", ["a", "b"]),
    ("model_config.tokenizer", "elsewhere"),
    ("model_config.hf_token", "secret"),
    ("model_config.enforce_eager", True),
    ("model_config.generation_config", "vllm"),
    ("model_config.max_logprobs", 3),
    ("model_config.logits_processors", [lambda: None]),
    ("model_config.enable_sleep_mode", True),
    ("parallel_config.data_parallel_size", 4),
    ("parallel_config.data_parallel_rank", 3),
    ("parallel_config.data_parallel_index", 3),
    ("parallel_config.data_parallel_master_port", 1234),
    ("parallel_config.distributed_executor_backend", "uni"),
    ("parallel_config.disable_custom_all_reduce", False),
    ("parallel_config.master_port", 4321),
    ("compilation_config.cudagraph_capture_sizes", [1, 2]),
    ("observability_config.collect_detailed_traces", ["all"]),
    ("load_config.download_dir", "/elsewhere"),
    ("load_config.use_tqdm_on_load", False),
    ("instance_id", "other"),
    ("performance_mode", "throughput"),
]


@pytest.mark.parametrize(("option", "value"), STAYS, ids=[option for option, _ in STAYS])
def test_what_does_not_change_blocks_is_shared(option: str, value: Any, usual: dict[str, str]) -> None:
    assert fields(change=_set(option, value)) == usual


def test_engines_made_with_other_batches_and_memory_share(usual: dict[str, str]) -> None:
    """Through vLLM's own way of making a configuration, which derives one option from another."""
    assert fields(Shape(blocks=128, max_tokens_per_step=2048, max_requests=4, engine_id="b")) == usual
    assert fields(Shape(prefix_caching=False)) == usual
    model = str(models.directory(models.LLAMA))
    eager = ModelConfig(model, dtype="float32", max_model_len=1024, enforce_eager=True, seed=5, served_model_name="x")
    remade = fields(change=lambda config: setattr(config, "model_config", eager))
    assert remade == usual


def test_adapters_move_their_own_blocks_and_not_the_namespace(usual: dict[str, str]) -> None:
    lora = configs.LoRAConfig(max_lora_rank=8, max_loras=2)
    assert fields(change=lambda config: setattr(config, "lora_config", lora)) == usual


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"mm_hasher_algorithm": "sha256"},
        {"mm_device_do_normalize": False},
    ],
    ids=str,
)
def test_how_images_are_processed_moves_the_namespace(options: dict[str, Any]) -> None:
    assert (
        fields(change=_with_media(**options))["settings.multimodal"]
        != fields(change=_with_media())["settings.multimodal"]
    )


@pytest.mark.parametrize("options", [{"mm_processor_cache_gb": 1}, {"limit_per_prompt": {"image": 3}}], ids=str)
def test_how_many_images_are_taken_and_kept_does_not(options: dict[str, Any]) -> None:
    assert fields(change=_with_media(**options)) == fields(change=_with_media())


def model_copy(path: Path, **files: str) -> Path:
    """The model's directory under its own name, with more files in it."""
    source = models.directory(models.LLAMA)
    copy = path / source.name
    copy.mkdir(parents=True)
    for file in source.iterdir():
        (copy / file.name).symlink_to(file)
    for name, content in files.items():
        (copy / name.replace("__", ".")).write_text(content)
    return copy


def test_the_configuration_of_the_processor_of_images_moves_the_namespace(tmp_path: Path) -> None:
    def processed(place: str, media: MultiModalConfig | None, **files: str) -> dict[str, str]:
        def change(config: VllmConfig) -> None:
            with_model(model_copy(tmp_path / place, **files))(config)
            config.model_config.multimodal_config = media

        return fields(change=change)

    media = MultiModalConfig()
    small = processed("a", media, preprocessor_config__json='{"size": 224}')
    large = processed("b", media, preprocessor_config__json='{"size": 336}')
    assert {name for name in small if small[name] != large[name]} == {"processor"}
    assert processed("c", media, preprocessor_config__json='{"size": 224}') == small
    assert processed("d", media, generation_config__json="{}", chat_template__json="{}") == processed("e", media)
    # A model without images has no such processor, whatever lies beside it.
    assert processed("f", None, preprocessor_config__json='{"size": 224}') == fields()


def _processed(copy: Path, *, trusted: bool = False) -> dict[str, str]:
    def change(config: VllmConfig) -> None:
        with_model(copy, trust_remote_code=trusted)(config)
        config.model_config.multimodal_config = MultiModalConfig()

    return fields(change=change)


def _differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def test_a_processor_that_the_tokenizers_file_chooses_moves_the_namespace(tmp_path: Path) -> None:
    def chosen(place: str, **keys: Any) -> dict[str, str]:
        copy = model_copy(tmp_path / place)
        tokenizer = copy / "tokenizer_config.json"
        content = json.dumps(json.loads(tokenizer.read_text()) | keys)
        tokenizer.unlink()
        tokenizer.write_text(content)
        return _processed(copy)

    plain = chosen("a")
    assert chosen("b", chat_template="{{ messages }}") == plain
    assert _differing(plain, chosen("c", processor_class="LlavaProcessor")) == {"processor"}
    assert _differing(plain, chosen("d", auto_map={"AutoProcessor": "processing_x.X"})) == {"processor"}


@pytest.mark.parametrize("is_part", [False, True])
def test_code_of_a_processor_in_another_directory_counts_where_it_is_run(is_part: bool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    code = tmp_path / "other" / "processing_x.py"
    reference: dict[str, Any] = {"auto_map": {"AutoProcessor": f"{tmp_path}/other--processing_x.X"}}
    content = json.dumps({"image_processor": reference} if is_part else reference)
    copy = model_copy(tmp_path / "model", preprocessor_config__json=content)
    told = {}
    for size in (224, 336):
        code.write_text(f"SIZE = {size}")
        told[size] = [_processed(copy, trusted=trusted) for trusted in (True, False)]
    assert _differing(told[224][0], told[336][0]) == {"code"}
    assert told[224][1] == told[336][1]


def test_code_of_a_processor_on_the_hub_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits that differ in a file which the processor's configuration alone names."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    content = json.dumps({"auto_map": {"AutoProcessor": "processing_x.X"}})
    named = []
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "models--org--m" / "snapshots" / commit
        model_copy(snapshot, preprocessor_config__json=content, processing_x__py=f"COMMIT = '{commit}'")
        inner = snapshot / models.directory(models.LLAMA).name
        for file in list(inner.iterdir()):
            file.rename(snapshot / file.name)
        inner.rmdir()

        def change(config: VllmConfig, commit: str = commit) -> None:
            model = ModelConfig("org/m", revision=commit, dtype="float32", max_model_len=2048, trust_remote_code=True)
            config.model_config = model
            config.model_config.multimodal_config = MultiModalConfig()

        named.append(fields(change=change))
    assert _differing(*named) == {"code"}


def test_another_transformers_moves_the_names_of_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(release: str) -> list[dict[str, str]]:
        monkeypatch.setattr("transformers.__version__", release)
        backend = with_model(models.directory(models.LLAMA), model_impl="transformers")
        return [fields(), fields(change=_with_media()), fields(change=backend)]

    first, second = named("5.17.0"), named("5.18.0")
    assert named("5.17.1") == first
    assert [_differing(*pair) for pair in zip(first, second, strict=True)] == [
        set(),
        {"transformers"},
        {"transformers"},
    ]


def test_scales_of_the_encoder_count_by_what_is_in_the_file_and_not_by_its_place(tmp_path: Path) -> None:
    def scaled(name: str, content: str) -> dict[str, str]:
        path = tmp_path / name / "scales.json"
        path.parent.mkdir()
        path.write_text(content)
        return fields(change=_with_media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(path)))

    assert scaled("a", "[1]") == scaled("b", "[1]")
    assert scaled("c", "[1]") != scaled("d", "[2]")


def test_code_that_comes_with_the_model_counts_where_it_is_run(tmp_path: Path) -> None:
    def coded(place: str, code: str, *, trusted: bool) -> str:
        return fields(change=with_model(model_copy(tmp_path / place, modeling__py=code), trust_remote_code=trusted))[
            "code"
        ]

    assert coded("a", "x = 1", trusted=True) == coded("b", "x = 1", trusted=True)
    assert coded("c", "x = 1", trusted=True) != coded("d", "x = 2", trusted=True)
    assert coded("e", "x = 1", trusted=False) == coded("f", "x = 2", trusted=False) == "none"


@pytest.mark.parametrize("name", ["modeling__py", "preprocessor_config__json"])
@pytest.mark.parametrize("is_early", [True, False])
def test_code_and_configuration_that_change_while_the_engine_starts_name_nobody(
    name: str, is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have run the old ones."""
    copy = model_copy(tmp_path, **{name: "1"})
    began_ns = (copy / name.replace("__", ".")).stat().st_ctime_ns + 60_000_000
    while time.time_ns() < began_ns + 60_000_000:
        time.sleep(0.01)

    def change(config: VllmConfig) -> None:
        with_model(copy, trust_remote_code=True)(config)
        config.model_config.multimodal_config = MultiModalConfig()
        monkeypatch.setattr("forebay.vllm.loaded.began_ns", lambda: began_ns)

    if not is_early:
        with open(copy / name.replace("__", "."), "r+") as file:  # no new entry in the directory
            file.write("2")
    with contextlib.nullcontext() if is_early else pytest.raises(IdentityError, match="after this engine began.*hint"):
        fields(change=change)


def test_the_layers_pages_count_in_all_that_describes_them(usual: dict[str, str]) -> None:
    """Two dtypes of one size, with the same page."""

    def with_spec(spec: Any) -> str:
        config, groups = vllm_config(Shape()), kv_cache_config(Shape())
        groups.kv_cache_groups[0].kv_cache_spec = spec
        named = Identity(config, groups, build_offloading_config(config, groups), "").fields()
        assert named is not None
        return named["group.0"]

    def attention(dtype: torch.dtype) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=dtype)

    def states(dtype: torch.dtype, spare: int) -> MambaSpec:
        return MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(dtype,), num_speculative_blocks=spare)

    assert with_spec(attention(torch.float16)) != with_spec(attention(torch.bfloat16))
    assert with_spec(states(torch.float16, 0)) != with_spec(states(torch.bfloat16, 0))
    # N-gram speculation keeps more states of each request, of the same kind.
    assert with_spec(states(torch.float16, 0)) == with_spec(states(torch.float16, 3))


def test_releases_do_not_share_and_patches_of_one_do(usual: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(version: str) -> str:
        monkeypatch.setattr("vllm.version.__version__", version)
        return compat.release()

    assert usual["engine"] == f"vllm {compat.release()}"
    assert engine("0.32.0+cpu") == engine("0.32.1") == "0.32"
    assert engine("0.33.0") == "0.33"
    assert engine("0.33.1.dev12+gabc") != engine("0.33.1.dev13+gdef")
    assert engine("dev") == "dev"


def test_variables_of_the_environment_count_unless_they_are_known_to_be_idle(
    usual: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_HOST_IP", "VLLM_API_KEY", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "HOME"):
        monkeypatch.setenv(name, "10")
    assert fields() == usual
    for name in ("VLLM_MARLIN_INPUT_DTYPE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"):
        with monkeypatch.context() as with_one:
            with_one.setenv(name, "1")
            assert fields()["environment"] != usual["environment"], name


@pytest.mark.parametrize(
    "name", ["VLLM_SERVICE_HOST", "VLLM_ROUTER_PORT_80_TCP_ADDR", "VLLM_POD_NAME", "VLLM_DIST_IDENT"]
)
def test_variables_that_vllm_does_not_know_do_not_count(
    name: str, usual: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "10.0.0.7")
    assert fields() == usual


@pytest.mark.parametrize("spec_type", ["looks ahead", "pools all tokens", "encodes"])
def test_models_whose_blocks_are_more_than_their_prefix_are_refused(
    spec_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, groups = vllm_config(Shape()), kv_cache_config(Shape())
    if spec_type == "looks ahead":
        spec = groups.kv_cache_groups[0].kv_cache_spec
        groups.kv_cache_groups[0].kv_cache_spec = dataclasses.replace(spec, non_causal=True)  # type: ignore[call-arg]
    elif spec_type == "pools all tokens":
        config.model_config.pooler_config = configs.PoolerConfig(seq_pooling_type="MEAN")
    else:
        monkeypatch.setattr(ModelConfig, "attn_type", property(lambda _: "encoder_decoder"))
    with pytest.raises(IdentityError, match="prefix|looks ahead"):
        Identity(config, groups, build_offloading_config(config, groups), "")


# ---- texts ---------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Inner:
    names: set[str]
    kind: type = Path


def samples() -> dict[str, Any]:
    return {
        "set": {f"layer-{at}" for at in range(40)},
        "nested": {"b": Inner({"x", "y", "z"}), "a": [Colour.RED, torch.float8_e4m3fn, 1.5, None, (1, "1")]},
        "called": canonical.text,
        "fraction": fractions.Fraction(3, 2),
        "bytes": b"\\x00\\xff",
    }


def test_equal_values_have_equal_texts_in_every_process() -> None:
    code = "import json; from test_judged import everything; print('TEXTS', json.dumps(everything()))"
    here = Path(__file__).parent
    own = [str(here), str(here.parent), str(here.parents[1] / "python")]
    # What this process has on its path may be another vLLM.
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *own])
    # This process has a random seed, and sets of strings an order of its own.
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(re.findall("TEXTS (.*)", ran.stdout)[0])
    ours = everything()
    # The hash's root does depend on the seed, and says so.
    assert told.pop("hash") != ours.pop("hash")
    assert told == ours


def everything() -> dict[str, str]:
    """The fields of an engine with sets in its options, and the texts of all samples."""

    def change(config: VllmConfig) -> None:
        config.additional_config = {"of": {f"key-{at}" for at in range(20)}}
        _with_media(mm_processor_kwargs={"sizes": {str(at) for at in range(20)}})(config)

    return fields(change=change) | {name: canonical.text(value) for name, value in samples().items()}


def test_different_values_have_different_texts() -> None:
    values: list[Any] = [
        None,
        "null",
        0,
        "0",
        0.0,
        False,
        [],
        {},
        "",
        [0],
        [[0]],
        {"a": 1},
        {"a": "1"},
        {1: "a"},
        ["a", 1],
    ]
    values += [
        {"a, b"},
        {"a", "b"},
        torch.float16,
        torch.bfloat16,
        "torch.float16",
        Colour.RED,
        "Colour.RED",
        b"",
        {"a": {}},
    ]
    texts = [canonical.text(value) for value in values]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: None, SimpleNamespace(a=1), Path("/here"), [[object()]], (one for one in "a"), Path("a").exists],
    ids=["object", "lambda", "namespace", "path", "nested", "generator", "method"],
)
def test_what_no_other_process_could_write_is_an_error(value: Any) -> None:
    with pytest.raises(canonical.Unstable):
        canonical.text(value)
    with pytest.raises(IdentityError, match="additional"):
        fields(change=_set("additional_config", {"a": value}))


def test_a_value_within_itself_is_an_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(canonical.Unstable, match="deep"):
        canonical.text(endless)


def test_the_values_can_be_read_and_hold_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "mostly-secret")

    def change(config: VllmConfig) -> None:
        config.load_config.model_loader_extra_config = {"s3_secret_access_key": "very-secret"}
        config.additional_config = {"token": "also-secret"}
        config.model_config.hf_token = "too-secret"

    config, groups = vllm_config(Shape()), kv_cache_config(Shape())
    change(config)
    identity = Identity(config, groups, build_offloading_config(config, groups), "")
    lines = list(identity.values())
    assert "secret" not in "".join(lines)
    named = fields(change=change)
    digests = dict(line.split(": ")[0].split("=") for line in lines)
    assert digests == {name: named[name] for name in digests}
    assert {name for name in named if name.startswith("settings.")} <= set(digests)
    assert any('cache_dtype="auto"' in line for line in lines)


def test_an_engine_says_once_what_it_shares_by(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "vllm.forebay"):
        Engine(daemon, monkeypatch)
    said = [record.message for record in caplog.records if record.message.startswith("forebay shares blocks of ")]
    assert len(said) == 1 and "\n  settings.cache=" in said[0]


def test_the_connectors_own_options_do_not_count(usual: dict[str, str]) -> None:
    transfer = KVTransferConfig(
        kv_connector="ForebayConnector",
        kv_role="kv_both",
        engine_id="x",
        kv_connector_extra_config={"socket": "/there"},
    )
    assert fields(change=lambda config: setattr(config, "kv_transfer_config", transfer)) == usual
