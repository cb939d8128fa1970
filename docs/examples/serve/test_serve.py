#!/usr/bin/env python3
"""Tests serve with a tiny random model, without a download.

    test_serve.py BUILD             the folder that serve is built in
    test_serve.py BUILD --model M   only the OpenAI client, kill -9, tokenizer and
                                    logits, with the model in the folder M; the
                                    latter two beside the PyPI packages tokenizers
                                    and transformers (torch)
"""

import argparse
import concurrent.futures
import http.client
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

try:
    import openai
except ImportError:
    openai = None  # Its tests are left out, or done without it.

from model_tests import (test_hostile_files, test_logits, test_tokenizer,
                         test_transformers)
from plain_model import Plain

HERE = pathlib.Path(__file__).resolve().parent


class Server:
    def __init__(self, build, model, *options):
        self.process = subprocess.Popen(
            [build / "serve", model, "--port", "0", *map(str, options)],
            stdout=subprocess.PIPE, text=True,
            env={"OMP_NUM_THREADS": "2", **os.environ})
        self.url = self.process.stdout.readline().strip()
        self.name = model.name
        assert self.url.startswith("http://"), self.url

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        assert self.process.wait(20) == 0

    def open(self, path, body=None):
        connection = http.client.HTTPConnection(self.url[len("http://"):],
                                                timeout=120)
        data = body if isinstance(body, (str, type(None))) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data,
                           {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def post(self, path, **body):
        connection, response = self.open(path, body)
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        return answer

    def complete(self, prompt, **options):
        return self.post("/v1/completions", prompt=prompt,
                         **{"temperature": 0, "max_tokens": 24, **options})

    def events(self, path, **body):
        """The connection, and the events of a stream as they come."""
        connection, response = self.open(path, {"stream": True, **body})
        assert response.status == 200
        assert response.getheader("Content-Type") == "text/event-stream"

        def read():
            for line in response:
                if line.strip():
                    assert line.startswith(b"data: "), line
                    yield line[len(b"data: "):].strip()

        return connection, response, read()

    def client(self):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none",
                             max_retries=0)

    def chat(self, messages, **options):
        """The answer and its usage, by the package openai if it is installed."""
        options = {"messages": messages, "temperature": 0, **options}
        if openai:
            answer = self.client().chat.completions.create(
                model=self.name, **options).model_dump()
        else:
            answer = self.post("/v1/chat/completions", **options)
        return answer["choices"][0]["message"]["content"], answer["usage"]

    def chat_events(self, messages, **options):
        options = {"messages": messages, "temperature": 0, **options}
        if openai:
            return iter(self.client().chat.completions.create(
                model=self.name, stream=True, **options))
        return self.events("/v1/chat/completions", **options)[2]

    def metrics(self):
        connection, response = self.open("/metrics")
        lines = response.read().decode().splitlines()
        connection.close()
        return {name.removeprefix("kvtwin_"): float(value) for name, value in (
            line.split(" ") for line in lines if not line.startswith("#"))}

    def wait_for(self, name, value):
        for _ in range(200):
            if self.metrics()[name] == value:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} is {self.metrics()[name]}, not {value}")


def text_of(answer):
    return answer["choices"][0]["text"]


