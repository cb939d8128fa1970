# cmake -P docs/install/vcpkg/try.cmake: runs the steps of the port where vcpkg and its
# downloads cannot be had. The functions do what those of vcpkg do for a release build;
# Debian's packages are the dependencies. Then a program links the result.
cmake_minimum_required(VERSION 3.22)

set(CURRENT_PORT_DIR ${CMAKE_CURRENT_LIST_DIR}/kvtwin)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../../.. ABSOLUTE)
set(home ${root}/build/vcpkg)
set(CURRENT_PACKAGES_DIR ${home}/kvtwin)
file(REMOVE_RECURSE ${CURRENT_PACKAGES_DIR})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_check_linkage)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(given "" SOURCE_PATH OPTIONS ${ARGN})
  run(${CMAKE_COMMAND} -S ${given_SOURCE_PATH} -B ${home}/rel
      -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF
      -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR} ${given_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  run(${CMAKE_COMMAND} --build ${home}/rel --target install --parallel)
endfunction()

function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(given "" CONFIG_PATH "" ${ARGN})
  file(MAKE_DIRECTORY ${CURRENT_PACKAGES_DIR}/share)
  file(RENAME ${CURRENT_PACKAGES_DIR}/${given_CONFIG_PATH} ${CURRENT_PACKAGES_DIR}/share/kvtwin)
  # As vcpkg does: the files are a folder nearer to the prefix now.
  file(GLOB targets ${CURRENT_PACKAGES_DIR}/share/kvtwin/*.cmake)
  foreach(file ${targets})
    file(READ ${file} text)
    string(REGEX REPLACE "(get_filename_component\\(_IMPORT_PREFIX [^\n]*_IMPORT_PREFIX}\" PATH\\)\n)+"
      "get_filename_component(_IMPORT_PREFIX \"\${CMAKE_CURRENT_LIST_DIR}/../..\" ABSOLUTE)\n" text "${text}")
    file(WRITE ${file} "${text}")
  endforeach()
endfunction()

function(vcpkg_fixup_pkgconfig)
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(given "" "" FILE_LIST ${ARGN})
  file(COPY_FILE ${given_FILE_LIST} ${CURRENT_PACKAGES_DIR}/share/kvtwin/copyright)
endfunction()

include(${CURRENT_PORT_DIR}/portfile.cmake)
run(${CMAKE_COMMAND} -S ${root}/docs/examples/link -B ${home}/link
    -DCMAKE_PREFIX_PATH=${CURRENT_PACKAGES_DIR})
run(${CMAKE_COMMAND} --build ${home}/link)
run(${home}/link/hello)
