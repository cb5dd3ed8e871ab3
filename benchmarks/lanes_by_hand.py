"""The programs of ``jax_kernel`` in CUDA, as one would write them by hand, by ``cuda_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk

_THREADS = 64
_SOURCE = r"""
#include <tilekern/types.cuh>

struct Vector {
  float x, y, z;
};
inline Vector plus(Vector a, float h, Vector b) {
  return {a.x + h * b.x, a.y + h * b.y, a.z + h * b.z};
}
inline Vector velocity(Vector s, Vector p) {
  return {p.x * (s.y - s.x), s.x * (p.y - s.z) - s.y, s.x * s.y - p.z * s.z};
}
inline Vector rk4(Vector s, Vector p, float h) {
  const Vector a = velocity(s, p);
  const Vector b = velocity(plus(s, h / 2, a), p);
  const Vector c = velocity(plus(s, h / 2, b), p);
  const Vector d = velocity(plus(s, h, c), p);
  return plus(plus(plus(plus(s, h / 6, a), h / 3, b), h / 3, c), h / 6, d);
}

__global__ void __launch_bounds__(64)
    lorenz(const float* start, const float* parameters, float* out, int lanes, int steps, float h) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  Vector s{start[3 * lane], start[3 * lane + 1], start[3 * lane + 2]};
  const Vector p{parameters[0], parameters[1], parameters[2]};
#pragma unroll 1
  for (int t = 0; t < steps; ++t) s = rk4(s, p, h);
  out[3 * lane] = s.x;
  out[3 * lane + 1] = s.y;
  out[3 * lane + 2] = s.z;
}

__global__ void __launch_bounds__(64)
    lorenz_states(const float* start, const float* parameters, float* out, float* states, int lanes,
                  int steps, float h) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  Vector s{start[3 * lane], start[3 * lane + 1], start[3 * lane + 2]};
  const Vector p{parameters[0], parameters[1], parameters[2]};
  float* state = states + lane;
#pragma unroll 1
  for (int t = 0; t < steps; ++t, state += 3ll * lanes) {
    state[0] = s.x;
    state[lanes] = s.y;
    state[2ll * lanes] = s.z;
    s = rk4(s, p, h);
  }
  out[3 * lane] = s.x;
  out[3 * lane + 1] = s.y;
  out[3 * lane + 2] = s.z;
}

// The cotangent of the state at which the velocity has one; adds that of the parameters.
inline Vector velocity_back(Vector s, Vector p, Vector d, Vector& of_p) {
  of_p = {of_p.x + (s.y - s.x) * d.x, of_p.y + s.x * d.y, of_p.z - s.z * d.z};
  return {(p.y - s.z) * d.y + s.y * d.z - p.x * d.x, p.x * d.x - d.y + s.x * d.z,
          -s.x * d.y - p.z * d.z};
}

__global__ void __launch_bounds__(64)
    lorenz_back(const float* states, const float* parameters, const float* cotangent, float* out,
                int lanes, int steps, float h) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  Vector c{cotangent[3 * lane], cotangent[3 * lane + 1], cotangent[3 * lane + 2]}, of_p{0, 0, 0};
  const Vector p{parameters[0], parameters[1], parameters[2]}, none{0, 0, 0};
#pragma unroll 4
  for (int t = steps - 1; t >= 0; --t) {
    const float* state = states + 3ll * lanes * t + lane;
    const Vector s{state[0], state[lanes], state[2ll * lanes]};
    const Vector s2 = plus(s, h / 2, velocity(s, p));
    const Vector s3 = plus(s, h / 2, velocity(s2, p));
    const Vector s4 = plus(s, h, velocity(s3, p));
    const Vector d4 = velocity_back(s4, p, plus(none, h / 6, c), of_p);
    const Vector d3 = velocity_back(s3, p, plus(plus(none, h / 3, c), h, d4), of_p);
    const Vector d2 = velocity_back(s2, p, plus(plus(none, h / 3, c), h / 2, d3), of_p);
    const Vector d1 = velocity_back(s, p, plus(plus(none, h / 6, c), h / 2, d2), of_p);
    c = plus(plus(plus(plus(c, 1, d4), 1, d3), 1, d2), 1, d1);
  }
  out[3 * lane] = of_p.x;
  out[3 * lane + 1] = of_p.y;
  out[3 * lane + 2] = of_p.z;
}

__global__ void __launch_bounds__(64) collatz(const unsigned* numbers, int* out, int lanes) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  unsigned n = numbers[lane];
  int count = 0;
  while (n > 1) {
    n = n & 1 ? 3 * n + 1 : n >> 1;
    ++count;
  }
  out[lane] = count;
}

