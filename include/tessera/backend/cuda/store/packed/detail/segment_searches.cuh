// Segments of decoded tokens on the device. Another thread searches their strategy; the result replaces them between
// two steps.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "encode_rows.cuh"
#include "segment_store.cuh"
#include "strategy_task.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The searches of a store of packed rows. Where all segments are packed alike, there are none.
template <packing_layout Layout, class View>
class segment_searches {
 public:
  using segments = host_vector<segment_record>;

  segment_searches(const typename Layout::rows_type&, const segment_formats&, index_t, index_t, index_t, index_t) {}
  void clear(index_t) {}
  void copy(index_t, index_t) {}
  static std::size_t finished(sequence_layer, std::size_t all) { return all > 0 ? all - 1 : 0; }
  static const segment_record& like(sequence_layer, const segments& all) { return all.back(); }
  static bool joins(sequence_layer, const segments&) { return true; }
  static host_vector<rows_before> blocks_for(sequence_layer, index_t) { return {}; }
  void noted(const host_vector<encode_problem<View>>&, const host_vector<joining_rows>&, const packing_layers&,
             cudaStream_t) {}
  void joined(const View&, sequence_layer, index_t, index_t, host_vector<rows_before>, cudaStream_t) {}
  void ended(sequence_layer, std::size_t) {}
  void mark(index_t, cudaStream_t) {}
  template <class Store>
  void settle(index_t, Store&, bool, cudaStream_t) {}
  offset_t bytes(sequence_layer) const { return 0; }
  offset_t upper_bound(index_t) const { return 0; }
};

/// An entry is a (layer, sequence). It has settled segments, and segments behind them, which are packed by the strategy
/// of the last settled one. The original rows of the latter lie on the host. A sequence has at most one search, of its
/// newest settled segments.
///
/// Original rows lie on the host because packing is there to save the device's memory. Kernels write them to
/// page-locked blocks, losses too, and nothing waits for that. The host decides by losses just before the next rows are
/// packed; by then they have long arrived.
template <searching_layout Layout, class View>
class segment_searches<Layout, View> {
  using rows_type = typename Layout::rows_type;
  using search_type = strategy_task<Layout>;
  using T = typename Layout::element_type;

 public:
  using segments = host_vector<segment_record>;

  /// `layers`: how many layers pack.
  segment_searches(const rows_type& rows, const segment_formats& formats, index_t layers, index_t sequences,
                   index_t kv_heads, index_t max_segments)
      : rows_(rows),
        formats_(formats),
        layers_(layers),
        heads_(kv_heads),
        max_segments_(max_segments),
        ranges_(layers) {
    if (!on()) return;
    worker_ = std::make_shared<background>();
    sessions_.resize(std::size_t(sequences));
    ranges_.open(sequences - 1);
    totals_ = pinned_buffer<double>(sequence_major{layers}.index({0, sequences}) * std::size_t(max_segments));
    blocks_.emplace(std::size_t(kv_heads) * std::size_t(rows.tail.tail) * (Layout::k_dim + Layout::v_dim) * sizeof(T));
    losses_.emplace(kv_heads,
                    index_t((std::min<offset_t>)((std::max<offset_t>)(rows.longest_segment(),
                                                                      rows_type::own_segment_tokens + rows.tail.tail),
                                                 max_tokens)));
  }

  /// The thread that searches. Copies of a cache share it.
  const std::shared_ptr<background>& worker() const { return worker_; }
  void use(std::shared_ptr<background> worker) { worker_ = std::move(worker); }
  strategy_report report(index_t id) const {
    if (!on()) return {};
    strategy_report result = sessions_[std::size_t(id)].report;
    const auto& task = sessions_[std::size_t(id)].task;
    result.searching = task && task->state() == task_state::waiting;
    return result;
  }

  void clear(index_t id) {
    if (!on()) return;
    session& now = sessions_[std::size_t(id)];
    now.task = nullptr, now.report = {};
    ranges_.clear(id);
  }

  /// Copies to a sequence without segments. A running search is shared. Waits for kernels that packed rows of either
  /// id, because they write the losses.
  void copy(index_t from, index_t to) {
    if (!on()) return;
    session& now = sessions_[std::size_t(to)];
    now.task = sessions_[std::size_t(from)].task, now.report = sessions_[std::size_t(from)].report;
    for (index_t layer = 0; layer < layers_; ++layer)
      ranges_[sequence_layer{layer, to}] = ranges_[sequence_layer{layer, from}];
    sessions_[std::size_t(from)].packed.wait(), now.packed.wait();
    std::copy_n(total({0, from}, 0), std::size_t(layers_) * std::size_t(max_segments_), total({0, to}, 0));
  }
  /// How many of `all` segments are never written again.
  std::size_t finished(sequence_layer owner, std::size_t all) const {
    if (!on()) return all > 0 ? all - 1 : 0;
    const range& found = ranges_[owner];
    return found.first < found.last ? found.first : found.settled;
  }

