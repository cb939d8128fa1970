#include "kvtwin/save.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/huge_pages.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "core/save/file.h"
#include "core/save/part_file.h"
#include "core/state_checks.h"
#include "core/threads.h"

namespace kvtwin {
namespace {

static_assert(std::endian::native == std::endian::little,
              "kvtwin needs a little-endian processor");
static_assert(sizeof(CellEntry) == 3 * sizeof(std::int32_t));

constexpr std::string_view kVersion = "2";
constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kHeaderMax = std::size_t{16} << 20;

// S56 defines the format of the file.

// The names of row dtypes in safetensors, in the order of DType. safetensors
// has no block dtypes: blocks are bytes, and the metadata has their dtype.
constexpr std::array<std::string_view, 4> kTypeNames = {"F32", "F16", "BF16",
                                                        "F8_E4M3"};
constexpr std::string_view kBytes = "U8";

// A tensor of the file. A list of pieces is in the order of the file.
struct Piece {
  std::string name;
  std::string_view dtype;
  std::vector<std::int64_t> shape;  // Last dimension fastest.
  std::span<const std::byte> bytes;
};

void AddTensor(std::string name, const DenseTensor& tensor,
               std::vector<Piece>& pieces) {
  const Shape& shape = tensor.shape;
  const auto type = AsSize(tensor.dtype);
  const bool known = type < kTypeNames.size();
  pieces.push_back({std::move(name),
                    known ? kTypeNames[type] : kBytes,
                    {shape[3], shape[2], shape[1],
                     known ? shape[0] : RunBytes(tensor.dtype, shape[0])},
                    tensor.bytes});
}

void AddPieces(const CacheState& state, const std::string& path,
               std::vector<Piece>& pieces) {
  pieces.push_back({fmt::format("{}cells", path),
                    "I32",
                    {std::ssize(state.cells), 3},
                    std::as_bytes(std::span(state.cells))});
  for (const auto& [layer, rows] : state.layers) {
    const std::string name = fmt::format("{}layers.{}.", path, layer);
    AddTensor(fmt::format("{}key", name), rows.key, pieces);
    AddTensor(fmt::format("{}value", name), rows.value, pieces);
  }
  for (std::size_t i = 0; i < state.caches.size(); ++i) {
    AddPieces(state.caches[i], fmt::format("{}caches.{}.", path, i), pieces);
  }
}

// Adds an encoder's state that is not in tensors, as "path.encoder", and the
// dtype of each tensor of blocks, under its name.
void AddMetadata(const CacheState& state, const std::string& path,
                 std::string& text) {
  text += fmt::format(R"(,"{}encoder":"{} {} {}")", path, state.cached ? 1 : 0,
                      state.position, state.next_position);
  for (const auto& [layer, rows] : state.layers) {
    for (const auto& [name, tensor] :
         {std::pair("key", &rows.key), std::pair("value", &rows.value)}) {
      if (!IsBlockDType(tensor->dtype)) continue;
      text += fmt::format(R"(,"{}layers.{}.{}":"{}")", path, layer, name,
                          DTypeName(tensor->dtype));
    }
  }
  for (std::size_t i = 0; i < state.caches.size(); ++i) {
    AddMetadata(state.caches[i], fmt::format("{}caches.{}.", path, i), text);
  }
}

// Returns the header, which is JSON, padded to a multiple of 8 bytes.
std::string HeaderOf(const CacheState& state, std::string_view model,
                     const std::vector<Piece>& pieces, std::uint64_t checksum) {
  std::string text = fmt::format(
      R"({{"__metadata__":{{"kvtwin_state":"{}","model":{},"xxh3":"{:016x}")",
      kVersion, JsonString(std::string(model)), checksum);
  AddMetadata(state, "", text);
  text += '}';
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    text += fmt::format(
        R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
        piece.name, piece.dtype, fmt::join(piece.shape, ","), at,
        at + piece.bytes.size());
    at += piece.bytes.size();
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

// Returns the header with its checksum, which covers the checksums of the
// pieces and the header with checksum 0.
std::string HeaderOf(const CacheState& state, std::string_view model,
                     const std::vector<Piece>& pieces,
                     const std::vector<std::uint64_t>& checksums) {
  const std::string bare = HeaderOf(state, model, pieces, 0);
  const auto all = std::as_bytes(std::span(checksums));
  return HeaderOf(state, model, pieces,
                  XXH3_64bits_withSeed(bare.data(), bare.size(),
                                       XXH3_64bits(all.data(), all.size())));
}

// Calls does(i) for all i < count. If the calls handle many bytes, it uses a
// few threads, however many processors there are, because the calls mostly wait
// for a disk. An exception of a call is rethrown here.
template <class Does>
void ForEachInParallel(std::size_t count, std::size_t bytes, const Does& does) {
  constexpr std::size_t kMany = std::size_t{1} << 20;
  const std::size_t max = bytes < kMany ? 1 : std::min<std::size_t>(count, 8);
  std::atomic<std::size_t> next = 0;
  OnThreads(AsInt(max), [&] {
    for (std::size_t i = next++; i < count; i = next++) does(i);
  });
}

// Returns the checksum of `size` bytes. next(begin, size) returns each part in
// turn. If it returns null, Checksum returns no value. A part is small enough
// to stay in the processor's caches until it is checked.
template <class Next>
std::optional<std::uint64_t> Checksum(std::size_t size, const Next& next) {
  constexpr std::size_t kPart = std::size_t{1} << 20;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t at = 0; at < size; at += kPart) {
    const std::size_t part = std::min(kPart, size - at);
    const std::byte* bytes = next(at, part);
    if (bytes == nullptr) return std::nullopt;
    XXH3_64bits_update(&state, bytes, part);
  }
  return XXH3_64bits_digest(&state);
}

// Writes ----------------------------------------------------------------------

// Writes bytes at `at`. Several threads may call it at once. Returns false if
// the bytes cannot be written.
using WriteFn =
    std::function<bool(std::size_t at, std::span<const std::byte> bytes)>;

// Writes the state in the format S56. `pieces` are the pieces of `state`.
bool WriteState(const CacheState& state, std::string_view model,
                const std::vector<Piece>& pieces, const WriteFn& write) {
  const std::uint64_t length = HeaderOf(state, model, pieces, 0).size();
  std::vector<std::size_t> begins;
  std::size_t end = kLengthBytes + length;
  for (const Piece& piece : pieces) {
    begins.push_back(end);
    end += piece.bytes.size();
  }
  std::vector<std::uint64_t> checksums(pieces.size());
  std::atomic<bool> done = true;
  ForEachInParallel(pieces.size(), end, [&](std::size_t i) {
    const std::span<const std::byte> bytes = pieces[i].bytes;
    const auto checksum =
        Checksum(bytes.size(), [&](std::size_t at, std::size_t size) {
          const auto part = bytes.subspan(at, size);
          return done && write(begins[i] + at, part) ? part.data() : nullptr;
        });
    if (!checksum) done = false;
    checksums[i] = checksum.value_or(0);
  });
  const std::string header = HeaderOf(state, model, pieces, checksums);
  return done && write(0, std::as_bytes(std::span(&length, 1))) &&
         write(kLengthBytes, std::as_bytes(std::span(header)));
}

// Names of tensors, and the state they belong to ------------------------------

bool ReadWhole(std::string_view text, int& number) {
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// Removes the text up to the next dot, and the dot, from `name`; returns the
// text.
std::string_view TakeWord(std::string_view& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  const std::string_view word = name.substr(0, dot);
  name.remove_prefix(std::min(dot + 1, name.size()));
  return word;
}

// Returns the state that a name belongs to, and removes "caches.N." from the
// name. Makes the state if N is the next number; null if N is larger.
CacheState* StateOf(std::string_view& name, CacheState& state) {
  if (!name.starts_with("caches.")) return &state;
  TakeWord(name);
  int number = -1;
  if (!ReadWhole(TakeWord(name), number) || number < 0) return nullptr;
  const std::size_t at = AsSize(number);
  if (at > state.caches.size()) return nullptr;
  if (at == state.caches.size()) state.caches.emplace_back();
  return &state.caches[at];
}

struct TensorHeader {
  std::string dtype;
  std::vector<double> shape;
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::optional<TensorHeader> ReadTensorHeader(const JsonValue& value,
                                             std::size_t data_bytes) {
  const JsonValue* dtype = value.Find("dtype");
  const JsonValue* shape = value.Find("shape");
  const JsonValue* offsets = value.Find("data_offsets");
  if (dtype == nullptr || shape == nullptr || offsets == nullptr ||
      dtype->type != JsonValue::Type::kString || !shape->IsNumbers() ||
      !offsets->IsNumbers() || offsets->numbers.size() != 2) {
    return std::nullopt;
  }
  const auto max = static_cast<double>(data_bytes);
  const double begin = offsets->numbers[0];
  const double end = offsets->numbers[1];
  if (!(begin >= 0 && begin <= end && end <= max)) return std::nullopt;
  return TensorHeader{dtype->text, shape->numbers,
                      static_cast<std::size_t>(begin),
                      static_cast<std::size_t>(end)};
}

// Returns the layer's tensor of that name; null if the name is unknown.
DenseTensor* TensorOf(std::string_view name, CacheState& state) {
  int layer = -1;
  if (TakeWord(name) != "layers" || !ReadWhole(TakeWord(name), layer)) {
    return nullptr;
  }
  if (name == "key") return &state.layers[layer].key;
  return name == "value" ? &state.layers[layer].value : nullptr;
}

// Fills in everything except the bytes. Returns false if the header is wrong.
bool FillTensor(const TensorHeader& header, DenseTensor& tensor) {
  if (header.shape.size() != 4) return false;
  double size = 1;
  if (header.dtype != kBytes) {
    const auto type = std::ranges::find(kTypeNames, header.dtype);
    if (type == kTypeNames.end()) return false;
    tensor.dtype = static_cast<DType>(type - kTypeNames.begin());
    size = static_cast<double>(SizeOf(tensor.dtype));
  } else if (!IsBlockDType(tensor.dtype)) {
    return false;
  }
  for (std::size_t i = 0; i < 4; ++i) {
    const double extent = header.shape[3 - i];
    if (!(extent >= 0 && extent <= 2147483647)) return false;
    tensor.shape[i] = static_cast<std::int64_t>(extent);
    size *= extent;
  }
  if (size != static_cast<double>(header.end - header.begin)) return false;
  if (IsBlockDType(tensor.dtype)) {
    const std::int64_t block = RunBytes(tensor.dtype, kBlockElements);
    if (tensor.shape[0] % block != 0) return false;
    tensor.shape[0] = tensor.shape[0] / block * kBlockElements;
  }
  return true;
}

// The destination of a tensor's bytes of the file.
struct Target {
  std::size_t begin = 0;
  std::size_t size = 0;
  std::vector<CellEntry>* cells = nullptr;  // Has its final size.
  std::vector<std::byte>* rows = nullptr;   // Or rows: grow with each part.

  std::span<std::byte> Part(std::size_t at, std::size_t bytes) const {
    if (cells != nullptr) {
      return std::as_writable_bytes(std::span(*cells)).subspan(at, bytes);
    }
    rows->resize(at + bytes);
    return std::span(*rows).last(bytes);
  }
};

// Returns the destination of the named tensor, and sets the tensor's dtype and
// shape. Returns no value if the name or the header is wrong.
std::optional<Target> TargetOf(std::string_view name,
                               const TensorHeader& header, CacheState& all) {
  CacheState* state = StateOf(name, all);
  if (state == nullptr) return std::nullopt;
  Target target = {header.begin, header.end - header.begin};
  if (name == "cells") {
    if (target.size % sizeof(CellEntry) != 0) return std::nullopt;
    state->cells.resize(target.size / sizeof(CellEntry));
    target.cells = &state->cells;
    return target;
  }
  DenseTensor* tensor = TensorOf(name, *state);
  if (tensor == nullptr || !FillTensor(header, *tensor)) return std::nullopt;
  target.rows = &tensor->bytes;
  return target;
}

bool FillMetadata(std::string_view name, std::string_view text,
                  CacheState& all) {
  if (name == "kvtwin_state") return text == kVersion;
  if (name == "model") return true;
  if (name == "xxh3") return true;  // Checked later, with the whole header.
  CacheState* state = StateOf(name, all);
  if (state == nullptr) return false;
  if (name != "encoder") {
    DenseTensor* tensor = TensorOf(name, *state);
    const auto dtype = DTypeFromName(text);
    if (tensor == nullptr || !dtype || !IsBlockDType(*dtype)) return false;
    tensor->dtype = *dtype;
    return true;
  }
  std::array<int, 3> numbers = {};
  for (int& number : numbers) {
    const std::size_t blank = std::min(text.find(' '), text.size());
    if (!ReadWhole(text.substr(0, blank), number)) return false;
    text.remove_prefix(std::min(blank + 1, text.size()));
  }
  state->cached = numbers[0] != 0;
  state->position = numbers[1];
  state->next_position = numbers[2];
  return true;
}

Status Damaged(std::string_view what) {
  return Invalid("this is not a state of a cache: {}", what);
}

// Reads -----------------------------------------------------------------------

// Reads the bytes at `at`. Several threads may call it at once. Returns false
// if the bytes cannot be read.
using ReadFn = std::function<bool(std::size_t at, std::span<std::byte> bytes)>;

struct Entry {
  std::string_view name;
  TensorHeader header;
};

// Reads the tensors of a header, and the metadata into the state.
Status ReadEntries(const JsonValue& object, std::size_t data_bytes,
                   std::vector<Entry>& entries, CacheState& state) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < object.keys.size(); ++i) {
    const std::string& key = object.keys[i];
    const JsonValue& value = object.items[i];
    if (key == "__metadata__") {
      for (std::size_t m = 0; m < value.keys.size(); ++m) {
        if (!FillMetadata(value.keys[m], value.items[m].text, state)) {
          return Damaged(fmt::format("its metadata has a wrong '{}'",
                                     Printable(value.keys[m], 60)));
        }
      }
      continue;
    }
    const auto header = ReadTensorHeader(value, data_bytes);
    std::string_view name = key;
    if (header) bytes += header->end - header->begin;
    if (!header || bytes > data_bytes || StateOf(name, state) == nullptr) {
      return Damaged(
          fmt::format("its tensor '{}' is wrong", Printable(key, 60)));
    }
    entries.push_back({key, *header});
  }
  if (bytes != data_bytes) return Damaged("it has other bytes as well");
  return {};
}

// Fills the state's tensors. Sets `checksums` to the tensors' checksums, in the
// order of `entries`.
Status ReadTensors(const std::vector<Entry>& entries, std::size_t data_begin,
                   const ReadFn& read, CacheState& state,
                   std::vector<std::uint64_t>& checksums) {
  std::vector<Target> targets;
  std::set<const void*> places;
  std::size_t bytes = 0;
  for (const auto& [name, header] : entries) {
    const auto target = TargetOf(name, header, state);
    const void* place = nullptr;
    if (target && target->cells != nullptr) place = target->cells;
    if (target && target->rows != nullptr) place = target->rows;
    if (!target || !places.insert(place).second) {
      return Damaged(
          fmt::format("its tensor '{}' is wrong", Printable(name, 60)));
    }
    targets.push_back(*target);
    bytes += target->size;
  }
  checksums.resize(targets.size());
  std::atomic<bool> done = true;
  ForEachInParallel(targets.size(), bytes, [&](std::size_t i) {
    const Target& target = targets[i];
    if (target.rows != nullptr) ReserveHugePages(target.size, *target.rows);
    const auto checksum =
        Checksum(target.size, [&](std::size_t at, std::size_t size) {
          const auto part = target.Part(at, size);
          const bool has = done && read(data_begin + target.begin + at, part);
          return has ? part.data() : nullptr;
        });
    if (!checksum) done = false;
    checksums[i] = checksum.value_or(0);
  });
  return done ? Status() : Damaged("it cannot be read to its end");
}

// Reads and parses the header. If it returns ok, the metadata has the version
// and the model.
Status ReadHeader(std::size_t size, const ReadFn& read, std::string& header,
                  JsonValue& object) {
  std::uint64_t length = 0;
  if (size < kLengthBytes ||
      !read(0, std::as_writable_bytes(std::span(&length, 1)))) {
    return Damaged("it is too short");
  }
  if (length > std::min(size - kLengthBytes, kHeaderMax)) {
    return Damaged(fmt::format("its header is of {} bytes, all of it of {}",
                               length, size));
  }
  header.assign(length, ' ');
  if (!read(kLengthBytes, std::as_writable_bytes(std::span(header)))) {
    return Damaged("it is too short");
  }
  if (std::string why = ParseJsonLine(header, object); !why.empty()) {
    return Damaged(why);
  }
  const JsonValue* metadata = object.Find("__metadata__");
  for (const char* name : {"kvtwin_state", "model"}) {
    if (metadata != nullptr && metadata->Find(name) != nullptr) continue;
    return Damaged(fmt::format("its metadata has no '{}'", name));
  }
  const std::string& version = metadata->Find("kvtwin_state")->text;
  if (version == kVersion) return {};
  return Damaged(fmt::format("its version is '{}', not '{}'",
                             Printable(version, 60), kVersion));
}

const std::string& ModelIn(const JsonValue& object) {
  return object.Find("__metadata__")->Find("model")->text;
}

Result<CacheState> ReadState(std::size_t size, const ReadFn& read,
                             std::string_view model) {
  std::string header;
  JsonValue object;
  Status status = CheckModel(model);
  if (status.ok()) status = ReadHeader(size, read, header, object);
  if (!status.ok()) return status;
  if (ModelIn(object) != model) {
    return Invalid("the state is of model '{}', not of '{}'",
                   Printable(ModelIn(object), 200), Printable(model, 200));
  }
  const std::size_t data_begin = kLengthBytes + header.size();
  CacheState state;
  std::vector<Entry> entries;
  std::vector<std::uint64_t> checksums;
  status = ReadEntries(object, size - data_begin, entries, state);
  if (status.ok()) {
    status = ReadTensors(entries, data_begin, read, state, checksums);
  }
  if (!status.ok()) return status;
  // The state, written again, must give the same bytes. The same header means
  // the same bytes, because the header has the checksum of everything.
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  if (pieces.size() != checksums.size() ||
      HeaderOf(state, model, pieces, checksums) != header) {
    return Damaged("its checksum does not hold");
  }
  if (status = CheckState(state); !status.ok()) return status;
  return state;
}

// Returns the result of read(size, read_fn); errors name the file.
template <class Value, class Read>
Result<Value> ReadFile(const std::string& path, const Read& read) {
  Status status = CheckPath(path);
  if (!status.ok()) return status;
  // O_NONBLOCK: open must not wait for the writer of a pipe.
  const File file(path, O_RDONLY | O_NONBLOCK);
  struct stat info = {};
  if (!file.is_open() || ::fstat(file.descriptor(), &info) != 0) {
    return SystemError("cannot be read", path);
  }
  status = CheckRegular(path, info.st_mode);
  if (!status.ok()) return status;
  Result<Value> value = read(AsSize(info.st_size),
                             [&](std::size_t at, std::span<std::byte> bytes) {
                               return file.Read(at, bytes);
                             });
  if (file.error() != 0) {
    return SystemError("cannot be read", path, file.error());
  }
  if (value.ok()) return value;
  return Status(
      value.status().code(),
      fmt::format("'{}': {}", Printable(path, 200), value.status().message()));
}

}  // namespace

std::vector<std::byte> StateToBytes(const CacheState& state,
                                    std::string_view model) {
  if (!HasWholeTensors(state) || !CheckModel(model).ok()) return {};
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  std::size_t size = kLengthBytes + HeaderOf(state, model, pieces, 0).size();
  for (const Piece& piece : pieces) size += piece.bytes.size();
  std::vector<std::byte> all(size);
  WriteState(state, model, pieces,
             [&](std::size_t at, std::span<const std::byte> bytes) {
               std::copy(bytes.begin(), bytes.end(), IteratorAt(all, at));
               return true;
             });
  return all;
}

Result<CacheState> StateFromBytes(std::span<const std::byte> bytes,
                                  std::string_view model) {
  return ReadState(
      bytes.size(),
      [&](std::size_t at, std::span<std::byte> to) {
        std::copy_n(IteratorAt(bytes, at), to.size(), to.begin());
        return true;
      },
      model);
}

Status SaveState(const CacheState& state, const std::string& path,
                 std::string_view model) {
  Status status = CheckPath(path);
  if (status.ok()) status = CheckState(state);
  if (status.ok()) status = CheckModel(model);
  if (!status.ok()) return status;
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  JsonValue ignored;
  const std::string header = HeaderOf(state, model, pieces, 0);
  if (header.size() > kHeaderMax || !ParseJsonLine(header, ignored).empty()) {
    return Invalid(
        "the state has more layers than can be read back, or the "
        "model's name is too long");
  }
  PartFile part(path);
  status = part.Make();
  if (!status.ok()) return status;
  const bool written =
      WriteState(state, model, pieces,
                 [&](std::size_t at, std::span<const std::byte> bytes) {
                   return part.file().Write(at, bytes);
                 });
  if (written) return part.Rename();
  return SystemError("cannot be written", path, part.file().error());
}

Result<CacheState> LoadState(const std::string& path, std::string_view model) {
  return ReadFile<CacheState>(path, [&](std::size_t size, const ReadFn& read) {
    return ReadState(size, read, model);
  });
}

Result<std::string> ModelOf(const std::string& path) {
  return ReadFile<std::string>(
      path, [](std::size_t size, const ReadFn& read) -> Result<std::string> {
        std::string header;
        JsonValue object;
        Status status = ReadHeader(size, read, header, object);
        if (!status.ok()) return status;
        return ModelIn(object);
      });
}

}  // namespace kvtwin
