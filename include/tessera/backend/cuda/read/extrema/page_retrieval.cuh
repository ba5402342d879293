// Paged retrieval on the GPU, the host's calls: which slots a decode step reads, by an estimate of the keys.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/model_shape.hpp"
#include "../../../../core/selection.hpp"
#include "../../attend/attention_problems.cuh"
#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../device/workspace.cuh"
#include "../../store/slot_order.cuh"
#include "detail/page_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bounds of the plans that one launch may have. They size memory; the work follows each sequence's own plan.
struct read_bounds {
  index_t capacity = 0;      ///< upper bound of the tokens that a row stores
  index_t read = 0;          ///< upper bound of the tokens that a step attends
  index_t page = 1;          ///< smallest page
  index_t largest_page = 1;  ///< used where whole pages are chosen, and for `max_chosen`
  index_t tail = 0;          ///< longest tail
  /// An upper bound of a row's pages when its plan is made; 0: as many as `capacity` and `page` allow. Rows of so many
  /// pages are chosen, and attended, in one launch if they fit. Longer rows give right results too, more slowly.
  index_t usual_pages = 0;

  /// Widens the bounds by a plan of a conversation with `tokens` tokens.
  void cover(const read_plan& plan, index_t tokens) {
    const bool first = read == 0;
    read = (std::max)(read, plan.read);
    page = first ? plan.page : (std::min)(page, plan.page);
    largest_page = first ? plan.page : (std::max)(largest_page, plan.page);
    tail = (std::max)(tail, plan.tail);
    usual_pages = (std::max)(usual_pages, plan.pages_of((std::min)(tokens, capacity)));
  }
  bool covers(const read_plan& plan) const {
    return plan.read <= read && plan.page >= page && plan.page <= largest_page && plan.tail <= tail;
  }
  index_t max_pages() const { return ceil_div(capacity, page); }
};

/// Chooses what a step reads, as cpu::choose_by_pages does with a tokens_or_pages selector.
///
/// Call `workspace_bytes` once, then `run` any number of times. `run` neither allocates nor synchronises, and the host
/// needs neither lengths nor plans, so a captured graph can be replayed while both change. Sequences of one launch may
/// have any plans within the bounds. Repeated calls give the same bits. The choice equals the CPU's, except for scores
/// that differ by rounding alone. A step of several tokens reads its own tokens and the plan's tail.
/// Shapes   as page_problem says; lengths at most `bounds.capacity`; a row of `out` holds `max_chosen()` slots.
/// Errors   shapes that the kernels cannot take: tessera::error before anything is launched.
/// Cost     one launch if the device has clusters and a share of the usual pages fits into shared memory, else two. One
///          value per page and chosen channel is read, or two if the signs of Quest's heads differ.
///
/// With an `Out`, `choose_and_attend` does a step's attention in the same launch where `attends()`.
template <class View, paged_scorer Scorer, class Out = void>
class choose_pages {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  using attended = std::conditional_t<std::is_void_v<Out>, float, Out>;
  static constexpr bool can_attend =
      !std::is_void_v<Out> && View::is_raw && D + View::v_dim <= 256 && !Scorer::adds_mean_value;
  static_assert(sizeof(T) == 2, "tessera: the page kernels take fp16 and bf16");

 public:
  using problem_type = page_problem<View>;