  /// The segment whose basis and format new rows get. `joins`: whether they may join the last segment.
  const segment_record& like(sequence_layer owner, const segments& all) const {
    return on() ? all[ranges_[owner].settled - 1] : all.back();
  }
  bool joins(sequence_layer owner, const segments& all) const {
    if (!on()) return true;
    const segment_record &own = like(owner, all), &last = all.back();
    return all.size() > ranges_[owner].settled && last.k_basis == own.k_basis && last.k == own.k && last.v == own.v &&
           last.block == own.block;
  }

  /// Blocks for `count` rows that are about to be packed; `joined` then allocates nothing. Errors: no memory.
  host_vector<rows_before> blocks_for(sequence_layer owner, index_t count) {
    host_vector<rows_before> made;
    if (on()) {
      auto& originals = ranges_[owner].originals;
      originals.reserve(originals.size() + std::size_t(ceil_div(count, rows_.tail.tail)));
    }
    for (; on() && count > 0; count -= rows_.tail.tail)
      made.push_back({blocks_->allocate(), (std::min)(count, rows_.tail.tail)});
    return made;
  }
  /// Called when whole rows have been packed: sums their losses.
  void noted(const host_vector<encode_problem<View>>& problems, const host_vector<joining_rows>& all,
             const packing_layers& packing, cudaStream_t stream) {
    for (std::size_t i = 0; on() && i < all.size(); ++i) {
      const joining_rows& rows = all[i];
      losses_->run(problems[i].view, rows.segment, rows.stored, rows.first, rows.count,
                   total({packing.number[std::size_t(rows.owner.layer)], rows.owner.id}, rows.slot), stream);
    }
  }
  /// Called when packed rows have joined a segment, while they are still whole: copies them to `blocks`, which
  /// `blocks_for` made.
  void joined(const View& view, sequence_layer owner, index_t first, index_t count, host_vector<rows_before> blocks,
              cudaStream_t stream) {
    if (!on()) return;
    keep_rows(view.whole, first, count, blocks, stream);
    range& found = ranges_[owner];
    found.rows += count;
    found.originals.insert(found.originals.end(), blocks.begin(), blocks.end());
  }
  /// Called when rows became segments of their own: all segments are settled.
  void ended(sequence_layer owner, std::size_t all) {
    if (on()) end(ranges_[owner], all);
  }
  /// Marks everything that has been packed of a sequence so far.
  void mark(index_t id, cudaStream_t stream) {
    if (on()) sessions_[std::size_t(id)].packed.set(stream);
  }

  /// Called between two steps. Replaces segments by the result of a search. Where rows are `due`, a segment that has to
  /// end ends before they join it. Waits for nothing newer than earlier rows. Where memory runs out, nothing changes.
  template <class Store>
  void settle(index_t id, Store& stored, bool due, cudaStream_t stream) {
    if (!on()) return;
    session& now = sessions_[std::size_t(id)];
    if (now.task && now.task->state() != task_state::waiting) adopt(id, now, stored, stream);
    if (!due) return;
    index_t rows = 0;
    for (index_t layer = 0; layer < layers_; ++layer) rows = (std::max)(rows, ranges_[sequence_layer{layer, id}].rows);
    const bool full = rows >= rows_.segment;
    if (!full && (rows < rows_.strategy.least_segment || !lost_enough(id, now, stored))) return;
    if (!now.task && begin(id, now, stored, stream)) return;
    if (!full) return;  // the segment grows until the running search ends or the segment is full
    for (index_t layer = 0; layer < layers_; ++layer)
      end(ranges_[sequence_layer{layer, id}], stored.segments({layer, id}).size());
    ++now.report.unchanged;
  }

  /// Bytes of original rows on the host, those of a running search included.
  offset_t bytes(sequence_layer owner) const {
    if (!on()) return 0;
    std::size_t blocks = ranges_[owner].originals.size();
    if (const auto& task = sessions_[std::size_t(owner.id)].task) {
      for (const auto& part : task->parts) blocks += part.layer == owner.layer ? part.originals.size() : 0;
    }
    return offset_t(blocks * blocks_->block_bytes());
  }
  /// The most that these can be of `rows` original rows of a layer.
  offset_t upper_bound(index_t rows) const {
    return on() ? (ceil_div(rows, rows_.tail.tail) + 1) * offset_t(blocks_->block_bytes()) : 0;
  }