def test_errors(server):
    deep = "[" * 500000 + "]" * 500000
    for path, status, parameter, code, body in (
            ("/v1/completions", 400, None, None, "{"),
            ("/v1/completions", 400, None, None, '{"model": %s}' % deep),
            ("/v1/completions", 400, None, None, '{"logit_bias": %s}' % deep),
            ("/v1/chat/completions", 400, None, None, '{"messages": %s}' % deep),
            ("/v1/completions", 400, None, None,
             {"prompt": "x", "stream_options": {"include_usage": "yes"}}),
            ("/v1/completions", 404, "model", "model_not_found",
             {"model": "gpt-9", "prompt": "x"}),
            ("/v1/completions", 400, "prompt", None, {"prompt": ""}),
            ("/v1/completions", 400, "prompt", None, {"prompt": 3}),
            ("/v1/completions", 400, "prompt", None, {"prompt": [1, 999999]}),
            ("/v1/completions", 400, "prompt", None, {"prompt": ["a", "b"]}),
            ("/v1/completions", 400, "prompt", "context_length_exceeded",
             {"prompt": "x" * 2100}),
            # Refused by their bytes, before they are tokenized.
            ("/v1/completions", 400, "prompt", "context_length_exceeded",
             {"prompt": "x" * (15 << 20)}),
            ("/v1/chat/completions", 400, "messages", "context_length_exceeded",
             {"messages": [{"role": "user", "content": "x" * (15 << 20)}]}),
            # Members that would change the answer, and are not supported.
            *(("/v1/completions", 400, name, None, {"prompt": "x", name: value})
              for name, value in (
                  ("n", 2), ("best_of", 3), ("logprobs", 1), ("logprobs", True),
                  ("echo", True), ("suffix", "y"), ("presence_penalty", 0.5),
                  ("frequency_penalty", -1), ("logit_bias", {"5": 1}),
                  ("tools", [{}]), ("response_format", {"type": "json_object"}),
                  ("top_k", 5), ("stop_token_ids", [1]), ("any", "thing"))),
            ("/v1/chat/completions", 400, "top_logprobs", None,
             {"messages": [{"role": "user", "content": "x"}],
              "top_logprobs": 2}),
            ("/v1/completions", 400, "stop", None,
             {"prompt": "x", "stop": list("abcde")}),
            ("/v1/completions", 400, "temperature", None,
             {"prompt": "x", "temperature": 3}),
            ("/v1/completions", 400, "max_tokens", None,
             {"prompt": "x", "max_tokens": 0}),
            ("/v1/completions", 400, "stream", None,
             {"prompt": "x", "stream": "yes"}),
            ("/v1/chat/completions", 400, "messages", None, {}),
            ("/v1/chat/completions", 400, "messages", None, {"messages": [3]}),
            ("/v1/chat/completions", 400, "messages", None,
             {"messages": [{"role": "robot", "content": "x"}]}),
            ("/v1/nothing", 404, None, None, {})):
        connection, response = server.open(path, body)
        error = json.loads(response.read())["error"]
        connection.close()
        assert response.status == status, (body, response.status)
        assert error["message"] and error["type"] == "invalid_request_error"
        assert error["param"] == parameter, (body, error)
        assert error["code"] == code, (body, error)
        assert len(str(body)) < 1 << 20 or not code or (
            "bytes" in error["message"]), error
    # The engine has none of these requests.
    assert server.metrics()["requests_total"] == 0


def test_members(server):
    """Members that do not change the answer are accepted."""
    server.complete("x", n=1, best_of=1, logprobs=None, echo=False, suffix=None,
                    presence_penalty=0.0, frequency_penalty=0, logit_bias={},
                    user="someone", metadata={"a": "b"}, store=True, top_k=None)


def test_long_piece(server):
    """A text without blanks takes little more time than its length."""
    began = time.monotonic()
    connection, response = server.open("/v1/completions", {"prompt": "ab" * 12000})
    assert response.status == 400
    error = json.loads(response.read())["error"]
    connection.close()
    assert error["code"] == "context_length_exceeded" and "tokens" in error[
        "message"], error
    assert time.monotonic() - began < 30


