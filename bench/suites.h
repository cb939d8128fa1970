// The suites of Google Benchmark: each costly operation, over sizes, layouts,
// twins and SIMD targets.

#ifndef KVTWIN_BENCH_SUITES_H_
#define KVTWIN_BENCH_SUITES_H_

namespace kvtwin::bench {

// Verifies both twins on every target, registers the suites, and runs those
// that the flags of Google Benchmark select. Returns the exit code.
int RunSuites();

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_SUITES_H_
