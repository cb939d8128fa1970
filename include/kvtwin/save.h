// A cache's state as bytes and as a file: the result of Snapshot, which another
// process can restore.
//
// The format is safetensors, so that other tools can read the rows: tensors
// "layers.0.key" and "layers.0.value" of [tokens, kv_heads, head_dim], "cells"
// of [entries, (cell, position, sequence)]. For the caches of a wrapper
// "caches.0." and so on stands before these names. The metadata has the
// version, the caller's name for the model, an encoder's positions, and a
// checksum of everything. Rows of q8_0 and q4_0 are bytes ("U8") with their
// dtype in the metadata. Little-endian.

#ifndef KVTWIN_SAVE_H_
#define KVTWIN_SAVE_H_

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/state.h"
#include "kvtwin/status.h"

namespace kvtwin {

// Returns `state` as bytes; equal states have equal bytes. `model` is any UTF-8
// text. The bytes can be read back if the caches have up to some 400 layers
// together, and no wrapper contains a wrapper (MakeCache makes none). The
// result is empty if a tensor does not have the bytes that its shape requires,
// or if `model` is not UTF-8.
std::vector<std::byte> StateToBytes(const CacheState& state,
                                    std::string_view model = "");

// Errors: invalid_argument unless StateToBytes returns exactly these bytes for
// that model and a state that some cache could have. Safe for any bytes; never
// uses much more memory than they do. Restore checks if the state fits a cache.
Result<CacheState> StateFromBytes(std::span<const std::byte> bytes,
                                  std::string_view model = "");

// Writes a file beside `path`, and renames it once it is complete and on disk:
// a process that loads `path` at any moment, also after a crash of the machine,
// finds the old file or the new one, complete. Any number of processes may save
// to one path at once; the last one wins. The new file gets the mode of the
// file that it replaces, and its owner if the process may change owners.
// Errors: failed_precondition if `path` exists and is not a regular file (a
// symbolic link is not), or with the system's message: then `path` is
// unchanged, unless the message says that the state "is written, but perhaps
// not on disk"; invalid_argument if no cache could have that state, or if
// `model` is not UTF-8.
Status SaveState(const CacheState& state, const std::string& path,
                 std::string_view model = "");

// Errors: failed_precondition if `path` is not a regular file or cannot be
// read; those of StateFromBytes.
Result<CacheState> LoadState(const std::string& path,
                             std::string_view model = "");

// Returns the model that the file was saved with, to be passed to LoadState.
// Reads the file's header only. Errors: as LoadState, which checks more.
Result<std::string> ModelOf(const std::string& path);

// Returns one sequence of a state as a state: its tokens and their rows; for a
// wrapper, those in each of its caches. An encoder's slots belong to no
// sequence, and are left out. The result is empty if no cache could have that
// state.
CacheState SequenceOf(const CacheState& state, int sequence);

// Returns `state` with one more sequence, whose tokens and rows are `added`, a
// result of SequenceOf. The tokens go to the lowest free cells. `cells` has the
// number of cells of each of the wrapper's caches, or of the cache itself. This
// loads a sequence beside others:
//
//   cache->Restore(*WithSequence(*cache->Snapshot(), 5, saved, {{cells}}))
//
// cache->AddSequence(5, saved) does the same in one call.
//
// Errors: cache_full; invalid_argument if the state has that sequence already,
// `added` has several sequences, the rows of a layer have other dimensions or
// dtypes, the numbers of caches differ, or no cache could have one of the two
// states.
Result<CacheState> WithSequence(const CacheState& state, int sequence,
                                const CacheState& added,
                                std::span<const int> cells);

}  // namespace kvtwin

#endif  // KVTWIN_SAVE_H_
