// Saving and loading a sequence of a cache on the GPU, of Llama-3.1-8B's shape: beside a plain copy of as many bytes,
// beside the file system, and what steps of another sequence take meanwhile. bf16; medians, whole calls.
//
//   bench_saves [CONTEXT] [BUDGET] [LAYERS] [ROUNDS] [FILE]   131072, 13107, 32, 9 and saved.bin unless given
//
// copy         of as many bytes between the device and page-locked memory
// save, load   to page-locked memory and back: until the host has the call back, until the bytes are there
// steps        of a sequence of 1,024 tokens, alone and while a save is under way on another stream
// file         as many bytes from memory to FILE and back, until the disk has them; and `save` to FILE, `load` from it
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cache_rows.cuh"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/snapkv.hpp"

namespace {

using namespace tessera;

using cache_bench::chunk_tokens, cache_bench::dim, cache_bench::kv_heads, cache_bench::q_heads;
using cache_bench::median, cache_bench::rows;
constexpr index_t other_tokens = 1024;

using clock = std::chrono::steady_clock;
double elapsed_ms(clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(clock::now() - begun).count();
}
template <class Call>
double timed(int rounds, const Call& call) {
  std::vector<double> all;
  for (int i = 0; i < rounds + 1; ++i) {
    const auto begun = clock::now();
    call();
    if (i > 0) all.push_back(elapsed_ms(begun));
  }
  return median(all);
}

/// A file that is written and read whole, past the operating system's own cache where it allows that.
class file {
 public:
  file(const std::string& name, bool writes)
      : name_(name),
        handle_(writes ? ::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600) : ::open(name.c_str(), O_RDONLY)) {
    require(handle_ >= 0, "file", name, "one that can be opened", "pass another FILE");
  }
  file(const file&) = delete;
  file& operator=(const file&) = delete;
  ~file() { ::close(handle_); }
  void write(const void* data, std::size_t bytes) const {
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
      const ssize_t count = ::write(handle_, from, bytes);
      require(count > 0, "file", name_, "one with room", "pass another FILE");
      from += count, bytes -= std::size_t(count);
    }
  }
  std::size_t read(void* data, std::size_t bytes) const {
    std::size_t had = 0;
    while (had < bytes) {
      const ssize_t count = ::read(handle_, static_cast<char*>(data) + had, bytes - had);
      if (count <= 0) break;
      had += std::size_t(count);
    }
    return had;
  }
  void settle() const { ::fsync(handle_); }

 private:
  std::string name_;
  int handle_;
};

rows_view<const bf16> part(const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens) {
  return nhd_rows<const bf16>(all.data(), tokens, heads, dim, 1);
}

