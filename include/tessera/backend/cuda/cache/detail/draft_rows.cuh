// Rows of drafts on the device: they lie beside the cache until they are accepted, and attend to each other there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/logit_rule.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../core/views.hpp"
#include "../../../../runtime/turn/draft.hpp"
#include "../../cache_options.hpp"
#include "../../device/kernel.cuh"
#include "../../device/memory.cuh"
#include "../../device/softmax.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int draft_warps = 4;

/// The trees of a batch: ancestors as bits, [sequences, max_draft_tokens], 0 behind the tokens of a smaller tree.
struct draft_trees {
  const std::uint64_t* words;
  __device__ std::uint64_t ancestors(index_t b, index_t t) const { return words[b * max_draft_tokens + t]; }
};

/// Where the rows of a draft are stored: [sequences, tokens, heads, dim] of one layer, by id. Null: not stored.
template <class T>
struct stored_drafts {
  T *q, *k, *v;
  index_t tokens;
};

template <class T, class Out>
struct draft_problem {
  rows_view<const T> q, k, v;
  rows_view<Out> out;
  rows_view<float> lse;  // of the stored tokens, then of both
  draft_trees trees;
  const index_t* ids;
  stored_drafts<T> stored;
  logit_rule rule;
};

struct some_ancestors {
  std::uint64_t words[max_draft_tokens];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_tree_entry(const __grid_constant__ some_ancestors tree, std::uint64_t* to) {
  to[blockIdx.x * Threads + threadIdx.x] = tree.words[threadIdx.x];
}

/// Writes where each sequence's draft begins to `first` [batch], and the position of each token to `positions`
/// [tokens, batch].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    draft_positions_entry(const index_t* next, const index_t* ids, draft_trees trees, index_t* first,
                          index_t* positions) {
  const index_t b = blockIdx.x, t = threadIdx.x, begin = next[ids[b]];
  const int ancestors = __popcll(trees.ancestors(b, t));
  if (t == 0) first[b] = begin;
  positions[offset_t(t) * gridDim.x + b] = begin + (ancestors > 0 ? ancestors - 1 : 0);
}

template <class T, int Dim>
__device__ void copy_draft_row(T* to, const T* row, index_t b_id, index_t t, index_t head, index_t heads,
                               index_t tokens, int lane) {
  T* target = to + ((offset_t(b_id) * tokens + t) * heads + head) * Dim;
  for (int d = lane; d < Dim; d += 32) target[d] = row[d];
}

