"""The mutants of the library and of its judges, and those that are argued to be
equivalent (docs/mutants.md)."""

import collections
import contextlib
import functools
import hashlib
import io
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("core", "reference", "optimized")
# The judges in props/: drivers, oracles, pools, the shrinker, the runner.
JUDGES = tuple(f"props/{name}" for name in (
    "compare/failure.h", "compare/model_driver.cc", "compare/model_compare.cc",
    "compare/visibility.cc",
    "compare/coverage_marks.cc", "compare/client.cc", "compare/runner.cc", "compare/differential_driver.cc",
    "compare/differential_compare.cc", "history/misuse.cc", "history/rows.cc",
    "laws/alike.cc", "laws/client_law.cc", "laws/laws.cc",
    "laws/pass_laws.cc", "laws/sequence_laws.cc", "laws/session.cc",
    "laws/storage_laws.cc", "oracle/judge.cc", "oracle/oracle.cc",
    "oracle/paged_oracle.cc", "oracle/paged_places.cc", "oracle/put_log.cc",
    "paged/paged_client.cc", "paged/paged_runner.cc", "paged/paged_shrink.cc",
    "paged/pool_workload.cc",
    "paged/paged_driver.cc", "paged/pool_recorder.cc", "search/explore.cc", "search/explore_state.cc",
    "search/explore_step.cc", "shrink/minimal_cases.cc", "shrink/rebuild.cc",
    "shrink/shrink.cc"))
RULES = ["universal.rules", "cpp.rules", "c_like.rules"]
EQUIVALENT = ROOT / "docs" / "mutants.md"


# Matches strings, raw ones too, characters and comments.
TEXT = re.compile(r"""R"\(.*?\)"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|//.*""")
# Matches the start of lines without behaviour: declarations of types
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
    """Exits if a judge does not exist, or if docs/mutants.md argues about a line
    that does not exist."""
    for judge in JUDGES:
        if not (ROOT / judge).exists():
            sys.exit(f"mutants: JUDGES names {judge}, which does not exist")
    for file, before, _ in equivalent:
        lines = (ROOT / file).read_text().splitlines()
        if before not in map(one_line, lines):
            sys.exit(f"mutants: docs/mutants.md argues about a line that "
                     f"{file} does not have: {before}")
