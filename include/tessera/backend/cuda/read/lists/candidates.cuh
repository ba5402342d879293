// Which slots a turn's steps may read, on the device: those that a filter selected, and those decoded since.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/model_shape.hpp"
#include "../../../../core/prompt/prompt_lines.hpp"
#include "../../../../core/selection.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../device/kernel.cuh"
#include "../../device/warp.cuh"
#include "../../device/whole_numbers.cuh"
#include "../../store/kv_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

// How chosen slots become the lists that steps read: they are copied, and columns are joined to them. Also: how many
// slots lists share.

/// Lists of one layer and one member of the group; row = sequence of the batch * kv_heads + head.
struct list_rows {
  const offset_t* begins;
  index_t* slots;
  index_t* counts;
  index_t kv_heads;
  const index_t* ids;  // by sequence, of the columns; null: the sequence itself
  // Query heads whose columns join the list of head h: `joining` of them, from h * group + first on.
  index_t group, first, joining;
};

/// blockIdx: x a part of a row, y a row. A selection without indices means all slots.
template <int Threads>
__global__ void __launch_bounds__(Threads) pass_entry(selection_view chosen, list_rows to) {
  wait_for_earlier();
  let_later_begin();
  const index_t row = blockIdx.y, count = chosen.count(row);
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    to.slots[to.begins[row] + i] = chosen.indices ? chosen.row(row)[i] : i;
  if (blockIdx.x == 0 && threadIdx.x == 0) to.counts[row] = count;
}

/// The same, joined with columns. A block has a row and processes its slots as bits, 32 * Threads at a time.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    pass_joined_entry(selection_view chosen, list_rows to, joined_columns columns) {
  __shared__ std::uint32_t words[Threads];
  __shared__ block_scan<Threads, index_t> scan;
  const index_t row = blockIdx.x, sequence = row / to.kv_heads, head = row % to.kv_heads;
  const index_t count = chosen.count(row), thread = index_t(threadIdx.x);
  const index_t* list = chosen.row(row);
  const offset_t id = to.ids ? to.ids[sequence] : sequence;
  const std::uint32_t* bits =
      columns.bits + ((id * to.kv_heads + head) * to.group + to.first) * offset_t(columns.words);
  index_t* out = to.slots + to.begins[row];
  index_t taken = 0, written = 0;
  for (index_t word = 0; word < columns.words; word += Threads) {
    std::uint32_t mine = 0;
    for (index_t g = 0; word + thread < columns.words && g < to.joining; ++g)
      mine |= bits[g * offset_t(columns.words) + word + thread];
    words[thread] = mine;
    __syncthreads();
    const index_t end = first_where(count, [&](index_t i) { return list[i] / 32 >= word + Threads; });
    for (index_t i = taken + thread; i < end; i += Threads)
      atomicOr(&words[list[i] / 32 - word], std::uint32_t(1) << list[i] % 32);
    taken = end;
    __syncthreads();
    mine = words[thread];
    index_t next = written + scan.exclusive_sum(__popc(mine));
    written += scan.total();
    for (; mine != 0; mine &= mine - 1) out[next++] = (word + thread) * 32 + __ffs(int(mine)) - 1;
    __syncthreads();  // the scan's memory and the words are free again
  }
  if (thread == 0) to.counts[row] = written;
}

/// Counts the slots that are in any of `lists` ascending lists of each row, and the entries of all of them. The lists'
/// counts and begins lie `stride` rows apart. Writes both by id, to [ids, kv_heads].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_read_entry(list_rows from, index_t lists, offset_t stride, index_t* distinct, index_t* entries) {
  __shared__ block_scan<Threads, index_t> scan;
  wait_for_earlier();
  let_later_begin();
  const index_t row = blockIdx.x;
  index_t found = 0;
  for (index_t l = 0; l < lists; ++l) {
    const index_t* list = from.slots + from.begins[l * stride + row];
    for (index_t i = index_t(threadIdx.x); i < from.counts[l * stride + row]; i += Threads) {
      bool is_new = true;
      for (index_t before = 0; before < l && is_new; ++before) {
        const index_t* other = from.slots + from.begins[before * stride + row];
        const index_t count = from.counts[before * stride + row];
        const index_t at = first_where(count, [&](index_t j) { return other[j] >= list[i]; });
        is_new = at == count || other[at] != list[i];
      }
      found += is_new;
    }
  }
  scan.exclusive_sum(found);
  const index_t total = scan.total();
  if (threadIdx.x != 0) return;
  const offset_t at = offset_t(from.ids[row / from.kv_heads]) * from.kv_heads + row % from.kv_heads;
  distinct[at] = total;
  entries[at] = 0;
  for (index_t l = 0; l < lists; ++l) entries[at] += from.counts[l * stride + row];
}

