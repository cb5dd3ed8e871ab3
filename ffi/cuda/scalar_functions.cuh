// The elementwise primitives of jax.lax as functions of scalars, with XLA's semantics: NaNs, signed
// zeros, wrapping integers, division by zero, and shifts and conversions out of range.
//
// `jax_tilekern/epilogue/primitives.py` says which primitive is which function. Values of bfloat16
// and float16 are floats here: generated code rounds after each operation (rounded()).
#pragma once

#include "convert.cuh"
#include "types.cuh"

namespace tilekern::lax {

template <typename T>
inline constexpr bool kIsFloat = kSame<T, float> || kSame<T, double>;
template <typename T>
inline constexpr bool kIsSigned = kIsFloat<T> || T(-1) < T(0);

template <typename T>
struct UnsignedOf {
  using Type = Select<sizeof(T) == 8, uint64,
                      Select<sizeof(T) == 4, uint32, Select<sizeof(T) == 2, uint16, uint8>>>;
};
template <typename T>
using Unsigned = typename UnsignedOf<T>::Type;

// Rounds a float to a type of 16 bits.
template <typename T>
inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

// -- Arithmetic. Signed integers wrap as unsigned ones do. -------------------------------------

template <typename T>
inline T add(T x, T y) {
  if constexpr (kIsFloat<T>) return x + y;
  return static_cast<T>(Unsigned<T>(x) + Unsigned<T>(y));
}
// A sum of cotangents or of a reduction: a constant 0 adds nothing, and not even the sign of a
// zero.
template <typename T>
inline T add_any(T x, T y) {
#if __has_builtin(__builtin_constant_p)  // not NVRTC 13.3
  if (__builtin_constant_p(y) && y == T(0)) return x;
  if (__builtin_constant_p(x) && x == T(0)) return y;
#endif
  return add(x, y);
}
template <typename T>
inline T sub(T x, T y) {
  if constexpr (kIsFloat<T>) return x - y;
  return static_cast<T>(Unsigned<T>(x) - Unsigned<T>(y));
}
template <typename T>
inline T mul(T x, T y) {
  if constexpr (kIsFloat<T>) return x * y;
  // Products of 16 bits would be promoted to signed ones of 32 bits.
  return static_cast<T>(uint64(Unsigned<T>(x)) * uint64(Unsigned<T>(y)));
}
template <typename T>
inline T neg(T x) {
  if constexpr (kIsFloat<T>) return -x;
  return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(x));
}

// The error of this division is at most 2 ulp, as that of XLA's.
inline float div(float x, float y) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}
inline double div(double x, double y) { return x / y; }
template <typename T>
inline T div(T x, T y) {
  if (y == 0) return static_cast<T>(-1);
  if (kIsSigned<T> && y == static_cast<T>(-1)) return neg(x);
  return static_cast<T>(x / y);
}

inline float rem(float x, float y) { return fmodf(x, y); }
inline double rem(double x, double y) { return fmod(x, y); }
template <typename T>
inline T rem(T x, T y) {
  if (y == 0) return x;
  if (kIsSigned<T> && y == static_cast<T>(-1)) return 0;
  return static_cast<T>(x % y);
}

inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return ::fabs(x); }
template <typename T>
inline T abs(T x) {
  return kIsSigned<T> && x < 0 ? neg(x) : x;
}

// NaNs and zeros are their own signs.
template <typename T>
inline T sign(T x) {
  if constexpr (kIsFloat<T>) return x > 0 ? T(1) : x < 0 ? T(-1) : x;
  return static_cast<T>((x > 0) - (kIsSigned<T> && x < 0));
}

template <typename T>
inline T square(T x) {
  return mul(x, x);
}

// 1 - x * x, rounded once.
inline float one_minus_square(float x) { return fmaf(-x, x, 1.0f); }
inline double one_minus_square(double x) { return fma(-x, x, 1.0); }
template <typename T>
inline T one_minus_square(T x) {
  return sub(T(1), mul(x, x));
}

// -- Order. The maximum and the minimum of a NaN and a number are NaN. ---------------------------

