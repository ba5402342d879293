#include "catch.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <tessera/backend/cpu/kernel/executor.hpp>

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
  workers.for_each(
      50, [&](index_t, int worker) { runs += worker == 0; }, 1.0);
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
