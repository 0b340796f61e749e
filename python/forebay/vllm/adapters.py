"""LoRA adapters: the names under which the blocks of an adapter's requests are stored and found.

vLLM's hashes identify an adapter by its name and path, where other weights may be tomorrow. So a digest of the weights
becomes the `mask` that the native module adds to the hashes.

Invariants: while an adapter has a mask, the mask identifies the weights that the workers have under its name and path.
A caller never waits, and its thread touches no file. A request whose adapter has no mask is neither looked up nor
stored. An adapter has no mask while its files are not digested yet or cannot be read. It never gets one again if its
files may have changed after this engine first heard of it, or if vLLM replaced its weights in memory. When a server
loads an adapter, the files are looked at (one `stat` each) before the workers read them, so no clock is needed.
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

# Adapters that one engine knows, some 2 KB each. Further ones are left out: forgetting an adapter would also forget the
# time since which its files must not have changed.
MAX_ADAPTERS = 4096
# Files of one adapter; it has two or three.
MAX_FILES = 256
# The files of an adapter in use are looked at this often, one `stat` each: vLLM drops adapters when it has no room, and
# reads their files again when a request needs them.
LOOK_AGAIN_SECONDS = 1.0
# If only the change times of an adapter's files differ, the files are digested again, at most this often in one look.
READINGS = 3

# Fields about the number of adapters, not about what one computes.
_IDLE_FIELDS = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora", "default_mm_loras"})


class Adapter:
    """One adapter, as requests know it."""

    def __init__(self, request: LoRARequest, heard_ns: int):
        self.mask: bytes | None = None
        self.name = request.lora_name
        self.path = request.lora_path
        self.is_3d = _is_3d(request)
        self.heard_ns = heard_ns  # by the clock of files; the workers read the adapter later than this
        self.is_lost = False  # for good
        self.is_queued = False
        self.asked = 0  # looks requested; only the answer to the last one counts
        self.answered = 0  # the last of these that began before a look that has ended
        self.doubted = (
            0  # the last of these before a look that found other change times, which may hide a change and its undoing
        )
        self.asked_at = 0.0
        self.digest: str | None = None
        self.signature: Signature | None = None  # of the digested files; before the digest, of the loaded files
        self.trouble: str | None = None  # as last logged
        self.turn = threading.Lock()  # held by the thread that looks at its files


Queue = queue.SimpleQueue[Adapter | None]


class Adapters:
    """All adapters of one engine. With the first one, a thread starts for new adapters and one for known ones.

    `can_hear`: whether `loading` is called for adapters that are loaded without a request; if not, none gets a mask.
    """

    def __init__(self, config: LoRAConfig | None, *, can_hear: bool):
        self._config = _config_digest(config)
        self._can_hear = can_hear
        self._known: dict[tuple[str, str], Adapter] = {}
        self._loaded: dict[int, Adapter] = {}  # the adapter that the workers have, by vLLM's id
        self._known_ones: Queue = queue.SimpleQueue()
        self._new_ones: Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_full = False

    def asked_for(self, request: LoRARequest) -> Adapter | None:
        """The adapter of a request that has just arrived; None if there are too many. Microseconds, no file."""
        return self._hear(request, is_load=False)

    def loading(self, request: LoRARequest) -> None:
        """To be called before vLLM's workers load this adapter."""
        self._hear(request, is_load=True)

    def look_again(self, adapter: Adapter) -> int:
        """Requests a look at the files. It has ended when `adapter.answered` has reached the returned number."""
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
            if not request.load_inplace:  # the workers keep the one that they have
                self._lose(adapter, f"another adapter has its id {number}")
        is_reload = is_load or before is not adapter
        if is_reload or time.monotonic() - adapter.asked_at >= LOOK_AGAIN_SECONDS:
            self._look(adapter, is_reload=is_reload)
        return adapter

    def _look_first(self, adapter: Adapter) -> None:
        """Runs on the calling thread, which is about to wait for the workers to read the same files."""
        with contextlib.suppress(Unreadable, OSError):
            signature, changed_ns = _signature(adapter.path, _directory(adapter.path))
            if not signature.is_in_seconds() or changed_ns < adapter.heard_ns:
                adapter.signature = signature

    def _look(self, adapter: Adapter, *, is_reload: bool) -> None:
        """Makes a thread look at the files. If the workers may read them again, the adapter has no mask until then."""
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
            logger.exception("forebay cannot identify the weights of adapter `%s`", adapter.name)
        with self._lock:
            if mask is None or (adapter.asked == asked and not adapter.is_lost):
                adapter.mask = mask
            adapter.answered = asked  # after the mask: another thread reads `answered` first

    def _told(self, adapter: Adapter) -> bytes | None:
        directory = _directory(adapter.path)
        signature, changed_ns = _signature(adapter.path, directory)
        if adapter.digest is None:
            if adapter.signature is None:  # nobody looked before the workers read: only times can show a change
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
            adapter.signature = signature  # otherwise changes of neighbouring entries would add up over days
        telling = (b"forebay-adapter-1", adapter.digest, adapter.is_3d, self._config)
        return hashlib.sha256(repr(telling).encode()).digest()

    def _is_still(self, adapter: Adapter, before: Signature, signature: Signature) -> bool:
        """Whether only change times differ, as after a new owner or hard link, and the bytes are the same.

        Raises `Unreadable` if the times keep changing.
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
    """How the engine applies adapters: all fields count, except those known not to change what is computed."""
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
    except ValueError:  # the path cannot be a name on the hub
        found = None
    if not isinstance(found, str):
        raise Unreadable(f"`{path}` is neither a path nor in the hub's cache")
    return Path(found).parent


def _signature(path: str, directory: Path) -> tuple[Signature, int]:
    """The signature of the files, and the latest time at which they or the path to them changed (nanoseconds)."""
    files = chosen([directory], adapter_files)
    if len(files) > MAX_FILES:
        raise Unreadable(f"`{directory}` has more than {MAX_FILES} files of weights")
    ref = directory.parent.parent / "refs" / "main"  # the snapshot that the hub's cache returns
    return look(path, directory, [*files, *([ref] if ref.exists() else [])])
