#include "props/backend/c_conversions.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <new>
#include <string>

#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

constexpr std::array<kvtwin_status, 7> kStatuses = {
    KVTWIN_OK,           KVTWIN_CACHE_FULL,       KVTWIN_NOT_SUPPORTED,
    KVTWIN_SHARED_CELLS, KVTWIN_INVALID_ARGUMENT, KVTWIN_FAILED_PRECONDITION,
    KVTWIN_DEVICE_ERROR};

// The enums of C++ have the same numbers as those of C.
template <class Cpp, class C>
constexpr bool Same(Cpp cpp, C c) {
  return AsInt(cpp) == AsInt(c);
}
static_assert(Same(DType::kF32, KVTWIN_F32) &&
              Same(DType::kBits, KVTWIN_BITS) &&
              Same(DType::kF8, KVTWIN_F8_E4M3) &&
              Same(Kind::kCausal, KVTWIN_CAUSAL) &&
              Same(Kind::kWrapper, KVTWIN_WRAPPER) &&
              Same(Kind::kHybrid, KVTWIN_HYBRID) &&
              Same(Placement::kScatter, KVTWIN_SCATTER) &&
              Same(VLayout::kTiled, KVTWIN_V_TILED) &&
              Same(ShiftKind::kRope, KVTWIN_SHIFT_ROPE) &&
              Same(ShiftKind::kCustom, KVTWIN_SHIFT_CUSTOM) &&
              Same(PagedLayout::kHeadMajor, KVTWIN_HEAD_MAJOR));
static_assert(kOpenEnd == KVTWIN_OPEN_END);
static_assert(sizeof(int) == sizeof(std::int32_t));

// Reads one of the enum's first `count` values.
template <class To, class From>
Status ReadEnum(std::string_view name, const From& from, std::size_t count,
                To& to) {
  const int raw = RawEnum(from);
  if (raw < 0 || AsSize(raw) >= count) {
    return Invalid("{} is {}, it must be 0 to {}", name, raw, count - 1);
  }
  to = static_cast<To>(raw);
  return {};
}

Status ReadVDType(const kvtwin_dtype& from, std::optional<DType>& to) {
  if (RawEnum(from) == KVTWIN_AS_K) return {};
  return ReadEnum("v_dtype", from, kDTypeNames.size(), to.emplace());
}

template <class To, class From>
To CEnum(From from) {
  return static_cast<To>(AsInt(from));
}

Result<Shift> ShiftFromC(const kvtwin_shift& from) {
  Shift shift;
  Status status =
      ReadEnum("shift.kind", from.kind, KVTWIN_SHIFT_CUSTOM + 1, shift.kind);
  if (!status.ok()) return status;
  shift.rope.pairing =
      from.rope_halves != 0 ? Rope::Pairing::kHalves : Rope::Pairing::kAdjacent;
  shift.rope.dims = from.rope_dims;
  shift.rope.base = from.rope_base;
  shift.rope.scale = from.rope_scale;
  if (shift.kind != ShiftKind::kCustom || from.fn == nullptr) return shift;
  shift.fn = [fn = from.fn, user = from.user](int layer, std::int32_t offset,
                                              int k_head_dim, int kv_heads,
                                              std::span<float> key) -> Status {
    const int answer =
        fn(user, layer, offset, k_head_dim, kv_heads, key.data());
    if (answer == KVTWIN_OK) return {};
    return {StatusFromC(answer),
            fmt::format("the shift function answered {}", answer)};
  };
  return shift;
}

