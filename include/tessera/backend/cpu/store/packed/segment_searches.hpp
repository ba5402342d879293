// Searches of strategies for segments of decoded tokens, on another thread; their results are used between two steps.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <system_error>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../runtime/background.hpp"
#include "../../../../runtime/strategy.hpp"
#include "pack_rows.hpp"
#include "rows_before.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Searches a strategy for the rows of one segment in every layer, and packs them by it.
template <packing_layout Layout>
class strategy_task final : public background_task {
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  using rows_type = typename Layout::rows_type;
  using source = rows_of_segment<k_dim, v_dim>;

 public:
  using segment_pointer = std::shared_ptr<packed_segment<typename Layout::placement_type>>;
  struct layer_part {
    index_t layer;
    source rows;
    segment_pointer made;
  };
  host_vector<layer_part> parts;

  /// `block`: slots of a mean key in other segments; 0: there are none.
  strategy_task(const rows_type& rows, index_t block) : rows_(rows), block_(block) {}

 protected:
  void run(const std::atomic<bool>& stopping) override {
    executor alone(1);  // the cache's executor may be busy with the cache's calls
    for (layer_part& part : parts) {
      typename row_packer<Layout>::row_lists all(std::size_t(part.rows.kv_heads), host_vector<index_t>{});
      for (index_t h = 0; h < part.rows.kv_heads; ++h) {
        all[std::size_t(h)].resize(std::size_t(part.rows.length(h)));
        std::iota(all[std::size_t(h)].begin(), all[std::size_t(h)].end(), 0);
      }
      part.made =
          row_packer<Layout, source>(rows_, block_, part.rows, part.layer, alone).by_searched_strategy(all, [&] {
            return this->is_over(stopping);
          });
      if (!part.made) return;
    }
  }

 private:
  rows_type rows_;
  index_t block_;
};

/// The strategies of a store's segments. This one does nothing: all segments are packed by one strategy.
template <packing_layout Layout>
class segment_searches {
 public:
  using segments = host_vector<std::shared_ptr<packed_segment<typename Layout::placement_type>>>;

  segment_searches(index_t, index_t, index_t, const typename Layout::rows_type&) {}
  void open(index_t) {}
  void clear(index_t) {}
  void copy(index_t, index_t) {}
  template <class SegmentsOf>
  void adopt_result(index_t, const SegmentsOf&) {}
  template <class SegmentsOf, class Archive>
  void transfer(index_t, const SegmentsOf&, Archive&) {}
  static const auto& like(sequence_layer, const segments& all) { return *all.back(); }
  static bool joins(sequence_layer, const segments&) { return true; }
  template <class From, class Lists>
  void prepare(sequence_layer, const From&, const Lists&) {}
  void forget_prepared(sequence_layer) {}
  void packed(sequence_layer, const segments&, bool) {}
  void lost_rows(sequence_layer, const segments&) {}
  template <class SegmentsOf>
  void settle(index_t, const SegmentsOf&) {}
  offset_t bytes(sequence_layer) const { return 0; }
};

/// Keeps for each (layer, sequence) the number of settled segments, and the original rows of the segments after them,
/// which are packed by the last settled segment's strategy. Keeps for each sequence the search for its newest settled
/// segments.
template <searching_layout Layout>
class segment_searches<Layout> {
  using rows_type = typename Layout::rows_type;
  using search_type = strategy_task<Layout>;

 public:
  using segments = host_vector<typename search_type::segment_pointer>;

  segment_searches(index_t layers, index_t kv_heads, index_t block, const rows_type& rows)
      : layers_(layers), heads_(kv_heads), block_(block), rows_(rows), ranges_(layers) {
    if (on()) worker_ = std::make_shared<background>();
  }

  /// The thread that searches. Copies of a cache share it.
  const std::shared_ptr<background>& worker() const { return worker_; }
  void use(std::shared_ptr<background> worker) { worker_ = std::move(worker); }
  strategy_report report(index_t id) const {
    strategy_report result = sessions_[std::size_t(id)].report;
    const auto& task = sessions_[std::size_t(id)].task;
    result.searching = task && task->state() == task_state::waiting;
    return result;
  }

  void open(index_t id) {
    if (sessions_.size() <= std::size_t(id)) sessions_.resize(std::size_t(id) + 1);
    ranges_.open(id);
  }
  void clear(index_t id) {
    sessions_[std::size_t(id)] = {};
    ranges_.clear(id);
  }
  /// A running search is shared: its result replaces the segments of both sequences.
  void copy(index_t source, index_t target) {
    sessions_[std::size_t(target)] = sessions_[std::size_t(source)];
    for (index_t layer = 0; layer < layers_; ++layer)
      ranges_[sequence_layer{layer, target}] = ranges_[sequence_layer{layer, source}];
  }

