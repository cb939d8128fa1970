// The functions that the fuzzers run: each takes any bytes and returns what is
// wrong, or nothing. A crash, a leak or a sanitizer's report counts as wrong,
// too.

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

// Draws a history from the bytes: the twins and the ledger must agree.
std::string FuzzHistory(Bytes bytes);

// A kvt1 line: the printed line reads back as it was, and runs.
std::string FuzzLine(Bytes bytes);

// A recording: both twins judge it alike, and it is written as it was read.
std::string FuzzRecording(Bytes bytes);

// Restores a snapshot, perhaps damaged: a damaged one is refused and changes
// nothing; after any other, the cache holds exactly the snapshot.
std::string FuzzSnapshot(Bytes bytes);

// A pool of blocks: a kvp1 line, which must read back as it was, or a history
// drawn from the bytes. The twins and the ledger must agree.
std::string FuzzPool(Bytes bytes);

// A saved state, perhaps damaged: it is refused, or written back as it was.
std::string FuzzState(Bytes bytes);

// Chooses by the bytes, from the first on. After the last byte, each choice is
// the largest value, so that every chance is missed.
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
