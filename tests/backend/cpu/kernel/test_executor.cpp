#include "catch.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include <tessera/backend/cpu/kernel/executor.hpp>

#include "support/host/flush_to_zero.hpp"
#include "support/host/forked.hpp"
#include "support/random.hpp"

using namespace tessera;

TEST_CASE("an executor runs every item once, on a worker that it has") {
  for (const int threads : {1, 2, 3, 8}) {
    cpu::executor workers(threads);
    REQUIRE(workers.threads() == threads);
    for (const index_t count : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      std::atomic<int> strangers{0};
      workers.for_each(count, [&](index_t item, int worker) {
        ++runs[std::size_t(item)];
        strangers += worker < 0 || worker >= threads;
      });
      for (const auto& times : runs) REQUIRE(times == 1);
      REQUIRE(strangers == 0);
    }
  }
}

TEST_CASE("an executor takes a negative count for nothing, and small work stays with the caller") {
  cpu::executor workers(3);
  int runs = 0;
  workers.for_each(-1, [&](index_t, int) { ++runs; });
  CHECK(runs == 0);
  workers.for_each(50, [&](index_t, int worker) { runs += worker == 0; }, 1.0);
  CHECK(runs == 50);
}

TEST_CASE("an executor of 0 threads takes the machine's cores") { CHECK(cpu::executor(0).threads() >= 1); }

TEST_CASE("an executor rethrows what an item threw, and works on") {
  for (const int threads : {1, 2, 4}) {
    cpu::executor workers(threads);
    for (index_t round = 0; round < support::scaled(200); ++round) {
      REQUIRE_THROWS_WITH(workers.for_each(40,
                                           [](index_t item, int) {
                                             if (item == 17) throw std::runtime_error("item 17");
                                           }),
                          "item 17");
      std::atomic<index_t> sum{0};
      workers.for_each(40, [&](index_t item, int) { sum += item; });
      REQUIRE(sum == 780);
    }
  }
}

