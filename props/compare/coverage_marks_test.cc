// Tests that each mark of props/compare/coverage_marks.h counts what its
// statement says: shortest histories that hit the mark, and near misses, which
// differ in one thing and do not hit it.

#include "props/compare/coverage_marks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/index.h"
#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {
namespace {

struct Row {
  std::string_view mark;
  // Histories without "kvt1 " in front. There are several hits if a condition
  // has two ends, or an alternative.
  std::vector<std::string_view> hits;
  std::vector<std::string_view> misses;
};

const std::vector<Row> kStartForwardRows = {
    {"filled",
     {"cells=4 | put 0*4", "cells=4 | put 0*3 | put 0*1",
      "kind=swa window=2 cells=4 | put 0*2 | put 0*1 | put 0*2"},
     {"cells=4 | put 0*3", "cells=4 | put 0*3 | put 0*2"}},
    {"full_by_one",
     {"cells=4 | put 0*3 | put 0*2"},
     {"cells=4 | put 0*3 | put 0*3", "cells=4 | put 0*3 | put 0*1"}},
    {"full_when_empty",
     {"seqs=1 cap=4 batch=5 | put 0*5"},
     {"seqs=1 cap=4 batch=5 | put 0*4",
      "seqs=1 cap=4 batch=5 | put 0*1 | put 0*4"}},
    {"full_after_eviction",
     {"kind=swa window=1 cells=3 | put 0*1 1*1 | put 2*1 | put 0*2@+1"},
     {"kind=swa window=1 cells=3 | put 0*1 1*1 | put 2*1 | put 0*1@+1",
      "kind=swa window=1 cells=3 | put 0*1 1*1 | put 2*1 | put 0*2"}},
    {"full_ends_a_pass",
     {"cells=2 | put 0*2 | put 0*1"},
     {"cells=3 | put 0*2 | put 0*1", "seqs=1 cap=2 batch=3 | put 0*3 | put 0*3",
      "cells=2 | put 0*2 | reload | put 0*1"}},
    {"batch_of_capacity",
     {"cells=4 | put 0*4"},
     {"cells=4 | put 0*3", "seqs=2 cap=4 batch=5 | put 0*5",
      "cells=4 | put 0*1 | put 0*4", "cells=4 | put 0*4 reserve"}},
    {"batch_of_all_cells",
     {"cells=4 | put 0*4"},
     {"cells=4 | put 0*3", "cells=4 | put 0*1 | put 0*4",
      "seqs=1 cap=4 batch=5 | put 0*5"}},
    {"unsorted",
     {"cells=2 | put 0*2r", "| put 0*1@+1 1*1 0*1"},
     {"cells=2 | put 0*2", "cells=2 | put 0*2=", "cells=2 | put 0*1@+1 1*1"}},
    {"repeated",
     {"cells=2 | put 0*2=", "| put 0*1 1*1 0*1"},
     {"cells=2 | put 0*2", "cells=2 | put 0*1 1*1", "cells=2 | put 0*2r"}},
    {"position_again",
     {"cells=2 | put 0*1 | put 0*1@-1",
      "cells=2 | put 0*1 | reload | put 0*1@-1"},
     {"cells=2 | put 0*1 | put 0*1", "cells=2 | put 0*1 | put 1*1",
      "cells=2 | put 0*2=", "cells=2 | put 0*1@+1 | put 0*1@-2"}},
    {"gap",
     {"cells=2 | put 0*1 | put 0*1@+1"},
     {"cells=2 | put 0*1 | put 0*1", "cells=2 | put 0*1@+1",
      "cells=2 | put 0*1 | put 1*1@+1"}},
    {"interleaved",
     {"| put 0*1 1*1 0*1", "| put 2*1 0*1 1*1 0*1"},
     {"| put 0*1 1*1", "| put 0*3", "| put 0*1 1*1 2*1", "| put 0*2 1*1",
      "| put 0*1 1*2", "| put 0*1 1*1 2*1 0*1"}},
    {"position_max",
     {"cells=2 | put 0*1@+2147483647"},
     {"cells=2 | put 0*1@+2147483646",
      "cells=2 | put 0*2 | put 0*1@+2147483647"}},
    {"sequence_max",
     {"firstid=1073741825 | put 0*1"},
     {"firstid=1073741824 | put 0*1",
      "firstid=1073741824 cells=1 | put 0*1 | put 1*1"}},
    {"evicted",
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1 | put 0*1",
      "kind=swa window=1 cells=3 | put 0*2 | put 1*1 0*1"},
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1",
      "kind=swa window=1 cells=3 | put 0*2 | put 1*1"}},
    {"evicted_idle",
     {"kind=swa window=1 cells=3 | put 0*2 | put 1*1"},
     {"kind=swa window=1 cells=3 | put 0*1 | put 1*1",
      "kind=swa window=1 cells=3 | put 0*2 | put 0*1",
      "kind=swa window=1 cells=3 | put 0*2 | put 1*1 0*1"}},
    {"evicted_one_owner",
     {"kind=swa window=1 cells=3 | put 0*1 | copy 0>1:1 | put 0*1@+1"},
     {"kind=swa window=1 cells=3 | put 0*1 | copy 0>1:1 | "
      "put 0*1@+1 1*1@+1",
      "kind=swa window=1 cells=3 | put 0*1 | copy 0>1:1 | put 0*1",
      "kind=swa window=1 cells=3 | put 0*1 | put 0*1@+1"}},
    {"evicted_all_owners",
     {"kind=swa window=1 cells=3 | put 0*1 | copy 0>1:1 | "
      "put 0*1@+1 1*1@+1"},
     {"kind=swa window=1 cells=3 | put 0*1 | copy 0>1:1 | put 0*1@+1",
      "kind=swa window=1 cells=3 | put 0*1 | put 0*1@+1",
      "kind=swa window=1 cells=4 | put 0*1 | copy 0>1-2:1 | "
      "put 0*1@+1 1*1@+1"}},
    {"evicted_whole",
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1@+1"},
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1 | put 0*1",
      "kind=swa window=1 cells=2 | put 0*1 | put 0*1"}},
    {"eviction_makes_room",
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1 | put 0*1"},
     {"kind=swa window=1 seqs=1 cap=4 batch=2 | "
      "put 0*1 | put 0*1 | put 0*1",
      "kind=swa window=1 cells=3 | put 0*1 1*1 | put 2*1 | put 0*2@+1"}},
    {"run_too_short",
     {"cells=4 | put 0*1 | put 1*1 | drop 0:0- | put 2*2"},
     {"cells=4 | put 0*1 | put 1*1 | drop 0:0- | put 2*1",
      "cells=4 | put 0*1 | put 1*2",
      "cells=4 | put 0*1 | put 1*2 | drop 0:0- | put 2*2",
      "cells=4 place=scatter | put 0*1 | put 1*1 | drop 0:0- | put 2*2"}},
    {"run_exact",
     {"cells=3 | put 0*1 1*1 2*1 | drop 1:0- | put 3*1"},
     {"cells=3 | put 0*1 1*1 2*1 | drop 0:0- | put 3*1",
      "cells=3 | put 0*1 1*1 2*1 | drop 2:0- | put 3*1",
      "cells=4 | put 0*1 1*2 2*1 | drop 1:0- | put 3*1",
      "cells=3 place=scatter | put 0*1 1*1 2*1 | drop 1:0- | put 3*1"}},
    {"run_at_end",
     {"cells=2 | put 0*1 | put 0*1"},
     {"cells=3 | put 0*1 | put 0*1",
      "cells=2 place=scatter | put 0*1 | put 0*1"}},
    {"scattered",
     {"place=scatter cells=3 | put 0*1 1*1 2*1 | drop 0:0- | drop 2:0- | "
      "put 3*2",
      "place=scatter cells=4 | put 0*1 1*1 | drop 0:0- | put 2*2"},
     {"place=scatter cells=3 | put 0*1 1*1 2*1 | drop 0:0- | drop 1:0- | "
      "put 3*2",
      "place=scatter cells=3 | put 0*1 1*1 2*1 | drop 0:0- | drop 2:0- | "
      "put 3*3",
      "place=scatter cells=3 | put 0*1 | put 0*2",
      "cells=3 | put 0*1 1*1 2*1 | drop 0:0- | drop 2:0- | put 3*2"}},
    {"defrag_one_hole",
     {"cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*2"},
     {"cells=4 | put 0*2 | put 1*1 | drop 0:0- | put 2*3",
      "cells=3 | put 0*2 | put 1*2",
      "cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*1",
      "cells=3 place=scatter | put 0*1 | put 1*1 | drop 0:0- | put 2*2"}},
    {"defrag_two_runs",
     {"cells=4 | put 0*1 1*1 2*1 3*1 | drop 0:0- | drop 2:0- | put 4*2"},
     {"cells=4 | put 0*2 | put 1*1 | drop 0:0- | put 2*3",
      "cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*2"}},
    {"defrag_full",
     {"cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*3"},
     {"cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*2",
      "cells=3 | put 0*2 | put 1*2"}},
    {"defrag_shared",
     {"cells=3 | put 0*1 | put 1*1 | copy 1>2:1 | drop 0:0- | put 3*2"},
     {"cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 3*2",
      "cells=4 | put 0*1 1*1 2*1 | copy 1>3:1 | drop 0:0- | put 4*2"}},
    {"defrag_layers",
     {"layers=2 cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*2"},
     {"layers=1 cells=3 | put 0*1 | put 1*1 | drop 0:0- | put 2*2",
      "layers=2 cells=3 | put 0*1 keep | put 1*1 keep | drop 0:0- | put 2*2",
      "layers=2 cells=3 | put 0*2 | put 1*2"}},
    {"wrapper_second_full",
     {"kind=wrapper caches=causal/swa:w1 seqs=1 cap=3 batch=1 | "
      "put 0*1 | put 1*1 | put 2*1"},
     {"kind=wrapper caches=causal/swa:w1 seqs=1 cap=2 batch=1 | "
      "put 0*1 | put 1*1 | put 2*1",
      "kind=wrapper caches=swa:w1/causal seqs=1 cap=3 batch=1 | "
      "put 0*1 | put 1*1 | put 2*1",
      "kind=wrapper caches=causal/swa:w1 seqs=1 cap=3 batch=1 | "
      "put 0*1 | put 1*1",
      "kind=wrapper caches=encoder/swa:w1 seqs=1 cap=3 batch=1 | "
      "put 0*1 | put 1*1 | put 2*1"}},
    {"wrapper_encoder_back",
     {"kind=wrapper caches=encoder/causal seqs=1 cap=1 batch=1 | "
      "put 0*1 | put 0*1 image=0"},
     {"kind=wrapper caches=encoder/causal seqs=1 cap=1 batch=1 | "
      "put 0*1 image=0 | put 0*1",
      "kind=wrapper caches=causal/encoder seqs=1 cap=1 batch=1 | "
      "put 0*1 | put 0*1 image=0"}},
    {"reserved",
     {"cells=2 | put 0*1 | put 0*1 reserve"},
     {"cells=2 | put 0*1 reserve", "cells=2 | put 0*1 | put 0*1"}},
    {"reserved_full",
     {"cells=2 | put 0*2 | put 0*1 reserve"},
     {"cells=2 | put 0*1 | put 0*1 reserve", "cells=2 | put 0*2 | put 0*1",
      "kind=encoder seqs=1 | put 0*1 reserve"}},
    {"reserved_twice",
     {"cells=2 | put 0*1 reserve | put 0*1 reserve"},
     {"cells=2 | put 0*1 reserve | put 0*1 | put 0*1 reserve",
      "cells=2 | put 0*1 | put 0*1 reserve",
      "cells=2 | put 0*1 reserve | reload | put 0*1 reserve"}},
    {"legal_pass",
     {"legal=1 | put 0*1"},
     {"| put 0*1", "legal=1 | put 0*1 reserve"}},
};

