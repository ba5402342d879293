// A method's operations over an engine's pages on the GPU: the device's counterpart of cpu_pages.hpp.
#pragma once

#include <array>
#include <optional>
#include <tessera/backend/cuda/attend/decode/decode_attention.cuh>
#include <tessera/backend/cuda/choose/score_and_choose.cuh>
#include <tessera/backend/cuda/read/extrema/block_index.cuh>
#include <tessera/backend/cuda/read/extrema/choose_by_blocks.cuh>
#include <tessera/backend/cuda/score/expected/query_sums.cuh>
#include <tessera/backend/cuda/score/score.cuh>
#include <tessera/backend/cuda/store/append.cuh>
#include <tessera/backend/cuda/store/free_pages.cuh>
#include <tessera/backend/cuda/store/pack.cuh>
#include <tessera/selector/tokens_or_pages.hpp>

#include "method_pages.hpp"

namespace tessera_torch {

/// An operation of the library that is made for bounds, made again when others are asked for.
template <class Operation>
class made_for {
 public:
  template <class Make>
  const Operation& operator()(const std::array<index_t, 5>& bounds, Make&& make) {
    if (!made_ || bounds != bounds_) {
      made_.emplace(make());
      bounds_ = bounds;
    }
    return *made_;
  }

 private:
  std::array<index_t, 5> bounds_{};
  std::optional<Operation> made_;
};

/// Nothing is waited for; memory comes from `scratch` alone. Tables, lengths and slots are the device's: what is wrong in them
/// the host does not see.
template <class Recipe>
class cuda_pages final : public method_pages<Recipe> {
  using base = method_pages<Recipe>;
  using typename base::T, typename base::view_type;
  using first_stage = typename base::first_stage;

