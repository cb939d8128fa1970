# cmake -DBENCH=PROGRAM -P goals_test.cmake
#
# Checks the goals with small sizes: each measured operation is right, and the
# output is a list of objects with the six members that docs/performance.md
# describes.

cmake_policy(VERSION 3.22)

# The chat of the goals is not in this repository: here 64 requests replace it.
set(requests "")
foreach(i RANGE 1 64)
  math(EXPR input "600 + 20 * ${i}")
  string(APPEND requests "{\"input_length\": ${input}, \"output_length\": 100, "
                         "\"hash_ids\": [0, ${i}, 1${i}, 2${i}]}\n")
endforeach()
file(WRITE bench_requests.jsonl "${requests}")
execute_process(COMMAND ${BENCH} --goals --quick --json
                        --workload bench_requests.jsonl
                OUTPUT_VARIABLE json RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "exits with ${code}")
endif()
string(JSON rows LENGTH "${json}")
if(rows LESS 45)
  message(FATAL_ERROR "only ${rows} rows:\n${json}")
endif()

math(EXPR last "${rows} - 1")
foreach(i RANGE ${last})
  string(JSON members LENGTH "${json}" ${i})
  if(NOT members EQUAL 6)
    message(FATAL_ERROR "row ${i} has ${members} members:\n${json}")
  endif()
  foreach(member name:STRING value:NUMBER limit:NUMBER ratio:NUMBER goal:NUMBER
                 met:BOOLEAN)
    string(REGEX MATCH "(.+):(.+)" found ${member})
    string(JSON type TYPE "${json}" ${i} ${CMAKE_MATCH_1})
    if(NOT type STREQUAL CMAKE_MATCH_2)
      message(FATAL_ERROR "row ${i}: ${CMAKE_MATCH_1} is a ${type}")
    endif()
  endforeach()
  string(JSON name GET "${json}" ${i} name)
  if(name IN_LIST names)
    message(FATAL_ERROR "twice: ${name}")
  endif()
  list(APPEND names "${name}")
endforeach()
if(NOT names MATCHES "chat, whole hour")
  message(FATAL_ERROR "no chat:\n${json}")
endif()
message(STATUS "${rows} rows")