const std::vector<Row> kPassRows = {
    {"except_first",
     {"cells=2 | put 0*2 except=0"},
     {"cells=2 | put 0*2 except=1", "cells=2 | put 0*1 except=0"}},
    {"except_last",
     {"cells=2 | put 0*2 except=1"},
     {"cells=2 | put 0*2 except=0", "cells=2 | put 0*1 except=0",
      "cells=3 | put 0*3 except=1"}},
    {"except_several",
     {"cells=2 | put 0*2 except=0,1"},
     {"cells=2 | put 0*2 except=0", "cells=2 | put 0*2 except=0,2"}},
    {"except_sees_later",
     {"cells=2 | put 0*2 except=0",
      "kind=wrapper caches=causal/causal | start 0*2 | store | except 0 | "
      "type 1 | except 1 | type 0 | read"},
     {"cells=2 | put 0*2 except=1", "cells=2 | put 0*2= except=0",
      "cells=2 | put 0*1 1*1@+1 except=0", "cells=2 | put 0*2"}},
    {"except_cleared",
     {"cells=4 | put 0*2 except=0 | causal"},
     {"cells=4 | put 0*2 except=0 | put 0*2 | causal",
      "cells=4 | put 0*2 | causal", "cells=4 | put 0*2 except=0 | causal 1",
      "cells=4 | put 0*2 except=0 | causal 1 | causal 0"}},
    {"view_not_at_zero",
     {"cells=2 | put 0*1 | put 1*1"},
     {"cells=2 | put 0*1 | put 0*1", "pad=2 cells=2 | put 0*1 | put 1*1"}},
    {"hole_below_view",
     {"cells=4 | put 0*1 1*1 | drop 0:0- | put 1*2"},
     {"cells=4 | put 0*1 1*1 | put 1*2",
      "cells=4 | put 0*1 1*1 | drop 0:0- | put 1*1",
      "cells=4 | put 0*1 | put 1*1",
      "pad=2 cells=6 | put 0*2 2*1 1*1 | drop 2:0- | put 1*2"}},
    {"hole_in_view",
     {"cells=5 | put 0*1 1*1 0*1@+1 | drop 1:0- | put 0*2"},
     {"cells=5 | put 0*1 1*1 0*1@+1 | drop 1:0- | put 0*1",
      "pad=2 cells=6 | put 0*2 2*1 1*1 | drop 2:0- | put 1*2",
      "pad=4 cells=4 | put 0*1",
      "pad=2 cells=4 | put 3*1 1*1 2*1 | drop 3:0- | put 0*1 | drop 1:0- | "
      "get"}},
    {"view_padded",
     {"pad=2 cells=2 | put 0*1"},
     {"pad=2 cells=2 | put 0*2", "cells=2 | put 0*1",
      "cells=2 | put 0*2 | drop 0:1- | get",
      "pad=2 cells=2 | put 0*1 reserve"}},
    {"view_cuts_sequence",
     {"kind=swa_mem window=0 memory=2 cells=4 | put 0*1 | put 0*1"},
     {"kind=swa_mem window=1 memory=2 cells=4 | put 0*1 | put 0*1",
      "cells=2 | put 0*1 | put 1*1"}},
    {"view_strangers",
     {"cells=3 | put 0*1 | put 1*1 | put 0*1"},
     {"cells=3 | put 1*1 | put 0*1 | put 0*1",
      "cells=3 | put 2*1 | put 1*1 | drop 2:0- | put 0*1",
      "cells=3 | put 0*1 | copy 0>1:1 | put 0*1",
      "cells=4 | put 0*1 | put 1*1 | put 0*1 1*1", "pad=2 cells=2 | put 0*1",
      "cells=2 | put 1*1 | put 0*1 reserve"}},
    {"mask_padded", {"maskpad=2 | put 0*1"}, {"maskpad=2 | put 0*2"}},
    {"mask_bits_within_word",
     {"mask=bits cells=2 | put 0*1 | put 1*1",
      "mask=bits cells=64 | put 0*63 | put 1*1"},
     {"mask=f32 cells=2 | put 0*1 | put 1*1",
      "mask=bits cells=2 | put 0*1 | put 0*1",
      "mask=bits cells=65 | put 0*64 | put 1*1"}},
    {"mask_bits_two_words",
     {"mask=bits cells=65 | put 0*63 | put 1*2"},
     {"mask=bits cells=64 | put 0*62 | put 1*2",
      "mask=f32 cells=65 | put 0*63 | put 1*2",
      "mask=bits cells=65 | put 0*65"}},
    {"window_edge",
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1",
      "kind=swa_mem window=1 memory=2 cells=3 | put 0*1 | put 0*1"},
     {"kind=swa window=2 cells=4 | put 0*1 | put 0*1",
      "kind=swa_mem window=1 memory=2 cells=4 | put 0*1 | put 0*1@+1",
      "kind=swa window=0 cells=2 | put 0*1",
      "kind=swa window=1 cells=2 | put 1*1 | put 0*1@+1",
      "kind=swa cells=2 | put 0*1 | put 0*1"}},
    {"window_past_edge",
     {"kind=swa window=1 cells=3 | put 0*1 | put 0*2",
      "kind=swa_mem window=0 memory=2 cells=4 | put 0*2"},
     {"kind=swa window=1 cells=4 | put 0*2",
      "kind=swa window=1 cells=3 | put 0*1 0*1@+3",
      "kind=swa_mem window=1 memory=2 cells=4 | put 0*1 | put 0*1@+1",
      "kind=swa_mem window=1 memory=2 cells=4 | put 9*1 | put 0*1 | "
      "drop 9:0- | put 0*1@+1",
      "kind=swa window=1 cells=3 | put 1*1 | put 0*1@+2"}},
    {"chunk_edge",
     {"kind=chunked chunk=2 cells=4 | put 0*2 | put 0*1"},
     {"kind=chunked chunk=2 cells=4 | put 0*1 | put 0*1",
      "kind=chunked chunk=2 cells=4 | put 0*2 | put 0*1@+2",
      "kind=chunked chunk=2 cells=4 | put 0*2 | put 1*1@+2",
      "kind=chunked chunk=2 cells=4 | put 0*3",
      "kind=chunked chunk=2 cells=4 | put 0*1", "cells=4 | put 0*2 | put 0*1"}},
    {"row_never_put",
     {"cells=2 | put 0*1 keep | put 0*1",
      "layers=2 | start 0*1 | store | put 0*1"},
     {"cells=2 | put 0*1 | put 0*1", "cells=2 | put 0*1 keep | put 1*1",
      "kind=swa window=0 cells=2 | put 0*1 keep | put 0*1"}},
    {"put_rounded",
     {"dtype=f16 | put 0*1"},
     {"dtype=f32 | put 0*1", "dtype=f16 | put 0*1 keep | put 0*1"}},
    {"v_dtype",
     {"vdtype=f16 | put 0*1"},
     {"| put 0*1", "dtype=f16 vdtype=f16 | put 0*1", "dtype=f16 | put 0*1"}},
    {"reput",
     {"| put 0*1 | reput"},
     {"| put 0*1 | put 0*1", "| put 0*1 keep | reput",
      "layers=2 | start 0*1 | store | layer 1 | store",
      "kind=wrapper caches=causal/causal | start 0*1 | store | type 1 | "
      "store"}},
    {"layer_reserved",
     {"| put 0*1 reserve",
      "kind=wrapper caches=causal/causal | start 0*1 | store | "
      "start 0*1 reserve | type 1 | store"},
     {"| put 0*1 | put 0*1 reserve", "| put 0*1",
      "| put 0*1 keep reserve | put 0*1"}},
    {"pass_outlived",
     {"| put 0*1 | drop 0:0- | get"},
     {"| put 0*1 | get", "| put 0*1 | drop 1:0- | get",
      "| put 0*1 | copy 0>1:1 | drop 0:0- | get",
      "shift=identity | put 0*1 | put 0*1 | drop 0:0-1 | get"}},
};

