// Paged retrieval on the GPU, what the host calls: which slots a decode step reads, from an estimate in place of keys.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/selection.hpp"
#include "../../attend/decode/decode_problem.cuh"
#include "../../device/tuning.cuh"
#include "page_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Chooses what a step reads, as cpu::choose_by_pages does with a tokens_or_pages selector.
///
/// `workspace_bytes` once, then `run` any number of times: no allocation, no synchronisation, no length on the host,
/// so a captured graph can be replayed while lengths grow. Repeated calls give the same bits. The CPU's choice but for
/// scores that rounding cannot tell apart. A step of several tokens reads its own; the scorer's protected tail too.
/// Shapes   as page_problem says; lengths at most `capacity`; a row of `out` holds `most_chosen()` slots.
/// Errors   shapes that the kernels cannot take: tessera::error before anything is launched.
/// Cost     one launch where clusters are there and a share of the pages fits into shared memory, else two. One value per page and chosen channel is read (two where
///          Quest's heads differ in sign); of pages of one slot whole keys, since their channels stand side by side.
///
/// With an `Out`, `choose_and_attend` does a step's attention in the same launch where `attends()`.
template <class View, paged_scorer Scorer, class Out = void>
class choose_pages {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  using attended = std::conditional_t<std::is_void_v<Out>, float, Out>;
  static constexpr bool can_attend = !std::is_void_v<Out> && D + View::v_dim <= 256 && !Scorer::adds_mean_value;
  static_assert(sizeof(T) == 2, "tessera: the page kernels take fp16 and bf16");

 public:
  using problem_type = page_problem<View>;