/// The lists of every layer and member of the group: small arrays [lists, ids, heads]. The arrays of the batch have its
/// sequences first.
struct step_lists {
  const index_t* lengths;  // [layers, ids, heads], by id: they count the step's tokens
  const offset_t* begins;  // by id
  index_t* slots;
  index_t* counts;           // by id
  index_t* counts_in_batch;  // by sequence
  const index_t* ids;
  index_t members, sequences, heads;
};

/// Adds the newest `tokens` slots of every head to its candidates. x: a sequence of the batch, y: a list of a layer.
template <int Threads>
__global__ void __launch_bounds__(Threads) join_entry(step_lists all, index_t tokens) {
  const index_t sequence = blockIdx.x, list = blockIdx.y, id = all.ids[sequence];
  for (index_t head = threadIdx.x; head < all.heads; head += Threads) {
    const offset_t row = (offset_t(list) * all.sequences + id) * all.heads + head;
    const index_t held = all.counts[row];
    const index_t length = all.lengths[(offset_t(list / all.members) * all.sequences + id) * all.heads + head];
    for (index_t t = 0; t < tokens; ++t) all.slots[all.begins[row] + held + t] = length - tokens + t;
    all.counts[row] = held + tokens;
    all.counts_in_batch[(offset_t(list) * all.sequences + sequence) * all.heads + head] = held + tokens;
  }
}

}  // namespace detail

/// Merges the lists of each head into one ascending list. `lists` has the lists of head 0, then those of head 1, and so
/// on, equally many per head.
inline host_vector<host_vector<index_t>> joined_lists(host_vector<host_vector<index_t>> lists, index_t kv_heads) {
  const std::size_t per_head = lists.size() / std::size_t(kv_heads);
  if (per_head == 1) return lists;
  host_vector<host_vector<index_t>> heads;
  heads.resize(std::size_t(kv_heads));
  for (std::size_t i = 0; i < lists.size(); ++i)
    heads[i / per_head].insert(heads[i / per_head].end(), lists[i].begin(), lists[i].end());
  for (host_vector<index_t>& any : heads) {
    std::sort(any.begin(), any.end());
    any.erase(std::unique(any.begin(), any.end()), any.end());
  }
  return heads;
}

/// For recipes whose steps may read everything: the same calls, which do nothing.
template <class View>
class no_candidates {
 public:
  using view_type = View;
  no_candidates(const model_shape&, index_t, index_t, index_t, bool) {}
  host_vector<detail::gathered_column> gathered() const { return {}; }
  token_bound bound(sequence_layer, const token_bound& stored) const { return stored; }
  index_t usual_row(index_t) const { return 0; }
  View view(sequence_layer, const View& all) const { return all; }
  View batch_view(index_t, const View& all, index_t = 0) const { return all; }
  void plan_pass(const sequence_layers&, const host_vector<kept_bound>&) {}
  void pass(sequence_layer, index_t, const kept_slots&, const joined_columns&, cudaStream_t) {}
  void pass_in_step(index_t, index_t, const step_table&, index_t, const selection_view&, index_t, const joined_columns&,
                    cudaStream_t) const {}
  void note_read(index_t, const step_table&, index_t, index_t*, index_t*, cudaStream_t) const {}
  void passed_in_step(sequence_layer, const token_bound&) {}
  void plan_room(const sequence_layers&, index_t, const host_vector<index_t>&) {}
  static constexpr bool moves() { return false; }
  void abandon() {}
  void commit_room(const sequence_layers&, cudaStream_t) {}
  void plan_copy(index_t, index_t) {}
  void commit_copy(index_t, index_t, cudaStream_t) {}
  template <class Archive>
  void transfer(sequence_layer, const host_vector<index_t>&, Archive&, cudaStream_t) {}
  void grew(sequence_layer, index_t) {}
  void drop_newest(sequence_layer, index_t, cudaStream_t) {}
  void join(const step_table&, const id_column<index_t>&, index_t, index_t, cudaStream_t) const {}
  void clear(index_t, cudaStream_t) {}
  void end_lists(sequence_layer, cudaStream_t) {}
  offset_t bytes(sequence_layer) const { return 0; }
  offset_t upper_bound(const kept_bound&) const { return 0; }
  template <class Store>
  host_vector<host_vector<index_t>> downloaded_lists(sequence_layer owner, const Store& store) const {
    return store.downloaded_positions(owner);
  }
};