const std::vector<Row> kOrderRows = {
    {"layer_before_type",
     {"kind=wrapper caches=causal/causal | start 0*1 | layer 0 | type 1 | "
      "store"},
     {"kind=wrapper caches=causal/causal | start 0*1 | type 1 | layer 0 | "
      "store",
      "kind=wrapper caches=causal/causal | start 0*1 | layer 0 | store",
      "kind=wrapper caches=causal/causal | start 0*1 | layer 0 | type 1 | "
      "start 0*1 | store",
      "| start 0*1 | layer 0 | type 1 | store"}},
    {"layers_back",
     {"layers=2 | start 0*1 | layer 1 | store | layer 0 | store"},
     {"layers=2 | start 0*1 | layer 0 | store | layer 1 | store",
      "layers=2 | start 0*1 | layer 1 | store | store",
      "layers=2 | put 0*1 | put 0*1"}},
    {"get_between_puts",
     {"layers=2 | start 0*1 | store | read | layer 1 | store",
      "kind=wrapper caches=causal/causal | start 0*1 | store | read | "
      "type 1 | store"},
     {"layers=2 | start 0*1 | store | layer 1 | store | read",
      "layers=2 | start 0*1 | store | read | store",
      "layers=2 | put 0*1 | reput", "layers=2 | put 0*1 | put 0*1",
      "| put 0*1 | start 0*1 | read | store"}},
    {"change_before_put",
     {"| start 0*1 | drop 1:0- | store", "| start 0*1 | copy 0>1:1 | store"},
     {"| put 0*1 | drop 1:0- | start 0*1 | store",
      "| put 0*1 | copy 0>1:1 | start 0*1 | store",
      "| start 0*2 | drop 0:0-1 | store",
      "kind=encoder seqs=1 | start 0*1 | copy 0>1:1 | store",
      "| start 0*1 | ask 0@0 | store"}},
    {"layer_of_another_type",
     {"kind=wrapper caches=causal/causal | start 0*1 | store | type 1 | "
      "store"},
     {"kind=wrapper caches=causal/causal | start 0*1 | store | store",
      "kind=wrapper caches=causal/causal layers=2 | put 0*1 | put 0*1"}},
    {"snapshot_in_pass",
     {"| put 0*1 | snapshot 0"},
     {"| snapshot 0", "| put 0*1 | reload | snapshot 0",
      "cells=1 | put 0*1 | put 0*1 | snapshot 0"}},
    {"added_in_pass",
     {"| put 0*1 | add 0>1"},
     {"| put 0*1 | reload | add 0>1", "| put 0*1 | add 2>1",
      "cells=1 | put 0*1 | add 0>1"}},
};

