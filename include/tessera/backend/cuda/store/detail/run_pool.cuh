// Runs of rows that move together: a pool of planes on the device, allocated on the host.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/plan/layer_extent.hpp"
#include "../../../../core/plan/layer_peak.hpp"
#include "../../../../core/selection.hpp"
#include "../../../../core/stored/room.hpp"
#include "../../../../core/views.hpp"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// An array with one row of `row_bytes` bytes, a multiple of 4, for every stored token.
struct plane {
  std::byte* data = nullptr;
  index_t row_bytes = 0;
};

namespace detail {

inline constexpr int max_planes = 4;
struct plane_list {
  plane planes[max_planes];
};

/// Writes where the heads of one entry begin. Heads follow one another from `first` on, each with its tokens and `room`
/// free rows. Without counts each head has `room` rows.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    lay_out_entry(const index_t* counts, index_t heads, index_t room, offset_t first, offset_t* begins) {
  if (threadIdx.x != 0) return;
  for (index_t h = 0; h < heads; ++h) {
    begins[h] = first;
    first += (counts ? counts[h] : 0) + room;
  }
}

template <int Threads>
__global__ void __launch_bounds__(Threads) shift_begins_entry(offset_t* begins, index_t heads, offset_t down) {
  if (index_t(threadIdx.x) < heads) begins[threadIdx.x] -= down;
}

/// Copies the rows of an entry's heads to rows that nothing else uses. blockIdx: y a head, z a plane.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    move_rows_entry(const __grid_constant__ plane_list list, const index_t* lengths, const offset_t* from,
                    const offset_t* to) {
  const plane p = list.planes[blockIdx.z];
  const index_t h = blockIdx.y;
  const auto copy = [&](auto unit) {
    using word = decltype(unit);
    const offset_t row_words = p.row_bytes / offset_t(sizeof(word)), count = lengths[h] * row_words;
    const word* source = reinterpret_cast<const word*>(p.data) + from[h] * row_words;
    word* target = reinterpret_cast<word*>(p.data) + to[h] * row_words;
    for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < count; i += offset_t(gridDim.x) * Threads)
      target[i] = source[i];
  };
  if (p.row_bytes % 16 == 0)
    copy(uint4{});
  else
    copy(0u);
}

}  // namespace detail

/// Rows of all entries. Each entry has one run, in which its heads follow one another. An entry is a (layer, sequence).
///
/// The device holds where each head begins (`begins` below, the caller's memory), so recorded launches follow rows that
/// move. The host holds each run and how many more tokens of every head fit into it. Changes are planned on the host
/// first, for all entries that a call concerns. They are then carried out on the stream in the same order. A plan that
/// does not fit changes nothing. Where no free run is long enough, but all free runs together are, the pool closes its
/// gaps. So it can be used to the last row.
class run_pool {
 public:
  run_pool(index_t entries, index_t kv_heads, offset_t rows, const host_vector<index_t>& row_bytes, const char* what)
      : heads_(kv_heads),
        rows_(rows),
        what_(what),
        runs_(std::size_t(entries)),
        new_begins_(std::size_t(kv_heads)),
        spare_(row_bytes.empty() || rows == 0 ? 0 : spare_bytes) {
    for (const index_t bytes : row_bytes) {
      row_bytes_.push_back(bytes);
      memory_.emplace_back(std::size_t(rows) * std::size_t(bytes));
    }
  }

  /// Rows with which every entry can hold `tokens` tokens per head, in whatever order entries grow. They include a free
  /// run, because an entry that moves needs one beside its old run.
  static offset_t rows_for(index_t entries, index_t kv_heads, index_t tokens) {
    return (offset_t(entries) + 1) * kv_heads * tokens;
  }

  template <class T>
  T* plane_data(std::size_t which) const {
    return which < memory_.size() ? reinterpret_cast<T*>(memory_[which].data()) : nullptr;
  }
  bool holds_planes() const { return !memory_.empty(); }
  /// Where the heads of the run that `lay_out` made begin.
  const offset_t* new_begins() const { return new_begins_.data(); }

