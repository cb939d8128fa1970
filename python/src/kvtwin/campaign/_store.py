"""The folder of a campaign: its parameters, and the result of each shard.

A file begins with the SHA-256 of its other bytes, so that a damaged file is
recognized. Files are never changed: a file is written under another name and then
renamed; a store of objects, such as S3, takes it as a whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import fs

_HASH_BYTES = 65  # In hexadecimal digits, and a line feed.


class StoreError(Exception):
    """The store cannot be used, or is of another campaign."""


class DamagedError(Exception):
    """A stored file was changed since it was written."""


def as_uri(place: str) -> str:
    """Returns a path as an absolute path, and a URI unchanged."""
    return place if "://" in place else os.path.abspath(place)


class Store:
    """A folder of any file system of pyarrow."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        try:
            self._fs, self._root = fs.FileSystem.from_uri(uri)
            self._fs.create_dir(self._root, recursive=True)
        except (OSError, ValueError) as error:
            raise StoreError(f"--store {uri}: {error}") from error
        self._renames = isinstance(self._fs, fs.LocalFileSystem)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def names(self) -> set[str]:
        """Returns the names of all whole files."""
        try:
            found = self._fs.get_file_info(fs.FileSelector(self._root))
        except OSError as error:
            raise StoreError(f"--store {self.uri}: {error}") from error
        return {
            info.base_name
            for info in found
            if info.type == fs.FileType.File and not info.base_name.endswith(".part")
        }

    def write_bytes(self, name: str, body: bytes) -> None:
        """Writes a file, which then exists whole or not at all."""
        path = self._path(name)
        made = f"{path}.{uuid.uuid4().hex}.part" if self._renames else path
        digest = hashlib.sha256(body).hexdigest()
        try:
            with self._fs.open_output_stream(made) as out:
                out.write(digest.encode() + b"\n")
                out.write(body)
            if self._renames:
                self._fs.move(made, path)
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def read_bytes(self, name: str) -> bytes:
        """Reads a file. Raises DamagedError if it is not whole."""
        path = self._path(name)
        try:
            with self._fs.open_input_stream(path) as file:
                whole: bytes = file.read()
        except OSError as error:
            raise DamagedError(f"{path}: {error}") from error
        body = whole[_HASH_BYTES:]
        if whole[:_HASH_BYTES] != hashlib.sha256(body).hexdigest().encode() + b"\n":
            raise DamagedError(f"{path}: it was changed or cut short")
        return body

    def write(self, name: str, value: dict[str, Any]) -> None:
        self.write_bytes(name, json.dumps(value).encode())

    def read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.read_bytes(name))
        except ValueError as error:
            raise DamagedError(f"{self._path(name)}: {error}") from error
        if not isinstance(value, dict):
            raise DamagedError(f"{self._path(name)}: it is not an object")
        return value

    def write_array(self, name: str, array: NDArray[Any]) -> None:
        out = io.BytesIO()
        np.save(out, array, allow_pickle=False)
        self.write_bytes(name, out.getvalue())

    def read_array(self, name: str) -> NDArray[Any]:
        body = io.BytesIO(self.read_bytes(name))
        try:
            array: NDArray[Any] = np.load(body, allow_pickle=False)
        except ValueError as error:
            raise DamagedError(f"{self._path(name)}: {error}") from error
        return array

    def begin(self, parameters: dict[str, Any]) -> None:
        """Writes the parameters of a new campaign, or compares stored parameters.

        Raises StoreError, with the name of a parameter that has another value.
        """
        if "run.json" not in self.names():
            if others := self.names():
                raise StoreError(
                    f"--store {self.uri}: it has other files, such as {min(others)}"
                )
            self.write("run.json", parameters)
            return
        try:
            stored = self.read("run.json")
        except DamagedError as error:
            raise StoreError(f"{error}; without it, no result there can be used") from error
        for name in sorted({*stored, *parameters}):
            there, here = stored.get(name), parameters.get(name)
            if there != here:
                raise StoreError(
                    f"--store {self.uri}: {name} is {there!r} there and {here!r} here"
                )