const std::vector<Row> kLargeRows = {
    {"owners_65",
     {"cells=1 | put 0*1 | copy 0>1-64:1 | drop 99:0-"},
     {"cells=2 | put 0*1 64*1 | copy 0>1-63:1 | drop 99:0-",
      "cells=65 | put 0-64*1 | drop 99:0-",
      "cells=65 | put 0*65 | drop 99:0-"}},
    {"sequences_65",
     {"cells=65 | put 0-64*1 | drop 99:0-",
      "cells=1 | put 0*1 | copy 0>1-64:1 | drop 99:0-"},
     {"cells=65 | put 0-62*1 63*2 | drop 99:0-",
      "cells=64 | put 0-63*1 | drop 99:0-",
      "cells=65 | put 0*65 | drop 99:0-"}},
    {"batch_65", {"cells=65 | start 0*65"}, {"cells=65 | start 0*64"}},
    {"batch_257", {"cells=257 | start 0*257"}, {"cells=257 | start 0*256"}},
    {"except_65",
     {"cells=66 | put 0*66 except=65", "cells=66 | put 0*66 except=0,65"},
     {"cells=66 | put 0*66 except=64", "cells=66 | put 0*66 except=0,64"}},
    {"columns_257",
     {"pad=257 cells=257 | put 0*1"},
     {"pad=256 cells=256 | put 0*1"}},
    {"columns_1025",
     {"pad=1025 cells=1025 | put 0*1"},
     {"pad=1024 cells=1024 | put 0*1"}},
    {"layers_17",
     {"layers=17 | put 0*1"},
     {"layers=16 | put 0*1", "layers=17 seqs=1 cap=1 batch=2 | put 0*2"}},
    {"row_257",
     {"dims=257,1,1 | put 0*1", "dims=129,2,1 | put 0*1"},
     {"dims=256,1,1 | put 0*1", "dims=128,2,1 | put 0*1",
      "dims=1,1,257 | put 0*1"}},
    {"mask_padded_by_64",
     {"maskpad=66 | put 0*1"},
     {"maskpad=65 | put 0*1", "maskpad=66 | put 0*2"}},
};