inline uint2 threefry(uint2 key, unsigned x, unsigned y) {
  const unsigned keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x += keys[0];
  y += keys[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x += y;
      y = __funnelshift_l(y, y, rotations[i % 2][j]) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + i + 1;
  }
  return {x, y};
}
inline float uniform(uint2 key) {
  const uint2 bits = threefry(key, 0, 0);
  return __uint_as_float((bits.x ^ bits.y) >> 9 | 0x3f800000) - 1;
}

__global__ void __launch_bounds__(64)
    metropolis(const unsigned* chain_keys, float* out, int lanes, int steps) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  uint2 key{chain_keys[2 * lane], chain_keys[2 * lane + 1]};
  float x = 0, total = 0;
#pragma unroll 1
  for (int t = 0; t < steps; ++t) {
    const uint2 of_step = threefry(key, 0, 1), of_choice = threefry(key, 0, 2);
    key = threefry(key, 0, 0);
    const float low = -0.99999994f;
    const float proposed =
        x + 1.41421356f * erfinvf(fmaxf(low, uniform(of_step) * (1 - low) + low));
    if (uniform(of_choice) < expf(0.5f * (x * x - proposed * proposed))) x = proposed;
    total += x;
  }
  out[lane] = total / steps;
}

__global__ void __launch_bounds__(64)
    kalman(const float* transition, const float* observed, float* out, int lanes, int steps) {
  const int lane = blockIdx.x * 64 + threadIdx.x;
  if (lane >= lanes) return;
  float f[6][6], p[6][6], m[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    m[i] = 0;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      f[i][j] = transition[6 * i + j];
      p[i][j] = i == j;
    }
  }
#pragma unroll 1
  for (int t = 0; t < steps; ++t) {
    float fm[6] = {}, fp[6][6] = {}, q[6][6] = {};
#pragma unroll
    for (int i = 0; i < 6; ++i)
#pragma unroll
      for (int k = 0; k < 6; ++k) {
        fm[i] += f[i][k] * m[k];
#pragma unroll
        for (int j = 0; j < 6; ++j) fp[i][j] += f[i][k] * p[k][j];
      }
#pragma unroll
    for (int i = 0; i < 6; ++i)
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        q[i][j] = i == j ? 0.1f : 0;
#pragma unroll
        for (int k = 0; k < 6; ++k) q[i][j] += fp[i][k] * f[j][k];
      }
    const float scale = 1 / (q[0][0] + 0.5f);
    const float innovation = observed[static_cast<long long>(lane) * steps + t] - fm[0];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      m[i] = fm[i] + q[i][0] * scale * innovation;
#pragma unroll
      for (int j = 0; j < 6; ++j) p[i][j] = q[i][j] - q[i][0] * scale * q[0][j];
    }
  }
#pragma unroll
  for (int i = 0; i < 6; ++i) out[6 * lane + i] = m[i];
}
"""


def _kernel(name: str, lanes: int, out: Any, *scalars: Any) -> Callable[..., Any]:
    return jtk.cuda_kernel(
        _SOURCE,
        name=name,
        out=out,
        grid=-(-lanes // _THREADS),
        block=_THREADS,
        scalars=(np.int32(lanes), *scalars),
    )


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


def lorenz(lanes: int, steps: int, h: float) -> Callable[..., Any]:
    """Return the ends of trajectories, of starts and parameters."""
    return _kernel("lorenz", lanes, _floats(lanes, 3), np.int32(steps), np.float32(h))


def lorenz_gradient(lanes: int, steps: int, h: float) -> Callable[..., Any]:
    """Return the gradient of the sum of squared ends with respect to the parameters."""
    scalars = np.int32(steps), np.float32(h)
    ends = _floats(lanes, 3)
    forward = _kernel("lorenz_states", lanes, (ends, _floats(steps, 3, lanes)), *scalars)
    backward = _kernel("lorenz_back", lanes, ends, *scalars)

    def gradient(start: Any, parameters: Any) -> Any:
        end, states = forward(start, parameters)
        return jnp.sum(backward(states, parameters, 2 * end), axis=0)

    return gradient


def collatz(lanes: int) -> Callable[..., Any]:
    """Return the numbers of steps."""
    return _kernel("collatz", lanes, jax.ShapeDtypeStruct((lanes,), np.int32))


def metropolis(lanes: int, steps: int) -> Callable[..., Any]:
    """Return the means of chains, of their keys."""
    kernel = _kernel("metropolis", lanes, _floats(lanes), np.int32(steps))
    return lambda keys: kernel(jax.random.key_data(keys))


def kalman(lanes: int, steps: int) -> Callable[..., Any]:
    """Return the last means, of the transition and the observations."""
    return _kernel("kalman", lanes, _floats(lanes, 6), np.int32(steps))
