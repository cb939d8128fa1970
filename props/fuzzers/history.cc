#include "props/fuzz.h"
#include "props/fuzzers/fuzzers.h"
#include "props/generate.h"
#include "props/shrink.h"

namespace kvtwin::props {
namespace {

// About as many bytes as DrawOp asks for.
constexpr std::size_t kBytesInOp = 12;

}  // namespace

std::string FuzzHistory(Bytes bytes) {
  const int ops = 1 + static_cast<int>(bytes.size() / kBytesInOp);
  const Pick pick = [&bytes](int lo, int hi) {
    const auto span = static_cast<std::uint32_t>(hi - lo) + 1;
    std::uint32_t choice = 0;
    for (std::uint32_t reach = 1; reach < span; reach *= 256) {
      // Behind the end every chance is missed.
      if (bytes.empty()) return hi;
      choice = choice * 256 + bytes.front();
      bytes = bytes.subspan(1);
    }
    return lo + static_cast<int>(choice % span);
  };
  const History history = DrawHistory(pick, std::nullopt, ops);
  const Subject subject = TwinSubject("optimized");
  if (!RunHistory(history, subject).difference) return "";
  const History shrunk = Shrink(history, subject);
  return FailureText(shrunk, *RunHistory(shrunk, subject).difference, subject);
}

}  // namespace kvtwin::props
