// Runs the C++ of the package under the sanitizers that it was built with; see .ci/sanitize.
// With the argument "threads" only what threads share: the rest has nothing to say to TSan.
#include <string_view>

#include "check.h"

int main(int argc, char** argv) {
  const bool threads_only = argc > 1 && std::string_view(argv[1]) == "threads";
  Counts counts;
  if (!threads_only) {
    CheckHostilePlans(counts);
    CheckBranches(counts);
    CheckHostileCalls(counts);
    CheckHostileRaggedCalls(counts);
    CheckHostileArrayCalls(counts);
  }
  CheckOverlap(counts);
  CheckProducts(counts, threads_only);
  CheckRaggedProducts(counts, threads_only);
  CheckArrays(counts, threads_only);
  CheckSmallMatrices(counts, threads_only);
  CheckMatrixDecompositions(counts, threads_only);
  std::printf("%d passed, %d failed\n", counts.passed, counts.failed);
  return counts.failed == 0 ? 0 : 1;
}
