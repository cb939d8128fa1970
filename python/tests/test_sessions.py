"""The sessions of a server over the library's cache and pool."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest

import kvtwin

TWINS = ["optimized", "reference"]
SPEC = {"slots": 2, "context": 16, "batch": 8}


def cache_of(twin="optimized", **fields):
    defaults = {
        "kind": "causal",
        "dtype": "f32",
        "max_sequences": SPEC["slots"],
        "capacity": SPEC["context"],
        "max_batch": SPEC["batch"],
        "shift": "identity",
    }
    return kvtwin.Cache(kvtwin.Setup(**{**defaults, **fields}), twin)


def pool_of(blocks=8):
    return kvtwin.Pool(
        kvtwin.PoolSetup(
            block_size=4,
            blocks=blocks,
            max_seq_len=16,
            layers=1,
            kv_heads=1,
            k_head_dim=1,
            v_head_dim=1,
            dtype="f32",
            v_dtype="f32",
            layout="token_major",
        )
    )


def rows_of(batch):
    return np.array(batch.tokens, dtype=np.float32).reshape(-1, 1, 1)


def compute(over, sessions, batch):
    """Stores the tokens as rows, and returns what each output sees, sorted."""
    rows = rows_of(batch)
    if isinstance(over, kvtwin.Pool):
        sessions.put(0, rows, rows)
        seen = []
        for output in batch.outputs:
            views = over.views(sessions.sequence(batch.sequences[output]), 0)
            keys = np.concatenate([key.reshape(-1) for key, *_ in views])
            seen.append(sorted(keys[: batch.positions[output] + 1].tolist()))
        return seen
    over.put(0, rows, rows)
    view = over.get(0)
    mask = view.mask.float32()
    keys = view.key.numpy().reshape(-1)
    return [sorted(keys[mask[output] == 0].tolist()) for output in batch.outputs]


def serve(over, sessions, requests):
    """Answers all requests with the sum of what each output sees."""
    answers = {request: [] for request in requests}
    while len(batch := sessions.next_batch()) > 0:
        seen = compute(over, sessions, batch)
        for output, tokens in zip(batch.outputs, seen, strict=True):
            request = batch.requests[output]
            token = int(sum(tokens)) % 97
            answers[request].append(token)
            sessions.sampled(request, token)
        sessions.check()
    return answers


def alone(prompt, limit):
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(sum(tokens) % 97)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("over", [cache_of, pool_of])
def test_each_request_gets_what_it_would_alone(over, twin):
    over = over()
    sessions = kvtwin.Sessions(over, **SPEC, twin=twin)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 5], [9]]
    requests = [sessions.submit(prompt, limit=4) for prompt in prompts]
    answers = serve(over, sessions, requests)
    assert list(answers.values()) == [alone(prompt, 4) for prompt in prompts]
    gauges = sessions.gauges()
    assert gauges.hit_tokens >= 4
    assert gauges.refusals == gauges.running == gauges.waiting == 0
    assert gauges.bytes > 0
    assert repr(gauges).startswith("SessionGauges(waiting=0, running=0, bytes=")
    assert f", hit_tokens={gauges.hit_tokens}, " in repr(gauges)


def test_a_batch_and_the_calls_that_end_it():
    cache = cache_of()
    sessions = kvtwin.Sessions(cache, **SPEC)
    request = sessions.submit([5, (6, 77, 0)], keep=-1)
    assert sessions.request(request).slot == -1
    batch = sessions.next_batch()
    assert (batch.tokens, batch.multimodal) == ([5, 6], [0, 77])
    assert (batch.positions, batch.sequences) == ([0, 1], [0, 0])
    assert (batch.requests, batch.outputs) == ([request] * 2, [1])
    cache.put(0, rows_of(batch), rows_of(batch))
    mask = cache.get(0).mask
    assert sessions.sampled(request, 8) is None
    slot = sessions.slot(0)
    assert (slot.request, slot.record, slot.reusable) == (request, [5, 6], 2)
    sessions.next_batch()
    with pytest.raises(RuntimeError, match="ended with a later next_batch"):
        batch.tokens
    with pytest.raises(kvtwin.StaleViewError):
        mask.float32()
    sessions.cancel(request)
    assert sessions.requests() == []
    assert "2 slots of 16 tokens" in sessions.dump()


def test_one_batch_ahead_a_token_is_filled_in():
    cache = cache_of()
    sessions = kvtwin.Sessions(cache, **SPEC, ahead=True)
    request = sessions.submit([5, 6], limit=2)
    sessions.next_batch()
    batch = sessions.next_batch()
    assert batch.tokens == [-1]
    assert sessions.sampled(request, 8) is None
    assert batch.tokens == [8]
    assert sessions.sampled(request, 9) == "limit"


@pytest.mark.parametrize("twin", TWINS)
def test_a_slot_adopts_a_parked_conversation(tmp_path, twin):
    path = str(tmp_path / "parked")
    cache = cache_of(twin)
    sessions = kvtwin.Sessions(cache, **SPEC)
    request = sessions.submit([1, 2, 3], limit=1)
    serve(cache, sessions, [request])
    record = sessions.slot(0).record
    cache.save_sequence(0, path, "m")
    later = cache_of(twin)
    sessions = kvtwin.Sessions(later, **SPEC)
    later.load_sequence(1, path, "m")
    sessions.adopt(1, record)
    request = sessions.submit([1, 2, 3, 4], limit=2)
    assert serve(later, sessions, [request])[request] == alone([1, 2, 3, 4], 2)
    assert sessions.gauges().hit_tokens == 3


def test_misuse_is_refused():
    cache = cache_of()
    with pytest.raises(TypeError, match="over a kvtwin.Cache or a kvtwin.Pool"):
        kvtwin.Sessions(3, **SPEC)
    with pytest.raises(ValueError, match="choice is 'all'"):
        kvtwin.Sessions(cache, **SPEC, choice="all")
    with pytest.raises(ValueError, match="slots is 0"):
        kvtwin.Sessions(cache, slots=0, context=1, batch=1)
    with pytest.raises(ValueError, match="the pool has 7 blocks"):
        kvtwin.Sessions(pool_of(blocks=7), **SPEC)
    sessions = kvtwin.Sessions(cache, **SPEC)
    with pytest.raises(ValueError, match="prompt is empty"):
        sessions.submit([])
    for bad in ("a", (1, 2), (1, -2, 0), 2**31):
        with pytest.raises(ValueError, match="input 1 is"):
            sessions.submit([1, bad])
    with pytest.raises(RuntimeError, match="over a cache"):
        sessions.sequence(0)
    with pytest.raises(ValueError, match="slot is 2, it must be 0 to 1"):
        sessions.slot(2)
    pool = pool_of()
    over_pool = kvtwin.Sessions(pool, **SPEC)
    with pytest.raises(ValueError, match="slot is 2, it must be 0 to 1"):
        over_pool.sequence(2)


def test_a_cache_that_is_closed_or_restored_ends_its_sessions():
    cache = cache_of()
    sessions = kvtwin.Sessions(cache, **SPEC)
    cache.restore(cache.snapshot())
    with pytest.raises(RuntimeError, match="the cache was restored"):
        sessions.next_batch()
    sessions = kvtwin.Sessions(cache, **SPEC)
    cache.close()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        sessions.submit([1])


@pytest.mark.parametrize("over", [kvtwin.Cache, kvtwin.Pool])
def test_a_server_that_holds_its_own_sessions_is_collected(over):
    class Server(over):
        def __init__(self):
            spec = kvtwin.Setup(max_sequences=2, capacity=16, max_batch=8)
            super().__init__(spec if over is kvtwin.Cache else pool_of().setup)
            self.sessions = kvtwin.Sessions(self, **SPEC)

    server = Server()
    server.sessions.submit([1, 2])
    server.batch = batch = server.sessions.next_batch()
    alive = weakref.ref(server)
    del server
    gc.collect()
    assert batch.tokens == [1, 2]  # The batch keeps the server.
    del batch
    gc.collect()
    assert alive() is None


def test_a_pool_whose_setup_refers_to_it_is_collected():
    class Setup(kvtwin.PoolSetup):
        pass

    setup = Setup(**dataclasses.asdict(pool_of().setup))
    pool = kvtwin.Pool(setup)
    object.__setattr__(setup, "pool", pool)
    alive = weakref.ref(setup)
    del setup, pool
    gc.collect()
    assert alive() is None
