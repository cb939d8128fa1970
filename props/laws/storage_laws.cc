// Laws of storage: placement, layouts, number formats, and the several caches
// of a wrapper.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "props/compare/visibility.h"
#include "props/history/rows.h"
#include "props/laws/alike.h"
#include "reference/attention.h"

namespace kvtwin::props {
namespace {

using CallKind = Call::Kind;

Setup OtherPlacement(Setup setup) {
  ForEachCausal(setup, [](CacheSpec& spec) {
    spec.placement = spec.placement == Placement::kScatter
                         ? Placement::kContiguous
                         : Placement::kScatter;
  });
  return setup;
}

LawResult PlacementIsInvisible(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(OtherPlacement(script.setup), subject),
                 {.alike = Alike::kTokens}, PlayPlain, PlayPlain);
}

// A cache with room to spare never moves a token.
LawResult DefragIsInvisible(const History& history, const Subject& subject) {
  const Script script = WithoutRefused(Resolve(history, subject));
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(WithMoreRoom(script.setup), subject),
                 {.alike = Alike::kTokens, .more_room = true}, PlayPlain,
                 PlayPlain);
}

// Returns the same elements (runs, if in blocks) with a gap after each.
TensorView Gapped(const DenseTensor& dense, std::vector<std::byte>& memory) {
  TensorView view = dense.view();
  const auto size =
      AsSize(IsBlockDType(dense.dtype) ? view.stride[1] : view.stride[0]);
  memory.assign(2 * dense.bytes.size(), std::byte{0xFF});
  for (std::size_t at = 0; at < dense.bytes.size(); at += size) {
    std::memcpy(&memory[2 * at], &dense.bytes[at], size);
  }
  view.data = memory.data();
  for (std::int64_t& stride : view.stride) stride *= 2;
  return view;
}

LawResult Layouts(const History& history, const Subject& subject) {
  const Script script = WithoutRefused(Resolve(history, subject));
  std::optional<Session> left = Session::Open(script.setup, subject);
  if (!left) return {};
  Setup other = script.setup;
  // The next layout is taken. Encoders have no tiled V.
  const int layouts = left->HasEncoder() ? 2 : 3;
  other.config.v_layout =
      static_cast<VLayout>((AsInt(other.config.v_layout) + 1) % layouts);
  const auto* mask_dtype =
      std::ranges::find(kMaskDTypes, other.config.mask_dtype);
  other.config.mask_dtype =
      mask_dtype + 1 == kMaskDTypes.end() ? kMaskDTypes[0] : mask_dtype[1];
  other.config.mask_batch_padding = 3;
  if (!left->HasEncoder()) other.config.cache_padding *= 3;
  FitStorage(other);
  if (!subject.is_twin()) subject.abilities.Fit(other);
  // One Put more, of rows with gaps.
  const bool puts_gapped = subject.abilities.Can(KVTWIN_CAN_TAKE_STRIDED) &&
                           !subject.abilities.OnlyGoesOn();
  const Play gapped = [](Session& session, const Script& of, std::size_t i) {
    const Call& call = of.calls[i];
    if (call.kind != CallKind::kPut || !session.in_pass()) {
      return PlayPlain(session, of, i);
    }
    session.Do(call);  // Makes the layer the current one.
    std::vector<std::byte> keys;
    std::vector<std::byte> values;
    const Status status =
        session.cache().Put(Gapped(call.key, keys), Gapped(call.value, values));
    return Answer{status.code()};
  };
  return Matched(script, std::move(left), Session::Open(other, subject),
                 {.alike = Alike::kTokens, .more_room = true}, PlayPlain,
                 puts_gapped ? gapped : Play(PlayPlain));
}

