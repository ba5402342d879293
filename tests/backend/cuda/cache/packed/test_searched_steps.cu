// A long answer with a cache on the device that searches strategies: no step waits, the host's memory is bounded, and the answers are those of
// strategies that are found at once. TESSERA_TEST_SCALE=10 is an answer of 20,000 tokens.
#include <algorithm>
#include <chrono>
#include <thread>

#include "searched_conversation.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace gpu_test::searched;

namespace {

/// Keeps the device busy while the host prepares a step, so that times between events are the device's.
__global__ void spin(long long clocks) {
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

struct step_times {
  std::vector<float> plain, packing, swapping;
  static double at(std::vector<float> all, double share) {
    if (all.empty()) return 0;
    std::sort(all.begin(), all.end());
    return double(all[std::size_t(share * double(all.size() - 1))]) * 1e3;
  }
};

}  // namespace

TEST_CASE("no step of a long answer waits for a search, and what rows wait in is bounded", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  const index_t steps = index_t(scaled(2000, 100)), least = steps >= 20000 ? 2048 : steps >= 2000 ? 256 : 64;
  const index_t prompt = std::min(512, 2 * least);
  mosaic recipe = searching(least);
  recipe.layout.rows.strategy.reference = least;
  recipe.layout.rows.segment = steps >= 20000 ? 4 * least : prompt;  // rows join the prompt's basis at once
  std::vector<std::vector<float>> answers;
  std::vector<index_t> swaps;
  step_times times;
  {
    searched_conversation threaded(recipe, steps, prompt);
    cudaEvent_t begin, end;
    cuda::check(cudaEventCreate(&begin), "cudaEventCreate"), cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    for (index_t i = 0; i < steps; ++i) {
      // A short answer pauses: on an idle machine the rest of 2,000 steps takes no longer than the first search, which begins at 1,024.
      for (int ms = 0; steps < 20000 && i == steps * 3 / 4 && threaded.report().searching && ms < 60000; ++ms)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const index_t searched = threaded.report().searched;
      const bool packs = threaded.tokens % 32 == 0;
      threaded.step(
          true,
          [&] {
            spin<<<1, 1, 0, threaded.stream>>>(200000);  // 0.1 ms
            cuda::check(cudaEventRecord(begin, threaded.stream), "cudaEventRecord");
          },
          [&] { cuda::check(cudaEventRecord(end, threaded.stream), "cudaEventRecord"); });
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
      const bool swapped = threaded.report().searched > searched;
      if (swapped) swaps.push_back(i);
      if (i > 0) (swapped ? times.swapping : packs ? times.packing : times.plain).push_back(milliseconds);
      answers.push_back(threaded.out.get());
    }
    cudaEventDestroy(begin), cudaEventDestroy(end);
    const double median = step_times::at(times.plain, 0.5), late = step_times::at(times.plain, 0.999);
    std::printf(
        "%d steps, %d searched, %d kept, %d segments; us without packing: median %.1f, 99.9th percentile %.1f, most "
        "%.1f; with: "
        "median %.1f, most %.1f; swaps: most %.1f\n",
        int(steps), int(threaded.report().searched), int(threaded.report().unchanged), int(threaded.segments(0).size()),
        median, late, step_times::at(times.plain, 1), step_times::at(times.packing, 0.5),
        step_times::at(times.packing, 1), step_times::at(times.swapping, 1));
    // What other programs do on the GPU shows in single steps: the long run is for one that is alone.
    if (steps >= 20000) CHECK(late < 1.3 * median);
    if (steps >= 2000) CHECK(threaded.report().searched >= 1);  // a short answer may end before one begins
    CHECK(threaded.report().problem.empty());
    // Rows that wait on the host are those of one segment that is open and of one that is searched.
    const offset_t row = layers * kv_heads * 2 * dim * offset_t(sizeof(bf16));
    CHECK(threaded.held.bytes(0) <= threaded.tokens * row + 2 * recipe.layout.rows.segment * row);
  }
  searched_conversation again(recipe, steps, prompt);
  const auto worker = std::make_shared<at_once>();
  again.held.search_on(worker);
  int wrong = 0;
  for (index_t i = 0; i < steps; ++i) {
    if (std::binary_search(swaps.begin(), swaps.end(), i)) worker->publish();
    again.step();
    wrong += !same_bits(again.out.get(), answers[std::size_t(i)]);
  }
  CHECK(wrong == 0);
  CHECK(again.report().searched == index_t(swaps.size()));
}
