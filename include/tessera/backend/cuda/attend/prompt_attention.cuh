// The attention of a recipe's prompts on the device: over everything, or along the lines of its prefill policy.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/prompt/prompt_lines.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../recipe.hpp"
#include "../choose/lines/choose_lines.cuh"
#include "attention.cuh"
#include "prefill/line_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Adds the bits of a chunk's columns to those of all prompts of the conversation. blockIdx.y is a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads) add_columns_entry(line_tables chunk, std::uint32_t* to, index_t words) {
  const index_t word = index_t(blockIdx.x * Threads + threadIdx.x), q_head = blockIdx.y;
  if (word < (min)(words, chunk.words)) to[offset_t(q_head) * words + word] |= chunk.vertical_of(q_head)[word];
}

}  // namespace detail

/// Attends everything. Both kinds have these calls:
///   open(id, stream)                                               begins an empty sequence
///   copy(from, to, stream)                                         copies the columns that another one's prompts left
///   transfer(id, next, archive, stream)                            saves these columns, or loads them
///   attend(owner, recipe, problem, first, attention, stream)       a chunk's rows, the first at position `first`
///   columns(layer)                                                 the columns that prompts leave for steps
///   trace(on), lines(owner)                                        the lines of the last chunk that was traced
template <class Recipe, class View, class Out, bool ChoosesLines = Recipe::prefill_type::chooses_lines>
class prompt_attending {
 public:
  prompt_attending(const Recipe&, const model_shape&, const cache_options&, const device_info&) {}
  void open(index_t, cudaStream_t) {}
  void copy(index_t, index_t, cudaStream_t) {}
  template <class Next, class Archive>
  void transfer(index_t, const Next&, Archive&, cudaStream_t) {}
  joined_columns columns(index_t) const { return {}; }
  offset_t bytes_of_layer() const { return 0; }
  template <class Attention>
  void attend(sequence_layer, const Recipe&, const prefill_problem<View, Out>& problem, index_t,
              const Attention& attention, cudaStream_t stream) {
    attention.prompt(problem, stream);
  }
  void trace(bool) {}
  const prompt_lines& lines(sequence_layer) const { return none_; }

 private:
  prompt_lines none_;
};

/// Attends along lines, chosen anew for every chunk. All layers share one set of tables, because calls follow each
/// other on a stream.
/// Memory   tables and scratch of the choice for `options.tokens` positions. If decoding reads columns, also one bit
///          per token for every layer, sequence and query head. A conversation that drops tokens may become longer: the
///          tables are then made anew, twice as large, in a call that allocates and waits for the device.
template <class Recipe, class View, class Out>
class prompt_attending<Recipe, View, Out, true> {
  using pattern_type = typename Recipe::prefill_type;
  static_assert(check_device_prefill<pattern_type>());

  struct tools {
    choose_lines<pattern_type, View> choose;
    device_buffer<unsigned char> scratch;
    tools(const model_shape& shape, index_t positions, index_t rows, const device_info& device)
        : choose(shape.kv_heads, shape.q_heads, positions, rows, device), scratch(choose.workspace_bytes()) {}
  };

 public:
  prompt_attending(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                   const device_info& device)
      : shape_(shape),
        device_(device),
        attend_(shape.kv_heads, shape.q_heads, device),
        scratch_(attend_.workspace_bytes()),
        sequences_(options.sequences),
        words_(adds_to_reading(recipe) ? ceil_div(options.tokens, 32) : 0),
        columns_(std::size_t(shape.layers) * std::size_t(options.sequences) * std::size_t(shape.q_heads) *
                 std::size_t(words_)),
        lines_(shape.layers) {
    require(!adds_slashes(recipe.prefill), "lines", "both", "off or vertical on a GPU",
            "pass lines vertical, or use the backend on the CPU, whose steps read slash lines too");
    lines_.open(options.sequences - 1);
    recipe.prefill.sample(0, options.tokens, sampled_);  // the longest chunk has the most rows
    max_rows_ = index_t(sampled_.size());
    tools_.make(shape_, options.tokens, max_rows_, device_);
  }

