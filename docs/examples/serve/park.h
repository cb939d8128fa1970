// Conversations parked on disk, so that they outlive the process and their
// slot.
//
// Each is a file that kvtwin's SaveState writes, complete or not at all. Its
// model text says which model computed the rows, and for which tokens.

#ifndef SERVE_PARK_H_
#define SERVE_PARK_H_

#include <kvtwin/state.h>
#include <kvtwin/status.h>

#include <future>
#include <map>
#include <string>

#include "tokenizer.h"

namespace serve {

class ParkingLot {
 public:
  // Finds the files of `model` in a folder, which is made if it is missing. At
  // most `limit` files are kept.
  ParkingLot(std::string folder, std::string model, std::size_t limit);

  // Writes a conversation in the background, in place of those that it
  // continues.
  void Park(const Tokens& tokens, kvtwin::CacheState state);

  // Returns the file of the parked conversation that shares most tokens with
  // the prompt, and how many. The name is empty if there is none.
  std::pair<std::string, std::size_t> Find(const Tokens& prompt) const;

  // A file that cannot be read is forgotten.
  kvtwin::Result<kvtwin::CacheState> Load(const std::string& path);
  int size() const { return static_cast<int>(files_.size()); }

 private:
  std::string Label(const Tokens& tokens) const;

  std::string folder_, model_;
  std::size_t limit_;
  std::map<std::string, Tokens> files_;  // By path, which begins with the time.
  std::future<void> writing_;
};

// Returns the number of tokens that two lists begin with.
std::size_t CommonPrefix(const Tokens& left, const Tokens& right);

}  // namespace serve

#endif  // SERVE_PARK_H_