const std::vector<Row> kRemoveRows = {
    {"remove_nothing",
     {"| put 0*1 | drop 0:1-"},
     {"| put 0*1 | drop 0:0-", "| put 0*1 | drop 1:1-",
      "shift=identity | put 0*1 | drop 0:1-1"}},
    {"remove_unknown", {"| put 0*1 | drop 1:0-"}, {"| put 0*1 | drop 0:1-"}},
    {"remove_all_open",
     {"| put 0*2 | drop 0:0-", "| put 0*1@+2147483647 | drop 0:0-"},
     {"| put 0*2 | drop 0:1-", "| put 0*2 | drop 0:0-2",
      "| put 0*1 | drop 1:0-"}},
    {"remove_all_range",
     {"| put 0*2 | drop 0:0-2"},
     {"| put 0*2 | drop 0:0-", "shift=identity | put 0*2 | drop 0:0-1",
      "shift=identity | put 0*2 | drop 0:1-2", "| put 0*1 | drop 1:0-1"}},
    {"remove_zero_length",
     {"shift=identity | put 0*1 | drop 0:0-0"},
     {"shift=identity | put 0*1 | drop 0:0-1",
      "shift=identity | put 0*1 | drop 1:0-0", "| put 0*1 | drop 0:0-0"}},
    {"remove_past_end",
     {"| put 0*1 | drop 0:0-2"},
     {"| put 0*1 | drop 0:0-1", "| put 0*1 | drop 0:0-",
      "shift=identity | put 0*1 | drop 0:1-3"}},
    {"remove_one_owner",
     {"| put 0*1 | copy 0>1:1 | drop 0:0-"},
     {"| put 0*1 | drop 0:0-", "| put 0*2 | copy 0>1:1 | drop 0:1-",
      "| put 0*1 2*1 | copy 0>1:1 | drop 2:0-"}},
    {"remove_at_window",
     {"kind=swa window=2 shift=identity cells=6 | put 0*4 | drop 0:1-2",
      "kind=swa window=2 shift=identity cells=6 | put 0*4 | drop 0:1-3"},
     {"kind=swa window=2 shift=identity cells=6 | put 0*4 | drop 0:1-4",
      "kind=swa window=2 shift=identity cells=6 | put 0*4 | drop 0:2-3",
      "kind=swa window=2 shift=identity cells=6 | put 0*4 | drop 0:1-1",
      "kind=swa window=2 shift=identity cells=6 | put 0*3 | drop 0:0-1",
      "kind=swa window=2 shift=identity cells=6 | put 0*4@+2147483644 | "
      "drop 0:2147483645-",
      "shift=identity cells=6 | put 0*4 | drop 0:1-2"}},
    {"remove_in_pass",
     {"| put 0*1 | drop 0:0-"},
     {"| put 0*1 | reload | drop 0:0-",
      "shift=identity | put 0*1 | put 0*1 | drop 0:0-1",
      "| put 0*1 | put 1*1 | drop 0:0-"}},
    {"shift",
     {"shift=identity | put 0*2 | drop 0:0-1"},
     {"shift=identity | put 0*2 | drop 0:0-0",
      "shift=identity | put 0*2 | drop 0:1-2",
      "shift=identity | put 0*2@+2147483646 | drop 0:2147483646-",
      "shift=identity | put 0*2 1*1 | drop 1:0-1"}},
    {"shift_shared_earlier",
     {"shift=identity | put 0*3 | copy 0>1:1 | drop 0:1-2"},
     {"shift=identity | put 0*3 | drop 0:1-2",
      "shift=identity | put 0*3 | copy 0>1:1 | drop 0:0-1",
      "shift=identity | put 0*2 | copy 0>1:1 | drop 0:1-2",
      "shift=identity | put 0*2 | copy 0>1:1 | drop 0:1-1"}},
    {"shift_refused_shared",
     {"shift=identity | put 0*2 | copy 0>1:2 | drop 0:0-1"},
     {"shift=identity | put 0*2 | copy 0>1:1 | drop 0:0-1",
      "| put 0*2 | drop 0:0-1"}},
    {"shift_refused_none",
     {"| put 0*2 | drop 0:0-1"},
     {"shift=identity | put 0*2 | drop 0:0-1", "| put 0*2 | drop 0:0-2",
      "| put 0*2 | drop 0:1-",
      "shift=identity | put 0*2 | copy 0>1:2 | drop 0:0-1"}},
    {"shift_f16",
     {"dtype=f16 shift=identity | put 0*2 | drop 0:0-1"},
     {"dtype=bf16 shift=identity | put 0*2 | drop 0:0-1",
      "dtype=f16 shift=identity | put 0*2 keep | drop 0:0-1",
      "dtype=f16 shift=identity | put 0*2 | drop 0:0-0"}},
    {"shift_bf16",
     {"dtype=bf16 shift=identity | put 0*2 | drop 0:0-1"},
     {"dtype=f16 shift=identity | put 0*2 | drop 0:0-1",
      "dtype=bf16 shift=identity | put 0*2 keep | drop 0:0-1",
      "dtype=bf16 shift=identity | put 0*2 | drop 0:0-0"}},
    {"shift_f8",
     {"dtype=f8_e4m3 shift=identity | put 0*2 | drop 0:0-1"},
     {"dtype=bf16 shift=identity | put 0*2 | drop 0:0-1",
      "dtype=f8_e4m3 shift=identity | put 0*2 keep | drop 0:0-1",
      "dtype=f8_e4m3 shift=identity | put 0*2 | drop 0:0-0"}},
    {"shift_blocks",
     {"dtype=q8_0 dims=32,1,32 shift=identity | put 0*2 | drop 0:0-1",
      "dtype=q4_0 dims=32,1,32 shift=identity | put 0*2 | drop 0:0-1"},
     {"dtype=f8_e4m3 vdtype=q8_0 dims=32,1,32 shift=identity | put 0*2 | "
      "drop 0:0-1",
      "dtype=q8_0 dims=32,1,32 shift=identity | put 0*2 keep | drop 0:0-1",
      "dtype=q8_0 dims=32,1,32 shift=identity | put 0*2 | drop 0:0-0"}},
    {"shift_layers",
     {"layers=2 shift=identity | put 0*2 | drop 0:0-1"},
     {"layers=1 shift=identity | put 0*2 | drop 0:0-1",
      "layers=2 shift=identity | start 0*2 | store | drop 0:0-1",
      "layers=2 shift=identity | put 0*1 | put 0*1 keep | drop 0:0-1",
      "layers=2 shift=identity | put 0*2 | drop 0:0-0"}},
    {"shift_bare",
     {"shift=identity | put 0*2 keep | drop 0:0-1"},
     {"shift=identity | put 0*2 | drop 0:0-1",
      "shift=identity | put 0*1 keep | put 0*1 | drop 0:0-1",
      "shift=identity | put 0*2 keep | drop 0:0-0"}},
    {"wrapper_remove_refused",
     {"kind=wrapper caches=causal:identity/causal | put 0*2 | drop 0:0-1"},
     {"kind=wrapper caches=causal/causal:identity | put 0*2 | drop 0:0-1",
      "kind=wrapper caches=causal:identity/causal | put 0*2 | drop 0:0-2",
      "kind=wrapper caches=encoder/causal seqs=1 | put 0*2 | drop 0:0-1",
      "| put 0*2 | drop 0:0-1"}},
};

