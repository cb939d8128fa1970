#include "core/index.h"
#include "props/fuzzers/fuzzers.h"
#include "props/search/explain.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

// About as many bytes as DrawOp takes.
constexpr std::size_t kBytesInOp = 12;

}  // namespace

Pick PickFrom(Bytes& bytes) {
  return [&bytes](int lo, int hi) {
    const auto span = static_cast<std::uint32_t>(hi - lo) + 1;
    std::uint32_t choice = 0;
    for (std::uint32_t reach = 1; reach < span; reach *= 256) {
      if (bytes.empty()) return hi;
      choice = choice * 256 + bytes.front();
      bytes = bytes.subspan(1);
    }
    return lo + AsInt(choice % span);
  };
}

std::string FuzzHistory(Bytes bytes) {
  const int ops = 1 + AsInt(bytes.size() / kBytesInOp);
  const History history = DrawHistory(PickFrom(bytes), std::nullopt, ops);
  const Subject subject = TwinSubject("optimized");
  if (!RunHistory(history, subject).failure) return "";
  const History shrunk = Shrink(history, subject);
  return FailureText(shrunk, *RunHistory(shrunk, subject).failure, subject);
}

}  // namespace kvtwin::props
