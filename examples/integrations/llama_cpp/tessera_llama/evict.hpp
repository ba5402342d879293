// llama.cpp with its own attention and memory, of which Tessera chooses what stays: one set of positions for the whole model.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include <tessera/backend/cpu/choose/model_scores.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/runtime/saved/archive.hpp>
#include <tessera/scope/per_head.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "observe.hpp"

namespace tessera_llama {

/// How tokens are scored: as SnapKV, by the prompt's last queries, added up over all heads and layers, and pooled then.
struct eviction_options {
  index_t window = 32;  ///< newest tokens of the prompt, whose queries score and which always stay
  index_t pool = 7;     ///< max-pooling over tokens; 1: none
  int threads = 1;      ///< of the scoring
};

/// Watches prompts, and frees cells of llama.cpp's memory for all tokens but the best ones.
///
///   eviction watcher(model, {});
///   watcher.attach(params);
///   watcher.decode(context, chunk);                      // in place of llama_decode
///   watcher.decode(context, last_chunk, sequence);       // the chunk with the prompt's end: its queries score
///   watcher.evict(context, sequence, 512);               // 512 tokens stay; their cells lie side by side afterwards
///
/// Keys are f16, q8_0 or q4_0 (`params.type_k`); values are of any type. Freed cells serve other tokens; the context's buffer stays as
/// large as it was made. llama.cpp's `seq_pos_min` promises every position from there on, so an evicted sequence must not be reused as a
/// prefix.
class eviction final : public graph_observer {
 public:
  /// Errors   a model that is not read; a window or a kernel out of range: tessera::error.
  explicit eviction(const llama_model* model, eviction_options options = {})
      : graph_observer(model), options_(options), workers_((check(options), options.threads)) {}

  /// llama_decode. `observed`: the sequence whose prompt ends in this batch, or -1; its tokens here must be its last `window` ones
  /// or more (all of them, of a shorter prompt). Where it throws, no sequence has any of the batch's tokens. Errors: what llama.cpp
  /// refuses; a batch that is not one pass; positions that do not go on one by one: tessera::error.
  void decode(llama_context* context, const llama_batch& batch, llama_seq_id observed = -1) {
    tokens_.clear();
    require_batch(context, batch);
    std::map<llama_seq_id, llama_pos> first, next;  // new positions of each sequence
    for (int i = 0; i < batch.n_tokens; ++i) {
      const token added{batch.seq_id[i][0], batch.pos[i]};
      const auto found = sequences_.find(added.sequence);
      if (first.emplace(added.sequence, added.position).second)
        next[added.sequence] = found == sequences_.end() ? added.position : found->second.positions.back() + 1;
      llama_pos& expected = next[added.sequence];
      tessera::require(added.position == expected, "position of a token of sequence " + std::to_string(added.sequence),
                       added.position, std::to_string(expected), "positions go on one by one");
      ++expected;
      tokens_.push_back(added);
    }
    observed_ = observed;
    first_row_ = -1, rows_ = 0;
    for (std::size_t i = 0; i < tokens_.size() && observed >= 0; ++i) {
      if (tokens_[i].sequence != observed) continue;
      tessera::require(first_row_ < 0 || i == std::size_t(first_row_ + rows_), "rows of the observed sequence", "apart",
                       "side by side", "sort the batch");
      if (first_row_ < 0) first_row_ = index_t(i);
      ++rows_;
    }
    const auto known = sequences_.find(observed);
    const index_t held = known == sequences_.end() ? 0 : index_t(known->second.positions.size());
    tessera::require(observed < 0 || rows_ >= std::min(options_.window, held + rows_),
                     "tokens of the observed sequence in the batch", rows_,
                     "at least the window, which is " + std::to_string(options_.window),
                     "cut the prompt so that its last chunk is longer");
    begin_pass();
    const int status = llama_decode(context, batch);
    try {
      end_pass(status);
    } catch (...) {  // no sequence has any of the pass's tokens
      for (const auto& [id, position] : first) llama_memory_seq_rm(llama_get_memory(context), id, position, -1);
      std::erase_if(sequences_, [](const auto& entry) { return entry.second.positions.empty(); });
      throw;
    }
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      state& of = sequences_[tokens_[i].sequence];
      of.positions.push_back(tokens_[i].position);
      if (of.knows_cells) of.cells.push_back(cells()[i]);
    }
    if (observed >= 0) sequences_[observed].scores = std::exchange(total_, {});
  }

