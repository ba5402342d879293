// Scores of blocks by their packed mean keys on the device.
#pragma once

#include "../../../../../scorer/block_mean.hpp"
#include "../../../attend/packed/packed_attention.cuh"
#include "../../../device/copy.cuh"
#include "../../../device/kernel.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../../store/packed/packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int scoring_warps = 8, scoring_threads = scoring_warps * 32, scored_together = scoring_threads;
inline constexpr float largest_score = 3.4e38f;

/// Memory of a block: q once for every lane, and for every warp two stages of 32 rows of 64 bytes, then the bits of
/// these rows.
template <int D>
struct score_memory {
  static constexpr int q = D * 32 * 4, stage = 32 * 64, bits = group_words<D, 1> * 32 * 4;
  static constexpr int warp = 2 * (stage + bits), begins = q + scoring_warps * warp;
};

/// Adds up the products of a row's values with q. A lane has its own copy of q: element c lies at c * 128 bytes.
template <class Way>
struct scored_row {
  static constexpr int in_word = values_in_word<Way::element>;
  const unsigned char* shared;
  float (&sums)[2];

  __device__ __forceinline__ void operator()(std::uint32_t position, const std::uint32_t* words, int j) const {
#pragma unroll
    for (int i = 0; i < Way::group; ++i) {
      sums[j / 2 % 2] += *reinterpret_cast<const float*>(shared + position + i * 128) *
                         value_of<Way::element>(words[(j + i) / in_word], (j + i) % in_word);
    }
  }
};

/// Where the scores of a segment's blocks go.
struct scored_blocks {
  float* row;            ///< of the (sequence, kv_head)
  index_t first, total;  ///< the segment's first block, and how many there are in all segments
  bool continues, last;  ///< earlier queries were scored; no queries follow

  /// Stores the score of the segment's block i.
  __device__ __forceinline__ void store(index_t i, float score) const {
    const index_t b = first + i;
    if (continues) {
      const float best = row[b];  // its own, of the queries before
      if (!(score > best || best != best)) score = best;
    }
    // The first and the last block of all are always read, so no other block may score as high.
    if (last) score = b == 0 || b == total - 1 ? infinity : score > largest_score ? largest_score : score;
    row[b] = score;
  }
};

/// The mean keys of one segment, read by one warp: lane l has row l of every 32. Bits, and values of up to 64 bytes,
/// are copied while earlier rows are processed. Longer rows are copied 128 bytes at a time, which takes both stages.
/// Bits are copied and not loaded, because a warp that waits for one load waits for all, including those of the next
/// rows that it has just issued.
template <int D, class Tile, packed_rows_in Memory>
class staged_means {
  using memory = score_memory<D>;
  using layout = row_layout<memory::stage / 64>;
  using address_type = typename bit_rows<Memory>::address_type;

 public:
  /// `stages`: where the warp's stages begin in the block's shared memory.
  __device__ staged_means(const packed_vectors& rows, index_t head, const unsigned char* shared, unsigned stages)
      : values_(rows.values_of(head)),
        bits_(rows, head),
        scales_(rows.scales ? rows.scales_of(head) : nullptr),
        address_(shared_address(shared)),
        stages_(stages),
        chunks_(unsigned(value_stride(rows.format.value_bytes())) / 16),
        value_count_(int(rows.format.stored_channels)),
        way_(way_of<D>(rows.format)),
        pieces_(chunks_ <= 4 ? 0 : ceil_div(int(chunks_), 8)) {}

