# Finds the CUDA toolkit by itself. MOEWAVE_CUDA: AUTO uses it if it is there and works, ON demands it, OFF ignores it.
# Sets MOEWAVE_HAVE_CUDA and enables the language CUDA for sm_90a.
set(MOEWAVE_CUDA AUTO CACHE STRING "AUTO, ON or OFF")
set_property(CACHE MOEWAVE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MOEWAVE_CUDA_MINIMUM 12.3)

# What stands in the way of CUDA, or nothing.
function(moewave_cuda_obstacle nvcc result)
  set(${result} "" PARENT_SCOPE)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  if(NOT status EQUAL 0 OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${result} "${nvcc} --version failed" PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_MATCH_1 VERSION_LESS MOEWAVE_CUDA_MINIMUM)
    set(${result} "${nvcc} is version ${CMAKE_MATCH_1}; ${MOEWAVE_CUDA_MINIMUM} or later is needed" PARENT_SCOPE)
    return()
  endif()
  # Also finds a host compiler that this nvcc refuses, before enable_language() turns it into a fatal error.
  set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/moewave_cuda_probe)
  file(WRITE ${probe}.cu "#include <cstdint>\n__global__ void probe(std::uint32_t* out) { *out = 1; }\n")
  execute_process(COMMAND ${nvcc} -ccbin ${CMAKE_CXX_COMPILER} -std=c++20 -arch=sm_90a -c ${probe}.cu -o ${probe}.o
                  OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    string(STRIP "${text}" text)
    set(${result} "${nvcc} cannot compile for sm_90a with ${CMAKE_CXX_COMPILER}:\n${text}" PARENT_SCOPE)
  endif()
endfunction()

set(MOEWAVE_HAVE_CUDA OFF)
set(MOEWAVE_HAVE_CUDA_CACHED OFF CACHE INTERNAL "for scripts: does this build folder compile device code")
if(NOT MOEWAVE_CUDA)
  message(STATUS "CUDA: switched off by MOEWAVE_CUDA; building for the CPU only")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  find_program(
    MOEWAVE_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda /opt/cuda
    PATH_SUFFIXES bin)
  mark_as_advanced(MOEWAVE_NVCC)
  set(obstacle "no nvcc in PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or /opt/cuda")
  if(MOEWAVE_NVCC)
    moewave_cuda_obstacle(${MOEWAVE_NVCC} obstacle)
  endif()
  if(obstacle)
    if(MOEWAVE_CUDA STREQUAL "AUTO")
      message(STATUS "CUDA: not used, ${obstacle}")
      message(STATUS "CUDA: building for the CPU only (reference, emulator, program); no device code is compiled")
      return()
    endif()
    message(FATAL_ERROR "MOEWAVE_CUDA is ${MOEWAVE_CUDA}, but ${obstacle}")
  endif()
  set(CMAKE_CUDA_COMPILER ${MOEWAVE_NVCC})
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
endif()

# "a": wgmma and setmaxnreg exist only in the architecture-specific instruction set; "real": no PTX to compile at load time.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
set(MOEWAVE_HAVE_CUDA ON)
set(MOEWAVE_HAVE_CUDA_CACHED ON CACHE INTERNAL "for scripts: does this build folder compile device code")
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), device code for ${CMAKE_CUDA_ARCHITECTURES}")
