// MosaicKV on the device: a decode step over packed rows, by stages; bases and packing of a prompt; a full tail.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/read/means/decode_blocks.cuh"
#include "tessera/backend/cuda/store/packed/detail/bases/find_bases.cuh"
#include "tessera/backend/cuda/store/packed/detail/encode_rows.cuh"
#include "tessera/backend/cuda/store/packed/segment_memory.cuh"
#include "tessera/runtime/rotation.hpp"

namespace gpu_bench::of_packed {
namespace {

using whole_view = kv_view<const bf16, head_dim>;
using view_type = cuda::packed_view<whole_view>;
constexpr index_t tail = 32, block = 8, layers = 32;

enum class part { rotate, choose, attend, step };

packed_format format_of(packed_element element, index_t group) { return {element, 96, group, 32, true}; }
double row_bytes(const packed_format& format) { return double(format.row_bytes()); }

/// How a segment is packed; segments of a sequence take turns.
struct packing {
  packed_format format;
  index_t rows_of_block = block;
};
using packings = std::vector<packing>;
/// What a search may make of four segments.
packings searched() {
  const auto of = [](index_t group, index_t kept) {
    return packed_format{packed_element::bf16, 96, group, kept, true};
  };
  return {{of(1, 32), 8}, {of(4, 16), 16}, {of(2, 48), 4}, {of(2, 32), 16}};
}

whole_view rows_of(const bf16* from, index_t sequences, index_t tokens, const index_t* lengths) {
  whole_view view;
  view.k = from;
  view.v = from + offset_t(sequences) * kv_heads * tokens * head_dim;
  view.k_strides = {offset_t(kv_heads) * tokens * head_dim, offset_t(tokens) * head_dim, head_dim, 1};
  view.v_strides = view.k_strides;
  view.sequences = sequences, view.kv_heads = kv_heads;
  view.lengths = lengths, view.length_strides = {1, 0};
  return view;
}

/// Orthogonal rows, the same for every head: reflections of the unit vectors by a random one, spread as
/// the library spreads them.
std::vector<float> bases(index_t channels) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> axis(head_dim), all;
  float size = 0;
  for (float& x : axis) x = normal(random), size += x * x;
  for (index_t h = 0; h < kv_heads; ++h) {
    for (index_t c = 0; c < channels; ++c) {
      for (index_t d = 0; d < head_dim; ++d) all.push_back((c == d ? 1.0f : 0.0f) - 2 * axis[c] * axis[d] / size);
    }
    spread_channels(all.data() + offset_t(h) * channels * head_dim, channels, head_dim);
  }
  return all;
}

/// What a benchmark's rows are: a segment's tokens, and whether channels fall by exp(-c / 16), as those of real rows in
/// their basis do.
struct row_shape {
  index_t segment = 65536;
  bool falls = false;
};

__global__ void __launch_bounds__(256) let_channels_fall_entry(bf16* rows, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t(256) + threadIdx.x; i < count; i += std::size_t(gridDim.x) * 256)
    rows[i] = bf16(float(rows[i]) * expf(float(i % head_dim) / -16));
}

/// Packed segments of `sequences` sequences of `context` tokens, all made of the same random rows.
struct packed_memory {
  std::vector<std::unique_ptr<cuda::segment_memory>> segments;
  buffer<float> k_basis, v_basis;
  buffer<index_t> counts, tails, first;
  std::unique_ptr<buffer<cuda::device_segment>> table;
  index_t most;

