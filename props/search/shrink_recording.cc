#include "props/search/shrink_recording.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "props/report/finding_filter.h"
#include "props/search/gen.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;
// The indices of calls that are removed together.
using Unit = std::vector<std::size_t>;

struct Calls {
  std::string header;
  bool paged = false;
  std::vector<Json> lines;
};

bool Is(const Json& call, std::string_view op) {
  return call.value("op", "") == op;
}

// Returns the sequences that a call of a pool names.
std::vector<int> SequencesOf(const Json& call) {
  if (Is(call, "table") || Is(call, "csr")) {
    return call.at("seqs").get<std::vector<int>>();
  }
  if (Is(call, "open") || Is(call, "usage")) return {};
  return {call.at("seq").get<int>()};
}

bool MakesSequence(const Json& call) {
  return Is(call, "open") || Is(call, "fork");
}

// Returns the calls as text. Sequences get the lowest free numbers, as a pool
// assigns them (P1), so that shorter lists are consistent recordings.
std::string TextOf(const Calls& calls) {
  std::string text = calls.header + "\n";
  std::map<int, int> numbers;
  const auto renamed = [&](int sequence) {
    const auto known = numbers.find(sequence);
    return known == numbers.end() ? sequence : known->second;
  };
  for (Json call : calls.lines) {
    if (!calls.paged) {
      text += CallLine(call.dump()) + "\n";
      continue;
    }
    std::vector<int> sequences = SequencesOf(call);
    const bool lists = Is(call, "table") || Is(call, "csr");
    const int before = sequences.empty() ? -1 : sequences[0];
    for (int& one : sequences) one = renamed(one);
    if (Is(call, "free")) numbers.erase(before);
    if (lists) {
      call["seqs"] = sequences;
    } else if (!sequences.empty()) {
      call["seq"] = sequences[0];
    }
    if (MakesSequence(call)) {
      std::set<int> used;
      for (const auto& [old, number] : numbers) used.insert(number);
      int lowest = 0;
      while (used.contains(lowest)) ++lowest;
      numbers[call.at("result").get<int>()] = lowest;
      call["result"] = lowest;
    }
    text += call.dump() + "\n";
  }
  return text;
}

// Returns the units: a pass and the calls in it; for pools, all calls of a
// sequence.
std::vector<Unit> UnitsOf(const Calls& calls) {
  std::vector<Unit> units;
  std::map<int, std::size_t> unit_of;  // By sequence.
  for (std::size_t i = 0; i < calls.lines.size(); ++i) {
    const Json& call = calls.lines[i];
    if (calls.paged) {
      if (MakesSequence(call)) {
        unit_of[call.at("result").get<int>()] = units.size();
        units.push_back({i});
        continue;
      }
      for (const int sequence : SequencesOf(call)) {
        const auto of = unit_of.find(sequence);
        if (of != unit_of.end()) units[of->second].push_back(i);
      }
      continue;
    }
    const bool in_pass = call.contains("layer") || Is(call, "set_causal") ||
                         Is(call, "set_layer_type") ||
                         Is(call, "reserved_mask");
    if (!in_pass || units.empty()) units.emplace_back();
    units.back().push_back(i);
  }
  return units;
}

// Returns the units: for each layer, its puts and all else of the layer.
std::vector<Unit> LayersOf(const Calls& calls) {
  std::map<Json, Unit> layers;
  for (std::size_t i = 0; !calls.paged && i < calls.lines.size(); ++i) {
    const auto layer = calls.lines[i].find("layer");
    if (layer != calls.lines[i].end()) layers[*layer].push_back(i);
  }
  std::vector<Unit> units;
  for (auto& [layer, unit] : layers) units.push_back(std::move(unit));
  return units;
}

// Returns each call alone, but for the puts of a cache: a pass without a put
// has tokens of unknown rows, and any row would do for them.
std::vector<Unit> SinglesOf(const Calls& calls) {
  std::vector<Unit> units;
  for (std::size_t i = 0; i < calls.lines.size(); ++i) {
    if (!Is(calls.lines[i], "put")) units.push_back({i});
  }
  return units;
}

Calls Without(const Calls& calls, const std::vector<Unit>& units,
              std::size_t from, std::size_t to) {
  std::set<std::size_t> gone;
  for (std::size_t i = from; i < to; ++i) {
    gone.insert(units[i].begin(), units[i].end());
  }
  Calls rest{calls.header, calls.paged, {}};
  for (std::size_t i = 0; i < calls.lines.size(); ++i) {
    if (!gone.contains(i)) rest.lines.push_back(calls.lines[i]);
  }
  return rest;
}

// Removes the element at index `at` from a list.
void Drop(Json& list, std::size_t at) { list.erase(IteratorAt(list, at)); }