  /// `tokens`: an upper bound of a step's tokens. Of the scorer only what plans do not contain is used: how it chooses
  /// sides and scales.
  choose_pages(const Scorer& scorer, selection_unit unit, const read_bounds& bounds, index_t sequences,
               index_t kv_heads, index_t q_heads, index_t tokens, const device_info& device)
      : scorer_(scorer),
        unit_(unit),
        bounds_(bounds),
        rows_(sequences * kv_heads),
        kv_heads_(kv_heads),
        q_heads_(q_heads),
        tokens_(tokens) {
    check_bounds(sequences);
    query_rows_ = tokens * (q_heads / kv_heads);
    const index_t usual = usual_pages(), tiles = ceil_div(usual, index_t(detail::tile_pages));
    stride_ = ceil_div(bounds.max_pages(), index_t(detail::tile_pages)) * detail::tile_pages;
    key_stride_ = (bounds.max_pages() + detail::page_rows::max_cuts + 3) / 4 * 4;
    // Few rows: one tile per block, for a short launch. Many rows: several tiles per block, so that a block chooses its
    // channels once for all of them.
    tiles_each_ = std::clamp(tiles * rows_ / (device.multiprocessors * 5), 1, 8);
    tile_blocks_ = ceil_div(tiles, tiles_each_);
    logits_shared_ = detail::page_shared<T, D>::bytes(query_rows_);
    logits_entry_.require_shared(logits_shared_, device, "page scores", "split the step");
    if (device.compute_capability >= 90) find_clusters(device);
    select_shared_ = std::size_t(key_stride_) * 4;
    resident_ = select_entry_.allow_shared(select_shared_, device);
    if (!resident_) {
      select_entry_ = {detail::choose_pages_entry<false>};
      select_shared_ = 0;
    }
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// An upper bound of the slots that are chosen of a row.
  index_t max_chosen() const {
    if (unit_ == selection_unit::token) return (std::min)(bounds_.read, bounds_.capacity);
    // Forced slots fill their pages and may begin within one; other slots fill whole pages.
    const offset_t page = bounds_.largest_page, tail = (std::max)({tokens_, bounds_.tail, 1});
    return index_t(
        (std::min<offset_t>)(bounds_.capacity, (std::max<offset_t>)(tail + 2 * page, bounds_.read + page - 1)));
  }

  const read_bounds& bounds() const { return bounds_; }
  /// Throws unless the plan lies within the bounds. Called before the plan is written for launches.
  void require_covered(const read_plan& plan) const {
    require(bounds_.covers(plan), "plan of a sequence",
            "read " + std::to_string(plan.read) + ", page " + std::to_string(plan.page) + ", tail " +
                std::to_string(plan.tail),
            "read at most " + std::to_string(bounds_.read) + ", page " + std::to_string(bounds_.page) + " to " +
                std::to_string(bounds_.largest_page) + ", tail at most " + std::to_string(bounds_.tail),
            "make the operations for bounds that cover every plan");
  }

  void run(const problem_type& p, void* workspace, cudaStream_t stream) const {
    if (!cluster_entry_) {
      score(p, workspace, stream);
      select(p, workspace, stream);
      return;
    }
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    watch_order(p.view, stream);
    cluster_entry_.launch(shape_of(p, layout_.bytes), stream, "launch of cluster_pages", p, scorer_,
                          choice(p, workspace), scratch(p, workspace), layout_);
  }

  /// Whether `choose_and_attend` can be called: raw rows, few query rows, few tokens to attend, and a device with
  /// clusters.
  bool attends() const { return bool(attend_entry_); }

  /// `run`, and the step's attention over what it chose, as decode_attention does it: out [sequences, tokens, q_heads,
  /// v_dim], lse [sequences, tokens, q_heads] (data null: not wanted). One launch.
  void choose_and_attend(const problem_type& p, const rows_view<attended>& out, const rows_view<float>& lse,
                         void* workspace, cudaStream_t stream) const {
    require(attends(), "attends()", "false", "true", "call run and decode_attention where attends() is false");
    check_problem(p);
    require_rows_on_16_bytes("K", p.view.k, p.view.k_strides);
    require_rows_on_16_bytes("V", p.view.v, p.view.v_strides);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    watch_order(p.view, stream);
    attend_entry_.launch(shape_of(p, attend_bytes_), stream, "launch of attend_pages", p, scorer_, choice(p, workspace),
                         scratch(p, workspace), layout_, out, lse, max_chosen());
  }

  /// The first of two launches that equal `run`: writes the logits of pages to the workspace.
  void score(const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    watch_order(p.view, stream);
    logits_entry_.launch({dim3(unsigned(tile_blocks_), unsigned(rows)), dim3(detail::page_threads), logits_shared_},
                         stream, "launch of page logits", p, scorer_, scratch(p, workspace));
  }

  /// The second: chooses by the logits in the workspace.
  void select(const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    select_entry_.launch({dim3(unsigned(rows)), dim3(detail::choose_threads), select_shared_}, stream,
                         "launch of choose_pages", choice(p, workspace), scratch(p, workspace));
  }

 private:
  index_t usual_pages() const {
    return bounds_.usual_pages > 0 ? (std::min)(bounds_.usual_pages, bounds_.max_pages()) : bounds_.max_pages();
  }

  void check_bounds(index_t sequences) const {
    require(bounds_.read >= 1, "read", bounds_.read, "at least 1", "pass the most tokens that a step attends");
    require(bounds_.page >= 1 && bounds_.largest_page >= bounds_.page, "page", bounds_.page,
            "1 to the largest page, which is " + std::to_string(bounds_.largest_page),
            "cover every plan that may come");
    require(sequences >= 1 && kv_heads_ >= 1 && rows_ <= 65535, "sequences * kv_heads", rows_, "1 to 65535",
            "split the batch");
    require_head_counts(q_heads_, kv_heads_);
    require(tokens_ >= 1 && tokens_ <= detail::max_step_tokens, "tokens", tokens_,
            "1 to " + std::to_string(detail::max_step_tokens), "split the step");
    require(tokens_ * (q_heads_ / kv_heads_) <= detail::max_query_rows, "tokens * query heads of a group",
            tokens_ * (q_heads_ / kv_heads_), "at most " + std::to_string(detail::max_query_rows), "split the step");
    require(bounds_.capacity >= 1, "capacity", bounds_.capacity, "at least 1",
            "pass the most tokens that a row may hold");
  }

  template <class Kernel>
  static bool configure(const device_info& device, const Kernel& entry, std::size_t wanted) {
    if (!entry.overlaps() || !entry.allow_shared(wanted, device)) return false;
    entry.prefer_shared();
    return true;
  }

  /// Finds how many blocks share a row: as many as can run for all rows at a time, or two if the usual pages of a row
  /// do not fit into the memory of one block.
  void find_clusters(const device_info& device) {
    for (blocks_ = detail::max_cluster_blocks; blocks_ > 1 && !run_at_once(device);) blocks_ /= 2;
    const int max_blocks = (std::max)(blocks_, 2);
    for (; blocks_ <= max_blocks; blocks_ *= 2) {
      for (const index_t ring : {detail::widest_ring, detail::usual_ring}) {
        layout_ = detail::cluster_shared<T, D>::lay_out(query_rows_, usual_pages(), blocks_, ring);
        // A ring that is wider than usual only helps if it holds all of a share at once.
        if (ring == detail::widest_ring && layout_.share > ring) continue;
        if (blocks_ == 1 ? try_clusters<true>(device) : try_clusters<false>(device)) return;
      }
    }
  }
  /// Whether clusters of `blocks_` blocks can run for all rows at a time. In two waves they take twice as long, and
  /// half as many blocks take less than that (34.9 us and 22.5 for 32 rows, H200, CUDA 13.0).
  bool run_at_once(const device_info& device) const {
    const cluster_kernel entry(detail::cluster_pages_entry<View, Scorer, false>);
    const auto layout = detail::cluster_shared<T, D>::lay_out(query_rows_, usual_pages(), blocks_, detail::usual_ring);
    return configure(device, entry, layout.bytes) &&
           rows_ <= entry.resident_clusters({.blocks = dim3(unsigned(blocks_), unsigned(rows_)),
                                             .threads = dim3(detail::cluster_threads),
                                             .shared_bytes = layout.bytes,
                                             .cluster = unsigned(blocks_)});
  }
  template <bool Alone>
  bool try_clusters(const device_info& device) {
    const cluster_kernel entry(detail::cluster_pages_entry<View, Scorer, Alone>);
    if (!configure(device, entry, layout_.bytes)) return false;
    cluster_entry_ = entry;
    if constexpr (can_attend) {
      using attention = detail::cluster_attention<View>;
      attend_bytes_ = attention::bytes(layout_.bytes, max_chosen(), query_rows_, blocks_);
      const attend_kernel both(detail::attend_pages_entry<View, Scorer, attended, Alone>);
      // At most a tile a warp: with 2,048 tokens of 64 rows one launch takes 76.4 us, two 76.7 (H200, CUDA 13.0).
      const index_t tiles = ceil_div(ceil_div(max_chosen(), index_t(attention::tokens)), index_t(blocks_));
      const index_t max_tiles = detail::cluster_warps * (Alone ? 4 : 1);
      if (query_rows_ <= attention::max_rows && tiles <= max_tiles && configure(device, both, attend_bytes_)) {
        attend_entry_ = both;
      }
    }
    return true;
  }

  launch_shape shape_of(const problem_type& p, std::size_t bytes) const {
    return {dim3(unsigned(blocks_), unsigned(kv_heads_), unsigned(p.view.sequences)), dim3(detail::cluster_threads),
            bytes, unsigned(blocks_), true};
  }
  detail::page_choice choice(const problem_type& p, void* workspace) const {
    detail::page_choice choice{};
    choice.lengths = p.view.lengths;
    choice.sequence_stride = p.view.length_strides.sequence;
    choice.head_stride = p.view.length_strides.head;
    choice.kv_heads = kv_heads_;
    choice.group = q_heads_ / kv_heads_;
    choice.tokens = p.q.tokens;
    choice.plans = p.plans;
    choice.by_group = quick_divisor(choice.group);
    choice.unit = unit_;
    choice.normalised = Scorer::normalised;
    choice.sink_logits = p.rule.sink_logits;
    choice.out = p.out;
    choice.out_stride = p.out_stride;
    choice.counts = p.counts;
    choice.mass = p.mass;
    choice.keys = memory(*this, workspace).keys;
    choice.key_stride = key_stride_;
    return choice;
  }
  detail::page_scratch scratch(const problem_type& p, void* workspace) const {
    const memory arrays(*this, workspace);
    return {arrays.logits, arrays.partials, arrays.runs, stride_, p.q.tokens * (q_heads_ / kv_heads_), tiles_each_};
  }
  struct memory : workspace_cut {
    const choose_pages& op;
    memory(const choose_pages& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_), query_rows = rows * std::size_t(op.query_rows_);
    const bool all_fit = op.resident_ && (!op.cluster_entry_ || op.usual_pages() == op.bounds_.max_pages());
    float* logits = array<float>(query_rows * std::size_t(op.stride_));
    float2* partials = array<float2>(query_rows * std::size_t(op.stride_ / detail::tile_pages));
    detail::slot_run* runs = array<detail::slot_run>(rows * detail::max_step_tokens);
    unsigned* keys = array<unsigned>(all_fit ? 0 : rows * std::size_t(op.key_stride_));  // too many for shared memory
  };

  void check_problem(const problem_type& p) const {
    require(p.view.sequences * offset_t(p.view.kv_heads) <= rows_ && p.view.kv_heads == kv_heads_ &&
                p.q.heads == q_heads_ && p.q.sequences == p.view.sequences && p.q.tokens <= tokens_,
            "shape of a call",
            std::to_string(p.view.sequences) + " sequences, " + std::to_string(p.view.kv_heads) + " kv_heads, " +
                std::to_string(p.q.heads) + " q_heads, " + std::to_string(p.q.tokens) + " tokens",
            "what this object was made for", "make one object per shape");
    require(p.out_stride >= max_chosen(), "out_stride", p.out_stride, "at least " + std::to_string(max_chosen()),
            "pass room for max_chosen() slots a row");
    require(p.unfolded >= 0, "unfolded", p.unfolded, "at least 0", "pass how many newest tokens the index lacks");
    require_rows_on_16_bytes("q", p.q);
    require(p.plans != nullptr, "plans of the sequences", "null", "one read_plan a sequence, on the device",
            "write each sequence's plan when its prompt ends");
    require(p.index.data != nullptr, "data of the page index", "null", "the extrema of every page",
            "build the index before a step reads it");
    require(on_16_bytes(p.index.data) && (p.index.capacities || p.index.capacity % 8 == 0), "capacity of the index",
            p.index.capacity, "a multiple of 8 pages, rows that begin on 16 bytes",
            "round the capacity up; begins and capacities must be multiples of 8 too");
  }

  using cluster_kernel =
      device_kernel<page_problem<View>, Scorer, detail::page_choice, detail::page_scratch, detail::cluster_layout>;
  using attend_kernel = device_kernel<page_problem<View>, Scorer, detail::page_choice, detail::page_scratch,
                                      detail::cluster_layout, rows_view<attended>, rows_view<float>, index_t>;

  Scorer scorer_;
  selection_unit unit_;
  read_bounds bounds_;
  index_t rows_, kv_heads_, q_heads_, tokens_;
  index_t query_rows_ = 1, stride_ = 0, tiles_each_ = 1, tile_blocks_ = 1, key_stride_ = 0;
  bool resident_ = true;
  detail::cluster_layout layout_;  // shared memory of a block that has a row, or a cluster's share of it
  int blocks_ = 1;                 // of a row
  std::size_t logits_shared_ = 0, attend_bytes_ = 0, select_shared_ = 0;
  cluster_kernel cluster_entry_;  // none: two launches
  attend_kernel attend_entry_;
  device_kernel<page_problem<View>, Scorer, detail::page_scratch> logits_entry_{
      detail::page_logits_entry<View, Scorer>};
  device_kernel<detail::page_choice, detail::page_scratch> select_entry_{detail::choose_pages_entry<true>};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
