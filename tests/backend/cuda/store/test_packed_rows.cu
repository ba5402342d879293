// Packed rows made on the GPU: second moments, bases, and rows, against double on the host.
#include "backend/cuda/store/packed_case.hpp"
#include "catch.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// [dim, dim] of eigenvectors' residuals: the largest |A v - l v| over the trace, the largest |v_i . v_j - (i == j)|,
/// and whether eigenvalues fall and signs are as promised.
struct basis_errors {
  double residual = 0, orthogonality = 0;
  bool ordered = true, signs = true;
};
basis_errors errors_of(const std::vector<double>& a, const float* basis, int channels, int dim) {
  basis_errors errors;
  double trace = 1e-30, before = 1e300;
  for (int i = 0; i < dim; ++i) trace += a[std::size_t(i * dim + i)];
  for (int c = 0; c < channels; ++c) {
    const float* v = basis + offset_t(c) * dim;
    numbers av(std::size_t(dim), 0.0);
    double value = 0;
    int top = 0;
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) av[std::size_t(i)] += a[std::size_t(i * dim + j)] * double(v[j]);
      value += av[std::size_t(i)] * double(v[i]);
      if (std::abs(v[i]) > std::abs(v[top])) top = i;
    }
    for (int i = 0; i < dim; ++i) {
      errors.residual = std::max(errors.residual, std::abs(av[std::size_t(i)] - value * double(v[i])) / trace);
    }
    errors.signs = errors.signs && v[top] > 0;
    errors.ordered = errors.ordered && value <= before + 1e-6 * trace;
    before = value;
    for (int other = 0; other <= c; ++other) {
      double dot = other == c ? -1.0 : 0.0;
      for (int i = 0; i < dim; ++i) dot += double(v[i]) * double(basis[offset_t(other) * dim + i]);
      errors.orthogonality = std::max(errors.orthogonality, std::abs(dot));
    }
  }
  return errors;
}

std::vector<float> bases_of(const std::vector<float>& matrices, int count, int channels, int dim,
                            std::vector<index_t>& bad) {
  const cuda::find_bases find(dim, cuda::device_info::current());
  buffer<float> from(matrices), to(std::size_t(count * channels * dim));
  buffer<index_t> not_finite(static_cast<std::size_t>(count));
  buffer<unsigned char> work(find.workspace_bytes(count));
  to.fill(0xff), not_finite.fill(0xff);
  find.run(from.data, offset_t(dim) * dim, count, channels, to.data, not_finite.data, work.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "bases");
  bad = not_finite.get();
  return to.get();
}

template <class T, int D, int Dv>
void check_moments(index_t sequences, index_t heads, index_t first, index_t count) {
  const whole_rows<T, D, Dv> rows(sequences, heads, std::vector<index_t>(std::size_t(sequences), first + count));
  using view_type = cuda::packed_view<typename whole_rows<T, D, Dv>::view_type>;
  using moments = cuda::second_moments<view_type>;
  view_type view;
  view.whole = rows.view();
  const std::size_t lanes = std::size_t(sequences * heads);
  buffer<unsigned char> work(moments::workspace_bytes(index_t(lanes), count));
  work.fill(0xff);
  const float* sums = moments().run(view, first, count, work.data, nullptr);
  const auto got = cuda::downloaded(sums, lanes * moments::lane_floats);
  double worst = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const index_t b = index_t(lane) / heads, h = index_t(lane) % heads;
    for (const bool keys : {true, false}) {
      const int dim = keys ? D : Dv;
      const float* matrix = got.data() + lane * moments::lane_floats + (keys ? 0 : std::size_t(D) * D);
      numbers right(std::size_t(dim) * std::size_t(dim), 0.0);
      for (index_t i = first; i < first + count; ++i) {
        const T* x = keys ? rows.key(b, h, i) : rows.value(b, h, i);
        for (int a = 0; a < dim; ++a) {
          for (int c = 0; c < dim; ++c) right[std::size_t(a * dim + c)] += double(float(x[a])) * double(float(x[c]));
        }
      }
      double trace = 0;
      for (int i = 0; i < dim; ++i) trace += right[std::size_t(i * dim + i)];
      for (std::size_t i = 0; i < right.size(); ++i) {
        worst = std::max(worst, std::abs(double(matrix[i]) - right[i]) / std::max(trace, 1e-30));
      }
    }
  }
  INFO("dims " << D << " " << Dv << " rows " << first << " + " << count);
  CHECK(worst < 2e-6);
}

