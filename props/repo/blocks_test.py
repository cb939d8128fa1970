#!/usr/bin/env python3
"""blocks_test.py BUILD [--python PYTHON] [--slow] [PAGE...]

Runs each block of code in README.md, CONTRIBUTING.md, docs/ and the other pages,
and fails if a block does not do what its page says. Without --python it runs the
blocks of all languages except Python; with it, those of Python, by a PYTHON that
has the package kvtwin. A page is a session: its blocks run in turn, in a scratch
folder that looks like a clone with BUILD as its folder build/.

CONTRIBUTING.md says what each language must do, and lists the comments before a
block that say otherwise.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
LANGUAGES = {"c", "cmake", "cpp", "go", "history", "json", "python", "sh", "text", "yaml"}
# Pages whose block of each of these languages another test checks.
ELSEWHERE = [
    (r"docs/backends/[^/]+\.md", {"text"}, "docs/backends/page.py"),
    (r"docs/found/.*", {"python", "text"}, "docs/found/check.py"),
]
BLOCK = re.compile(
    r"(?P<marks>(?:^ *<!-- code: (?:(?!-->).)*-->\n)*)"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL)
MARK = re.compile(
    r"<!-- code: (exit|given|slow|from|checked by|not run:)(?=\s)\s*(.*?)\s*-->",
    re.DOTALL)
SECONDS, SLOW_SECONDS = 120, 3600


class Wrong(Exception):
    """A block is not as its page says."""


class Block:
    """A block of code of a page."""

    def __init__(self, page, source, found):
        self.place = f"{page}:{source.count(chr(10), 0, found.start('text'))}"
        self.language = found["language"]
        self.text = textwrap.dedent(found["text"])
        self.marks = dict(MARK.findall(found["marks"]))
        if found["marks"].count("<!-- code:") != len(self.marks):
            raise Wrong(f"{self.place}: unknown comment: {found['marks']}")
        if self.language not in LANGUAGES:
            raise Wrong(f"{self.place}: '{self.language}' is not one of the languages "
                        f"{', '.join(sorted(LANGUAGES))}")
        for pages, languages, test in ELSEWHERE:
            if re.fullmatch(pages, page) and self.language in languages:
                self.marks.setdefault("checked by", test)

    def how(self):
        """Returns the word under which the summary counts the block."""
        for mark in "not run:", "checked by", "from", "slow":
            if mark in self.marks:
                return mark.rstrip(":")
        return "run"

    def needs_package(self):
        """Whether the block needs a Python that has the package kvtwin."""
        commands = self.text + self.marks.get("given", "")
        return self.language == "python" or bool(
            re.search(r"\bpytest\b|docs/site/picture\.py", commands))

    def check_marks(self):
        """Checks what can be checked without running the block."""
        if "checked by" in self.marks:
            file = self.marks["checked by"].split(":")[0].split()[0]
            if not (ROOT / file).exists():
                raise Wrong(f"{self.place}: {file} does not exist")
        if "from" in self.marks:
            if not (ROOT / self.marks["from"]).is_file():
                raise Wrong(f"{self.place}: {self.marks['from']} does not exist")
            whole = (ROOT / self.marks["from"]).read_text()
            if plain(self.text) not in plain(whole):
                raise Wrong(f"{self.place}: is not a part of {self.marks['from']}")


def git_files(*patterns):
    """Returns the files of the repository, also those that are not committed yet."""
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def plain(text):
    """Returns the lines of the text without indentation."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


def indented_code(source):
    """Returns the number of a line that is code by its indentation, or None."""
    outside = BLOCK.sub(lambda found: "\n" * found[0].count("\n"), source)
    content, before = 0, ""
    for number, line in enumerate(outside.split("\n"), 1):
        indent = len(line) - len(line.lstrip())
        item = re.match(r" *(?:[-*]|\d+\.) +", line)
        if item:
            content = len(item[0])
        elif line and not indent:
            content = 0
        elif line and not before and indent >= content + 4:
            return number
        before = line.strip()
    return None


def blocks_of(page):
    """Returns the blocks of a page."""
    source = (ROOT / page).read_text()
    blocks = [Block(page, source, found) for found in BLOCK.finditer(source)]
    if len(re.findall(r"^ *```", source, re.MULTILINE)) != 2 * len(blocks):
        raise Wrong(f"{page}: a block does not end, or has no marks that can be read")
    number = indented_code(source)
    if number:
        raise Wrong(f"{page}:{number}: code by indentation: write ```LANGUAGE")
    for block in blocks:
        block.check_marks()
    for pages, languages, test in ELSEWHERE:
        for language in languages if re.fullmatch(pages, page) else ():
            if sum(block.language == language for block in blocks) > 1:
                raise Wrong(f"{page}: {test} checks one block of {language} only")
    return blocks


def parse_json(block):
    """Checks that a block is JSON."""
    try:
        json.loads(block.text)
    except json.JSONDecodeError as error:
        raise Wrong(f"{block.place}: {error}") from None


