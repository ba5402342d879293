// Whole rows of one sequence that a cache keeps for a moment.
#pragma once

#include <type_traits>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/views.hpp"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Whole rows of one sequence, in memory of their own, behind a view of the cache's type: in one page, or in runs.
template <class Whole>
class scratch_rows {
  using T = typename Whole::element_type;
  using table_type = decltype(Whole::table);
  static_assert(Whole::is_raw && (std::is_same_v<table_type, csr_table> || std::is_same_v<table_type, ragged> ||
                                  std::is_same_v<table_type, contiguous>),
                "tessera: whole rows lie in runs, behind a csr_table or side by side");

 public:
  using view_type = kv_view<T, Whole::k_dim, table_type, Whole::v_dim>;

  scratch_rows(index_t kv_heads, index_t slots)
      : heads_(kv_heads),
        k_(std::size_t(kv_heads) * std::size_t(slots) * Whole::k_dim),
        v_(std::size_t(kv_heads) * std::size_t(slots) * Whole::v_dim),
        lengths_(std::size_t(kv_heads)),
        zeros_(2),
        begins_(std::size_t(kv_heads)),
        slots_(slots) {
    host_vector<offset_t> begins;
    for (index_t head = 0; head < kv_heads; ++head) begins.push_back(offset_t(head) * slots);
    check(cudaMemcpy(begins_.data(), begins.data(), begins_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  view_type view() const {
    view_type made;
    made.k = k_.data(), made.v = v_.data();
    made.sequences = 1, made.kv_heads = heads_;
    made.lengths = lengths_.data(), made.length_strides = {heads_, 1};
    made.order = slot_order::ascending;
    if constexpr (std::is_same_v<table_type, csr_table>) {
      made.k_strides = {0, Whole::k_dim, offset_t(heads_) * Whole::k_dim, 1};
      made.v_strides = {0, Whole::v_dim, offset_t(heads_) * Whole::v_dim, 1};
      made.table = {zeros_.data(), zeros_.data() + 1, slots_, 1};  // the page 0
    } else if constexpr (std::is_same_v<table_type, contiguous>) {
      made.k_strides = {0, offset_t(slots_) * Whole::k_dim, Whole::k_dim, 1};
      made.v_strides = {0, offset_t(slots_) * Whole::v_dim, Whole::v_dim, 1};
    } else {
      made.k_strides = {0, 0, Whole::k_dim, 1};
      made.v_strides = {0, 0, Whole::v_dim, 1};
      made.table = {begins_.data(), heads_};
    }
    return made;
  }
  index_t* lengths() const { return lengths_.data(); }
  const offset_t* begins() const { return begins_.data(); }  ///< [kv_heads], slots before each head's

 private:
  index_t heads_;
  device_buffer<T> k_, v_;
  device_buffer<index_t> lengths_, zeros_;
  device_buffer<offset_t> begins_;
  index_t slots_;
};

/// The same rows with a position beside each.
template <class Whole>
class positioned_rows : public scratch_rows<Whole> {
 public:
  using view_type = typename scratch_rows<Whole>::view_type;

  positioned_rows(index_t kv_heads, index_t slots)
      : scratch_rows<Whole>(kv_heads, slots), slots_(slots), positions_(std::size_t(kv_heads) * std::size_t(slots)) {}

  index_t slots() const { return slots_; }
  index_t* positions() const { return positions_.data(); }  ///< [kv_heads, slots]
  view_type view() const {
    view_type made = scratch_rows<Whole>::view();
    made.positions = positions_.data(), made.position_begin = this->begins();
    return made;
  }

 private:
  index_t slots_;
  device_buffer<index_t> positions_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
