"""check.py ENGINE: runs the script of each report about the engine.

The script of each page ENGINE-*.md must still end in the error that the page has;
numbers may differ. Run it by the Python that has the engine.
"""

import concurrent.futures
import pathlib
import re
import subprocess
import sys

engine = sys.argv[1]
pages = sorted(pathlib.Path(__file__).parent.glob(f"{engine}-*.md"))
if not pages:
    sys.exit(f"no report about {engine}")


def block(text, kind):
    """Returns the code block of a page that begins with ```kind."""
    return re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL).group(1)


def shape(text):
    """Returns the text with N for each number."""
    return re.sub(r"\d+", "N", text)


def run(page):
    """Runs the script of a page, and returns its last line and whether it is right."""
    text = page.read_text()
    ran = subprocess.run([sys.executable, "-c", block(text, "python")],
                         capture_output=True, text=True, timeout=600)
    last = (ran.stderr.strip().splitlines() or ["no error"])[-1]
    expected = block(text, "text").strip()
    return last, ran.returncode == 1 and shape(last) == shape(expected)


changed = []
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for page, (last, right) in zip(pages, pool.map(run, pages)):
        print(f"{page.name}: {'as its page says' if right else last}", flush=True)
        if not right:
            changed.append(page.name)
if changed:
    sys.exit(f"not as their pages say: {', '.join(changed)}")
