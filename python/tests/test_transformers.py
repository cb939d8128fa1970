"""kvtwin.transformers: tiny random models of each kind of attention.

Skipped without torch and transformers; `./dev transformers` installs them.
"""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvtwin.transformers  # noqa: E402
from kvtwin.transformers import Cache, EncoderDecoderCache  # noqa: E402
from transformers import DynamicCache  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

VOCABULARY = 96
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MIXED = ["sliding_attention", "full_attention"] * 2

#: Each kind of attention: the class, and what its configuration has besides SMALL.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 7, "layer_types": MIXED},
    "GptOss": {"sliding_window": 7, **EXPERTS},
    "Llama4": {"attention_chunk_size": 8, "intermediate_size_mlp": 64, **EXPERTS},
}


def make(name, **more):
    torch.manual_seed(len(name))
    base = name.removesuffix("Window")
    config = getattr(
        transformers, {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(base, base)
        + "Config",
    )(**{**SMALL, **MODELS[name], **more})
    config._experts_implementation = "eager"  # The others have no f64.
    return getattr(transformers, f"{base}ForCausalLM")(config).eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def llama():
    return make("Llama")


def random_ids(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(2, VOCABULARY, shape, generator=generator)


def logits(model, implementation, ids, cache=None, parts=(), **more):
    """Logits of all tokens, computed in parts of these sizes, then one by one."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        if cache is None:
            return model(ids, use_cache=False, **more).logits
        found, begin = [], 0
        mask = more.get("attention_mask")
        for part in [*parts, *[1] * (ids.shape[1] - sum(parts))]:
            if mask is not None:
                more["attention_mask"] = mask[:, : begin + part]
            batch = ids[:, begin : begin + part]
            found.append(model(batch, past_key_values=cache, **more).logits)
            begin += part
        return torch.cat(found, 1)


def bound(model, ids):
    """Logits in f64, and 4 times the error that the model's own f32 has."""
    exact = logits(model.double(), "eager", ids)
    rounded = logits(model.float(), "eager", ids)
    return exact, 4 * (exact - rounded).abs().max()


def cache_of(model, **more):
    return Cache(model.config, **{"capacity": 64, **more})


@pytest.mark.parametrize("parts", [(20,), (), (3, 9, 11)])
def test_logits_are_those_of_the_model(model, parts):
    ids = random_ids(1, 40)
    exact, error = bound(model, ids)
    found = logits(model, "kvtwin", ids, cache_of(model), parts)
    assert (found - exact).abs().max() <= error


class Rounding(DynamicCache):
    """Rounds rows to a dtype of kvtwin, by its reference twin."""

    def __init__(self, config, dtype):
        super().__init__(config=config)
        self.dtype = dtype

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rows = []
        for x in (key_states, value_states):
            flat = x.transpose(1, 2).flatten(0, 1)
            setup = kvtwin.Setup(capacity=len(flat), dtype=self.dtype)
            cache = kvtwin.Cache(setup, twin="reference")
            cache.start_forward(list(range(len(flat))), [0] * len(flat))
            cache.put(0, flat.numpy(), flat.numpy())
            flat = torch.from_numpy(cache.get(0).key.float32())
            rows.append(flat.view(len(x), -1, *flat.shape[1:]).transpose(1, 2))
        return super().update(*rows, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8_e4m3", "q8_0", "q4_0"])
def test_rows_of_other_dtypes(model, dtype):
    ids = random_ids(1, 30)
    _, error = bound(model, ids)
    rounded = logits(model, "eager", ids, Rounding(model.config, dtype), (12,))
    found = logits(model, "kvtwin", ids, cache_of(model, dtype=dtype), (12,))
    # Numbers at the edge between two steps of the dtype may be rounded to either.
    effect = (rounded - logits(model, "eager", ids)).abs().max()
    assert (found - rounded).abs().max() <= error + effect / 2


def test_a_model_of_bf16(llama):
    ids = random_ids(1, 30)
    model = make("Llama").to(torch.bfloat16)
    exact = logits(llama, "eager", ids)
    error = (logits(model, "sdpa", ids, DynamicCache(), (12,)) - exact).abs().max()
    found = logits(model, "kvtwin", ids, cache_of(model, dtype="bf16"), (12,))
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 2 * error


def test_products_of_bf16(llama):
    """Products are rounded where the processor has bf16, by less than a model of bf16."""
    ids = random_ids(1, 60)
    whole = logits(make("Llama").to(torch.bfloat16), "sdpa", ids)
    exact = logits(llama, "kvtwin", ids, cache_of(llama), (40,))
    cache = cache_of(llama, bf16_products=True)
    found = logits(llama, "kvtwin", ids, cache, (40,))
    assert (found - exact).abs().max() <= (whole - exact).abs().max()
    rows = np.linspace(-1, 1, 40 * 16, dtype=np.float32).reshape(40, 1, 16)
    attention = kvtwin.Attention()
    attention.plan(np.ones((40, 40), bool))
    results = [
        attention.attend(rows, (rows, rows), scale=1.0, bf16_products=rounds).out
        for rounds in (False, True)
    ]
    assert (found != exact).any() == (results[0] != results[1]).any()


def padded(rows=3, tokens=17):
    ids, mask = random_ids(rows, tokens), torch.ones((rows, tokens), dtype=torch.long)
    for row, pad in enumerate((0, 6, 11)[:rows]):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


GENERATE = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "several": {"num_return_sequences": 3, "do_sample": True},
}


def generate(model, implementation, cache, **given):
    model.set_attn_implementation(implementation)
    torch.manual_seed(7)
    given = {"max_new_tokens": 30, "do_sample": False, **given}
    return model.generate(past_key_values=cache, **given)


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("rows", [1, 3])
def test_generate_gives_the_same_tokens(model, how, rows):
    given = {**padded(rows), **GENERATE[how]}
    expected = generate(model, "eager", DynamicCache(config=model.config), **given)
    cache = cache_of(model, max_sequences=9)
    assert torch.equal(generate(model, "kvtwin", cache, **given), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral"])
def test_assisted_generation_crops(name):
    model, assistant = make(name), make("Llama", num_hidden_layers=1)
    given = {"input_ids": random_ids(1, 12), "assistant_model": assistant}
    plain = generate(model, "eager", DynamicCache(config=model.config), **given)
    crops = []

    class Counting(Cache):
        def crop(self, tokens_to_remove):
            crops.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Counting(model.config, capacity=64)
    assert torch.equal(generate(model, "kvtwin", cache, **given), plain)
    assert min(crops) < 0


def test_padding_is_not_stored(llama):
    cache = cache_of(llama, max_sequences=3)
    given = padded()
    logits(llama, "kvtwin", given["input_ids"], cache, (17,),
           attention_mask=given["attention_mask"])
    held = cache._state.storage.cache.cells()
    assert len(held) == int(given["attention_mask"].sum())


def test_padding_on_the_right_and_holes(llama):
    ids = random_ids(2, 12)
    mask = torch.ones((2, 12), dtype=torch.long)
    mask[0, 9:] = mask[1, 4:6] = 0
    # The positions that a model uses by default ignore the mask, too.
    expected = logits(llama, "eager", ids, attention_mask=mask)
    found = logits(llama, "kvtwin", ids, cache_of(llama, max_sequences=2), (5, 7),
                   attention_mask=mask)
    _, error = bound(llama, ids)
    real = mask.bool()
    assert (found - expected)[real].abs().max() <= error


def test_any_other_mask_is_read_as_it_is(llama):
    """4D masks, of bool and of numbers, on a cache that has tokens already."""
    ids = random_ids(2, 12)
    allowed = torch.rand((2, 1, 12, 12), generator=torch.Generator().manual_seed(3))
    allowed = (allowed < 0.5) | torch.eye(12, dtype=torch.bool)
    numbers = torch.zeros(allowed.shape).masked_fill(
        ~allowed, torch.finfo(torch.float32).min)
    expected = logits(llama, "eager", ids, attention_mask=numbers)
    _, error = bound(llama, ids)
    for mask in (allowed, numbers):
        cache = cache_of(llama, max_sequences=2)
        llama.set_attn_implementation("kvtwin")
        with torch.no_grad():
            # The first seven tokens may see the last five only once these are there.
            first = mask[:, :, :7, :7]
            llama(ids[:, :7], past_key_values=cache, attention_mask=first)
            found = llama(
                ids[:, 7:], past_key_values=cache, attention_mask=mask[:, :, 7:]
            ).logits
        hidden = logits(llama, "eager", ids, attention_mask=torch.where(
            torch.arange(12)[:, None] < 7,
            torch.where(torch.arange(12) < 7, numbers, numbers.min()), numbers))
        assert (found - hidden[:, 7:]).abs().max() <= error
    assert expected.shape == hidden.shape


def bart():
    torch.manual_seed(3)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=128, init_std=0.3,
        forced_eos_token_id=None, eos_token_id=None, pad_token_id=0,
        decoder_start_token_id=1,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def test_an_encoder_and_a_decoder():
    model = bart()
    for rows in (1, 3):
        for how in ({}, {"num_beams": 3}):
            given = {**padded(rows), **how}
            model.set_attn_implementation("eager")
            expected = model.generate(max_new_tokens=20, do_sample=False, **given)
            model.set_attn_implementation("kvtwin")
            cache = EncoderDecoderCache(
                model.config, capacity=64, encoder_capacity=32, max_sequences=9
            )
            found = generate(model, "kvtwin", cache, max_new_tokens=20, **given)
            assert torch.equal(found, expected)


def whisper():
    torch.manual_seed(3)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=30, init_std=0.3,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


def test_whisper():
    model = whisper()
    sound = torch.randn((2, 8, 60), generator=torch.Generator().manual_seed(1))
    ids = random_ids(2, 20)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(sound, decoder_input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("kvtwin")
        cache = EncoderDecoderCache(
            model.config, capacity=32, encoder_capacity=30, max_sequences=2
        )
        found = [model(sound, decoder_input_ids=ids[:, i : i + 5],
                       past_key_values=cache).logits for i in range(0, 20, 5)]
    assert (torch.cat(found, 1) - expected).abs().max() <= 1e-4


# Sessions.


def test_forks_share_rows_and_continue_alone(model):
    ids, other = random_ids(1, 30), random_ids(1, 31)[:, :8]
    exact, error = bound(model, ids)
    cache = cache_of(model, max_sequences=2)
    logits(model, "kvtwin", ids[:, :20], cache, (20,))
    before = len(cache._state.storage.cache.cells())
    fork = cache.fork()
    assert fork.get_seq_length() == 20
    logits(model, "kvtwin", other, fork, (8,))
    found = logits(model, "kvtwin", ids[:, 20:], cache, (3,))
    assert (found - exact[:, 20:]).abs().max() <= error
    del fork, found
    gc.collect()
    sequences = {entry[2] for entry in cache._state.storage.cache.cells()}
    assert len(sequences) == 1 and before


def test_a_fork_has_the_longest_known_prefix(llama):
    system, a, b = random_ids(1, 12), random_ids(1, 5), random_ids(1, 6)
    cache = cache_of(llama, max_sequences=3)
    logits(llama, "kvtwin", system, cache, (12,))
    cache.tokens = system
    first = cache.fork(torch.cat([system, a], 1))
    assert first.get_seq_length() == 12
    logits(llama, "kvtwin", a, first, (5,))
    first.tokens = torch.cat([system, a], 1)
    # The fork has all of the same tokens except the last: it is computed again.
    assert cache.fork(first.tokens).get_seq_length() == 16
    assert cache.fork(torch.cat([system, b], 1)).get_seq_length() == 12
    assert cache.fork(b).get_seq_length() == 0
    assert first.fork(length=14).tokens == torch.cat([system, a], 1)[0, :14].tolist()
    exact, error = bound(llama, torch.cat([system, b], 1))
    found = logits(llama, "kvtwin", b, cache.fork(torch.cat([system, b], 1)), (6,))
    assert (found - exact[:, 12:]).abs().max() <= error


def test_crop_goes_back(model):
    ids = random_ids(1, 30)
    exact, error = bound(model, ids)
    cache = cache_of(model)
    logits(model, "kvtwin", ids[:, :20], cache, (15,))
    logits(model, "kvtwin", random_ids(1, 4), cache, (4,))
    cache.crop(-4)
    found = logits(model, "kvtwin", ids[:, 20:], cache, (5,))
    assert (found - exact[:, 20:]).abs().max() <= error


def test_a_saved_conversation_goes_on(model, tmp_path):
    ids = random_ids(1, 30)
    exact, error = bound(model, ids)
    cache = cache_of(model)
    logits(model, "kvtwin", ids[:, :20], cache, (20,))
    cache.save(tmp_path / "chat", "tiny")
    loaded = cache_of(model, max_sequences=2)
    with pytest.raises(ValueError, match="tiny"):
        loaded.load(tmp_path / "chat", "other")
    loaded.load(tmp_path / "chat", "tiny")
    assert loaded.get_seq_length() == 20
    found = logits(model, "kvtwin", ids[:, 20:], loaded, (4,))
    assert (found - exact[:, 20:]).abs().max() <= error


@pytest.mark.parametrize("scaled", [False, True])
def test_a_context_shift_turns_keys(scaled):
    """In one layer, rows do not depend on earlier tokens: after the removal of a part,
    they are those of a model that never had it."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    more = {"rope_parameters": rope} if scaled else {}
    model = make("Llama", num_hidden_layers=1, **more)
    ids = random_ids(1, 30)
    kept = torch.cat([ids[:, :5], ids[:, 14:]], 1)
    exact, error = bound(model, kept)
    cache = cache_of(model)
    logits(model, "kvtwin", ids[:, :25], cache, (25,))
    cache.remove(5, 14)
    assert cache.get_seq_length() == 16
    found = logits(model, "kvtwin", ids[:, 25:], cache, (2,))
    assert (found - exact[:, 16:]).abs().max() <= 4 * error  # K is rounded once more.


def test_reset_and_use_again(model):
    ids = random_ids(1, 20)
    cache = cache_of(model, capacity=24)
    first = logits(model, "kvtwin", ids, cache, (10,))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, "kvtwin", ids, cache, (10,)), first)


# Refusals.


def test_a_full_cache(llama):
    cache = cache_of(llama, capacity=10)
    with pytest.raises(kvtwin.CacheFull, match="capacity=10"):
        logits(llama, "kvtwin", random_ids(1, 11), cache, (11,))
    assert cache.get_seq_length() == 0
    logits(llama, "kvtwin", random_ids(1, 10), cache, (10,))


def test_refusals(llama, tmp_path):
    with pytest.raises(ValueError, match="3 sequences, max_sequences is 2"):
        logits(llama, "kvtwin", random_ids(3, 4), cache_of(llama, max_sequences=2), (4,))
    with pytest.raises(kvtwin.NotSupported, match="'sdpa'.*attn_implementation='kvtwin'"):
        logits(llama, "sdpa", random_ids(1, 4), cache_of(llama), (4,))
    cache = cache_of(llama, max_sequences=2)
    logits(llama, "kvtwin", random_ids(1, 4), cache, (4,))
    with pytest.raises(ValueError, match="2 sequences, the cache has 1"):
        logits(llama, "kvtwin", random_ids(2, 4), cache, (4,))
    with pytest.raises(ValueError, match="crop by 5 tokens, the cache has 4"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="remove from 1 to 9, the cache has 4"):
        cache.remove(1, 9)
    with pytest.raises(ValueError, match="fork of 9 tokens, the cache has 4"):
        cache.fork(length=9)
    with pytest.raises(ValueError, match="load into a cache that has 4 tokens"):
        cache.load(tmp_path / "missing")
    with pytest.raises(RuntimeError, match="missing"):
        cache_of(llama).load(tmp_path / "missing")
    with pytest.raises(ValueError, match="2 tokens, the cache has 4"):
        cache.tokens = [1, 2]
    with pytest.raises(kvtwin.NotSupported, match="output_attentions"):
        logits(llama, "kvtwin", random_ids(1, 1), cache, output_attentions=True)
    with pytest.raises(kvtwin.NotSupported, match="EncoderDecoderCache"):
        Cache(transformers.BartConfig(), capacity=8)
    with pytest.raises(kvtwin.NotSupported, match="linear_attention"):
        Cache(transformers.Qwen3NextConfig(num_hidden_layers=4), capacity=8)


def test_an_attention_mask_that_changes(llama):
    given = padded()
    ids, mask = given["input_ids"], given["attention_mask"]
    cache = cache_of(llama, max_sequences=3)
    logits(llama, "kvtwin", ids[:, :12], cache, (12,), attention_mask=mask[:, :12])
    changed = mask.clone()
    changed[1, 2] = 1
    with pytest.raises(kvtwin.NotSupported, match="attention_mask has changed"):
        llama(ids[:, 12:], past_key_values=cache, attention_mask=changed)


def test_an_interrupted_pass(llama):
    ids = random_ids(1, 20)
    exact, error = bound(llama, ids)
    cache = cache_of(llama)
    logits(llama, "kvtwin", ids[:, :15], cache, (15,))
    layer = llama.model.layers[2]
    hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        logits(llama, "kvtwin", random_ids(1, 3), cache, (3,))
    hook.remove()
    with pytest.raises(kvtwin.NotSupported, match="layer 2 got no rows"):
        logits(llama, "kvtwin", ids[:, 15:], cache, (5,))
    cache.crop(-3)
    found = logits(llama, "kvtwin", ids[:, 15:], cache, (5,))
    assert (found - exact[:, 15:]).abs().max() <= error


def test_without_a_cache_it_is_sdpa(llama):
    given = padded()
    mask = given["attention_mask"]
    expected = logits(llama, "sdpa", given["input_ids"], attention_mask=mask)
    found = logits(llama, "kvtwin", given["input_ids"], attention_mask=mask)
    assert torch.equal(found, expected)
    own = logits(llama, "kvtwin", given["input_ids"], DynamicCache(), (9,),
                 attention_mask=mask)
    _, error = bound(llama, given["input_ids"])
    assert (own - expected)[mask.bool()].abs().max() <= error
    with pytest.raises(kvtwin.NotSupported, match="soft cap"):
        logits(make("Gemma2"), "kvtwin", given["input_ids"])


def test_a_window_cannot_go_back_beyond_its_tokens():
    model = make("Mistral")
    cache = cache_of(model)
    logits(model, "kvtwin", random_ids(1, 30), cache, (20,))
    for call in (lambda: cache.crop(-9), lambda: cache.fork(length=15)):
        with pytest.raises(kvtwin.NotSupported, match="evicted"):
            call()
    assert cache.get_seq_length() == 30


def test_keys_cannot_be_computed_with(llama):
    cache = cache_of(llama)
    llama.set_attn_implementation("kvtwin")
    key, value = cache.update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32), 0)
    with pytest.raises(Exception, match="meta|device"):
        torch.ones(1, 2, 3, 32) @ key.transpose(2, 3) + torch.ones(1)
    assert key is value and np.prod(key.shape)


# Audit.


def audited(model, cache, tokens=12, **given):
    with kvtwin.transformers.Audit(model) as audit:
        model.generate(past_key_values=cache, max_new_tokens=tokens, do_sample=False,
                       **{"input_ids": random_ids(1, 20), **given})
    return audit


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("how", ["greedy", "beams", "prefill in chunks"])
def test_audit_finds_nothing_in_right_caches(model, implementation, how):
    if implementation == "sdpa" and model.config.model_type in ("gemma2", "gpt_oss"):
        pytest.skip("sdpa has no soft cap and no sinks")
    model.set_attn_implementation(implementation)
    for make_cache in (DynamicCache, transformers.StaticCache):
        more = {"config": model.config}
        if make_cache is transformers.StaticCache:
            more["max_cache_len"] = 64
        given = {**padded(3 if how == "greedy" else 1), **GENERATE[how]}
        audit = audited(model, make_cache(**more), **given)
        assert audit, str(audit)
        assert audit.layers > 40 and "right" in str(audit)
        assert model.config._attn_implementation == implementation


class Drops(DynamicCache):
    """Loses a token of a layer as it grows."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 2 and key.shape[2] == 25:
            key, value = key[:, :, 1:], value[:, :, 1:]
        return key, value


class Doubles(DynamicCache):
    """Stores a token over the one before it."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 1 and key.shape[2] >= 24:
            key, value = key.clone(), value.clone()
            key[:, :, 8], value[:, :, 8] = key[:, :, 7], value[:, :, 7]
        return key, value


class Swaps(DynamicCache):
    """Changes numbers of a row."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 3 and key.shape[2] == 22:
            value[:, :, 5] += 1
        return key, value


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("cache", "finding"), [
    (Drops, "layer 2, row 0, token 24: attention misses token 0"),
    (Doubles, "layer 1, row 0, token 23: attention misses token 8; reads token 7, twice"),
    (Swaps, "layer 3, row 0, token 21: attention misses token 5; reads a row that "
            "belongs to no token"),
])
def test_audit_finds_a_bug_of_a_cache(llama, implementation, cache, finding):
    if implementation == "eager" and cache is Drops:
        pytest.skip("eager raises an error: the mask has another size")
    llama.set_attn_implementation(implementation)
    assert str(audited(llama, cache())) == finding


def test_audit_finds_a_wrong_window():
    model = make("Mistral")
    model.set_attn_implementation("sdpa")
    wrong = transformers.MistralConfig(**{**SMALL, "sliding_window": 7})
    audit = audited(model, DynamicCache(config=wrong))
    assert not audit
    assert audit.finding.startswith("layer 0, row 0, token 20: attention misses token 1")


def test_audit_finds_a_wrong_scale(llama):
    def unscaled(*args, **kwargs):
        kwargs["scaling"] = 1.0
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            *args, **kwargs)

    transformers.AttentionInterface.register("unscaled", unscaled)
    transformers.AttentionMaskInterface.register(
        "unscaled", transformers.masking_utils.sdpa_mask)
    llama.set_attn_implementation("unscaled")
    audit = audited(llama, DynamicCache())
    assert audit.finding.startswith("layer 0: attention reads the right rows, and its")


def test_audit_finds_the_bug_of_transformers():
    """docs/backends/transformers.md: a sliding window of one token sees everything."""
    model = make("Mistral", sliding_window=1)
    model.set_attn_implementation("sdpa")
    audit = audited(model, DynamicCache(config=model.config))
    assert audit.finding.startswith(
        "layer 0, row 0, token 20: attention reads token 0, which it must not see"
    )
    ids = random_ids(1, 30)
    exact, error = bound(model, ids)
    found = logits(model, "kvtwin", ids, cache_of(model), (20,))
    assert (found - exact).abs().max() <= error


def encoder_decoder(cross=DynamicCache):
    return transformers.EncoderDecoderCache(DynamicCache(), cross())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_audit_follows_cross_attention(implementation, how):
    model = bart()
    model.set_attn_implementation(implementation)
    with kvtwin.transformers.Audit(model) as audit:
        caches = [encoder_decoder(), encoder_decoder()]
        for cache in caches:
            model.generate(past_key_values=cache, max_new_tokens=12, do_sample=False,
                           **padded(3), **how)
        # The first cache again, whose encoder is not computed anew.
        rows = 3 * how.get("num_beams", 1)
        more = padded(3)["attention_mask"].repeat_interleave(rows // 3, 0)
        length = caches[0].cross_attention_cache.layers[0].keys.shape[2]
        encoded = transformers.modeling_outputs.BaseModelOutput(
            last_hidden_state=torch.zeros(rows, length, 64))
        model(decoder_input_ids=random_ids(rows, 1), past_key_values=caches[0],
              encoder_outputs=encoded, attention_mask=more)
    assert audit, str(audit)
    # Self attention and cross attention, of each of the two layers, in each pass.
    assert audit.layers == 2 * 2 * (2 * 12 + 1)


class Unordered(DynamicCache):
    """Keeps the rows of the encoder where they are when beams are chosen."""

    def reorder_cache(self, beam_idx):
        pass


class Forgets(DynamicCache):
    """Loses the last row of the encoder in layer 1."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 1:
            key_states, value_states = key_states[:, :, :-1], value_states[:, :, :-1]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_audit_finds_bugs_of_cross_attention():
    model = whisper()
    model.set_attn_implementation("sdpa")
    sound = torch.randn((2, 8, 60), generator=torch.Generator().manual_seed(1))
    with kvtwin.transformers.Audit(model) as audit:
        for _ in range(2):
            model(sound, decoder_input_ids=random_ids(2, 3),
                  past_key_values=encoder_decoder())
        assert audit and audit.layers == 2 * 2 * 2
        model(sound, decoder_input_ids=random_ids(2, 3),
              past_key_values=encoder_decoder(Forgets))
    assert audit.finding == (
        "layer 1, row 0, token 0 of the pass: cross attention misses token 29")
    with kvtwin.transformers.Audit(model) as audit:
        cache = encoder_decoder(Unordered)
        model(sound, decoder_input_ids=random_ids(2, 3), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(sound, decoder_input_ids=random_ids(2, 1), past_key_values=cache)
    assert audit.finding.startswith(
        "layer 0, row 0, token 0 of the pass: cross attention misses token ")