/// Ascending slot lists by kv_head of every (layer, sequence), each entry in a run of its own. If query heads choose
/// separately, also by member of the group. K and V are not copied. If steps choose lists anew, every head of a run has
/// as much room as the longest, so that lists can be overwritten.
template <class View>
class candidates {
 public:
  using view_type =
      kv_view<view_element<typename View::encoding_type>, View::k_dim, filtered<decltype(View::table)>, View::v_dim>;

  /// `even`: steps choose lists anew.
  candidates(const model_shape& shape, index_t sequences, index_t tokens, index_t members, bool even)
      : layers_(shape.layers),
        order_{sequences},
        heads_(shape.kv_heads),
        group_(shape.q_heads / shape.kv_heads),
        tokens_(tokens),
        members_(members),
        even_(even),
        bounds_(std::size_t(layers_) * std::size_t(sequences)),
        pool_(layers_ * members * sequences, heads_, run_pool::rows_for(layers_ * members * sequences, heads_, tokens),
              {4}, "candidates of the cache"),
        counts_(layers_ * members, sequences, heads_),
        begins_(layers_ * members, sequences, heads_) {}

  host_vector<detail::gathered_column> gathered() const { return {counts_.gathered(), begins_.gathered()}; }
  /// The usual length of a list under a budget. If steps choose anew, it grows only by the tokens decoded in between.
  index_t usual_row(index_t budget) const { return even_ ? budget : 0; }
  /// The bound of an entry's longest list.
  const token_bound& bound(sequence_layer owner, const token_bound&) const { return bounds_[order_.index(owner)]; }

  view_type view(sequence_layer owner, const View& all) const {
    return view(all, counts_.entry(list_of(owner, 0)), begins_.entry(list_of(owner, 0)));
  }
  view_type batch_view(index_t layer, const View& all, index_t member = 0) const {
    const index_t lists = layer * members_ + member;
    return view(all, counts_.batch(lists), begins_.batch(lists));
  }

  /// Plans lists of at most these bounds, for `pass` calls in the same order: each owner's members one after the other.
  void plan_pass(const sequence_layers& owners, const host_vector<kept_bound>& passed) {
    in_one_plan([&] {
      for (std::size_t i = 0; i < owners.size(); ++i) {
        for (index_t m = 0; m < members_; ++m) plan_run(run_of(owners[i], m), {passed[i].longest, passed[i].total}, 0);
      }
    });
  }
  /// Stores the slots of each head that a filter selects when a prompt ends, and the columns that join them.
  void pass(sequence_layer owner, index_t member, const kept_slots& passed, const joined_columns& columns,
            cudaStream_t stream) {
    const std::size_t run = run_of(owner, member);
    lay_out(run, passed.chosen.counts, stream);
    pool_.adopt(begins(run), stream);
    joined_columns own = columns;
    if (own.bits) own.bits += offset_t(owner.id) * heads_ * group_ * own.words;
    write(passed.chosen, rows_of(begins(run), counts_.entry(list_of(owner, member)), nullptr, member), heads_,
          passed.bound.longest, own, stream);
    bounds_[order_.index(owner)] = passed.bound;
  }
  /// The same for a batch within a step, over the old lists. It can be recorded.
  void pass_in_step(index_t layer, index_t member, const step_table& steps, index_t batch, const selection_view& chosen,
                    index_t longest, const joined_columns& columns, cudaStream_t stream) const {
    const index_t lists = layer * members_ + member;
    write(chosen, rows_of(begins_.batch(lists), counts_.batch(lists), steps.ids(), member), batch * heads_, longest,
          columns, stream);
    steps.scatter(counts_, lists, batch, stream);
  }
  /// Writes the sizes of a batch's lists before they are chosen anew, by id [ids, kv_heads]: distinct slots, and
  /// entries.
  void note_read(index_t layer, const step_table& steps, index_t batch, index_t* distinct, index_t* entries,
                 cudaStream_t stream) const {
    const index_t lists = layer * members_;
    launch_overlapping<detail::count_read_entry<256>>(
        unsigned(batch * heads_), 256, stream, "launch of count_read",
        rows_of(begins_.batch(lists), counts_.batch(lists), steps.ids(), 0), members_,
        offset_t(order_.sequences) * heads_, distinct, entries);
  }
  /// Notes on the host the bounds that `pass_in_step` leaves.
  void passed_in_step(sequence_layer owner, const token_bound& passed) {
    for (index_t m = 0; m < members_; ++m)
      pool_.grew(run_of(owner, m), passed.longest - bounds_[order_.index(owner)].longest);
    bounds_[order_.index(owner)] = passed;
  }