  packed_memory(index_t sequences, index_t context, const packings& ways, const row_shape& shape = {})
      : k_basis(bases(ways[0].format.channels)),
        v_basis(bases(ways[0].format.channels)),
        counts(std::vector<index_t>(std::size_t(sequences), ceil_div(context, shape.segment))),
        tails(std::vector<index_t>(std::size_t(sequences), tail)),
        first(std::vector<index_t>(std::size_t(sequences), context + tail - 1)),
        most(ceil_div(context, shape.segment)) {
    const index_t segment_tokens = shape.segment;
    std::vector<cuda::device_segment> made;
    for (index_t i = 0; i < sequences * most; ++i) {
      const index_t rows = std::min(segment_tokens, context - i % most * segment_tokens);
      const packing& way = ways[std::size_t(i % most) % ways.size()];
      segments.push_back(
          std::make_unique<cuda::segment_memory>(way.format, way.format, way.rows_of_block, kv_heads, rows));
      made.push_back(segments.back()->segment(k_basis.data(), v_basis.data()));
    }
    table = std::make_unique<buffer<cuda::device_segment>>(made);
    const index_t chunk = std::min(context, segment_tokens);
    const std::size_t elements = std::size_t(sequences) * kv_heads * std::size_t(chunk) * head_dim * 2;
    bf16* from = random_rows(elements);
    buffer<bf16> fallen(shape.falls ? elements : 0);
    if (shape.falls) {
      cuda::check(cudaMemcpy(fallen.data(), from, elements * sizeof(bf16), cudaMemcpyDeviceToDevice), "cudaMemcpy");
      let_channels_fall_entry<<<1024, 256, 0, stream()>>>(fallen.data(), elements);
      from = fallen.data();
    }
    for (index_t s = 0; s < most; ++s) {
      const packing& way = ways[std::size_t(s) % ways.size()];
      const cuda::encode_rows<view_type> encode(way.rows_of_block, way.format.channels);
      cuda::encode_problem<view_type> problem;
      problem.view = view(from, sequences, chunk);
      problem.count = std::min(segment_tokens, context - s * segment_tokens);
      problem.segment = s;
      encode.run(problem, stream());
    }
    cuda::check(cudaStreamSynchronize(stream()), "packing");
  }
  view_type view(const bf16* whole, index_t sequences, index_t tokens) const {
    view_type made;
    made.segments = table->data(), made.counts = counts.data(), made.max_segments = most;
    made.whole = rows_of(whole, sequences, tokens, tails.data());
    return made;
  }
};