inline float max(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
inline float min(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
inline double max(double x, double y) { return x != x || x >= y ? x : y; }
inline double min(double x, double y) { return x != x || x <= y ? x : y; }
template <typename T>
inline T max(T x, T y) {
  return x > y ? x : y;
}
template <typename T>
inline T min(T x, T y) {
  return x < y ? x : y;
}
template <typename T>
inline T clamp(T low, T x, T high) {
  return min(max(x, low), high);
}

template <typename T>
inline bool eq(T x, T y) {
  return x == y;
}
template <typename T>
inline bool ne(T x, T y) {
  return x != y;
}
template <typename T>
inline bool lt(T x, T y) {
  return x < y;
}
template <typename T>
inline bool le(T x, T y) {
  return x <= y;
}
template <typename T>
inline bool gt(T x, T y) {
  return x > y;
}
template <typename T>
inline bool ge(T x, T y) {
  return x >= y;
}
// The total order of floats: a NaN lies beyond the infinity of its sign, and -0 before 0.
inline int32 in_total_order(float x) {
  const int32 bits = __builtin_bit_cast(int32, x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
inline int64 in_total_order(double x) {
  const int64 bits = __builtin_bit_cast(int64, x);
  return bits < 0 ? bits ^ 0x7fffffffffffffffll : bits;
}
template <typename T>
inline T in_total_order(T x) {
  return x;
}
template <typename T>
inline bool lt_to(T x, T y) {
  return in_total_order(x) < in_total_order(y);
}
template <typename T>
inline bool le_to(T x, T y) {
  return in_total_order(x) <= in_total_order(y);
}
inline bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }
inline bool is_finite(double x) { return ::fabs(x) < __longlong_as_double(0x7ff0000000000000ll); }

// `which` is a bool, or an int32.
template <typename Which, typename T>
inline T select_n(Which which, T first, T second) {
  return which ? second : first;
}

// -- Bits.
// -------------------------------------------------------------------------------------------

template <typename T>
inline T bitwise_and(T x, T y) {
  return static_cast<T>(x & y);
}
template <typename T>
inline T bitwise_or(T x, T y) {
  return static_cast<T>(x | y);
}
template <typename T>
inline T bitwise_xor(T x, T y) {
  return static_cast<T>(x ^ y);
}
inline bool bitwise_not(bool x) { return !x; }
template <typename T>
inline T bitwise_not(T x) {
  return static_cast<T>(~x);
}

// A shift by as many bits as there are, or by a negative number, shifts all bits out.
template <typename T>
inline bool shifts_all(T bits) {
  return Unsigned<T>(bits) >= 8 * sizeof(T);
}
template <typename T>
inline T shift_left(T x, T bits) {
  return shifts_all(bits) ? T(0) : static_cast<T>(Unsigned<T>(x) << bits);
}
template <typename T>
inline T shift_right_logical(T x, T bits) {
  return shifts_all(bits) ? T(0) : static_cast<T>(Unsigned<T>(x) >> bits);
}
template <typename T>
inline T shift_right_arithmetic(T x, T bits) {
  // Bits that are shifted in are the sign, also in an unsigned type.
  const int count = shifts_all(bits) ? 8 * static_cast<int>(sizeof(T)) - 1 : static_cast<int>(bits);
  const int64 sign_extended =
      static_cast<int64>(uint64(Unsigned<T>(x)) << (64 - 8 * sizeof(T))) >> (64 - 8 * sizeof(T));
  return static_cast<T>(sign_extended >> count);
}
template <typename T>
inline T population_count(T x) {
  return static_cast<T>(__popcll(uint64(Unsigned<T>(x))));
}
template <typename T>
inline T clz(T x) {
  return static_cast<T>(__clzll(static_cast<int64>(Unsigned<T>(x))) - (64 - 8 * int(sizeof(T))));
}

// -- Conversions.
// ------------------------------------------------------------------------------------

// Floats become integers by truncation; what lies beyond becomes the nearest integer, and NaN 0.
template <typename To, typename From>
inline To convert(From x) {
  if constexpr (kSame<To, bool>) {
    return x != From(0);
  } else if constexpr (kIsFloat<From> && !kIsFloat<To>) {
    constexpr To kHighest =
        kIsSigned<To> ? static_cast<To>(Unsigned<To>(-1) >> 1) : static_cast<To>(Unsigned<To>(-1));
    constexpr To kLowest = static_cast<To>(~kHighest);
    if (x != x) return To(0);
    // The highest integer may round up to a float beyond it.
    if (x >= static_cast<From>(kHighest)) return kHighest;
    if (x <= static_cast<From>(kLowest)) return kLowest;
    return static_cast<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

// -- Functions of floats.
// ----------------------------------------------------------------------------

// By squaring; an exponent is known when the kernel is compiled.
template <int kExponent, typename T>
inline T integer_pow(T x) {
  if constexpr (kExponent < 0) {
    return div(T(1), integer_pow<-kExponent>(x));
  } else if constexpr (kExponent == 0) {
    return T(1);
  } else if constexpr (kExponent == 1) {
    return x;
  } else if constexpr (kExponent % 2 == 0) {
    return integer_pow<kExponent / 2>(mul(x, x));
  } else {
    return mul(x, integer_pow<kExponent / 2>(mul(x, x)));
  }
}

#define TILEKERN_UNARY(name, of_float, of_double)    \
  inline float name(float x) { return of_float(x); } \
  inline double name(double x) { return of_double(x); }

TILEKERN_UNARY(exp, expf, ::exp)
TILEKERN_UNARY(exp2, exp2f, ::exp2)
TILEKERN_UNARY(expm1, expm1f, ::expm1)
TILEKERN_UNARY(log, logf, ::log)
TILEKERN_UNARY(log1p, log1pf, ::log1p)
TILEKERN_UNARY(log2, log2f, ::log2)
TILEKERN_UNARY(sin, sinf, ::sin)
TILEKERN_UNARY(cos, cosf, ::cos)
TILEKERN_UNARY(tan, tanf, ::tan)
TILEKERN_UNARY(asin, asinf, ::asin)
TILEKERN_UNARY(acos, acosf, ::acos)
TILEKERN_UNARY(atan, atanf, ::atan)
TILEKERN_UNARY(sinh, sinhf, ::sinh)
TILEKERN_UNARY(cosh, coshf, ::cosh)
TILEKERN_UNARY(tanh, tanhf, ::tanh)
TILEKERN_UNARY(asinh, asinhf, ::asinh)
TILEKERN_UNARY(acosh, acoshf, ::acosh)
TILEKERN_UNARY(atanh, atanhf, ::atanh)
TILEKERN_UNARY(erf, erff, ::erf)
TILEKERN_UNARY(erfc, erfcf, ::erfc)
TILEKERN_UNARY(erf_inv, erfinvf, ::erfinv)
TILEKERN_UNARY(lgamma, lgammaf, ::lgamma)
TILEKERN_UNARY(sqrt, sqrtf, ::sqrt)
TILEKERN_UNARY(rsqrt, rsqrtf, ::rsqrt)
TILEKERN_UNARY(cbrt, cbrtf, ::cbrt)
TILEKERN_UNARY(floor, floorf, ::floor)
TILEKERN_UNARY(ceil, ceilf, ::ceil)
TILEKERN_UNARY(round_away_from_zero, roundf, ::round)
TILEKERN_UNARY(round_to_even, rintf, ::rint)
#undef TILEKERN_UNARY

#define TILEKERN_BINARY(name, of_float, of_double)               \
  inline float name(float x, float y) { return of_float(x, y); } \
  inline double name(double x, double y) { return of_double(x, y); }

TILEKERN_BINARY(pow, powf, ::pow)
TILEKERN_BINARY(atan2, atan2f, ::atan2)
TILEKERN_BINARY(nextafter, nextafterf, ::nextafter)
#undef TILEKERN_BINARY

// The derivative of lgamma: the reflection formula below 1/2, the recurrence up to 10, and from
// there the asymptotic series.
template <typename T>
inline T digamma(T x) {
  const bool is_reflected = x < T(0.5);
  T y = is_reflected ? 1 - x : x, before = 0;
  for (; y < 10; y += 1) before += 1 / y;
  const T z = 1 / (y * y);
  const T tail =
      z * (T(1. / 12) -
           z * (T(1. / 120) -
                z * (T(1. / 252) -
                     z * (T(1. / 240) - z * (T(1. / 132) - z * (T(691. / 32760) - z / 12))))));
  const T result = log(y) - T(0.5) / y - tail - before;
  if (!is_reflected) return result;
  const T fraction = x - floor(x);
  constexpr T kPi = 3.14159265358979323846;
  // A pole is NaN, but for -inf at zero.
  if (fraction == 0) return (x == 0 ? T(-1) : T(0)) / fraction;
  return result - kPi / tan(kPi * fraction);
}

// The denominator is at least 1, so its reciprocal needs no scaling.
inline float logistic(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + expf(-x)));
  return result;
}
inline double logistic(double x) { return 1.0 / (1.0 + ::exp(-x)); }

// For results of 16 bits: the relative error is below |x| 2^-22, and denormal numbers are 0.
inline float exp_to_16_bits(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
  return result;
}
inline float logistic_to_16_bits(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exp_to_16_bits(-x)));
  return result;
}

}  // namespace tilekern::lax