template <class Method>
void measure(const char* name, Method method, index_t context, index_t layers, int rounds, const std::string& path) {
  const rows given;
  cuda::cache_options sizes;
  sizes.sequences = 3;
  sizes.tokens = context + 64;
  sizes.rows = offset_t(layers) * kv_heads * (offset_t(context) + 3 * method.budget() + 4096);
  cuda::cache<Method, bf16> kv(model_shape{layers, q_heads, kv_heads}, method, sizes);
  cudaStream_t steps{}, copies{};
  for (cudaStream_t* stream : {&steps, &copies})
    cuda::check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto wait = [](cudaStream_t stream) { cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); };
  const auto written = [&](index_t tokens) {
    const index_t id = kv.open(steps);
    for (index_t done = 0; done < tokens; done += chunk_tokens) {
      const index_t count = std::min(chunk_tokens, tokens - done);
      for (index_t layer = 0; layer < layers; ++layer)
        kv.prefill(layer, id, part(given.q, q_heads, std::min(count, method.queries_needed(count))),
                   part(given.k, kv_heads, count), part(given.k, kv_heads, count), steps);
    }
    kv.end_prefill(id, steps);
    wait(steps);
    return id;
  };
  const index_t id = written(context), other = written(other_tokens);
  const auto step = [&] {
    const batch now = kv.prepare_step({other}, 1, steps);
    kv.begin_step(now, steps);
    for (index_t layer = 0; layer < layers; ++layer)
      kv.decode(layer, now, part(given.q, q_heads, 1), part(given.k, kv_heads, 1), part(given.k, kv_heads, 1),
                nhd_rows(given.out.data(), 1, q_heads, dim), {}, steps);
    wait(steps);
  };

  cuda::saved_sequence saved;
  kv.save(id, saved, copies);
  const std::size_t bytes = saved.bytes();
  saved.wait();
  std::printf("%-12s %.1f MB saved, of %.1f MB of rows and columns\n", name, double(bytes) / 1e6,
              double(kv.bytes(id)) / 1e6);
  double to_host = 0, to_device = 0;
  {
    const cuda::pinned_buffer<std::byte> host(bytes);
    const cuda::device_buffer<std::byte> device(bytes);
    const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
      return timed(rounds, [&] {
        cuda::check(cudaMemcpyAsync(to, from, bytes, kind, copies), "cudaMemcpyAsync");
        wait(copies);
      });
    };
    to_host = copy(host.data(), device.data(), cudaMemcpyDeviceToHost);
    to_device = copy(device.data(), host.data(), cudaMemcpyHostToDevice);
  }
  std::vector<double> called;
  const double save = timed(rounds, [&] {
    const auto begun = clock::now();
    kv.save(id, saved, copies);
    called.push_back(elapsed_ms(begun));
    saved.wait();
  });
  const double load = timed(rounds, [&] {
    const index_t back = kv.load(saved, copies);
    wait(copies);
    kv.close(back, copies);
  });
  std::printf("%-12s save %.2f ms (call %.2f), copy %.2f ms: %.3f; load %.2f ms, copy %.2f ms: %.3f\n", name, save,
              median(called), to_host, save / to_host, load, to_device, load / to_device);

  const double alone = timed(rounds * 4, step);
  std::vector<double> beside;
  for (int round = 0; round < rounds; ++round) {
    kv.save(id, saved, copies);
    while (!saved.has_arrived()) {
      const auto begun = clock::now();
      step();
      if (!saved.has_arrived()) beside.push_back(elapsed_ms(begun));
    }
  }
  std::printf("%-12s step of another sequence %.3f ms, while a save is under way %.3f ms (%zu of them)\n", name, alone,
              beside.empty() ? 0 : median(beside), beside.size());

  if (path.empty()) return;
  std::vector<char> memory(bytes);
  std::size_t read = 0;
  saved.write([&](const void* data, std::size_t count) {
    std::memcpy(memory.data() + read, data, count);
    read += count;
  });
  const int few = std::max(1, rounds / 3);
  const double raw_write = timed(few, [&] {
    const file to(path, true);
    to.write(memory.data(), bytes);
    to.settle();
  });
  const double raw_read = timed(few, [&] { (void)file(path, false).read(memory.data(), bytes); });
  const double save_file = timed(few, [&] {
    const file to(path, true);
    kv.save(id, [&](const void* data, std::size_t count) { to.write(data, count); }, copies);
    to.settle();
  });
  const double load_file = timed(few, [&] {
    const file from(path, false);
    const index_t back = kv.load([&](void* data, std::size_t count) { return from.read(data, count); }, copies);
    wait(copies);
    kv.close(back, copies);
  });
  std::remove(path.c_str());
  std::printf("%-12s file: save %.1f ms, as many bytes %.1f ms: %.3f; load %.1f ms, as many bytes %.1f ms: %.3f\n",
              name, save_file, raw_write, save_file / raw_write, load_file, raw_read, load_file / raw_read);
}

}  // namespace

int main(int count, char** arguments) try {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(arguments[i]) : otherwise; };
  const index_t context = number(1, 131072), budget = number(2, 13107), layers = number(3, 32);
  const int rounds = number(4, 9);
  const std::string path = count > 5 ? arguments[5] : "saved.bin";
  require(context >= 1 && budget >= 64 && layers >= 1 && rounds >= 1, "arguments", count - 1,
          "positive numbers, the budget 64 or more", "bench_saves [CONTEXT] [BUDGET] [LAYERS] [ROUNDS] [FILE]");
  std::printf("%d tokens at a budget of %d, %d layers, %d rounds\n", int(context), int(budget), int(layers), rounds);
  const auto measured = [&](const char* name, auto method, const std::string& file) {
    method.set_budget(budget);
    measure(name, method, context, layers, rounds, file);
  };
  measured("runs", snapkv<bf16, dim>{}, path);
  measured("fixed_pages", snapkv<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>{}, "");
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