  /// Frees the cells of all tokens of a sequence but `keep`: the window, and of the others those with the best scores. Returns the
  /// positions that stay. Errors: nothing observed since the sequence's last tokens; fewer than the window: tessera::error.
  std::vector<llama_pos> evict(llama_context* context, llama_seq_id id, index_t keep) {
    const auto found = sequences_.find(id);
    const index_t n = found == sequences_.end() ? 0 : index_t(found->second.positions.size());
    const index_t window = std::min(options_.window, n);
    tessera::require(n > 0 && found->second.scores.layers() > 0 && found->second.scores.tokens() == n,
                     "scores of sequence " + std::to_string(id), "missing", "those of its prompt's end",
                     "pass the sequence to the decode of the prompt's last chunk");
    tessera::require(keep >= window, "tokens to keep", keep, "at least the window, which is " + std::to_string(window),
                     "keep more, or take a smaller window");
    state& of = found->second;
    tessera::selection kept;
    tessera::cpu::retain_workspace scratch;
    of.scores.choose(policy_of(window, keep), kept, scratch);
    std::vector<llama_pos> left;
    for (index_t i = 0; i < kept.counts[0]; ++i) left.push_back(of.positions[std::size_t(kept.row(0)[i])]);
    if (index_t(left.size()) < n) keep_positions(context, id, left);
    return left;
  }

  /// Frees the cells of all other positions, and moves what is left side by side. `left`: ascending, the newest among them.
  void keep_positions(llama_context* context, llama_seq_id id, const std::vector<llama_pos>& left) {
    const auto found = sequences_.find(id);
    tessera::require(found != sequences_.end(), "sequence", id, "one that has tokens", "decode its prompt first");
    state& of = found->second;
    tessera::require(std::is_sorted(left.begin(), left.end(), std::less_equal<>()) &&
                         std::includes(of.positions.begin(), of.positions.end(), left.begin(), left.end()),
                     "positions to keep", "not ascending, or not all held",
                     "some of those that `positions` says, ascending", "leave out the others");
    tessera::require(!left.empty() && left.back() == of.positions.back(), "positions to keep", "without the newest",
                     "the newest among them", "llama.cpp goes on behind the newest token");
    const llama_memory_t memory = llama_get_memory(context);
    std::vector<llama_pos> by_cell = in_order_of_cells(of, left);
    llama_pos from = of.positions.front();
    for (const llama_pos position : left) {
      if (position > from) llama_memory_seq_rm(memory, id, from, position);
      from = position + 1;
    }
    std::vector<std::uint8_t> state_bytes(llama_state_seq_get_size(context, id));
    llama_state_seq_get_data(context, state_bytes.data(), state_bytes.size(), id);
    llama_memory_seq_rm(memory, id, -1, -1);
    const bool restored = llama_state_seq_set_data(context, state_bytes.data(), state_bytes.size(), id) > 0;
    of.positions = left, of.scores = {}, of.cells.clear();
    of.knows_cells = false, of.by_cell = std::move(by_cell);
    if (!restored) forget(context, id);
    tessera::require(restored, "state of the sequence", "not taken back by llama.cpp", "taken",
                     "decode the prompt again");
  }

  /// Writes a sequence as bytes: llama.cpp's state, and which positions it holds. The sink's exceptions pass through.
  /// Errors   a sequence without tokens: tessera::error.
  void save(llama_context* context, llama_seq_id id, const std::function<void(const void*, std::size_t)>& sink) {
    const auto found = sequences_.find(id);
    tessera::require(found != sequences_.end(), "sequence", id, "one that has tokens", "decode its prompt first");
    tessera::host_vector<llama_pos> held = found->second.positions,
                                    by_cell = in_order_of_cells(found->second, found->second.positions);
    tessera::host_vector<std::uint8_t> bytes(llama_state_seq_get_size(context, id));
    llama_state_seq_get_data(context, bytes.data(), bytes.size(), id);
    tessera::saved_writer archive(sink);
    archive.text(model_name());
    transfer(held, by_cell, bytes, archive);
    archive.end();
  }
  /// Reads a sequence that `save` wrote, in place of the one of this id. Scores are not saved: the next prompt's end makes new ones.
  /// Errors   bytes that are cut or damaged, or of another model: tessera::error, and nothing has changed. A context without free cells
  ///          for them: tessera::error, and the sequence is empty.
  void load(llama_context* context, llama_seq_id id, const std::function<std::size_t(void*, std::size_t)>& source) {
    tessera::saved_reader archive(source);
    std::string model;
    archive.text(model);
    require_same_model(model);
    tessera::host_vector<llama_pos> held, by_cell;
    tessera::host_vector<std::uint8_t> bytes;
    transfer(held, by_cell, bytes, archive);
    archive.end();
    auto sorted = by_cell;
    std::sort(sorted.begin(), sorted.end());
    archive.require(!held.empty() && sorted == held && std::is_sorted(held.begin(), held.end(), std::less_equal<>()),
                    "with positions that cannot be");
    forget(context, id);
    const bool restored = llama_state_seq_set_data(context, bytes.data(), bytes.size(), id) > 0;
    if (!restored) forget(context, id);
    tessera::require(restored, "state of the sequence", "not taken by llama.cpp", "taken",
                     "give the context cells for all of its tokens");
    state& of = sequences_[id];
    of.positions.assign(held.begin(), held.end());
    of.by_cell.assign(by_cell.begin(), by_cell.end());
    of.knows_cells = false;
  }

