// A method's operations over an engine's pages on the CPU.
#pragma once

#include <algorithm>
#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/read/extrema/block_index.hpp>
#include <tessera/backend/cpu/read/extrema/choose_by_blocks.hpp>
#include <tessera/backend/cpu/score/query_sums.hpp>
#include <tessera/backend/cpu/store/free_pages.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <vector>

#include "method_pages.hpp"

namespace tessera_torch {

template <class Recipe>
class cpu_pages final : public method_pages<Recipe> {
  using base = method_pages<Recipe>;
  using typename base::T, typename base::view_type;

 public:
  explicit cpu_pages(const cache_request& request) : base(request), workers_(request.workers) {}

  void append(const paged_layer& to, const tensor_rows& k, const tensor_rows& v, const index_t* new_tokens,
              const index_t* first_position, void*) override {
    tessera::append_problem<view_type, T> p;
    p.view = to.as<view_type>();
    p.k = k.as<const T>();
    p.v = v.as<const T>();
    p.lengths = to.lengths;
    p.new_tokens = new_tokens;
    p.first_position = first_position;
    p.positions = to.positions;
    p.scores = to.scores;
    p.pool = to.pool;
    tessera::cpu::append(p);
  }

  void observe(const paged_layer& of, index_t layer, const choice_queries& by, const scratch_memory&, void*) override {
    if constexpr (base::accumulates) {
      base::check_observed(of, by);
      tessera::cpu::require_pages(of.as<view_type>(), of.pool);
      std::vector<offset_t> begins;
      for (index_t row = 0; row < of.sequences * of.kv_heads; ++row)
        begins.push_back(row / of.kv_heads * of.scores.sequence_stride + row % of.kv_heads * of.scores.head_stride);
      tessera::cpu::score_rows(
          of.as<view_type>(), tessera::cpu::query_rows<T>{by.q.as<const T>(), by.first_position, by.valid},
          base::rule(layer), base::first().scorer, of.scores.data, begins.data(), choosing_.scoring, *workers_);
    } else {
      base::refuse_to_observe();
    }
  }

  void observe_queries(const tensor_rows& q, const index_t* first_position, const tessera::summed_queries& to,
                       const scratch_memory&, void*) override {
    if constexpr (base::by_statistics) {
      tessera::cpu::add_queries<view_type::k_dim>(q.as<const T>(), *first_position, base::first_observed(),
                                                  base::shape().rope_frequencies.data(), to, *workers_);
    } else {
      base::refuse_to_observe();
    }
  }

  void choose(const paged_layer& from, index_t layer, const choice_queries& by, const chosen_slots& to,
              const scratch_memory&, void*) override {
    if constexpr (base::chooses) {
      auto p = base::problem(from, layer, by);
      p.rope_frequencies = base::shape().rope_frequencies.data();
      tessera::cpu::score_and_choose(base::first(), p, kept_, choosing_, *workers_);
      for (index_t row = 0; row < from.sequences * from.kv_heads; ++row) {
        to.counts[row] = kept_.counts[std::size_t(row)];
        std::copy_n(kept_.row(row), to.counts[row], to.slots + row * to.row_stride);
      }
    } else {
      base::refuse_to_choose();
    }
  }

  void pack(const paged_layer& in, const chosen_slots& chosen, const index_t* ends, const scratch_memory&,
            void*) override {
    const auto view = in.as<view_type>();
    tessera::pack_problem<view_type, view_type> p{view, chosen.view(), view};
    p.positions = in.positions;
    p.lengths = in.lengths;
    p.source_scores = {in.scores.data, in.scores.sequence_stride, in.scores.head_stride};
    p.scores = in.scores;
    p.ends = ends;
    p.pool = in.pool;
    tessera::cpu::pack(p, *workers_);
  }

  void index_pages(const paged_layer& of, const index_memory& index, const index_t* first_slots, index_t new_tokens,
                   void*) override {
    tessera::cpu::index_blocks(base::indexing(of, index, first_slots, new_tokens), *workers_);
  }

  void choose_to_read(const paged_layer& from, index_t layer, const index_memory& index, const step_queries& by,
                      const chosen_slots& to, const scratch_memory&, void*) override {
    if constexpr (base::reads_pages) {
      tessera::cpu::choose_by_blocks(base::reading(from, layer, index, by, to), base::second().scorer,
                                     base::second().selector, reading_, *workers_);
    } else {
      base::refuse_to_read();
    }
  }

  void free_pages(const paged_layer& of, const page_return& to, void*) override {
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
    tessera::cpu::free_pages(p);
  }

  void attend(const paged_layer& to, index_t layer, const tensor_rows& q, const index_t* first_position,
              const chosen_slots& chosen, const tensor_rows& out, const tensor_rows& lse, const scratch_memory&,
              void*) override {
    const tessera::selection_view slots = chosen.view();
    tessera::cpu::decode_attention(to.as<view_type>(), tessera::cpu::query_rows<T>{q.as<const T>(), first_position},
                                   base::rule(layer), chosen.slots ? &slots : nullptr,
                                   {out.as<float>(), lse.as<float>()}, attending_, *workers_);
  }

 private:
  std::shared_ptr<tessera::cpu::executor> workers_;
  tessera::selection kept_;
  tessera::cpu::choose_workspace<view_type::k_dim> choosing_;
  tessera::cpu::decode_workspace attending_;
  tessera::host_vector<tessera::cpu::page_workspace<view_type::k_dim>> reading_;
};

}  // namespace tessera_torch
