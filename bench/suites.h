// The suites of Google Benchmark: each thing that costs, over sizes, layouts,
// twins and SIMD targets.

#ifndef KVTWIN_BENCH_SUITES_H_
#define KVTWIN_BENCH_SUITES_H_

namespace kvtwin::bench {

// Verifies both twins on every target, registers, and runs what the flags of
// Google Benchmark ask for. The exit code.
int RunSuites();

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_SUITES_H_
