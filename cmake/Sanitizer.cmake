# MOEWAVE_SANITIZER instruments everything in this build folder: none; address (with undefined behaviour); thread; fuzzer
# (address, undefined behaviour and the coverage that libFuzzer reads; clang only).
set(MOEWAVE_SANITIZER none CACHE STRING "none, address, thread or fuzzer")
set_property(CACHE MOEWAVE_SANITIZER PROPERTY STRINGS none address thread fuzzer)

set(flags_none "")
set(flags_address -fsanitize=address,undefined -fno-sanitize-recover=all)
set(flags_thread -fsanitize=thread)
set(flags_fuzzer -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all)

if(NOT MOEWAVE_SANITIZER MATCHES "^(none|address|thread|fuzzer)$")
  message(FATAL_ERROR "MOEWAVE_SANITIZER is '${MOEWAVE_SANITIZER}'; allowed: none, address, thread, fuzzer")
endif()
if(MOEWAVE_SANITIZER STREQUAL "fuzzer" AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "MOEWAVE_SANITIZER=fuzzer needs clang++; the compiler is ${CMAKE_CXX_COMPILER_ID}")
endif()

if(NOT MOEWAVE_SANITIZER STREQUAL "none")
  # After the flags of the build type, hence the optimisation that wins: without it the instrumented tests take minutes.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${flags_${MOEWAVE_SANITIZER}};-O1;-g1;-fno-omit-frame-pointer>")
  add_link_options(${flags_${MOEWAVE_SANITIZER}})
endif()
