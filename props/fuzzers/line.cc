#include <fmt/format.h>

#include "props/fuzzers/fuzzers.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

// Whether the history runs in almost no time.
bool IsSmall(const History& history) {
  const Setup& setup = history.setup;
  const CacheConfig& config = setup.config;
  const InitArgs& init = setup.init;
  const RowDims& rows = setup.rows;
  const auto most = [](int number, int limit) { return number <= limit; };
  return most(init.max_sequences, 8) && most(init.capacity, 32) &&
         most(init.max_batch, 64) && most(config.cache_padding, 64) &&
         most(config.mask_batch_padding, 64) && most(rows.k_head_dim, 64) &&
         most(rows.kv_heads, 4) && most(rows.v_head_dim, 64) &&
         most(setup.layers, 4) && setup.spec.caches.size() <= 4 &&
         history.ops.size() <= 40;
}

}  // namespace

std::string FuzzLine(Bytes bytes) {
  const std::string given(bytes.begin(), bytes.end());
  const Result<History> read = ParseHistory(given);
  if (!read.ok()) {
    return read.status().message().empty() ? "refused without a reason" : "";
  }
  const std::string printed = ToText(*read);
  const Result<History> again = ParseHistory(printed);
  if (!again.ok()) {
    return fmt::format("'{}' does not read back: {}", printed,
                       again.status().message());
  }
  if (ToText(*again) != printed) {
    return fmt::format("'{}' reads back as '{}'", printed, ToText(*again));
  }
  if (!IsSmall(*read)) return "";
  const Subject subject = TwinSubject("optimized");
  const RunResult result = RunHistory(*read, subject);
  const RunResult repeated = RunHistory(*again, subject);
  if (result.failure) {
    return FailureText(*read, *result.failure, subject);
  }
  if (result.digest == repeated.digest) return "";
  return fmt::format("'{}' means something else than '{}'", given, printed);
}

}  // namespace kvtwin::props