Result<CacheSpec> SpecFromC(const kvtwin_cache_params& params, bool inner) {
  CacheSpec spec;
  Status status = ReadEnum("kind", params.kind, kKindNames.size(), spec.kind);
  if (status.ok()) {
    status = ReadEnum("placement", params.placement, 2, spec.placement);
  }
  if (!status.ok()) return status;
  if (params.window != -1) spec.window = params.window;
  if (params.memory != -1) spec.memory = params.memory;
  spec.chunk = params.chunk;
  spec.checkpoint_every = params.checkpoint_every;
  spec.checkpoints = params.checkpoints;
  spec.pins = params.pins;
  spec.drafts = params.drafts;
  Result<Shift> shift = ShiftFromC(params.shift);
  if (!shift.ok()) return shift.status();
  spec.shift = std::move(*shift);
  // A wrapper in a wrapper is refused, whatever it contains.
  if (inner || !IsWrapper(spec.kind)) return spec;
  const auto list = ListFromC("caches", params.caches, params.cache_count);
  if (!list.ok()) return list.status();
  const auto* at = reinterpret_cast<const std::byte*>(params.caches);
  for (int i = 0; i < params.cache_count; ++i) {
    const std::string name = fmt::format("caches[{}]", i);
    const auto* entry = reinterpret_cast<const kvtwin_cache_params*>(at);
    kvtwin_cache_params cache = DefaultCacheParams();
    status = ReadStruct(name, entry, cache);
    if (!status.ok()) return status;
    Result<CacheSpec> made = SpecFromC(cache, /*inner=*/true);
    if (!made.ok()) {
      return Status(made.status().code(), name + "." + made.status().message());
    }
    spec.caches.push_back(std::move(*made));
    at += cache.size;
  }
  return spec;
}

}  // namespace

kvtwin_status CStatus(StatusCode code) { return At(kStatuses, code); }

std::string ErrorName(int status) {
  switch (status) {
    case KVTWIN_INTERNAL:
      return "internal";
    case KVTWIN_OUT_OF_MEMORY:
      return "out_of_memory";
    case KVTWIN_DEVICE_ERROR:
      return "device_error";
    default:
      return fmt::format("{}", status);
  }
}

std::string PrintableLines(std::string_view message) {
  message = message.substr(0, 500);
  std::string text;
  for (std::size_t begin = 0; begin <= message.size();) {
    const std::size_t end = std::min(message.find('\n', begin), message.size());
    if (begin > 0) text += '\n';
    text += Printable(message.substr(begin, end - begin), end - begin);
    begin = end + 1;
  }
  return text;
}

StatusCode StatusFromC(int status) {
  for (std::size_t i = 0; i < kStatuses.size(); ++i) {
    if (kStatuses[i] == status) return static_cast<StatusCode>(i);
  }
  return StatusCode::kNotSupported;
}

Status NeedAll(
    std::initializer_list<std::pair<std::string_view, const void*>> arguments) {
  for (const auto& [name, argument] : arguments) {
    if (argument == nullptr) return Invalid("{} is NULL", name);
  }
  return {};
}

Result<std::size_t> SizeOfStruct(std::string_view name, const void* from,
                                 std::size_t ours) {
  if (Status status = NeedAll({{name, from}}); !status.ok()) return status;
  std::size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  if (size < ours) {
    return Invalid(
        "{}.size is {}, it must be at least {}: set it to its sizeof", name,
        size, ours);
  }
  if (size > kStructBytesMax) {
    return Invalid("{}.size is {}, no struct is that large", name, size);
  }
  return size;
}

Status CheckRest(std::string_view name, const void* from, std::size_t ours,
                 std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(from);
  for (std::size_t i = ours; i < size; ++i) {
    if (bytes[i] == std::byte{0}) continue;
    return Invalid(
        "{} has something in byte {}, of which this version of the library "
        "knows nothing: its {} has {} bytes",
        name, i, name, ours);
  }
  return {};
}

Result<TensorView> TensorFromC(std::string_view name,
                               const kvtwin_tensor* tensor) {
  TensorView view;
  if (tensor == nullptr) return view;
  Status status = ReadEnum(fmt::format("{}.dtype", name), tensor->dtype,
                           kDTypeNames.size(), view.dtype);
  if (!status.ok()) return status;
  view.data = tensor->data;
  std::copy_n(tensor->shape, 4, view.shape.begin());
  std::copy_n(tensor->stride, 4, view.stride.begin());
  if (view.stride != Shape{}) return view;
  // An upper bound on the bytes: no element takes more than a block.
  std::int64_t bytes = 64;
  for (const std::int64_t extent : view.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) {
      return view;
    }
    if (bytes > std::int64_t{1} << 60) return view;
  }
  return DenseView(view.data, view.dtype, view.shape);
}

