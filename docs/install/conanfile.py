"""The recipe for Conan 2: `conan create docs/install` builds the library from this
clone. Its dependencies come from the system (README.md names the packages)."""

import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Kvtwin(ConanFile):
    name = "kvtwin"
    description = "An attention KV cache for LLM inference"
    license = "MIT"
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"

    def set_version(self):
        text = (ROOT / "CMakeLists.txt").read_text()
        self.version = re.search(r"project\(kvtwin VERSION ([0-9.]+)", text)[1]

    def export_sources(self):
        for what in ("CMakeLists.txt", "LICENSE", "include/*", "core/*",
                     "reference/*", "optimized/*", "props/repo/unite.cmake"):
            copy(self, what, ROOT, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["KVTWIN_COMMAND"] = False
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.libs = ["kvtwin"]
        self.cpp_info.system_libs = ["fmt", "hwy", "gomp", "pthread"]
        # CMake takes kvtwin's own package, which asks for C++20, whatever the profile says.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/kvtwin"]
