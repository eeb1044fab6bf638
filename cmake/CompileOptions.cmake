# moewave_target_defaults(<target>): language level, warnings and floating-point rules of every target of this project.
#
# -ffp-contract=off: results are promised bit for bit, so a multiply and an add become one fused operation only where the
# source says fma. No -march: the programs run on any CPU of the architecture; code that gains from wider vectors selects
# its own variant at run time. -std=c++20 is spelled out for nvcc: CMake 3.25 knows no CUDA standard above 17 for it.
function(moewave_target_defaults target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(
    ${target}
    PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wno-sign-conversion;-ffp-contract=off>
      $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xcompiler=-Wall,-Wextra,-ffp-contract=off;-lineinfo>)
  target_compile_definitions(${target} PRIVATE $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)
  if(MOEWAVE_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                                             $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>)
  endif()
endfunction()
