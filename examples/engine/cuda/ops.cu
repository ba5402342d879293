#include <algorithm>
#include <tessera/core/types.hpp>
#include <type_traits>

#include "ops.hpp"

namespace engine::cuda {
namespace {

using tessera::fp16;

constexpr int threads = 256;

unsigned blocks_for(std::int64_t items) {
  return unsigned(std::min<std::int64_t>((items + threads - 1) / threads, 1 << 16));
}

void check_launch(const char* what) { check(cudaGetLastError(), what); }

__device__ float lane_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Eight bf16 in 16 bytes, as fp32.
__device__ void unpack(const uint4& packed, float (&values)[8]) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ void load_eight(const bf16* x, std::int64_t chunk, float (&values)[8]) {
  unpack(__ldg(reinterpret_cast<const uint4*>(x) + chunk), values);
}
__device__ void load_eight(const float* x, std::int64_t chunk, float (&values)[8]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(x) + 2 * chunk);
  const float4 high = __ldg(reinterpret_cast<const float4*>(x) + 2 * chunk + 1);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Two outputs a warp, for each of a few rows of x: each lane asks for its next 2 * unrolled loads of W before it multiplies
// the ones that have come, and x, which stays in L1, is read for both.
// Llama-3.1-8B's products of a step, in all (H200, CUDA 13.0): 3.73 ms for one row, 4.24 for four. Twice as many loads that
// are asked for together and then waited for took 3.82 and 4.58 (128 threads: 3.81 and 4.43), three or four outputs a warp
// 4.33 and 4.41 for four rows, a row's inputs split over two or four warps 4.60 and 4.86, tensor cores 4.85. Tried on the
// whole step: a prefetch of the weights into L2 lost 10 %; SwiGLU inside the product gained nothing; launching every kernel
// early (programmatic dependent launch), the append too, lost 1 %, and 9 % where kernels let the next ones begin before they
// wait themselves.
constexpr int vector_threads = 128;
constexpr int outputs_per_warp = 2;
constexpr int unrolled = 2;
template <int Rows, class X>
__global__ void __launch_bounds__(vector_threads)
    matrix_vectors_entry(const X* __restrict__ x, const uint4* __restrict__ weight, int outputs, int chunks, bool add,
                         float* __restrict__ y) {
  const int lane = int(threadIdx.x) % 32;
  const int first = (int(blockIdx.x) * (vector_threads / 32) + int(threadIdx.x) / 32) * outputs_per_warp;
  if (first >= outputs) return;
  const uint4* from[outputs_per_warp];
  for (int r = 0; r < outputs_per_warp; ++r) from[r] = weight + std::int64_t(min(first + r, outputs - 1)) * chunks;
  float sums[Rows][outputs_per_warp] = {};
  uint4 coming[outputs_per_warp][unrolled];
  const auto ask = [&](int i) {
#pragma unroll
    for (int u = 0; u < unrolled; ++u) {
#pragma unroll
      for (int r = 0; r < outputs_per_warp; ++r)
        coming[r][u] = i + 32 * u < chunks ? __ldcs(from[r] + i + 32 * u) : uint4{0, 0, 0, 0};
    }
  };
  ask(lane);
  for (int i = lane; i < chunks; i += 32 * unrolled) {
    uint4 w[outputs_per_warp][unrolled];
#pragma unroll
    for (int u = 0; u < unrolled; ++u) {
#pragma unroll
      for (int r = 0; r < outputs_per_warp; ++r) w[r][u] = coming[r][u];
    }
    ask(i + 32 * unrolled);
#pragma unroll
    for (int u = 0; u < unrolled; ++u) {
      if (i + 32 * u >= chunks) break;
      float values[outputs_per_warp][8];
#pragma unroll
      for (int r = 0; r < outputs_per_warp; ++r) unpack(w[r][u], values[r]);
#pragma unroll
      for (int row = 0; row < Rows; ++row) {
        float in[8];
        load_eight(x, std::int64_t(row) * chunks + i + 32 * u, in);
#pragma unroll
        for (int r = 0; r < outputs_per_warp; ++r) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[row][r] = fmaf(values[r][j], in[j], sums[row][r]);
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < Rows; ++row) {
#pragma unroll
    for (int r = 0; r < outputs_per_warp; ++r) {
      const float sum = lane_sum(sums[row][r]);
      float* const to = y + std::int64_t(row) * outputs + first + r;
      if (lane == 0 && first + r < outputs) *to = add ? *to + sum : sum;
    }
  }
}

__global__ void __launch_bounds__(threads)
    gather_rows_entry(const token_t* tokens, const bf16* embedding, int width, float* out) {
  const std::int64_t row = blockIdx.x, token = tokens[row];
  for (int i = int(threadIdx.x); i < width; i += threads) out[row * width + i] = float(embedding[token * width + i]);
}

// A row up to `held` elements a thread is read once, and its weights before the threads meet: a single row waits for memory
// one time and not three.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    rms_norm_entry(const float* x, int width, const float* weight, float eps, bf16* y) {
  constexpr int held = 4;
  __shared__ float partial[Threads / 32];
  const float* in = x + std::int64_t(blockIdx.x) * width;
  float own[held] = {}, weights[held] = {};
#pragma unroll
  for (int j = 0; j < held; ++j) {
    const int i = int(threadIdx.x) + j * Threads;
    if (i < width) own[j] = in[i], weights[j] = weight[i];
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < held; ++j) sum = fmaf(own[j], own[j], sum);
  for (int i = int(threadIdx.x) + held * Threads; i < width; i += Threads) sum = fmaf(in[i], in[i], sum);
  sum = lane_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < Threads / 32; ++w) total += partial[w];
  const float scale = 1.0f / sqrtf(total / float(width) + eps);
  bf16* const out = y + std::int64_t(blockIdx.x) * width;
#pragma unroll
  for (int j = 0; j < held; ++j) {
    const int i = int(threadIdx.x) + j * Threads;
    if (i < width) out[i] = bf16(own[j] * scale * weights[j]);
  }
  for (int i = int(threadIdx.x) + held * Threads; i < width; i += Threads) out[i] = bf16(in[i] * scale * weight[i]);
}

__global__ void __launch_bounds__(threads) swiglu_entry(const float* gate_up, std::int64_t count, int width, bf16* y) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * threads + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * threads) {
    const std::int64_t row = i / width, column = i % width;
    const float gate = gate_up[row * 2 * width + column], up = gate_up[row * 2 * width + width + column];
    y[i] = bf16(gate / (1.0f + expf(-gate)) * up);
  }
}

