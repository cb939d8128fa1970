#include "props/history/setup_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "props/base/counted.h"

namespace kvtwin::props {
namespace {

// Returns the memory that a window has by S3, and why.
std::string MemoryText(const CacheSpec& spec, const InitArgs& init) {
  const int window = *spec.window;
  const bool own = spec.kind == Kind::kSwaMem && spec.memory;
  const bool raised =
      init.max_sequences > 1 && (!own || *spec.memory <= window);
  const std::int64_t memory = raised ? std::int64_t{window} + 1
                              : own  ? *spec.memory
                                     : window;
  if (memory >= init.capacity) return "memory unbounded (S3: the capacity)";
  return fmt::format("memory {}{}", memory,
                     raised ? " (S3: window + 1, since there are several "
                              "sequences)"
                            : "");
}

// Rules of other systems have other memories, and some have none.
std::string SpecText(const CacheSpec& spec, const InitArgs& init,
                     const Rules& rules) {
  std::string text(KindName(spec.kind));
  const bool windowed = spec.kind == Kind::kSwa || spec.kind == Kind::kSwaMem;
  if (windowed && spec.window) {
    text += fmt::format(": window {}", *spec.window);
    if (AreOurs(rules)) {
      text += ", " + MemoryText(spec, init);
    } else if (rules.window == Rules::Window::kWithQuery) {
      text += " with the query";
    }
  } else if (windowed) {
    text += ": no window";
  } else if (spec.kind == Kind::kChunked) {
    text += fmt::format(": chunks of {}", Counted(spec.chunk, "token"));
  } else if (spec.kind == Kind::kRecurrent) {
    if (spec.checkpoint_every > 0) {
      text += fmt::format(": the last {}, every {}",
                          Counted(spec.checkpoints, "checkpoint"),
                          Counted(spec.checkpoint_every, "token"));
    }
    if (spec.pins > 0) text += fmt::format(", {}", Counted(spec.pins, "pin"));
    if (spec.drafts > 0) {
      text += fmt::format(", room for {}", Counted(spec.drafts, "draft"));
    }
  } else if (IsWrapper(spec.kind)) {
    std::vector<std::string> parts;
    for (const CacheSpec& part : spec.caches) {
      parts.push_back(SpecText(part, init, rules));
    }
    return fmt::format("{} of ({})", text, fmt::join(parts, "; "));
  }
  if (spec.shift.kind == ShiftKind::kNone) return text;
  return text + fmt::format(", shift {}", ShiftName(spec.shift.kind));
}

}  // namespace

std::string SetupText(const Setup& setup, const Rules& rules) {
  const InitArgs& init = setup.init;
  std::string text = fmt::format(
      "{}; {} of at most {}, batches of at most {}; {}",
      SpecText(setup.spec, init, rules),
      Counted(init.max_sequences, "sequence"), Counted(init.capacity, "token"),
      init.max_batch, DTypeName(init.dtype));
  if (setup.v_dtype() != init.dtype) {
    text += fmt::format(" (V {})", DTypeName(setup.v_dtype()));
  }
  if (setup.layers > 1) text += fmt::format("; {} layers", setup.layers);
  if (setup.soft_cap > 0) text += fmt::format("; soft cap {}", setup.soft_cap);
  if (setup.sinks) text += "; sinks";
  return text;
}

}  // namespace kvtwin::props
