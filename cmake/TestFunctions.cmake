# Functions for tests/CMakeLists.txt.
include(GoogleTest)

# What `make test` builds under the presets asan and tsan.
add_custom_target(moewave_sanitized_tests)
add_custom_target(moewave_fuzzers)

# moewave_test(<name> <source>... [SANITIZE asan tsan] [LIBRARIES <library>...] [DEFINITIONS <definition>...])
#
# A GoogleTest program (RapidCheck included) and one CTest entry for each of its test cases. SANITIZE makes `make test` run
# it once more under those presets; in their build folders CTest knows only such tests. Sources are relative to the calling
# folder; headers of src/ and tests/ are included as "io/layer_files.h" and "support.h" would be.
function(moewave_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SANITIZE;LIBRARIES;DEFINITIONS")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  moewave_target_defaults(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE ${arg_DEFINITIONS})
  target_link_libraries(${name} PRIVATE moewave::moewave rapidcheck rapidcheck_gtest GTest::gtest_main ${arg_LIBRARIES})

  set(preset_of_none "")
  set(preset_of_address asan)
  set(preset_of_thread tsan)
  set(preset_of_fuzzer fuzz)
  set(preset ${preset_of_${MOEWAVE_SANITIZER}})
  if(preset)
    if(NOT preset IN_LIST arg_SANITIZE)
      set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
      return()
    endif()
    add_dependencies(moewave_sanitized_tests ${name})
  endif()
  # Listed when CTest runs, not after linking: where a sanitizer needs the program started in a special way, CTest is.
  gtest_discover_tests(
    ${name}
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 300)
endfunction()

# moewave_fuzzer(<name> <source>... [LIBRARIES <library>...])
#
# A libFuzzer program (LLVMFuzzerTestOneInput), built under the preset `fuzz` and run by `make fuzz`.
function(moewave_fuzzer name)
  if(NOT MOEWAVE_SANITIZER STREQUAL "fuzzer")
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LIBRARIES")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  moewave_target_defaults(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzzers)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE moewave::moewave ${arg_LIBRARIES})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(moewave_fuzzers ${name})
endfunction()