struct head_counts {
  int q, kv, half;
};

// One warp a head of a token: biases, then the norm of a query or a key.
__global__ void __launch_bounds__(threads)
    finish_projections_entry(float* qkv, int tokens, head_counts heads, const float* bias, const float* q_norm,
                             const float* k_norm, float epsilon) {
  const int all_heads = heads.q + 2 * heads.kv, dim = 2 * heads.half, lane = int(threadIdx.x) % 32;
  const std::int64_t count = std::int64_t(tokens) * all_heads, warps = std::int64_t(gridDim.x) * (threads / 32);
  for (std::int64_t at = std::int64_t(blockIdx.x) * (threads / 32) + threadIdx.x / 32; at < count; at += warps) {
    const int head = int(at % all_heads);
    float* const values = qkv + at * dim;
    const float* const norm = head < heads.q ? q_norm : head < heads.q + heads.kv ? k_norm : nullptr;
    float squares = 0;
    for (int i = lane; i < dim; i += 32) {
      const float value = values[i] + (bias ? bias[head * dim + i] : 0);
      values[i] = value;
      squares += value * value;
    }
    if (!norm) continue;
    const float scale = rsqrtf(lane_sum(squares) / float(dim) + epsilon);
    for (int i = lane; i < dim; i += 32) values[i] *= scale * norm[i];
  }
}