  /// Begins to copy the first 32 rows for `score`.
  __device__ __forceinline__ void begin(index_t first, index_t end) const {
    begin_tile(first, end, 0, address_of(first, end));
  }
  /// q . row for rows first, first + scoring_threads, ... to `end`, 32 at a time. The copy of the first 32 has begun.
  __device__ __forceinline__ void score(index_t first, index_t end, const unsigned char* shared,
                                        const scored_blocks& out) {
    constexpr index_t step = scoring_threads;
    if (first >= end) return;
    const auto scale_of = [&](const address_type& at) __attribute__((always_inline)) {
      return scales_ ? scales_[bits_.page_bytes(at) / 4 + unsigned(bits_.in_page(at))] : 1.0f;
    };
    float scale = scale_of(address_of(first, end));
    address_type ahead = address_of(first + step, end);  // of the rows that are copied next
    int stage = 0;
    for (index_t tile = first; tile < end; tile += step) {
      if (pieces_ == 0) {
        begin_tile(tile + step, end, stage ^ 1, ahead);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncwarp();
      std::uint32_t bits[words];
      bits_.read(shared + bits_place(stage), bits);
      const float next_scale = scale_of(ahead);
      float sums[2] = {};
      with_way<Tile, D>(way_, [&]<class Way>() __attribute__((always_inline)) {
        multiply<Way>(tile, end, shared, bits, stage, sums);
      });
      __syncwarp();
      if (pieces_ == 0) {
        stage ^= 1;
      } else {
        begin_tile(tile + step, end, 0, ahead);
      }
      ahead = address_of(tile + 2 * step, end);
      if (const index_t i = tile + lane_here(); i < end) out.store(i, (sums[0] + sums[1]) * scale);
      scale = next_scale;
    }
    wait_copies<0>();
  }

 private:
  static constexpr int words = group_words<D, 1>;

  /// The products of the lane's row of the tile.
  template <class Way>
  __device__ __forceinline__ void multiply(index_t tile, index_t end, const unsigned char* shared,
                                           const std::uint32_t (&bits)[words], int stage, float (&sums)[2]) {
    constexpr int piece_values = values_in_word<Way::element> * 32;  // of a piece of 128 bytes
    row_walk<layout, Way, Way::group * 128> walk(bits, std::uint32_t(lane_here() * 4));
    const scored_row<Way> visit{shared, sums};
    const unsigned row = values_place(stage) + layout::row(unsigned(lane_here()), pieces_ == 0 ? 64 : 128);
    if (pieces_ <= 1) return walk.walk(value_count_, shared, row, visit);
    for (int piece = 0;;) {
      walk.walk_up((min)(value_count_ - piece * piece_values, piece_values), shared, row, visit);
      if (++piece == pieces_) break;
      __syncwarp();  // all have read the piece
      copy(tile, end, piece, 0, address_of(tile, end));
      commit_copies();
      wait_copies<0>();
      __syncwarp();
    }
  }
  /// Of the lane's row of a tile; of the tile's first row where there is none, and of row 0 behind all tiles.
  __device__ __forceinline__ address_type address_of(index_t tile, index_t end) const {
    const index_t row = tile + lane_here();
    return bits_.address(row < end ? row : tile < end ? tile : 0);
  }
  __device__ __forceinline__ unsigned values_place(int stage) const {
    return stages_ + unsigned(stage * memory::stage);
  }
  __device__ __forceinline__ unsigned bits_place(int stage) const {
    return stages_ + unsigned(2 * memory::stage + stage * memory::bits + lane_here() * 4);
  }
  /// Begins to copy the bits of 32 rows, and their values or the first piece of them. Rows behind `end` get the first
  /// row's bits and zeros.
  __device__ __forceinline__ void begin_tile(index_t tile, index_t end, int stage, const address_type& own) const {
    if (tile < end) {
      copy(tile, end, 0, stage, own);
      bits_.template copy<words>(own, address_ + bits_place(stage));
    }
    commit_copies();
  }
  /// Begins to copy a piece of 32 rows; rows behind the end become 0.
  __device__ __forceinline__ void copy(index_t tile, index_t end, int piece, int stage, const address_type& own) const {
    if (pieces_ == 0)
      copy_chunks<4>(tile, end, 0, values_place(stage), own);
    else
      copy_chunks<8>(tile, end, piece, values_place(stage), own);
  }
  /// Copies pieces of `Chunks` chunks of 16 bytes.
  template <int Chunks>
  __device__ __forceinline__ void copy_chunks(index_t tile, index_t end, int piece, unsigned stage,
                                              const address_type& address) const {
    constexpr int rows = 32 / Chunks, bytes = Chunks * 16;  // of one copy by all lanes, and of a piece
    const int lane = lane_here();
    const auto address_of = [&](int row) {
      return own_address(address_ + stage +
                         layout::byte(layout::row(unsigned(row), bytes), unsigned(lane % Chunks * 16)));
    };
    // Eight rows further a piece has the same address within its rows.
    std::uint32_t to[8 / rows];
#pragma unroll
    for (int i = 0; i < 8 / rows; ++i) to[i] = address_of(lane / Chunks + i * rows);
    const unsigned own = unsigned(piece * Chunks + lane % Chunks);  // of the row's chunks
    const index_t row = tile + lane / Chunks;
    // In pages a lane's row may lie anywhere: the others are told where.
    const unsigned chunk = Memory == packed_rows_in::planes
                               ? unsigned(row) * chunks_ + own
                               : bits_.page_chunks(address) + unsigned(bits_.in_page(address)) * chunks_;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      const bool valid = row + i * rows < end && own < chunks_;
      const unsigned there = Memory == packed_rows_in::planes ? chunk + unsigned(i * rows) * chunks_
                                                              : __shfl_sync(~0u, chunk, i * rows + lane / Chunks) + own;
      copy_async16(to[i % (8 / rows)] + std::uint32_t(i * rows / 8 * 8 * bytes),
                   values_ + (valid ? there : 0u) * std::uint64_t(16), valid, evict_first_policy());
    }
  }

  const std::byte* values_;
  bit_rows<Memory> bits_;
  const float* scales_;
  std::uint32_t address_;
  unsigned stages_;  // where the warp's two begin
  unsigned chunks_;  // of 16 bytes that a row has
  int value_count_, way_;
  int pieces_;  // of 128 bytes; 0: rows are short
};

