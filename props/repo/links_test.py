#!/usr/bin/env python3
"""links_test.py: each link of our pages leads to a file or an anchor that exists, and
each page is in the navigation of the site (docs/site/mkdocs.yml)."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = re.compile(r"^ *```.*?^ *```$|`[^`]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def slug(heading):
    """Returns the anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(text):
    """Returns all anchors of a page."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name, count = slug(heading), 0
        while (name if count == 0 else f"{name}-{count}") in anchors:
            count += 1
        anchors.add(name if count == 0 else f"{name}-{count}")
    return anchors


def main():
    pages = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {page: (ROOT / page).read_text() for page in pages}
    anchors = {page: anchors_of(text) for page, text in texts.items()}
    wrong, count = [], 0
    for page, text in texts.items():
        for link in LINK.findall(CODE.sub("", text)):
            if re.match(r"\w+:", link):
                continue
            count += 1
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            name = os.path.relpath(target.resolve(), ROOT)
            if not target.exists() or name.startswith(".."):
                wrong.append(f"{page}: {link} is not a file of the repository")
            elif anchor and anchor not in anchors.get(name, ()):
                wrong.append(f"{page}: {name} has no #{anchor}")
    navigation = (ROOT / "docs/site/mkdocs.yml").read_text()
    wrong += [f"docs/site/mkdocs.yml: {page} is not in nav" for page in pages
              if not re.search(rf"[- :] *{re.escape(page)}$", navigation, re.MULTILINE)
              and page != "python/README.md"]
    print(f"links: {count} in {len(pages)} pages")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
