// PTX instructions as functions. Shared-memory addresses are 32-bit, as in PTX, which keeps 64-bit
// arithmetic out of the inner loops.
//
// Instructions that access memory are volatile with a memory clobber, so the compiler does not move
// them across barriers and waits. Arithmetic instructions are neither, so the compiler schedules
// them freely.
#pragma once

#include "types.cuh"

namespace tilekern {

inline uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// The larger number, or NaN if either is NaN.
inline float max_or_nan(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// Copies kBytes to shared memory asynchronously. Unless `inside`, it writes zeros and reads
// nothing. Copies of 16 bytes bypass L1.
template <int kBytes>
inline void cp_async(uint32 destination, const void* source, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const int outside = !inside;
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n"
        "  .reg .pred outside;\n"
        "  setp.ne.s32 outside, %2, 0;\n"
        "  cp.async.cg.shared.global.L2::128B [%0], [%1], 16, outside;\n"
        "}" ::"r"(destination),
        "l"(source), "r"(outside)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        "  .reg .pred outside;\n"
        "  setp.ne.s32 outside, %3, 0;\n"
        "  cp.async.ca.shared.global [%0], [%1], %2, outside;\n"
        "}" ::"r"(destination),
        "l"(source), "n"(kBytes), "r"(outside)
        : "memory");
  }
}

// Copies 16 bytes to shared memory asynchronously: the first `bytes` of `source`, and zeros.
inline void cp_async_partly(uint32 destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

// Prefetches bytes to L2, with those that complete the first and the last 16 bytes.
inline void prefetch_to_l2(const void* first, int bytes) {
  const uint64 begin = reinterpret_cast<uint64>(first) & ~uint64{15};
  const uint64 end = (reinterpret_cast<uint64>(first) + bytes + 15) & ~uint64{15};
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin),
               "r"(static_cast<uint32>(end - begin)));
}

// Prefetches a line to L2.
inline void prefetch_line_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Commits this thread's copies since the last call as a group, which may be empty.
inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Programmatic dependent launch, for the launches of a plan that overlap (sm_90). The CTAs of the
// next launch may start once all CTAs of this one have called launch_dependents() or have ended.
inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the launch before has ended and its writes are visible, if this launch overlaps with
// it. Every CTA calls it: launches further back have ended when the launch before has. Before the
// call, a kernel touches nothing that the launch before writes, and writes nothing that it reads.
inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline uint32 load_global(const uint32* address) {
  uint32 word;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  return word;
}

// Loads a float, where the instruction stands.
inline float load_global(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

// Loads and stores 64 bits at once that threads of other CTAs store and load meanwhile.
inline uint64 load_relaxed(const uint64* address) {
  uint64 bits;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
  return bits;
}
inline void store_relaxed(uint64* address, uint64 bits) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(bits) : "memory");
}

// Loads kWords 32-bit words of shared memory in one instruction.
template <int kWords>
inline void load_shared(uint32 (&words)[kWords], uint32 address) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
}

inline void load_shared(float (&values)[2], uint32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(values[0]), "=f"(values[1])
               : "r"(address)
               : "memory");
}
inline void load_shared(float (&values)[4], uint32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}

inline void load_shared(double (&values)[2], uint32 address) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(values[0]), "=d"(values[1])
               : "r"(address)
               : "memory");
}

// Loads a value of 1, 2, 4, 8 or 16 bytes.
template <typename T>
inline T load_shared_as(uint32 address) {
  T value;
  if constexpr (sizeof(T) == 1) {
    uint32 bits;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    value = static_cast<T>(bits);
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("ld.shared.u16 %0, [%1];"
                 : "=h"(reinterpret_cast<uint16&>(value))
                 : "r"(address)
                 : "memory");
  } else {
    load_shared(reinterpret_cast<uint32(&)[sizeof(T) / 4]>(value), address);
  }
  return value;
}

// Stores kWords 32-bit words to shared memory in one instruction.
template <int kWords>
inline void store_shared(uint32 address, const uint32 (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(words[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

inline void store_shared(uint32 address, uint16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// Stores one or two adjacent values from registers of their own type. A copy of a float to an
// integer register, as the function above would need, may make ptxas serialize wgmma.
inline void store_shared(uint32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
inline void store_shared(uint32 address, int32 value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
inline void store_shared(uint32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}
inline void store_shared(uint32 address, int32 first, int32 second) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second)
               : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane 8 * i + r gives the address of row r of matrix
// i; afterwards lane 4 * g + t holds bytes 4 * t to 4 * t + 3 of row g of matrix i in words[i].
inline void ldmatrix(uint32 (&words)[4], uint32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

// The same with each matrix transposed: lane 4 * g + t holds elements g of rows 2 * t, 2 * t + 1.
inline void ldmatrix_trans(uint32 (&words)[4], uint32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

// Stores four 8x8 matrices of 16-bit elements, the inverse of ldmatrix() (sm_90).
inline void stmatrix(uint32 row_address, const uint32 (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// The inverse of ldmatrix_trans().
inline void stmatrix_trans(uint32 row_address, const uint32 (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// Selects four of the bytes of {high, low}: nibble i of `selector` is the index of byte i.
inline uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  uint32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// Returns the low 32 bits of {high, low} >> (shift & 31).
inline uint32 funnel_shift_right(uint32 low, uint32 high, uint32 shift) {
  uint32 word;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(shift));
  return word;
}

// Rounds a float32 to the nearest TF32.
inline uint32 round_to_tf32(uint32 bits) {
  uint32 rounded;
#if __CUDA_ARCH__ >= 900
  // This is one instruction. Older architectures round ties away from zero only, in two.
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
#endif
  return rounded;
}

// Converts the four 8-bit floats of a word to float16, which represents them exactly.
inline void widen(uint32 (&halves)[2], float8_e4m3fn*, uint32 bytes) {
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "  cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(bytes));
}
inline void widen(uint32 (&halves)[2], float8_e5m2*, uint32 bytes) {
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.rn.f16x2.e5m2x2 %0, low;\n"
      "  cvt.rn.f16x2.e5m2x2 %1, high;\n"
      "}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(bytes));
}

// Converts two accumulators to two adjacent elements of memory.
inline void pack_pair(uint32 (&words)[1], bfloat16*, float first, float second) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[0]) : "f"(second), "f"(first));
}
inline void pack_pair(uint32 (&words)[1], float16*, float first, float second) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[0]) : "f"(second), "f"(first));
}
inline void pack_pair(uint32 (&words)[2], float*, float first, float second) {
  words[0] = __float_as_uint(first);
  words[1] = __float_as_uint(second);
}
inline void pack_pair(uint32 (&words)[2], int32*, int32 first, int32 second) {
  words[0] = static_cast<uint32>(first);
  words[1] = static_cast<uint32>(second);
}
inline void pack_pair(uint32 (&words)[4], double*, double first, double second) {
  words[0] = static_cast<uint32>(__double2loint(first));
  words[1] = static_cast<uint32>(__double2hiint(first));
  words[2] = static_cast<uint32>(__double2loint(second));
  words[3] = static_cast<uint32>(__double2hiint(second));
}

}  // namespace tilekern
