# The Debian packages that `cpack` makes of a build with the prefix /usr
# (docs/install.md): one for each component.

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvtwin)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "attention KV cache, and a tool that finds bugs in KV caches")
set(CPACK_PACKAGE_CONTACT "The kvtwin authors <kvtwin@users.noreply.github.com>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL library c dev command)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/debian_docs.cmake)

# kvtwin_package(COMPONENT NAME SECTION SUMMARY TEXT)
macro(kvtwin_package component name section summary text)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${summary}\n${text}")
endmacro()
kvtwin_package(library libkvtwin0 libs "attention KV cache with a C interface"
  "The cache of an LLM's attention, its reference, and a check of recordings.")
kvtwin_package(c libkvtwin-dev libdevel "attention KV cache, C headers"
  "The files for compiling programs in C.")
kvtwin_package(dev libkvtwin-cxx-dev libdevel "attention KV cache, C++ library"
  "The static library, and the files for compiling programs in C++.")
kvtwin_package(command kvtwin devel "finds bugs in KV caches"
  "Judges recordings and live KV caches of LLM engines, and shows the shortest\nhistory that goes wrong.")
set(version "(= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/triggers)
file(WRITE ${PROJECT_BINARY_DIR}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_C_PACKAGE_DEPENDS "libkvtwin0 ${version}")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
    "libkvtwin-dev ${version}, libfmt-dev, libhwy-dev, libstdc++-12-dev")
include(CPack)
