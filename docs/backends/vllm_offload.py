"""vLLM's CPUOffloadingManager, which says which chunks of K and V lie in the memory of the
CPU, and where: histories, and a reference that knows the rows of each place.
vllm_manager.py runs it, and vllm-manager.md has the results."""

import random

from histories import Wrong
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

KEYS, STEPS = 8, 60


def expect(right, text):
    if not right:
        raise Wrong(text)


def key(number):
    return make_offload_key(bytes([number] * 8), 0)


class Run:
    """The manager, and what it must say."""

    def __init__(self, policy, room, threshold):
        self.lru, self.room, self.threshold = policy == "lru", room, threshold
        self.manager = CPUOffloadingManager(room, policy, store_threshold=threshold)
        self.places = {}  # By key: its chunk.
        self.rows = {}  # By chunk: the key whose rows lie there.
        self.loads = {}  # By key that is ready: the loads under way.
        self.rank = {}  # By key: when it was used last.
        self.now = 0
        self.offers = {}  # By key: how often it was offered.
        self.jobs = []  # Loads and stores under way.
        self.requests = {}  # By name: its context, and the keys that it used.

    def use(self, numbers):
        for number in numbers:
            self.now += 1
            if number in self.places:
                self.rank[number] = self.now

    def request(self, name):
        if name not in self.requests:
            context = ReqContext(f"request {name}")
            self.manager.on_new_request(context)
            self.requests[name] = context, []
        return self.requests[name]

    def look(self, name, numbers):
        context, _ = self.request(name)
        for number in numbers:
            known = (LookupResult.HIT if number in self.loads else
                     LookupResult.HIT_PENDING if number in self.places else
                     LookupResult.MISS)
            said = self.manager.lookup(key(number), context)
            expect(said == known, f"{number}: {said.name}, not {known.name}")

    def touch(self, name, numbers):
        self.manager.touch([key(n) for n in numbers], self.request(name)[0])
        self.use(reversed(numbers))

    def load(self, name, numbers):
        numbers = [number for number in numbers if number in self.loads]
        context, used = self.request(name)
        spec = self.manager.prepare_load([key(n) for n in numbers], context)
        chunks = spec.block_ids.tolist()
        expect([self.rows[chunk] for chunk in chunks] == numbers,
               f"the rows of {numbers} are not in chunks {chunks}")
        for number in numbers:
            self.loads[number] += 1
        used += [number for number in numbers if number not in used]
        self.jobs.append(("load", numbers, context))

    def store(self, name, numbers):
        context, used = self.request(name)
        for number in numbers:
            self.offers[number] = self.offers.get(number, 0) + 1
        absent = [number for number in numbers if number not in self.places
                  and self.offers[number] >= self.threshold]
        used += [number for number in numbers if number not in used
                 and (number in absent or number in self.loads)]
        idle = sorted((number for number, loads in self.loads.items()
                       if not loads and number not in numbers), key=self.rank.get)
        lacking = max(0, len(absent) - (self.room - len(self.places)))
        said = self.manager.prepare_store([key(n) for n in numbers], context)
        expect((said is None) == (lacking > len(idle)),
               "refused, though there is room" if said is None else "not refused")
        if said is None:
            return
        expect(said.keys_to_store == [key(n) for n in absent], f"not of {absent}")
        evicted = [each[0] for each in said.evicted_keys]
        expect(len(set(evicted)) == len(evicted) == lacking and set(evicted) <= set(idle)
               and (not self.lru or evicted == idle[:lacking]),
               f"evicts {evicted} of {idle}, where {lacking} must go")
        for number in evicted:
            del self.loads[number], self.places[number], self.rank[number]
        chunks = said.store_spec.block_ids.tolist()
        free = set(range(self.room)) - set(self.places.values())
        expect(len(set(chunks)) == len(chunks) == len(absent) and set(chunks) <= free,
               f"goes to chunks {chunks}, while {sorted(free)} are free")
        self.places.update(zip(absent, chunks))
        self.use(absent)
        self.jobs.append(("store", absent, context))

    def end(self, which, success):
        """A load or a store ends."""
        if not self.jobs:
            return
        kind, numbers, context = self.jobs.pop(which % len(self.jobs))
        keys = [key(number) for number in numbers]
        if kind == "load":
            self.manager.complete_load(keys, context)
            for number in numbers:
                expect(self.rows[self.places[number]] == number,
                       f"the rows of {number} were overwritten during its load")
                self.loads[number] -= 1
            return
        self.manager.complete_store(keys, context, success)
        for number in numbers:
            if success:
                self.rows[self.places[number]] = number
                self.loads[number] = 0
            else:
                del self.places[number], self.rank[number]

    def finish(self, name):
        context, used = self.requests.pop(name, (None, []))
        if context:
            self.manager.on_request_finished(context)
            self.use(reversed(used))

    def reset(self):
        self.manager.reset_cache()
        self.places, self.loads, self.rank = {}, {}, {}
        self.jobs, self.requests = [], {}


def drawn(seed):
    """Returns the room, the threshold, and calls with their arguments."""
    dice = random.Random(seed)
    calls = []
    for _ in range(STEPS):
        name = dice.choices(("store", "load", "touch", "look", "end", "finish", "reset"),
                            (6, 4, 2, 3, 8, 2, 0.2))[0]
        if name == "end":
            calls.append((name, dice.randrange(4), dice.random() < 0.9))
        elif name == "reset":
            calls.append((name,))
        elif name == "finish":
            calls.append((name, dice.randrange(3)))
        else:
            numbers = dice.sample(range(KEYS), dice.randint(1, 4))
            calls.append((name, dice.randrange(3), numbers))
    return dice.randint(1, 6), dice.choice((1, 1, 2)), calls


def run(policy, room, threshold, calls):
    """Returns the calls up to the first difference and what it is, or None."""
    one = Run(policy, room, threshold)
    for number, (name, *arguments) in enumerate(calls):
        try:
            getattr(one, name)(*arguments)
            one.look("observer", range(KEYS))
        except (Wrong, AssertionError, KeyError) as error:
            return calls[: number + 1], f"{type(error).__name__}: {error}"
    return None


def judged(policy, histories=500):
    """Yields the verdict on a policy."""
    for seed in range(histories):
        room, threshold, calls = drawn(seed)
        found = run(policy, room, threshold, calls)
        if not found:
            continue
        calls, text = found
        for i in reversed(range(len(calls))):
            less = run(policy, room, threshold, calls[:i] + calls[i + 1:])
            if less:
                calls, text = less
        yield f"{room} chunks, threshold {threshold}: " + "; ".join(
            " ".join(map(str, call)) for call in calls)
        yield f"-> {text}"
        return
    yield f"{histories} histories: right"


def lines(say):
    """Returns the lines of the page."""
    return [line for policy in ("lru", "arc") for line in say(
        f"CPUOffloadingManager, {policy}", judged(policy))]
