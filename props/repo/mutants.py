#!/usr/bin/env python3
"""Mutation score of the library and of its judges; see docs/mutants.md.

universalmutator makes the mutants. A copy of the tree under build/mutants is
built once; for each mutant only the objects that see it are compiled again and
linked before the others. Programs then try to tell the mutant from the
original, the cheapest first. The results are kept in
build/mutants/results.jsonl, so that a run continues where the last one stopped;
survivors are tried again.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import queue
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
ROOMS = ("core", "reference", "optimized")
# The judges in props/: drivers, oracles, pools, the shrinker, the runner.
JUDGES = tuple(f"props/{name}" for name in (
    "base/differs.h", "compare/model_driver.cc", "compare/visibility.cc",
    "compare/coverage_marks.cc", "compare/runner.cc", "compare/differential_driver.cc",
    "compare/differential_compare.cc", "history/misuse.cc", "history/rows.cc",
    "laws/alike.cc", "laws/client_law.cc", "laws/laws.cc",
    "laws/pass_laws.cc", "laws/sequence_laws.cc", "laws/session.cc",
    "laws/storage_laws.cc", "oracle/judge.cc", "oracle/oracle.cc",
    "oracle/paged_oracle.cc", "oracle/paged_places.cc", "oracle/put_log.cc",
    "paged/paged_client.cc", "paged/paged_fuzz.cc", "paged/pool_workload.cc",
    "paged/paged_driver.cc", "paged/pool_recorder.cc", "search/explore.cc", "search/explore_state.cc",
    "search/explore_step.cc", "shrink/minimal_cases.cc", "shrink/rebuild.cc",
    "shrink/shrink.cc"))
RULES = ["universal.rules", "cpp.rules", "c_like.rules"]
EQUIVALENT = ROOT / "docs" / "mutants.md"

# Flags for the mutated objects. Clang does not optimize, since compiling takes
# most of the time; variables that are not initialized are not zero.
QUICK = ("-O0 -w -fPIC -fopenmp -ffp-contract=off -Werror=return-type "
         "-ftrivial-auto-var-init=pattern").split()
SANITIZE = ("-O1 -w -fPIC -fopenmp -ffp-contract=off -fno-sanitize-recover=all "
            "-fsanitize=address,undefined").split()
LINKER = ["-fuse-ld=lld"] if shutil.which("ld.lld") else []
# Programs of one test each: the linker wraps the functions that they count.
WRAPPED = ("kvtwin_allocation_test", "kvtwin_save_calls_test")
TARGETS = ("kvtwin_command", "kvtwin_host", "kvtwin_tests", "kvtwin_law_tests",
           *WRAPPED)
# The tests that take most of the time.
SLOWEST = "Trace.GivesUp*"
# Processes that are forked after clang's OpenMP was used hang or fail: these
# tests run before the others, in their own process, or not at all.
PAGES = "Page.*"
LEFT_OUT = f"{PAGES}:SavedFiles.AreWholeIfOtherProcessesSave"
# Quick tests of the judges.
JUDGING = ("Faulty*:Oracle.*:PagedOracle.*:OtherPools.*:PutLog*:Paged.*:"
           "PagedTrace.*:Harness.Finds*:Rows*")
SLOW = f"{SLOWEST}:Explorer.*:Targets.*:Shrink.*:Harness.*:Twins.*"
# Headers that most sources include, compiled once.
PREFIX = """#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
"""


# The mutants -----------------------------------------------------------------

# Matches strings, raw ones too, characters and comments.
TEXT = re.compile(r"""R"\(.*?\)"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|//.*""")
# Matches the begin of lines without behaviour of ours: declarations of types
# and names, the preprocessor, and asserts, which never fail in correct code.
NO_BEHAVIOUR = re.compile(
    r"#|namespace\b|using\b|template\b|class\b|struct\b|enum\b|static_assert|"
    r"public:|private:|protected:|HWY_(EXPORT|BEFORE|AFTER)|KVTWIN_ASSERT")