/// A warp adds the draft's own tokens to one query row, and stores the rows that are its own.
template <class T, class Out, int Dk, int Dv>
__global__ void __launch_bounds__(draft_warps * 32)
    attend_draft_entry(const __grid_constant__ draft_problem<T, Out> p) {
  constexpr int k_lanes = (Dk + 31) / 32, v_lanes = (Dv + 31) / 32;
  const int lane = int(threadIdx.x % 32);
  const offset_t row = offset_t(blockIdx.x) * draft_warps + threadIdx.x / 32;
  if (row >= offset_t(p.q.sequences) * p.q.tokens * p.q.heads) return;
  const index_t head = index_t(row % p.q.heads), t = index_t(row / p.q.heads % p.q.tokens);
  const index_t b = index_t(row / p.q.heads / p.q.tokens), group = p.q.heads / p.k.heads, kv_head = head / group;
  const std::uint64_t ancestors = p.trees.ancestors(b, t);
  if (ancestors == 0) return;
  if (p.stored.q)
    copy_draft_row<T, Dk>(p.stored.q, p.q.row(b, t, head), p.ids[b], t, head, p.q.heads, p.stored.tokens, lane);
  if (head % group == 0) {
    copy_draft_row<T, Dk>(p.stored.k, p.k.row(b, t, kv_head), p.ids[b], t, kv_head, p.k.heads, p.stored.tokens, lane);
    copy_draft_row<T, Dv>(p.stored.v, p.v.row(b, t, kv_head), p.ids[b], t, kv_head, p.k.heads, p.stored.tokens, lane);
  }

  const float scale = p.rule.scale_for(Dk);
  float q[k_lanes], sums[v_lanes];
#pragma unroll
  for (int i = 0; i < k_lanes; ++i) q[i] = i * 32 + lane < Dk ? float(p.q.row(b, t, head)[i * 32 + lane]) : 0.0f;
  Out* out = p.out.row(b, t, head);
  float* lse = p.lse.row(b, t, head);
  // The stored tokens are the first part: its sum is 1 at its log-sum-exp. NaN there stays NaN.
  float top = *lse, sum = top == -infinity ? 0.0f : 1.0f;
  if (top != top) sum = top, top = -infinity;
#pragma unroll
  for (int i = 0; i < v_lanes; ++i) sums[i] = sum == 0 || i * 32 + lane >= Dv ? 0.0f : float(out[i * 32 + lane]);
  const int depth = __popcll(ancestors) - 1;
  for (std::uint64_t left = ancestors; left; left &= left - 1) {
    const index_t key = __ffsll(static_cast<long long>(left)) - 1;
    if (!p.rule.visible(depth, __popcll(p.trees.ancestors(b, key)) - 1)) continue;
    const T* k = p.k.row(b, key, kv_head);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < k_lanes; ++i) {
      if (i * 32 + lane < Dk) dot += q[i] * float(k[i * 32 + lane]);
    }
    const float logit = quick_cap(p.rule, warp_sum(dot) * scale);
    const float larger = fmaxf(top, logit), reference = softmax_reference(larger);
    const float shrink = top == -infinity ? (sum != sum ? sum : 0.0f) : expf(top - reference);
    const float weight = expf(logit - reference);
    sum = sum * shrink + weight;
    top = larger;
    const T* v = p.v.row(b, key, kv_head);
#pragma unroll
    for (int i = 0; i < v_lanes; ++i) {
      if (i * 32 + lane < Dv) sums[i] = sums[i] * shrink + weight * float(v[i * 32 + lane]);
    }
  }
  const float factor = sum == 0 ? 0.0f : 1 / sum;
#pragma unroll
  for (int i = 0; i < v_lanes; ++i) {
    if (i * 32 + lane < Dv) out[i * 32 + lane] = Out(sums[i] * factor);
  }
  if (lane == 0) *lse = sum == 0 ? -infinity : (sum != sum ? sum : softmax_reference(top) + logf(sum));
}

/// Accepted rows, side by side: into [layers, batch, tokens, heads * dim], of [layers, sequences, drafted, the same].
template <class T>
struct gathered_draft {
  const T* source;
  T* target;
  index_t width;  // heads * dim
};
template <class T>
struct gather_problem {
  gathered_draft<T> planes[3];
  const index_t *ids, *nodes;  // nodes [batch, max_step_tokens]
  index_t sequences, drafted, batch, tokens;
};
/// blockIdx.x: an accepted token of a sequence; y: a layer; z: a plane.
template <class T>
__global__ void __launch_bounds__(128) gather_accepted_entry(const __grid_constant__ gather_problem<T> p) {
  const gathered_draft<T> plane = p.planes[blockIdx.z];
  const index_t b = index_t(blockIdx.x) / p.tokens, t = index_t(blockIdx.x) % p.tokens, layer = index_t(blockIdx.y);
  const index_t node = p.nodes[b * max_step_tokens + t];
  const T* source = plane.source + ((offset_t(layer) * p.sequences + p.ids[b]) * p.drafted + node) * plane.width;
  T* target = plane.target + ((offset_t(layer) * p.batch + b) * p.tokens + t) * plane.width;
  for (index_t i = threadIdx.x; i < plane.width; i += 128) target[i] = source[i];
}

}  // namespace detail