const std::vector<Row> kOtherRows = {
    {"copy_self",
     {"| put 0*2 | copy 0>0:1"},
     {"| put 0*2 | copy 0>0:2", "| put 0*2 | copy 0>1:1", "| copy 0>0:0"}},
    {"copy_self_whole",
     {"| put 0*1 | copy 0>0:1"},
     {"| put 0*2 | copy 0>0:1", "| put 0*1 | copy 0>1:1", "| copy 0>0:1"}},
    {"copy_onto_live",
     {"| put 0*1 1*1 | copy 0>1:1"},
     {"| put 0*1 | copy 0>1:1", "| put 1*1 | copy 0>1:1",
      "| put 0*1 1*1 | copy 0>1:0", "| put 0*1 2*1 | copy 0>1:1",
      "| put 0*1 | copy 0>1:1 | copy 0>1:1"}},
    {"copy_onto_copy",
     {"| put 0*1 | copy 0>1:1 | copy 0>1:1"},
     {"| put 0*1 1*1 | copy 0>1:1", "| put 0*1 | copy 0>1:1 | copy 0>1:0",
      "| put 0*1 | copy 0>1:1 | copy 0>2:1", "| put 0*1 | copy 0>0:1"}},
    {"copy_nothing",
     {"| put 1*1 | copy 0>1:1"},
     {"| put 0*1 1*1 | copy 0>1:0", "| put 2*1 | copy 0>1:1"}},
    {"copy_third",
     {"| put 0*1 | copy 0>1:1 | copy 0>2:1"},
     {"| put 0*1 | copy 0>1:1", "| put 0*1 | copy 0>1:1 | copy 0>1:1",
      "| put 0*1 | copy 0>1:1 | copy 0>2:0"}},
    {"copy_beyond",
     {"| put 0*1 | copy 0>1:2"},
     {"| put 0*1 | copy 0>1:1", "| copy 0>1:1", "| put 0*1 | copy 0>0:2"}},
    {"copy_refused",
     {"kind=encoder seqs=1 | copy 0>1:1",
      "kind=wrapper caches=causal/encoder seqs=1 | copy 0>1:1"},
     {"| copy 0>1:1"}},
    {"copy_in_pass",
     {"| put 0*1 | copy 0>1:1"},
     {"| put 0*1 | reload | copy 0>1:1", "| put 0*1 | put 0*1 | copy 0>1:1",
      "| put 0*1 | copy 0>0:1", "| put 2*1 | copy 0>1:1"}},
    {"resume_edge",
     {"kind=swa window=1 cells=2 | put 0*1@+1 | ask 0@2"},
     {"kind=swa window=1 cells=2 | put 0*1 | ask 0@1",
      "kind=swa window=1 cells=2 | put 0*1 | put 0*1 | ask 0@2",
      "kind=swa window=1 cells=2 | put 0*1@+1 | ask 0@1",
      "kind=swa window=2 cells=4 | put 0*1@+1 | ask 0@3",
      "kind=swa window=1 seqs=1 cap=1 batch=1 | put 0*1@+1 | ask 0@2"}},
    {"resume_evicted",
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1 | put 0*1 | ask 0@1",
      "kind=swa window=2 cells=4 | put 0*1@+1 | ask 0@2"},
     {"kind=swa window=1 cells=2 | put 0*1 | put 0*1 | ask 0@1",
      "kind=swa window=1 cells=2 | put 0*1 | ask 0@2",
      "kind=swa window=1 cells=2 | ask 0@0"}},
    {"resume_past_end",
     {"kind=swa window=1 cells=2 | put 0*1 | ask 0@2"},
     {"kind=swa window=1 cells=2 | put 0*1 | ask 0@1",
      "kind=swa window=1 cells=2 | ask 0@1",
      "kind=swa window=2 cells=4 | put 0*1@+1 | ask 0@2"}},
    {"resume_unknown",
     {"kind=swa window=1 cells=2 | ask 0@0"},
     {"kind=swa window=1 cells=2 | put 0*1 | ask 0@0", "| ask 0@0",
      "kind=encoder seqs=1 | ask 0@0"}},
    {"resume_split",
     {"kind=wrapper caches=causal/swa:w1 | ask 0@0",
      "kind=wrapper caches=causal/swa:w1/causal | ask 0@0"},
     {"kind=wrapper caches=swa:w1/swa:w1 | ask 0@0",
      "kind=wrapper caches=causal/causal | ask 0@0",
      "kind=wrapper caches=causal/swa:w1/swa:w1 | ask 0@0",
      "kind=swa window=1 cells=2 | ask 0@0"}},
    {"encoder_reput",
     {"kind=encoder seqs=1 | put 0*1 image=0 | put 0*1 image=0"},
     {"kind=encoder seqs=1 | put 0*1 image=0", "| put 0*1 | put 0*1",
      "kind=encoder seqs=1 | put 0*1 image=0 | put 0*1 image=0 reserve",
      "kind=wrapper caches=causal/encoder seqs=1 | start 0*1 | store | "
      "type 1 | store"}},
    {"encoder_forgets",
     {"kind=encoder seqs=1 | put 0*1 image=0 | drop 0:0-1"},
     {"kind=encoder seqs=1 | put 0*1 image=0 | drop 0:1-2",
      "kind=encoder seqs=1 | put 0*1 | drop 0:0-1"}},
    {"encoder_keeps",
     {"kind=encoder seqs=1 | put 0*1 image=0 | drop 0:1-2"},
     {"kind=encoder seqs=1 | put 0*1 image=0 | drop 0:0-1",
      "kind=encoder seqs=1 | put 0*1 image=0 | drop 0:1-1",
      "kind=encoder seqs=1 | put 0*1 | drop 0:1-2"}},
};

