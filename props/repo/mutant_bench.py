"""Builds a mutant and runs the tests that try to tell it from the original."""

import hashlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys

from mutant_list import JUDGES, ROOMS, ROOT, includers

# Flags for the mutated objects. Clang does not optimize, since compiling takes
# most of the time; variables that are not initialized are not zero.
QUICK = ("-O0 -w -fPIC -fopenmp -ffp-contract=off -Werror=return-type "
         "-ftrivial-auto-var-init=pattern").split()
SANITIZE = ("-O1 -w -fPIC -fopenmp -ffp-contract=off -fno-sanitize-recover=all "
            "-fsanitize=address,undefined").split()
LINKER = ["-fuse-ld=lld"] if shutil.which("ld.lld") else []
# Programs of one test each: the linker wraps the functions that they count.
WRAPPED = ("kvtwin_allocation_test", "kvtwin_save_calls_test",
           "kvtwin_slow_disk_test")
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
             "first_wrong_lines|reaches_all_marks|canary|page|in_time",
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