  /// Empties a sequence.
  void forget(llama_context* context, llama_seq_id id) {
    llama_memory_seq_rm(llama_get_memory(context), id, -1, -1);
    sequences_.erase(id);
  }
  /// Positions that a sequence holds, ascending.
  std::vector<llama_pos> positions(llama_seq_id id) const {
    const auto found = sequences_.find(id);
    return found == sequences_.end() ? std::vector<llama_pos>() : found->second.positions;
  }
  /// Cells over which the last pass's attention went.
  std::int64_t attended_cells() const { return attended_; }

 private:
  struct token {
    llama_seq_id sequence;
    llama_pos position;
  };
  struct state {
    std::vector<llama_pos> positions;     // ascending
    std::vector<std::int64_t> cells;      // of these positions
    tessera::cpu::model_scores<> scores;  // of these positions; no layer: none
    bool knows_cells = true;
    std::vector<llama_pos> by_cell;  // positions in the order of their cells, where these are not known
  };

  template <class Archive>
  static void transfer(tessera::host_vector<llama_pos>& held, tessera::host_vector<llama_pos>& by_cell,
                       tessera::host_vector<std::uint8_t>& bytes, Archive& archive) {
    archive.numbers(held, tessera::max_tokens);
    archive.numbers(by_cell, tessera::max_tokens);
    archive.numbers(bytes, offset_t(1) << 40);
  }
  static void check(const eviction_options& options) {
    tessera::require(options.window >= 1 && options.window <= 4096, "window", options.window, "1 to 4096",
                     "32 is usual");
    tessera::require(options.pool >= 1 && options.pool % 2 == 1, "pool", options.pool, "odd, 1 for none", "7 is usual");
    tessera::require(options.threads >= 1, "threads", options.threads, "at least 1", "pass how many threads score");
  }

  /// The positions of `left`, as their cells follow one another: so llama.cpp writes and reads its states.
  static std::vector<llama_pos> in_order_of_cells(const state& of, const std::vector<llama_pos>& left) {
    std::vector<llama_pos> order;
    const auto stays = [&](llama_pos position) { return std::binary_search(left.begin(), left.end(), position); };
    if (!of.knows_cells) {
      std::copy_if(of.by_cell.begin(), of.by_cell.end(), std::back_inserter(order), stays);
      return order;
    }
    std::vector<std::size_t> slots(of.positions.size());
    std::iota(slots.begin(), slots.end(), std::size_t(0));
    std::sort(slots.begin(), slots.end(), [&](std::size_t a, std::size_t b) { return of.cells[a] < of.cells[b]; });
    for (const std::size_t slot : slots)
      if (stays(of.positions[slot])) order.push_back(of.positions[slot]);
    return order;
  }

  void see(index_t layer, const attention_node& node) override {
    const ggml_type keys = node.k->type;
    tessera::require(keys == GGML_TYPE_F16 || keys == GGML_TYPE_Q8_0 || keys == GGML_TYPE_Q4_0, "type of keys",
                     ggml_type_name(keys), "f16, q8_0 or q4_0", "make the context with such a type_k");
    attended_ = node.k->ne[1];
    if (layer == 0) find_cells(node);
    if (observed_ < 0) return;
    if (layer == 0) begin_scores();
    switch (node.q.dim) {
      case 64:
        return score<64>(node);
      case 80:
        return score<80>(node);
      case 96:
        return score<96>(node);
      case 128:
        return score<128>(node);
      case 192:
        return score<192>(node);
      case 256:
        return score<256>(node);
      default:
        tessera::fail("head dim", node.q.dim, "64, 80, 96, 128, 192 or 256", "take another model");
    }
  }