 public:
  explicit cuda_pages(const cache_request& request)
      : base(request),
        device_(tessera::cuda::device_info::current()),
        frequencies_(base::by_statistics ? request.shape.rope_frequencies.size() : 0) {
    if (frequencies_.size() == 0) return;
    tessera::cuda::check(cudaMemcpy(frequencies_.data(), request.shape.rope_frequencies.data(), frequencies_.bytes(),
                                    cudaMemcpyHostToDevice),
                         "cudaMemcpy");
    tessera::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  void append(const paged_layer& to, const tensor_rows& k, const tensor_rows& v, const index_t* new_tokens,
              const index_t* first_position, void* stream) override {
    tessera::append_problem<view_type, T> p;
    p.view = to.as<view_type>();
    p.k = k.as<const T>();
    p.v = v.as<const T>();
    p.lengths = to.lengths;
    p.new_tokens = new_tokens;
    p.first_position = first_position;
    p.positions = to.positions;
    p.scores = to.scores;
    tessera::cuda::append<view_type, T>(to.sequences, to.kv_heads).run(p, nullptr, at(stream));
  }

  void observe(const paged_layer& of, index_t layer, const choice_queries& by, const scratch_memory& scratch,
               void* stream) override {
    if constexpr (base::accumulates) {
      base::check_observed(of, by);
      tessera::require(of.scores.sequence_stride == of.scores.head_stride * of.kv_heads,
                       "sequence stride of the scores", of.scores.sequence_stride,
                       "kv_heads rows, " + std::to_string(of.scores.head_stride * of.kv_heads),
                       "keep them as [sequences, kv_heads, slots]");
      const auto& operation =
          observing_({of.sequences, of.kv_heads, base::shape().q_heads, by.q.tokens, of.capacity()}, [&] {
            return scoring(of.sequences, of.kv_heads, base::shape().q_heads, by.q.tokens, of.capacity(), device_);
          });
      tessera::cuda::score_problem<view_type> p;
      p.view = of.as<view_type>();
      p.q = by.q.as<const T>();
      p.first_position = by.first_position;
      p.valid = by.valid;
      p.rule = base::rule(layer);
      p.scores = of.scores.data;
      p.row_stride = of.scores.head_stride;
      p.accumulate = !base::newest;
      operation.run(p, base::first().scorer, scratch(operation.workspace_bytes()), at(stream));
    } else {
      base::refuse_to_observe();
    }
  }

  void observe_queries(const tensor_rows& q, const index_t* first_position, const tessera::summed_queries& to,
                       const scratch_memory& scratch, void* stream) override {
    if constexpr (base::by_statistics) {
      constexpr int dim = view_type::k_dim;
      auto* const turns = static_cast<double*>(scratch(tessera::cuda::query_turns<dim> * sizeof(double)));
      tessera::cuda::add_queries<dim>(q.as<const T>(), 0, first_position, frequencies_.data(), to, turns, at(stream));
    } else {
      base::refuse_to_observe();
    }
  }

  void choose(const paged_layer& from, index_t layer, const choice_queries& by, const chosen_slots& to,
              const scratch_memory& scratch, void* stream) override {
    if constexpr (base::chooses) {
      const tessera::cuda::choose_limits limits{from.sequences, from.kv_heads, base::shape().q_heads,
                                                std::max(1, by.q.tokens), from.capacity()};
      const auto& operation =
          choosing_({limits.sequences, limits.kv_heads, limits.q_heads, limits.queries, limits.capacity},
                    [&] { return chooser(base::first(), limits, device_); });
      auto p = base::problem(from, layer, by);
      if constexpr (base::by_statistics) p.rope_frequencies = frequencies_.data();
      const tessera::selection_view kept =
          operation.run(base::first(), p, scratch(operation.workspace_bytes()), at(stream));
      const std::size_t rows = std::size_t(from.sequences) * std::size_t(from.kv_heads), slot = sizeof(index_t);
      const std::size_t each = std::size_t(from.capacity()) * slot;
      tessera::require(!kept.offsets && kept.row_stride >= from.capacity(), "row stride of what is kept",
                       kept.row_stride, "the capacity", "make the operation for all that is stored");
      tessera::cuda::check(
          cudaMemcpy2DAsync(to.slots, std::size_t(to.row_stride) * slot, kept.indices,
                            std::size_t(kept.row_stride) * slot, each, rows, cudaMemcpyDeviceToDevice, at(stream)),
          "cudaMemcpy2DAsync");
      tessera::cuda::check(cudaMemcpyAsync(to.counts, kept.counts, rows * slot, cudaMemcpyDeviceToDevice, at(stream)),
                           "cudaMemcpyAsync");
    } else {
      base::refuse_to_choose();
    }
  }

  void pack(const paged_layer& in, const chosen_slots& chosen, const index_t* ends, const scratch_memory& scratch,
            void* stream) override {
    const auto& operation = packing_({in.sequences, in.kv_heads, in.capacity()},
                                     [&] { return packer(in.sequences, in.kv_heads, in.capacity(), device_); });
    const auto view = in.as<view_type>();
    tessera::pack_problem<view_type, view_type> p{view, chosen.view(), view};
    p.positions = in.positions;
    p.lengths = in.lengths;
    p.source_scores = {in.scores.data, in.scores.sequence_stride, in.scores.head_stride};
    p.scores = in.scores;
    p.ends = ends;
    void* memory = scratch(operation.workspace_bytes());
    operation.prepare(memory, at(stream));
    operation.run(p, memory, at(stream));
  }

  void index_pages(const paged_layer& of, const index_memory& index, const index_t* first_slots, index_t new_tokens,
                   void* stream) override {
    tessera::cuda::index_blocks(base::indexing(of, index, first_slots, new_tokens), at(stream));
  }

  void choose_to_read(const paged_layer& from, index_t layer, const index_memory& index, const step_queries& by,
                      const chosen_slots& to, const scratch_memory& scratch, void* stream) override {
    if constexpr (base::reads_pages) {
      const auto p = base::reading(from, layer, index, by, to);
      const tessera::cuda::block_choice_limits limits{from.sequences, from.kv_heads,   by.q.heads,
                                                      by.q.tokens,    from.capacity(), p.read};
      const auto& operation =
          reading_({limits.sequences, limits.kv_heads, limits.q_heads, limits.tokens, limits.capacity}, [&] {
            return reader(base::second().scorer, tessera::unit_chosen_by(base::second().selector), limits, device_);
          });
      operation.run(p, scratch(operation.workspace_bytes()), at(stream));
    } else {
      base::refuse_to_read();
    }
  }

  void free_pages(const paged_layer& of, const page_return& to, void* stream) override {
    tessera::free_pages_problem<view_type> p;
    p.view = of.as<view_type>();
    p.layers = to.layers;
    p.layer_stride = to.layer_stride;
    p.spare_tokens = to.room;
    p.page_counts = to.held;
    p.freed = to.freed;
    p.freed_stride = of.pool.max_blocks;
    p.freed_count = to.freed_count;
    p.pool = of.pool;
    tessera::cuda::free_pages(p, at(stream));
  }

  void attend(const paged_layer& to, index_t layer, const tensor_rows& q, const index_t* first_position,
              const chosen_slots& chosen, const tensor_rows& out, const tensor_rows& lse, const scratch_memory& scratch,
              void* stream) override {
    const auto& operation = attending_({to.sequences, to.kv_heads, q.heads, q.tokens}, [&] {
      return attention(to.sequences, to.kv_heads, q.heads, q.tokens, device_);
    });
    tessera::cuda::decode_problem<view_type> p{};
    p.view = to.as<view_type>();
    p.q = q.as<const T>();
    p.first_position = first_position;
    p.rule = base::rule(layer);
    p.out = out.as<float>();
    p.lse = lse.as<float>();
    if (chosen.slots) p.chosen = chosen.view();
    void* memory = scratch(operation.workspace_bytes());
    operation.prepare(memory, at(stream));
    operation.run(p, memory, at(stream));
  }

 private:
  using attention = tessera::cuda::decode_attention<view_type>;
  using packer = tessera::cuda::pack<view_type, view_type, true>;
  template <bool Chooses, class Stage>
  struct chooser_of {
    using type = tessera::cuda::score_and_choose<view_type, Stage>;
  };
  template <class Stage>
  struct chooser_of<false, Stage> {
    using type = int;
  };
  using chooser = typename chooser_of<base::chooses, first_stage>::type;
  template <bool Accumulates, class Scorer>
  struct scoring_of {
    using type = tessera::cuda::attentive_score<view_type, Scorer>;
  };
  template <class Scorer>
  struct scoring_of<false, Scorer> {
    using type = int;
  };
  template <bool Reads, class Stage>
  struct reader_of_pages {
    using type = tessera::cuda::choose_by_blocks<view_type, typename Stage::scorer_type>;
  };
  template <class Stage>
  struct reader_of_pages<false, Stage> {
    using type = int;
  };
  using reader = typename reader_of_pages<base::reads_pages, typename base::second_stage>::type;
  using scoring = typename scoring_of<base::accumulates, typename base::scorer_type>::type;

  static cudaStream_t at(void* stream) { return static_cast<cudaStream_t>(stream); }

  tessera::cuda::device_info device_;
  tessera::cuda::device_buffer<float> frequencies_;  // how RoPE turns queries, for methods of statistics
  made_for<chooser> choosing_;
  made_for<packer> packing_;
  made_for<attention> attending_;
  made_for<scoring> observing_;
  made_for<reader> reading_;
};

}  // namespace tessera_torch