  /// From now on, a head that moves gets room for at least `tokens` tokens in all.
  void hold_at_least(index_t tokens) { least_held_ = tokens; }
  /// How many tokens to leave room for behind the `tokens` of a head that moves. No head ever holds more than
  /// `capacity`.
  index_t room_behind(index_t tokens, index_t capacity) const {
    return std::clamp(capacity - tokens, 0, (std::max)(least_held_ - tokens, spare_room(tokens)));
  }
  /// Free rows of every head of an entry.
  index_t free_rows(std::size_t entry) const { return runs_[entry].free_rows; }
  /// Rows of an entry's run.
  offset_t rows(std::size_t entry) const { return runs_[entry].rows; }
  offset_t row_bytes() const {
    offset_t total = 0;
    for (const index_t bytes : row_bytes_) total += bytes;
    return total;
  }
  offset_t peak_rows() const { return peak_used_; }
  index_t entries() const { return index_t(runs_.size()); }
  /// Rows of the pool, and how many of them are free.
  offset_t all_rows() const { return rows_; }
  offset_t available_rows() const { return rows_ - used_; }
  /// An upper bound of the rows of a run whose heads hold at most `longest` tokens each and `total` together.
  offset_t upper_bound_rows(index_t longest, offset_t total, index_t capacity) const {
    const offset_t least = offset_t(heads_) * least_held_;
    return (std::min)(offset_t(heads_) * capacity, (std::max)(least, total + offset_t(heads_) * spare_room(longest)));
  }
  /// The same for all runs of a sequence with these peaks, and for the run to which one of them moves.
  offset_t upper_bound_rows(const host_vector<layer_peak>& peaks, index_t capacity) const {
    offset_t rows = 0, largest = 0;
    for (const layer_peak& peak : peaks) {
      const offset_t of_layer = upper_bound_rows(peak.stored.longest, peak.stored.total, capacity);
      rows += of_layer;
      largest = (std::max)(largest, of_layer);
    }
    return rows + largest;
  }

  // --- resizing ------------------------------------------------------------------------------------------------------

