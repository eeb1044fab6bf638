# Target moewave_build_info: the header build_info.h says what a program was built from. The commit is looked up at every
# build; the header is rewritten only when something in it changed.
set(info_dir ${PROJECT_BINARY_DIR}/build_info)
add_custom_target(
  moewave_write_build_info
  COMMAND
    ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DTEMPLATE=${PROJECT_SOURCE_DIR}/cmake/build_info.h.in
    -DOUTPUT=${info_dir}/build_info.h "-DCOMPILER=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
    "-DBUILD_TYPE=$<CONFIG>" "-DSANITIZER=${MOEWAVE_SANITIZER}" "-DCUDA=${CMAKE_CUDA_COMPILER_VERSION}" -P
    ${PROJECT_SOURCE_DIR}/cmake/WriteBuildInfo.cmake
  BYPRODUCTS ${info_dir}/build_info.h
  COMMENT "Looking up the commit"
  VERBATIM)
add_library(moewave_build_info INTERFACE)
target_include_directories(moewave_build_info INTERFACE ${info_dir})
add_dependencies(moewave_build_info moewave_write_build_info)
