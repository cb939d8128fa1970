// How the caches of props/testing/other_caches.h keep their tokens: as lists,
// as cells, as concatenated tensors, as rings. Each follows the rules of its
// own profile.

#ifndef KVTWIN_PROPS_TESTING_OTHER_FAMILIES_H_
#define KVTWIN_PROPS_TESTING_OTHER_FAMILIES_H_

#include <deque>
#include <map>
#include <set>
#include <vector>

#include "props/testing/other_caches.h"

namespace kvtwin::props {

// ollama: a list of tokens for each sequence, in any order.
class Lists final : public OtherCache {
 public:
  using OtherCache::OtherCache;
  Status RemoveAnswer(int seq, std::int64_t begin,
                      std::int64_t end) const override;
  void DoRemove(int seq, std::int64_t begin, std::int64_t end) override;
  void DoCopy(int src, int dst, std::int32_t len) override;

 protected:
  bool WindowCountsQuery() const override { return false; }
  bool GoesOn(int, std::int64_t) const override { return true; }
  void MakeRoom(const Batch& batch) override;
  std::shared_ptr<OtherRows> Store(int seq, std::int64_t position) override;
  std::vector<Stored> All() const override;
  bool StillHas(int seq, std::int32_t pos) const override;

 private:
  bool IsShared(int seq, const Item& item) const;
  std::map<int, std::vector<Item>> lists_;
};

// llama.cpp: cells, each with a position and the sequences that hold it.
class LlamaCells final : public OtherCache {
 public:
  using OtherCache::OtherCache;
  Status Init(const InitArgs& args) override;
  Status RemoveAnswer(int, std::int64_t, std::int64_t) const override {
    return {};
  }
  void DoRemove(int seq, std::int64_t begin, std::int64_t end) override;
  Status CopyAnswer(int, int, std::int32_t) const override { return {}; }
  void DoCopy(int src, int dst, std::int32_t len) override;
  Status ShiftAnswer() const override;
  void DoShift(int seq, std::int64_t begin, std::int64_t end,
               std::int32_t delta) override;

 protected:
  bool GoesOn(int seq, std::int64_t position) const override;
  void MakeRoom(const Batch& batch) override;
  std::shared_ptr<OtherRows> Store(int seq, std::int64_t position) override;
  std::vector<Stored> All() const override;
  bool StillHas(int seq, std::int32_t pos) const override;

 private:
  struct Cell {
    Item item;
    std::set<int> sequences;  // None: the cell is free.
  };
  // The position after the last token of a sequence; 0 if it is empty.
  std::int64_t End(int seq) const;
  // Whether no sequence of the cell sees its token when it continues.
  bool IsMasked(const Cell& cell,
                const std::map<int, std::int64_t>& ends) const;
  void Evict(Cell& cell);

  enum class When { kAtOnce, kNever, kByChance, kWhenWanted };
  When when_ = When::kNever;
  bool below_too_ = false;  // Evicts all tokens before it, too.
  std::vector<Cell> cells_;
  std::set<int> thinned_;  // They lost tokens in the middle.
};

// transformers and mlx: tensors that grow, and are cut to the window once they
// are longer; mlx also keeps the first few tokens.
class Concatenated final : public OtherCache {
 public:
  Concatenated(const CacheSpec& spec, std::uint64_t choices, CacheFault fault,
               int sinks)
      : OtherCache(spec, choices, fault), sinks_(sinks) {}
  Status RemoveAnswer(int seq, std::int64_t begin,
                      std::int64_t end) const override;
  void DoRemove(int seq, std::int64_t begin, std::int64_t end) override;
  Status CopyAnswer(int src, int dst, std::int32_t len) const override;
  void DoCopy(int src, int dst, std::int32_t len) override;

 protected:
  bool KeepsTheFirst() const override { return sinks_ > 0; }
  bool GoesOn(int seq, std::int64_t position) const override;
  void MakeRoom(const Batch& batch) override;
  std::shared_ptr<OtherRows> Store(int seq, std::int64_t position) override;
  std::vector<Stored> All() const override;
  bool StillHas(int seq, std::int32_t pos) const override;
  bool InWindow(const Row& row, const Stored& token) const override;

 private:
  struct Tensor {
    std::int64_t first = 0;   // The position of its first token.
    std::int64_t length = 0;  // Tokens appended, evicted ones too.
    std::deque<Item> items;
    std::int64_t next() const { return first + length; }
  };
  const Tensor* Find(int seq) const;
  bool IsFull(const Tensor& tensor) const {
    return reach_ && tensor.length > *reach_;
  }
  int sinks_;
  std::map<int, Tensor> tensors_;
};

// executorch: a ring for each sequence.
class Rings final : public OtherCache {
 public:
  using OtherCache::OtherCache;
  Status Init(const InitArgs& args) override;
  Status RemoveAnswer(int seq, std::int64_t begin,
                      std::int64_t end) const override;
  void DoRemove(int seq, std::int64_t begin, std::int64_t end) override;
  void DoCopy(int src, int dst, std::int32_t len) override;

 protected:
  bool GoesOn(int seq, std::int64_t position) const override;
  void MakeRoom(const Batch& batch) override;
  std::shared_ptr<OtherRows> Store(int seq, std::int64_t position) override;
  std::vector<Stored> All() const override;
  bool StillHas(int seq, std::int32_t pos) const override;

 private:
  struct Ring {
    std::map<std::int64_t, Item> slots;  // By position modulo the size.
    std::int64_t next = 0;
  };
  void CutAt(Ring& ring, std::int64_t next) const;
  const Ring* Find(int seq) const;
  // The position of the oldest token; `next` if the ring is empty.
  static std::int64_t Oldest(const Ring& ring);
  std::int64_t size_ = 0;
  bool forgets_ = false;  // An empty ring restarts at position 0.
  std::map<int, Ring> rings_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_OTHER_FAMILIES_H_