LawResult Padding(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  const CacheConfig& config = script.setup.config;
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*session, script, i);
    if (!session->in_pass()) continue;
    if (!subject.is_twin() && !AtRest(script, i)) continue;
    const auto tokens = std::ssize(session->pass().positions);
    for (const int layer : session->put_layers()) {
      const int type = session->TypeOf(layer);
      if (session->IsEncoder(type)) continue;
      const KvView view = session->View(layer);
      const std::int64_t cells = view.key.shape[2];
      ++result.judged;
      const auto wrong = [&](const std::string& text) {
        return Violation(After(script, i, text));
      };
      if (view.first_cell % config.cache_padding != 0 ||
          cells % config.cache_padding != 0) {
        return wrong(fmt::format("the view is {} cells from {} on", cells,
                                 view.first_cell));
      }
      for (const int cell : session->BatchCells(type)) {
        const bool viewed =
            cell >= view.first_cell && cell < view.first_cell + cells;
        // A reserving pass may report more cells than there are.
        if (viewed || session->pass().reserve) continue;
        return wrong(fmt::format("cell {} of the batch is not viewed", cell));
      }
      const std::int64_t rows = view.mask.shape[1];
      const bool padded =
          subject.rules.mask_rows == Rules::MaskRows::kPadded || rows != tokens;
      if (rows < tokens ||
          (padded && (rows % config.mask_batch_padding != 0 ||
                      rows >= tokens + config.mask_batch_padding))) {
        return wrong(fmt::format("the mask has {} rows", rows));
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < cells; ++column) {
          const MaskElement mask = MaskElementAt(view.mask, column, row);
          const bool allows = mask == MaskElement::kAllows;
          if (mask == MaskElement::kHides || (allows && row < tokens)) continue;
          return wrong(fmt::format("the mask is {} in row {}",
                                   allows ? "0" : "neither 0 nor -inf", row));
        }
      }
    }
  }
  return result;
}

// A format of 16 or 8 bits: a sign, an exponent and `digits` bits of mantissa.
struct Format {
  int digits;
  int bias;
  int sign;      // The sign bit.
  int infinity;  // The bits of infinity; for f8, of a NaN.
  bool saturates = false;
};

Format FormatOf(DType dtype) {
  if (dtype == DType::kF16) return {10, 15, 0x8000, 0x7C00};
  if (dtype == DType::kBF16) return {7, 127, 0x8000, 0x7F80};
  return {3, 7, 0x80, 0x7F, true};
}

// Returns the number with these bits; for infinity, the one after the largest.
double ValueOf(const Format& format, int bits) {
  const int exponent = bits >> format.digits;
  const int mantissa = bits - (exponent << format.digits);
  const int least = 1 - format.bias - format.digits;
  if (exponent == 0) return std::ldexp(mantissa, least);
  return std::ldexp(mantissa + (1 << format.digits), exponent - 1 + least);
}

// Whether `rounded` is `value`, rounded to the nearest, ties to even.
bool IsRounded(const Format& format, float value, std::uint16_t rounded) {
  const int bits = rounded & (format.sign - 1);
  const int infinity = format.infinity;
  const int nan = infinity + (format.saturates ? 0 : 1);  // The first NaN.
  if (std::isnan(value)) return bits >= nan;
  if (bits >= nan || std::signbit(value) != (rounded >= format.sign)) {
    return false;
  }
  if (format.saturates && std::fabs(value) >= ValueOf(format, nan - 1)) {
    return bits == nan - 1;
  }
  const double size = std::fabs(static_cast<double>(value));
  const double distance = std::fabs(size - ValueOf(format, bits));
  for (const int other : {bits - 1, bits + 1}) {
    if (other < 0 || other > infinity) continue;
    const double further = std::fabs(size - ValueOf(format, other));
    if (further < distance || (further == distance && bits % 2 == 1)) {
      return std::isinf(value) && bits == infinity;
    }
  }
  return true;
}

// Whether a block holds these numbers as closely as docs/dtypes.md requires.
bool IsQuantized(DType dtype, std::span<const float> values,
                 const DenseTensor& block) {
  double largest = 0;
  bool finite = true;
  for (const float value : values) {
    finite = finite && std::isfinite(value);
    largest = std::max(largest, std::fabs(static_cast<double>(value)));
  }
  const double steps = dtype == DType::kQ8 ? 127 : 8;
  // The error is at most half of the scale, plus the rounding of the scale to
  // f16. For q4_0 it is a whole scale: the largest number is clipped if it has
  // the other sign. (No test has an infinite scale.)
  const double near = dtype == DType::kQ8 ? 0.5 : 1;
  const double most =
      largest / steps * (near + steps * 0x1p-11) * (1 + 1e-6) + steps * 0x1p-25;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double stored = LoadFrom(block.view(), static_cast<std::int64_t>(i));
    if (finite != std::isfinite(stored)) return false;
    if (finite && std::fabs(stored - values[i]) > most) return false;
  }
  return true;
}

