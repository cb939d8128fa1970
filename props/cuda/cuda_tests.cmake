# Tests of the twin cuda: on a device if KVTWIN_CUDA is on, and in any build on the
# emulator of props/cuda/emulator/, for which the kernels are compiled as C++. All of
# these tests have the label cuda.

set(emulated_test_sources ${cuda_test_sources} ${emulator_tests})
kvtwin_unite(emulated_test_sources)

if(KVTWIN_CUDA)
  kvtwin_unite(cuda_test_sources)
  add_executable(kvtwin_cuda_tests ${cuda_test_sources})
  kvtwin_gtest(kvtwin_cuda_tests LINK CUDA::cudart_static kvtwin_props
               PREFIX cuda. PROPERTIES LABELS cuda)
endif()

# Tests that nvcc compiles the kernels, if there is an nvcc: exit code 77 means
# skipped.
if(NOT KVTWIN_CUDA AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize|-fprofile")
  add_test(NAME cuda.compiles
    COMMAND ${PROJECT_SOURCE_DIR}/dev cuda --compile)
  set_tests_properties(cuda.compiles PROPERTIES
    LABELS cuda PROCESSORS 2 COST 200 SKIP_RETURN_CODE 77 TIMEOUT 900)
endif()

# The emulator's threads are fibers of Boost.
find_package(Boost QUIET COMPONENTS context)
if(NOT TARGET Boost::context)
  message(STATUS "No Boost.Context: the twin cuda is not tested by emulation")
  return()
endif()

# Sets a variable to source files that CMake takes for C++: each includes a .cu file
# of a folder.
function(kvtwin_emulate variable folder)
  foreach(kernel ${ARGN})
    get_filename_component(name ${kernel} NAME)
    set(source ${PROJECT_BINARY_DIR}/emulated/${folder}/${name}.cc)
    file(GENERATE OUTPUT ${source} CONTENT "#include \"${folder}/${name}\"\n")
    list(APPEND sources ${source})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
kvtwin_emulate(emulated_kernels optimized/cuda ${cuda_kernels})
file(GLOB emulator_sources CONFIGURE_DEPENDS props/cuda/emulator/*.cc)
kvtwin_unite(emulator_sources)
# Objects come before the library in the link, so the library's own factory and the
# kernels compiled by nvcc are not used.
add_library(kvtwin_emulated OBJECT core/factory.cc ${cuda_sources}
            ${emulated_kernels} ${emulator_sources})
target_compile_definitions(kvtwin_emulated PUBLIC KVTWIN_CUDA)
target_include_directories(kvtwin_emulated BEFORE
  PUBLIC ${PROJECT_SOURCE_DIR}/props/cuda/emulator)
target_link_libraries(kvtwin_emulated PUBLIC kvtwin_props Boost::context)
kvtwin_openmp(kvtwin_emulated)

# The command, with the twin cuda as well.
add_executable(kvtwin-emulated
  $<FILTER:$<TARGET_OBJECTS:kvtwin_command>,INCLUDE,/kvtwin[.]cc>)
set_target_properties(kvtwin-emulated PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(kvtwin-emulated PRIVATE kvtwin_emulated kvtwin_museum)
function(kvtwin_emulated_test name prints)
  add_test(NAME emulated.command.${name}
    COMMAND ${PROJECT_SOURCE_DIR}/props/testing/expect.sh 0 "${prints}"
            $<TARGET_FILE:kvtwin-emulated> ${ARGN} --twin cuda
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}/props)
  set_tests_properties(emulated.command.${name} PROPERTIES
    LABELS cuda TIMEOUT 600)
endfunction()
kvtwin_emulated_test(recordings "^30 accepted, 0 rejected"
  check recordings/accept)
kvtwin_emulated_test(pools "^3 accepted, 0 rejected" check recordings/pools)
kvtwin_emulated_test(fuzz " 0 differences" fuzz --ops 5000)
kvtwin_emulated_test(fuzz_dtypes " 0 differences" fuzz --dtypes --ops 5000)
kvtwin_emulated_test(fuzz_pools " 0 differences" fuzz --kind paged --ops 5000)
kvtwin_emulated_test(laws "^0 broken" laws --runs 5)
kvtwin_emulated_test(explore "^all .* 0 differences, fixed point"
  explore --cells 2 --positions 2)
kvtwin_emulated_test(explore_pools "all of 2 operations, 0 differences"
  explore --kind paged --depth 2)

# A few planted bugs, which the command must find.
add_test(NAME emulated.museum
  COMMAND ${PROJECT_SOURCE_DIR}/props/museum/museum_test.sh
          $<TARGET_FILE:kvtwin_command> cuda)
set_tests_properties(emulated.museum PROPERTIES LABELS cuda TIMEOUT 600)

add_executable(kvtwin_cuda_emulated_tests ${emulated_test_sources})
kvtwin_gtest(kvtwin_cuda_emulated_tests LINK kvtwin_emulated kvtwin_props
             PREFIX emulated. PROPERTIES LABELS cuda)
