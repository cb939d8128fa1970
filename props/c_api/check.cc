#include <functional>
#include <istream>
#include <streambuf>

#include "props/c_api/c_api.h"
#include "props/oracle/judge.h"

using namespace kvtwin;
using namespace kvtwin::props;

namespace {

thread_local std::string kept_reason;

// Reads bytes in memory without copying them.
class MemoryBuffer : public std::streambuf {
 public:
  explicit MemoryBuffer(std::span<const char> bytes) {
    char* const begin = const_cast<char*>(bytes.data());  // Only read.
    setg(begin, begin, begin + bytes.size());
  }
};

int CLevel(Level level) {
  switch (level) {
    case Level::kIdentity:
      return KVTWIN_IDENTITY;
    case Level::kVisibility:
      return KVTWIN_VISIBILITY;
    case Level::kAttention:
      return KVTWIN_ATTENTION;
    default:
      return -1;
  }
}

kvtwin_outcome COutcome(Verdict verdict) {
  switch (verdict) {
    case Verdict::kAccept:
      return KVTWIN_ACCEPTED;
    case Verdict::kReject:
      return KVTWIN_REJECTED;
    default:
      return KVTWIN_NOT_A_RECORDING;
  }
}

Result<std::vector<std::string>> TwinsFor(const char* twin) {
  if (twin == nullptr) {
    return std::vector<std::string>(TwinNames().begin(), TwinNames().end());
  }
  // The factory checks the name.
  const auto made = MakeCache({}, twin);
  if (!made.ok()) return made.status();
  return std::vector<std::string>{twin};
}

using JudgeFn = std::function<Judgement(const std::vector<std::string>&)>;

Status CheckBy(const char* twin, kvtwin_verdict* verdict,
               const JudgeFn& judge) {
  const auto size = SizeOfStruct("verdict", verdict, sizeof(kvtwin_verdict));
  if (!size.ok()) return size.status();
  const auto twins = TwinsFor(twin);
  if (!twins.ok()) return twins.status();
  const Judgement judgement = judge(*twins);
  kept_reason = judgement.reason();
  kvtwin_verdict answer{};
  answer.outcome = COutcome(judgement.verdict());
  answer.level = CLevel(judgement.level);
  answer.line = judgement.line();
  answer.reason = kept_reason.c_str();
  WriteStruct(answer, verdict);
  return {};
}

}  // namespace

kvtwin_status kvtwin_check_file(const char* path, const char* twin,
                                kvtwin_verdict* verdict) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"path", path}});
    if (!status.ok()) return status;
    return CheckBy(twin, verdict, [&](const auto& twins) {
      return OnFile(path, [&](std::istream& in) { return Judge(in, twins); });
    });
  });
}

kvtwin_status kvtwin_check_memory(const void* bytes, size_t count,
                                  const char* twin, kvtwin_verdict* verdict) {
  return Answer([&]() -> Status {
    const auto list =
        ListFromC("bytes", static_cast<const char*>(bytes), count);
    if (!list.ok()) return list.status();
    return CheckBy(twin, verdict, [&](const auto& twins) {
      MemoryBuffer buffer(*list);
      std::istream in(&buffer);
      return Judge(in, twins);
    });
  });
}