  /// Replaces segments by the result of a search that is over.
  template <class SegmentsOf>
  void adopt_result(index_t id, const SegmentsOf& segments_of) {
    if (!on()) return;
    session& now = sessions_[std::size_t(id)];
    if (now.task && now.task->state() != task_state::waiting) finish(id, now, segments_of);
  }
  /// Saves what searches need, or loads it behind the segments. A search that was under way begins anew.
  template <class SegmentsOf, class Archive>
  void transfer(index_t id, const SegmentsOf& segments_of, Archive& archive) {
    if (!on()) return;
    session& now = sessions_[std::size_t(id)];
    archive.number(now.report.searched);
    archive.number(now.report.unchanged);
    for (index_t layer = 0; layer < layers_; ++layer) {
      range& here = ranges_[sequence_layer{layer, id}];
      std::uint64_t settled = here.settled, first = here.first, last = here.last;
      for (std::uint64_t* number : {&settled, &first, &last}) archive.number(*number);
      const std::size_t all = segments_of(layer).size();
      archive.require(first <= last && last <= settled && settled <= all && (settled > 0 || all == 0),
                      "with searches of no segment");
      here.settled = std::size_t(settled), here.first = std::size_t(first), here.last = std::size_t(last);
      archive.number(here.rows);
      archive.require(here.rows >= 0 && here.rows <= max_tokens, "with searches of no row");
      transfer_originals(here.originals, heads_, Layout::k_dim, Layout::v_dim, archive);
    }
    bool searching = now.task != nullptr;
    archive.flag(searching);
    if (!searching) return;
    const auto made = Archive::loads ? std::make_shared<search_type>(rows_, block_) : nullptr;
    index_t parts = Archive::loads ? 0 : index_t(now.task->parts.size());
    archive.number(parts);
    archive.require(parts >= 0 && parts <= layers_, "with searches of no layer");
    for (index_t i = 0; i < parts; ++i) {
      index_t layer = Archive::loads ? 0 : now.task->parts[std::size_t(i)].layer;
      archive.number(layer);
      archive.require(layer >= 0 && layer < layers_, "with searches of no layer");
      host_vector<std::shared_ptr<const rows_before>> originals;
      if constexpr (!Archive::loads) originals = now.task->parts[std::size_t(i)].rows.parts();
      transfer_originals(originals, heads_, Layout::k_dim, Layout::v_dim, archive);
      if constexpr (Archive::loads) made->parts.push_back({layer, {heads_, std::move(originals)}, nullptr});
    }
    if constexpr (Archive::loads) {
      auto task = wanted(made);
      worker_->start(made);
      now.task = std::move(task);
    }
  }

  /// The segment whose basis and format are used for new rows.
  const auto& like(sequence_layer owner, const segments& all) const {
    return *(on() ? all[ranges_[owner].settled - 1] : all.back());
  }
  /// Whether new rows may join the last segment.
  bool joins(sequence_layer owner, const segments& all) const {
    if (!on()) return true;
    const auto& own = like(owner, all);
    return all.size() > ranges_[owner].settled && all.back()->basis == own.basis && all.back()->format == own.format;
  }

  /// Copies rows that will be packed: `lists` of each kv_head.
  template <class From, class Lists>
  void prepare(sequence_layer owner, const From& from, const Lists& lists) {
    if (!on()) return;
    constexpr int D = Layout::k_dim, Dv = Layout::v_dim;
    range& here = ranges_[owner];
    auto copied = std::make_shared<rows_before>();
    for (index_t h = 0; h < heads_; ++h) {
      const auto& list = lists[std::size_t(h)];
      copied->k.emplace_back(list.size() * D);
      copied->v.emplace_back(list.size() * Dv);
      for (std::size_t i = 0; i < list.size(); ++i) {
        load_key(from, 0, h, list[i], copied->k.back().data() + i * D);
        load_value(from, 0, h, list[i], copied->v.back().data() + i * Dv);
      }
    }
    here.originals.reserve(here.originals.size() + 1);
    here.prepared = std::move(copied);
  }
  void forget_prepared(sequence_layer owner) { ranges_[owner].prepared = nullptr; }

  /// Rows have become segments, `in_own_basis` or behind the others. Needs no memory.
  void packed(sequence_layer owner, const segments& all, bool in_own_basis) {
    range& here = ranges_[owner];
    if (in_own_basis || !here.prepared) return end(here, all);
    index_t longest = 0;
    for (const auto& rows : here.prepared->k) longest = (std::max)(longest, index_t(rows.size()) / Layout::k_dim);
    here.rows += longest;
    here.originals.push_back(std::move(here.prepared));
  }
  /// Segments have lost rows: they are not searched.
  void lost_rows(sequence_layer owner, const segments& all) {
    end(ranges_[owner], all);
    ranges_[owner].last = ranges_[owner].first;
  }

  /// Between two steps: replaces segments by the result of their search, and ends a full segment. Does not wait. Where
  /// memory runs out, nothing changes until the next call. segments_of(layer): the segments of the sequence.
  template <class SegmentsOf>
  void settle(index_t id, const SegmentsOf& segments_of) {
    if (!on()) return;
    session& now = sessions_[std::size_t(id)];
    if (now.task && now.task->state() != task_state::waiting) finish(id, now, segments_of);
    const index_t rows = longest(id);
    const bool full = rows >= rows_.segment;
    if (!full && (rows < rows_.strategy.least_segment || !lost_enough(id, segments_of))) return;
    if (!now.task && begin(id, now, segments_of)) return;
    if (!full) return;  // the segment grows until the previous search is over, or the segment is full
    for (index_t layer = 0; layer < layers_; ++layer) end(ranges_[sequence_layer{layer, id}], segments_of(layer));
    ++now.report.unchanged;
  }

