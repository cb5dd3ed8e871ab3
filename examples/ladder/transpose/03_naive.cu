// Each thread moves one element, and no shared memory is used. Memory is accessed by sectors of 32
// bytes, so a warp's 32 elements take 4 sectors where they are adjacent and up to 32 where not.
// With kAlongReads adjacent lanes read adjacent elements of x; otherwise they write adjacent ones
// of y.
//
// The shape of the block decides how a warp covers the matrix. In a block of 64x8 it is 32 elements
// of a row: 4 sectors on one side, 32 on the other. In one of 8x8 it is 4 rows of 8: 4 sectors on
// one side, 8 half-used ones on the other.
//
// Expect: the side that is not coalesced decides. Along writes is faster: a sector that was read is
// still in the cache when the next column's warp wants it, while sectors written in parts have to
// be merged. Shapes that cover 8 elements both ways need a quarter of the sectors of a long warp.
template <bool kAlongReads>
__global__ void naive(const float* x, float* y, int rows, int columns) {
  const int along = blockIdx.x * blockDim.x + threadIdx.x;
  const int across = blockIdx.y * blockDim.y + threadIdx.y;
  const int row = kAlongReads ? across : along, column = kAlongReads ? along : across;
  if (row >= rows || column >= columns) return;
  y[static_cast<long long>(column) * rows + row] =
      x[static_cast<long long>(row) * columns + column];
}
