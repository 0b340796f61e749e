"""What was computed once is loaded afterwards, byte for byte, in every shape of engine.

The harness checks every block that a request relies on; these tests say how much must have come from Forebay.
"""

from __future__ import annotations

import pytest
from fake import FakeDaemon
from harness import Engine, Shape, prompt

SHAPES = {
    "one group": Shape(),
    "one group, no prefix caching": Shape(prefix_caching=False),
    "two ranks": Shape(ranks=2),
    "full and sliding window": Shape(groups="hybrid"),
    "full and sliding window, two ranks": Shape(groups="hybrid", ranks=2),
    "groups of different block sizes": Shape(groups="mixed"),
    "blocks in chunks of two": Shape(extra={"blocks_per_chunk": 2}),
    "chunks named by their tokens": Shape(extra={"block_size": 48}),
    "prompts in small steps": Shape(max_tokens_per_step=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_new_engine_loads_what_another_stored(name: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine(daemon, monkeypatch, SHAPES[name])
    prompts = [prompt(seed, length) for seed, length in [(1, 200), (2, 150), (3, 97)]]
    cold = [first.generate(f"cold {at}", tokens) for at, tokens in enumerate(prompts)]
    first.assert_nothing_is_held()

    shape = SHAPES[name]
    second = Engine(daemon, monkeypatch, Shape(**vars(shape) | {"engine_id": "second"}))
    warm = [second.generate(f"warm {at}", tokens) for at, tokens in enumerate(prompts)]
    assert warm == cold
    unit = second.connector.manager._shapes[0].tokens_per_block
    for at, tokens in enumerate(prompts):
        assert second.hits[f"warm {at}"] >= (len(tokens) - 1) // unit * unit - unit
    assert set(daemon.outcomes) == {"stored"}
    for engine in (first, second):
        engine.assert_nothing_is_held()
        engine.assert_no_faults()


def test_a_prompt_of_whole_blocks_is_loaded_but_for_its_last_token(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch)
    cold = engine.generate("cold", prompt(1, 128))
    engine.forget()
    assert engine.generate("warm", prompt(1, 128)) == cold
    assert engine.hits["warm"] == 127


def test_requests_at_once_share_a_prefix(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(blocks=128))
    shared = prompt(1, 96)
    tails = [prompt(seed, 40) for seed in range(2, 6)]
    cold = engine.run(*[engine.add(str(at), shared + tail) for at, tail in enumerate(tails)])
    engine.forget()
    again = engine.run(*[engine.add(f"{at} again", shared + tail) for at, tail in enumerate(tails)])
    assert list(again.values()) == list(cold.values())
    assert all(engine.hits[f"{at} again"] >= 96 for at in range(4))
    # Each block of the prefix was stored once, although four requests computed it or offered it.
    assert daemon.ready() == 96 // 16 + 4 * ((96 + 40) // 16 - 96 // 16)
    assert set(daemon.outcomes) == {"stored"}
    engine.assert_nothing_is_held()


def test_a_second_turn_extends_what_the_first_stored(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"offload_prompt_only": False}))
    first = prompt(1, 100)
    answer = engine.generate("turn 1", first, max_tokens=40)
    engine.forget()
    second = first + answer + prompt(2, 30)
    engine.generate("turn 2", second)
    # The last generated token was never computed, so the block it would end is not there.
    assert engine.hits["turn 2"] == (len(first) + len(answer) - 1) // 16 * 16
    assert set(daemon.outcomes) == {"stored"}
    engine.assert_nothing_is_held()


def test_requests_that_generate_slowly_have_their_blocks_stored(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill their blocks in the same step. For many seconds before it nobody looks up or stores anything."""
    shape = Shape(blocks=200, max_tokens_per_step=512, max_requests=32, extra={"offload_prompt_only": False})
    engine = Engine(daemon, monkeypatch, shape)
    requests = [engine.add(f"slow {at}", prompt(at, 32), max_tokens=66) for at in range(12)]
    while not all(request.is_finished() for request in requests):
        engine.step()
        daemon.sessions[0].seconds_pass()
    engine.run()
    tokens = [list(request.all_token_ids) for request in requests]
    engine.forget()
    for at, some in enumerate(tokens):
        engine.generate(f"again {at}", some)
        assert engine.hits[f"again {at}"] == 96
    engine.assert_nothing_is_held()


def test_generated_tokens_are_not_stored_by_default(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("a", prompt(1, 100), max_tokens=40)
    assert daemon.ready() == 100 // 16


@pytest.mark.parametrize("groups", ["full", "hybrid"])
def test_preempted_requests_find_their_blocks_again(
    groups: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = Engine(FakeDaemon(), monkeypatch, Shape(blocks=256, groups=groups))
    tokens = [prompt(seed, 60) for seed in range(8)]
    expected = roomy.run(*[roomy.add(str(at), some, max_tokens=50) for at, some in enumerate(tokens)])

    shape = Shape(blocks=26, groups=groups, extra={"offload_prompt_only": False})
    tight = Engine(daemon, monkeypatch, shape)
    found = tight.run(*[tight.add(str(at), some, max_tokens=50) for at, some in enumerate(tokens)])
    assert found == expected
    assert tight.preemptions >= 3
    assert daemon.lookups == len(tokens) + tight.preemptions
    tight.assert_nothing_is_held()
    tight.assert_no_faults()


def test_a_load_may_begin_in_the_middle_of_a_chunk(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"blocks_per_chunk": 2}))
    cold = engine.generate("cold", prompt(1, 140))
    engine.forget()
    engine.generate("local", prompt(1, 50))  # three blocks in the engine's own cache, a chunk and a half
    loaded = engine.stats["vllm:kv_offload_load_bytes"]
    assert engine.generate("warm", prompt(1, 140)) == cold
    assert engine.hits["warm"] == 128
    block_bytes = 2 * 4096
    assert engine.stats["vllm:kv_offload_load_bytes"] - loaded == 5 * block_bytes
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.parametrize(("group", "kept"), [(0, [0, 1]), (1, [4, 5])])
def test_when_slots_run_out_a_prefix_keeps_its_first_blocks_and_a_window_its_last(
    group: int, kept: list[int], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(groups="hybrid", extra={"restock_ms": 0}))
    engine.connector.manager.get_ready()
    session = engine.session
    session.is_refilling = False
    surplus, session.stock[group] = session.stock[group][2:], session.stock[group][:2]
    for number in surplus:
        daemon.slots[number].owner = None
    request = engine.add("a", prompt(1, 100))
    engine.run(request)
    stored = [hash_ for _, of, hash_ in daemon.index if of == group]
    assert [request.block_hashes.index(hash_) for hash_ in stored] == kept
    # Windows behind a gap in the prefix are of no use, the prefix without its windows is.
    assert daemon.ready(1 - group) == (0 if group == 0 else 6)
    engine.assert_nothing_is_held()


def test_local_hits_are_not_stored_again(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("a", prompt(1, 100))
    stored = len(daemon.outcomes)
    engine.generate("b", prompt(1, 100) + prompt(2, 60))
    assert engine.hits["b"] == 96
    assert len(daemon.outcomes) == stored + 160 // 16 - 96 // 16


def test_what_was_evicted_is_stored_again(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("a", prompt(1, 100))
    daemon.evict_all()
    engine.generate("b", prompt(1, 100))  # a local hit, offered for storing all the same
    assert daemon.ready() == 6
    assert set(daemon.outcomes) == {"stored"}


def test_engines_share_one_daemon(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine(daemon, monkeypatch, Shape(engine_id=name)) for name in ("left", "right")]
    requests = [engine.add(f"r{at}", prompt(at % 2, 120)) for at, engine in enumerate([*engines, *engines])]
    while not all(request.is_finished() for request in requests):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.run()
        engine.assert_nothing_is_held()
        engine.assert_no_faults()
    assert set(daemon.outcomes) <= {"stored", "duplicate"}
    assert daemon.ready() == 2 * (120 // 16)


def test_tenants_share_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for tenant in ("red", "blue"):
        engine = Engine(daemon, monkeypatch, Shape(engine_id=tenant, extra={"tenant": tenant}))
        engine.generate(tenant, prompt(1, 100))
        assert engine.hits[tenant] == 0
        assert engine.session.fields["tenant"] == tenant
    assert daemon.ready() == 12


def test_a_request_that_must_not_read_caches_reads_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("a", prompt(1, 100))
    engine.forget()
    engine.generate("b", prompt(1, 100), prompt_logprobs=1)
    assert engine.hits["b"] == 0
    engine.generate("c", prompt(1, 100), kv_transfer_params={"kv_load_tiers": [{"medium": "STORAGE"}]})
    engine.forget()
    engine.generate("d", prompt(1, 100), kv_transfer_params={"kv_load_tiers": [{"medium": "STORAGE"}]})
    assert engine.hits["d"] == 0
    engine.assert_nothing_is_held()


def test_a_replicated_group_is_stored_once_and_loaded_by_all(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.vllm import spec

    original = spec.ForebaySpec.__init__

    def replicated(self: spec.ForebaySpec, config: object) -> None:
        original(self, config)  # type: ignore[arg-type]
        self.replicated_layout = True

    monkeypatch.setattr(spec.ForebaySpec, "__init__", replicated)
    monkeypatch.setattr("harness._content", _same_on_all_ranks)
    engine = Engine(daemon, monkeypatch, Shape(ranks=2))
    cold = engine.generate("cold", prompt(1, 100))
    assert {tuple(slot.pages) for slot in daemon.slots if slot.key} == {(0,)}
    engine.forget()
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96
    assert engine.session.is_replicated == {0: True}


def _same_on_all_ranks(layer: str, worker: object, tokens: list[int], size: int) -> bytes:
    import hashlib

    digest = hashlib.sha256(f"{layer}/{list(tokens)}".encode()).digest()
    return (digest * (size // 32 + 1))[:size]


def test_the_jobs_of_a_step_are_small_to_send(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from forebay.vllm.slots import PoolSlots

    slots = PoolSlots(7, "request-0", b"p" * 16, ((0, b"s" * 4000, b"g" * 4000),))
    sent = pickle.dumps(slots)
    assert pickle.loads(sent) == slots
    assert len(sent) < 8000 + 200