std::vector<Row> AllRows() {
  std::vector<Row> all;
  for (const auto* rows : {&kStartForwardRows, &kPassRows, &kOrderRows,
                           &kLargeRows, &kRemoveRows, &kOtherRows}) {
    all.insert(all.end(), rows->begin(), rows->end());
  }
  return all;
}

// Runs a history on a twin and adds the marks that it hits to `counts`.
void RunLine(std::string_view line, std::string_view twin,
             CoverageCounts& counts) {
  const Result<History> history = ParseHistory("kvt1 " + std::string(line));
  ASSERT_TRUE(history.ok()) << line << ": " << history.status().ToString();
  const RunResult result =
      RunHistory(*history, TwinSubject(twin), {.counts = &counts});
  EXPECT_TRUE(result.ran) << line;
  EXPECT_FALSE(result.failure) << line << ": " << result.failure->check;
}

std::int64_t HitsOf(std::string_view mark, const CoverageCounts& counts) {
  const auto* const found = std::find_if(
      kCoverageMarks.begin(), kCoverageMarks.end(),
      [&](const CoverageMark& entry) { return entry.name == mark; });
  if (found == kCoverageMarks.end()) return -1;
  return At(counts.hits, found - kCoverageMarks.begin());
}

class CoverageMarks : public testing::TestWithParam<std::string_view> {};

