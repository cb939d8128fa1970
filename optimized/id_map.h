// A map from arbitrary sequence ids to pointers. Open addressing: once the
// table is large enough, insertion does not allocate.

#ifndef KVTWIN_OPTIMIZED_ID_MAP_H_
#define KVTWIN_OPTIMIZED_ID_MAP_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "core/index.h"

namespace kvtwin::optimized {

// Does not own the values.
template <class T>
class IdMap {
 public:
  IdMap() : entries_(16) {}

  // Returns null if there is no entry.
  T* Find(int id) const { return entries_[Locate(id)].value; }

  // Requires: there is no entry for id; value is not null.
  void Insert(int id, T* value) {
    KVTWIN_DCHECK(Find(id) == nullptr);
    KVTWIN_DCHECK(value != nullptr);
    // At most half full, so that probes are short and always end.
    if (2 * (count_ + 1) > entries_.size()) Grow();
    entries_[Locate(id)] = {id, value};
    ++count_;
  }

  // Requires: there is an entry for id.
  void Erase(int id) {
    std::size_t hole = Locate(id);
    KVTWIN_DCHECK(entries_[hole].value != nullptr);
    const std::size_t mask = entries_.size() - 1;
    // Entries that were pushed past the hole move back into it, so that no
    // probe meets an empty entry before its id.
    for (std::size_t i = (hole + 1) & mask; entries_[i].value != nullptr;
         i = (i + 1) & mask) {
      const std::size_t home = Home(entries_[i].id);
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = {};
    --count_;
  }

 private:
  struct Entry {
    int id = 0;
    T* value = nullptr;
  };

  std::size_t Home(int id) const {
    // Fibonacci hashing: the top bits of the product depend on all of the id.
    const std::uint64_t product =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(id)) *
        0x9E3779B97F4A7C15u;
    return AsSize(product >> (64 - std::countr_zero(entries_.size())));
  }

  // The entry of id, or the empty entry where it belongs.
  std::size_t Locate(int id) const {
    std::size_t i = Home(id);
    while (entries_[i].value != nullptr && entries_[i].id != id) {
      i = (i + 1) & (entries_.size() - 1);
    }
    return i;
  }

  void Grow() {
    std::vector<Entry> old(2 * entries_.size());
    std::swap(old, entries_);
    for (const Entry& entry : old) {
      if (entry.value != nullptr) entries_[Locate(entry.id)] = entry;
    }
  }

  std::vector<Entry> entries_;  // The size is a power of two.
  std::size_t count_ = 0;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ID_MAP_H_