/// Whether a row holds what its rotated vector promises: so many elements of the largest groups, each rounded once.
void check_row(const unpacked_row& row, const packed_format& format, const numbers& right, int& wrong) {
  index_t kept = 0;
  double least = 1e300, most = 0, size = 0;
  for (const double x : right) size = std::max(size, std::abs(x));
  const double rounding = format.element == as_fp16 ? 1.0 / 1024 : format.element == as_bf16 ? 1.0 / 128 : 1.0 / 8;
  for (index_t g = 0; g < format.groups(); ++g) {
    double energy = 0;
    const bool stays = row.stays[std::size_t(g * format.group)];
    for (index_t c = g * format.group; c < (g + 1) * format.group; ++c) {
      const double x = right[std::size_t(c)], got = row.values[std::size_t(c)];
      energy += x * x;
      kept += stays;
      const double tolerance = format.element == as_int4  ? 0.51 * double(row.scale)
                               : format.element == as_fp8 ? std::abs(x) / 15 + double(row.scale) / 512
                                                          : std::abs(x) * rounding / 1.9 + 1e-6 * size;
      if (stays ? !(std::abs(got - x) <= tolerance + 2e-6 * size) : got != 0) ++wrong;
    }
    if (stays)
      least = std::min(least, energy);
    else
      most = std::max(most, energy);
  }
  if (kept != format.stored_channels) ++wrong;
  if (format.own_bits && most > least * (1 + 1e-4) + 1e-5 * size * size) ++wrong;  // what is dropped is no better
}

/// So many that they are packed by a thread a row.
constexpr index_t many_rows = 8192;

