// QR factors of small matrices by Householder reflections, with LAPACK's signs (Golub and Van Loan,
// section 5.2).
#pragma once

#include "linalg/matrix_group.cuh"

namespace tilekern {

template <typename T, int kM, int kN, bool kVectors, bool kFull>
struct QrSizes {
  static constexpr int kOrder = kFull ? kM : min_of(kM, kN);
  static constexpr int kLanes = group_lanes(kM, kN, max_of(kN, kOrder));
  static constexpr int kStride = MatrixGroup<T, kLanes, 0>::row_stride(kM);
  static constexpr int kBasis = kN * kStride;
  static constexpr int kTaus = kBasis + kVectors * kOrder * kStride;
  static constexpr int kElements = kTaus + min_of(kM, kN);
  using Group = MatrixGroup<T, kLanes, kElements>;
};

// q (m, k or m), which is written if kVectors, and r (k or m, n).
template <typename T, int kM, int kN, bool kVectors, bool kFull>
__global__ void __launch_bounds__(32) matrix_qr(const T* matrices, T* q, T* r, int64 count) {
  using Sizes = QrSizes<T, kM, kN, kVectors, kFull>;
  using Group = typename Sizes::Group;
  constexpr int kStride = Sizes::kStride, kOrder = Sizes::kOrder;
  const Group group(count);
  T held[Group::kRegisters ? Sizes::kElements : 1];
  T* const own = Group::kRegisters ? held : group.memory + group.index * Group::kSize;
  T *const basis = own + Sizes::kBasis, *const taus = own + Sizes::kTaus;
  group.template load<kM, kN>(own, matrices, [](T* own, int row, int column, T value) {
    own[column * kStride + row] = value;
  });
  const auto row = [&](int i) { return own + i * kStride; };
  group.factor(row, kN, kM, taus);
  group.template store<kOrder, kN>(own, r, [](T* own, int row, int column) {
    return row > column ? T(0) : own[column * kStride + row];
  });
  if constexpr (kVectors) {
    group.set_identity(basis, kOrder, kStride);
    group.sync();
    group.apply_reflections(row, min_of(kM, kN), kM, taus, basis, kOrder, kStride,
                            /*units=*/true);
    group.template store<kM, kOrder>(own, q, [](T* own, int row, int column) {
      return own[Sizes::kBasis + column * kStride + row];
    });
  }
}

}  // namespace tilekern