  /// `scorer` is fitted: its page and channels are at least 1. `read` tokens are chosen of a row. `tokens` is the most
  /// that a step may have.
  choose_pages(const Scorer& scorer, selection_unit unit, index_t read, index_t sequences, index_t kv_heads,
               index_t q_heads, index_t tokens, index_t capacity, const device_info& device)
      : scorer_(scorer),
        unit_(unit),
        read_(read),
        rows_(sequences * kv_heads),
        kv_heads_(kv_heads),
        q_heads_(q_heads),
        tokens_(tokens),
        capacity_(capacity) {
    require(scorer.page >= 1, "page", index_t(scorer.page), "at least 1", "pass the scorer that `fitted` returns");
    require(scorer.channels >= 1 && scorer.channels <= D, "channels", index_t(scorer.channels),
            "1 to the head dim, which is " + std::to_string(D), "pass the scorer that `fitted` returns");
    require(read >= 1, "read", read, "at least 1", "pass how many tokens a step attends");
    require(sequences >= 1 && kv_heads >= 1 && rows_ <= 65535, "sequences * kv_heads", rows_, "1 to 65535",
            "split the batch");
    require(q_heads >= 1 && q_heads % kv_heads == 0, "q_heads", q_heads, "a multiple of kv_heads",
            "pass the model's head counts");
    require(tokens >= 1 && tokens <= detail::most_step_tokens, "tokens", tokens,
            "1 to " + std::to_string(detail::most_step_tokens), "split the step");
    require(tokens * (q_heads / kv_heads) <= detail::most_query_rows, "tokens * query heads of a group",
            tokens * (q_heads / kv_heads), "at most " + std::to_string(detail::most_query_rows), "split the step");
    require(capacity >= 1, "capacity", capacity, "at least 1", "pass the most tokens that a row may hold");
    query_rows_ = tokens * (q_heads / kv_heads);
    const index_t pages = ceil_div(capacity, scorer.page), tiles = ceil_div(pages, detail::tile_pages);
    stride_ = tiles * detail::tile_pages;
    // Few rows: a block a tile, to be done soon. Many: blocks that choose their channels once for several tiles.
    tiles_each_ = scorer.page == 1 ? 1 : std::clamp(tiles * rows_ / (device.multiprocessors * 5), 1, 8);
    shared_ =
        scorer.page == 1 ? detail::key_shared<T, D>::bytes(query_rows_) : detail::page_shared<T, D>::bytes(query_rows_);
    key_stride_ = (pages + detail::page_rows::most_cuts + 3) / 4 * 4;
    const auto allow = [&](auto entry, std::size_t wanted) {  // the limit belongs to the kernel: always the device's
      cudaFuncAttributes of{};
      check(cudaFuncGetAttributes(&of, entry), "cudaFuncGetAttributes");
      const int room = device.shared_memory - int(of.sharedSizeBytes);
      check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, room), "cudaFuncSetAttribute");
      return wanted <= std::size_t(room);
    };
    logits_entry_ = scorer.page == 1 ? detail::key_logits_entry<View, Scorer> : detail::page_logits_entry<View, Scorer>;
    require(allow(logits_entry_, shared_), "shared memory of a block", shared_,
            "at most " + std::to_string(device.shared_memory), "split the step");
    if (scorer.page > 1 && device.compute_capability >= 90) {
      // At least two: a block alone is no cluster, and the instruction that sends is illegal there (H200, CUDA 13.0).
      for (blocks_ = detail::most_cluster_blocks; blocks_ > 2 && blocks_ * rows_ > device.multiprocessors;)
        blocks_ /= 2;
      const index_t share =
          (ceil_div(pages, index_t(blocks_)) + detail::tile_width - 1) / detail::tile_width * detail::tile_width;
      choice_bytes_ = detail::cluster_shared<T, D>::bytes(query_rows_, share, blocks_);
      const auto take = [&](auto entry, std::size_t wanted) {
        // Code that was compiled for an older device knows no clusters, also where it runs on a newer one.
        if (!allow(entry, wanted) || !can_overlap(entry)) return false;
        // What runs before and after takes all of it too: a multiprocessor need not change its split.
        check(
            cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
            "cudaFuncSetAttribute");
        return true;
      };
      const auto entry = detail::cluster_pages_entry<View, Scorer>;
      if (take(entry, choice_bytes_)) cluster_entry_ = entry;
      if constexpr (can_attend) {
        using attention = detail::cluster_attention<View>;
        attend_bytes_ = attention::bytes(choice_bytes_, most_chosen(), query_rows_, blocks_);
        const auto both = detail::attend_pages_entry<View, Scorer, attended>;
        // At most a tile a warp: with 2,048 tokens of 64 rows one launch takes 76.4 us, two 76.7 (H200, CUDA 13.0).
        const index_t tiles = ceil_div(ceil_div(most_chosen(), attention::tokens), index_t(blocks_));
        if (query_rows_ <= attention::most_rows && tiles <= detail::cluster_warps && take(both, attend_bytes_)) {
          attend_entry_ = both;
        }
      }
    }
    select_entry_ = detail::choose_pages_entry<true>;
    select_shared_ = std::size_t(key_stride_) * 4;
    resident_ = allow(select_entry_, select_shared_);
    if (!resident_) {
      select_entry_ = detail::choose_pages_entry<false>;
      select_shared_ = 0;
    }
  }

  std::size_t workspace_bytes() const {
    return keys_at() + (resident_ ? 0 : std::size_t(rows_) * std::size_t(key_stride_) * 4);
  }

  /// The most slots that are chosen of a row.
  index_t most_chosen() const {
    if (unit_ == selection_unit::token) return std::min(read_, capacity_);
    const offset_t page = scorer_.page, forced = (std::max(tail_of(tokens_), 1) - 1) / page + 2;
    return index_t(std::min<offset_t>(capacity_, std::max<offset_t>(forced, (read_ - 1) / page + 1) * page));
  }

  const Scorer& scorer() const { return scorer_; }

  void run(const problem_type& p, void* workspace, cudaStream_t stream) const {
    if (!cluster_entry_) {
      score(p, workspace, stream);
      select(p, workspace, stream);
      return;
    }
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    launch(cluster_entry_, shape_of(p, choice_bytes_), stream, "launch of cluster_pages", p, scorer_,
           choice(p, workspace), scratch(p, workspace));
  }

  /// Whether `choose_and_attend` can be called: few query rows, few tokens to attend, and a device with clusters.
  bool attends() const { return attend_entry_ != nullptr; }

  /// `run`, and the step's attention over what it chose, as decode_attention does it: out [sequences, tokens, q_heads,
  /// v_dim], lse [sequences, tokens, q_heads] (data null: not wanted). One launch.
  void choose_and_attend(const problem_type& p, const rows_view<attended>& out, const rows_view<float>& lse,
                         void* workspace, cudaStream_t stream) const {
    require(attends(), "attends()", "false", "true", "call run and decode_attention where attends() is false");
    check_problem(p);
    detail::require_rows_of_16_bytes("K", p.view.k, p.view.k_strides);
    detail::require_rows_of_16_bytes("V", p.view.v, p.view.v_strides);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    launch(attend_entry_, shape_of(p, attend_bytes_), stream, "launch of attend_pages", p, scorer_,
           choice(p, workspace), scratch(p, workspace), out, lse, std::uint32_t(choice_bytes_), most_chosen());
  }

  /// The first of two launches that do what `run` may do in one: logits of pages into the workspace.
  void score(const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    const unsigned tiles = unsigned(ceil_div(stride_ / detail::tile_pages, tiles_each_));
    const int threads = scorer_.page == 1 ? detail::tile_pages : detail::page_threads;
    logits_entry_<<<dim3(tiles, unsigned(rows)), unsigned(threads), shared_, stream>>>(p, scorer_,
                                                                                       scratch(p, workspace));
    check(cudaGetLastError(), "launch of page logits");
  }

  /// The second: the choice by the logits in the workspace.
  void select(const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(p);
    const index_t rows = p.view.sequences * kv_heads_;
    if (rows == 0 || p.q.tokens == 0) return;
    select_entry_<<<unsigned(rows), detail::choose_threads, select_shared_, stream>>>(choice(p, workspace),
                                                                                      scratch(p, workspace));
    check(cudaGetLastError(), "launch of choose_pages");
  }

 private:
  launch_shape shape_of(const problem_type& p, std::size_t bytes) const {
    return {dim3(unsigned(blocks_), unsigned(kv_heads_), unsigned(p.view.sequences)), dim3(detail::cluster_threads),
            bytes, unsigned(blocks_), true};
  }
  index_t tail_of(index_t tokens) const { return std::max(tokens > 1 ? tokens : 0, scorer_.protected_tail(read_)); }
  detail::page_choice choice(const problem_type& p, void* workspace) const {
    detail::page_choice choice{};
    choice.lengths = p.view.lengths;
    choice.sequence_stride = p.view.length_strides.sequence;
    choice.head_stride = p.view.length_strides.head;
    choice.kv_heads = kv_heads_;
    choice.group = q_heads_ / kv_heads_;
    choice.tokens = p.q.tokens;
    choice.page = scorer_.page;
    choice.read_pages = read_ / scorer_.page + (read_ % scorer_.page > 0);
    choice.by_page = detail::quick_divisor(scorer_.page);
    choice.by_group = detail::quick_divisor(choice.group);
    choice.tail = tail_of(p.q.tokens);
    choice.unit = unit_;
    choice.normalised = Scorer::normalised;
    choice.sink_logits = p.rule.sink_logits;
    choice.out = p.out;
    choice.out_stride = p.out_stride;
    choice.counts = p.counts;
    choice.mass = p.mass;
    choice.keys = reinterpret_cast<unsigned*>(static_cast<unsigned char*>(workspace) + keys_at());
    choice.key_stride = key_stride_;
    return choice;
  }
  detail::page_scratch scratch(const problem_type& p, void* workspace) const {
    auto* bytes = static_cast<unsigned char*>(workspace);
    return {reinterpret_cast<float*>(bytes),
            reinterpret_cast<float2*>(bytes + partials_at()),
            reinterpret_cast<detail::slot_run*>(bytes + runs_at()),
            stride_,
            p.q.tokens * (q_heads_ / kv_heads_),
            tiles_each_,
            read_};
  }
  static std::size_t whole(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
  std::size_t partials_at() const {
    return whole(std::size_t(rows_) * std::size_t(query_rows_) * std::size_t(stride_) * sizeof(float));
  }
  std::size_t runs_at() const {
    return partials_at() + whole(std::size_t(rows_) * std::size_t(query_rows_) *
                                 std::size_t(stride_ / detail::tile_pages) * sizeof(float2));
  }
  std::size_t keys_at() const {
    return runs_at() + whole(std::size_t(rows_) * detail::most_step_tokens * sizeof(detail::slot_run));
  }

  void check_problem(const problem_type& p) const {
    require(p.view.sequences * offset_t(p.view.kv_heads) <= rows_ && p.view.kv_heads == kv_heads_ &&
                p.q.heads == q_heads_ && p.q.sequences == p.view.sequences && p.q.tokens <= tokens_,
            "shape of a call",
            std::to_string(p.view.sequences) + " sequences, " + std::to_string(p.view.kv_heads) + " kv_heads, " +
                std::to_string(p.q.heads) + " q_heads, " + std::to_string(p.q.tokens) + " tokens",
            "what this object was made for", "make one object per shape");
    require(p.out_stride >= most_chosen(), "out_stride", p.out_stride, "at least " + std::to_string(most_chosen()),
            "pass room for most_chosen() slots a row");
    require(p.unfolded >= 0, "unfolded", p.unfolded, "at least 0", "pass how many newest tokens the index lacks");
    detail::require_rows_of_16_bytes("q", p.q.data,
                                     row_strides{p.q.sequence_stride, p.q.head_stride, p.q.token_stride, 1});
    if (scorer_.page == 1) {
      detail::require_rows_of_16_bytes("K", p.view.k, p.view.k_strides);
      return;
    }
    require(p.index.data != nullptr && p.index.page == scorer_.page, "page of the index", p.index.page,
            std::to_string(scorer_.page), "build the index for this scorer");
    require(reinterpret_cast<std::uintptr_t>(p.index.data) % 16 == 0 && (p.index.rooms || p.index.room % 8 == 0),
            "room of the index", p.index.room, "a multiple of 8 pages, rows that begin on 16 bytes",
            "round the room up; begins and rooms must be multiples of 8 too");
  }

  Scorer scorer_;
  selection_unit unit_;
  index_t read_, rows_, kv_heads_, q_heads_, tokens_, capacity_;
  index_t query_rows_ = 1, stride_ = 0, tiles_each_ = 1, key_stride_ = 0;
  std::size_t shared_ = 0;
  bool resident_ = true;
  std::size_t choice_bytes_ = 0, attend_bytes_ = 0;  // shared memory of a cluster's block
  int blocks_ = 1;                                   // of a cluster
  void (*cluster_entry_)(page_problem<View>, Scorer, detail::page_choice,
                         detail::page_scratch) = nullptr;  // null: two launches
  void (*attend_entry_)(page_problem<View>, Scorer, detail::page_choice, detail::page_scratch, rows_view<attended>,
                        rows_view<float>, std::uint32_t, index_t) = nullptr;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*logits_entry_)(page_problem<View>, Scorer, detail::page_scratch) = nullptr;
  void (*select_entry_)(detail::page_choice, detail::page_scratch) = nullptr;
  std::size_t select_shared_ = 0;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
