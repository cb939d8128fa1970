// Conversations parked on disk, so that they outlive the process and their
// slot.
//
// Each is a file that kvtwin's SaveState writes, complete or not at all. Its
// model text says which model computed the rows, and for which tokens.

#ifndef SERVE_PARK_H_
#define SERVE_PARK_H_

#include <kvtwin/sessions.h>

#include <future>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace serve {

// Tokens, as sessions have them.
using Inputs = std::vector<kvtwin::SessionInput>;

// Returns the number of tokens that two lists begin with.
int CommonPrefix(std::span<const kvtwin::SessionInput> left,
                 std::span<const kvtwin::SessionInput> right);

class ParkingLot {
 public:
  // Finds the files of `model` in a folder, which is made if it is missing. At
  // most `limit` files are kept.
  ParkingLot(std::string folder, std::string model, std::size_t limit);

  // Writes a conversation in the background, in place of those that it
  // continues. A state may have more tokens than these, after them.
  void Park(const Inputs& tokens, kvtwin::CacheState state);

  // Returns the file of the parked conversation that shares most tokens with
  // the prompt, and how many. The name is empty if there is none.
  std::pair<std::string, int> Find(const Inputs& prompt) const;

  // A file that cannot be read is forgotten.
  kvtwin::Result<kvtwin::CacheState> Load(const std::string& path);
  int size() const { return static_cast<int>(files_.size()); }

 private:
  std::string Label(const Inputs& tokens) const;

  std::string folder_, model_;
  std::size_t limit_;
  std::map<std::string, Inputs> files_;  // By path, which begins with the time.
  std::future<void> writing_;
};

}  // namespace serve

#endif  // SERVE_PARK_H_
