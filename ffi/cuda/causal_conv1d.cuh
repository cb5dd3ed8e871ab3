// A convolution of each channel with filters of its own along time, and the gradient of it.
//
//   z[t] = bias + sum over i of weights[i] x[t - (kWidth - 1) + i],  out = activation(z)
//
// A thread has kVector adjacent channels and walks along a chunk of time with the last kWidth
// inputs in registers, so that an input is read once. Inputs before the first are the state's.
#pragma once

#include "scalar_functions.cuh"
#include "vector_loads.cuh"

namespace tilekern {

// Run-time sizes; `plans/causal_conv1d.py` packs the same fields in the same order.
struct CausalConvShape {
  int64 batch;
  int32 length, channels;
  // Chunks of time, and steps of each.
  int32 chunks, steps;
  // CTAs along the chunks of a sequence, and along the channels.
  int32 chunk_ctas, channel_ctas;
};

enum class Activation { kNone, kSilu };

inline constexpr int kCausalConvThreads = 128;

template <typename T, int kWidth, Activation kActivation, int kVector, int kColumns>
class CausalConv {
  static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr int kRows = kCausalConvThreads / kColumns;
  static constexpr int kHistory = kWidth - 1;
  using Vector = Bits<kBytes>;
  using Window = float[kWidth][kVector];

 public:
  CausalConv(const CausalConvShape& shape, const T* x, const T* state, const T* weights,
             const T* bias)
      : shape_(shape), x_(x), state_(state) {
    const uint32 cta = blockIdx.x;
    const uint32 row = cta / shape.channel_ctas;
    channel_ = (cta % shape.channel_ctas * kColumns + threadIdx.x % kColumns) * kVector;
    chunk_ = row % shape.chunk_ctas * kRows + threadIdx.x / kColumns;
    batch_ = row / shape.chunk_ctas;
    first_ = chunk_ * shape.steps;
    last_ = min_of<int64>(static_cast<int64>(first_) + shape.steps, shape.length);
    exists_ = channel_ < shape.channels && chunk_ < shape.chunks;
    if (!exists_) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) widen(weights_[i], load(weights + at(0, i, 0)));
    widen(bias_, load(bias + channel_));
  }