template <class T, int D, int Dv = D>
void check_packing(const segment_plan& plan) {
  INFO("dims " << D << " " << Dv << " rows " << plan.rows << " block " << plan.block << " k " << name_of(plan.k)
               << " v " << name_of(plan.v));
  const index_t heads = 2;
  const whole_rows<T, D, Dv> rows(1, heads, {plan.rows});
  using view_type = cuda::packed_view<typename whole_rows<T, D, Dv>::view_type>;
  std::vector<float> k_bases, v_bases;
  std::vector<index_t> bad;
  if (plan.rotated) {
    for (const bool keys : {true, false}) {
      const int dim = keys ? D : Dv;
      std::vector<float> matrices;
      for (index_t h = 0; h < heads; ++h) {
        for (int i = 0; i < dim * dim; ++i) {
          double sum = 0;
          for (index_t r = 0; r < plan.rows; ++r) {
            const T* x = keys ? rows.key(0, h, r) : rows.value(0, h, r);
            sum += double(float(x[i / dim])) * double(float(x[i % dim]));
          }
          matrices.push_back(float(sum));
        }
      }
      (keys ? k_bases : v_bases) = bases_of(matrices, heads, int(keys ? plan.k.channels : plan.v.channels), dim, bad);
    }
  }
  buffer<float> d_k(k_bases), d_v(v_bases);
  const cuda::encode_rows<view_type> encode(plan.block);
  const auto packed_in = [&](const std::vector<index_t>& pieces, const cuda::segment_memory& memory, index_t more) {
    const auto segment = memory.segment(plan.rotated ? d_k.data : nullptr, plan.rotated ? d_v.data : nullptr);
    buffer<cuda::device_segment> table(std::vector<cuda::device_segment>{segment});
    buffer<index_t> one(std::vector<index_t>{1});
    cuda::encode_problem<view_type> problem;
    problem.view.segments = table.data, problem.view.counts = one.data, problem.view.max_segments = 1;
    problem.view.whole = rows.view();
    for (const index_t piece : pieces) {
      const buffer<index_t> due(std::vector<index_t>(std::size_t(heads), problem.first + piece));  // read on the device
      problem.due = due.data, problem.count = piece + more;
      encode.run(problem, nullptr);
      cuda::check(cudaDeviceSynchronize(), "encoding");
      problem.first += piece;
    }
    CHECK(cuda::downloaded(segment.rows, std::size_t(heads)) == std::vector<index_t>(std::size_t(heads), plan.rows));
    return segment;
  };
  const cuda::segment_memory memory(plan.k, plan.v, plan.block, heads, plan.rows + 3);
  // With room for many rows a thread packs one; few rows are packed by warps.
  const auto segment = packed_in({plan.rows}, memory, plan.rows < 64 ? 3 : many_rows);
  const downloaded_vectors keys(segment.k, heads), values(segment.v, heads);
  int wrong = 0;
  for (index_t h = 0; h < heads; ++h) {
    const float* k_basis = plan.rotated ? k_bases.data() + offset_t(h) * plan.k.channels * D : nullptr;
    const float* v_basis = plan.rotated ? v_bases.data() + offset_t(h) * plan.v.channels * Dv : nullptr;
    numbers sum(std::size_t(plan.k.channels), 0.0);
    for (index_t i = 0; i < plan.rows; ++i) {
      const numbers right = turned(rows.key(0, h, i), k_basis, plan.k.channels, D);
      check_row(keys.row(h, i), plan.k, right, wrong);
      check_row(values.row(h, i), plan.v, turned(rows.value(0, h, i), v_basis, plan.v.channels, Dv), wrong);
      if (plan.block == 0) continue;
      for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += right[c];
      const index_t in_block = i % plan.block + 1;
      if (in_block < plan.block && i + 1 < plan.rows) continue;
      for (double& x : sum) x /= double(in_block);
      check_row(downloaded_vectors(segment.means, heads).row(h, i / plan.block), plan.k, sum, wrong);
      std::fill(sum.begin(), sum.end(), 0.0);
    }
  }
  CHECK(wrong == 0);
  if (plan.rows < 64) return;
  const auto differences = [&](const cuda::device_segment& other) {
    const downloaded_vectors same_keys(other.k, heads), same_values(other.v, heads);
    int differ = 0;
    for (index_t h = 0; h < heads; ++h) {
      for (index_t i = 0; i < plan.rows; ++i) {
        differ += keys.row(h, i).values != same_keys.row(h, i).values;
        differ += values.row(h, i).values != same_values.row(h, i).values;
      }
      for (index_t b = 0; plan.block > 0 && b < ceil_div(plan.rows, plan.block); ++b) {
        differ += downloaded_vectors(segment.means, heads).row(h, b).values !=
                  downloaded_vectors(other.means, heads).row(h, b).values;
      }
    }
    return differ;
  };
  // Piece by piece, as tails come, it is the same to the bit.
  const index_t step = plan.block > 0 ? std::max(1, 32 / plan.block) * plan.block : 32;
  std::vector<index_t> pieces;
  for (index_t left = plan.rows; left > 0; left -= pieces.back()) pieces.push_back(std::min(step, left));
  const cuda::segment_memory other(plan.k, plan.v, plan.block, heads, plan.rows + 3);
  CHECK(differences(packed_in(pieces, other, 3)) == 0);
  // So it is where more segments are packed at once than a launch takes, and in two calls.
  constexpr index_t many = cuda::problem_list<int>::capacity + 3;
  std::vector<std::unique_ptr<cuda::segment_memory>> memories;
  std::vector<cuda::device_segment> made;
  for (index_t i = 0; i < many; ++i) {
    memories.push_back(std::make_unique<cuda::segment_memory>(plan.k, plan.v, plan.block, heads, plan.rows + 3));
    made.push_back(memories.back()->segment(plan.rotated ? d_k.data : nullptr, plan.rotated ? d_v.data : nullptr));
  }
  buffer<cuda::device_segment> table(made);
  buffer<index_t> ones(std::vector<index_t>(std::size_t(many), 1));
  for (const index_t first : {0, step}) {
    std::vector<cuda::encode_problem<view_type>> problems;
    for (index_t i = 0; i < many; ++i) {
      cuda::encode_problem<view_type> problem;
      problem.view.segments = table.data + i, problem.view.counts = ones.data + i, problem.view.max_segments = 1;
      problem.view.whole = rows.view();
      problem.first = first, problem.count = first == 0 ? step : plan.rows - step;
      problems.push_back(problem);
    }
    encode.run(problems.data(), problems.size(), nullptr);
  }
  cuda::check(cudaDeviceSynchronize(), "encoding");
  for (const index_t i : {0, many - 4, many - 3, many - 1}) CHECK(differences(made[std::size_t(i)]) == 0);
}

