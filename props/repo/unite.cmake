# How sources are divided into objects: kvtwin_unite, and how much each is optimized.

# Replaces the sources of a list by a source for each folder, which includes them:
# the headers and templates of a folder are then compiled once. The united sources come
# first, because they take the longest, and Ninja keeps the order. Every source compiles
# alone as well, as the preset clang has it. Sources stay alone that share names with
# others of their folder or are compiled for each instruction set, those of core/ that the
# museum plants bugs in, and those that other programs have compiled in another way.
set(alone "optimized/(paged|targets|[a-z_]*(kernels|bf16|q8))[.]" bench/putter
    "core/(factory|guarded_cache|mask_elements|wrapper|save/save|trace/trace)[.]"
    props/base/program[.])
list(JOIN alone "|" alone)
# Folders that are compiled with others, because most of the time goes into headers and
# templates that they share, and tests that share names with others of their folder: a
# regular expression, then the name of the united source.
set(united_as
    "props/page_judge/.*_test" tests_of_page_judge
    "props/(page_judge/|search/(judged_page|museum)|command/museum_command)" museum
    "props/(unit/core/(rope|trace)|oracle/paged_oracle|compare/faulty_visibility)_test" tests_of_traces
    "props/(unit/core/(guarded_paged|narrow|wrapper)|report/page|oracle/prefixes)_test"
      tests_of_compare
    "props/unit/(include|optimized|reference)/" tests_of_units
    "props/(attention|certify|compare|unit/attention)/.*_(test|props)[.]" tests_of_compare
    "props/(oracle|paged)/.*_(test|props)[.]" tests_of_oracle
    "props/unit/core/" tests_of_core
    "props/laws/.*_test" tests_of_laws
    "props/.*/.*_(test|props)[.]|props/testing/" tests_of_search
    "core/" core
    "props/(backend|certify|command|report|shrink)/" command
    "props/(laws|oracle|paged|search)/" search
    "props/(attention|base|compare|history|sessions)/" histories
    "optimized/" optimized)
# In a release build, tests and what runs once per command are optimized little: they
# are compiled more often than they are run. (g++ takes as long at -O0 as at -Og.) What
# calls the twins many times in little time is optimized a bit more. Both do without
# steps of g++ that took a sixth of the time to compile, and gained nothing (fuzz,
# explore and pools run 1 % longer).
set(cold -Og)
set(warm -O1)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set(left_out ipa-pure-const ipa-reference)
  foreach(step ${left_out} guess-branch-probability tree-fre)
    list(APPEND cold -fno-${step})
  endforeach()
  list(APPEND warm -finline-small-functions -fpartial-inlining)
  foreach(step ${left_out} combine-stack-adjustments dse if-conversion if-conversion2
          ipa-modref ivopts move-loop-invariants shrink-wrap tree-bit-ccp tree-dse
          tree-loop-im tree-loop-optimize tree-pta)
    list(APPEND warm -fno-${step})
  endforeach()
endif()
foreach(level cold warm)
  list(TRANSFORM ${level} REPLACE ".+" "$<$<CONFIG:Release>:\\0>")
endforeach()
set(cold_sources "props.(backend|certify|command|page_judge|report|search.museum|sessions.hour|shrink)[/.]|sources_(command|museum)[.]")
set(warm_sources "props.(attention|base|compare|history|laws|oracle|paged|search|sessions).|sources_(histories|search)[.]")
function(kvtwin_unite list)
  set(all "")
  set(sources "")
  foreach(source ${${list}})
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR} ${source})
    if(NOT KVTWIN_UNITE OR name MATCHES "^(${alone})")
      list(APPEND sources ${source})
      continue()
    endif()
    get_filename_component(folder ${name} DIRECTORY)
    set(rules ${united_as})
    while(rules)
      list(POP_FRONT rules rule as)
      if(name MATCHES "^(${rule})")
        set(folder ${as})
        break()
      endif()
    endwhile()
    string(MAKE_C_IDENTIFIER "${list} ${folder}" united)
    list(APPEND all ${united})
    string(APPEND ${united} "#include \"${name}\"\n")
  endforeach()
  list(REMOVE_DUPLICATES all)
  foreach(united ${all})
    file(CONFIGURE OUTPUT ${KVTWIN_UNITED}/${united}.cc CONTENT "${${united}}"
         @ONLY)
  endforeach()
  list(TRANSFORM all REPLACE "(.+)" "${KVTWIN_UNITED}/\\1.cc")
  set(${list} ${all} ${sources} PARENT_SCOPE)
endfunction()

# Tests that the sources of optimized/, which ./dev demo unites, share no names.
function(kvtwin_add_unites_test)
  file(GLOB demo CONFIGURE_DEPENDS optimized/*.cc)
  kvtwin_unite(demo)
  list(FILTER demo INCLUDE REGEX "^${KVTWIN_UNITED}/")
  set(eigen $<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>)
  add_test(NAME unites COMMAND ${CMAKE_CXX_COMPILER} -fsyntax-only -std=c++20
    -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include "-I$<JOIN:${eigen},;-I>" ${demo}
    COMMAND_EXPAND_LISTS)
endfunction()