TEST_CASE("an executor can be used thousands of times and destroyed while idle") {
  cpu::executor workers(4);
  std::vector<index_t> out(97);
  for (index_t round = 0; round < support::scaled(3'000); ++round) {
    workers.for_each(97, [&](index_t item, int) { out[std::size_t(item)] = item * round; });
    REQUIRE(std::accumulate(out.begin(), out.end(), index_t(0)) == 4656 * round);
  }
  for (index_t i = 0; i < support::scaled(50); ++i) cpu::executor idle(3);
}

TEST_CASE("threads that call one executor at the same time each get all of their items done, once") {
  cpu::executor workers(3);
  std::atomic<int> wrong{0};
  const auto call = [&] {
    for (index_t round = 0; round < support::scaled(300); ++round) {
      std::vector<int> runs(50), of_worker(3);  // nobody else's
      workers.for_each(50, [&](index_t item, int worker) {
        ++runs[std::size_t(item)];
        of_worker[std::size_t(worker)] = worker;
      });
      for (const int times : runs) wrong += times != 1;
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(call);
  for (auto& one : callers) one.join();
  CHECK(wrong == 0);
}

TEST_CASE("an item may call its own executor") {
  cpu::executor workers(3);
  std::atomic<index_t> sum{0};
  workers.for_each(10, [&](index_t item, int) {
    workers.for_each(10, [&](index_t inner, int worker) { sum += worker == 0 ? item * 10 + inner : 1'000'000; });
  });
  CHECK(sum == 4950);
  CHECK_THROWS_WITH(workers.for_each(10, [](index_t, int) { throw std::runtime_error("an item"); }), "an item");
  sum = 0;
  workers.for_each(40, [&](index_t item, int) { sum += item; });
  CHECK(sum == 780);
}

TEST_CASE("a child of fork() works with its parent's executor on its own thread, and can end it") {
  auto workers = std::make_unique<cpu::executor>(4);
  const auto works = [](cpu::executor& with) {
    index_t sum = 0;  // of one thread
    with.for_each(40, [&](index_t item, int worker) { sum += item + 1000 * worker; });
    return sum == 780;
  };
  for (int trial = 0; trial < support::scaled(20); ++trial) {
    std::atomic<index_t> sum{0};
    workers->for_each(40, [&](index_t item, int) { sum += item; });
    REQUIRE(sum == 780);
    REQUIRE(support::in_a_child([&] { return works(*workers) && workers->threads() == 4 ? 0 : 1; }) == 0);
    REQUIRE(support::in_a_child([&] {
              workers.reset();
              return 0;
            }) == 0);
    if (!support::children_may_start_threads) continue;
    REQUIRE(support::in_a_child([&] {
              cpu::executor own(3);
              std::atomic<index_t> all{0};
              own.for_each(40, [&](index_t item, int) { all += item; });
              return works(*workers) && all == 780 ? 0 : 1;
            }) == 0);
  }
}

TEST_CASE("items run in the default floating-point mode on every thread, and the caller's is as it was") {
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    const auto count_odd = [&](cpu::executor& workers) {
      std::atomic<int> odd{0};
      std::atomic<bool> helped{threads == 1};
      workers.for_each(100, [&](index_t, int worker) {
        odd += !support::keeps_subnormals() || !support::rounds_to_nearest();
        if (worker > 0) helped = true;
        while (!helped) std::this_thread::yield();  // the caller leaves some
      });
      return int(odd);
    };
    const auto early = std::make_unique<cpu::executor>(threads);
    const support::odd_float_mode odd;
    cpu::executor late(threads);
    CHECK(count_odd(*early) == 0);
    CHECK(count_odd(late) == 0);
    CHECK_FALSE(support::rounds_to_nearest());
  }
}

namespace {

/// In a child that may have only so many processes: an executor of 64 threads, put to work. Its exit code.
int work_under_a_limit(rlim_t processes) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // a hang ends here
    const rlimit limit{processes, processes};
    // The limit is no limit for root.
    if ((::getuid() == 0 && ::setuid(65534) != 0) || ::setrlimit(RLIMIT_NPROC, &limit) != 0) ::_exit(77);
    std::atomic<index_t> sum{0};
    int refused = 0, got = 0;
    {
      cpu::executor workers(64);
      workers.for_each(40, [&](index_t item, int) { sum += item; });
      refused = workers.refused();
      got = workers.threads();
    }
    ::_exit(sum == 780 && got >= 1 && got + refused == 64 && refused > 0 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("an executor that gets fewer threads than it asks for works with those, and says how many are missing") {
  for (const rlim_t processes : {0, 1, 4}) {
    CAPTURE(processes);
    const int code = work_under_a_limit(processes);
    if (code == 77) WARN("this user may not limit its processes");
    CHECK((code == 0 || code == 77));
  }
  CHECK(cpu::executor(3).refused() == 0);
}

namespace {

// Threads of an engine that runs every operation on the first `threads` of them at once, as ggml does.
class engine {
 public:
  explicit engine(int count) : left_(count) {
    for (int ith = 0; ith < count; ++ith) threads_.emplace_back([this, ith] { live(ith); });
  }
  ~engine() {
    start([](int, int) {}, 0);
    for (std::thread& one : threads_) one.join();
  }
  void run(const std::function<void(int, int)>& operation, int threads) {
    start(operation, threads);
    while (left_.load() < int(threads_.size())) std::this_thread::yield();
  }

 private:
  void start(std::function<void(int, int)> operation, int threads) {
    operation_ = std::move(operation), nth_ = threads;
    left_ = 0;
    ++round_;
  }
  void live(int ith) {
    for (int seen = 0;;) {
      while (round_.load() == seen) std::this_thread::yield();
      seen = round_.load();
      const int nth = nth_;
      if (ith < nth) operation_(ith, nth);
      ++left_;
      if (nth == 0) return;
    }
  }

  std::vector<std::thread> threads_;
  std::function<void(int, int)> operation_;
  int nth_ = 0;
  std::atomic<int> round_{0}, left_;
};

}  // namespace

TEST_CASE("an executor works on the threads of an engine, in its operations alone") {
  cpu::executor workers(cpu::engine_threads, 4);
  REQUIRE(workers.threads() == 4);
  engine runs(4);
  std::atomic<int> wrong{0};
  std::atomic<bool> helped{false};
  runs.run(
      [&](int ith, int nth) {
        if (ith > 0) return workers.serve(ith);
        const cpu::executor::operation all(workers, nth);
        workers.for_each(100, [&](index_t, int worker) {
          if (worker > 0) helped = true;
          while (!helped) std::this_thread::yield();  // the caller leaves some
        });
      },
      2);
  for (index_t round = 0; round < support::scaled(300); ++round) {
    const int threads = 1 + int(round % 4), calls = int(round % 3);
    runs.run(
        [&](int ith, int nth) {
          if (ith > 0) {
            if (round % 7 == 0 && ith == 1) std::this_thread::sleep_for(std::chrono::microseconds(300));
            return workers.serve(ith);
          }
          const cpu::executor::operation all(workers, nth);
          for (int call = 0; call < calls; ++call) {
            std::vector<std::atomic<int>> seen(50);
            std::atomic<int> strangers{0};
            const auto body = [&](index_t item, int worker) {
              ++seen[std::size_t(item)];
              strangers += worker < 0 || worker >= nth;
              std::this_thread::yield();
              if (call == 1 && item == 17) throw std::runtime_error("item 17");
            };
            try {
              workers.for_each(50, body);
              wrong += call == 1;
            } catch (const std::runtime_error&) {
              wrong += call != 1;
            }
            for (const auto& times : seen) wrong += times != 1;
            wrong += strangers;
          }
        },
        threads);
    int alone = 0;  // outside of an operation
    workers.for_each(20, [&](index_t, int worker) { alone += worker == 0; });
    REQUIRE(alone == 20);
  }
  CHECK(wrong == 0);
}

TEST_CASE("an executor of an engine's threads says what they must be") {
  CHECK_THROWS_WITH(cpu::executor(cpu::engine_threads, 0),
                    contains("threads of the engine is 0; expected at least 1; "));
  cpu::executor workers(cpu::engine_threads, 3), own(2);
  CHECK_THROWS_WITH(workers.serve(0), contains("number of a thread that serves is 0; expected 1 to 2 "));
  CHECK_THROWS_WITH(workers.serve(3), contains("number of a thread that serves is 3; expected 1 to 2 "));
  CHECK_THROWS_WITH(own.serve(1), contains("number of a thread that serves is 1; expected "));
  CHECK_THROWS_WITH(cpu::executor::operation(workers, 4), contains("threads of an operation is 4; expected 1 to 3; "));
  CHECK_THROWS_WITH(cpu::executor::operation(own, 2),
                    contains("threads of the executor is its own; expected an engine's; "));
}