/// The rows of pending drafts, and those of accepted ones as a step's layers take them.
/// Memory   for each sequence, layer and token of cache_options::draft_tokens: rows of k and v, and of q where steps
///          observe or read by it; for each of cache_options::step_tokens: the same once more, and outputs.
/// Cost     one launch a layer of a draft; one launch to gather all layers of accepted tokens.
template <class T, class Out, int Dk, int Dv, bool WithQueries>
class draft_rows {
 public:
  draft_rows(const model_shape& shape, const cache_options& options)
      : shape_(shape),
        sequences_(options.sequences),
        drafted_(options.draft_tokens),
        step_tokens_(options.step_tokens),
        ancestors_(rows(options.sequences, max_draft_tokens)),
        positions_(rows(options.sequences, max_draft_tokens)),
        nodes_(rows(options.sequences, max_step_tokens)),
        sums_(rows(options.sequences, drafted_) * std::size_t(shape.q_heads)),
        k_(of_drafts(shape.kv_heads, Dk)),
        v_(of_drafts(shape.kv_heads, Dv)),
        q_(WithQueries ? of_drafts(shape.q_heads, Dk) : 0),
        accepted_k_(of_steps(shape.kv_heads, Dk)),
        accepted_v_(of_steps(shape.kv_heads, Dv)),
        accepted_q_(WithQueries ? of_steps(shape.q_heads, Dk) : 0),
        out_(WithQueries ? rows(options.sequences, options.step_tokens) * std::size_t(shape.q_heads) * Dv : 0) {}

  /// The host's part: writes the trees of a batch, if they are not those of the last draft.
  void set(const draft_step& draft, cudaStream_t stream) {
    const std::size_t batch = std::size_t(draft.sequences());
    if (draft.trees == known_ && batch <= known_batch_) return;
    known_ = {};
    for (std::size_t i = 0; i < draft.trees.size(); ++i) {
      detail::some_ancestors tree{};
      for (index_t t = 0; t < draft.trees[i].tokens(); ++t) tree.words[t] = draft.trees[i].ancestors(t);
      const std::size_t copies = draft.trees.size() == 1 ? batch : 1;
      detail::set_tree_entry<max_draft_tokens><<<unsigned(copies), max_draft_tokens, 0, stream>>>(
          tree, ancestors_.data() + i * std::size_t(max_draft_tokens));
      check(cudaGetLastError(), "launch of set_tree");
    }
    known_ = draft.trees;
    known_batch_ = batch;
  }
  /// Positions of the drafts' tokens. `first` [batch] gets those where the drafts begin.
  void begin(const index_t* next, const index_t* ids, index_t batch, index_t* first, cudaStream_t stream) const {
    detail::draft_positions_entry<max_draft_tokens>
        <<<unsigned(batch), max_draft_tokens, 0, stream>>>(next, ids, {ancestors_.data()}, first, positions_.data());
    check(cudaGetLastError(), "launch of draft_positions");
  }
  /// On the device, the positions of the batch's t-th tokens.
  const index_t* positions(index_t t, index_t batch) const { return positions_.data() + offset_t(t) * batch; }
  /// Memory for the log-sum-exps of a batch.
  rows_view<float> sums(index_t batch, index_t tokens) const {
    return nhd_rows(sums_.data(), tokens, shape_.q_heads, 1, batch);
  }

  /// One layer: adds the draft's own tokens to outputs over the stored ones, and stores the rows.
  void attend(index_t layer, const index_t* ids, const logit_rule& rule, const rows_view<const T>& q,
              const rows_view<const T>& k, const rows_view<const T>& v, const rows_view<Out>& out,
              const rows_view<float>& lse, cudaStream_t stream) const {
    const auto of_layer = [&](T* all, index_t heads, index_t dim) {
      return all ? all + offset_t(layer) * sequences_ * drafted_ * heads * dim : nullptr;
    };
    const detail::draft_problem<T, Out> problem{
        q,
        k,
        v,
        out,
        lse,
        {ancestors_.data()},
        ids,
        {WithQueries ? of_layer(q_.data(), shape_.q_heads, Dk) : nullptr, of_layer(k_.data(), shape_.kv_heads, Dk),
         of_layer(v_.data(), shape_.kv_heads, Dv), drafted_},
        rule};
    const offset_t count = offset_t(q.sequences) * q.tokens * q.heads;
    detail::attend_draft_entry<T, Out, Dk, Dv>
        <<<unsigned((count + detail::draft_warps - 1) / detail::draft_warps), detail::draft_warps * 32, 0, stream>>>(
            problem);
    check(cudaGetLastError(), "launch of attend_draft");
  }

