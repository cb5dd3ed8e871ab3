// What the headers of C and C++ have that CUDA does not build in: NVRTC has no such headers.
// Every name in kStandardHeaders (jax_tilekern/compilation/headers.py) includes this file.
#pragma once

// -- <cfloat>; libcu++ defines these too, in other words.
#undef FLT_RADIX
#define FLT_RADIX 2
#undef FLT_DIG
#define FLT_DIG 6
#undef FLT_MANT_DIG
#define FLT_MANT_DIG 24
#undef FLT_MIN_EXP
#define FLT_MIN_EXP (-125)
#undef FLT_MAX_EXP
#define FLT_MAX_EXP 128
#undef FLT_EPSILON
#define FLT_EPSILON 0x1p-23f
#undef FLT_MIN
#define FLT_MIN 0x1p-126f
#undef FLT_TRUE_MIN
#define FLT_TRUE_MIN 0x1p-149f
#undef FLT_MAX
#define FLT_MAX 0x1.fffffep127f
#undef DBL_DIG
#define DBL_DIG 15
#undef DBL_MANT_DIG
#define DBL_MANT_DIG 53
#undef DBL_MIN_EXP
#define DBL_MIN_EXP (-1021)
#undef DBL_MAX_EXP
#define DBL_MAX_EXP 1024
#undef DBL_EPSILON
#define DBL_EPSILON 0x1p-52
#undef DBL_MIN
#define DBL_MIN 0x1p-1022
#undef DBL_TRUE_MIN
#define DBL_TRUE_MIN 0x1p-1074
#undef DBL_MAX
#define DBL_MAX 0x1.fffffffffffffp1023

// -- <climits>
#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define CHAR_MIN SCHAR_MIN
#define CHAR_MAX SCHAR_MAX
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-INT_MAX - 1)
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define LONG_MIN (-LONG_MAX - 1)
#define LONG_MAX 9223372036854775807l
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MIN (-LLONG_MAX - 1)
#define LLONG_MAX 9223372036854775807ll
#define ULLONG_MAX 18446744073709551615ull

// -- <cstdint>: the same types as in <cuda/std/cstdint>.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using intptr_t = long long;
using uintptr_t = unsigned long long;
#define INT8_MIN SCHAR_MIN
#define INT8_MAX SCHAR_MAX
#define UINT8_MAX UCHAR_MAX
#define INT16_MIN SHRT_MIN
#define INT16_MAX SHRT_MAX
#define UINT16_MAX USHRT_MAX
#define INT32_MIN INT_MIN
#define INT32_MAX INT_MAX
#define UINT32_MAX UINT_MAX
#define INT64_MIN LLONG_MIN
#define INT64_MAX LLONG_MAX
#define UINT64_MAX ULLONG_MAX

// -- <cmath>; INFINITY and NAN need no header.
#define HUGE_VALF INFINITY
#define HUGE_VAL ((double)INFINITY)
#define M_E 2.71828182845904523536
#define M_LOG2E 1.44269504088896340736
#define M_LOG10E 0.434294481903251827651
#define M_LN2 0.693147180559945309417
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.785398163397448309616
#define M_1_PI 0.318309886183790671538
#define M_2_PI 0.636619772367581343076
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.707106781186547524401

namespace std {

using ::int16_t, ::int32_t, ::int64_t, ::int8_t, ::intptr_t;
using ::ptrdiff_t, ::size_t;
using ::uint16_t, ::uint32_t, ::uint64_t, ::uint8_t, ::uintptr_t;

using ::abs, ::acos, ::acosh, ::asin, ::asinh, ::atan, ::atan2, ::atanh, ::cbrt, ::ceil;
using ::copysign, ::cos, ::cosh, ::erf, ::erfc, ::exp, ::exp2, ::expm1, ::fabs, ::fdim, ::floor;
using ::fma, ::fmax, ::fmin, ::fmod, ::frexp, ::hypot, ::ilogb, ::isfinite, ::isinf, ::isnan;
using ::ldexp, ::lgamma, ::llrint, ::llround, ::log, ::log10, ::log1p, ::log2, ::logb, ::lrint;
using ::lround, ::modf, ::nan, ::nearbyint, ::nextafter, ::pow, ::remainder, ::remquo, ::rint;
using ::round, ::signbit, ::sin, ::sinh, ::sqrt, ::tan, ::tanh, ::tgamma, ::trunc;

using ::free, ::malloc, ::memcpy, ::memset, ::printf;

}  // namespace std
