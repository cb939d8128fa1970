#include <fmt/format.h>

#include "props/fuzzers/fuzzers.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

std::string Failed(const PagedHistory& history) {
  const Subject subject = TwinSubject("optimized");
  if (!RunHistory(history, subject).failure) return "";
  const PagedHistory shrunk = Shrink(history, subject);
  return FailureText(
      Explain(shrunk, *RunHistory(shrunk, subject).failure, subject));
}

// Whether the history runs in almost no time.
bool IsSmall(const PagedHistory& history) {
  const PagedSpec& spec = history.spec;
  return spec.block_size <= 16 && spec.blocks <= 32 &&
         spec.max_seq_len <= 200 && spec.layers <= 3 && spec.kv_heads <= 4 &&
         spec.k_head_dim <= 64 && spec.v_head_dim <= 64 &&
         history.ops.size() <= 40;
}

}  // namespace

std::string FuzzPool(Bytes bytes) {
  const std::string given(bytes.begin(), bytes.end());
  if (!given.starts_with("kvp1")) {
    return Failed(DrawPagedHistory(PickFrom(bytes)));
  }
  const Result<PagedHistory> read = ParsePagedHistory(given);
  if (!read.ok()) {
    return read.status().message().empty() ? "refused without a reason" : "";
  }
  const std::string printed = ToText(*read);
  const Result<PagedHistory> again = ParsePagedHistory(printed);
  if (!again.ok() || ToText(*again) != printed) {
    return fmt::format("'{}' does not read back", printed);
  }
  return IsSmall(*read) ? Failed(*read) : "";
}

}  // namespace kvtwin::props