 private:
  struct range {
    std::size_t settled = 0;          // segments
    std::size_t first = 0, last = 0;  // segments that the running search will replace; none: equal
    index_t rows = 0;                 // behind the settled ones
    host_vector<rows_before> originals;
  };
  struct session {
    std::shared_ptr<search_type> task;
    stream_mark packed;  // the newest rows
    strategy_report report;
  };
  bool on() const { return rows_.strategy.searched(); }
  double* total(sequence_layer owner, index_t slot) const {
    return totals_.data() + sequence_major{layers_}.index(owner) * std::size_t(max_segments_) + std::size_t(slot);
  }
  static void end(range& found, std::size_t all) {
    found.settled = all;
    found.rows = 0;
    found.originals.clear();
  }

  /// Whether packing has lost enough, in all layers together: a sequence's segments end at one token.
  template <class Store>
  bool lost_enough(index_t id, const session& now, const Store& stored) const {
    now.packed.wait();
    double lost = 0, allowed = 0;
    for (index_t layer = 0; layer < layers_; ++layer) {
      const range& found = ranges_[sequence_layer{layer, id}];
      if (found.rows == 0) continue;
      const segments& all = stored.segments({layer, id});
      for (std::size_t i = found.settled; i < all.size(); ++i) lost += *total({layer, id}, all[i].slot);
      const segment_record& own = all[found.settled - 1];
      const double mean = *total({layer, id}, own.slot) / (std::max<index_t>)(1, own.rows);
      const auto& limits = rows_.strategy;
      allowed += limits.segment_loss > 0 ? double(limits.segment_loss) : mean * limits.reference;
    }
    return lost > allowed;
  }

  static void say(strategy_report& report, const char* problem) noexcept {
    try {
      report.problem = problem;
    } catch (...) {  // no memory: the count alone says it
    }
  }

  /// Begins a search; returns whether it began.
  template <class Store>
  bool begin(index_t id, session& now, const Store& stored, cudaStream_t stream) {
    try {
      host_vector<typename search_type::layer_part> parts;
      for (index_t layer = 0; layer < layers_; ++layer) {
        const range& found = ranges_[sequence_layer{layer, id}];
        if (found.rows > 0) parts.push_back({layer, found.originals, found.rows});
      }
      const auto copied = std::make_shared<stream_mark>();
      copied->set(stream);
      // A copy of the cache may hold the same memory.
      auto made = std::make_shared<search_type>(rows_, formats_, heads_, std::move(parts),
                                                spare_.use_count() == 1 ? spare_ : nullptr, copied);
      auto task = wanted(made);
      worker_->start(std::move(made));
      spare_ = nullptr;
      now.task = std::move(task);
    } catch (const std::system_error& no_thread) {
      say(now.report, no_thread.what());
      return false;
    } catch (const error& no_memory) {
      say(now.report, no_memory.what());
      return false;
    } catch (...) {
      return false;  // no memory: tried another time
    }
    for (index_t layer = 0; layer < layers_; ++layer) {
      range& found = ranges_[sequence_layer{layer, id}];
      found.first = found.settled;
      found.last = stored.segments({layer, id}).size();
      end(found, found.last);
    }
    return true;
  }

  template <class Store>
  void adopt(index_t id, session& now, Store& stored, cudaStream_t stream) {
    const std::shared_ptr<search_type> over = std::exchange(now.task, nullptr);
    const bool done = over->state() == task_state::done;
    ++(done ? now.report.searched : now.report.unchanged);
    if (!done) {
      const bool failed = over->state() == task_state::failed;
      say(now.report, failed ? over->problem().c_str() : "the thread that searches strategies was stopped");
    }
    for (auto& part : over->parts) {
      const sequence_layer owner{part.layer, id};
      range& found = ranges_[owner];
      const std::size_t replaced = found.last - found.first, last = std::exchange(found.last, found.first);
      if (replaced == 0 || !done) continue;
      if (!stored.replace_segments(owner, found.first, last, part.record, part.made, stream)) {
        say(now.report, "the pool has too few pages for segments that were packed anew");
        continue;
      }
      *total(owner, stored.segments(owner)[found.first].slot) = part.loss;
      found.settled -= replaced - 1;
    }
    over->memory()->used.set(stream);
    spare_ = over->memory();
  }

  rows_type rows_;
  segment_formats formats_;
  index_t layers_, heads_, max_segments_;
  std::shared_ptr<background> worker_;
  host_vector<session> sessions_;
  sequence_table<range> ranges_;
  pinned_buffer<double> totals_;  // [sequences, layers, slots], what packing has left out of rows
  std::optional<row_blocks> blocks_;
  std::optional<row_losses<View>> losses_;
  std::shared_ptr<search_memory> spare_;  // of the previous search
};

}  // namespace cuda
TESSERA_NAMESPACE_END
