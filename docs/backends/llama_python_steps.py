"""llama-cpp-python's class Llama, call by call: random requests, whose tokens and
logits must be those of a fresh context."""

import dataclasses
import functools
import os
import random
import tempfile

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Tiny matrices gain nothing from threads.
os.environ["GGML_NO_BACKTRACE"] = "1"

import llama_python_models
import numpy as np
from histories import Wrong, in_child, log_softmax, played
from llama_cpp import (Llama, LlamaDiskCache, LlamaGrammar, LlamaRAMCache,
                       LogitsProcessorList, StoppingCriteriaList, llama_cpp)
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_model import VOCAB

lib = llama_cpp
BEGIN, END, FIRST = 1, 2, 4  # <s>, </s>, and the first letter.
#: The largest difference of logits; their standard deviation is 1: llama.md.
BOUND = 2e-4
BIASED, BIAS = 7, 3.0
FEW = [5, 6, 7]
PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.4,
             "presence_penalty": 0.2}
#: A chat has letters only, as the vocabulary has.
CHAT = "{% for said in messages %}{{said.role[0]}}{{said.content}}{% endfor %}A"
LARGEST = 1024  # The most tokens of a text.


@dataclasses.dataclass(frozen=True)
class Setup:
    arch: str = "llama"
    context: int = 256  # n_ctx.
    batch: int = 16  # n_batch and n_ubatch.
    logits: bool = False  # logits_all.
    draft: int = 0  # num_pred_tokens of LlamaPromptLookupDecoding.
    cache: str = ""  # The class of the cache: "ram" or "disk".
    room: int = 100  # The states that fit the cache.
    short: bool = False  # swa_full=False.
    embedding: bool = False
    others: tuple = ()  # Another model with the same folder for its cache.
    larger: bool = False  # Each restart has a larger n_ctx.
    sends: bool = False  # Tokens are sent to generators.
    begins: bool = False  # Texts begin with <s>.
    longest: int = 40  # The most tokens of a prompt.
    ways: tuple = ("generate", "complete", "stream", "chat", "hot", "grammar",
                   "stop")


@functools.cache
def folder():
    """A folder for models, which goes away with the process."""
    return tempfile.TemporaryDirectory(prefix="llama_python")


@functools.cache
def model_path(arch, seed, begins):
    path = f"{folder().name}/{arch}-{seed}-{begins}.gguf"
    llama_python_models.write(path, arch, seed, begins)
    return path


@functools.cache
def model(arch, seed):
    """The model for fresh contexts."""
    lib.llama_log_set(silent, None)
    params = lib.llama_model_default_params()
    path = model_path(arch, seed, False)
    return lib.llama_model_load_from_file(path.encode(), params)


@lib.llama_log_callback
def silent(level, text, data):
    pass


@functools.lru_cache(1000)
def fresh(arch, seed, tokens):
    """Returns the logits of each token, from a context that has just been made and
    computes all of them at once."""
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = LARGEST
    params.type_k = params.type_v = params.flash_attn_type = 0
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model(arch, seed), params)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.seq_id[i][0] = token, i, 0
        batch.n_seq_id[i] = batch.logits[i] = 1
    assert lib.llama_decode(context, batch) == 0
    rows = lib.llama_get_logits(context)
    logits = np.ctypeslib.as_array(rows, (len(tokens), VOCAB)).copy()
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    return logits


class Watched(Llama):
    """Notes the tokens that generate gives, and the logits that it draws them
    from."""

    text = None

    def generate(self, tokens, *args, before=(), **kwargs):
        self.text = text = Text([*before, *tokens])
        inner, sent = super().generate(tokens, *args, **kwargs), None
        try:
            while True:
                token = inner.send(sent)
                row = len(text.tokens) - 1 - self.n_tokens
                row = self._ctx.get_logits_ith(row)
                text.add(token, np.ctypeslib.as_array(row, (VOCAB,)).copy()
                         if row else np.full(VOCAB, np.nan))
                sent = yield token
                text.tokens += sent or []
        except StopIteration:
            pass
        finally:
            text.ended = True


class Text:
    """The tokens of a prompt and its answer, and what was seen meanwhile."""

    def __init__(self, prompt):
        self.tokens, self.prompt, self.ended = list(prompt), len(prompt), False
        self.drawn = []  # Lengths of the text, tokens, and logits.
        self.watched = []  # Tokens and logits that callbacks were given.

    def add(self, token, logits):
        self.drawn.append((len(self.tokens), token, logits))
        self.tokens.append(token)