# Matches lines without which the rest does not compile: declarations, returns,
# and parts of statements.
NO_STATEMENT = re.compile(
    r"return\b|[}\])]|case\b|default\b|.*[^;]$|"
    r"(const |constexpr |static )?[\w:<>, *]+[ *&]+\**\w+( = .*|\{.*|\(.*)?;$")
# Matches operators that do not exist.
NO_TOKEN = re.compile(
    r"[=!<>]==|<>|><|[-+*%]/|/[-+%]|%[-+%/]|[-+]%|[-+]\*|[*/]\+\w|\+-|-\+|"
    r"[=<>]!|=%|[(,=\[{] *[|/%][\w(]|\[\|\]|--\d|\w  +\w|"
    r"\b(\w+) (\w+), \1 \2\b")
# Matches functions whose arguments are messages for people.
MESSAGE = re.compile(
    r"""\b(?:Invalid|Untimely|(?:fields\.)?(?:Fail|Wrong)|wrong|"""
    r"""fmt::format|fprintf)\(\s*(?!R")""")
# Matches functions of the judges that only make a message.
MESSAGE_FUNCTION = re.compile(r"std::string [\w:]*(Text|Picture|Label)\(")


def blank_text(line):
    """Returns the line with its strings and comments as blanks."""
    return TEXT.sub(lambda m: " " * len(m.group()), line)


def message_columns(source):
    """Returns, for each line, the columns that are arguments of a message."""
    text = "".join(source)
    code = "".join(blank_text(line) for line in source)
    inside = bytearray(len(text))
    for match in MESSAGE.finditer(text):
        if not code[match.start()].strip():
            continue
        at = code.index("(", match.start())
        depth = 0
        for end in range(at, len(code)):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            if depth == 0:
                break
        inside[at + 1:end] = b"\1" * (end - at - 1)
    lines, at = [], 0
    for line in source:
        lines.append(inside[at:at + len(line)])
        at += len(line)
    return lines


def blank_message_functions(source, messages):
    """Marks all columns of functions that make a message."""
    inside = False
    for number, line in enumerate(source):
        inside = inside or bool(MESSAGE_FUNCTION.match(line))
        if inside:
            messages[number] = b"\1" * len(line)
        inside = inside and not line.startswith("}")


def is_noise(source, number, mutant, messages, names):
    """Whether a mutant cannot compile or changes nothing but texts."""
    line = source[number - 1]
    code = blank_text(line)
    if NO_BEHAVIOUR.match(code.strip()) or not code.strip():
        return True
    first = len(os.path.commonprefix([line, mutant]))
    if "".join(line.split()) == "".join(mutant.split()):
        return True
    tail = len(os.path.commonprefix([line[first:][::-1],
                                     mutant[first:][::-1]]))
    end = len(line) - tail
    if end <= first:  # Something is inserted.
        end = min(first + 1, len(line))
    if not code[first:end].strip() and "\n" not in line[first:end]:
        return True
    if all(messages[first:end]):
        return True
    for at in (first - 1, first):
        before = line[at - 1] if at > 0 else " "
        after = line[at + 1] if at + 1 < len(line) else " "
        if line[at] in "<>" and not (before == " " and after in " ="):
            return True  # A bracket of a template.
        if line[at] in "&*" and (before.isalnum() or before in ">&_"):
            return True  # A pointer, a reference.
    made = blank_text(mutant)
    if NO_TOKEN.search(made) and not NO_TOKEN.search(code):
        return True
    if any(code.count(one) != made.count(one) for one in "()[]{}\"") or (
            set(re.findall(r"[A-Za-z_]\w*", made)) - names):
        return True
    if line[first].isdigit() and re.search(r"[A-Za-z_]\d*$", line[:first]):
        return True  # Within a name.
    if "\n" in mutant[:-1]:  # An added statement.
        return not code.rstrip().endswith((";", "{", "}"))
    if "/*" in mutant:  # A removed statement.
        above = next((text for text in map(str.rstrip, map(
            blank_text, source[number - 2::-1])) if text), ";")
        return bool(NO_STATEMENT.match(code.strip()) or
                    above[-1] not in ";{}:")
    if code.rstrip().endswith(";") and not made.rstrip().endswith(";"):
        return True
    if re.search("(!=|==) nullptr", code) and made == (
            code.replace("!= nullptr", "> nullptr")
            .replace("== nullptr", "<= nullptr")):
        return True  # The same: no pointer is less than null.
    # The parameters of a function in another order.
    return is_swap(line, mutant) and (
        "(," in mutant or
        bool(re.search(r"[(,] *(const )?[\w:<>]+[&*]* [&*]?\w+[,)]", code)))