// One thread a pair of elements (i, i + half) of one head.
template <class T>
__global__ void __launch_bounds__(threads)
    split_and_rotate_entry(const float* qkv, int tokens, run_position position, const float* speeds, head_counts heads,
                           T* q, T* k, T* v, int layer, unsigned long long* unusable) {
  const int half = heads.half, all_heads = heads.q + 2 * heads.kv;
  const std::int64_t pairs = std::int64_t(tokens) * all_heads * half;
  for (std::int64_t i = std::int64_t(blockIdx.x) * threads + threadIdx.x; i < pairs;
       i += std::int64_t(gridDim.x) * threads) {
    const int at = int(i % half), head = int(i / half % all_heads);
    const std::int64_t token = i / half / all_heads;
    const float* in = qkv + (token * all_heads + head) * 2 * half;
    float low = in[at], high = in[at + half];
    const std::int64_t logical =
        position.on_device ? position.on_device[token / position.each] + token % position.each : position.first + token;
    if (head < heads.q + heads.kv) {
      float sine, cosine;
      sincosf(float(logical) * speeds[at], &sine, &cosine);
      const float turned = low * cosine - high * sine;
      high = high * cosine + low * sine;
      low = turned;
    }
    const auto of = head < heads.q              ? unusable_number::query
                    : head < heads.q + heads.kv ? unusable_number::key
                                                : unusable_number::value;
    const int own_head = head - (of == unusable_number::query ? 0
                                 : of == unusable_number::key ? heads.q
                                                              : heads.q + heads.kv);
    T* out = (of == unusable_number::query ? q + token * heads.q * 2 * half
                                           : (of == unusable_number::key ? k : v) + token * heads.kv * 2 * half) +
             own_head * 2 * half;
    out[at] = T(low);
    out[at + half] = T(high);
    if (!(fabsf(float(out[at])) <= largest_factor && fabsf(float(out[at + half])) <= largest_factor)) {
      atomicMin(unusable,
                unusable_number{std::uint32_t(logical), std::uint32_t(layer), of, std::uint32_t(own_head)}.noted());
    }
  }
}

__global__ void __launch_bounds__(threads) round_entry(const float* x, std::int64_t count, bf16* y) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * threads + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * threads)
    y[i] = bf16(x[i]);
}

// Of two candidates the one with the higher logit, the lower id among equals; id -1 is none.
struct candidate {
  float logit;
  int id;
};
__device__ candidate better(candidate a, candidate b) {
  const bool second = b.id >= 0 && (a.id < 0 || b.logit > a.logit || (b.logit == a.logit && b.id < a.id));
  return second ? b : a;
}

constexpr int best_threads = 1024;
__global__ void __launch_bounds__(best_threads)
    best_tokens_entry(const float* logits, int vocab, token_t* best, unsigned long long* unusable) {
  __shared__ candidate partial[best_threads / 32];
  const float* row = logits + std::int64_t(blockIdx.x) * vocab;
  candidate mine{0, -1};
  int strange = -1;
#pragma unroll 8
  for (int i = int(threadIdx.x); i < vocab; i += best_threads) {
    const float logit = row[i];
    mine = better(mine, {logit, i});
    if (!(logit - logit == 0)) strange = i;
  }
  if (strange >= 0) {
    constexpr std::uint32_t last_position = 0xffffff, last_layer = 0xfff;  // what made it so is earlier
    atomicMin(unusable,
              unusable_number{last_position, last_layer, unusable_number::logit, std::uint32_t(strange)}.noted());
  }
  for (int step = 16; step > 0; step /= 2)
    mine = better(mine, {__shfl_xor_sync(~0u, mine.logit, step), __shfl_xor_sync(~0u, mine.id, step)});
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < best_threads / 32; ++w) mine = better(mine, partial[w]);
    best[blockIdx.x] = mine.id;
  }
}

// splitmix64: the same value for the same seed and place.
__device__ float random_value(std::uint64_t seed, std::int64_t at, float spread) {
  std::uint64_t bits = seed + (std::uint64_t(at) + 1) * 0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
  bits ^= bits >> 31;
  return (float(std::uint32_t(bits >> 40)) * 0x1p-23f - 1.0f) * spread;
}

template <class T>
__global__ void __launch_bounds__(threads)
    fill_random_entry(T* values, std::int64_t count, float spread, std::uint64_t seed) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * threads + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * threads)
    values[i] = T(random_value(seed, i, spread));
}

}  // namespace

template <class X>
bool matrix_vectors(const X* x, std::int32_t rows, const weight_matrix& weight, float* y, bool add,
                    cudaStream_t stream) {
  if (weight.inputs % 8 != 0 || rows < 1 || rows > most_vector_rows) return false;
  constexpr int outputs_per_block = vector_threads / 32 * outputs_per_warp;
  const auto blocks = unsigned((weight.outputs + outputs_per_block - 1) / outputs_per_block);
  const auto launch = [&]<int Rows>(std::integral_constant<int, Rows>) {
    matrix_vectors_entry<Rows><<<blocks, vector_threads, 0, stream>>>(
        x, reinterpret_cast<const uint4*>(weight.values.data()), weight.outputs, weight.inputs / 8, add, y);
  };
  static_assert(most_vector_rows == 4);
  switch (rows) {
    case 1:
      launch(std::integral_constant<int, 1>{});
      break;
    case 2:
      launch(std::integral_constant<int, 2>{});
      break;
    case 3:
      launch(std::integral_constant<int, 3>{});
      break;
    default:
      launch(std::integral_constant<int, 4>{});
      break;
  }
  check_launch("launch of the matrix-vector products");
  return true;
}
template bool matrix_vectors(const bf16*, std::int32_t, const weight_matrix&, float*, bool, cudaStream_t);
template bool matrix_vectors(const float*, std::int32_t, const weight_matrix&, float*, bool, cudaStream_t);

