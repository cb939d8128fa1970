#!/usr/bin/env python3
"""Measures a server that speaks OpenAI's protocol.

    bench_serve.py streams -- COMMAND     tokens a second of 16 streams at 4k
    bench_serve.py first -- COMMAND       time to first token of 16 users with
                                          one system prompt of 2k tokens
    --streams N, --tokens N (of a prompt), --answer N, --name MODEL
    --peer COMMAND2                       streams: measures it, too, and prints
                                          the ratios
    --limit SECONDS                       ends each server after this time

Tokens a second depend on what else the machine does; the processor time of the
server for each token, which is printed, too, depends less on that.
COMMAND starts the server; --port N is appended to it. For example
    OMP_NUM_THREADS=2 ... -- build/serve/serve smollm2 --context 4608
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import shlex
import socket
import subprocess
import threading
import time

DOCS = pathlib.Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


PORT = free_port()


def connect():
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=1800)


def start(command):
    process = subprocess.Popen([*command, "--port", str(PORT)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            connection = connect()
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process
        except OSError:
            pass
        assert process.poll() is None, "the server has ended"
        time.sleep(0.1)
    raise SystemExit("the server does not answer")


def cpu_seconds(process):
    """Processor time of a process and its threads so far."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1]
    return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")


class Stream(threading.Thread):
    """A request, and when its tokens came: time, and the server's processor
    time."""

    def __init__(self, options, process, prompt, answer):
        super().__init__(daemon=True)
        self.process = process
        self.body = {"model": options.name, "prompt": prompt, "max_tokens": answer,
                     "temperature": 0, "stream": True,
                     "stream_options": {"include_usage": True}}
        self.times, self.usage, self.text = [], None, ""
        self.begin = time.monotonic()
        self.start()

    def run(self):
        response = None
        while response is None:
            try:
                connection = connect()
                connection.request("POST", "/v1/completions", json.dumps(self.body),
                                   {"Content-Type": "application/json"})
                response = connection.getresponse()
            except ConnectionResetError:
                pass  # cpp-httplib lets five connections wait, not more.
        assert response.status == 200, response.read()
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            self.usage = event.get("usage") or self.usage
            if event["choices"] and event["choices"][0]["text"]:
                self.text += event["choices"][0]["text"]
                self.times.append((time.monotonic(),
                                   cpu_seconds(self.process)))
        connection.close()


def wait(streams, limit=None):
    """Whether all streams end before the limit, in seconds."""
    for stream in streams:
        stream.join(limit and max(streams[0].begin + limit - time.monotonic(), 0))
    return not any(stream.is_alive() for stream in streams)


def texts():
    """The text of the project's documentation."""
    return "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))


def ask_all(options, process, prompts, answer):
    """Asks all prompts at once: the streams, or None if the time is over."""
    began = cpu_seconds(process)
    streams = [Stream(options, process, prompt, answer) for prompt in prompts]
    if wait(streams, options.limit):
        return streams
    print(f"stopped after {options.limit} s and {cpu_seconds(process) - began:.0f} s "
          f"of CPU time: {sum(bool(stream.times) for stream in streams)} of "
          f"{len(streams)} streams had a first token")
    return None


def measure_streams(options, process):
    """Tokens a second of the answers, CPU ms of each, and their texts; None if the
    time was over. The prompts are asked twice: first for a token, then, when the
    server has them in its cache, for the answers, so that all streams are answered
    at the same time."""
    question = Stream(options, process, "The capital of France is", 8)
    wait([question])
    print(f"The capital of France is{question.text!r}")
    draw = random.Random(1)
    prompts = [draw.choices(range(300, 5000), k=options.tokens)
               for _ in range(options.streams)]
    cpu_begin, begin = cpu_seconds(process), time.monotonic()
    streams = ask_all(options, process, prompts, 1)
    if streams is None:
        return None
    count = sum(stream.usage["prompt_tokens"] for stream in streams)
    print(f"prompts of {count / len(streams):.0f} tokens: "
          f"{count / (time.monotonic() - begin):.0f} tokens/s, "
          f"{(cpu_seconds(process) - cpu_begin) / count * 1000:.3f} CPU ms a token",
          flush=True)
    streams = ask_all(options, process, prompts, options.answer)
    if streams is None:
        return None
    cached = sum(stream.usage["prompt_tokens_details"]["cached_tokens"]
                 for stream in streams)
    assert cached >= 0.99 * count, f"{cached} of {count} tokens were in the cache"
    begin, cpu_begin = max(stream.times[0] for stream in streams)
    end, cpu_end = min(stream.times[-1] for stream in streams)
    count = sum(begin < t <= end for stream in streams for t, _ in stream.times)
    speed = count / (end - begin)
    cpu = (cpu_end - cpu_begin) / count * 1000
    print(f"{len(streams)} streams: {speed:.1f} tokens/s ({count} tokens in "
          f"{end - begin:.1f} s), {cpu:.2f} CPU ms a token", flush=True)
    return speed, cpu, [stream.text for stream in streams]


def measure_first(options, process):
    """Time to first token, when all users come at once."""
    system = texts()[:int(options.tokens * 3.6)]
    for label in ("at first", "again"):
        streams = [Stream(options, process,
                          f"{system}\n\nUser {i} asks {label}:", 4)
                   for i in range(options.streams)]
        wait(streams)
        first = sorted(stream.times[0][0] - stream.begin for stream in streams)
        tokens = streams[0].usage["prompt_tokens"]
        print(f"{len(streams)} users, prompts of {tokens} tokens, {label}: "
              f"first token after {sum(first) / len(first):.3f} s on average, "
              f"{first[-1]:.3f} s at most")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("streams", "first"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--name", default="smollm2")
    parser.add_argument("--peer", default="")
    parser.add_argument("--limit", type=float)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    measure = measure_streams if options.what == "streams" else measure_first
    options.tokens = options.tokens or (4096 if options.what == "streams" else 2048)
    results = []
    for command in (options.command, shlex.split(options.peer)):
        if not command:
            continue
        process = start(command)
        try:
            results.append(measure(options, process))
        finally:
            process.kill()
            process.wait()
    if options.what == "streams" and options.peer and all(results):
        (speed, cpu, ours), (peer_speed, peer_cpu, theirs) = results
        same = [len(os.path.commonprefix(pair)) / len(pair[0])
                for pair in zip(ours, theirs)]
        print(f"ratio: {speed / peer_speed:.2f} in tokens/s, "
              f"{peer_cpu / cpu:.2f} in CPU time of answers, which are the same up to "
              f"{sum(same) / len(same):.0%} of their lengths")


if __name__ == "__main__":
    main()