  void run(T* out) {
    if (!exists_) return;
    // Loads of so many steps are in flight.
    constexpr int kAhead = 8;
    Window inputs;
    load_history(inputs);
    for (int time = first_; time < last_; time += kAhead) {
      Vector loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (time + i < last_) loaded[i] = load(x_ + at(batch_, time + i, shape_.length));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (time + i < last_) {
          push(inputs);
          widen(inputs[kHistory], loaded[i]);
          float z[kVector];
          convolve(z, inputs);
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            if constexpr (kActivation == Activation::kSilu) z[v] *= logistic(z[v]);
          }
          store(out + at(batch_, time + i, shape_.length), z);
        }
      }
    }
  }

  // Cotangents of inputs and of the state; and of weights and bias the sums over a thread's chunk,
  // rows of `parts`.
  void run_gradient(const T* d_out, T* d_x, T* d_state, float* parts) {
    if (!exists_) return;
    constexpr int kAhead = 4;
    Window inputs, slopes, d_weights;
    float d_bias[kVector];
    load_history(inputs);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      d_bias[v] = 0;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) slopes[i][v] = d_weights[i][v] = 0;
    }
    // An input has a cotangent from kHistory steps behind it, too.
    const int end = last_ + kHistory;
    for (int time = first_; time < end; time += kAhead) {
      Vector loaded[kAhead], d_loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        loaded[i] = d_loaded[i] = {};
        if (time + i < min_of(end, shape_.length)) {
          const int64 place = at(batch_, time + i, shape_.length);
          loaded[i] = load(x_ + place);
          d_loaded[i] = load(d_out + place);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int now = time + i;
        if (now < end) {
          push(inputs);
          push(slopes);
          widen(inputs[kHistory], loaded[i]);
          widen(slopes[kHistory], d_loaded[i]);
          if (now < shape_.length) multiply_by_slope(slopes[kHistory], inputs);
          if (now < last_) add_terms(d_weights, d_bias, inputs, slopes[kHistory]);
          store_d_input(now - kHistory, slopes, d_x, d_state);
        }
      }
    }
    const int64 part = (static_cast<int64>(batch_) * shape_.chunks + chunk_) * (kWidth + 1);
    parts += part * shape_.channels + channel_;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        parts[static_cast<int64>(i) * shape_.channels + v] = d_weights[i][v];
      }
      parts[static_cast<int64>(kWidth) * shape_.channels + v] = d_bias[v];
    }
  }

 private:
  // The first of the thread's channels of a row of (batch, length, channels).
  int64 at(int64 batch, int64 time, int64 length) const {
    return (batch * length + time) * shape_.channels + channel_;
  }

  static Vector load(const T* from) { return load_once<kBytes>(from); }

  static void widen(float (&values)[kVector], const Vector& bits) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) values[v] = element<T, float>(bits, v);
  }

  static void store(T* to, const float (&values)[kVector]) {
    alignas(kBytes) T elements[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) elements[v] = rounded<T>(values[v]);
    *reinterpret_cast<WordOf<kBytes>*>(to) = reinterpret_cast<const WordOf<kBytes>&>(elements);
  }

  static void push(Window& window) {
#pragma unroll
    for (int i = 0; i < kHistory; ++i) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) window[i][v] = window[i + 1][v];
    }
  }

  // Results of 16 bits take an exponential and a reciprocal of the special-function unit; the
  // relative error of others is a few units in the last place.
  static float logistic(float z) {
    if constexpr (sizeof(T) == 2) {
      return lax::logistic_to_16_bits(z);
    } else {
      float result;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1 + expf(-z)));
      return result;
    }
  }

  // The inputs before the first step, behind a place that is pushed out.
  void load_history(Window& inputs) const {
#pragma unroll
    for (int i = 0; i < kHistory; ++i) {
      const int time = first_ - kHistory + i;
      const T* from = time < 0 ? state_ + at(batch_, time + kHistory, kHistory)
                               : x_ + at(batch_, time, shape_.length);
      widen(inputs[i + 1], load(from));
    }
  }

  void convolve(float (&z)[kVector], const Window& inputs) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      z[v] = bias_[v];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) z[v] = fmaf(weights_[i][v], inputs[i][v], z[v]);
    }
  }

  void multiply_by_slope(float (&d_out)[kVector], const Window& inputs) const {
    if constexpr (kActivation == Activation::kSilu) {
      float z[kVector];
      convolve(z, inputs);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const float share = logistic(z[v]);
        d_out[v] *= share * (1 + z[v] * (1 - share));
      }
    }
  }

  static void add_terms(Window& d_weights, float (&d_bias)[kVector], const Window& inputs,
                        const float (&slope)[kVector]) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      d_bias[v] += slope[v];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        d_weights[i][v] = fmaf(slope[v], inputs[i][v], d_weights[i][v]);
      }
    }
  }

  // The inputs are those of the chunk; the first chunk has the state, too. `slopes` are of the
  // steps that read the input.
  void store_d_input(int time, const Window& slopes, T* d_x, T* d_state) const {
    if (time < (first_ == 0 ? -kHistory : first_)) return;
    float sums[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      sums[v] = 0;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums[v] = fmaf(weights_[kHistory - i][v], slopes[i][v], sums[v]);
      }
    }
    store(time < 0 ? d_state + at(batch_, time + kHistory, kHistory)
                   : d_x + at(batch_, time, shape_.length),
          sums);
  }

  const CausalConvShape& shape_;
  const T *x_, *state_;
  int64 batch_;
  int channel_, chunk_, first_, last_;
  bool exists_;
  float weights_[kWidth][kVector], bias_[kVector];
};

template <typename T, int kWidth, Activation kActivation, int kVector, int kColumns>
__global__ void __launch_bounds__(kCausalConvThreads)
    causal_conv1d(const T* x, const T* state, const T* weights, const T* bias, T* out,
                  const __grid_constant__ CausalConvShape shape) {
  CausalConv<T, kWidth, kActivation, kVector, kColumns>(shape, x, state, weights, bias).run(out);
}

template <typename T, int kWidth, Activation kActivation, int kVector, int kColumns>
__global__ void __launch_bounds__(kCausalConvThreads)
    causal_conv1d_gradient(const T* x, const T* state, const T* weights, const T* bias,
                           const T* d_out, T* d_x, T* d_state, float* parts,
                           const __grid_constant__ CausalConvShape shape) {
  CausalConv<T, kWidth, kActivation, kVector, kColumns>(shape, x, state, weights, bias)
      .run_gradient(d_out, d_x, d_state, parts);
}

inline constexpr int kPartColumns = 32, kPartRows = 8;

// Adds up the rows of `parts`, of which the last columns are the bias's, in an order that depends
// on their number alone.
__global__ void __launch_bounds__(kPartColumns* kPartRows)
    add_causal_conv1d_parts(const float* parts, float* d_weights, float* d_bias, int64 count,
                            int64 weights, int64 columns) {
  __shared__ float sums[kPartRows][kPartColumns];
  const int column_of = threadIdx.x % kPartColumns, row = threadIdx.x / kPartColumns;
  const int64 column = static_cast<int64>(blockIdx.x) * kPartColumns + column_of;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64 i = row; i < count; i += kPartRows) sum += parts[i * columns + column];
  }
  sums[row][column_of] = sum;
  __syncthreads();
  if (row > 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kPartRows; ++i) sum += sums[i][column_of];
  (column < weights ? d_weights[column] : d_bias[column - weights]) = sum;
}

}  // namespace tilekern