void gather_rows(const token_t* tokens, std::int32_t rows, const weight_matrix& embedding, float* out,
                 cudaStream_t stream) {
  gather_rows_entry<<<unsigned(rows), threads, 0, stream>>>(tokens, embedding.values.data(), embedding.inputs, out);
  check_launch("launch of the embedding");
}

void rms_norm(const float* x, std::int32_t rows, std::int32_t width, const float* weight, float eps, bf16* y,
              cudaStream_t stream) {
  // A single row is a matter of latency: more threads.
  if (rows <= 8)
    rms_norm_entry<1024><<<unsigned(rows), 1024, 0, stream>>>(x, width, weight, eps, y);
  else
    rms_norm_entry<256><<<unsigned(rows), 256, 0, stream>>>(x, width, weight, eps, y);
  check_launch("launch of the RMS norm");
}

void swiglu(const float* gate_up, std::int32_t rows, std::int32_t width, bf16* y, cudaStream_t stream) {
  const std::int64_t count = std::int64_t(rows) * width;
  swiglu_entry<<<blocks_for(count), threads, 0, stream>>>(gate_up, count, width, y);
  check_launch("launch of SwiGLU");
}

void finish_projections(const llama_config& config, const float* bias, const float* q_norm, const float* k_norm,
                        float* qkv, std::int32_t tokens, cudaStream_t stream) {
  const head_counts heads{config.num_attention_heads, config.num_key_value_heads, config.head_dim / 2};
  const unsigned blocks = blocks_for(32 * std::int64_t(tokens) * (heads.q + 2 * heads.kv));
  finish_projections_entry<<<blocks, threads, 0, stream>>>(qkv, tokens, heads, bias, q_norm, k_norm,
                                                           config.rms_norm_eps);
  check_launch("launch of biases and norms of heads");
}

void split_and_rotate(const llama_config& config, const float* speeds, const float* qkv, std::int32_t tokens,
                      run_position position, element type, void* q, void* k, void* v, std::int32_t layer,
                      unsigned long long* unusable, cudaStream_t stream) {
  const head_counts heads{config.num_attention_heads, config.num_key_value_heads, config.head_dim / 2};
  const unsigned blocks = blocks_for(std::int64_t(tokens) * (heads.q + 2 * heads.kv) * heads.half);
  const auto launch = [&]<class T>(T*) {
    split_and_rotate_entry<<<blocks, threads, 0, stream>>>(qkv, tokens, position, speeds, heads, static_cast<T*>(q),
                                                           static_cast<T*>(k), static_cast<T*>(v), layer, unusable);
  };
  type == element::bf16 ? launch(static_cast<bf16*>(nullptr)) : launch(static_cast<fp16*>(nullptr));
  check_launch("launch of the rotation");
}

void round_to_bf16(const float* x, std::int64_t count, bf16* y, cudaStream_t stream) {
  round_entry<<<blocks_for(count), threads, 0, stream>>>(x, count, y);
  check_launch("launch of a conversion");
}

void best_tokens(const float* logits, std::int32_t rows, std::int32_t vocab, token_t* best,
                 unsigned long long* unusable, cudaStream_t stream) {
  best_tokens_entry<<<unsigned(rows), best_threads, 0, stream>>>(logits, vocab, best, unusable);
  check_launch("launch of the choice of tokens");
}

void fill_random(void* values, element type, std::int64_t count, float spread, std::uint64_t seed,
                 cudaStream_t stream) {
  const unsigned blocks = blocks_for(count);
  if (type == element::bf16)
    fill_random_entry<<<blocks, threads, 0, stream>>>(static_cast<bf16*>(values), count, spread, seed);
  else
    fill_random_entry<<<blocks, threads, 0, stream>>>(static_cast<fp16*>(values), count, spread, seed);
  check_launch("launch of random values");
}

}  // namespace engine::cuda
