// On a machine without a device these tests cannot run: all of them are
// skipped, with the reason. If $KVTWIN_DEVICE is "required", a missing device
// is an error.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace kvtwin::props {
namespace {

class Device : public testing::Environment {
 public:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return;
    const char* need = std::getenv("KVTWIN_DEVICE");
    if (need != nullptr && std::string_view(need) == "required") {
      FAIL() << "no CUDA device: " << cudaGetErrorName(error);
    }
    // gtest does not report which tests it skips here, so ctest reads this
    // line.
    std::printf("[  SKIPPED ] no CUDA device: %s\n", cudaGetErrorName(error));
    // Skips all tests.
    GTEST_SKIP() << "no CUDA device: " << cudaGetErrorName(error);
  }
};

const testing::Environment* const device =
    testing::AddGlobalTestEnvironment(new Device);

TEST(CudaDevice, IsNewEnough) {
  cudaDeviceProp properties = {};
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_GE(properties.major, 8) << properties.name;
}

}  // namespace
}  // namespace kvtwin::props