/// One layer of a batch, `share` of 16 of its tokens read. `alike`: as the operation is told; else blocks are trimmed.
prepared mosaic_step(index_t sequences, index_t context, index_t share, const packings& ways, bool alike, part wanted,
                     const row_shape& shape = {}) {
  const double rows = double(sequences) * kv_heads, read = context * share / 16.0, many = double(ways.size());
  packed_format widest = ways[0].format;
  index_t least_block = block;
  double mean_bytes = 0, pair_bytes = 0, held_bytes = 0;  // of all means, of a row read, of a row stored
  for (const packing& way : ways) {
    const double bytes = row_bytes(way.format);
    if (way.format.value_bytes() > widest.value_bytes()) widest = way.format;
    least_block = std::min(least_block, way.rows_of_block);
    mean_bytes += context / double(way.rows_of_block) * bytes / many;
    pair_bytes += 2 * bytes / many;
    held_bytes += (2 + 1.0 / way.rows_of_block) * bytes / many;
  }
  const double rotations = ceil_div(context, shape.segment) * 96.0 * head_dim * sizeof(float);
  prepared made;
  if (wanted == part::choose || wanted == part::step) made.bytes += rows * mean_bytes;
  if (wanted == part::rotate || wanted == part::step) made.bytes += rows * rotations;
  if (wanted == part::attend || wanted == part::step) {
    made.bytes += rows * (read * pair_bytes + tail * 2.0 * head_dim * sizeof(bf16) + rotations);
  }
  const int sets = input_sets(rows * context * held_bytes);
  struct memory {
    std::vector<std::unique_ptr<packed_memory>> sets;
    buffer<float> out;
    std::vector<std::unique_ptr<buffer<unsigned char>>> work;
  };
  const auto keep = std::make_shared<memory>(std::vector<std::unique_ptr<packed_memory>>{},
                                             std::size_t(sequences) * q_heads * head_dim,
                                             std::vector<std::unique_ptr<buffer<unsigned char>>>{});
  for (int i = 0; i < sets; ++i) keep->sets.push_back(std::make_unique<packed_memory>(sequences, context, ways, shape));
  const index_t most = keep->sets[0]->most;
  using step_type = cuda::decode_blocks<view_type, float>;
  const auto step = std::make_shared<step_type>(
      block_mean{}, whole_blocks{block}, index_t(read), sequences, kv_heads, q_heads, 1, context, most,
      cuda::segment_limits{widest, widest, least_block, alike}, cuda::device_info::current());
  const std::size_t tails = std::size_t(sequences) * kv_heads * tail * head_dim * 2;
  bf16* pool = random_rows(tails + std::size_t(sequences) * q_heads * head_dim);
  const auto problem_of = [=](int set) {
    const packed_memory& one = *keep->sets[std::size_t(set)];
    return cuda::packed_problem<view_type, float>{one.view(pool, sequences, tail),
                                                  nhd_rows<const bf16>(pool + tails, 1, q_heads, head_dim, sequences),
                                                  one.first.data(),
                                                  {},
                                                  nhd_rows(keep->out.data(), 1, q_heads, head_dim, sequences),
                                                  {},
                                                  {},
                                                  1};
  };
  std::vector<cuda::packed_problem<view_type, float>> chosen;
  std::vector<cuda::rotated_rows> rotated;
  for (int i = 0; i < sets; ++i) {
    keep->work.push_back(std::make_unique<buffer<unsigned char>>(step->workspace_bytes()));
    chosen.push_back(problem_of(i));
    rotated.push_back(step->choose(chosen.back(), keep->work.back()->data(), stream()));
  }
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const auto set = std::size_t(i % sets);
    void* work = keep->work[set]->data();
    auto problem = chosen[set];
    if (wanted == part::rotate) step->rotate(problem, work, stream());
    if (wanted == part::choose) step->choose(problem, work, stream());
    if (wanted == part::attend) step->attend(problem, rotated[set], work, stream());
    if (wanted == part::step) step->run(problem, work, stream());
  });
  return made;
}

enum class encoding_part { moments, bases, all_bases, rows, tail };