  /// Plans room for `tokens` more. If a step chooses anew, also for its choice: longest[i] slots per head of owners[i].
  void plan_room(const sequence_layers& owners, index_t tokens, const host_vector<index_t>& longest) {
    in_one_plan([&] {
      for (std::size_t i = 0; i < owners.size(); ++i) {
        const token_bound& held = bounds_[order_.index(owners[i])];
        const index_t more = (std::max)(tokens, longest.empty() ? 0 : longest[i] - held.longest);
        for (index_t m = 0; m < members_; ++m) {
          const std::size_t run = run_of(owners[i], m);
          if (pool_.free_rows(run) < more) plan_run(run, held, more);
        }
      }
    });
  }
  /// Whether the plan moves lists of other entries.
  bool moves() const { return pool_.moves(); }
  void abandon() { pool_.abandon(); }
  void commit_room(const sequence_layers& owners, cudaStream_t stream) {
    for (const sequence_layer owner : owners) {
      for (index_t m = 0; m < members_; ++m) {
        const std::size_t run = run_of(owner, m);
        const index_t* counts = counts_.entry(list_of(owner, m));
        if (!lay_out(run, counts, stream)) continue;
        pool_.move(begins(run), counts, bounds_[order_.index(owner)].longest, stream);
        pool_.adopt(begins(run), stream);
      }
    }
  }
  /// Plans that an id without lists receives those of another id; `commit_copy` carries it out.
  void plan_copy(index_t from, index_t to) {
    in_one_plan([&] {
      for (index_t lists = 0; lists < layers_ * members_; ++lists)
        plan_run(order_.index({lists, to}), bounds_[order_.index({lists / members_, from})], 0);
    });
  }
  void commit_copy(index_t from, index_t to, cudaStream_t stream) {
    for (index_t lists = 0; lists < layers_ * members_; ++lists) {
      const token_bound& held = bounds_[order_.index({lists / members_, to})] =
          bounds_[order_.index({lists / members_, from})];
      pool_.copy_run(
          order_.index({lists, from}), order_.index({lists, to}), counts_.entry({lists, from}), held.longest,
          [&](std::size_t at) { return begins(at); }, stream, even_);
      copy_on_device(counts_.entry({lists, to}), counts_.entry({lists, from}), std::size_t(heads_), stream);
    }
  }
  /// Saves the lists of a layer whose heads store `lengths` tokens, or loads them into empty ones. Waits for the
  /// stream.
  template <class Archive>
  void transfer(sequence_layer owner, const host_vector<index_t>& lengths, Archive& archive, cudaStream_t stream) {
    index_t sets = members_;
    archive.number(sets);
    archive.require(sets == 0 || sets == 1 || sets == group_, "with sets of candidates of no head");
    host_vector<host_vector<index_t>> counts(std::size_t(sets), host_vector<index_t>(std::size_t(heads_), 0));
    host_vector<host_vector<index_t>> slots_of_head(std::size_t(sets * heads_), host_vector<index_t>{});
    token_bound held;
    for (index_t m = 0; m < sets; ++m) {
      host_vector<index_t>& own = counts[std::size_t(m)];
      const bool is_empty = Archive::loads || bounds_[order_.index(owner)].longest == 0;
      host_vector<offset_t> first(std::size_t(heads_), 0);
      if (!is_empty) {
        download(own, counts_.entry(list_of(owner, m)), stream);
        download(first, begins_.entry(list_of(owner, m)), stream);
      }
      archive.rows(own.data(), own.size());
      offset_t total = 0;
      for (index_t h = 0; h < heads_; ++h) {
        const index_t count = own[std::size_t(h)];
        archive.require(count >= 0 && count <= lengths[std::size_t(h)], "with more candidates than tokens");
        held.longest = (std::max)(held.longest, count);
        total += count;
      }
      held.total = (std::max)(held.total, total);
      for (index_t h = 0; h < heads_; ++h) {
        host_vector<index_t>& list = slots_of_head[std::size_t(m * heads_ + h)];
        list.resize(std::size_t(own[std::size_t(h)]));
        if (!is_empty) download(list, slots() + first[std::size_t(h)], stream);
        transfer_ascending(list.data(), index_t(list.size()), lengths[std::size_t(h)], archive);
      }
    }
    if constexpr (Archive::loads) {
      if (held.longest == 0) return;
      archive.require(sets == members_, "with sets of candidates of other heads");
      in_one_plan([&] {
        for (index_t m = 0; m < members_; ++m) plan_run(run_of(owner, m), held, 0);
      });
      bounds_[order_.index(owner)] = held;
      for (index_t m = 0; m < members_; ++m) {
        const std::size_t run = run_of(owner, m);
        upload(counts_.entry(list_of(owner, m)), counts[std::size_t(m)], stream);
        lay_out(run, counts_.entry(list_of(owner, m)), stream);
        pool_.adopt(begins(run), stream);
        host_vector<offset_t> first(std::size_t(heads_), 0);
        download(first, begins(run), stream);
        for (index_t h = 0; h < heads_; ++h)
          upload(slots() + first[std::size_t(h)], slots_of_head[std::size_t(m * heads_ + h)], stream);
      }
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
  }
  void grew(sequence_layer owner, index_t tokens) {
    token_bound& held = bounds_[order_.index(owner)];
    held.longest += tokens;
    held.total += offset_t(heads_) * tokens;
    for (index_t m = 0; m < members_; ++m) pool_.grew(run_of(owner, m), tokens);
  }
  /// Removes the newest `tokens` of every head, which steps added.
  void drop_newest(sequence_layer owner, index_t tokens, cudaStream_t stream) {
    grew(owner, -tokens);
    for (index_t m = 0; m < members_; ++m) {
      index_t* counts = counts_.entry(list_of(owner, m));
      add_number(counts, counts, -tokens, heads_, stream);
    }
  }
  /// Called when a batch's step begins: adds its tokens, which `lengths` count already, to the candidates of every
  /// layer. One launch a step.
  void join(const step_table& steps, const id_column<index_t>& lengths, index_t batch, index_t tokens,
            cudaStream_t stream) const {
    const detail::step_lists all{lengths.entry({}), begins_.entry({}), slots(),
                                 counts_.entry({}), counts_.batch(0),  steps.ids(),
                                 members_,          order_.sequences,  heads_};
    detail::join_entry<32><<<dim3(unsigned(batch), unsigned(layers_ * members_)), 32, 0, stream>>>(all, tokens);
    check(cudaGetLastError(), "launch of join");
  }

  void clear(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) end_lists({layer, id}, stream);
  }
  /// Called when a turn's prompt has begun: releases a layer's lists, which are those of the previous turn.
  void end_lists(sequence_layer owner, cudaStream_t stream) {
    bounds_[order_.index(owner)] = {};
    for (index_t m = 0; m < members_; ++m) {
      pool_.clear(run_of(owner, m));
      check(cudaMemsetAsync(counts_.entry(list_of(owner, m)), 0, std::size_t(heads_) * sizeof(index_t), stream),
            "cudaMemsetAsync");
    }
  }
  offset_t bytes(sequence_layer owner) const {
    offset_t rows = 0;
    for (index_t m = 0; m < members_; ++m) rows += pool_.rows(run_of(owner, m));
    return rows * pool_.row_bytes();
  }
  /// An upper bound of the bytes that the lists of a layer take.
  offset_t upper_bound(const kept_bound& listed) const {
    const offset_t total = even_ ? offset_t(heads_) * listed.longest : listed.total;
    return members_ * pool_.upper_bound_rows(listed.longest, total, tokens_) * pool_.row_bytes();
  }

