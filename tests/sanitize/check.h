// Counts of what held and what did not, for the closing line.
#pragma once

#include <cstdio>
#include <string>

struct Counts {
  int passed = 0, failed = 0;

  void Check(bool holds, const std::string& what) {
    ++(holds ? passed : failed);
    if (!holds) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  }
};

// Each prints a line or two of what it did. A sanitizer's finding ends the process instead.
void CheckProducts(Counts& counts, bool threads_only);              // products.cc
void CheckRaggedProducts(Counts& counts, bool threads_only);        // ragged_products.cc
void CheckArrays(Counts& counts, bool threads_only);                // arrays.cc
void CheckSmallMatrices(Counts& counts, bool threads_only);         // small_matrices.cc
void CheckMatrixDecompositions(Counts& counts, bool threads_only);  // matrix_decompositions.cc
void CheckHostileCalls(Counts& counts);                             // hostile_calls.cc
void CheckHostileRaggedCalls(Counts& counts);                       // hostile_ragged_calls.cc
void CheckHostileArrayCalls(Counts& counts);                        // hostile_array_calls.cc
void CheckHostilePlans(Counts& counts);                             // hostile_plans.cc
void CheckBranches(Counts& counts);                                 // branches.cc
void CheckOverlap(Counts& counts);                                  // overlap.cc