class Session:
    """A scratch folder in which the blocks of a page run."""

    def __init__(self, folder, build, python):
        self.folder = pathlib.Path(folder)
        self.printed = None
        for name in {path.split("/")[0] for path in git_files()} - {"dev"}:
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "build").mkdir()
        for each in build.iterdir():  # A block that builds leaves BUILD alone.
            if each.is_file() and each.name != "CMakeCache.txt":
                (self.folder / "build" / each.name).symlink_to(each)
        # CI runs the commands of ./dev; here they only have to exist.
        dev = self.folder / "dev"
        dev.write_text(f'#!/bin/sh\n{ROOT}/dev help | grep -q "^  $1 "\n')
        dev.chmod(0o755)
        self.python = python
        paths = [str(build), os.environ["PATH"]]
        if python:
            paths.insert(0, str(pathlib.Path(python).parent))
        self.environment = {**os.environ, "PATH": ":".join(paths),
                            "PYTHONDONTWRITEBYTECODE": "1"}

    def call(self, block, arguments, stdin=None):
        """Runs a program of a block, which must exit as the block says."""
        seconds = SLOW_SECONDS if "slow" in block.marks else SECONDS
        with subprocess.Popen(
                arguments, cwd=self.folder, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True) as ran:
            try:
                printed, _ = ran.communicate(stdin, timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(ran.pid, signal.SIGKILL)
                raise Wrong(f"{block.place}: took more than {seconds} s") from None
        expected = int(block.marks.get("exit", 0))
        if ran.returncode != expected:
            raise Wrong(f"{block.place}: exited with {ran.returncode}, expected "
                        f"{expected}:\n{printed[-3000:]}")
        self.printed += printed

    def run(self, block):
        """Runs a block by its language."""
        given = block.marks.get("given", "")
        shell = ["bash", "-euo", "pipefail", "-c"]
        if block.language != "text" or given:
            self.printed = ""
        if block.language == "text":
            if given:
                self.call(block, [*shell, given])
            self.compare(block)
        elif block.language == "sh":
            self.call(block, [*shell, f"{given}\n{block.text}"])
        elif block.language == "python":
            self.call(block, [self.python, "-c", f"{given}\n{block.text}"])
        elif block.language == "history":
            for line in block.text.splitlines():
                self.call(block, ["kvtwin", "run", line])
        elif block.language == "json":
            if block.text.startswith('{"kvtrace"'):
                self.call(block, ["kvtwin", "check", "-"], stdin=block.text)
            else:
                parse_json(block)
        else:
            raise Wrong(f"{block.place}: {block.language} is not run by itself: name "
                        f"its file by 'code: from'")

    def compare(self, block):
        """Checks that the last run printed the block's lines, one after the other."""
        pattern = "".join(
            "(?:.*\n)*?" if line == "..." else
            re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
            for line in plain(block.text).splitlines())
        if not re.search(f"^{pattern}", plain(self.printed), re.MULTILINE):
            raise Wrong(f"{block.place}: is not what was printed:\n"
                        f"{self.printed[-3000:]}")


def run_page(page, blocks, options):
    """Runs the blocks of a page. Returns how many ran, and the errors."""
    ran, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="kvtwin-blocks-") as folder:
        session = Session(folder, options.build, options.python)
        last = None  # How the last block that is not output was treated.
        for block in blocks:
            how = block.how()
            if block.language != "text" or "given" in block.marks:
                last = how
                if how == "slow" and options.slow:
                    last = "run"
                if block.needs_package() != bool(options.python):
                    last = "elsewhere"
            elif how == "run" and last not in ("run", "slow", "elsewhere"):
                wrong.append(f"{block.place}: no block before it ran that could print it")
            if last != "run" or how not in ("run", "slow"):
                continue
            try:
                session.run(block)
                ran += 1
            except Wrong as error:
                wrong.append(str(error))
    return ran, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--python", type=os.path.abspath)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("pages", nargs="*")
    options = parser.parse_intermixed_args()
    pages = options.pages or git_files("*.md")
    wrong, work, counts, reasons = [], [], collections.Counter(), []
    for page in pages:
        try:
            blocks = blocks_of(page)
        except Wrong as error:
            wrong.append(str(error))
            continue
        work.append((page, blocks))
        for block in blocks:
            counts[block.how()] += 1
            if block.how() == "not run":
                reasons.append(f"{block.place}: {block.marks['not run:']}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda each: run_page(*each, options), work))
    wrong += [each for _, page_wrong in results for each in page_wrong]
    print("\n".join(["not run:", *(f"  {each}" for each in reasons)]))
    print(f"blocks: {sum(ran for ran, _ in results)} ran now; of all "
          f"{sum(counts.values())}: "
          + ", ".join(f"{count} {how}" for how, count in sorted(counts.items())))
    if wrong:
        sys.exit("\n\n".join(wrong))


if __name__ == "__main__":
    main()
