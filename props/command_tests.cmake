# Tests that run programs: the command as a user types it, and the scripts.
#
#   kvtwin_command_test(NAME EXIT CODE [PRINTS REGEX] ARGS ...)
#
# runs `kvtwin ARGS...` in props/ and passes if it exits with CODE and a line of
# what it prints matches the extended regular expression REGEX.

function(kvtwin_command_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "EXIT;PRINTS" "ARGS")
  add_test(NAME command.${name}
    COMMAND ${PROJECT_SOURCE_DIR}/props/expect.sh "${test_EXIT}"
            "${test_PRINTS}" $<TARGET_FILE:kvtwin_command> ${test_ARGS}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}/props)
  set_tests_properties(command.${name} PROPERTIES TIMEOUT 300)
endfunction()

kvtwin_command_test(help EXIT 0 PRINTS "check" ARGS --help)
kvtwin_command_test(no_arguments EXIT 2 ARGS)
kvtwin_command_test(unknown_argument EXIT 2 ARGS check --no-such-flag)
kvtwin_command_test(check_accepts EXIT 0 ARGS check recordings/accept)
kvtwin_command_test(check_rejects EXIT 1 ARGS check recordings/reject)
kvtwin_command_test(check_no_such_file EXIT 2 ARGS check no/such/file.jsonl)
kvtwin_command_test(fuzz_finds_nothing EXIT 0
  PRINTS "\"differences\": ?0[,}]" ARGS fuzz --ops 20000 --seed 1 --json)

add_test(NAME command.first_wrong_lines
  COMMAND ${PROJECT_SOURCE_DIR}/props/first_wrong_lines_test.sh
          $<TARGET_FILE:kvtwin_command> ${PROJECT_SOURCE_DIR}/props/recordings)
add_test(NAME tidy COMMAND ${PROJECT_SOURCE_DIR}/props/tidy_test.sh)
add_test(NAME link
  COMMAND ${PROJECT_SOURCE_DIR}/props/link_test.sh
          ${CMAKE_COMMAND} ${CMAKE_CXX_COMPILER} ${PROJECT_BINARY_DIR}
          "${CMAKE_CXX_FLAGS}")
set_tests_properties(command.first_wrong_lines tidy link PROPERTIES TIMEOUT 300)

kvtwin_command_test(run_agrees EXIT 0 PRINTS "no difference"
  ARGS run "kvt1 kind=swa window=2 cap=4 | put 0*2 | copy 0>1:2 | drop 1:0-1")
kvtwin_command_test(run_no_history EXIT 2 ARGS run "kvt1 | fly")
kvtwin_command_test(fuzz_unknown_kind EXIT 2 ARGS fuzz --kind tree)
kvtwin_command_test(unknown_target EXIT 2 PRINTS "this machine has"
  ARGS fuzz --ops 100)
set_tests_properties(command.unknown_target PROPERTIES
  ENVIRONMENT KVTWIN_TARGET=MMX)
kvtwin_command_test(show_marks_the_wrong_row EXIT 1 PRINTS "wrong"
  ARGS show recordings/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl)

kvtwin_command_test(explore_reaches_the_fixed_point EXIT 0
  PRINTS "\"differences\":0,\"fixed_point\":true"
  ARGS explore --cells 3 --positions 3 --kind swa --json)
kvtwin_command_test(explore_stops_in_time EXIT 0
  PRINTS "\"fixed_point\":false"
  ARGS explore --cells 5 --kind causal --seconds 0.01 --json)
kvtwin_command_test(explore_too_many_states EXIT 2 PRINTS "stops at"
  ARGS explore --cells 16)
kvtwin_command_test(explore_no_such_folder EXIT 2
  ARGS explore --cells 3 --state no/such/folder)
