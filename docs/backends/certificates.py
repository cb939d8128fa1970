"""Makes the tables of docs/certificates.md: the classes of caches of an engine, and
which levels and laws (docs/laws.md) hold for each, by `kvtwin.certify`.

    python certificates.py mlx            # exit code 1 if the page says otherwise
    python certificates.py mlx --write    # writes the table of mlx

Each engine has its own environment, so each run makes the table of one engine."""

import importlib
import importlib.metadata
import json
import sys

import kvtwin
from page import compare

PAGE = "../certificates.md"
PACKAGES = {"mlx": "mlx-lm"}  # Names on PyPI, where they differ.
MARKS = {"holds": "yes", "broken": "**no**", "not judged": ""}


def certificate(cls):
    made = kvtwin.certify(cls, operations=40_000, histories=20)
    print(f"{cls.__name__}: {'right' if made else 'wrong'}", flush=True)
    return json.loads(made.json)


def table(made):
    """The lines of a Markdown table: a row for each level and law that was judged
    for one of the classes, whose certificates `made` has by name."""
    yield "| | rules | " + " | ".join(made) + " |"
    yield "|---|---|" + "---|" * len(made)
    for kind, key in (("levels", "level"), ("laws", "law")):
        rows = {}
        for name, one in made.items():
            for entry in one[kind]:
                name_of = ("level " if key == "level" else "") + entry[key]
                _, cells = rows.setdefault(
                    name_of, (entry.get("rules", ""), {}))
                cells[name] = MARKS[entry["outcome"]]
        for name, (rules, cells) in rows.items():
            if any(cells.values()):
                yield (f"| {name} | {rules} | "
                       + " | ".join(cells[of] for of in made) + " |")


def main():
    engine = sys.argv[1]
    package = PACKAGES.get(engine, engine)
    classes = importlib.import_module(f"{engine}_caches").CLASSES
    lines = [f"{package} {importlib.metadata.version(package)}", "",
             *table({cls.__name__: certificate(cls) for cls in classes})]
    compare([*lines, ""], PAGE, f"<!-- {engine} -->\n\n",
            f"<!-- end of {engine} -->")


if __name__ == "__main__":
    main()