class Engine:
    def __init__(self, setup):
        self.setup, self.asked, self.states = setup, [], {}
        self.model, self.other = (setup.arch, 1), setup.others
        self.answer, self.last, self.restarts = None, [], 0
        self.processors = LogitsProcessorList([self.process])
        self.folder = tempfile.TemporaryDirectory(prefix="llama_cache")
        self.start()

    def start(self):
        """Makes an object, as a program does when it begins."""
        setup, self.last = self.setup, []
        self.context = setup.context + 128 * setup.larger * self.restarts
        self.llama = Watched(
            model_path(*self.model, setup.begins), n_ctx=self.context,
            n_batch=setup.batch, n_ubatch=setup.batch, type_k=0, type_v=0,
            logits_all=setup.logits, embedding=setup.embedding, verbose=False,
            n_threads=1, n_threads_batch=1,
            swa_full=False if setup.short else None,
            chat_handler=Jinja2ChatFormatter(CHAT, "</s>", "").to_chat_handler(),
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=setup.draft)
            if setup.draft else None)
        # NumPy leaves what was in this memory, and caches compare all of it.
        self.llama.input_ids.fill(0)
        self.llama.scores.fill(0)
        self.states = {}
        # About the bytes of a state of 40 tokens.
        self.room = setup.room * {
            "mamba": 30_000, "lfm2": 15_000}.get(setup.arch, 60_000)
        if setup.cache == "ram":
            self.llama.set_cache(LlamaRAMCache(self.room))
        elif setup.cache == "disk":
            self.llama.set_cache(LlamaDiskCache(self.folder.name, self.room))

    def play(self, ops):
        try:
            return played(self, ops)
        finally:
            self.llama.close()
            self.folder.cleanup()

    def add(self, like, cut, more, limit, way):
        """Asks a prompt that begins like an earlier text. `more` is how many tokens
        follow, and which."""
        begin = self.asked[like % len(self.asked)][:cut] if self.asked else []
        tokens = begin + [FIRST + (k * k + more) % 7 for k in range(more)]
        tokens = [token for token in tokens if token not in (BEGIN, END)]
        self.ask(tokens[:self.setup.longest], limit, way)

    def again(self, which, limit, way):
        """Asks an earlier text again."""
        if self.asked:
            self.ask(self.asked[which % len(self.asked)], limit, way)

    def ask(self, tokens, limit, way):
        self.abort()
        tokens = tokens[:self.setup.longest] or [FIRST]
        ways = self.setup.ways
        try:
            getattr(self, ways[way % len(ways)])(tokens, max(1, limit))
        except (ValueError, RuntimeError) as error:
            self.last = []
            if str(error).startswith("Failed to set") and self.setup.others:
                return
            if not str(error).startswith("Requested tokens"):
                raise
            if len(tokens) < self.context - 8:  # Chats add tokens.
                raise Wrong(f"refuses {len(tokens)} tokens") from error

    def generate(self, tokens, limit):
        """Asks for tokens. Nothing refuses those that do not fit the context."""
        tokens = tokens[:self.context - 1]
        limit = min(limit, self.context - len(tokens))
        self.begin(self.llama.generate(tokens, temp=0), limit)

    def stream(self, tokens, limit):
        self.begin(self.complete(tokens, limit, stream=True), limit + 9)

    def more(self, count, limit):
        """Continues the last text without a reset, after new tokens. The last token
        of the text is not in the cache yet."""
        self.abort()
        before, new = self.last[:-1], self.last[-1:] + [
            FIRST + k for k in range(count % 4)]
        if self.last and len(before) + len(new) + limit < self.context:
            self.begin(self.llama.generate(new, temp=0, reset=False, before=before),
                       limit)

    def begin(self, answer, limit):
        self.answer, self.left = answer, limit
        self.step()

    def step(self):
        """Takes the next part of an answer."""
        if self.answer is None:
            return
        if self.left and next(self.answer, None) is not None:
            self.left -= 1
        else:
            self.abort()

    def send(self, count):
        """Continues an answer after tokens of the caller."""
        if self.answer is not None and self.left > 1:
            self.left -= 1
            self.answer.send([FIRST + k for k in range(count % 4)])

    def drain(self):
        while self.answer is not None:
            self.step()

    def abort(self):
        """Ends an answer where it is."""
        if self.answer is not None:
            self.answer.close()
            self.answer = None
            self.check()

    def complete(self, tokens, limit, stream=False, temperature=0, **options):
        """Asks for a completion, which is checked at its end."""
        self.llama.text = None
        said = self.llama.create_completion(
            tokens, max_tokens=limit, temperature=temperature, stream=stream,
            **options)
        if stream:
            return said
        if "stop" not in options:
            self.count(said, len(tokens), limit)
        self.check(said, temperature=temperature, **options)
        return said

    def count(self, said, prompt, limit):
        """Checks how long an answer is, and why it ended."""
        text = self.llama.text
        reason = said["choices"][0]["finish_reason"]
        number = said["usage"]["completion_tokens"]
        limit = min(limit, self.llama.n_ctx() - prompt)
        ended = text.drawn[-1][1] == END
        if (reason, number) != (("stop", len(text.drawn) - 1) if ended else
                                ("length", limit)):
            raise Wrong(f"{number} tokens, for {limit}: {reason}")

    def chat(self, tokens, limit):
        """Asks by messages, and with the tokens as letters."""
        self.llama.text = None
        said = self.llama.create_chat_completion(
            [{"role": "user", "content": self.letters(tokens)}],
            max_tokens=limit, temperature=0)
        self.count(said, said["usage"]["prompt_tokens"], limit)
        self.check()

    def letters(self, tokens):
        return "".join(llama_python_models.WORDS[token] for token in tokens
                       if token > BEGIN + 2)

    def hot(self, tokens, limit):
        """Tokens are drawn by chance, and with a bias."""
        self.complete(tokens, limit, temperature=1.5, seed=1,
                      logit_bias={BIASED: BIAS})

    def watch(self, tokens, limit):
        """A processor and a criterion note the tokens and logits that they get."""
        self.complete(tokens, limit, logits_processor=self.processors,
                      stopping_criteria=StoppingCriteriaList([self.criterion]))

    def bias(self, tokens, limit):
        self.complete(tokens, limit, logits_processor=self.processors,
                      logit_bias={BIASED: BIAS})

    def probabilities(self, tokens, limit):
        self.complete(tokens, limit, logprobs=3)

    def echo(self, tokens, limit):
        """Asks by a text, which the answer repeats."""
        self.llama.text = None
        said = self.llama.create_completion(
            self.letters(tokens) or "a", max_tokens=limit, temperature=0,
            logprobs=3, echo=True)
        self.count(said, said["usage"]["prompt_tokens"], limit)
        self.check(said, logprobs=3, echo=True)

    def grammar(self, tokens, limit):
        """The answer must have few letters."""
        self.complete(tokens, limit, grammar=LlamaGrammar.from_string(
            f"root ::= [{self.letters(FEW)}]+", verbose=False))

    def penalty(self, tokens, limit):
        self.complete(tokens, limit, **PENALTIES)

    def stop(self, tokens, limit):
        """A letter ends the answer."""
        self.complete(tokens, limit, stop=[self.letters(FEW[:1])])

    def process(self, tokens, logits):
        if self.llama.text:
            self.llama.text.watched.append(
                ("processor", tokens.tolist(), np.array(logits)))
        return logits

    def criterion(self, tokens, logits):
        if self.llama.text:
            self.llama.text.watched.append(
                ("criterion", tokens.tolist(), np.array(logits)))
        return False

    def evaluate(self, like, cut, more):
        """Computes a text and draws a token without generate."""
        self.abort()
        begin = self.asked[like % len(self.asked)][:cut] if self.asked else []
        tokens = begin + [FIRST + (k * k + more) % 7 for k in range(more)]
        tokens = tokens[:min(self.setup.longest, self.context - 1)] or [FIRST]
        self.llama.reset()
        self.llama.eval(tokens)
        self.llama.text = text = Text(tokens)
        token = self.llama.sample(temp=0)
        row = self.llama._ctx.get_logits_ith(-1)
        text.add(token, np.ctypeslib.as_array(row, (VOCAB,)).copy())
        self.check()

    def truth(self, tokens):
        return fresh(*self.model, tuple(tokens))

    def check(self, said=None, logprobs=None, echo=False, temperature=0, **options):
        """Checks the tokens, the logits that they were drawn from, and what
        callbacks were given."""
        text = self.llama.text
        if text is None:
            return
        self.llama.text, self.last = None, text.tokens
        name = f"request {len(self.asked)}"
        self.asked.append(text.tokens[:text.prompt] + [
            token for token in text.tokens[text.prompt:] if token != END])
        rows = self.truth(text.tokens)
        for length, token, logits in text.drawn:
            right = rows[length - 1].copy()
            if not np.abs(logits - right).max() <= BOUND:
                raise Wrong(f"{name}: logits of token {length - 1} of "
                            f"{text.prompt} differ")
            self.change(right, text.tokens[:length], length - text.prompt,
                        **options)
            if not temperature and right[token] < right.max() - 2 * BOUND:
                raise Wrong(f"{name}: token {length} is another")
        self.check_watched(name, text, rows)
        self.check_scores(name)
        self.check_room()
        if logprobs:
            self.check_logprobs(name, text, rows, said, echo)

    @staticmethod
    def change(logits, tokens, said, logit_bias=None, grammar=None,
               repeat_penalty=1, frequency_penalty=0, presence_penalty=0,
               **options):
        """Changes the logits after `tokens` as the options of a request say. The
        last `said` tokens are those of the answer."""
        if logit_bias:
            logits[BIASED] += BIAS
        if grammar:
            kept = logits[FEW + [END] * (said > 0)]
            logits[:] = -np.inf
            logits[FEW + [END] * (said > 0)] = kept
        for token in set(tokens[-64:]):
            logits[token] *= (1 / repeat_penalty if logits[token] > 0
                              else repeat_penalty)
            logits[token] -= (tokens[-64:].count(token) * frequency_penalty +
                              presence_penalty)

    def check_watched(self, name, text, rows):
        """Each callback gets the text so far, and the logits after it."""
        for which, tokens, logits in text.watched:
            if tokens != text.tokens[:len(tokens)]:
                raise Wrong(f"{name}: the {which} gets other tokens")
            if which == "criterion" and not self.setup.logits:
                continue
            if not np.abs(logits - rows[len(tokens) - 1]).max() <= BOUND:
                raise Wrong(f"{name}: the {which} gets other logits")

    def check_scores(self, name):
        """With logits_all, `scores` has the logits of each token in the cache."""
        tokens = self.llama._input_ids.tolist()
        if tokens and self.setup.logits:
            if not np.abs(self.llama._scores - self.truth(tokens)).max() <= BOUND:
                raise Wrong(f"{name}: scores differ")

    def check_room(self):
        """The states in memory have no more bytes than the cache may have."""
        if self.setup.cache == "ram":
            held = sum(len(state.llama_state) + state.scores.nbytes
                       for state in self.llama.cache.cache_state.values())
            if held > self.room:
                raise Wrong("the cache has more bytes than its capacity")

    def check_logprobs(self, name, text, rows, said, echo):
        expected = log_softmax(rows)
        first = 0 if echo else text.prompt
        places = [i for i, token in enumerate(text.tokens)
                  if i >= first and token not in (BEGIN, END)]
        given = said["choices"][0]["logprobs"]["token_logprobs"]
        if len(given) != len(places):
            raise Wrong(f"{name}: {len(given)} logprobs of {len(places)}")
        for i, value in zip(places, given):
            right = expected[i - 1, text.tokens[i]]
            if i and value is not None and not abs(value - right) <= BOUND:
                raise Wrong(f"{name}: the logprob of token {i} is another")

    def embed(self, count):
        """Asks for embeddings of texts, of which one may be too long."""
        if not self.setup.embedding:
            return
        self.abort()
        self.last = []
        texts = [self.letters(range(FIRST, FIRST + 1 + count * k % 20))
                 for k in range(1, 5)]
        try:
            self.llama.embed(texts, truncate=False)
        except ValueError as error:
            if not str(error).startswith("Requested tokens"):
                raise

    def save(self, slot):
        self.abort()
        self.states[slot % 3] = self.llama.save_state()

    def load(self, slot):
        self.abort()
        if slot % 3 in self.states:
            self.last = []
            self.llama.load_state(self.states[slot % 3])

    def reset(self):
        self.abort()
        self.last = []
        self.llama.reset()

    def restart(self):
        """Ends the program, and starts it again."""
        self.abort()
        self.llama.close()
        self.restarts += 1
        self.start()

    def swap(self):
        """Loads another model, as the server does for a request to it."""
        if self.setup.others:
            self.abort()
            self.model, self.other = self.other, self.model
            self.restart()

    def finish(self):
        self.drain()


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    room = rng.choice([1, 2, 4, 100]) if setup.cache else 100
    setup = dataclasses.replace(setup, room=room)
    long = setup.longest
    few = rng.random() < 0.5

    def tokens():
        return rng.choice([rng.randrange(1, 9), rng.randrange(1, long)])

    def limit():
        return rng.choice([1, rng.randrange(1, 8), rng.randrange(1, 20)])

    def way():
        return 0 if few else rng.randrange(len(setup.ways))

    ops = []
    for _ in range(rng.randrange(3, 24)):
        kind = rng.random()
        if kind < 0.35:
            ops.append(("add", rng.randrange(6), rng.choice([0, 999, tokens()]),
                        tokens(), limit(), way()))
        elif kind < 0.5:
            ops.append(("again", rng.randrange(6), limit(), way()))
        elif kind < 0.55:
            ops.append(("drain",))
        elif kind < 0.58:
            ops.append(("more", rng.randrange(4), limit()))
        elif kind < 0.64 and setup.others:
            ops.append(("swap",))
        elif kind < 0.74:
            ops.append(("step",))
        elif kind < 0.78:
            ops.append(("abort",))
        elif kind < 0.82:
            ops.append(("save", rng.randrange(3)))
        elif kind < 0.87:
            ops.append(("load", rng.randrange(3)))
        elif kind < 0.91:
            ops.append(("evaluate", rng.randrange(6), rng.choice([0, 999, tokens()]),
                        tokens()))
        elif kind < 0.94 and setup.embedding:
            ops.append(("embed", rng.randrange(40)))
        elif kind < 0.96 and setup.sends:
            ops.append(("send", rng.randrange(4)))
        elif kind < 0.97 and setup.cache:
            ops.append(("restart",))
        else:
            ops.append(("reset",))
    return setup, ops


