// Fields that recordings of caches and recordings of pools both have.

#ifndef KVTWIN_CORE_TRACE_TRACE_FIELDS_H_
#define KVTWIN_CORE_TRACE_TRACE_FIELDS_H_

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_line.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Reads one of `results`; any other is an error.
template <std::size_t n>
StatusCode ReadResult(const JsonFields& fields,
                      const std::array<StatusCode, n>& results) {
  std::array<std::string_view, n> names;
  std::transform(results.begin(), results.end(), names.begin(), StatusName);
  return results[fields.Name("result", names)];
}

// `stored` is the dtype of the cache. A recording has blocks as numbers.
DenseTensor ReadTensor(const JsonFields& op, std::string_view key,
                       DType stored);

// Converts f32 numbers to the numbers that ReadTensor would read from a line
// that has them. Errors: a number that is not finite in that dtype.
Status StoreTensor(std::string_view key, DType stored, DenseTensor& tensor);

// How the attention of a recording computes.
struct TraceAttention {
  DType dtype = DType::kF32;  // f32, f16 or bf16
  double tolerance = 0;

  bool operator==(const TraceAttention&) const = default;
};
// Reads `dtype` and `tolerance` of the object `attend` of the first line. Both
// may be absent.
TraceAttention ReadTraceAttention(const JsonFields& attend);
// No soft cap and no sink is larger (kvtwin/attention.h).
inline constexpr double kLogitMost = 0x1p50;
// Read the fields `soft_cap` and `sinks`. Return 0 and an empty list if they
// are absent.
double ReadSoftCap(const JsonFields& fields);
std::vector<float> ReadSinks(const JsonFields& fields);

// Errors: a number that is not finite.
Status AppendTensor(std::string_view key, const DenseTensor& tensor,
                    std::string& text);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_TRACE_FIELDS_H_