  /// Positions by row, row = kv_head * members + member of the group. Such a store drops nothing, so slots are
  /// positions. Without lists, as during a prompt, all stored positions. Synchronises.
  template <class Store>
  host_vector<host_vector<index_t>> downloaded_lists(sequence_layer owner, const Store& store) const {
    host_vector<host_vector<index_t>> all(std::size_t(heads_ * members_));
    if (bounds_[order_.index(owner)].longest == 0) {
      const auto stored = store.downloaded_positions(owner);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = stored[i / std::size_t(members_)];
      return all;
    }
    for (index_t m = 0; m < members_; ++m) {
      const auto counts = downloaded(counts_.entry(list_of(owner, m)), std::size_t(heads_));
      const auto first = downloaded(begins_.entry(list_of(owner, m)), std::size_t(heads_));
      for (std::size_t h = 0; h < counts.size(); ++h) {
        all[h * std::size_t(members_) + std::size_t(m)] = downloaded(slots() + first[h], std::size_t(counts[h]));
      }
    }
    return all;
  }

 private:
  /// The list of one member of the group.
  sequence_layer list_of(sequence_layer owner, index_t member) const {
    return {owner.layer * members_ + member, owner.id};
  }
  std::size_t run_of(sequence_layer owner, index_t member) const { return order_.index(list_of(owner, member)); }
  offset_t* begins(std::size_t run) const { return begins_.entry(order_.owner(run)); }
  index_t* slots() const { return pool_.plane_data<index_t>(0); }

