"""comments.py HEADER: prints a header with its comments as Doxygen reads them.

Doxygen calls this as its INPUT_FILTER (docs/site/Doxyfile). A comment above a
declaration gets a third slash or a second asterisk, and a comment after it also a
`<`. A comment stands for all declarations that follow it without a blank line:
each of them gets it.
"""

import re
import sys

PARTS = re.compile(r"(?P<code>(?:[^/]|/(?![/*]))*)(?P<comment>//.*|/\*.*)?")

above, ended, column, open_block = [], False, None, False
print("/// @file")
for line in open(sys.argv[1], encoding="utf-8").read().splitlines():
    line = re.sub(r"(?<!include )<([\w/]+\.h)>", r"\1", line)  # Not a tag of HTML.
    line = re.sub("`([^`<&]+)`", r"<tt>\1</tt>", line)
    if open_block:  # Inside of /* */.
        open_block = "*/" not in line
        if column is None:
            above.append(line)
        print(line)
        continue
    code, comment = PARTS.fullmatch(line).group("code", "comment")
    behind = code.strip() or len(code) == column
    if comment:
        column = len(code) if behind else None
        mark = comment[:2] + comment[1] + "<" * bool(behind)
        open_block = mark[1] == "*" and "*/" not in comment
        comment = mark + comment[2:]
    elif code.strip():
        column = None
    if "operator==" in line and "= default" in line:
        continue  # Compares all members, as everyone expects.
    if not line.strip():
        above, ended, column = [], False, None
    elif not code.strip() and not behind:
        above = above * (not ended) + [code + comment]
        ended = False
    elif code.strip():
        begins = not re.match(r" *([})]|#(?!define))", code)
        if ended and above and begins and not comment:
            print(*above, sep="\n")
        ended = bool(re.search(r"[;}]\s*$|^#define.*[^\\]$", code))
        if re.search(r"\b(struct|class|enum|extern)\b.*\{\s*$", code):
            above = []
    print(code + (comment or ""))
