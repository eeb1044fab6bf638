#include "layer/tensor_map.h"

#include <cuda_runtime_api.h>

#include "transport/cuda_check.h"

namespace moewave {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime has loaded: no library has to be linked for one function.
EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    constexpr unsigned kFirstVersion = 12000;  // that has tensor maps
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kFirstVersion, cudaEnableDefault, &result),
        "cudaGetDriverEntryPointByVersion");
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
               "cudaGetDriverEntryPoint");
#endif
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      throw Error("the CUDA driver has no cuTensorMapEncodeTiled; version 12.0 or later is needed");
    }
    return reinterpret_cast<EncodeFunction>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap encode_tensor_map(const std::string& name, const Bf16* address, const TensorMapShape& shape) {
  check_map_shape(name, shape);
  check_address(name, address);
  constexpr int kDimensions = 3;
  const cuuint64_t sizes[kDimensions] = {shape.columns, shape.rows, shape.matrices};
  const cuuint64_t strides[kDimensions - 1] = {shape.row_bytes, shape.matrix_bytes};
  const cuuint32_t box[kDimensions] = {shape.box_columns, shape.box_rows, 1};
  const cuuint32_t steps[kDimensions] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDimensions, const_cast<Bf16*>(address), sizes, strides,
                        box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error("the driver refuses the tensor map of " + name + " (error " + std::to_string(status) + "): [" +
                std::to_string(shape.matrices) + ", " + std::to_string(shape.rows) + ", " +
                std::to_string(shape.columns) + "], strides " + std::to_string(shape.matrix_bytes) + " and " +
                std::to_string(shape.row_bytes) + " bytes");
  }
  return map;
}

}  // namespace moewave
