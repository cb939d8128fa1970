"""page.py PEERS.json PAGE: writes the tables of a run to the block of the page
that follows "## Attention beside other projects", and to stdout what
bench/peers/plot.sh draws."""

import json
import pathlib
import sys

from table import PEERS, series, tables


def main():
    found = json.loads(pathlib.Path(sys.argv[1]).read_text())
    page = pathlib.Path(sys.argv[2])
    before, heading, rest = page.read_text().partition(
        "## Attention beside other projects\n")
    above, fence, rest = rest.partition("```text\n")
    _, end, after = rest.partition("```\n")
    lines = [found["processor"], *(
        f"{name:33}{version}" for name, version in found["versions"].items()),
        "", *tables(found["rows"])]
    page.write_text("".join([before, heading, above, fence,
                             "\n".join(lines) + "\n", end, after]))
    print("\n".join(series(found["rows"])))


if __name__ == "__main__":
    main()
