// The subcommand `state`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/json_line.h"
#include "core/refusals.h"
#include "core/state_checks.h"
#include "kvtwin/save.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/report/show.h"

namespace kvtwin::props {
namespace {

struct StateArguments {
  std::vector<std::string> paths;
  std::optional<std::string> model;
  int sequence = 0;
  std::string out;
  bool json = false;
};

using Json = nlohmann::ordered_json;

// A token of a sequence.
struct Member {
  int sequence = 0;
  std::int32_t position = 0;
  bool shared = false;  // With other sequences.
};

// Returns the members, by sequence, then by position. Requires: `entries` are
// in the order that files have.
std::vector<Member> MembersOf(const std::vector<CellEntry>& entries) {
  std::vector<Member> members;
  members.reserve(entries.size());
  for (auto at = entries.begin(); at != entries.end(); ++at) {
    const bool shared = (at != entries.begin() && (at - 1)->cell == at->cell) ||
                        (at + 1 != entries.end() && (at + 1)->cell == at->cell);
    members.push_back({at->sequence, at->position, shared});
  }
  std::ranges::sort(members, {}, [](const Member& member) {
    return std::pair(member.sequence, member.position);
  });
  return members;
}

void AddToRuns(std::int64_t number, std::vector<Run>& runs) {
  if (runs.empty() || runs.back().second < number) {
    runs.emplace_back(number, number);
  }
  runs.back().second = number + 1;
}

struct SequenceSummary {
  int sequence = 0;
  std::size_t tokens = 0;
  std::size_t shared = 0;
  std::vector<Run> positions;
};

std::vector<SequenceSummary> SequencesOf(
    const std::vector<CellEntry>& entries) {
  std::vector<SequenceSummary> sequences;
  for (const Member& member : MembersOf(entries)) {
    if (sequences.empty() || sequences.back().sequence != member.sequence) {
      sequences.push_back({.sequence = member.sequence, .positions = {}});
    }
    SequenceSummary& summary = sequences.back();
    ++summary.tokens;
    summary.shared += member.shared ? 1 : 0;
    AddToRuns(member.position, summary.positions);
  }
  return sequences;
}

// Returns a line for each of the first kHeldShown sequences.
std::string SequencesText(const std::vector<SequenceSummary>& sequences) {
  std::string text = "    sequence  tokens  shared  positions\n";
  const std::size_t shown = std::min(sequences.size(), kHeldShown);
  for (std::size_t i = 0; i < shown; ++i) {
    const auto& [sequence, tokens, shared, positions] = sequences[i];
    text += fmt::format("    {:>8}  {:>6}  {:>6}  {}\n", sequence, tokens,
                        shared, RunsText(positions));
  }
  if (sequences.size() > shown) {
    text += fmt::format("    ... and {} more\n", sequences.size() - shown);
  }
  return text;
}

std::string RowsText(const KvRows& rows, bool encoder) {
  const auto& [key, value] = rows;
  if (encoder) {
    return fmt::format("K {} {}, V {} {}", ShapeText(key.shape),
                       DTypeName(key.dtype), ShapeText(value.shape),
                       DTypeName(value.dtype));
  }
  return fmt::format("{} kv_heads, K of {} {}, V of {} {}", key.shape[1],
                     key.shape[0], DTypeName(key.dtype), value.shape[0],
                     DTypeName(value.dtype));
}

// Returns one line for all layers with rows of the same form.
std::string LayersText(const CacheState& state) {
  std::vector<std::pair<std::string, std::vector<Run>>> kinds;
  for (const auto& [layer, rows] : state.layers) {
    const std::string kind = RowsText(rows, IsOfEncoder(state));
    auto at = std::ranges::find(
        kinds, kind, [](const auto& entry) -> auto& { return entry.first; });
    if (at == kinds.end()) at = kinds.insert(at, {kind, {}});
    AddToRuns(layer, at->second);
  }
  std::string text;
  for (const auto& [kind, layers] : kinds) {
    text += fmt::format("    layers {}: {}\n", RunsText(layers), kind);
  }
  return text;
}

std::string TokensText(const CacheState& state) {
  if (IsOfEncoder(state)) {
    return fmt::format(
        "an encoder's, {}, next position {}",
        state.cached ? fmt::format("position {}", state.position) : "not valid",
        state.next_position);
  }
  return fmt::format("{} tokens, {} memberships", CountHeld(state.cells),
                     state.cells.size());
}

std::size_t RowBytes(const CacheState& state) {
  std::size_t bytes = 0;
  for (const auto& [layer, rows] : state.layers) {
    bytes += rows.key.bytes.size() + rows.value.bytes.size();
  }
  return bytes;
}

// Describes a cache that is not a wrapper. `name` begins the text.
std::string CacheText(const CacheState& state, const std::string& name) {
  std::string text =
      fmt::format("  {}: {}, {} layers, {} bytes of rows\n", name,
                  TokensText(state), state.layers.size(), RowBytes(state));
  text += LayersText(state);
  if (state.cells.empty()) return text;
  text += SequencesText(SequencesOf(state.cells));
  if (state.cells.size() > kHeldShown) return text;
  return text + HeldText(HeldCells(state.cells), state.cells.back().cell + 1);
}

std::string StateText(const CacheState& state) {
  if (state.caches.empty()) return CacheText(state, "cache");
  std::string text;
  for (std::size_t i = 0; i < state.caches.size(); ++i) {
    text += CacheText(state.caches[i], fmt::format("cache {}", i));
  }
  return text;
}

Json TensorJson(const DenseTensor& tensor) {
  return {{"dtype", DTypeName(tensor.dtype)}, {"shape", tensor.shape}};
}

// Describes a cache that is not a wrapper.
Json CacheJson(const CacheState& state) {
  Json layers = Json::array();
  for (const auto& [layer, rows] : state.layers) {
    layers.push_back({{"layer", layer},
                      {"key", TensorJson(rows.key)},
                      {"value", TensorJson(rows.value)}});
  }
  Json json = {{"encoder", IsOfEncoder(state)},
               {"bytes", RowBytes(state)},
               {"layers", layers}};
  if (IsOfEncoder(state)) {
    json["cached"] = state.cached;
    json["position"] = state.position;
    json["next_position"] = state.next_position;
    return json;
  }
  json["tokens"] = CountHeld(state.cells);
  json["sequences"] = Json::array();
  for (const auto& [sequence, tokens, shared, positions] :
       SequencesOf(state.cells)) {
    json["sequences"].push_back({{"sequence", sequence},
                                 {"tokens", tokens},
                                 {"shared", shared},
                                 {"positions", positions}});
  }
  return json;
}

void PrintStateJson(const std::string& path, const std::string& model,
                    const CacheState& state) {
  Json caches = Json::array();
  for (const CacheState& part : state.caches) caches.push_back(CacheJson(part));
  if (state.caches.empty()) caches.push_back(CacheJson(state));
  PrintJson({{"file", path},
             {"whole", true},
             {"model", model},
             {"wrapper", !state.caches.empty()},
             {"caches", caches}});
}

// A sparse file may be larger than any memory.
Status CheckSize(const std::string& path) {
  std::error_code none;
  const std::uintmax_t bytes = std::filesystem::file_size(path, none);
  const auto memory = static_cast<std::uintmax_t>(::sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::uintmax_t>(::sysconf(_SC_PAGE_SIZE));
  if (none || bytes <= memory) return {};  // LoadState reports errors.
  return Invalid("'{}' has {} bytes, this machine has memory for {}",
                 Printable(path, 200), bytes, memory);
}

Status WriteSequence(const CacheState& state, const std::string& path,
                     const std::string& model,
                     const StateArguments& arguments) {
  const CacheState single = SequenceOf(state, arguments.sequence);
  std::size_t tokens = single.cells.size();
  for (const CacheState& part : single.caches) tokens += part.cells.size();
  if (tokens == 0) {
    return Invalid("'{}' has no sequence {}", Printable(path, 200),
                   arguments.sequence);
  }
  std::error_code none;
  if (std::filesystem::equivalent(path, arguments.out, none)) {
    return Invalid("--out is '{}', the file itself", Printable(path, 200));
  }
  Status status = SaveState(single, arguments.out, model);
  if (status.ok() && !arguments.json) {
    fmt::print("sequence {} is written to {}\n", arguments.sequence,
               Printable(arguments.out, 200));
  }
  return status;
}

// Prints the contents of the file.
Status ShowFile(const std::string& path, const StateArguments& arguments) {
  if (Status status = CheckSize(path); !status.ok()) return status;
  Result<std::string> model = ModelOf(path);
  if (!model.ok()) return model.status();
  if (arguments.model) model = *arguments.model;
  const Result<CacheState> state = LoadState(path, *model);
  if (!state.ok()) return state.status();
  if (arguments.json) {
    PrintStateJson(path, *model, *state);
  } else {
    fmt::print("{}: whole, of model '{}'\n{}", Printable(path, path.size()),
               Printable(*model, 200), StateText(*state));
  }
  if (arguments.out.empty()) return {};
  return WriteSequence(*state, path, *model, arguments);
}

int RunState(const StateArguments& arguments) {
  if (!arguments.out.empty() && arguments.paths.size() > 1) {
    fmt::print(stderr, "kvtwin state: --out is for one file, there are {}\n",
               arguments.paths.size());
    return 2;
  }
  int exit_code = 0;
  for (const std::string& path : arguments.paths) {
    Status status;
    try {
      status = ShowFile(path, arguments);
    } catch (const std::bad_alloc&) {
      status =
          Untimely("there is not enough memory for '{}'", Printable(path, 200));
    }
    if (status.ok()) continue;
    exit_code = 2;
    if (arguments.json) {
      PrintJson(
          {{"file", path}, {"whole", false}, {"reason", status.message()}});
    } else {
      fmt::print(stderr, "kvtwin state: {}\n", status.message());
    }
  }
  return exit_code;
}

}  // namespace

void AddStateCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<StateArguments>();
  CLI::App* command = app.add_subcommand(
      "state", "Check saved states (include/kvtwin/save.h), and draw them");
  command->add_option("file", arguments->paths, "files that SaveState wrote")
      ->required();
  command->add_option("--model", arguments->model,
                      "refuse the state of any other model");
  auto* sequence =
      command
          ->add_option("--sequence", arguments->sequence,
                       "write this sequence as a state of its own, to --out")
          ->check(CLI::NonNegativeNumber);
  auto* out = command->add_option("--out", arguments->out,
                                  "the file that --sequence is written to");
  command->add_flag("--json", arguments->json,
                    "print one JSON object per file");
  sequence->needs(out);
  out->needs(sequence);
  command->callback(
      [arguments, &exit_code] { exit_code = RunState(*arguments); });
}

}  // namespace kvtwin::props