def is_swap(line, mutant):
    """Whether only the order of arguments differs."""
    return "," in line and (sorted("".join(line.split())) ==
                            sorted("".join(mutant.split())))


def library_files():
    """Returns the files in ROOMS and their folders, without the twin cuda."""
    return [path for room in ROOMS for path in (ROOT / room).rglob("*")
            if path.is_file() and
            "cuda" not in path.relative_to(ROOT).parts]


@functools.cache
def known_names():
    """Returns the names in our sources, and those that mutants make of them."""
    names = set("min max begin end any_of all_of none_of break continue if "
                "min_element max_element".split())
    paths = [*(ROOT / "include" / "kvtwin").iterdir(), *library_files()]
    paths += [ROOT / file for file in JUDGES]
    paths += [path.with_suffix(".h") for path in paths
              if path.with_suffix(".h").exists()]
    for path in filter(pathlib.Path.is_file, paths):
        names.update(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return names


Mutant = collections.namedtuple("Mutant", "key file line before after")


def mutants_of(file):
    """Returns (generated, those that are not noise) for one file."""
    from universalmutator import mutator  # Not needed to check the arguments.
    with open(ROOT / file, encoding="ascii") as stream:
        source = stream.readlines()
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutator.mutants_regexp(source, RULES, ignorePatterns=[],
                                      ignoreStringOnly=True)
    messages = message_columns(source)
    if file in JUDGES:
        blank_message_functions(source, messages)
    names = known_names()
    nth = []  # Equal lines are told apart by their order.
    seen = collections.Counter()
    for line in source:
        nth.append(seen[line])
        seen[line] += 1
    kept = []
    for number, after, *_ in made:
        before = source[number - 1]
        if is_noise(source, number, after, messages[number - 1], names):
            continue
        text = "\0".join([file, before, str(nth[number - 1]), after])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        kept.append(Mutant(key, file, number, before, after))
    return len(made), kept


def sample(count, only):
    """Returns (generated, not noise, the sample).

    The library and the judges have `count` mutants each. If `only` is given,
    the sample keeps only the mutants in those files.
    """
    library = sorted(str(path.relative_to(ROOT)) for path in library_files()
                     if path.suffix in (".h", ".cc"))
    parts = [sample_of(files, count) for files in (library, JUDGES)]
    return (sum(part[0] for part in parts), sum(part[1] for part in parts),
            [mutant for part in parts for mutant in part[2]
             if not only or mutant.file in only])


def sample_of(files, count):
    """Returns (generated, not noise, the sample) for these files."""
    generated = 0
    kept = []
    by_line = {}
    for file in files:
        made, mutants = mutants_of(file)
        generated += made
        kept += mutants
        for mutant in mutants:
            # Swaps seldom compile: they are taken only without an alternative.
            rank = (is_swap(mutant.before, mutant.after), mutant)
            at = (file, mutant.line)
            by_line[at] = min(by_line.get(at, rank), rank)

    # The least of several hashes is small, so lines are ranked by another hash.
    # A mutant costs the compilation of all sources that include it: in a header
    # that n sources include, one of n / 2 lines is taken.
    def order(mutant):
        rank = hashlib.sha256(mutant.key.encode()).digest()
        costly = [source for source in includers(mutant.file)
                  if not source.endswith(("_test.cc", "_props.cc"))]
        return int.from_bytes(rank[:8], "big") * max(2, len(costly))
    chosen = sorted((mutant for _, mutant in by_line.values()),
                    key=order)[:count]
    return generated, len(kept), chosen


def includers(file, cache={}):
    """Returns the sources that include a file, directly or not."""
    if not cache:
        direct = collections.defaultdict(set)
        for room in (*ROOMS, "props"):
            for path in (ROOT / room).rglob("*.*"):
                if path.suffix not in (".h", ".cc"):
                    continue
                name = str(path.relative_to(ROOT))
                for included in re.findall(r'#include "(.*)"',
                                           path.read_text()):
                    direct[included].add(name)
        cache["direct"] = direct
    found, todo = set(), [file]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        found.add(one)
        todo += cache["direct"][one]
    return sorted(one for one in found if one.endswith(".cc"))


def argued_equivalent():
    """Returns {(file, line, mutant): reason} from docs/mutants.md."""
    pattern = re.compile(r"^- (\S+): (.*)\n  `(.*)`\n  `(.*)`$", re.MULTILINE)
    return {(file, before, after): why for file, why, before, after
            in pattern.findall(EQUIVALENT.read_text())}


def one_line(text):
    return " ".join(text.split())


def check_arguments(equivalent):
    """Exits if docs/mutants.md argues about a line that does not exist."""
    for file, before, _ in equivalent:
        lines = (ROOT / file).read_text().splitlines()
        if before not in map(one_line, lines):
            sys.exit(f"mutants: docs/mutants.md argues of a line that "
                     f"{file} does not have: {before}")


# Trying a mutant -------------------------------------------------------------


class Program:
    """Runs commands with limits, in their own process group."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, args, seconds, env=None, memory=True):
        """Returns (exit code or None if it hangs, the output)."""
        def bound():
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if memory:
                resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
        with open(self.folder / "output", "w+b") as out:
            process = subprocess.Popen(
                args, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, cwd=self.folder / "build",
                # Waiting threads must not spend the CPU time that the others
                # need: it is limited.
                env={**os.environ, "OMP_WAIT_POLICY": "passive", **(env or {})},
                preexec_fn=bound,
                start_new_session=True)
            try:
                code = process.wait(timeout=20 * seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            if code == -signal.SIGXCPU or code == -signal.SIGKILL:
                code = None
            out.seek(0)
            return code, out.read(1 << 24).decode(errors="replace")


class Bench:
    """A built copy of the tree, in which mutants are tried one by one."""

    def __init__(self, folder):
        self.folder = folder
        self.build = folder / "build"
        self.program = Program(folder)
        self.controlled = set()

    def checked(self, args, **keywords):
        done = subprocess.run(args, cwd=self.folder, text=True,
                              capture_output=True, **keywords)
        if done.returncode != 0:
            sys.exit(f"mutants: {shlex.join(map(str, args))}\n"
                     f"{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    def prepare(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, text=True, capture_output=True).stdout
        for name in tracked.splitlines():
            source, copy = ROOT / name, self.folder / name
            if not source.is_file():
                continue
            digest.update(name.encode() + source.read_bytes())
            if copy.exists() and copy.read_bytes() == source.read_bytes():
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
        # These programs may contain a mutant.
        for old in ("kvtwin", "kvtwin-host", *TARGETS[2:]):
            (self.build / old).unlink(missing_ok=True)
        self.checked(["cmake", "--preset", "release", "-G", "Ninja",
                      "-DKVTWIN_BENCH=OFF", "-DKVTWIN_WERROR=OFF",
                      "-DKVTWIN_UNITE=OFF"])
        # Tests of the command need the backends, too.
        self.checked(["cmake", "--build", "build",
                      "--parallel", str(os.cpu_count())])
        self.commands = {}
        self.tests_of = {}  # The objects of kvtwin_tests.
        for entry in json.loads(
                (self.build / "compile_commands.json").read_text()):
            name = str(pathlib.Path(entry["file"]).relative_to(self.folder))
            if re.search(r"CMakeFiles/kvtwin(_props|_tests)?\.dir/",
                         entry["command"]):
                command = shlex.split(entry["command"])
                self.commands[name] = command
                if "CMakeFiles/kvtwin_tests.dir/" in entry["command"]:
                    self.tests_of[name] = command[command.index("-o") + 1]
        self.links = {}
        for target in TARGETS:
            last = self.checked(["ninja", "-C", "build", "-t", "commands",
                                 target]).splitlines()[-1]
            link = shlex.split(last)
            self.links[target] = link[link.index("&&") + 1:-2]
        (self.folder / "prefix.h").write_text(PREFIX)
        self.checked(["clang++", *QUICK, *self.seen_by("core/trace/trace.cc"), "-x",
                      "c++-header", "-fpch-instantiate-templates", "prefix.h",
                      "-o", "prefix.pch"])
        self.reference = self.check_recordings()
        # The original, built like a mutant, must survive.
        stood = self.folder.parent / "stood"  # All trees share it.
        if stood.exists() and stood.read_text() == digest.hexdigest():
            return
        sources = [source for source in self.commands
                   if source.startswith(ROOMS) or source in JUDGES]
        if outcome := (self.quick_outcome(sources) or
                       self.commands_of_ctest() or self.sanitized(sources)):
            sys.exit(f"mutants: without a mutant: {outcome}")
        stood.write_text(digest.hexdigest())

    def seen_by(self, source):
        """Returns the flags that change what a source sees."""
        command = iter(self.commands[source])
        found = []
        for word in command:
            if word.startswith(("-D", "-I", "-std=")) and word != "-DNDEBUG":
                found.append(word)
            elif word == "-isystem":
                found += [word, next(command)]
        return found

    def compile(self, sources, flags, prefix=True):
        """Returns the objects, or None if a source does not compile."""
        objects = []
        for source in sources:
            made = self.folder / (source.replace("/", "_") + ".o")
            with_prefix = prefix and "kernels" not in source
            code, _ = self.program.run(
                ["clang++", *flags, *self.seen_by(source),
                 *(["-include-pch", str(self.folder / "prefix.pch")]
                   if with_prefix else []),
                 "-c", str(self.folder / source), "-o", str(made)], 60)
            if code != 0:
                return None
            objects.append(str(made))
        return objects

    def link(self, target, objects, without=(), compiler=()):
        command = [word for word in self.links[target] if word not in without]
        code, _ = self.program.run(
            [*(compiler or command[:1]), *LINKER, *objects, *command[1:],
             "-l:libomp.so.5"], 60)
        return code == 0

    # Killers return None if the mutant survives, otherwise what they saw.

    def simply(self, args, seconds, env=None, memory=True):
        code, _ = self.program.run(args, seconds, env, memory)
        if code == 0:
            return None
        return "hangs" if code is None else "crashes" if code < 0 else "differs"

    def check_recordings(self):
        answers = []
        for folder in ("accept", "reject"):
            code, text = self.program.run(
                ["./kvtwin", "check", "--json",
                 f"../props/recordings/{folder}"], 5)
            found = re.findall(
                r'"(?:file|verdict|line|level)": *("[^"]*"|\d+)', text)
            answers.append((code, found))
        return answers

    def recordings(self):
        answers = self.check_recordings()
        if answers == self.reference:
            return None
        codes = [code for code, _ in answers]
        return ("hangs" if None in codes else
                "crashes" if min(codes) < 0 else "differs")

    def explore(self):
        for kind in ("causal", "swa", "swa_mem", "chunked"):
            seen = self.simply(["./kvtwin", "explore", "--cells", "3",
                                "--positions", "3", "--kind", kind,
                                "--threads", "1"], 8)
            if seen:
                return seen
        return None

    def laws(self):
        return self.simply(["./kvtwin", "laws", "--runs", "20"], 30)

    def tests(self, groups=(PAGES, f"-{LEFT_OUT}:{SLOW}", f"{SLOW}-{SLOWEST}",
                            SLOWEST)):
        for chosen in groups:
            seen = self.simply(
                ["./kvtwin_tests", "--gtest_fail_fast", "--gtest_brief=1",
                 f"--gtest_filter={chosen}"], 400,
                {"RC_PARAMS": "seed=1 max_success=40"})
            if seen:
                return seen
        return None

    def laws_tests(self):
        return self.simply(["./kvtwin_law_tests", "--gtest_fail_fast",
                            "--gtest_brief=1"], 60,
                           {"RC_PARAMS": "seed=1 max_success=40"})

    def commands_of_ctest(self):
        return self.simply(
            ["ctest", "-R", "^command", "-E",
             "first_wrong_lines|ten_million|canary|page|in_time",
             "--stop-on-failure"], 120)

    def fuzz(self, operations, seed, seconds):
        return self.simply(["./kvtwin", "fuzz", "--ops", str(operations),
                            "--seed", str(seed)], seconds)

    def last_outcome(self, sources):
        """Returns the outcome of a mutant that survived everything else."""
        seen = self.sanitized(sources)
        return ("killed", f"sanitizers {seen}") if seen else ("survived", "")

    def sanitized(self, sources):
        sources = [source for source in sources if source not in self.tests_of]
        objects = self.compile(sources, SANITIZE, prefix=False)
        compiler = ["clang++", "-fsanitize=address,undefined"]
        env = {"ASAN_OPTIONS": "detect_container_overflow=0:detect_leaks=0:"
                               "allocator_may_return_null=1:"
                               "hard_rss_limit_mb=4000"}
        if objects is None:
            return None
        for target, args in (
                ("kvtwin_command",
                 ["./kvtwin", "fuzz", "--ops", "50000", "--seed", "3"]),
                ("kvtwin_tests", ["./kvtwin_tests", "--gtest_fail_fast",
                  f"--gtest_filter=-{LEFT_OUT}"])):
            if not self.link(target, objects, compiler=compiler):
                return None
            seen = self.simply(
                args, 900, {**env, "RC_PARAMS": "seed=1 max_success=40"}, False)
            if seen:
                return seen
        return None

    def identical(self, sources):
        """Whether each object is the original's, byte for byte."""
        for source in sources:
            command = list(self.commands[source])
            made = str(self.folder / "mutant.o")
            at = command.index("-o") + 1
            original = self.build / command[at]
            command[at] = made
            code, _ = self.program.run(command, 120)
            if code != 0:
                return False
            if pathlib.Path(made).read_bytes() != original.read_bytes():
                return False
        return True

    def quick_outcome(self, sources):
        """Returns ("killed", by what), ("not compiling", "") or None."""
        library = [source for source in sources if source not in self.tests_of]
        objects = self.compile(library, QUICK)
        if objects is None or not (self.link("kvtwin_command", objects) and
                                   self.link("kvtwin_host", objects)):
            return "not compiling", ""
        of_judges = all(source.startswith("props/") for source in library)
        if of_judges:
            if not (self.link("kvtwin_tests", objects) and
                    self.link("kvtwin_law_tests", objects)):
                return "not compiling", ""
            if seen := self.tests([JUDGING]) or self.laws_tests():
                return "killed", f"tests of judges {seen}"
        for name, killer in (("fuzz", lambda: self.fuzz(20000, 1, 4)),
                             ("check", self.recordings),
                             ("explore", self.explore),
                             ("laws", self.laws)):
            if seen := killer():
                return "killed", f"{name} {seen}"
        tests = [source for source in sources if source in self.tests_of]
        changed = self.compile(tests, QUICK)
        if changed is None or not self.link(
                "kvtwin_tests", objects + changed,
                [self.tests_of[source] for source in tests]):
            return "not compiling", ""
        if seen := self.tests():
            return "killed", f"tests {seen}"
        # These programs contain the library, but no judges.
        for test in () if of_judges else WRAPPED:
            if not self.link(test, objects):
                return "not compiling", ""
            if seen := self.simply([f"./{test}"], 20):
                return "killed", f"{test} {seen}"
        return None

    def outcome(self, sources):
        """Returns (the outcome of the mutant in these sources, by what)."""
        if quick := self.quick_outcome(sources):
            return quick
        if self.identical([source for source in sources
                           if source not in self.tests_of]):
            return "identical", ""
        for name, killer in (
                ("command", self.commands_of_ctest),
                ("long fuzz", lambda: self.fuzz(1000000, 2, 120))):
            if seen := killer():
                return "killed", f"{name} {seen}"
        return "survived", ""

    def try_out(self, mutant, how):
        path = self.folder / mutant.file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after
        path.write_text("".join(lines))
        try:
            return how(self, [source for source in includers(mutant.file)
                              if source in self.commands])
        finally:
            path.write_text(original)


# The run ---------------------------------------------------------------------


def print_score(counts, killers, seconds):
    total = counts["killed"] + counts["survived"]
    print(f"not compiling {counts['not compiling']}, identical objects "
          f"{counts['identical']}, argued equivalent {counts['equivalent']}, "
          f"killed {counts['killed']}, survived {counts['survived']}, "
          f"not yet tried {counts['left']}")
    print("killed by: " + ", ".join(
        f"{name} {count}" for name, count in killers.most_common()))
    if total:
        print(f"score {100 * counts['killed'] / total:.1f} % of {total} "
              f"mutants, in {seconds:.0f} s")


def main():
    parser = argparse.ArgumentParser(prog="./dev mutants")
    parser.add_argument("--sample", type=int, default=900)
    parser.add_argument("--only", action="append", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--arguments", action="store_true",
                        help="only see whether docs/mutants.md fits")
    options = parser.parse_args()
    equivalent = argued_equivalent()
    check_arguments(equivalent)
    if options.arguments:
        print(f"{len(equivalent)} mutants are argued equivalent")
        return 0
    start = time.monotonic()

    generated, kept, chosen = sample(options.sample, options.only)
    print(f"generated {generated}, not noise {kept}, sampled {len(chosen)}",
          flush=True)

    def is_argued(mutant):
        return (mutant.file, one_line(mutant.before),
                one_line(mutant.after)) in equivalent

    WORK.mkdir(parents=True, exist_ok=True)
    results_path = WORK / "results.jsonl"
    results = {}
    if results_path.exists():
        for line in results_path.read_text().splitlines():
            entry = json.loads(line)
            results[entry["key"]] = entry

    def is_done(mutant):
        known = results.get(mutant.key)
        return known is not None and known["outcome"] != "survived"

    lock = threading.Lock()

    def work(bench, todo, how):
        while time.monotonic() - start < options.seconds:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            begin = time.monotonic()
            outcome, by = bench.try_out(mutant, how)
            entry = {"key": mutant.key, "file": mutant.file,
                     "line": mutant.line, "before": one_line(mutant.before),
                     "after": one_line(mutant.after), "outcome": outcome,
                     "by": by, "seconds": round(time.monotonic() - begin, 1)}
            with lock:
                results[mutant.key] = entry
                with open(results_path, "a", encoding="ascii") as stream:
                    stream.write(json.dumps(entry) + "\n")
                if outcome == "survived" and how is Bench.outcome:
                    print(f"survived: {mutant.file}:{mutant.line}\n"
                          f"  {entry['before']}\n  {entry['after']}",
                          flush=True)

    benches = [Bench(WORK / f"tree{job}") for job in range(options.jobs)]
    def try_all(mutants, how):
        todo = queue.SimpleQueue()
        for mutant in mutants:
            todo.put(mutant)
        threads = [threading.Thread(target=work, args=[bench, todo, how])
                   for bench in benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    open_ones = [mutant for mutant in chosen
                 if not is_done(mutant) and not is_argued(mutant)]
    if open_ones and options.seconds > 0:
        for bench in benches:
            bench.prepare()
    # Earlier survivors come first: there may be a new test.
    try_all(sorted(open_ones, key=lambda m: m.key not in results),
            Bench.outcome)
    try_all([mutant for mutant in open_ones if not is_done(mutant) and
             mutant.key in results], Bench.last_outcome)

    counts = collections.Counter()
    killers = collections.Counter()
    for mutant in chosen:
        known = results.get(mutant.key)
        if is_argued(mutant):
            counts["equivalent"] += 1
        elif known is None:
            counts["left"] += 1
        else:
            counts[known["outcome"]] += 1
            if known["outcome"] == "killed":
                killers[known["by"].rsplit(" ", 1)[0]] += 1
    print_score(counts, killers, time.monotonic() - start)
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
