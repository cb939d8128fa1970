#include "kvtwin/dlpack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace kvtwin::props {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::vector<std::int64_t> Dims(const std::int64_t* dims) {
  return {dims, dims + 4};
}

TEST(DLPack, ReversesTheDimensions) {
  std::array<float, 24> rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<float>(i);
  }
  TensorView view = DenseView(rows.data(), DType::kF32, {2, 3, 4, 1});
  const Result<DLManagedTensor*> made = ToDLPack(view, Device::kCpu, 7);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const DLTensor& tensor = (*made)->dl_tensor;
  EXPECT_EQ(tensor.device.device_type, kDLCPU);
  EXPECT_EQ(tensor.device.device_id, 0);
  EXPECT_EQ(tensor.dtype.code, kDLFloat);
  EXPECT_EQ(tensor.dtype.bits, 32);
  EXPECT_EQ(tensor.dtype.lanes, 1);
  ASSERT_EQ(tensor.ndim, 4);
  EXPECT_THAT(Dims(tensor.shape), ElementsAre(1, 4, 3, 2));
  EXPECT_THAT(Dims(tensor.strides), ElementsAre(24, 6, 2, 1));
  EXPECT_EQ(tensor.byte_offset, 0U);
  // Element (1, 2, 3), by DLPack's rules and by kvtwin's.
  const auto* data = static_cast<const float*>(tensor.data);
  float ours;
  std::memcpy(&ours, view.at(1, 2, 3), sizeof(ours));
  EXPECT_EQ(data[3 * tensor.strides[1] + 2 * tensor.strides[2] +
                 1 * tensor.strides[3]],
            ours);
  (*made)->deleter(*made);
}

TEST(DLPack, SaysWhichDeviceAndDType) {
  const auto given = [](DType dtype) {
    alignas(8) static std::array<std::byte, 64> memory;
    const Result<DLManagedTensor*> made = ToDLPack(
        DenseView(memory.data(), dtype, {4, 1, 2, 1}), Device::kCuda, 3);
    EXPECT_TRUE(made.ok());
    const DLTensor tensor = (*made)->dl_tensor;
    EXPECT_EQ(tensor.device.device_type, kDLCUDA);
    EXPECT_EQ(tensor.device.device_id, 3);
    (*made)->deleter(*made);
    return std::pair<int, int>(tensor.dtype.code, tensor.dtype.bits);
  };
  EXPECT_THAT(given(DType::kF16), Pair(kDLFloat, 16));
  EXPECT_THAT(given(DType::kBF16), Pair(kDLBfloat, 16));
  EXPECT_THAT(given(DType::kF8), Pair(kDLUInt, 8));
}

TEST(DLPack, RefusesEmptyTensors) {
  const auto refused = [](TensorView view) {
    const Result<DLManagedTensor*> made = ToDLPack(view, Device::kCpu);
    EXPECT_FALSE(made.ok());
    return made.status();
  };
  std::array<std::byte, 64> memory = {};
  const Status bits =
      refused(DenseView(memory.data(), DType::kBits, {64, 1, 1, 1}));
  EXPECT_EQ(bits.code(), StatusCode::kNotSupported);
  EXPECT_THAT(bits.message(), HasSubstr("bits"));
  EXPECT_EQ(refused(DenseView(memory.data(), DType::kQ8, {32, 1, 1, 1})).code(),
            StatusCode::kNotSupported);
  const Status none = refused(DenseView(nullptr, DType::kF32, {2, 2, 1, 1}));
  EXPECT_EQ(none.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(none.message(), HasSubstr("no data"));
  TensorView odd = DenseView(memory.data(), DType::kF32, {2, 2, 1, 1});
  odd.stride[1] = 9;
  const Status strides = refused(odd);
  EXPECT_EQ(strides.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(strides.message(), HasSubstr("stride 1 is 9"));
}

}  // namespace
}  // namespace kvtwin::props