  /// The host's part of `gather`: which tokens of each sequence of a step are accepted.
  template <class Write>
  void set_nodes(const host_vector<accepted_tokens>& accepted, const Write& write) const {
    host_vector<index_t> nodes;
    for (const accepted_tokens& part : accepted) {
      if (part.nodes.empty()) continue;
      for (index_t t = 0; t < max_step_tokens; ++t)
        nodes.push_back(part.nodes[std::size_t((std::min)(t, index_t(part.nodes.size()) - 1))]);
    }
    write(nodes, nodes_.data());
  }
  /// Lays out the accepted rows of all layers.
  void gather(const index_t* ids, index_t batch, index_t tokens, cudaStream_t stream) const {
    detail::gather_problem<T> p{{{k_.data(), accepted_k_.data(), shape_.kv_heads * Dk},
                                 {v_.data(), accepted_v_.data(), shape_.kv_heads * Dv},
                                 {q_.data(), accepted_q_.data(), shape_.q_heads * Dk}},
                                ids,
                                nodes_.data(),
                                sequences_,
                                drafted_,
                                batch,
                                tokens};
    detail::gather_accepted_entry<T>
        <<<dim3(unsigned(batch * tokens), unsigned(shape_.layers), WithQueries ? 3 : 2), 128, 0, stream>>>(p);
    check(cudaGetLastError(), "launch of gather_accepted");
  }
  struct step_rows {
    rows_view<const T> q, k, v;
    rows_view<Out> out;  ///< for outputs that nobody asked for
  };
  step_rows accepted(index_t layer, index_t batch, index_t tokens) const {
    const auto of_layer = [&](const T* all, index_t heads, index_t dim) {
      return nhd_rows<const T>(all ? all + offset_t(layer) * batch * tokens * heads * dim : nullptr, tokens, heads, dim,
                               batch);
    };
    return {of_layer(accepted_q_.data(), shape_.q_heads, Dk), of_layer(accepted_k_.data(), shape_.kv_heads, Dk),
            of_layer(accepted_v_.data(), shape_.kv_heads, Dv),
            nhd_rows(out_.data(), tokens, shape_.q_heads, index_t(Dv), batch)};
  }

 private:
  std::size_t rows(index_t sequences, index_t tokens) const {
    return drafted_ > 0 ? std::size_t(sequences) * std::size_t(tokens) : 0;
  }
  std::size_t of_drafts(index_t heads, index_t dim) const {
    return rows(sequences_, drafted_) * std::size_t(shape_.layers) * std::size_t(heads) * std::size_t(dim);
  }
  std::size_t of_steps(index_t heads, index_t dim) const {
    return rows(sequences_, step_tokens_) * std::size_t(shape_.layers) * std::size_t(heads) * std::size_t(dim);
  }

  model_shape shape_;
  index_t sequences_, drafted_, step_tokens_;
  device_buffer<std::uint64_t> ancestors_;
  device_buffer<index_t> positions_, nodes_;
  device_buffer<float> sums_;
  device_buffer<T> k_, v_, q_;
  device_buffer<T> accepted_k_, accepted_v_, accepted_q_;
  device_buffer<Out> out_;
  host_vector<draft_tree> known_;  // what `ancestors_` has
  std::size_t known_batch_ = 0;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
