"""Repairs of the bugs of llama_python.md, so that others would show, and faults
that the driver must see. Each repair takes a function of llama-cpp-python and
returns another."""

import copy
import inspect
import textwrap

import numpy as np
from llama_cpp import Llama, LogitsProcessorList, llama_cpp
from llama_cpp import _internals as internals


def keep_windows(rule):
    """Tokens stay if the window of the first token that is removed has lost some."""
    def kv_cache_seq_rm(context, seq_id, p0, p1):
        window = llama_cpp.llama_model_n_swa(context.model.model)
        first = llama_cpp.llama_memory_seq_pos_min(context.memory, 0)
        if window and p0 > 0 and first > max(0, p0 - window + 1):
            return False
        return rule(context, seq_id, p0, p1)
    return kv_cache_seq_rm


def all_scores(rule):
    """There is a row of scores for each token of the context."""
    def __init__(llama, *args, **kwargs):
        rule(llama, *args, **kwargs)
        if llama.draft_model:
            shape = len(llama.input_ids), llama.n_vocab()
            llama.scores = np.zeros(shape, np.single)
    return __init__


def whole_context(rule):
    """The buffers have the size of llama.cpp's context."""
    def __init__(llama, *args, **kwargs):
        rule(llama, *args, **kwargs)
        rows = llama.n_ctx() if len(llama.scores) == len(llama.input_ids) else 0
        llama.input_ids = np.zeros(llama.n_ctx(), np.intc)
        if rows:
            llama.scores = np.zeros((rows, llama.n_vocab()), np.single)
    return __init__


def never_draft_states(rule):
    """Models with states have no drafts."""
    def __init__(llama, *args, **kwargs):
        rule(llama, *args, **kwargs)
        if llama._is_recurrent or llama._is_hybrid:
            llama.draft_model = None
    return __init__


def draft_a_batch(rule):
    """A token and its draft fit a batch."""
    def __init__(llama, *args, **kwargs):
        rule(llama, *args, **kwargs)
        draft = llama.draft_model
        if draft:
            llama.draft_model = lambda tokens: draft(tokens)[:llama.n_batch - 1]
    return __init__


def drop_rest(rule):
    """When an answer ends, the rest of its draft leaves the cache."""
    def generate(llama, *args, **kwargs):
        try:
            yield from rule(llama, *args, **kwargs)
        finally:
            known = len(llama.text.tokens) - 1
            if llama.n_tokens > known:
                llama.n_tokens, llama._requires_eval = known, True
    return generate


def continue_after(rule):
    """What is sent is a part of the text."""
    def generate(llama, tokens, *args, **kwargs):
        text, inner = list(tokens), rule(llama, tokens, *args, **kwargs)
        for token in iter(lambda: next(inner, None), None):
            text.append(token)
            sent = yield token
            if sent:
                text += sent
                inner = rule(llama, text, *args, **kwargs)
    return generate


def leave_no_sampler(rule):
    """The sampler of an answer ends with it."""
    def generate(llama, *args, **kwargs):
        try:
            yield from rule(llama, *args, **kwargs)
        finally:
            llama._sampler = None
    return generate


def count_prompt(rule):
    """Penalties count the tokens of the prompt, too."""
    def _init_sampler(llama, *args, grammar=None, **kwargs):
        sampler = rule(llama, *args, grammar=grammar, **kwargs)
        if grammar is None and llama.text:
            for token in llama.text.tokens[-llama.last_n_tokens_size:]:
                sampler.accept(token)
        return sampler
    return _init_sampler


def show_text(rule):
    """Processors and criteria get the text, without a draft."""
    def _create_completion(llama, *args, logits_processor=None,
                           stopping_criteria=None, **kwargs):
        processors, criteria = logits_processor, stopping_criteria

        def known(tokens):
            text = llama.text.tokens
            return np.array(text[:len(text) - llama.text.ended][:len(tokens)])

        def process(tokens, logits):
            return processors(known(tokens), logits)

        def stop(tokens, logits):
            return criteria(known(tokens), logits)

        return rule(llama, *args, **kwargs,
                    logits_processor=processors and LogitsProcessorList([process]),
                    stopping_criteria=criteria and stop)
    return _create_completion


def show_last(rule):
    """Criteria get the logits of the last token."""
    def _create_completion(llama, *args, stopping_criteria=None, **kwargs):
        def stop(tokens, logits):
            if llama._logits_all:
                logits = llama.scores[len(tokens) - 1]
            return stopping_criteria(tokens, logits)

        return rule(llama, *args, stopping_criteria=stopping_criteria and stop,
                    **kwargs)
    return _create_completion


def add_bias(rule):
    """A bias joins the processors in a list of its own."""
    def _create_completion(llama, *args, logits_processor=None, logit_bias=None,
                           **kwargs):
        def bias(tokens, logits):
            logits = np.copy(logits)
            for token, value in logit_bias.items():
                logits[token] += value
            return logits

        if logit_bias:
            logits_processor = LogitsProcessorList(
                [*(logits_processor or ()), bias])
        return rule(llama, *args, logits_processor=logits_processor, **kwargs)
    return _create_completion


def score_echoes(rule):
    """The logprob of a token is that of the logits before it."""
    def _create_completion(llama, *args, logprobs=None, echo=False, **kwargs):
        for said in rule(llama, *args, logprobs=logprobs, echo=echo, **kwargs):
            tokens = llama.text.tokens
            if echo and logprobs and tokens[0] != llama.token_bos():
                rows = Llama.logits_to_logprobs(llama._scores)
                said["choices"][0]["logprobs"]["token_logprobs"] = [None] + [
                    row[token] for row, token in zip(rows, tokens[1:])
                    if token not in (llama.token_bos(), llama.token_eos())]
            yield said
    return _create_completion


