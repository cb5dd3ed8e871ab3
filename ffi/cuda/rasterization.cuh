// Which output tile a block computes.
#pragma once

#include "types.cuh"

namespace tilekern {

struct TileCoordinates {
  int m;
  int n;
};

// Tiles in bands of `band` tile rows, column by column within a band. Blocks that run at the same
// time then cover a compact patch of the output, and share rows of lhs and columns of rhs in the
// second-level cache:
//
//     band = 2:   0  2  4  6
//                 1  3  5  7
//                 8  9 10 11      (the last band may be lower)
inline TileCoordinates banded_tile(int index, int tiles_m, int tiles_n, int band) {
  const int per_band = band * tiles_n;
  const int first = index / per_band * band;
  const int height = min_of(band, tiles_m - first);
  const int within = index % per_band;
  return {first + within % height, within / height};
}

}  // namespace tilekern