// Whether `narrow`, of `dtype`, is `wide`, of f32, rounded.
bool IsRounded(DType dtype, const std::vector<std::byte>& wide,
               const std::vector<std::byte>& narrow) {
  std::vector<float> values(wide.size() / sizeof(float));
  std::memcpy(values.data(), wide.data(), wide.size());
  const std::size_t step = IsBlockDType(dtype) ? kBlockElements : 1;
  const auto size = AsSize(RunBytes(dtype, AsInt(step)));
  if (values.size() * size != narrow.size() * step) return false;
  const std::byte* at = narrow.data();
  for (std::size_t i = 0; i < values.size(); i += step, at += size) {
    if (step > 1) {
      const DenseTensor block = {
          dtype, {kBlockElements, 1, 1, 1}, {at, at + size}};
      if (!IsQuantized(dtype, std::span(values).subspan(i, step), block)) {
        return false;
      }
      continue;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, at, size);
    if (!IsRounded(FormatOf(dtype), values[i], bits)) return false;
  }
  return true;
}

// Checks the row of each batch token: bit for bit if the cache has its dtype,
// otherwise rounded.
std::optional<std::string> StoredAsPut(Session& session, const Call& put) {
  const int type = session.TypeOf(put.layer);
  if (session.IsEncoder(type) || session.pass().reserve) return std::nullopt;
  const KvView view = session.View(put.layer);
  const std::vector<int> cells = session.BatchCells(type);
  const VLayout v_layout = session.setup().config.v_layout;
  for (std::size_t row = 0; row < cells.size(); ++row) {
    const auto at = static_cast<std::int64_t>(row);
    const std::int64_t column = cells[row] - view.first_cell;
    const auto same = [&](const DenseTensor& given, const TensorView& stored,
                          VLayout layout) {
      const std::vector<std::byte> expected =
          CopyOf(Slice(given.view(), 2, at), given.dtype).bytes;
      const std::vector<std::byte> found = RowBytes(stored, column, layout);
      return given.dtype == stored.dtype
                 ? expected == found
                 : IsRounded(stored.dtype, expected, found);
    };
    if (same(put.key, view.key, VLayout::kPlain) &&
        same(put.value, view.value, v_layout)) {
      continue;
    }
    return fmt::format("the row of batch token {} is not as it was put", row);
  }
  return std::nullopt;
}