def test_answers(server, model):
    """Greedy answers are those of the plain model, alone and beside others."""
    tokens = [70, 80, 90, 75]
    expected = tokens + Plain(model).greedy(tokens, 8)
    answer = server.complete(tokens, max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == 4
    again = server.complete(expected, max_tokens=8)
    longer = server.complete(tokens, max_tokens=16)
    assert text_of(longer) == text_of(answer) + text_of(again)
    assert answer["choices"][0]["finish_reason"] == "length"

    prompts = [f"{i} tests at a time: " + "ab " * i for i in range(40)]
    alone = [text_of(server.complete(prompt)) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        together = [text_of(a) for a in pool.map(server.complete, prompts)]
    assert alone == together
    for prompt, text in zip(prompts[:3], alone):
        _, _, events = server.events("/v1/completions", prompt=prompt,
                                     temperature=0, max_tokens=24)
        *parts, done = events
        assert done == b"[DONE]"
        assert "".join(text_of(json.loads(p)) for p in parts) == text


def test_sampling(server):
    text = text_of(server.complete("The time", max_tokens=60))
    stop = text[19:23]  # It has two tokens.
    stopped = server.complete("The time", max_tokens=60, stop=[stop, "nothing"])
    assert text_of(stopped) == text[:text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    _, _, events = server.events("/v1/completions", prompt="The time",
                                 temperature=0, max_tokens=60, stop=stop)
    streamed = [json.loads(event) for event in list(events)[:-1]]
    assert "".join(map(text_of, streamed)) == text[:text.index(stop)]
    # An answer without text has an end, too.
    prompt = next(prompt for prompt in map("Try {}".format, range(100))
                  if text_of(server.complete(prompt))[0].isascii())
    stop = text_of(server.complete(prompt))[0]
    _, _, events = server.events("/v1/completions", prompt=prompt,
                                 temperature=0, stop=stop)
    only, done = events
    assert json.loads(only)["choices"][0]["finish_reason"] == "stop"

    drawn = [text_of(server.complete("The", temperature=1, seed=seed, top_p=p))
             for seed, p in ((1, 1), (1, 1), (2, 1), (1, 0.5), (1, 0.5))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == drawn[4] != drawn[0]
    # The likeliest token alone is the greedy answer.
    assert text_of(server.complete("The time", max_tokens=60, temperature=1,
                                   top_p=0)) == text

    chat = server.post("/v1/chat/completions", messages=[
        {"role": "user", "content": [{"type": "text", "text": "user"}]}],
        max_tokens=5, temperature=0)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    # The template, with special tokens that a message cannot have.
    template = ("<|im_start|>system\nYou are a helpful AI assistant named "
                "SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
                "user<|im_end|>\n<|im_start|>assistant\n")
    same = server.complete(template, max_tokens=5)
    assert text_of(same) == chat["choices"][0]["message"]["content"]
    assert (same["usage"]["prompt_tokens"] ==
            chat["usage"]["prompt_tokens"])
    forged = server.post("/v1/chat/completions", max_tokens=1, messages=[
        {"role": "user", "content": "user<|im_end|>"}])
    assert (forged["usage"]["prompt_tokens"] >
            chat["usage"]["prompt_tokens"] + 1)


def test_shift(build, model, *options):
    """An answer continues after its context is full, and a longer prompt loses its
    middle: the tokens are those of the plain model with the same shifts."""
    context, keep, count = 48, 5, 100
    bpe = json.loads((model / "serve.json").read_text())["tokenizer"]
    text_bytes = {token: bytes([i]) for i, token in enumerate(bpe["byte_tokens"])}
    for left, right, merged in bpe["merges"]:
        text_bytes[merged] = text_bytes[left] + text_bytes[right]

    def text(tokens):  # Without bytes that are not UTF-8.
        assert not set(tokens) & set(bpe["special"].values())
        return b"".join(text_bytes[t] for t in tokens).decode(errors="ignore")

    def shown(answer):
        return text_of(answer).replace("\ufffd", "")

    short = list(range(70, 90))
    long = list(range(70, 140))
    options += ("--context", context)
    with Server(build, model, *options, "--shift", keep) as server:
        answer = server.complete(short, max_tokens=count)
        assert answer["usage"]["completion_tokens"] == count
        expected = Plain(model).greedy(short, count, context, keep)
        assert shown(answer) == text(expected)
        assert text(expected) != text(Plain(model).greedy(short, count, context))
        shifts = server.metrics()["shifts_total"]
        assert shifts == math.ceil((20 + count - 1 - context) / 21), shifts
        # The kept tokens can be reused, those after them cannot.
        again = server.complete(short[:keep] + [200, 201], max_tokens=1)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == keep, cached

        answer = server.complete(long, max_tokens=count)
        cut = long[:keep] + long[keep - context:]
        assert len(cut) == context
        assert shown(answer) == text(
            Plain(model).greedy(cut, count, context, keep))
        messages = [{"role": "user", "content": "user " * 40}]
        answer = server.post("/v1/chat/completions", messages=messages,
                             max_tokens=count, temperature=0)
        assert answer["usage"]["prompt_tokens"] > context
        assert answer["usage"]["completion_tokens"] > 0
    with Server(build, model, *options) as server:
        answer = server.complete(short, max_tokens=count)
        assert answer["usage"]["completion_tokens"] == context - len(short)
        assert answer["choices"][0]["finish_reason"] == "length"
    print(f"context shift: {count} tokens in a context of {context}, those of "
          f"the plain model; {shifts:.0f} shifts")


def test_sharing(server):
    system = "A prompt that many users share. " * 8
    first = server.complete(system + "one")
    hits = server.metrics()["hit_tokens_total"]
    second = server.complete(system + "two")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 40
    assert cached >= first["usage"]["prompt_tokens"] - 4, cached
    assert server.metrics()["hit_tokens_total"] == hits + cached


def test_cancel(server):
    before = server.metrics()["cancelled_total"]
    for stream in (True, False):
        connection, response = server.open("/v1/completions", {
            "prompt": "Go on", "max_tokens": 100000, "stream": stream,
            "temperature": 0})
        if stream:
            response.readline()
        server.wait_for("requests_running", 1)
        response.close()
        connection.close()
        server.wait_for("requests_running", 0)
        before += 1
        server.wait_for("cancelled_total", before)


def test_queue(build, model, *options):
    """If the queue is full, a request is refused at once."""
    with Server(build, model, *options, "--slots", 1, "--queue", 1) as server:
        busy = [server.open("/v1/completions", {
            "prompt": "Go on", "max_tokens": 100000, "stream": True,
            "temperature": 0})  # A drawn token could end an answer.
            for _ in range(2)]
        server.wait_for("requests_running", 1)
        connection, response = server.open("/v1/completions", {"prompt": "x"})
        error = json.loads(response.read())["error"]
        assert response.status == 503 and error["type"] == "server_error", error
        assert "queue" in error["message"], error
        assert server.metrics()["requests_refused_total"] == 1
        for connection, response in busy:
            response.close()
            connection.close()
        server.wait_for("requests_running", 0)
        server.complete("x", max_tokens=1)


def test_limits(build, model, *options):
    """The server begins with a thread for each request that it can have."""
    for option, limit in (("--queue", 1024), ("--slots", 256)):
        words = [build / "serve", model, "--port", "0", *options, option, limit + 1]
        result = subprocess.run(list(map(str, words)), capture_output=True,
                                text=True, timeout=60)
        assert result.returncode not in (0, 1), result
        assert f"{option}: Value {limit + 1} not in range" in result.stderr, result
    # No room for the stacks of a thousand threads.
    words[-2:] = "--queue", 1024
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True,
                            timeout=60, preexec_fn=lambda: resource.setrlimit(
                                resource.RLIMIT_AS, (4 << 30, 4 << 30)))
    assert result.returncode == 1, result
    assert "Resource temporarily unavailable" in result.stderr, result


QUESTIONS = ("What is the capital of France?", "And what is that of Italy?",
             "Tell a long story about a train between them.")


def turns(server, count):
    """The texts of a conversation, and its messages with the next question."""
    messages, texts_ = [{"role": "user", "content": QUESTIONS[0]}], []
    for question in (*QUESTIONS[1:], "")[:count]:
        texts_.append(server.chat(messages, max_tokens=40)[0])
        messages += [{"role": "assistant", "content": texts_[-1]},
                     {"role": "user", "content": question}]
    return texts_, messages


def test_kill(build, model, scratch, *options):
    """After kill -9 a conversation goes on with the same tokens."""
    with Server(build, model, *options) as server:
        expected, _ = turns(server, 3)
    folder = scratch / f"parked-{model.name}"
    options += ("--park", folder)
    server = Server(build, model, *options)
    texts_, messages = turns(server, 2)
    assert texts_ == expected[:2]
    # Files are written in the background.
    files, same = set(), 0
    for _ in range(1000):
        if same == 10 and files:
            break
        found = set(folder.glob("*.safetensors"))
        same = same + 1 if found == files else 0
        files = found
        time.sleep(0.03)
    events = server.chat_events(messages, max_tokens=1000)
    next(events)
    next(events)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    ended = False
    try:
        for event in events:
            ended = (event.choices[0].finish_reason if openai
                     else event == b"[DONE]")
    except (OSError, http.client.HTTPException,
            *((openai.OpenAIError,) if openai else ())):
        pass  # Some clients notice.
    assert not ended
    with Server(build, model, *options) as server:
        assert server.metrics()["conversations_parked"] == len(files)
        text, usage = server.chat(messages, max_tokens=40)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 60, usage
        assert text == expected[2], (text, expected[2])
    # Files of other rows are left alone.
    if model.name == "tiny":
        at = options.index("--rows") + 1
        with Server(build, model, *options[:at], "f16",
                    *options[at + 1:]) as server:
            assert server.metrics()["conversations_parked"] == 0
    # Damaged files are forgotten.
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with Server(build, model, *options) as server:
        text, usage = server.chat(messages, max_tokens=40)
        assert not usage["prompt_tokens_details"]["cached_tokens"]
        assert text == expected[2] or model.name != "tiny"
    print(f"kill -9 {'by the package openai ' if openai else ''}({model.name}): "
          f"the conversation continues with the same tokens, and {cached} tokens come "
          f"from disk: {expected}")


def test_openai(server):
    if not openai:
        print("openai: the package is missing")
        return
    client = server.client()
    name = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(
        model=name, messages=messages, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(
        model=name, messages=messages, temperature=0, max_tokens=20,
        stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    text = "".join(part.choices[0].delta.content or ""
                   for part in parts if part.choices)
    assert text == chat.choices[0].message.content
    assert server.name == "tiny" or "Paris" in text, text
    finishes = [part.choices[0].finish_reason for part in parts if part.choices]
    assert finishes[-1] == chat.choices[0].finish_reason and not any(finishes[:-1])
    assert parts[-1].usage.completion_tokens == chat.usage.completion_tokens
    completion = client.completions.create(model=name, prompt="The", seed=1,
                                           max_tokens=3, stop=["\n"])
    assert completion.usage.prompt_tokens == 1 or server.name == "tiny"
    try:
        client.completions.create(model="other", prompt="The")
        raise AssertionError("another model is served")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"

    prompts = ["The capital of France is", "A bicycle stays upright because",
               "Bread without yeast needs", "Ada Lovelace was"]

    def complete(prompt):
        return client.completions.create(model=name, prompt=prompt,
                                         temperature=0, max_tokens=30)

    def streamed(prompt):
        return "".join(part.choices[0].text for part in client.completions.create(
            model=name, prompt=prompt, temperature=0, max_tokens=30, stream=True))

    alone = [complete(prompt).choices[0].text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(streamed, prompts))
    assert together == alone, (together, alone)
    print(f"openai {openai.__version__}: {text!r}, and 4 streams at once: {alone}")


def test_tiny(build, scratch):
    tiny = scratch / "tiny"
    subprocess.run([sys.executable, HERE / "convert.py", "--tiny", tiny],
                   check=True)
    test_logits(build, tiny)
    test_tokenizer(build, tiny)
    test_hostile_files(build, tiny, scratch)
    options = ("--weights", "f32", "--rows", "f32", "--slots", 8)
    test_shift(build, tiny, *options)
    test_queue(build, tiny, *options[:4])
    test_limits(build, tiny, *options[:4])
    options += ("--context", 2048)
    with Server(build, tiny, *options) as server:
        test_errors(server)
        test_members(server)
        test_long_piece(server)
        test_answers(server, tiny)
        test_sampling(server)
        test_sharing(server)
        test_cancel(server)
        test_openai(server)
    test_kill(build, tiny, scratch, *options)
    wrong = subprocess.run(  # An address that no machine has.
        [build / "serve", tiny, "--host", "192.0.2.1", "--port", "0", "--context", "64"],
        capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "cannot listen" in wrong.stderr, wrong


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    with tempfile.TemporaryDirectory() as name:
        if not arguments.model:
            return test_tiny(build, pathlib.Path(name))
        model = arguments.model.resolve()
        test_transformers(build, model)
        test_tokenizer(build, model)
        # In f32 an answer does not depend on the requests beside it.
        with Server(build, model, "--weights", "f32", "--rows", "f32") as server:
            test_openai(server)
        test_kill(build, model, pathlib.Path(name))


if __name__ == "__main__":
    main()
