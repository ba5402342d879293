// One method's operations over pages that an engine owns, behind an interface: what tessera::any_cache is for whole caches.
#pragma once

#include <functional>
#include <optional>
#include <tessera/core/engine/page_pool.hpp>
#include <tessera/core/prompt/query_statistics.hpp>
#include <tessera/core/selection.hpp>
#include <tessera/core/stored/slot_column.hpp>

#include "../recipe_library.hpp"

namespace tessera_torch {

/// One layer of an engine's pages; on a GPU every pointer is the device's.
/// Shapes   k, v [pages, page, kv_heads, dim] in any strides, on a GPU but that of dim, which is 1; lengths [sequences, kv_heads];
///          positions [sequences, kv_heads, capacity]; a table row for each sequence, or for each (sequence, kv_head), whose
///          pages then have one head.
struct paged_layer {
  void *k = nullptr, *v = nullptr;
  tessera::row_strides k_strides, v_strides;
  index_t sequences = 0, kv_heads = 0;
  index_t* lengths = nullptr;
  tessera::slot_column<index_t> positions;
  tessera::slot_column<float> scores;  ///< strided as the positions; data null: none
  tessera::block_table table;
  tessera::page_pool pool;

  index_t capacity() const { return pool.max_blocks * table.page; }  ///< slots of a head

  template <class View>
  View as() const {
    View view;
    view.k = static_cast<typename View::stored_type*>(k);
    view.v = static_cast<typename View::stored_type*>(v);
    view.k_strides = k_strides;
    view.v_strides = v_strides;
    view.sequences = sequences;
    view.kv_heads = kv_heads;
    view.lengths = lengths;
    view.length_strides = {kv_heads, 1};
    view.positions = positions.data;
    view.position_strides = {positions.sequence_stride, positions.head_stride};
    view.table = table;
    return view;
  }
};

/// What a choice goes by, beside what is stored. Each pointer [sequences], or null: all of q count; from nothing; the
/// budget and the newest tokens as the method has them.
struct choice_queries {
  tensor_rows q;  ///< the newest queries of each sequence
  const index_t* valid = nullptr;
  const index_t* first_position = nullptr;
  const index_t* budgets = nullptr;  ///< tokens that stay of each kv_head
  const index_t* tails = nullptr;    ///< newest tokens that stay whatever their score
  index_t granularity = 1;           ///< counts of heads are multiples of it: whole pages
  /// [sequences] on the device of the pages: what `observe_queries` has added up.
  const tessera::query_statistics* statistics = nullptr;
};

/// Slots of every (sequence, kv_head), ascending, at the front of its row.
struct chosen_slots {
  index_t* slots = nullptr;  ///< [sequences, kv_heads, capacity]; null: everything that is stored
  index_t* counts = nullptr;
  offset_t row_stride = 0;

  tessera::selection_view view() const { return {slots, counts, nullptr, row_stride}; }
};

/// An index of the keys of an engine's pages, by page: [pages * parts of a page, kv_heads, 2, dim] of the model's element.
struct index_memory {
  void* data = nullptr;
  tessera::row_strides strides;  ///< as of tessera::block_extrema_view
  offset_t side = 0;
};

/// What a step chooses by. Each pointer [sequences], or null: the method's numbers.
struct step_queries {
  tensor_rows q;
  const index_t* first_position = nullptr;
  const index_t* reads = nullptr;     ///< tokens that it attends
  const index_t* channels = nullptr;  ///< channels of a key that its estimate reads
};

/// What a budget leaves to each stage behind a prompt of one length.
struct planned_stages {
  index_t kept = 0;      ///< tokens that the first stage keeps of each kv_head, at most the prompt
  index_t read = 0;      ///< tokens that a step attends
  index_t page = 0;      ///< tokens that are estimated together
  index_t channels = 0;  ///< channels of a key that an estimate reads
};

/// Which pages of a batch nobody needs, as tessera::free_pages_problem has it.
struct page_return {
  index_t layers = 1;
  offset_t layer_stride = 0;  ///< of the lengths
  index_t room = 0;
  index_t *held = nullptr, *freed = nullptr, *freed_count = nullptr;
};

/// Memory of a GPU for one operation; null on the CPU.
using scratch_memory = std::function<void*(std::size_t)>;

/// `stream` is a cudaStream_t, null on the CPU. Rows are [sequences, tokens, heads, dim].
/// Errors   tessera::error, before anything is changed.
class any_pages {
 public:
  virtual ~any_pages() = default;