// A narrow cache and an f32 cache get the same rows; no row is shifted.
LawResult Rounding(const History& history, const Subject& subject) {
  History unshifted = history;
  unshifted.setup.legal = false;
  // f16 replaces f32: it takes rows of any size in any layout.
  if (unshifted.setup.init.dtype == DType::kF32) {
    unshifted.setup.init.dtype = DType::kF16;
  }
  if (unshifted.setup.config.v_dtype == DType::kF32) {
    unshifted.setup.config.v_dtype = DType::kF16;
  }
  const DType k_dtype = unshifted.setup.init.dtype;
  const DType v_dtype = unshifted.setup.v_dtype();
  for (Op& op : unshifted.ops) op.open = true;
  const Script script = Resolve(unshifted, subject);
  Setup wide_setup = script.setup;
  wide_setup.init.dtype = DType::kF32;
  wide_setup.config.v_dtype.reset();
  std::optional<Session> narrow = Session::Open(script.setup, subject);
  std::optional<Session> wide = Session::Open(wide_setup, subject);
  if (!narrow || !wide || wide->HasEncoder()) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    Call call = script.calls[i];
    narrow->Do(call);
    const bool puts = call.kind == CallKind::kPut && narrow->in_pass();
    std::optional<std::string> wrong;
    if (puts) wrong = StoredAsPut(*narrow, call);
    if (call.kind == CallKind::kPut) {
      call.key = CopyOf(call.key.view(), DType::kF32);
      call.value = CopyOf(call.value.view(), DType::kF32);
    }
    wide->Do(call);
    if (puts && !wrong) wrong = StoredAsPut(*wide, call);
    if (wrong) return Violation(After(script, i, *wrong));
    if (!AtRest(script, i)) continue;
    const std::vector<SeenRow> expected = wide->PassRows();
    const std::vector<SeenRow> actual = narrow->PassRows();
    for (std::size_t row = 0; row < expected.size(); ++row) {
      ++result.judged;
      const auto& tokens = expected[row].tokens;
      // Tokens at one position may come in another order; they were judged when
      // they were put.
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        const bool alone =
            (t == 0 || tokens[t - 1].position != tokens[t].position) &&
            (t + 1 == tokens.size() ||
             tokens[t + 1].position != tokens[t].position);
        if (row >= actual.size() || t >= actual[row].tokens.size()) {
          return Violation(
              After(script, i, "the rounded cache shows fewer rows"));
        }
        const SeenToken& rounded = actual[row].tokens[t];
        if (!alone || (IsRounded(k_dtype, tokens[t].key, rounded.key) &&
                       IsRounded(v_dtype, tokens[t].value, rounded.value))) {
          continue;
        }
        return Violation(
            After(script, i,
                  fmt::format("a row at position {} is not the f32 row "
                              "rounded to {} and {}",
                              tokens[t].position, DTypeName(k_dtype),
                              DTypeName(v_dtype))));
      }
    }
  }
  return result;
}

LawResult PoisonNeverShows(const History& history, const Subject& subject) {
  if (!subject.can_be_poisoned) return {};
  const Script script = Resolve(history, subject);
  const Play poisoned = [](Session& session, const Script& of, std::size_t i) {
    if (of.calls[i].kind == CallKind::kStart &&
        session.Do(StartCall({0}, {of.setup.first_id}, true)).code ==
            StatusCode::kOk) {
      for (const int layer : session.put_layers()) {
        const int type = session.TypeOf(layer);
        if (session.IsEncoder(type)) continue;
        const std::vector<CellEntry> used = session.Cells(type);
        PoisonFreeCells(session.View(layer), used, of.setup.config.v_layout);
      }
    }
    return PlayPlain(session, of, i);
  };
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(script.setup, subject),
                 {.alike = Alike::kTokens}, PlayPlain, poisoned);
}

// Returns the view with its cells in reverse order. `mask` stores its mask,
// since masks of bits have no strides.
KvView Reversed(KvView view, VLayout v_layout, DenseTensor& mask) {
  const auto reverse = [&](TensorView& tensor, std::size_t dim) {
    std::array<std::int64_t, 4> last = {0, 0, 0, 0};
    last[dim] = tensor.shape[dim] - 1;
    tensor.data = tensor.at(last[0], last[1], last[2], last[3]);
    tensor.stride[dim] = -tensor.stride[dim];
  };
  reverse(view.key, 2);
  if (v_layout != VLayout::kPlain) reverse(view.value, 0);
  if (v_layout == VLayout::kPlain) reverse(view.value, 2);
  if (v_layout == VLayout::kTiled) reverse(view.value, 3);
  const auto [columns, rows, one, other] = view.mask.shape;
  mask = HidingMask(view.mask.dtype, columns, rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      if (!MaskAllows(view.mask, columns - 1 - column, row)) continue;
      AllowInMask(mask, column, row);
    }
  }
  view.mask = mask.view();
  return view;
}

bool Close(const Eigen::MatrixXd& left, const Eigen::MatrixXd& right) {
  // Elements of V are at most a few thousand, and a sum has few terms.
  constexpr double kSlack = 1e-7;
  for (std::int64_t i = 0; i < left.size(); ++i) {
    const double a = left.reshaped()[i];
    const double b = right.reshaped()[i];
    if (std::isnan(a) && std::isnan(b)) continue;
    if (a != b && !(std::fabs(a - b) <= kSlack)) return false;
  }
  return true;
}