  /// Of sequences whose cells are not known: what the mask shows a token of theirs, but for the pass's own cells.
  void find_cells(const attention_node& node) {
    tessera::require(node.mask && node.mask->type == GGML_TYPE_F16, "mask of the attention",
                     "missing, or of another type", "one of fp16", "take a llama.cpp as that of 2026-11");
    for (std::size_t row = 0; row < tokens_.size(); ++row) {
      state& of = sequences_[tokens_[row].sequence];
      if (of.knows_cells) continue;
      std::vector<std::int64_t> seen;
      const auto* mask =
          reinterpret_cast<const ggml_fp16_t*>(static_cast<const char*>(node.mask->data) + row * node.mask->nb[1]);
      for (std::int64_t cell = 0; cell < node.mask->ne[0]; ++cell) {
        const bool is_new = std::find(cells().begin(), cells().end(), cell) != cells().end();
        if (!is_new && ggml_fp16_to_fp32(mask[cell]) == 0) seen.push_back(cell);
      }
      tessera::require(seen.size() == of.by_cell.size(),
                       "cells that sequence " + std::to_string(tokens_[row].sequence) + " sees", seen.size(),
                       std::to_string(of.by_cell.size()), "change the context's memory through this object alone");
      std::map<llama_pos, std::int64_t> cell_of;
      for (std::size_t i = 0; i < seen.size(); ++i) cell_of[of.by_cell[i]] = seen[i];
      of.cells.clear();
      for (const llama_pos position : of.positions) of.cells.push_back(cell_of.at(position));
      of.knows_cells = true;
    }
  }

  void begin_scores() {
    const state& of = sequences_[observed_];
    slots_.clear();
    for (const std::int64_t cell : of.cells) slots_.push_back(index_t(cell));
    for (index_t i = 0; i < rows_; ++i) slots_.push_back(index_t(cells()[std::size_t(first_row_ + i)]));
    total_.begin(index_t(slots_.size()));
  }

  template <int D>
  void score(const attention_node& node) {
    using tessera::fp16;
    if constexpr (D % 32 == 0) {
      if (node.k->type == GGML_TYPE_Q8_0) return score_cells<tessera::block_int8_elements<fp16>, D>(node);
      if (node.k->type == GGML_TYPE_Q4_0) return score_cells<tessera::block_int4_elements<fp16>, D>(node);
    }
    score_cells<fp16, D>(node);
  }
  /// Adds what the window's queries of one layer look at. Products are the same where queries and keys are turned alike.
  template <class E, int D>
  void score_cells(const attention_node& node) {
    const index_t n = index_t(slots_.size()), window = std::min(options_.window, n);
    using view_type = tessera::kv_view<const E, D, tessera::filtered<tessera::contiguous>>;
    using stored = std::remove_const_t<typename view_type::stored_type>;
    const std::vector<offset_t> begins(std::size_t(node.kv_heads()), 0);  // all heads see the same slots
    tessera::choose_problem<view_type, float> problem;
    view_type& view = problem.view;
    view.k = view.v = static_cast<const stored*>(node.k->data);  // values are not read
    const offset_t bytes = sizeof(stored);
    view.k_strides = view.v_strides = {0, offset_t(node.k->nb[2]) / bytes, offset_t(node.k->nb[1]) / bytes, 1};
    view.sequences = 1;
    view.kv_heads = node.kv_heads();
    view.lengths = &n;
    view.table = {{}, slots_.data(), begins.data(), view.kv_heads};
    const index_t first = n - window;  // slots stand in the order of positions
    problem.first_position = &first;
    problem.rule.scale = node.scale, problem.rule.soft_cap = node.soft_cap;
    problem.q = node.q;
    problem.q.data += offset_t(first_row_ + rows_ - window) * node.q.token_stride;
    problem.q.tokens = window;
    static thread_local tessera::cpu::choose_workspace<D> scratch;
    total_.add(tessera::cpu::score_layer(policy_of(window, n), problem, scratch, workers_));
  }

  using stage = tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_tokens, tessera::per_head>;
  stage policy_of(index_t window, index_t keep) const {
    stage policy;
    policy.scorer.window = window, policy.scorer.pool = options_.pool;
    policy.budget.tokens = keep;
    return policy;
  }

  eviction_options options_;
  tessera::cpu::executor workers_;
  std::map<llama_seq_id, state> sequences_;
  std::vector<token> tokens_;  // of the pass
  llama_seq_id observed_ = -1;
  index_t first_row_ = -1, rows_ = 0;  // of the observed sequence
  std::vector<index_t> slots_;         // cells of the observed sequence, by position
  tessera::cpu::model_scores<> total_;
  std::int64_t attended_ = 0;
};

}  // namespace tessera_llama