  /// Rows with which every entry can store `tokens` more in each head, in whatever order. `held`: what entries store.
  offset_t rows_to_take(const host_vector<token_bound>& held, index_t tokens, index_t capacity) const {
    offset_t total = 0, largest = 1;
    for (std::size_t entry = 0; entry < runs_.size(); ++entry) {
      const index_t longest = held[entry].longest + tokens;
      const offset_t rows =
          free_rows(entry) >= tokens
              ? runs_[entry].rows
              : (std::max)(runs_[entry].rows,
                           held[entry].total + offset_t(heads_) * (tokens + room_behind(longest, capacity)));
      total += rows;
      largest = (std::max)(largest, rows);
    }
    return total + largest;
  }
  /// Memory for `move_to`. Errors: there is not enough.
  host_vector<device_buffer<std::byte>> planes_for(offset_t rows) const {
    host_vector<device_buffer<std::byte>> planes;
    for (const index_t bytes : row_bytes_) planes.emplace_back(std::size_t(rows) * std::size_t(bytes));
    return planes;
  }
  /// Moves all runs to the planes that `planes_for(rows)` made. Graphs that were recorded before read memory that no
  /// longer exists.
  template <class Begins>
  void move_to(host_vector<device_buffer<std::byte>> planes, offset_t rows, const Begins& begins_of,
               cudaStream_t stream) {
    if (planes.empty()) return;
    offset_t end = 0;
    for (const std::size_t entry : in_order()) {
      run& moved = runs_[entry];
      for (std::size_t i = 0; i < planes.size(); ++i) {
        const offset_t bytes = row_bytes_[i];
        check(cudaMemcpyAsync(planes[i].data() + end * bytes, memory_[i].data() + moved.first * bytes,
                              std::size_t(moved.rows * bytes), cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
      }
      shift_begins(begins_of(entry), moved.first - end, stream);
      moved.first = end;
      end += moved.rows;
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // the old planes are released now
    memory_ = std::move(planes);
    rows_ = rows;
  }

  // --- planning, on the host -----------------------------------------------------------------------------------------

  /// Begins a plan; `abandon` restores the state of this moment.
  void plan() {
    previous_ = runs_;
    previous_used_ = {used_, peak_used_};
    steps_.clear();
    next_ = 0;
  }
  /// Whether the rest of the plan moves runs of other entries.
  bool moves() const {
    return std::any_of(steps_.begin() + std::ptrdiff_t(next_), steps_.end(),
                       [](const step& item) { return item.closes_gap; });
  }
  void abandon() {
    runs_ = previous_;
    order_.clear();
    used_ = previous_used_[0];
    peak_used_ = previous_used_[1];
    steps_.clear();
    next_ = 0;
  }

  /// Plans a new run of `rows` rows for an entry, with `room` rows free behind what each head then stores.
  void plan_run(std::size_t entry, offset_t rows, index_t room) {
    if (rows_ == 0) return;
    const offset_t first = find(rows);
    steps_.push_back({entry, runs_[entry].first, first, rows, false});
    used_ += rows - runs_[entry].rows;
    peak_used_ = (std::max)(peak_used_, used_);
    leave_order(entry);
    runs_[entry] = {first, rows, room};
    if (rows > 0) order_.insert(at_row(first), entry);
  }
  /// Notes that every head grew by `tokens`, or shrank by as many where `tokens` is negative.
  void grew(std::size_t entry, index_t tokens) { runs_[entry].free_rows -= tokens; }
  /// Releases a run; not part of a plan.
  void clear(std::size_t entry) {
    used_ -= runs_[entry].rows;
    leave_order(entry);
    runs_[entry] = {};
  }

  // --- carrying out, on the stream -----------------------------------------------------------------------------------

  /// Carries out the plan up to the entry's new run. Then lays out that run for `counts` tokens by head; null: all
  /// heads get equal room. begins_of(entry): where an entry's heads begin, on the device. Returns whether the entry has
  /// a new run.
  template <class Begins>
  bool lay_out(std::size_t entry, const index_t* counts, const Begins& begins_of, cudaStream_t stream) {
    for (; next_ < steps_.size(); ++next_) {
      const step& now = steps_[next_];
      if (now.closes_gap) {
        close_gap(now, begins_of(now.entry), stream);
      } else if (now.entry == entry) {
        const index_t room = counts ? runs_[entry].free_rows : index_t(runs_[entry].rows / heads_);
        detail::lay_out_entry<32><<<1, 32, 0, stream>>>(counts, heads_, room, now.target, new_begins_.data());
        check(cudaGetLastError(), "launch of lay_out");
        ++next_;
        return true;
      } else {
        return false;
      }
    }
    return false;
  }
  /// Copies what the entry's heads store to the run that was laid out.
  void move(const offset_t* begins, const index_t* lengths, index_t longest, cudaStream_t stream) const {
    if (longest == 0 || memory_.empty()) return;
    detail::plane_list list;
    for (std::size_t i = 0; i < memory_.size(); ++i) list.planes[i] = {memory_[i].data(), row_bytes_[i]};
    const unsigned blocks = unsigned(std::clamp<offset_t>(offset_t(longest) * row_bytes_[0] / 16384, 1, 1024));
    detail::move_rows_entry<256><<<dim3(blocks, unsigned(heads_), unsigned(memory_.size())), 256, 0, stream>>>(
        list, lengths, begins, new_begins_.data());
    check(cudaGetLastError(), "launch of move_rows");
  }
  /// Fills the new run of an entry with what another one's heads store: `counts` tokens, at most `longest`.
  template <class Begins>
  void copy_run(std::size_t from, std::size_t to, const index_t* counts, index_t longest, const Begins& begins_of,
                cudaStream_t stream, bool even = false) {
    if (!lay_out(to, even ? nullptr : counts, begins_of, stream)) return;
    move(begins_of(from), counts, longest, stream);
    adopt(begins_of(to), stream);
  }
  /// Makes the run that was laid out the entry's run.
  void adopt(offset_t* begins, cudaStream_t stream) const {
    check(cudaMemcpyAsync(begins, new_begins_.data(), new_begins_.bytes(), cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }

 private:
  static constexpr std::size_t spare_bytes = 4 << 20;

  struct run {
    offset_t first = 0, rows = 0;
    index_t free_rows = 0;
  };
  struct step {
    std::size_t entry;
    offset_t source, target, rows;
    bool closes_gap;
  };

  /// Entries in the order of their runs. The order lasts from call to call: a step of many sequences may plan a run for
  /// every layer of each.
  const host_vector<std::size_t>& in_order() {
    if (!order_.empty()) return order_;
    for (std::size_t entry = 0; entry < runs_.size(); ++entry) {
      if (runs_[entry].rows > 0) order_.push_back(entry);
    }
    std::sort(order_.begin(), order_.end(), [&](auto a, auto b) { return runs_[a].first < runs_[b].first; });
    return order_;
  }
  host_vector<std::size_t>::iterator at_row(offset_t first) {
    return std::lower_bound(order_.begin(), order_.end(), first,
                            [&](std::size_t entry, offset_t row) { return runs_[entry].first < row; });
  }
  void leave_order(std::size_t entry) {
    if (runs_[entry].rows > 0 && !order_.empty()) order_.erase(at_row(runs_[entry].first));
  }

  /// First row of a free run, after closing gaps where that is needed. Errors: too few rows are free.
  offset_t find(offset_t rows) {
    if (rows == 0) return 0;
    offset_t end = 0;
    const auto& order = in_order();
    for (const std::size_t entry : order) {
      if (runs_[entry].first - end >= rows) return end;
      end = runs_[entry].first + runs_[entry].rows;
    }
    if (rows_ - end >= rows) return end;
    require(rows_ - used_ >= rows, what_, std::to_string(rows) + " more",
            "at most what is free, which is " + std::to_string(rows_ - used_) + " of " + std::to_string(rows_),
            "raise cache_options::rows, reserve a prompt's length before it comes, or close a sequence");
    end = 0;
    for (const std::size_t entry : order) {
      run& moved = runs_[entry];
      if (moved.first > end) {
        steps_.push_back({entry, moved.first, end, moved.rows, true});
        moved.first = end;
      }
      end += moved.rows;
    }
    return end;
  }

  /// Moves a run down, over its own rows if need be.
  void close_gap(const step& now, offset_t* begins, cudaStream_t stream) const {
    const offset_t down = now.source - now.target;
    const auto copy = [&](void* to, const void* from, offset_t bytes) {
      check(cudaMemcpyAsync(to, from, std::size_t(bytes), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    };
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const offset_t bytes = row_bytes_[i], by_spare = offset_t(spare_bytes) / bytes;
      const bool through_spare = down < by_spare;  // otherwise the copied parts do not overlap
      const offset_t piece = (std::max)(down, by_spare);
      for (offset_t done = 0; done < now.rows; done += piece) {
        const offset_t count = (std::min)(piece, now.rows - done) * bytes;
        std::byte* to = memory_[i].data() + (now.target + done) * bytes;
        const std::byte* from = memory_[i].data() + (now.source + done) * bytes;
        if (through_spare) {
          copy(spare_.data(), from, count);
          copy(to, spare_.data(), count);
        } else {
          copy(to, from, count);
        }
      }
    }
    shift_begins(begins, down, stream);
  }
  void shift_begins(offset_t* begins, offset_t down, cudaStream_t stream) const {
    detail::shift_begins_entry<1024><<<1, 1024, 0, stream>>>(begins, heads_, down);
    check(cudaGetLastError(), "launch of shift_begins");
  }

  index_t heads_, least_held_ = 0;
  offset_t rows_, used_ = 0, peak_used_ = 0;
  const char* what_;
  host_vector<run> runs_, previous_;
  host_vector<std::size_t> order_;  // see in_order; empty: not known
  std::array<offset_t, 2> previous_used_{};
  host_vector<step> steps_;
  std::size_t next_ = 0;
  host_vector<index_t> row_bytes_;
  host_vector<device_buffer<std::byte>> memory_;
  device_buffer<offset_t> new_begins_;
  device_buffer<std::byte> spare_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