LawResult CellOrder(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> left = Session::Open(script.setup, subject);
  std::optional<Session> right =
      Session::Open(OtherPlacement(script.setup), subject);
  if (!left || !right) return {};
  const VLayout v_layout = script.setup.config.v_layout;
  const RowDims& dims = script.setup.rows;
  // There are two query heads for each KV head.
  const Eigen::MatrixXd queries = Eigen::MatrixXd::NullaryExpr(
      dims.k_head_dim, std::int64_t{2} * dims.kv_heads, [](auto i, auto h) {
        return std::cos(static_cast<double>(1 + i + 5 * h)) / 64;
      });
  const double scale = 1 / std::sqrt(dims.k_head_dim);
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*left, script, i);
    PlayPlain(*right, script, i);
    if (!left->in_pass() || !right->in_pass() || !AtRest(script, i) ||
        left->narrow()) {
      continue;
    }
    for (const int layer : left->put_layers()) {
      if (left->IsEncoder(left->TypeOf(layer))) continue;
      const KvView view = left->View(layer);
      const KvView other = right->View(layer);
      DenseTensor mask;
      const KvView reversed = Reversed(view, v_layout, mask);
      const auto tokens = std::ssize(left->pass().positions);
      for (std::int64_t row = 0; row < tokens; ++row) {
        const auto attend = [&](const KvView& in) {
          return reference::Attend(in, v_layout, row, queries, scale);
        };
        const Eigen::MatrixXd expected = attend(view);
        ++result.judged;
        if (Close(expected, attend(reversed)) &&
            Close(expected, attend(other))) {
          continue;
        }
        return Violation(
            After(script, i,
                  fmt::format("attention of row {} in layer {} depends "
                              "on the order of the cells",
                              row, layer)));
      }
    }
  }
  return result;
}

// Compares cache `type` of a wrapper with the same cache alone.
std::optional<std::string> CompareWithPart(Session& wrapper, int type,
                                           Session& part) {
  if (wrapper.Cells(type) != part.Cells(0)) return "the cells differ";
  if (wrapper.in_pass() != part.in_pass()) return "only one has a pass";
  if (!wrapper.in_pass() || wrapper.narrow()) return std::nullopt;
  if (wrapper.BatchCells(type) != part.BatchCells(0)) {
    return "the batch's cells differ";
  }
  std::vector<SeenRow> seen = wrapper.PassRows();
  std::erase_if(seen, [&](const SeenRow& row) {
    return wrapper.TypeOf(row.layer) != type;
  });
  return CompareRows(seen, part.PassRows(), wrapper.setup().init.dtype, 0);
}

// A history of one cache is played by a wrapper of two caches of its kind.
LawResult WrapperParts(const History& history, const Subject& subject) {
  History wrapped = history;
  CacheSpec& spec = wrapped.setup.spec;
  if (spec.kind != Kind::kWrapper) {
    const CacheSpec one = spec;
    spec.kind = Kind::kWrapper;
    spec.caches = {one, one};
    wrapped.setup.layers = std::max(2, wrapped.setup.layers);
  }
  const Script script = WithoutRefused(Resolve(wrapped, subject));
  std::optional<Session> whole = Session::Open(script.setup, subject);
  if (!whole) return {};
  std::vector<Session> parts;
  for (const CacheSpec& one : spec.caches) {
    Setup setup = script.setup;
    setup.spec = one;
    std::optional<Session> part = Session::Open(setup, subject);
    if (!part && !subject.is_twin()) return {};  // It has no such cache.
    if (!part)
      return Violation("a wrapper takes a setup that its cache refuses");
    parts.push_back(std::move(*part));
  }
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    const Answer answer = PlayPlain(*whole, script, i);
    // A cache alone may accept what the wrapper refuses.
    if (answer.code != StatusCode::kOk) return result;
    bool all = true;
    const bool one_only =
        call.kind == CallKind::kPut || call.kind == CallKind::kCausal;
    for (int type = 0; type < whole->types(); ++type) {
      Session& part = At(parts, type);
      if (one_only && call.type != type) continue;
      // A wrapper pins in those of its caches that have pins (R14).
      if (call.kind == CallKind::kPin && whole->spec(type).pins == 0) continue;
      const Answer alone = PlayPlain(part, script, i);
      all = all && alone.yes;
      if (alone.code != StatusCode::kOk) {
        return Violation(After(
            script, i,
            fmt::format("cache {} alone answers {}", type, ToText(alone))));
      }
    }
    if (call.kind == CallKind::kAsk && answer.yes != all) {
      return Violation(After(script, i, "the caches alone do not agree"));
    }
    if (!AtRest(script, i)) continue;
    ++result.judged;
    for (int type = 0; type < whole->types(); ++type) {
      const auto wrong = CompareWithPart(*whole, type, At(parts, type));
      if (!wrong) continue;
      return Violation(After(
          script, i, fmt::format("cache {} and it alone: {}", type, *wrong)));
    }
  }
  return result;
}