// Removes the index `at` from a list of indices; decrements larger indices.
void DropPlace(Json& list, std::size_t at) {
  Json kept = Json::array();
  for (const Json& value : list) {
    const auto place = value.get<std::size_t>();
    if (place != at) kept.push_back(place > at ? place - 1 : place);
  }
  list = std::move(kept);
}

void DropRow(Json& tensor, std::size_t at) {
  Json& shape = tensor["shape"];
  const auto row =
      shape[0].get<std::ptrdiff_t>() * shape[1].get<std::ptrdiff_t>();
  Json& data = tensor["data"];
  const auto begin = data.begin() + static_cast<std::ptrdiff_t>(at) * row;
  data.erase(begin, begin + row);
  shape[2] = shape[2].get<std::int64_t>() - 1;
}

// Returns the calls without one token of a pass: in its batch and in its puts.
Calls WithoutToken(Calls calls, std::size_t pass, std::size_t token) {
  Json& start = calls.lines[pass];
  Drop(start["positions"], token);
  Drop(start["sequences"], token);
  if (start.contains("parents")) Drop(start["parents"], token);
  if (start.contains("multimodal")) DropPlace(start["multimodal"], token);
  for (std::size_t i = pass + 1; i < calls.lines.size(); ++i) {
    Json& call = calls.lines[i];
    if (Is(call, "start_forward")) break;
    if (Is(call, "set_causal")) DropPlace(call["except"], token);
    if (Is(call, "attend")) DropRow(call["query"], token);
    if (!Is(call, "put")) continue;
    DropRow(call["key"], token);
    DropRow(call["value"], token);
  }
  return calls;
}

// Returns whether each batch in the first `lines` lines of a recording
// continues its sequences: its tokens have their next positions, from 0. Drafts
// do not.
bool ContinuesSequences(const std::string& recording, std::int64_t lines) {
  std::istringstream in(recording);
  std::map<int, std::int64_t> next;  // By sequence.
  std::string line;
  for (std::int64_t i = 0; i < lines && std::getline(in, line); ++i) {
    const Json call = Json::parse(line);
    const bool taken = call.value("result", Json("ok")) == "ok";
    if (Is(call, "start_forward")) {
      if (call.contains("parents")) return false;
      const auto before = next;
      for (std::size_t token = 0; token < call.at("positions").size();
           ++token) {
        const int sequence = call.at("sequences")[token].get<int>();
        if (call.at("positions")[token] != next[sequence]++) return false;
      }
      if (!taken || call.value("reserve", false)) next = before;
    } else if (Is(call, "copy_prefix")) {
      next[call.at("dst")] =
          std::min(call.at("len").get<std::int64_t>(), next[call.at("src")]);
    } else if (Is(call, "find_prefix")) {
      next[call.at("seq")] = call.at("len");
    } else if (Is(call, "remove") && taken) {
      std::int64_t& length = next[call.at("seq")];
      const auto begin = std::min(call.at("begin").get<std::int64_t>(), length);
      length -= std::min(call.at("end").get<std::int64_t>(), length) - begin;
    }
  }
  return true;
}

class RecordingShrinker {
 public:
  RecordingShrinker(const Recorder& record,
                    const RecordingShrinkOptions& options)
      : record_(record), options_(options) {}

  Status Start(Calls calls, const std::string& bucket) {
    bucket_ = bucket;
    shrunk_.calls_before = calls.lines.size();
    const std::string found = Try(calls);
    if (found == bucket_) {
      continues_ = !calls.paged &&
                   ContinuesSequences(shrunk_.text, shrunk_.judgement.line());
      calls_ = std::move(calls);
      return {};
    }
    return {StatusCode::kFailedPrecondition,
            fmt::format("with the calls of the recording, {}; what is to be "
                        "shown is '{}'",
                        found, bucket_)};
  }

  ShrunkRecording Run() {
    for (bool goes_on = true; goes_on;) {
      goes_on = LeaveOut(UnitsOf);
      goes_on = LeaveOut(LayersOf) || goes_on;
      goes_on = LeaveOut(SinglesOf) || goes_on;
      goes_on = LeaveOutTokens() || goes_on;
      goes_on = OpenForks() || goes_on;
    }
    shrunk_.calls = calls_.lines.size();
    shrunk_.is_shortest = shrunk_.runs < options_.runs;
    return shrunk_;
  }