  void open(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      lines_[sequence_layer{layer, id}] = {};
      if (words_ == 0) continue;
      check(cudaMemsetAsync(columns_of({layer, id}), 0, std::size_t(shape_.q_heads) * std::size_t(words_) * 4, stream),
            "cudaMemsetAsync");
    }
  }
  void copy(index_t from, index_t to, cudaStream_t stream) {
    for (index_t layer = 0; words_ > 0 && layer < shape_.layers; ++layer)
      copy_on_device(columns_of({layer, to}), columns_of({layer, from}), std::size_t(shape_.q_heads * words_), stream);
  }
  /// Columns are lists of numbers in an archive, as the CPU has them. Waits for the stream.
  template <class Next, class Archive>
  void transfer(index_t id, const Next& next, Archive& archive, cudaStream_t stream) {
    host_vector<std::uint32_t> bits(std::size_t(shape_.q_heads) * std::size_t(words_));
    const auto move = [&](std::uint32_t* device) {
      check(Archive::loads ? cudaMemcpyAsync(device, bits.data(), bits.size() * 4, cudaMemcpyHostToDevice, stream)
                           : cudaMemcpyAsync(bits.data(), device, bits.size() * 4, cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    };
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      index_t heads = words_ > 0 ? shape_.q_heads : 0, slashes = 0;
      archive.number(heads);
      archive.require(heads == 0 || (heads == shape_.q_heads && words_ > 0), "with lines of other heads");
      std::fill(bits.begin(), bits.end(), 0u);
      if (!Archive::loads && heads > 0) move(columns_of({layer, id}));
      for (index_t head = 0; head < heads; ++head) {
        std::uint32_t* const own = bits.data() + offset_t(head) * words_;
        const index_t end = (std::min)(next(layer), words_ * 32);
        host_vector<index_t> lines;
        for (index_t i = 0; !Archive::loads && i < end; ++i) {
          if (own[i / 32] >> i % 32 & 1) lines.push_back(i);
        }
        index_t count = index_t(lines.size());
        archive.number(count);
        archive.require(count >= 0 && count <= end, "with more lines than tokens");
        lines.resize(std::size_t(count));
        transfer_ascending(lines.data(), count, end, archive);
        for (const index_t i : lines) own[i / 32] |= 1u << i % 32;
      }
      if (Archive::loads && heads > 0) move(columns_of({layer, id}));
      archive.number(slashes);
      archive.require(slashes == 0, "with slash lines, which a GPU does not read");
    }
  }
  joined_columns columns(index_t layer) const { return {words_ > 0 ? columns_of({layer, 0}) : nullptr, words_}; }
  offset_t bytes_of_layer() const { return offset_t(shape_.q_heads) * words_ * 4; }

  template <class Attention>
  void attend(sequence_layer owner, const Recipe& recipe, const prefill_problem<View, Out>& problem, index_t first,
              const Attention&, cudaStream_t stream) {
    if (problem.q.tokens == 0) return;
    const index_t next = first + problem.q.tokens;
    if (!tools_ || next > (*tools_).choose.positions()) {
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the old tables may still be read
      tools_.make(shape_, tools_ ? (std::max)(next, 2 * (*tools_).choose.positions()) : next, max_rows_, device_);
    }
    sampled_.clear();
    recipe.prefill.sample(first, next, sampled_);
    const line_tables tables = (*tools_).choose.run(recipe.prefill, {problem.view, problem.q, first, problem.rule},
                                                    sampled_, (*tools_).scratch.data(), stream);
    // The scratch of the choice is no longer needed here.
    attend_.run(problem, tables, scratch_.data(), stream, {(*tools_).scratch.data(), (*tools_).scratch.bytes()});
    if (words_ > 0) {
      const dim3 grid{unsigned(ceil_div(words_, 128)), unsigned(shape_.q_heads)};
      detail::add_columns_entry<128><<<grid, 128, 0, stream>>>(tables, columns_of(owner), words_);
      check(cudaGetLastError(), "launch of add_columns");
    }
    if (tracing_) lines_[owner] = downloaded_lines(problem.view, tables, first, next);
  }

  void trace(bool on) { tracing_ = on; }
  const prompt_lines& lines(sequence_layer owner) const { return lines_[owner]; }

 private:
  static bool adds_to_reading([[maybe_unused]] const Recipe& recipe) {
    if constexpr (lasting_pattern<pattern_type>) return recipe.prefill.adds_to_reading();
    return false;
  }
  std::uint32_t* columns_of(sequence_layer owner) const {
    return columns_.data() + (offset_t(owner.layer) * sequences_ + owner.id) * shape_.q_heads * words_;
  }

  /// Downloads the tables as host lines. Synchronises.
  prompt_lines downloaded_lines(const View& view, const line_tables& tables, index_t first, index_t next) const {
    prompt_lines result;
    result.first = first, result.next = next, result.dense_from = next - tables.dense_rows;
    result.rows = sampled_;
    const auto counts = downloaded(tables.column_counts, std::size_t(shape_.q_heads));
    for (index_t q_head = 0; q_head < shape_.q_heads; ++q_head) {
      line_set set;
      const auto slash = downloaded(tables.slash_of(q_head), std::size_t(tables.words));
      for (index_t distance = 0; distance < next; ++distance) {
        const index_t bit = tables.positions() - 1 - distance;
        if (slash[std::size_t(bit / 32)] >> bit % 32 & 1) set.slash.push_back(distance);
      }
      set.vertical = downloaded(tables.columns_of(q_head), std::size_t(counts[std::size_t(q_head)]));
      if (view.positions && !set.vertical.empty()) {
        const index_t kv_head = q_head / (shape_.q_heads / shape_.kv_heads);
        const offset_t row = view.position_begin ? downloaded(view.position_begin + kv_head, 1)[0]
                                                 : kv_head * view.position_strides.head;
        const auto positions = downloaded(view.positions + row, std::size_t(set.vertical.back()) + 1);
        for (index_t& slot : set.vertical) slot = positions[std::size_t(slot)];
      }
      result.heads.push_back(std::move(set));
    }
    return result;
  }

  model_shape shape_;
  device_info device_;
  line_attention<View, Out> attend_;
  device_buffer<unsigned char> scratch_;
  made_on_demand<tools> tools_;
  index_t max_rows_ = 0;
  host_vector<index_t> sampled_;
  index_t sequences_, words_;             // words of a row of columns; 0: they are not read
  device_buffer<std::uint32_t> columns_;  // [layers, sequences, q_heads, words], by entry: those of all prompts
  bool tracing_ = false;
  sequence_table<prompt_lines> lines_;  // of the last chunk that was traced
};

}  // namespace cuda
TESSERA_NAMESPACE_END