// Each pass begins in a new cache, restored from the one before. A snapshot has
// no pins (R15).
LawResult SnapshotIsAll(const History& history, const Subject& subject) {
  const Script script = Resolve(Without(history, {OpKind::kPin}), subject);
  std::optional<Session> left = Session::Open(script.setup, subject);
  std::optional<Session> right = Session::Open(script.setup, subject);
  if (!left || !right) return {};
  if (right->cache().Snapshot().status().code() == StatusCode::kNotSupported) {
    return {};
  }
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const bool start = script.calls[i].kind == CallKind::kStart;
    if (start && !right->Reload()) {
      return Violation(After(script, i, "its state is refused"));
    }
    const Answer a = PlayPlain(*left, script, i);
    // A snapshot changes nothing, at any time.
    const Result<CacheState> state = right->cache().Snapshot();
    const Answer b = PlayPlain(*right, script, i);
    if (a != b || !state.ok()) {
      return Violation(After(script, i, ToText(a) + ", restored " + ToText(b)));
    }
    if (!AtRest(script, i)) continue;
    ++result.judged;
    auto wrong = Compare(*left, *right, Alike::kTokens, 0);
    if (!wrong && left->Show().cells != right->Show().cells) {
      wrong = "the cells differ";
    }
    if (wrong)
      return Violation(After(script, i, "with a restored cache: " + *wrong));
  }
  return result;
}

}  // namespace

std::vector<Law> StorageLaws() {
  return {
      {"placement_is_invisible",
       "Caches of contiguous and scatter placement give the same "
       "answers and views, apart from the cells.",
       "S9, S10, S53", PlacementIsInvisible},
      {"defrag_is_invisible",
       "A cache with room to spare, where nothing is ever moved, shows the "
       "same.",
       "S11", DefragIsInvisible},
      {"layouts",
       "Permuted and tiled V, padding, the mask's dtype and gaps "
       "between the elements of a Put do not change what is seen.",
       "S14, S22, S23", Layouts},
      {"padding",
       "Views begin and end at the padding's multiples and span the batch; a "
       "mask is 0 or -inf, extra rows -inf.",
       "S14, S15", Padding, kNeedsCells | kNeedsTokens},
      {"rounding",
       "A row comes back as it was put, bit for bit; f32 rows in a narrower "
       "cache rounded once, as dtypes.md says.",
       "S22, S35", Rounding, kNeedsCells | kNeedsTokens},
      {"poison_never_shows",
       "Rows that are written over free cells are never seen.", "S13, S20, S52",
       PoisonNeverShows, kNeedsPoison | kNeedsCells | kNeedsReserve},
      {"cell_order", "The order of the cells does not change attention.",
       "S14, S54", CellOrder, kNeedsCells},
      {"wrapper_parts",
       "Each cache of a wrapper shows what it shows alone, and all resume or "
       "none.",
       "S41, S42, S43, S44, S45", WrapperParts, kNeedsCells},
      {"snapshot_is_all",
       "A cache that is restored from a snapshot continues as if nothing had "
       "happened.",
       "S55", SnapshotIsAll, kNeedsSnapshot},
  };
}

}  // namespace kvtwin::props