 private:
  // Runs the program on the calls. If its recording fails with the wanted
  // bucket, keeps the recording and returns the bucket; otherwise returns a
  // description of the outcome.
  std::string Try(const Calls& calls) {
    ++shrunk_.runs;
    const Result<std::string> text = record_(TextOf(calls));
    if (options_.progress) {
      options_.progress(shrunk_.runs, calls_.lines.size());
    }
    if (!text.ok()) return "the command fails: " + text.status().message();
    std::istringstream in(*text);
    Judgement judgement = Judge(in, options_.twins);
    if (judgement.verdict() == Verdict::kAccept) {
      return "what the command prints is accepted";
    }
    if (judgement.verdict() == Verdict::kBadInput) {
      return fmt::format(
          "what the command prints is not a recording: line {}: {}",
          judgement.line(), judgement.reason());
    }
    std::string bucket = BucketOfReason(judgement.reason());
    if (bucket != bucket_) {
      return fmt::format("what the command prints is wrong in another way: {}",
                         judgement.reason());
    }
    if (continues_ && !ContinuesSequences(*text, judgement.line())) {
      return "the command prints batches that do not continue their sequences";
    }
    shrunk_.text = *text;
    shrunk_.judgement = std::move(judgement);
    return bucket;
  }

  bool Take(Calls calls) {
    if (shrunk_.runs >= options_.runs || Try(calls) != bucket_) return false;
    calls_ = std::move(calls);
    return true;
  }

  // Removes halves of the units, quarters, ... and finally each unit alone.
  // Returns whether anything was removed.
  template <class Units>
  bool LeaveOut(const Units& units_of) {
    bool any = false;
    std::vector<Unit> units = units_of(calls_);
    for (std::size_t size = (units.size() + 1) / 2; size > 0;
         size = size == 1 ? 0 : (size + 1) / 2) {
      // Starts at the end: later calls depend on earlier calls.
      for (std::size_t end = units.size(); end > 0;) {
        const std::size_t from = end > size ? end - size : 0;
        const bool taken = Take(Without(calls_, units, from, end));
        if (taken) units = units_of(calls_);
        any = any || taken;
        end = from;
      }
    }
    return any;
  }

  bool LeaveOutTokens() {
    if (calls_.paged) return false;
    bool any = false;
    for (std::size_t pass = calls_.lines.size(); pass-- > 0;) {
      if (!Is(calls_.lines[pass], "start_forward")) continue;
      for (std::size_t i = calls_.lines[pass].at("positions").size(); i > 0;
           --i) {
        if (calls_.lines[pass].at("positions").size() < 2) break;
        any = Take(WithoutToken(calls_, pass, i - 1)) || any;
      }
    }
    return any;
  }

  // Opens a sequence instead of each fork without tokens, which needs its
  // source.
  bool OpenForks() {
    bool any = false;
    for (std::size_t i = 0; calls_.paged && i < calls_.lines.size(); ++i) {
      const Json& call = calls_.lines[i];
      if (!Is(call, "fork") || call.at("len") != 0) continue;
      Calls calls = calls_;
      calls.lines[i] = {{"op", "open"},
                        {"prompt", Json::array()},
                        {"len", 0},
                        {"result", call.at("result")}};
      any = Take(std::move(calls)) || any;
    }
    return any;
  }

  const Recorder& record_;
  const RecordingShrinkOptions& options_;
  std::string bucket_;
  bool continues_ = false;  // So does each shorter recording.
  Calls calls_;
  ShrunkRecording shrunk_;
};

}  // namespace

Result<ShrunkRecording> ShrinkRecording(
    const std::string& recording, const Recorder& record,
    const RecordingShrinkOptions& options) try {
  const auto wrong = [](std::string text) {
    return Status(StatusCode::kFailedPrecondition, std::move(text));
  };
  std::istringstream in(recording);
  const Judgement judgement = Judge(in, options.twins);
  if (judgement.verdict() == Verdict::kAccept) {
    return wrong("the recording is accepted, there is nothing to shrink");
  }
  if (judgement.verdict() == Verdict::kBadInput) {
    return wrong(fmt::format("the recording is bad input: line {}: {}",
                             judgement.line(), judgement.reason()));
  }
  // Lines after the first wrong line do not matter.
  std::istringstream lines(recording);
  Calls calls;
  std::getline(lines, calls.header);
  Json header = Json::parse(calls.header);
  header.erase("history");  // It is not the history of these calls.
  calls.header = header.dump();
  calls.paged = header.at("cache").value("type", "") == "paged";
  std::string line;
  for (std::int64_t i = 1; i < judgement.line() && std::getline(lines, line);
       ++i) {
    calls.lines.push_back(Json::parse(line));
  }
  RecordingShrinker shrinker(record, options);
  Status status =
      shrinker.Start(std::move(calls), BucketOfReason(judgement.reason()));
  if (!status.ok()) return status;
  ShrunkRecording shrunk = shrinker.Run();
  if (shrunk.calls == 0 && shrunk.calls_before > 0) {
    return wrong(
        "the command prints a recording that is wrong in this way for no calls "
        "at all, too: it does not read what it is given");
  }
  return shrunk;
} catch (const Json::exception& error) {
  // Keys outside of the format may have values of any type.
  return Status(
      StatusCode::kFailedPrecondition,
      fmt::format("the recording cannot be taken apart: {}", error.what()));
}

}  // namespace kvtwin::props
