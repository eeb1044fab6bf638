#include "layer/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

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
  const cuuint32_t steps[kMapDimensions] = {1, 1, 1, 1};
  cuuint64_t sizes[kMapDimensions];
  cuuint64_t strides[kMapDimensions - 1];
  std::copy(std::begin(shape.sizes), std::end(shape.sizes), sizes);
  std::copy(std::begin(shape.strides), std::end(shape.strides), strides);
  CUtensorMap map{};
  const CUresult status = encode_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(shape.dimensions), const_cast<Bf16*>(address),
      sizes, strides, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::string text;
    for (int i = 0; i < shape.dimensions; ++i) text += (i > 0 ? ", " : "sizes ") + std::to_string(sizes[i]);
    for (int i = 1; i < shape.dimensions; ++i) text += (i > 1 ? ", " : "; strides ") + std::to_string(strides[i - 1]);
    throw Error("the driver refuses the tensor map of " + name + " (error " + std::to_string(status) + "): " + text +
                " bytes");
  }
  return map;
}

}  // namespace moewave
