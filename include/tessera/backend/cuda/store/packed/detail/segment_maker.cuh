// Segments of packed rows, made of whole ones: their bases, the sets that their rows share, and the rows.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "../../../../../runtime/kept_lengths.hpp"
#include "../../../device/kernel.cuh"
#include "../../../device/pinned.cuh"
#include "../packed_view.cuh"
#include "bases/segment_bases.cuh"
#include "encode_rows.cuh"
#include "head_sets.cuh"
#include "rows_before.cuh"
#include "segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Whole rows that have been packed are dropped: the others move to their memory.

/// The oldest `count` rows of every head of one sequence, or due[head] of them.
template <class View>
struct oldest_rows {
  View view;
  index_t count = 0;
  const index_t* due = nullptr;  ///< [kv_heads], on the device
};

namespace detail {

/// Copies row(i + `count`) to row(i), 16 bytes at a time. By one block: rows that are read lie behind all rows that
/// have been written.
template <int Threads, class Row>
__device__ void move_rows_down(index_t left, index_t count, int row_units, const Row& row) {
  for (index_t begin = 0; begin < left * row_units; begin += Threads) {
    const index_t unit = begin + index_t(threadIdx.x), i = unit / row_units, at = unit % row_units;
    uint4 held{};
    if (i < left) held = reinterpret_cast<const uint4*>(row(i + count))[at];
    __syncthreads();
    if (i < left) reinterpret_cast<uint4*>(row(i))[at] = held;
    __syncthreads();
  }
}

/// blockIdx: x the kv_head, y the item of the list.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    drop_oldest_entry(const __grid_constant__ problem_list<oldest_rows<View>> list) {
  using stored = typename View::stored_type;
  constexpr int k_units = View::k_dim * int(sizeof(stored)) / 16, v_units = View::v_dim * int(sizeof(stored)) / 16;
  const View& view = list.problems[blockIdx.y].view;
  const oldest_rows<View>& oldest = list.problems[blockIdx.y];
  const index_t head = index_t(blockIdx.x), count = oldest.due ? oldest.due[head] : oldest.count;
  index_t* lengths = const_cast<index_t*>(view.lengths);
  const index_t left = lengths[head] - count;
  move_rows_down<Threads>(left, count, k_units, [&](index_t i) { return view.key(0, head, i); });
  move_rows_down<Threads>(left, count, v_units, [&](index_t i) { return view.value(0, head, i); });
  if (view.positions) {
    index_t* positions = const_cast<index_t*>(view.positions) + view.position_begin[head];
    for (index_t begin = 0; begin < left; begin += Threads) {
      const index_t i = begin + index_t(threadIdx.x);
      const index_t held = i < left ? positions[i + count] : 0;
      __syncthreads();
      if (i < left) positions[i] = held;
      __syncthreads();
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) lengths[head] = left;
}

}  // namespace detail

/// Drops the oldest rows of several sequences. Cost: a launch for 32 of them.
template <class View>
void drop_oldest(const host_vector<oldest_rows<View>>& all, cudaStream_t stream) {
  static_assert(View::is_raw, "tessera: rows that are packed on the device are raw");
  in_lists(all.data(), all.size(), [&](const problem_list<oldest_rows<View>>& list, index_t some) {
    launch(detail::drop_oldest_entry<View, 256>,
           {.blocks = dim3(unsigned(list.problems[0].view.kv_heads), unsigned(some)), .threads = dim3(256)}, stream,
           "launch of drop_oldest", list);
  });
}

// A layer whose segments are made on another stream, while the caller's stream runs the next layers.

