// The rasterization order: which output tile a CTA computes.
#pragma once

#include "types.cuh"

namespace tilekern {

struct TileCoordinates {
  int m;
  int n;
};

// Grouped rasterization: tiles are numbered column by column within groups of `group_height` tile
// rows. Concurrent CTAs then cover a compact part of the output, and share rows of lhs and columns
// of rhs in L2:
//
//     group_height = 2:   0  2  4  6
//                         1  3  5  7
//                         8  9 10 11      (the last group may be lower)
inline TileCoordinates rasterized_tile(int index, int tiles_m, int tiles_n, int group_height) {
  const int per_group = group_height * tiles_n;
  const int first = index / per_group * group_height;
  const int height = min_of(group_height, tiles_m - first);
  const int within = index % per_group;
  return {first + within % height, within / height};
}

}  // namespace tilekern