  /// Bytes of original rows, those of a search included.
  offset_t bytes(sequence_layer owner) const {
    offset_t total = 0;
    for (const auto& rows : ranges_[owner].originals) total += rows->bytes();
    if (!on() || !sessions_[std::size_t(owner.id)].task) return total;
    for (const auto& part : sessions_[std::size_t(owner.id)].task->parts) {
      if (part.layer == owner.layer) total += part.rows.bytes();
    }
    return total;
  }

 private:
  struct range {
    std::size_t settled = 0;          // segments
    std::size_t first = 0, last = 0;  // those that the search's result replaces; none: equal
    index_t rows = 0;                 // behind the settled ones
    host_vector<std::shared_ptr<const rows_before>> originals;
    std::shared_ptr<const rows_before> prepared;
  };
  struct session {
    std::shared_ptr<search_type> task;
    strategy_report report;
  };

  bool on() const { return rows_.strategy.searched(); }
  static void end(range& here, const segments& all) {
    here.settled = all.size();
    here.rows = 0;
    here.originals.clear();
    here.prepared = nullptr;
  }
  index_t longest(index_t id) const {
    index_t result = 0;
    for (index_t layer = 0; layer < layers_; ++layer)
      result = (std::max)(result, ranges_[sequence_layer{layer, id}].rows);
    return result;
  }

  /// Over all layers: the segments of a sequence end at the same token.
  template <class SegmentsOf>
  bool lost_enough(index_t id, const SegmentsOf& segments_of) const {
    double lost = 0, allowed = 0;
    for (index_t layer = 0; layer < layers_; ++layer) {
      const range& here = ranges_[sequence_layer{layer, id}];
      if (here.rows == 0) continue;
      const segments& all = segments_of(layer);
      for (std::size_t i = here.settled; i < all.size(); ++i) lost += total(all[i]->losses) / heads_;
      const auto& own = *all[here.settled - 1];
      const double rows = (std::max)(1.0, total(own.lengths)), mean = total(own.losses) / rows;
      const auto& limits = rows_.strategy;
      allowed += limits.segment_loss > 0 ? double(limits.segment_loss) : mean * limits.reference;
    }
    return lost > allowed;
  }
  template <class Number>
  static double total(const host_vector<Number>& all) {
    return std::accumulate(all.begin(), all.end(), 0.0);
  }

  static void say(strategy_report& report, const char* problem) noexcept {
    try {
      report.problem = problem;
    } catch (...) {  // no memory for the message: only the count reports it
    }
  }

  /// Returns whether a search has begun.
  template <class SegmentsOf>
  bool begin(index_t id, session& now, const SegmentsOf& segments_of) {
    try {
      auto made = std::make_shared<search_type>(rows_, block_);
      for (index_t layer = 0; layer < layers_; ++layer) {
        const range& here = ranges_[sequence_layer{layer, id}];
        if (here.rows > 0) made->parts.push_back({layer, {heads_, here.originals}, nullptr});
      }
      auto task = wanted(made);
      worker_->start(std::move(made));
      now.task = std::move(task);
    } catch (const std::system_error& none) {
      say(now.report, none.what());
      return false;
    } catch (...) {
      return false;  // no memory: a later call tries again
    }
    for (index_t layer = 0; layer < layers_; ++layer) {
      range& here = ranges_[sequence_layer{layer, id}];
      here.first = here.settled;
      here.last = segments_of(layer).size();
      end(here, segments_of(layer));
    }
    return true;
  }

  template <class SegmentsOf>
  void finish(index_t id, session& now, const SegmentsOf& segments_of) {
    const std::shared_ptr<search_type> over = std::exchange(now.task, nullptr);
    const bool done = over->state() == task_state::done;
    ++(done ? now.report.searched : now.report.unchanged);
    if (!done) {
      const bool failed = over->state() == task_state::failed;
      say(now.report, failed ? over->problem().c_str() : "the thread that searches strategies was stopped");
    }
    for (const auto& part : over->parts) {
      range& here = ranges_[sequence_layer{part.layer, id}];
      const auto replaced = here.last - here.first;
      here.last = here.first;
      if (replaced == 0 || !done) continue;
      segments& all = segments_of(part.layer);
      const auto first = all.begin() + std::ptrdiff_t(here.first);
      *first = part.made;
      all.erase(first + 1, first + std::ptrdiff_t(replaced));
      here.settled -= replaced - 1;
    }
  }

  index_t layers_, heads_, block_;
  rows_type rows_;
  std::shared_ptr<background> worker_;
  sequence_table<range> ranges_;
  host_vector<session> sessions_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