namespace {

constexpr std::size_t kLoanAlignment = 16;
constexpr std::byte kLoanMark{0x5A};  // Fills the bytes after a copy.

std::size_t PageBytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The latest inaccessible pages, for EndsALoan.
std::array<std::atomic<std::uintptr_t>, 256> last_pages;
std::atomic<std::size_t> last_page;

std::size_t RoundedUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Lender::~Lender() {
  for (const Pages& pages : pages_) {
    munmap(pages.begin, pages.usable + PageBytes());
  }
}

const std::byte* Lender::Copy(const char* name,
                              std::span<const std::byte> bytes) {
  const std::size_t at = loans_.size();
  if (at == pages_.size()) pages_.emplace_back();
  Pages& pages = pages_[at];
  if (pages.usable < bytes.size()) {
    if (pages.begin != nullptr) {
      munmap(pages.begin, pages.usable + PageBytes());
    }
    pages = {nullptr, 2 * RoundedUp(bytes.size(), PageBytes())};
    void* made =
        mmap(nullptr, pages.usable + PageBytes(), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    pages.begin = static_cast<std::byte*>(made);
    std::byte* last = pages.begin + pages.usable;
    mprotect(last, PageBytes(), PROT_NONE);
    last_pages[last_page++ % last_pages.size()] =
        reinterpret_cast<std::uintptr_t>(last);
  }
  const std::size_t room = RoundedUp(bytes.size(), kLoanAlignment);
  std::byte* copy = pages.begin + pages.usable - room;
  std::ranges::copy(bytes, copy);
  std::fill_n(copy + bytes.size(), room - bytes.size(), kLoanMark);
  const std::span<const std::byte> lent(copy, room);
  loans_.push_back({name, lent, HashBytes(copy, room, 0)});
  return copy;
}

kvtwin_tensor Lender::Lend(const char* name, const TensorView& tensor) {
  kvtwin_tensor lent = CTensor(tensor);
  if (tensor.data == nullptr || std::ranges::min(tensor.shape) < 1) return lent;
  const Shape& shape = tensor.shape;
  const auto& stride = tensor.stride;
  std::int64_t bytes =
      IsBlockDType(tensor.dtype)
          ? RunBytes(tensor.dtype, shape[0])
          : RunBytes(tensor.dtype, 1) + (shape[0] - 1) * stride[0];
  for (std::size_t i = 1; i < shape.size(); ++i) {
    bytes += (shape[i] - 1) * stride[i];
  }
  lent.data =
      Copy(name, {static_cast<const std::byte*>(tensor.data), AsSize(bytes)});
  return lent;
}

const char* Lender::Return() {
  const char* wrong = nullptr;
  for (const auto& [name, bytes, hash] : loans_) {
    if (HashBytes(bytes.data(), bytes.size(), 0) != hash) wrong = name;
  }
  loans_.clear();
  return wrong;
}

bool EndsALoan(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return std::ranges::any_of(last_pages, [&](const auto& page) {
    return page != 0 && at >= page && at - page < PageBytes();
  });
}

kvtwin_tensor CTensor(const TensorView& tensor) {
  kvtwin_tensor made{};
  made.data = tensor.data;
  made.dtype = CEnum<kvtwin_dtype>(tensor.dtype);
  std::copy_n(tensor.shape.begin(), 4, made.shape);
  std::copy_n(tensor.stride.begin(), 4, made.stride);
  return made;
}

Result<Batch> BatchFromC(const kvtwin_batch* batch) {
  kvtwin_batch read{};
  Status status =
      ReadStruct("batch", batch, read, offsetof(kvtwin_batch, parents));
  if (!status.ok()) return status;
  const auto positions =
      ListFromC("batch.positions", read.positions, read.tokens);
  if (!positions.ok()) return positions.status();
  const auto sequences =
      ListFromC("batch.sequences", read.sequences, read.tokens);
  if (!sequences.ok()) return sequences.status();
  const auto multimodal =
      ListFromC("batch.multimodal", read.multimodal, read.multimodal_count);
  if (!multimodal.ok()) return multimodal.status();
  const auto parents = ListFromC("batch.parents", read.parents,
                                 read.parents == nullptr ? 0 : read.tokens);
  if (!parents.ok()) return parents.status();
  return Batch{*positions, *sequences, *multimodal, *parents};
}

kvtwin_cache_params DefaultCacheParams() {
  kvtwin_cache_params params{};
  params.size = sizeof(params);
  params.window = -1;
  params.memory = -1;
  params.shift.rope_base = Rope().base;
  params.shift.rope_scale = Rope().scale;
  params.cache_padding = 1;
  params.mask_batch_padding = 1;
  params.v_dtype = KVTWIN_AS_K;
  params.max_sequences = 1;
  params.capacity = 1;
  params.max_batch = 1;
  return params;
}

Result<CacheParts> CachePartsFromC(const kvtwin_cache_params* params) {
  kvtwin_cache_params read = DefaultCacheParams();
  Status status = ReadStruct("params", params, read);
  if (!status.ok()) return status;
  CacheParts parts;
  Result<CacheSpec> spec = SpecFromC(read, /*inner=*/false);
  if (!spec.ok()) return spec.status();
  parts.spec = std::move(*spec);
  CacheConfig& config = parts.config;
  config.cache_padding = read.cache_padding;
  config.mask_batch_padding = read.mask_batch_padding;
  status = ReadEnum("v_layout", read.v_layout, kVLayoutNames.size(),
                    config.v_layout);
  if (status.ok()) {
    status = ReadEnum("mask_dtype", read.mask_dtype, kDTypeNames.size(),
                      config.mask_dtype);
  }
  if (status.ok()) {
    status =
        ReadEnum("dtype", read.dtype, kDTypeNames.size(), parts.init.dtype);
  }
  if (status.ok()) status = ReadVDType(read.v_dtype, config.v_dtype);
  if (!status.ok()) return status;
  parts.init.max_sequences = read.max_sequences;
  parts.init.capacity = read.capacity;
  parts.init.max_batch = read.max_batch;
  return parts;
}

namespace {

void WriteSpec(const CacheSpec& spec, kvtwin_cache_params& params) {
  params.kind = CEnum<kvtwin_kind>(spec.kind);
  params.placement = CEnum<kvtwin_placement>(spec.placement);
  params.window = spec.window.value_or(-1);
  params.memory = spec.memory.value_or(-1);
  params.chunk = spec.chunk;
  params.checkpoint_every = spec.checkpoint_every;
  params.checkpoints = spec.checkpoints;
  params.pins = spec.pins;
  params.drafts = spec.drafts;
  const Rope& rope = spec.shift.rope;
  params.shift.kind = CEnum<kvtwin_shift_kind>(spec.shift.kind);
  params.shift.rope_halves = rope.pairing == Rope::Pairing::kHalves ? 1 : 0;
  params.shift.rope_dims = rope.dims;
  params.shift.rope_base = rope.base;
  params.shift.rope_scale = rope.scale;
}

kvtwin_dtype CVDType(std::optional<DType> dtype) {
  return dtype ? CEnum<kvtwin_dtype>(*dtype) : KVTWIN_AS_K;
}

}  // namespace

kvtwin_cache_params CCacheParams(const CacheParts& parts,
                                 std::vector<kvtwin_cache_params>& caches) {
  kvtwin_cache_params params = DefaultCacheParams();
  caches.assign(parts.spec.caches.size(), params);
  for (std::size_t i = 0; i < caches.size(); ++i) {
    WriteSpec(parts.spec.caches[i], caches[i]);
  }
  WriteSpec(parts.spec, params);
  params.caches = caches.data();
  params.cache_count = static_cast<std::int32_t>(caches.size());
  const CacheConfig& config = parts.config;
  params.cache_padding = config.cache_padding;
  params.mask_batch_padding = config.mask_batch_padding;
  params.v_layout = CEnum<kvtwin_v_layout>(config.v_layout);
  params.mask_dtype = CEnum<kvtwin_dtype>(config.mask_dtype);
  params.dtype = CEnum<kvtwin_dtype>(parts.init.dtype);
  params.v_dtype = CVDType(config.v_dtype);
  params.max_sequences = parts.init.max_sequences;
  params.capacity = parts.init.capacity;
  params.max_batch = parts.init.max_batch;
  return params;
}

CPrompt::CPrompt(std::span<const std::int32_t> tokens, const PrefixKey& key) {
  for (const std::string& text : key.extra) extra_.push_back(text.c_str());
  prompt_.size = sizeof(prompt_);
  prompt_.tokens = tokens.data();
  prompt_.token_count = tokens.size();
  prompt_.salt = key.salt.c_str();
  prompt_.extra = extra_.data();
  prompt_.extra_count = extra_.size();
  for (const auto& [position, hash] : key.media) {
    media_.push_back({position, hash.c_str()});
  }
  prompt_.media = media_.data();
  prompt_.media_count = media_.size();
}

kvtwin_pool_params DefaultPoolParams() { return CPoolParams(PagedSpec()); }

kvtwin_pool_params CPoolParams(const PagedSpec& spec) {
  kvtwin_pool_params params{};
  params.size = sizeof(params);
  params.block_size = spec.block_size;
  params.blocks = spec.blocks;
  params.max_seq_len = spec.max_seq_len;
  params.layers = spec.layers;
  params.kv_heads = spec.kv_heads;
  params.k_head_dim = spec.k_head_dim;
  params.v_head_dim = spec.v_head_dim;
  params.dtype = CEnum<kvtwin_dtype>(spec.dtype);
  params.v_dtype = CVDType(spec.v_dtype);
  params.layout = CEnum<kvtwin_paged_layout>(spec.layout);
  params.window = spec.window.value_or(0);
  params.states = spec.states ? 1 : 0;
  return params;
}

namespace {

Result<PagedSpec> PoolFromC(const kvtwin_pool_params& read, bool is_group) {
  PagedSpec spec;
  spec.block_size = read.block_size;
  spec.blocks = read.blocks;
  spec.max_seq_len = read.max_seq_len;
  spec.layers = read.layers;
  spec.kv_heads = read.kv_heads;
  spec.k_head_dim = read.k_head_dim;
  spec.v_head_dim = read.v_head_dim;
  Status status = ReadEnum("dtype", read.dtype, kDTypeNames.size(), spec.dtype);
  if (status.ok()) status = ReadVDType(read.v_dtype, spec.v_dtype);
  if (status.ok()) status = ReadEnum("layout", read.layout, 2, spec.layout);
  if (!status.ok()) return status;
  if (read.window != 0) spec.window = read.window;
  spec.states = read.states != 0;
  const auto groups = ListFromC("groups", read.groups, read.group_count);
  if (!groups.ok()) return groups.status();
  if (is_group && !groups->empty()) {
    return Invalid("groups: a group has groups");
  }
  const auto* at = reinterpret_cast<const std::byte*>(read.groups);
  for (std::size_t i = 0; i < read.group_count; ++i) {
    kvtwin_pool_params group = DefaultPoolParams();
    status = ReadStruct(fmt::format("groups[{}]", i),
                        reinterpret_cast<const kvtwin_pool_params*>(at), group);
    if (!status.ok()) return status;
    const Result<PagedSpec> made = PoolFromC(group, /*is_group=*/true);
    if (!made.ok()) return made.status();
    spec.groups.push_back(*made);
    at += group.size;
  }
  return spec;
}

}  // namespace

Result<PagedSpec> PagedSpecFromC(const kvtwin_pool_params* params) {
  kvtwin_pool_params read = DefaultPoolParams();
  Status status = ReadStruct("params", params, read);
  if (!status.ok()) return status;
  return PoolFromC(read, /*is_group=*/false);
}

}  // namespace kvtwin::props