/// A thread block scores `together` blocks of rows of one (sequence, kv_head); each thread scores one at a time. With
/// one row of queries, shared memory has a copy of q for every lane of a warp: lanes read different channels in each
/// step, and the copies avoid bank conflicts.
template <class View, class Tile>
__global__ void __launch_bounds__(scoring_threads, 3)
    score_blocks_entry(const __grid_constant__ View view, rotated_rows rotated, bool largest, index_t together,
                       float* scores, offset_t row_stride, index_t* units) {
  constexpr int D = View::k_dim;
  using memory = score_memory<D>;
  extern __shared__ uint4 shared_memory[];
  auto* shared = reinterpret_cast<unsigned char*>(shared_memory);
  float* q = reinterpret_cast<float*>(shared);  // [D, 32]
  index_t* begins = reinterpret_cast<index_t*>(shared + memory::begins);
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t sequence = small_quotient(lane_row, heads), head = lane_row - sequence * heads,
                count = view.count(sequence);
  fill_begins(view, sequence, head, count, 0, begins);
  const index_t total = begins[count];
  const index_t first = index_t(blockIdx.x) * together, last = (min)(first + together, total);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float* row = scores + lane_row * row_stride;
  // The previous launch made the queries, and waited for everything else before this one began. So only the queries are
  // waited for, after the first copies have been issued.
  bool waited = false;
  const auto wait = [&]() __attribute__((always_inline)) {
    wait_for_earlier();
    let_later_begin();
    if (blockIdx.x == 0 && threadIdx.x == 0) units[lane_row] = total;
    waited = true;
  };
  for (index_t s = 0; s < count; ++s) {
    const index_t low = (max)(first, begins[s]), high = (min)(last, begins[s + 1]);
    if (low >= high) continue;
    const packed_vectors means = view.segment(sequence, s).means;
    staged_means<D, Tile, View::rows_in> staged(means, head, shared, unsigned(memory::q + warp * memory::warp));
    const index_t rows = largest ? rotated.rows : 1, begin = low - begins[s] + warp * 32, end = high - begins[s];
    for (index_t r = 0; r < rows; ++r) {
      staged.begin(begin, end);
      if (!waited) wait();
      __syncthreads();
      const float* from = rotated.row(lane_row, s, largest ? r : rotated.rows);
      // A warp's lanes load its channels, and each is given to all lanes: one trip to memory.
      constexpr int own = D / scoring_warps;
      static_assert(own <= 32 && D % scoring_warps == 0, "tessera: a warp's lanes load its channels");
      const float mine = lane < own ? from[warp * own + lane] : 0.0f;
#pragma unroll
      for (int c = 0; c < own; ++c) q[(warp * own + c) * 32 + lane] = __shfl_sync(~0u, mine, c);
      __syncthreads();
      const scored_blocks out{row, begins[s], total, r > 0, r == rows - 1};
      staged.score(begin, end, shared, out);
    }
  }
  if (!waited) wait();
}

}  // namespace detail

/// Scores every block of every segment by the step's queries: see scorer/block_mean.hpp. The first and the last block
/// score infinity. Packed elements of 16 bits are of the type that `Tile` names.
///
/// Shapes   scores [sequences * kv_heads, row_stride]; units [sequences * kv_heads], how many blocks there are.
/// It follows `rotate_queries` on the stream, which made `rotated`.
/// Cost     one launch; means are read once (with `max` once for every row of queries). Recordable: lengths are read on
///          the device.
template <class View, class Tile = typename View::element_type>
class score_blocks {
 public:
  /// `capacity`: an upper bound of the blocks of a (sequence, kv_head).
  score_blocks(index_t capacity, index_t max_segments)
      : capacity_(capacity), max_segments_(max_segments), device_(device_info::current()) {
    entry_.require_shared(shared_bytes(), device_,
                          "scoring the blocks of " + std::to_string(max_segments) + " segments");
  }

  void run(const View& view, const rotated_rows& rotated, const block_mean& scorer, float* scores, offset_t row_stride,
           index_t* units, cudaStream_t stream) const {
    const index_t lanes = view.whole.sequences * view.whole.kv_heads;
    if (lanes == 0) return;
    require(row_stride >= capacity_, "row_stride of the scores", row_stride, "at least " + std::to_string(capacity_),
            "give every row room for the most blocks");
    const index_t together = blocks_together(lanes);
    entry_.launch({.blocks = dim3(unsigned((std::max)(1, ceil_div(capacity_, together))), unsigned(lanes)),
                   .threads = dim3(detail::scoring_threads),
                   .shared_bytes = shared_bytes(),
                   .overlapping = entry_.overlaps()},
                  stream, "launch of score_blocks", view, rotated, scorer.reduce == row_reduction::max, together,
                  scores, row_stride, units);
  }

 private:
  /// As many as leave three thread blocks for every multiprocessor.
  index_t blocks_together(index_t lanes) const {
    const offset_t share = offset_t(lanes) * capacity_ / (3 * device_.multiprocessors);
    return index_t(share / detail::scored_together + 1) * detail::scored_together;
  }
  std::size_t shared_bytes() const {
    return std::size_t(detail::score_memory<View::k_dim>::begins) + std::size_t(max_segments_ + 1) * sizeof(index_t);
  }
  index_t capacity_, max_segments_;
  device_info device_;
  device_kernel<View, rotated_rows, bool, index_t, float*, offset_t, index_t*> entry_{
      detail::score_blocks_entry<View, Tile>};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
