#include "props/sessions/service_hour.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "props/base/scratch_folder.h"

namespace kvtwin::props {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

constexpr const char* kWhole =
    R"({"timestamp":7,"input_length":513,"output_length":2,"hash_ids":[3,4]})";

class ServiceHourTest : public ::testing::Test {
 protected:
  Result<std::vector<ServiceRequest>> Read(const std::string& lines,
                                           int context = 1000) {
    std::ofstream(path_) << lines;
    return ReadServiceHour(path_, context);
  }
  std::string Problem(const std::string& line) {
    const auto requests = Read(kWhole + ("\n" + line));
    return requests.ok() ? "none" : requests.status().message();
  }

  const ScratchFolder folder_{"service-hour"};
  const std::string path_ = folder_.File("requests.jsonl");
};

TEST_F(ServiceHourTest, HasTheRequestsThatFit) {
  const std::string long_answer =
      R"({"input_length":1,"output_length":515,"hash_ids":[9]})";
  const auto requests = Read(kWhole + ("\n" + long_answer) + "\n", 515);
  ASSERT_TRUE(requests.ok()) << requests.status().message();
  ASSERT_EQ(requests->size(), 1);
  EXPECT_EQ(requests->front().input_length, 513);
  EXPECT_EQ(requests->front().output_length, 2);
  EXPECT_THAT(requests->front().blocks, ElementsAre(3, 4));
}

TEST_F(ServiceHourTest, IsEmptyWithoutAFile) {
  const auto requests = ReadServiceHour(path_ + "_missing", 1000);
  ASSERT_TRUE(requests.ok());
  EXPECT_TRUE(requests->empty());
}

TEST_F(ServiceHourTest, NamesTheLineThatIsNoRequest) {
  const std::string place = path_ + ":2: ";
  EXPECT_THAT(Problem("{"), StartsWith(place + "not JSON: "));
  EXPECT_EQ(Problem(R"({"input_length":1,"hash_ids":[1]})"),
            place + "output_length is missing");
  EXPECT_EQ(Problem(R"({"input_length":1,"output_length":1,"hash_ids":["1"]})"),
            place + "hash_ids[0] is '1', it must be an integer");
  for (const char* line :
       {R"({"input_length":0,"output_length":1,"hash_ids":[1]})",
        R"({"input_length":1,"output_length":0,"hash_ids":[1]})",
        R"({"input_length":513,"output_length":1,"hash_ids":[1]})",
        R"({"input_length":1,"output_length":1,"hash_ids":[-1]})",
        R"({"input_length":1,"output_length":1,"hash_ids":[2097152]})"}) {
    EXPECT_EQ(Problem(line), place + "not a request with its blocks") << line;
  }
}

}  // namespace
}  // namespace kvtwin::props