  virtual tessera::element_kind element() const = 0;
  virtual index_t head_dim() const = 0;
  /// What the method's scorer observes, which an engine hands over: "nothing", the newest queries of a prompt ("window"),
  /// every query or each newest one by `observe` ("every_query", "newest_query"), every query by `observe_queries`
  /// ("statistics"), scores of its own ("given"); "more": what operations over pages do not take.
  virtual const char* observes() const = 0;
  /// The first position whose query counts in statistics.
  virtual index_t first_observed() const = 0;

  /// New tokens behind what every head holds; lengths and positions move on. new_tokens [sequences], or null: all rows.
  virtual void append(const paged_layer& to, const tensor_rows& k, const tensor_rows& v, const index_t* new_tokens,
                      const index_t* first_position, void* stream) = 0;
  /// Adds the weights of queries to the layer's scores, or replaces them by those of one query.
  virtual void observe(const paged_layer& of, index_t layer, const choice_queries& by, const scratch_memory& scratch,
                       void* stream) = 0;
  /// Adds the queries of one sequence, from position *first_position on, to its sums.
  virtual void observe_queries(const tensor_rows& q, const index_t* first_position, const tessera::summed_queries& to,
                               const scratch_memory& scratch, void* stream) = 0;
  /// What the method's first stage keeps of a layer.
  virtual void choose(const paged_layer& from, index_t layer, const choice_queries& by, const chosen_slots& to,
                      const scratch_memory& scratch, void* stream) = 0;
  /// Chosen rows, their positions and scores, move to slots 0, 1, 2, ... of their head, or to those before `ends` [sequences];
  /// lengths become the counts.
  virtual void pack(const paged_layer& in, const chosen_slots& chosen, const index_t* ends,
                    const scratch_memory& scratch, void* stream) = 0;
  /// The stages of a method whose steps choose by an index, behind a prompt of so many tokens; `budget` in place of the
  /// method's.
  virtual planned_stages plan(index_t prompt, const std::optional<index_t>& budget) const = 0;
  /// Tokens of a page of the index by which steps choose what they read.
  /// Errors   a method whose steps choose in another way, or whose page the budget decides.
  virtual index_t index_page() const = 0;
  /// Brings the index up to date with the slots from first_slots [sequences] on, or all where that is null. `new_tokens`: how
  /// many a sequence usually has, which a GPU's launch is made for.
  virtual void index_pages(const paged_layer& of, const index_memory& index, const index_t* first_slots,
                           index_t new_tokens, void* stream) = 0;
  /// An upper bound of the slots that a step of so many tokens chooses.
  virtual index_t max_read(index_t tokens, index_t capacity) const = 0;
  /// What a step reads, by the index; rows of `to` hold max_read slots.
  virtual void choose_to_read(const paged_layer& from, index_t layer, const index_memory& index, const step_queries& by,
                              const chosen_slots& to, const scratch_memory& scratch, void* stream) = 0;
  virtual void free_pages(const paged_layer& of, const page_return& to, void* stream) = 0;
  /// Attention of the newest q.tokens tokens. out [sequences, tokens, q_heads, dim] and lse [sequences, tokens, q_heads], fp32.
  virtual void attend(const paged_layer& to, index_t layer, const tensor_rows& q, const index_t* first_position,
                      const chosen_slots& chosen, const tensor_rows& out, const tensor_rows& lse,
                      const scratch_memory& scratch, void* stream) = 0;
};

}  // namespace tessera_torch

extern "C" {
/// Errors: tessera::error, for parameters or shapes that make no sense.
tessera_torch::any_pages* tessera_torch_make_pages(const tessera_torch::cache_request& request);
}