/// Rows as they are whose energies tie, vanish, overflow or are no numbers: the device packs what the host packs, to
/// the bit.
template <class T, int D>
void check_special_rows(packed_element element, index_t channels, index_t group, index_t kept, bool by_warps) {
  const packed_format format = format_of(element, channels, group, kept);
  INFO("dim " << D << " " << name_of(format) << (by_warps ? " by warps" : " by threads"));
  const index_t count = 150;
  whole_rows<T, D, D> rows(1, 1, {count});
  for (index_t i = 0; i < count; ++i) {
    for (int d = 0; d < D; ++d) {
      const float few = float(draw(-2, 2)), close = 1 + float(draw(0, 3)) / 128;
      const float by_kind[] = {few,
                               0,
                               draw(0, 5) ? few : NAN,
                               draw(0, 9) ? close : infinity,
                               few * 1e-25f,
                               draw(0, 3) ? NAN : few,
                               NAN,
                               close,
                               draw(0, 1) ? few * 1e18f : 1e-3f,
                               1};
      rows.k[std::size_t(i * D + d)] = T(by_kind[i % 10]);
    }
  }
  rows.d_k.set(rows.k);
  const cuda::segment_memory memory(format, format, 0, 1, count);
  const auto segment = memory.segment(nullptr, nullptr);
  buffer<cuda::device_segment> table(std::vector<cuda::device_segment>{segment});
  buffer<index_t> one(std::vector<index_t>{1});
  using view_type = cuda::packed_view<typename whole_rows<T, D, D>::view_type>;
  cuda::encode_problem<view_type> problem;
  problem.view.segments = table.data, problem.view.counts = one.data, problem.view.max_segments = 1;
  buffer<index_t> counts(std::vector<index_t>{count});
  problem.view.whole = rows.view();
  problem.count = by_warps ? count : many_rows, problem.due = counts.data;
  cuda::encode_rows<view_type>(0).run(problem, nullptr);
  cuda::check(cudaDeviceSynchronize(), "encoding");

  const std::size_t words = std::size_t(cuda::bit_words(format)), bytes = std::size_t(format.value_bytes()),
                    stride = std::size_t(cuda::value_stride(format.value_bytes()));
  const auto bits = cuda::downloaded<std::uint32_t>(segment.k.bits, std::size_t(count) * words);
  const auto values = cuda::downloaded(segment.k.values, std::size_t(count) * stride);
  top_groups chooser;
  chooser.group = group;
  int wrong = 0;
  for (index_t i = 0; i < count; ++i) {
    std::vector<float> row(static_cast<std::size_t>(D));
    for (int d = 0; d < D; ++d) row[std::size_t(d)] = float(rows.key(0, 0, i)[d]);
    std::vector<std::uint32_t> right(words, 0);
    chooser.choose(row.data(), format, reinterpret_cast<std::uint8_t*>(right.data()));
    std::vector<std::byte> held(bytes);
    const float scale = pack_row(format, row.data(), reinterpret_cast<const std::uint8_t*>(right.data()), held.data());
    wrong += std::memcmp(bits.data() + std::size_t(i) * words, right.data(), words * 4) != 0;
    std::vector<float> ours(static_cast<std::size_t>(channels)), theirs(ours);
    const auto* own = reinterpret_cast<const std::uint8_t*>(right.data());
    unpack_row(format, own, values.data() + std::size_t(i) * stride, scale, ours.data());
    unpack_row(format, own, held.data(), scale, theirs.data());
    for (std::size_t c = 0; c < ours.size(); ++c)
      wrong += !(ours[c] == theirs[c] || (ours[c] != ours[c] && theirs[c] != theirs[c]));
    if (format.scaled()) wrong += cuda::downloaded<float>(segment.k.scales + i, 1)[0] != scale;
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("second moments of whole rows on the GPU are those of the host in double") {
  if (gpu_missing()) return;
  check_moments<bf16, 128, 128>(2, 2, 0, 100);
  check_moments<fp16, 64, 96>(1, 2, 3, 33);
  check_moments<bf16, 96, 64>(1, 1, 0, 1);
  check_moments<bf16, 256, 256>(1, 1, 5, 70);
  check_moments<bf16, 64, 64>(1, 1, 0, shrunk(9000, 200));  // three pieces
}

TEST_CASE("Jacobi's bases are eigenvectors, orthogonal, in order, and of one sign") {
  if (gpu_missing()) return;
  for (const int dim : {64, 80, 96, 128, 192, 256}) {
    if (dim > 64 && scaled(10) < 10) continue;
    const int count = 3, channels = dim * 3 / 4;
    std::vector<float> matrices;
    std::vector<numbers> exact;
    for (int m = 0; m < count; ++m) {
      // Many rows; as few as a first tail, whose matrix has no full rank; one channel alone.
      const int rows = m == 0 ? 4 * dim : m == 1 ? 32 : 1;
      const auto x = gathered_rows<bf16>(std::size_t(rows), dim);
      numbers sum(std::size_t(dim) * std::size_t(dim), 0.0);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < dim * dim; ++i) {
          sum[std::size_t(i)] +=
              double(float(x[std::size_t(r * dim + i / dim)])) * double(float(x[std::size_t(r * dim + i % dim)]));
        }
      }
      matrices.insert(matrices.end(), sum.begin(), sum.end());
      exact.push_back(std::move(sum));
    }
    std::vector<index_t> bad;
    const auto bases = bases_of(matrices, count, channels, dim, bad);
    for (int m = 0; m < count; ++m) {
      const auto errors = errors_of(exact[std::size_t(m)], bases.data() + offset_t(m) * channels * dim, channels, dim);
      INFO("dim " << dim << " matrix " << m << " residual " << errors.residual << " orthogonality "
                  << errors.orthogonality);
      CHECK(errors.residual < 2e-6);
      CHECK(errors.orthogonality < 2e-5);
      CHECK(errors.ordered);
      CHECK(errors.signs);
      CHECK(bad[std::size_t(m)] == 0);
    }
    CHECK(same_bits(bases, bases_of(matrices, count, channels, dim, bad)));
  }
}

