"""LoRA adapters: under which names the blocks of an adapter's requests are stored and found.

vLLM's hashes tell an adapter by its name and path, behind which other weights may lie tomorrow. Here a digest of
the weights becomes the `mask` that the native module hashes in.

Holds true: as long as an adapter has a mask, that mask stands for the weights which the workers have under its name
and path; who asks never waits, and no file is touched on the asking thread; a request whose adapter has no mask is
left out. An adapter has none until its files were digested, when they cannot be read, when they may have changed after
this engine first heard of it, and once vLLM replaced its weights in memory; the latter two are for good. A load by a
server, whose workers are about to read the files, looks at them first, one `stat` each: no clock has a say then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.vllm.fingerprint import Unreadable, adapter_files, chosen, fingerprint
from forebay.vllm.guard import logger
from forebay.vllm.signature import SECOND_NS, Signature, look

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest

# Adapters that one engine knows, some 2 KB each. Those beyond are left out: to forget one would be to forget since when
# its files must not have changed.
MAX_ADAPTERS = 4096
# Files of one adapter; it has two or three.
MAX_FILES = 256
# An adapter that is in use is looked at again this often, one `stat` a file: vLLM drops adapters that it has no room
# for, and reads them again when they are asked for.
LOOK_AGAIN_SECONDS = 1.0
# An adapter of which nothing but times of change move is digested again, so often at one look.
READINGS = 3

# Say how many adapters fit, and not what one computes.
_IDLE_FIELDS = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora", "default_mm_loras"})


class Adapter:
    """One adapter, as requests know it."""

    def __init__(self, request: LoRARequest, heard_ns: int):
        self.mask: bytes | None = None
        self.name = request.lora_name
        self.path = request.lora_path
        self.is_3d = _is_3d(request)
        self.heard_ns = heard_ns  # by the clock of files: the workers read it later than this
        self.is_lost = False  # for good
        self.is_queued = False
        self.asked = 0  # looks that were asked for; only the answer to the last one counts
        self.answered = 0  # the last of them that began before a look which is over
        self.doubted = (
            0  # the last of them before a look found times of change moved, which may hide a change and its undoing
        )
        self.asked_at = 0.0
        self.digest: str | None = None
        self.signature: Signature | None = None  # of the files that the digest tells; before, of those that are loaded
        self.trouble: str | None = None  # what was said of it last
        self.turn = threading.Lock()  # of the thread that looks at its files


Queue = queue.SimpleQueue[Adapter | None]


class Adapters:
    """All adapters of one engine. Its threads start with the first one: one digests, and one looks at what it knows.

    `can_hear`: whether `loading` is called for each adapter that is loaded without a request; if not, none is told.
    """

    def __init__(self, config: LoRAConfig | None, *, can_hear: bool):
        self._config = _config_digest(config)
        self._can_hear = can_hear
        self._known: dict[tuple[str, str], Adapter] = {}
        self._loaded: dict[int, Adapter] = {}  # by vLLM's id: what the workers have under it
        self._known_ones: Queue = queue.SimpleQueue()
        self._new_ones: Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_full = False

    def asked_for(self, request: LoRARequest) -> Adapter | None:
        """The adapter of a request that has just come; None if it is one too many. Some microseconds, no file."""
        return self._hear(request, is_load=False)

    def loading(self, request: LoRARequest) -> None:
        """vLLM will now have its workers load this adapter."""
        self._hear(request, is_load=True)

    def look_again(self, adapter: Adapter) -> int:
        """Has the files looked at from now on; over when `adapter.answered` has come to this number."""
        self._look(adapter, is_reload=False)
        return adapter.asked

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        self._known_ones.put(None)
        self._new_ones.put(None)

    def _hear(self, request: LoRARequest, *, is_load: bool) -> Adapter | None:
        name, number = (request.lora_name, request.lora_path), request.lora_int_id
        adapter, before = self._known.get(name), self._loaded.get(number)
        is_new = adapter is None
        if is_new and len(self._known) >= MAX_ADAPTERS or before is None and len(self._loaded) >= MAX_ADAPTERS:
            self._say_full()
            return None
        if adapter is None:
            adapter = self._known[name] = Adapter(request, time.time_ns())
            if is_load:
                self._look_first(adapter)
        self._loaded[number] = adapter
        if adapter.is_3d != _is_3d(request):
            self._lose(adapter, "it is loaded in two layouts")
        if request.load_inplace and not (is_new and is_load):
            # Blocks of the old weights may be in vLLM's own cache, under the same hashes.
            self._lose(adapter, "vLLM loads other weights in its place")
        if before is not None and before is not adapter:
            self._lose(before, f"another adapter takes its id {number}")
            if not request.load_inplace:  # the workers go on with the one they have
                self._lose(adapter, f"another adapter has its id {number}")
        is_reload = is_load or before is not adapter
        if is_reload or time.monotonic() - adapter.asked_at >= LOOK_AGAIN_SECONDS:
            self._look(adapter, is_reload=is_reload)
        return adapter

    def _look_first(self, adapter: Adapter) -> None:
        """On the calling thread, which is about to wait until the workers have read the same files."""
        with contextlib.suppress(Unreadable, OSError):
            signature, changed_ns = _signature(adapter.path, _directory(adapter.path))
            if not signature.is_in_seconds() or changed_ns < adapter.heard_ns:
                adapter.signature = signature

    def _look(self, adapter: Adapter, *, is_reload: bool) -> None:
        """Has the thread look at the files. What the workers may read anew has no mask until that is done."""
        if not self._can_hear:
            self._lose(adapter, "this vLLM does not tell which adapters it loads")
        with self._lock:
            if adapter.is_lost:
                return
            adapter.asked += 1
            adapter.asked_at = time.monotonic()
            if is_reload:
                adapter.mask = None
            if not adapter.is_queued:
                adapter.is_queued = True
                (self._new_ones if adapter.digest is None else self._known_ones).put(adapter)
        if not self._threads:
            queues = self._known_ones, self._new_ones
            self._threads = [
                threading.Thread(target=self._run, args=(one,), name="forebay-adapters", daemon=True) for one in queues
            ]
            for thread in self._threads:
                thread.start()

    def _lose(self, adapter: Adapter, why: str, hint: str = "give changed weights a new path and a new id") -> None:
        with self._lock:
            if adapter.is_lost:
                return
            adapter.mask, adapter.is_lost = None, True
        _say(adapter, f"{why}; hint: {hint}")

    def _say_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("forebay leaves out the requests of further adapters: it handles at most %d", MAX_ADAPTERS)

    # ---- on the threads --------------------------------------------------------------------------------------------

    def _run(self, adapters: Queue) -> None:
        while (adapter := adapters.get()) is not None:
            with adapter.turn:
                self._answer(adapter)

    def _answer(self, adapter: Adapter) -> None:
        with self._lock:
            adapter.is_queued, asked = False, adapter.asked
        try:
            mask = self._told(adapter)
        except (Unreadable, OSError) as error:
            mask = None
            _say(adapter, str(error))
        except Exception:  # noqa: BLE001 - the thread goes on with the next adapter
            mask = None
            logger.exception("forebay cannot tell the weights of adapter `%s`", adapter.name)
        with self._lock:
            if mask is None or (adapter.asked == asked and not adapter.is_lost):
                adapter.mask = mask
            adapter.answered = asked  # after the mask, which another thread reads behind it

    def _told(self, adapter: Adapter) -> bytes | None:
        directory = _directory(adapter.path)
        signature, changed_ns = _signature(adapter.path, directory)
        if adapter.digest is None:
            if adapter.signature is None:  # there was no look before the workers', and only the times can tell
                is_changed = changed_ns >= adapter.heard_ns
            else:
                is_changed = not adapter.signature.is_same(signature)
            if is_changed and adapter.signature is None and changed_ns > time.time_ns() + SECOND_NS:
                why = "its files changed in the future of this host's clock, so nobody can tell when they were loaded"
                self._lose(adapter, why, "bring the clocks of this host and of the file server into step, and restart")
                return None
            if is_changed:
                self._lose(adapter, "its files changed after vLLM was told to load it")
                return None
            adapter.digest, adapter.signature = fingerprint(directory, choose=adapter_files), signature
            signature, _ = _signature(adapter.path, directory)
        before = adapter.signature
        is_known = before is not None and (before.is_same(signature) or self._is_still(adapter, before, signature))
        if not is_known:
            self._lose(adapter, "its files changed while it was in use")
            return None
        if adapter.signature is before:
            adapter.signature = signature  # what happens beside it would add up over the days
        telling = (b"forebay-adapter-1", adapter.digest, adapter.is_3d, self._config)
        return hashlib.sha256(repr(telling).encode()).digest()

    def _is_still(self, adapter: Adapter, before: Signature, signature: Signature) -> bool:
        """Whether nothing but times of change moved, as with another owner or one more link, and the bytes are the same.

        Raises `Unreadable` where the times go on moving.
        """
        with self._lock:
            adapter.mask, adapter.doubted = None, adapter.asked
        for _ in range(READINGS):
            if not before.is_same_but_changed(signature):
                return False
            if fingerprint(before.directory, choose=adapter_files) != adapter.digest:
                return False
            adapter.signature = before = signature
            signature, _ = _signature(adapter.path, before.directory)
            if signature == before:
                return True
        raise Unreadable(f"`{before.directory}` changes while it is read")


def _is_3d(request: LoRARequest) -> bool:
    return bool(getattr(request, "is_3d_lora_weight", False))


def _say(adapter: Adapter, trouble: str) -> None:
    if adapter.trouble != trouble:
        adapter.trouble = trouble
        logger.warning("forebay leaves out the requests of adapter `%s`: %s", adapter.name, trouble)


def _config_digest(config: LoRAConfig | None) -> str:
    """How the engine applies any adapter: each field counts, unless it is known to be idle."""
    told = fields(config) if config is not None else ()
    return ";".join(f"{one.name}={getattr(config, one.name)}" for one in told if one.name not in _IDLE_FIELDS)


def _directory(path: str) -> Path:
    """Where vLLM's workers find the files: the path itself, or the snapshot in the hub's cache."""
    expanded = os.path.expanduser(path)
    if expanded != path or os.path.exists(path):
        return Path(expanded)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = None if os.environ.get("VLLM_USE_MODELSCOPE") else try_to_load_from_cache(path, "adapter_config.json")
    except ValueError:  # not even a name on the hub
        found = None
    if not isinstance(found, str):
        raise Unreadable(f"`{path}` is neither a path nor in the hub's cache")
    return Path(found).parent


def _signature(path: str, directory: Path) -> tuple[Signature, int]:
    """What the files are, and when they, or a link on the way to them, last changed (nanoseconds, at the latest)."""
    files = chosen([directory], adapter_files)
    if len(files) > MAX_FILES:
        raise Unreadable(f"`{directory}` has more than {MAX_FILES} files of weights")
    ref = directory.parent.parent / "refs" / "main"  # which snapshot the hub's cache gives out
    return look(path, directory, [*files, *([ref] if ref.exists() else [])])
