#!/usr/bin/env python3
"""sbom.py BUILD PACKAGES VERSION: writes PACKAGES/kvtwin-VERSION.cdx.json, which lists
in CycloneDX the parts of the packages in that folder: kvtwin, the Debian packages
whose headers the build folder read or whose libraries its programs need, and nanobind.
SOURCE_DATE_EPOCH is the date of the list. Needs cyclonedx-python-lib[json-validation],
python-debian and nanobind from PyPI, and ninja."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version as pypi_version
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from debian.copyright import Copyright, NotMachineReadableError
from packageurl import PackageURL

PROGRAMS = ["kvtwin", "kvtwin-host", "libkvtwin.so"]


def printed(*command: str, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command[:3])} exited with {done.returncode}: "
                         f"{done.stderr or done.stdout}")
    return done.stdout


def system_files(build: Path) -> Iterator[tuple[str, str]]:
    """Yields the files of the system that the build used, each with its use."""
    for line in printed("ninja", "-C", str(build), "-t", "deps").splitlines():
        if (path := line.strip()).startswith("/usr/"):
            yield str(Path(path).resolve()), "compiled in"
    for program in PROGRAMS:
        libraries = re.findall(r"(/\S+) \(0x", printed("ldd", str(build / program)))
        yield from ((str(Path(path).resolve()), "linked") for path in libraries)


def debian_packages(build: Path) -> dict[str, set[str]]:
    """Returns the packages of these files, each with its uses."""
    uses = dict(system_files(build))
    # Files of /lib may be listed as files of /usr/lib, and vice versa.
    names = [*uses, *(path.removeprefix("/usr") for path in uses)]
    packages: dict[str, set[str]] = {}
    found = set()
    # 1: no package has one of them.
    for line in printed("dpkg-query", "--search", *names, codes=(0, 1)).splitlines():
        owners, path = line.rsplit(": ", 1)
        path = path if path in uses else "/usr" + path
        found.add(path)
        for owner in owners.split(", "):
            packages.setdefault(owner, set()).add(uses[path])
    if missing := uses.keys() - found:
        raise SystemExit(f"no package has {', '.join(sorted(missing))}")
    return packages


def licenses(package: str) -> list[DisjunctiveLicense]:
    path = Path("/usr/share/doc", package, "copyright")
    try:
        with path.open(encoding="utf-8") as file:
            paragraphs = Copyright(file, strict=False).all_files_paragraphs()
            names = {p.license.synopsis for p in paragraphs if p.license}
    except NotMachineReadableError:
        names = set()
    names = names or {f"see {path} in Debian"}
    return [DisjunctiveLicense(name=name) for name in sorted(names)]


def debian_component(package: str, uses: set[str]) -> Component:
    name = package.split(":")[0]
    version, arch = printed("dpkg-query", "-W", "-f=${Version} ${Architecture}",
                            package).split()
    url = PackageURL("deb", "debian", name, version, {"arch": arch})
    return Component(
        type=ComponentType.LIBRARY, name=name, version=version, purl=url,
        bom_ref=str(url), licenses=licenses(name),
        properties=[Property(name="kvtwin:use", value=", ".join(sorted(uses)))])


def package_component(path: Path) -> Component:
    digest = sha256(path.read_bytes()).hexdigest()
    return Component(type=ComponentType.FILE, name=path.name, bom_ref=path.name,
                     hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)])


def main(build: Path, folder: Path, version: str) -> None:
    packages = [package_component(path) for path in sorted(folder.iterdir())
                if path.suffix in (".deb", ".whl")]
    nanobind = pypi_version("nanobind")
    parts = [debian_component(*item) for item in debian_packages(build).items()]
    parts.append(Component(
        type=ComponentType.LIBRARY, name="nanobind", version=nanobind,
        purl=PackageURL("pypi", name="nanobind", version=nanobind), bom_ref="nanobind",
        licenses=[DisjunctiveLicense(id="BSD-3-Clause")],
        properties=[Property(name="kvtwin:use", value="compiled in, wheel only")]))
    kvtwin = Component(type=ComponentType.LIBRARY, name="kvtwin", version=version,
                       bom_ref="kvtwin", licenses=[DisjunctiveLicense(id="MIT")])
    hashes = "".join(next(iter(package.hashes)).content for package in packages)
    bom = Bom(components=packages + parts,
              serial_number=uuid.uuid5(uuid.NAMESPACE_OID, hashes))
    bom.metadata.component = kvtwin
    bom.metadata.timestamp = datetime.fromtimestamp(
        int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    bom.register_dependency(kvtwin, parts)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"not CycloneDX: {wrong}")
    (folder / f"kvtwin-{version}.cdx.json").write_text(text + "\n")
    print(f"{len(packages)} packages, made of kvtwin and {len(parts)} others")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
