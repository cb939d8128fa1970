// A file that gets its name once it is whole and on disk.

#ifndef KVTWIN_CORE_SAVE_PART_FILE_H_
#define KVTWIN_CORE_SAVE_PART_FILE_H_

#include <sys/stat.h>

#include <string>

#include "core/save/file.h"
#include "kvtwin/status.h"

namespace kvtwin {

// Until then it is a part file: it lies in the same folder, has a name that
// cannot be foreseen, and is locked by this object. Any process may save to the
// same path meanwhile, on this machine or in another container: each has its
// own part file, and the last to rename it wins.
//
// The part file goes with this object. That of a saver that died stays, without
// a lock: the next saver to that path removes it. (A file without a name, of
// O_TMPFILE, would go by itself, but can only get a name that is free: linkat
// does not replace a file, rename does, and needs a name. And not every file
// system has such files.)
class PartFile {
 public:
  explicit PartFile(std::string path) : path_(std::move(path)) {}
  ~PartFile() { Remove(); }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  // Makes the part file, after those of dead savers are removed. Errors:
  // failed_precondition if the path is there and is not a regular file, or with
  // the system's error.
  Status Make();
  // Requires: Make was ok.
  const File& file() const { return file_; }
  // Syncs the file, renames it and syncs the folder. A file that it replaces
  // leaves its mode, and its owner where this process may give files away.
  // Errors: failed_precondition with the system's error. The path is then as it
  // was, unless only the folder could not be synced.
  Status Rename();

 private:
  Status OpenFolder();
  Status MakeLocked(const std::string& prefix);
  void KeepModeAndOwner() const;
  bool SyncFolder() const;
  void Remove();

  std::string path_;
  std::string name_;  // In the folder.
  std::string part_;  // In the folder; empty if there is none.
  File folder_;
  File file_;
  bool replaces_ = false;  // The path is there, and is so:
  struct stat before_ = {};
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_SAVE_PART_FILE_H_