def play(setup, ops, send):
    """Runs a history without the words of llama.cpp."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.dup2(nowhere, 1)
    send(Engine(setup).play(ops))


def judge(setup, ops):
    """Runs a history in a process of its own, and returns what was wrong, or None."""
    model(setup.arch, 1)
    if setup.others:
        model(*setup.others)
    messages, number = in_child(lambda send: play(setup, ops, send))
    return f"the process ends by signal {number}" if number else messages[0]


ROOM = "room"  # The size that a history draws and shows.
LOGITS = {"logits": True, "ways": Setup.ways + ("probabilities", "echo")}
CALLS = {"logits": True, "ways": Setup.ways + ("watch",)}
SETUPS = {
    "Plain": Setup(),
    "Bias": Setup(ways=Setup.ways + ("bias",)),
    "Penalties": Setup(ways=Setup.ways + ("penalty",)),
    "Calls": Setup(**CALLS),
    "Logits": Setup(**LOGITS),
    "LogitsBegin": Setup(begins=True, **LOGITS),
    "Odd": Setup(context=60, longest=70),
    "OddLogits": Setup(context=60, longest=70, logits=True),
    "Full": Setup(batch=64, longest=254),
    "FullDraft": Setup(batch=64, longest=254, draft=4, logits=True),
    "Draft": Setup(draft=4),
    "DraftLogits": Setup(draft=4, **LOGITS),
    "DraftCalls": Setup(draft=4, **CALLS),
    "DraftLong": Setup(draft=20, logits=True),
    "Sent": Setup(sends=True, ways=("generate",)),
    "RAM": Setup(cache="ram"),
    "Disk": Setup(cache="disk"),
    "DiskLarger": Setup(cache="disk", larger=True, longest=300),
    "DiskOthers": Setup(cache="disk", others=("llama", 2)),
    "DiskKinds": Setup(cache="disk", others=("smollm3", 1)),
    "Embedding": Setup(embedding=True),
    "Window": Setup("granite_swa"),
    "WindowShort": Setup("granite_swa", context=512, batch=64, short=True,
                         longest=400),
    "WindowRAM": Setup("granite_swa", cache="ram"),
    "WindowDraft": Setup("granite_swa", context=512, batch=64, short=True,
                         longest=400, draft=4, logits=True),
    "States": Setup("mamba"),
    "StatesRAM": Setup("mamba", cache="ram"),
    "StatesDraft": Setup("mamba", draft=4, logits=True),
    "Hybrid": Setup("lfm2"),
    "HybridRAM": Setup("lfm2", cache="ram"),
    "HybridDraft": Setup("lfm2", draft=4, logits=True),
}