/// One layer of one sequence: `tokens` rows become a segment.
prepared encode(index_t tokens, encoding_part wanted) {
  const packed_format format = format_of(packed_element::bf16, 1);
  struct memory {
    std::unique_ptr<packed_memory> packed;
    cuda::second_moments<view_type> moments;
    cuda::find_bases find;
    buffer<unsigned char> sums, work;
    buffer<float> found;
    buffer<index_t> bad;
  };
  const auto device = cuda::device_info::current();
  const cuda::find_bases find(head_dim, device);
  const double rows = double(kv_heads) * tokens, given = rows * 2 * head_dim * sizeof(bf16);
  const int sets = input_sets(given), count = launches(given, sets);
  const index_t room = wanted == encoding_part::tail ? tokens * count : tokens;  // one tail comes behind the other
  const auto keep = std::make_shared<memory>(
      std::make_unique<packed_memory>(1, room, packings{{format}}), cuda::second_moments<view_type>{}, find,
      cuda::second_moments<view_type>::workspace_bytes(kv_heads, tokens), find.workspace_bytes(layers * kv_heads * 2),
      std::size_t(layers) * kv_heads * 2 * 96 * head_dim, std::size_t(layers) * kv_heads * 2);
  prepared made;
  if (wanted == encoding_part::moments) made.bytes = given, made.flops = rows * 4 * head_dim * head_dim;
  if (wanted == encoding_part::rows || wanted == encoding_part::tail) {
    made.bytes = given + rows * (2 + 1.0 / block) * row_bytes(format);
    made.flops = rows * 4 * head_dim * 96;
  }
  const std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim * 2;
  bf16* pool = random_rows(elements * std::size_t(sets));
  const cuda::encode_rows<view_type> packing(block, format.channels);
  const auto view_of = [=](int set) { return keep->packed->view(pool + elements * std::size_t(set), 1, tokens); };
  keep->moments.run(view_of(0), 0, tokens, keep->sums.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(count, [&](int i) {
    const view_type view = view_of(i % sets);
    const auto* sums = reinterpret_cast<const float*>(keep->sums.data());
    if (wanted == encoding_part::moments) keep->moments.run(view, 0, tokens, keep->sums.data(), stream());
    if (wanted == encoding_part::bases) {  // keys' and values' matrices stand one behind the other
      keep->find.run(sums, offset_t(head_dim) * head_dim, kv_heads * 2, 96, keep->found.data(), keep->bad.data(),
                     keep->work.data(), stream());
    }
    if (wanted == encoding_part::all_bases) {  // the same matrix for all: nothing of it depends on memory
      keep->find.run(sums, 0, layers * kv_heads * 2, 96, keep->found.data(), keep->bad.data(), keep->work.data(),
                     stream());
    }
    if (wanted == encoding_part::rows || wanted == encoding_part::tail) {
      // The segment is written over: its lengths begin at 0 again.
      if (i == 0 || wanted == encoding_part::rows) {
        cuda::check(cudaMemsetAsync(keep->packed->segments[0]->segment().rows, 0, kv_heads * sizeof(index_t), stream()),
                    "cudaMemsetAsync");
      }
      cuda::encode_problem<view_type> problem;
      problem.view = view;
      problem.count = tokens;
      packing.run(problem, stream());
    }
  });
  return made;
}

const int registered = [] {
  const auto cell = [](index_t sequences, const char* name, index_t context, index_t share, const packings& ways,
                       bool alike, const char* kind, const row_shape& shape = {}) {
    const std::string where =
        "mosaickv/B" + std::to_string(sequences) + "/" + name + "/" + (share == 1 ? "6.25" : "12.5") + "/" + kind + "/";
    const auto one = [=](const char* stage, part wanted) {
      add(where + stage, [=] { return mosaic_step(sequences, context, share, ways, alike, wanted, shape); });
    };
    one("rotate", part::rotate), one("choose", part::choose), one("attend", part::attend), one("step", part::step);
  };
  const packings bf{{format_of(packed_element::bf16, 1)}};
  cell(4, "256K", 262144, 1, bf, true, "bf16");
  cell(4, "256K", 262144, 1, {{format_of(packed_element::bf16, 4)}}, true, "bf16_group4");
  cell(4, "256K", 262144, 1, {{format_of(packed_element::fp8, 1)}}, true, "fp8");
  cell(4, "256K", 262144, 1, {{format_of(packed_element::fp8, 4)}}, true, "fp8_group4");
  cell(4, "256K", 262144, 1, {{format_of(packed_element::int4, 1)}}, true, "int4");
  cell(4, "256K", 262144, 2, bf, true, "bf16");
  cell(8, "128K", 131072, 1, bf, true, "bf16");
  cell(1, "256K", 262144, 1, bf, true, "bf16");
  cell(1, "64K", 65536, 1, bf, true, "bf16");
  cell(4, "256K", 262144, 1, bf, false, "bf16_trimmed");
  cell(4, "256K", 262144, 1, bf, true, "bf16_falling", {.falls = true});
  cell(4, "256K", 262144, 1, bf, true, "bf16_64_segments", {.segment = 4096});
  cell(4, "256K", 262144, 1, searched(), false, "searched");
  cell(1, "256K", 262144, 1, searched(), false, "searched");
  add("mosaickv/encode/64K/moments", [] { return encode(65536, encoding_part::moments); });
  add("mosaickv/encode/64K/bases", [] { return encode(65536, encoding_part::bases); });
  add("mosaickv/encode/64K/bases_of_32_layers", [] { return encode(65536, encoding_part::all_bases); });
  add("mosaickv/encode/64K/rows", [] { return encode(65536, encoding_part::rows); });
  add("mosaickv/encode/tail", [] { return encode(tail, encoding_part::tail); });
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_packed
