// What the fuzzers run: each takes any bytes and says what is wrong with what
// came of them. A crash, a leak or a sanitizer's report is wrong, too.

#ifndef KVTWIN_PROPS_FUZZERS_FUZZERS_H_
#define KVTWIN_PROPS_FUZZERS_FUZZERS_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "props/history/generate.h"

namespace kvtwin::props {

using Bytes = std::span<const std::uint8_t>;

// The choices that a history is drawn from: the twins and the ledger agree.
std::string FuzzHistory(Bytes bytes);

// A kvt1 line: what is printed reads back as it was, and runs.
std::string FuzzLine(Bytes bytes);

// A recording: both twins judge it alike, and it can be written as it was read.
std::string FuzzRecording(Bytes bytes);

// What becomes of a snapshot: a damaged one is refused and changes nothing, any
// other is exactly what the cache holds then.
std::string FuzzSnapshot(Bytes bytes);

// A pool of blocks: a kvp1 line, which reads back as it was, or the choices
// that a history is drawn from. The twins and the ledger agree.
std::string FuzzPool(Bytes bytes);

// A saved state, or what damage makes of one: it is refused, or writes back as
// it was.
std::string FuzzState(Bytes bytes);

// Chooses by the bytes, from their front on. Behind their end every chance is
// missed.
Pick PickFrom(Bytes& bytes);

struct Fuzzer {
  std::string_view name;
  std::string (*run)(Bytes bytes);
};

inline constexpr std::array<Fuzzer, 6> kFuzzers = {{
    {"history", FuzzHistory},
    {"line", FuzzLine},
    {"pool", FuzzPool},
    {"recording", FuzzRecording},
    {"snapshot", FuzzSnapshot},
    {"state", FuzzState},
}};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_FUZZERS_FUZZERS_H_
