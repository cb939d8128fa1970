"""Builds the program of docs/examples/link with the package, and runs it."""

import pathlib

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout

ROOT = pathlib.Path(__file__).resolve().parents[3]
LINK = ROOT / "docs/examples/link"


class Test(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps", "CMakeToolchain"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self, build_folder=str(ROOT / "build/conan"))

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=str(LINK))
        cmake.build()

    def test(self):
        if can_run(self):
            self.run("./hello", cwd=self.build_folder)