TEST_P(CoverageMarks, AreHitByTheirOwnStateOnly) {
  for (const Row& row : AllRows()) {
    for (const std::string_view line : row.hits) {
      CoverageCounts counts;
      RunLine(line, GetParam(), counts);
      EXPECT_GT(HitsOf(row.mark, counts), 0) << row.mark << ": " << line;
    }
    for (const std::string_view line : row.misses) {
      CoverageCounts counts;
      RunLine(line, GetParam(), counts);
      EXPECT_EQ(HitsOf(row.mark, counts), 0) << row.mark << ": " << line;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Twins, CoverageMarks,
                         testing::Values("reference", "optimized"));

TEST(CoverageMarksTable, HasARowForEachMark) {
  std::multiset<std::string_view> expected;
  for (const CoverageMark& mark : kCoverageMarks) {
    // drafts_test.cc has the rows of the marks from here on.
    if (mark.name == kFirstDraftMark) break;
    expected.insert(mark.name);
  }
  std::multiset<std::string_view> found;
  for (const Row& row : AllRows()) {
    found.insert(row.mark);
    EXPECT_FALSE(row.hits.empty()) << row.mark;
    EXPECT_FALSE(row.misses.empty()) << row.mark;
  }
  EXPECT_EQ(found, expected);
}

TEST(CoverageCounts, CountsEachHit) {
  CoverageCounts once;
  RunLine("| put 0*2r", "reference", once);
  EXPECT_EQ(HitsOf("unsorted", once), 1);
  CoverageCounts twice;
  RunLine("| put 0*2r | put 0*2r", "reference", twice);
  EXPECT_EQ(HitsOf("unsorted", twice), 2);
  twice.Add(once);
  EXPECT_EQ(HitsOf("unsorted", twice), 3);
}

// Returns the counts of one history, which must run.
CoverageCounts CountsOf(std::string_view line) {
  CoverageCounts counts;
  RunLine(line, "reference", counts);
  EXPECT_EQ(counts.histories, 1) << line;
  EXPECT_EQ(counts.discarded, 0) << line;
  return counts;
}

TEST(CoverageCounts, CountsRefusals) {
  EXPECT_EQ(CountsOf("cells=2 | put 0*2 | put 0*1").refused, 1);
  EXPECT_EQ(CountsOf("cells=3 | put 0*2 | put 0*1").refused, 0);
  EXPECT_EQ(CountsOf("| put 0*2 | drop 0:0-1").refused, 1);
  EXPECT_EQ(
      CountsOf("shift=identity | put 0*2 | copy 0>1:2 | drop 0:0-1").refused,
      1);
  EXPECT_EQ(CountsOf("| ask 0@0").calls,
            CountsOf("| ask 0@0 | ask 0@0").calls - 1);
}

TEST(CoverageCounts, CountsHistoriesWithAFullCache) {
  EXPECT_EQ(CountsOf("cells=2 | put 0*2 | drop 0:0-").full, 1);
  EXPECT_EQ(CountsOf("cells=2 | put 0*1 | drop 0:0-").full, 0);
  EXPECT_EQ(CountsOf("cells=2 | put 0*1 | put 0*2").full, 1);
}

TEST(CoverageCounts, CountsDiscardedHistories) {
  const Result<History> history =
      ParseHistory("kvt1 kind=swa_mem window=2 memory=1 seqs=1 | put 0*1");
  ASSERT_TRUE(history.ok());
  CoverageCounts counts;
  EXPECT_FALSE(
      RunHistory(*history, TwinSubject("reference"), {.counts = &counts}).ran);
  EXPECT_EQ(counts.histories, 1);
  EXPECT_EQ(counts.discarded, 1);
}

}  // namespace
}  // namespace kvtwin::props
