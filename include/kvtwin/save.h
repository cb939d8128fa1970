// A cache's state as bytes, and as a file: what Snapshot gives, to be restored
// in another process.
//
// The format is that of safetensors, so that other tools read the rows: tensors
// "layers.0.key" and "layers.0.value" of [tokens, kv_heads, head_dim], "cells"
// of [entries, (cell, position, sequence)], and "caches.0." before the names of
// a wrapper's. Its metadata has the version, a name of your own for the model,
// an encoder's positions, and a checksum of everything. Rows of q8_0 and q4_0
// are bytes ("U8") there, and their dtype is in the metadata. Little-endian.

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

// Equal states have equal bytes. `model` is any text, UTF-8. Can be read back
// up to some 400 layers, in all caches together, and without wrappers in
// wrappers, which there are none of. Of tensors whose bytes are not those that
// their shapes say, no bytes at all.
std::vector<std::byte> StateToBytes(const CacheState& state,
                                    std::string_view model = "");

// Errors: invalid_argument unless StateToBytes gave exactly these bytes for
// that model and a state that some cache could have, whatever they are; never
// takes much more memory than they do. Whether it fits a cache, Restore says.
Result<CacheState> StateFromBytes(std::span<const std::byte> bytes,
                                  std::string_view model = "");

// Writes a file beside `path`, and renames it once it is whole and on disk:
// whoever loads `path`, at any moment, finds what was there before or this, and
// so does the machine that comes up again. Any number of processes may save to
// one path at once; the last wins. A file that is replaced leaves its mode, and
// its owner where the process may give files away.
// Errors: failed_precondition if `path` is there and no regular file (a
// symbolic link is none), or with what the system said: then `path` is what it
// was, unless the message says that the state "is written, but perhaps not on
// disk"; invalid_argument if no cache could have that state.
Status SaveState(const CacheState& state, const std::string& path,
                 std::string_view model = "");

// Errors: failed_precondition if it is no regular file or cannot be read; as
// StateFromBytes.
Result<CacheState> LoadState(const std::string& path,
                             std::string_view model = "");

// The model whose state the file has, for LoadState to load it: looks at the
// file's header only. Errors: as LoadState, which sees more.
Result<std::string> ModelOf(const std::string& path);

// What one sequence has of a state, as a state: its tokens and their rows. Of a
// wrapper, what it has of each cache. An encoder's slots belong to nobody: they
// are left out.
CacheState SequenceOf(const CacheState& state, int sequence);

// `state` and one sequence more, of what SequenceOf gave of another state: its
// tokens come to the lowest cells that are free, `cells` being how many each of
// the wrapper's caches has, or the cache itself. So a sequence is loaded beside
// others:
//
//   cache->Restore(*WithSequence(*cache->Snapshot(), 5, saved, {{cells}}))
//
// as cache->AddSequence(5, saved) does at once.
//
// Errors: cache_full; invalid_argument if the state has that sequence already,
// what is added is of several (SequenceOf gives one),
// the rows of a layer have other dimensions or dtypes, caches are not as many,
// or no cache could have one of the two.
Result<CacheState> WithSequence(const CacheState& state, int sequence,
                                const CacheState& added,
                                std::span<const int> cells);

}  // namespace kvtwin

#endif  // KVTWIN_SAVE_H_