  /// Fills a vector, and waits for the stream.
  template <class T>
  static void download(host_vector<T>& to, const T* from, cudaStream_t stream) {
    check(cudaMemcpyAsync(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  template <class T>
  static void upload(T* to, const host_vector<T>& from, cudaStream_t stream) {
    if (from.empty()) return;
    check(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }
  template <class Plan>
  void in_one_plan(const Plan& plan) {
    pool_.plan();
    try {
      plan();
    } catch (...) {
      pool_.abandon();
      throw;
    }
  }
  /// A run for lists of these bounds and `tokens` more in every head, with some room behind.
  void plan_run(std::size_t at, const token_bound& held, index_t tokens) {
    const index_t room = tokens + pool_.room_behind(held.longest + tokens, tokens_);
    pool_.plan_run(at, (even_ ? offset_t(heads_) * held.longest : held.total) + offset_t(heads_) * room, room);
  }
  bool lay_out(std::size_t at, const index_t* counts, cudaStream_t stream) {
    return pool_.lay_out(at, even_ ? nullptr : counts, [&](std::size_t p) { return begins(p); }, stream);
  }
  detail::list_rows rows_of(const offset_t* begins, index_t* counts, const index_t* ids, index_t member) const {
    const bool apart = members_ > 1;
    return {begins, slots(), counts, heads_, ids, group_, apart ? member : 0, apart ? 1 : group_};
  }
  static void write(const selection_view& chosen, const detail::list_rows& to, index_t rows, index_t longest,
                    const joined_columns& columns, cudaStream_t stream) {
    if (columns.bits) {
      detail::pass_joined_entry<512><<<unsigned(rows), 512, 0, stream>>>(chosen, to, columns);
      check(cudaGetLastError(), "launch of pass");
    } else {
      const dim3 grid{unsigned(std::clamp(longest / 1024, 1, 64)), unsigned(rows)};
      launch_overlapping<detail::pass_entry<256>>(grid, 256, stream, "launch of pass", chosen, to);
    }
  }
  view_type view(const View& all, const index_t* counts, const offset_t* begins) const {
    view_type view;
    view.k = all.k;
    view.v = all.v;
    view.k_strides = all.k_strides;
    view.v_strides = all.v_strides;
    view.scales = all.scales;
    view.sequences = all.sequences;
    view.kv_heads = all.kv_heads;
    view.lengths = counts;
    view.length_strides = {heads_, 1};
    view.positions = slots();  // of a store that drops nothing, slots are positions
    view.position_begin = begins;
    view.order = slot_order::ascending;
    view.table = {all.table, slots(), begins, heads_};
    return view;
  }

  index_t layers_;
  layer_major order_;
  index_t heads_, group_, tokens_, members_;
  bool even_;
  host_vector<token_bound> bounds_;
  run_pool pool_;
  id_column<index_t> counts_;
  id_column<offset_t> begins_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
