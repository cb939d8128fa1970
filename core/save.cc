#include "kvtwin/save.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/json_line.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

static_assert(std::endian::native == std::endian::little);
static_assert(sizeof(CellEntry) == 3 * sizeof(std::int32_t));

constexpr std::string_view kVersion = "1";
constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kHeaderMax = std::size_t{16} << 20;

// As safetensors calls row dtypes, in the order of DType. It has no blocks:
// they are bytes, and which ones is in the metadata.
constexpr std::array<std::string_view, 4> kTypeNames = {"F32", "F16", "BF16",
                                                        "F8_E4M3"};
constexpr std::string_view kBytes = "U8";

// A piece of the file, in its order.
struct Piece {
  std::string name;
  std::string_view dtype;
  std::vector<std::int64_t> shape;  // Last dimension fastest.
  std::span<const std::byte> bytes;
};

void AddTensor(std::string name, const DenseTensor& tensor,
               std::vector<Piece>& pieces) {
  const Shape& shape = tensor.shape;
  const bool blocks = IsBlockDType(tensor.dtype);
  pieces.push_back(
      {std::move(name),
       blocks ? kBytes : kTypeNames[static_cast<std::size_t>(tensor.dtype)],
       {shape[3], shape[2], shape[1],
        blocks ? RunBytes(tensor.dtype, shape[0]) : shape[0]},
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

// Of an encoder, "path.encoder": what is not in tensors. Of a tensor of blocks,
// its dtype by its name.
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

// All but the tensors: their number of bytes, padded to lines of 8, and JSON.
std::string HeaderOf(const CacheState& state, const std::vector<Piece>& pieces,
                     std::uint64_t checksum) {
  std::string text =
      fmt::format(R"({{"__metadata__":{{"kvtwin_state":"{}","xxh3":"{:016x}")",
                  kVersion, checksum);
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

// With the checksum of the tensors, and of the header as it is without one.
std::string HeaderOf(const CacheState& state,
                     const std::vector<Piece>& pieces) {
  std::uint64_t checksum = 0;
  for (const Piece& piece : pieces) {
    checksum =
        XXH3_64bits_withSeed(piece.bytes.data(), piece.bytes.size(), checksum);
  }
  const std::string bare = HeaderOf(state, pieces, 0);
  checksum = XXH3_64bits_withSeed(bare.data(), bare.size(), checksum);
  return HeaderOf(state, pieces, checksum);
}

// Reads
// ------------------------------------------------------------------------

bool ReadWhole(std::string_view text, int& number) {
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// The text up to the next dot, which is taken away with it.
std::string_view TakeWord(std::string_view& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  const std::string_view word = name.substr(0, dot);
  name.remove_prefix(std::min(dot + 1, name.size()));
  return word;
}

// The state that a name is about, made if it is the next; null if it is none.
CacheState* StateOf(std::string_view& name, CacheState& state) {
  if (!name.starts_with("caches.")) return &state;
  TakeWord(name);
  int number = -1;
  if (!ReadWhole(TakeWord(name), number)) return nullptr;
  const auto at = static_cast<std::size_t>(number);  // None if negative.
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
  const auto most = static_cast<double>(data_bytes);
  const double begin = offsets->numbers[0];
  const double end = offsets->numbers[1];
  if (!(begin >= 0 && begin <= end && end <= most)) return std::nullopt;
  return TensorHeader{dtype->text, shape->numbers,
                      static_cast<std::size_t>(begin),
                      static_cast<std::size_t>(end)};
}

// The layer's tensor that a name is about; null if it is none.
DenseTensor* TensorOf(std::string_view name, CacheState& state) {
  int layer = -1;
  if (TakeWord(name) != "layers" || !ReadWhole(TakeWord(name), layer)) {
    return nullptr;
  }
  if (name == "key") return &state.layers[layer].key;
  return name == "value" ? &state.layers[layer].value : nullptr;
}

bool FillTensor(const TensorHeader& header, std::span<const std::byte> bytes,
                DenseTensor& tensor) {
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
  if (size != static_cast<double>(bytes.size())) return false;
  if (IsBlockDType(tensor.dtype)) {
    const std::int64_t block = RunBytes(tensor.dtype, kBlockElements);
    if (tensor.shape[0] % block != 0) return false;
    tensor.shape[0] = tensor.shape[0] / block * kBlockElements;
  }
  tensor.bytes.assign(bytes.begin(), bytes.end());
  return true;
}

// Whether the tensor of that name is in the state now.
bool Fill(std::string_view name, const TensorHeader& header,
          std::span<const std::byte> bytes, CacheState& all) {
  CacheState* state = StateOf(name, all);
  if (state == nullptr) return false;
  if (name == "cells") {
    if (bytes.size() % sizeof(CellEntry) != 0) return false;
    state->cells.resize(bytes.size() / sizeof(CellEntry));
    if (!bytes.empty()) {
      std::memcpy(state->cells.data(), bytes.data(), bytes.size());
    }
    return true;
  }
  DenseTensor* tensor = TensorOf(name, *state);
  return tensor != nullptr && FillTensor(header, bytes, *tensor);
}

bool FillMetadata(std::string_view name, std::string_view text,
                  CacheState& all) {
  if (name == "kvtwin_state") return text == kVersion;
  if (name == "xxh3") return true;  // The header is written again, with it.
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
  return Invalid("this is no state of a cache: {}", what);
}

// Files
// ------------------------------------------------------------------------

Status SystemError(std::string_view what, const std::string& path) {
  return Untimely("'{}' {}: {}", Printable(path, 200), what,
                  std::strerror(errno));
}

class File {
 public:
  File(const std::string& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  bool Write(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return true;
  }

  // Up to so many bytes.
  std::vector<std::byte> Read(std::size_t most) const {
    std::vector<std::byte> bytes(most);
    std::size_t at = 0;
    ssize_t read = 1;
    while (read > 0) {
      read = ::read(descriptor_, bytes.data() + at, most - at);
      at += static_cast<std::size_t>(std::max<ssize_t>(read, 0));
    }
    bytes.resize(at);
    return bytes;
  }

 private:
  int descriptor_;
};

}  // namespace

std::vector<std::byte> StateToBytes(const CacheState& state) {
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  const std::string header = HeaderOf(state, pieces);
  const std::uint64_t length = header.size();
  std::vector<std::byte> bytes(kLengthBytes);
  std::memcpy(bytes.data(), &length, kLengthBytes);
  const auto append = [&](std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
  };
  append(std::as_bytes(std::span(header)));
  for (const Piece& piece : pieces) append(piece.bytes);
  return bytes;
}

Result<CacheState> StateFromBytes(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  if (bytes.size() < kLengthBytes) return Damaged("it is too short");
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > std::min(bytes.size() - kLengthBytes, kHeaderMax)) {
    return Damaged("its header is too long");
  }
  const auto data = bytes.subspan(kLengthBytes + length);
  const std::string header(
      reinterpret_cast<const char*>(bytes.data() + kLengthBytes), length);
  JsonValue object;
  if (std::string why = ParseJsonLine(header, object); !why.empty()) {
    return Damaged(why);
  }
  CacheState state;
  std::size_t filled = 0;
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
    const auto tensor = ReadTensorHeader(value, data.size());
    if (tensor) filled += tensor->end - tensor->begin;
    if (!tensor || filled > data.size() ||
        !Fill(key, *tensor,
              data.subspan(tensor->begin, tensor->end - tensor->begin),
              state)) {
      return Damaged(
          fmt::format("its tensor '{}' is wrong", Printable(key, 60)));
    }
  }
  // What is read must be what is written, to the byte: so the checksum holds.
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  if (filled != data.size() || HeaderOf(state, pieces) != header) {
    return Damaged("its checksum does not hold");
  }
  return state;
}

Status SaveState(const CacheState& state, const std::string& path) {
  std::vector<Piece> pieces;
  AddPieces(state, "", pieces);
  const std::string header = HeaderOf(state, pieces);
  const std::uint64_t length = header.size();
  const std::string written = fmt::format("{}.{}.part", path, ::getpid());
  {
    const File file(written, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.is_open()) return SystemError("cannot be made", written);
    bool done = file.Write(std::as_bytes(std::span(&length, 1)));
    done &= file.Write(std::as_bytes(std::span(header)));
    for (const Piece& piece : pieces) done &= file.Write(piece.bytes);
    done &= ::fsync(file.descriptor()) == 0;
    if (!done) {
      const Status status = SystemError("cannot be written", written);
      ::unlink(written.c_str());
      return status;
    }
  }
  if (::rename(written.c_str(), path.c_str()) != 0) {
    const Status status = SystemError("cannot be renamed", written);
    ::unlink(written.c_str());
    return status;
  }
  // So that the name is on disk too, where folders can be synced.
  const File folder(std::filesystem::path(path).parent_path() / ".",
                    O_RDONLY | O_DIRECTORY);
  static_cast<void>(::fsync(folder.descriptor()));
  return {};
}

Result<CacheState> LoadState(const std::string& path) {
  const File file(path, O_RDONLY);
  if (!file.is_open()) return SystemError("cannot be read", path);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) return Untimely("'{}' is no file", Printable(path, 200));
  return StateFromBytes(file.Read(bytes));
}

}  // namespace kvtwin