def end_embeddings(rule):
    """If embeddings fail, their tokens are removed."""
    def embed(llama, *args, **kwargs):
        try:
            return rule(llama, *args, **kwargs)
        except ValueError:
            llama._ctx.kv_cache_clear()
            llama.reset()
            raise
    return embed


def name_model(rule):
    """A state has the path and the context size of its model."""
    def save_state(llama):
        state = rule(llama)
        state.model = llama.model_path, llama.n_ctx()
        return state
    return save_state


def load_own(rule):
    """States of other models are not loaded."""
    def load_state(llama, state):
        if state.model == (llama.model_path, llama.n_ctx()):
            rule(llama, state)
    return load_state


def load_whole(rule):
    """After a load that fails, the object has no tokens."""
    def load_state(llama, state):
        try:
            rule(llama, state)
        except RuntimeError:
            llama._ctx.kv_cache_clear()
            llama.reset()
            raise
    return load_state


def count_scores(rule):
    """The bytes of a state are those of its scores, too."""
    def save_state(llama):
        state = rule(llama)
        state.llama_state_size += state.scores.nbytes
        return state
    return save_state


def cut_count(rule):
    """llama.cpp gets the size of its part of a state, without the scores."""
    def load_state(llama, state):
        state = copy.copy(state)
        state.llama_state_size = len(state.llama_state)
        rule(llama, state)
    return load_state


REPAIRS = {
    "window": [(internals.LlamaContext, "kv_cache_seq_rm", keep_windows)],
    "odd": [(Llama, "__init__", whole_context)],
    "scores": [(Llama, "__init__", all_scores)],
    "states": [(Llama, "__init__", never_draft_states)],
    "batch": [(Llama, "__init__", draft_a_batch)],
    "rest": [(Llama, "generate", drop_rest)],
    "sampler": [(Llama, "generate", leave_no_sampler)],
    "sent": [(Llama, "generate", continue_after)],
    "penalty": [(Llama, "_init_sampler", count_prompt)],
    "echo": [(Llama, "_create_completion", score_echoes)],
    "shown": [(Llama, "_create_completion", show_text)],
    "row": [(Llama, "_create_completion", show_last)],
    "bias": [(Llama, "_create_completion", add_bias)],
    "embed": [(Llama, "embed", end_embeddings)],
    "failed": [(Llama, "load_state", load_whole)],
    "model": [(Llama, "save_state", name_model),
              (Llama, "load_state", load_own)],
    "room": [(Llama, "save_state", count_scores),
             (Llama, "load_state", cut_count)],
}


def changed(owner, name, old, new):
    """Returns a function of a class with one line changed."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
    names = {}
    module = inspect.getmodule(getattr(owner, name))
    exec(source.replace(old, new), vars(module), names)
    return names[name]


REMOVE = "self._ctx.kv_cache_seq_rm(-1, {}, -1)"
REUSED = REMOVE.format("reuse_prefix")
BATCH = internals.LlamaBatch
#: A name, the setup in which it is tried, the function, and the text that is changed.
FAULTS = [
    ("a whole prompt is found without its last token's logits", "Plain",
     Llama, "generate", "longest_prefix - 1 if prompt_consumed", "longest_prefix if 1"),
    ("a prefix is a token too long", "Plain",
     Llama, "generate", "longest_prefix = 0", "longest_prefix = 1"),
    ("logits before a state was loaded are used", "RAM",
     Llama, "generate", " and not self._requires_eval", ""),
    ("tokens of the text before stay", "Plain",
     Llama, "eval", REMOVE.format("self.n_tokens"), "pass"),
    ("a refused removal counts as done", "States",
     Llama, "generate", f"if {REUSED}", f"if {REUSED} or True"),
    ("a rejected token of a draft stays", "DraftLogits",
     Llama, "generate", "self.n_tokens = sample_idx", "self.n_tokens = sample_idx + 1"),
    ("each token of a draft has the last logits", "DraftLogits",
     Llama, "sample", "idx - self.n_tokens if", "-1 if"),
    ("a draft does not fit the context", "FullDraft",
     Llama, "generate", ": self._n_ctx - self.n_tokens - len(tokens)", ":"),
    ("scores are a row late", "Logits",
     Llama, "eval", "n_past + n_tokens, :].reshape(-1)[::] = logits",
     "n_past + n_tokens, :].reshape(-1)[::] = np.roll(logits, cols)"),
    ("the logits of the first token of a batch are used", "Plain",
     BATCH, "set_batch", "logits[n_tokens - 1]", "logits[0]"),
    ("positions are a token late", "Plain",
     BATCH, "set_batch", "n_past + i", "n_past + i + (n_past > 20)"),
    ("a loaded state has the tokens of the text before", "Plain",
     Llama, "load_state", "self.input_ids = state.input_ids.copy()", "pass"),
    ("a saved state has a token too many", "Plain",
     Llama, "save_state", "n_tokens=self.n_tokens", "n_tokens=self.n_tokens + 1"),
    ("an answer does not fit the context", "Full",
     Llama, "_create_completion", "else (self._n_ctx - len(prompt_tokens))",
     "else max_tokens"),
    ("embeddings leave the text before", "Embedding",
     Llama, "embed", "self._ctx.kv_cache_clear()\n    self.reset()", "pass"),
    ("penalties see eight tokens", "Penalties",
     Llama, "_init_sampler", "penalty_last_n=self.last_n_tokens_size",
     "penalty_last_n=8"),
    ("a prefix is removed a token late", "Plain",
     Llama, "generate", REUSED, REMOVE.format("reuse_prefix + 1")),
    ("a reset leaves states", "States",
     Llama, "reset", "if self._is_recurrent or self._is_hybrid", "if False"),
]