TEST_CASE("a matrix with NaN or infinity is told apart, and its neighbours are whole") {
  if (gpu_missing()) return;
  const int dim = 64;
  std::vector<float> matrices(3 * 64 * 64, 0.0f);
  for (int m = 0; m < 3; ++m) {
    for (int i = 0; i < dim; ++i) matrices[std::size_t(m * dim * dim + i * dim + i)] = float(dim - i);
  }
  matrices[5] = NAN, matrices[2 * 64 * 64 + 7 * 64 + 7] = infinity;
  std::vector<index_t> bad;
  const auto bases = bases_of(matrices, 3, dim, dim, bad);
  CHECK(bad == std::vector<index_t>{1, 0, 1});
  for (const float x : bases) CHECK(x - x == 0);
  for (int i = 0; i < dim; ++i) CHECK(bases[std::size_t(dim * dim + i * dim + i)] == 1);
}

TEST_CASE("rows packed on the GPU hold the largest elements of their rotated vectors") {
  if (gpu_missing()) return;
  check_packing<bf16, 128>({format_of(as_bf16, 96, 1, 32), format_of(as_bf16, 96, 1, 32), 8, shrunk(200, 72)});
  check_packing<bf16, 128>({format_of(as_bf16, 96, 2, 32), format_of(as_bf16, 96, 4, 16), 4, 36});
  check_packing<fp16, 64>({format_of(as_fp16, 48, 1, 16), format_of(as_fp16, 64, 1, 64), 16, 33});
  check_packing<bf16, 128>({format_of(as_fp8, 96, 1, 32), format_of(as_int4, 96, 1, 32), 8, 40});
  check_packing<bf16, 96>({format_of(as_int4, 90, 1, 25), format_of(as_fp8, 72, 4, 24), 0, 20});
  check_packing<bf16, 256>({format_of(as_bf16, 192, 1, 64), format_of(as_bf16, 256, 1, 256), 8, 40});
  check_packing<fp16, 128, 64>({format_of(as_fp16, 128, 1, 32), format_of(as_fp16, 48, 2, 16), 12, 1});
  check_packing<bf16, 64>({format_of(as_bf16, 64, 1, 38), format_of(as_bf16, 64, 1, 64), 8, 100, false});
}

TEST_CASE("rows of ties, zeros, infinities and NaN are packed on the GPU as on the host") {
  if (gpu_missing()) return;
  for (const bool by_warps : {true, false}) {
    check_special_rows<bf16, 128>(as_bf16, 96, 1, 32, by_warps);
    check_special_rows<bf16, 128>(as_int4, 128, 2, 64, by_warps);
    check_special_rows<fp16, 64>(as_fp16, 64, 4, 16, by_warps);
    check_special_rows<bf16, 96>(as_fp8, 72, 1, 71, by_warps);
    check_special_rows<fp16, 128>(as_fp16, 40, 1, 40, by_warps);
    check_special_rows<bf16, 256>(as_bf16, 256, 1, 1, by_warps);
    check_special_rows<bf16, 64>(as_bf16, 33, 1, 20, by_warps);
  }
}

TEST_CASE("packing refuses blocks that no thread block holds") {
  if (gpu_missing()) return;
  using view_type = cuda::packed_view<whole_rows<bf16, 64, 64>::view_type>;
  CHECK_THROWS_WITH(cuda::encode_rows<view_type>(129), contains("block is 129; expected at most 128"));
}