/// A stream of the lowest priority: its kernels give way to those of other streams.
class stream_beside {
 public:
  stream_beside() = default;
  /// A copy has another stream. A caller who copies what the work writes must have waited for it.
  stream_beside(const stream_beside&) : stream_beside() {}
  stream_beside(stream_beside&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)),
        start_(std::move(other.start_)),
        done_(std::move(other.done_)) {}
  stream_beside& operator=(stream_beside other) noexcept {
    std::swap(stream_, other.stream_);
    std::swap(start_, other.start_);
    std::swap(done_, other.done_);
    return *this;
  }
  ~stream_beside() {
    drain();
    if (stream_) cudaStreamDestroy(stream_);
  }

  /// Returns a stream whose later work waits for everything that is on `stream` now.
  cudaStream_t begin(cudaStream_t stream) {
    if (!stream_) {
      int lowest = 0, highest = 0;
      check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
      check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, lowest), "cudaStreamCreate");
    }
    start_.set(stream);
    start_.hold(stream_);
    return stream_;
  }
  /// Marks the end of the work since `begin`. `hold` lets `stream` wait for it, `wait` the host.
  void end() { done_.set(stream_); }
  void hold(cudaStream_t stream) const { done_.hold(stream); }
  void wait() const { done_.wait(); }
  /// Waits until the stream is empty.
  void drain() const noexcept {
    if (stream_) cudaStreamSynchronize(stream_);
  }

 private:
  cudaStream_t stream_ = nullptr;
  stream_mark start_, done_;
};

/// The segments of one layer of one sequence, which no view counts yet, and how many whole rows they hold.
struct layer_beside {
  sequence_layer owner{no_index, no_index};
  index_t due = 0;
  host_vector<segment_record> segments;
  bool is_under_way() const { return owner.id != no_index; }
};

/// Memory for the bases and sets of new segments, one behind the other, and their strategies where they are searched.
struct bases_and_sets {
  std::shared_ptr<device_buffer<float>> bases;
  std::shared_ptr<device_buffer<std::uint32_t>> sets;
  host_vector<segment_strategy> strategies;
};

/// The rows that become segments when `commit_packing` is called.
template <class View>
struct packing_plan {
  sequence_layers owners, ended;                    // owners with rows that are due; owners whose prompts end
  host_vector<kept_bound> left;                     // of the whole rows, by owner
  host_vector<index_t> due;                         // rows of the longest head
  host_vector<host_vector<index_t>> by_head;        // the same of each head, where they are packed apart; else empty
  host_vector<bases_and_sets> apart;                // by owner, of new segments of heads that are packed apart
  host_vector<bool> begins;                         // segments in bases of their own, or they go on in the last one
  host_vector<bool> joins;                          // the last segment, or one in its basis follows it
  host_vector<host_vector<rows_before>> originals;  // by owner: copies of rows that join a segment
  bool prompt_ends = false, cuts = false;           // cuts: rows that begin segments are cut into several
  host_vector<segment_span<View>> new_spans;        // of new segments
  bases_and_sets memory;
  // Empty, with reserved memory: carrying out the plan allocates none on the host.
  host_vector<joining_rows> joining;
  host_vector<encode_problem<View>> problems;
  host_vector<oldest_rows<typename View::whole_type>> oldest;
  bool is_apart(std::size_t i) const { return !by_head[i].empty(); }
  void make_room() {
    joining.reserve(new_spans.size() + owners.size()), problems.reserve(new_spans.size() + owners.size());
    oldest.reserve(owners.size());
  }
};

/// Makes the segments of a layout. Layers are counted among those that pack. Calls on one stream follow each other; a
/// caller with two streams lets one wait for the other.
template <packing_layout Layout, class View>
class segment_maker {
  using T = typename Layout::element_type;
  static constexpr bool rotates = Layout::rows_type::basis_type::rotates;

 public:
  using spans = host_vector<segment_span<View>>;

  segment_maker(const Layout& layout, const segment_formats& formats, index_t block, index_t layers, index_t sequences,
                index_t kv_heads, index_t tokens)
      : rows_(layout.rows),
        formats_(formats),
        heads_(kv_heads),
        sets_(formats, layers, sequences, kv_heads, Layout::window),
        encode_(encoded_block(layout, block), (std::max)(formats.k.channels, formats.v.channels), formats.least_block) {
    if constexpr (rotates) {
      // Between steps a segment begins with a whole tail, which may be longer than a prompt's segments.
      const index_t share = (std::min)(layout.rows.segment, tokens);
      const index_t longest = index_t(
          (std::min<offset_t>)((std::max)(layout.rows.longest_segment(), offset_t(layout.rows.tail.tail)), tokens));
      bases_.emplace(formats, limits_of(layout), kv_heads, layers * ceil_div(tokens, share), longest,
                     device_info::current());
    }
  }

  /// Stores the last queries of a prompt chunk until the prompt ends. Sets are chosen by them.
  void observe(sequence_layer owner, const rows_view<const T>& q, cudaStream_t stream) {
    sets_.observe(owner, q, stream);
  }
  void forget(sequence_layer owner) { sets_.forget(owner); }
  void copy(sequence_layer from, sequence_layer to, cudaStream_t stream) { sets_.copy(from, to, stream); }

  /// Memory that is not cleared: clearing would wait for the stream, and all of it is written. Errors: no memory,
  /// tessera::error.
  bases_and_sets memory_for(std::size_t segments) const {
    bases_and_sets made;
    if (segments == 0) return made;
    if (sets_.segment_words() > 0)
      made.sets = std::make_shared<device_buffer<std::uint32_t>>(
          device_buffer<std::uint32_t>::not_cleared(segments * sets_.segment_words()));
    if (bases_)
      made.bases = std::make_shared<device_buffer<float>>(
          device_buffer<float>::not_cleared(segments * std::size_t((*bases_).segment_floats())));
    return made;
  }
  /// Finds the bases of segments, and their strategies. Waits for the device. Errors: rows have none, tessera::error.
  void find_bases(const spans& segments, bases_and_sets& memory, cudaStream_t stream) {
    if (memory.bases) (*bases_).run(segments, memory.bases->data(), memory.strategies, stream);
  }
  /// The same without waiting, except where strategies are searched. When the device is done, `have_bases` says whether
  /// all rows have bases.
  void start_bases(const spans& segments, bases_and_sets& memory, cudaStream_t stream) {
    if (memory.bases) (*bases_).start(segments, memory.bases->data(), memory.strategies, stream);
  }
  bool have_bases() const { return !bases_ || (*bases_).are_finite(); }

  /// The i-th of the segments in `memory`, without rows, bases and sets.
  segment_record record(const bases_and_sets& memory, std::size_t i) const {
    if constexpr (searching_layout<Layout>) {
      if (!memory.strategies.empty()) {
        const segment_strategy& own = memory.strategies[i];
        const auto rows = rows_.by_strategy(own);
        return {.k = rows.key_format(), .v = rows.value_format(), .block = formats_.block > 0 ? own.block : 0};
      }
    }
    return {.k = formats_.k, .v = formats_.v, .block = formats_.block};
  }
  /// Begins the i-th of the segments in `memory`, of these rows of a sequence, and chooses its sets.
  segment_record begin(const bases_and_sets& memory, std::size_t i, const segment_span<View>& of, sequence_layer owner,
                       cudaStream_t stream) const {
    segment_record begun = record(memory, i);
    if (memory.sets) {
      std::uint32_t* sets = memory.sets->data() + i * sets_.segment_words();
      sets_.choose(of.view, owner, of.first, of.count, sets, stream);
      begun.sets = memory.sets;
      begun.k_set = sets, begun.v_set = sets + sets_.k_words();
    }
    if (memory.bases) {
      begun.bases = memory.bases;
      begun.k_basis = memory.bases->data() + offset_t(i) * (*bases_).segment_floats();
      begun.v_basis = begun.k_basis + heads_ * formats_.k_basis();
    }
    return begun;
  }
  /// Packs whole rows: each problem is of one sequence and layer.
  void encode(const host_vector<encode_problem<View>>& problems, cudaStream_t stream) const {
    encode_.run(problems.data(), problems.size(), stream);
  }

 private:
  typename Layout::rows_type rows_;
  segment_formats formats_;
  index_t heads_;
  head_sets<View, typename Layout::rows_type> sets_;
  encode_rows<View> encode_;
  std::optional<find_segment_bases<View>> bases_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
