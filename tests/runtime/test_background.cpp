#include "catch.hpp"

#include <functional>
#include <stdexcept>
#include <vector>

#include <tessera/runtime/background.hpp>

#include "support/host/flush_to_zero.hpp"
#include "support/host/forked.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {

/// A task that is a function.
struct task final : background_task {
  explicit task(std::function<void(const std::atomic<bool>&)> body) : body_(std::move(body)) {}

 private:
  void run(const std::atomic<bool>& stopping) override { body_(stopping); }
  std::function<void(const std::atomic<bool>&)> body_;
};

void wait_for(const background_task& one) {
  while (one.state() == task_state::waiting) std::this_thread::yield();
}

}  // namespace

TEST_CASE("tasks are done one after the other on a thread of their own, and one that throws says so") {
  std::vector<int> done;  // written by one thread alone, read when the last task is over
  std::vector<std::shared_ptr<task>> tasks;
  std::thread::id thread;
  background worker;
  for (int i = 0; i < 50; ++i) {
    tasks.push_back(std::make_shared<task>([&done, &thread, i](const std::atomic<bool>&) {
      thread = std::this_thread::get_id();
      if (i == 20) throw std::runtime_error("task 20 has no rows");
      done.push_back(i);
    }));
    worker.start(tasks.back());
  }
  wait_for(*tasks.back());
  REQUIRE(done.size() == 49);
  CHECK(std::is_sorted(done.begin(), done.end()));
  CHECK(thread != std::this_thread::get_id());
  CHECK(tasks[19]->state() == task_state::done);
  CHECK(tasks[20]->state() == task_state::failed);
  CHECK(tasks[20]->problem() == "task 20 has no rows");
}

TEST_CASE("stopping ends the task that is being done, and those that wait are never begun") {
  std::atomic<bool> begun{false};
  bool other = false;
  const auto endless = std::make_shared<task>([&](const std::atomic<bool>& stopping) {
    begun = true;
    while (!stopping) std::this_thread::yield();
  });
  const auto waiting = std::make_shared<task>([&](const std::atomic<bool>&) { other = true; });
  background worker;
  worker.start(endless);
  worker.start(waiting);
  while (!begun) std::this_thread::yield();
  CHECK(endless->state() == task_state::waiting);
  worker.stop();
  CHECK(endless->state() == task_state::stopped);
  CHECK(waiting->state() == task_state::stopped);
  const auto late = std::make_shared<task>([&](const std::atomic<bool>&) { other = true; });
  worker.start(late);
  CHECK(late->state() == task_state::stopped);
  worker.stop();
  CHECK_FALSE(other);
}

TEST_CASE("what nobody wants any more is not begun, and ends early where it has begun") {
  std::atomic<bool> begun{false}, let_go{false};
  bool other = false;
  background worker;
  struct endless final : background_task {
    std::atomic<bool>* begun;
    void run(const std::atomic<bool>& stopping) override {
      *begun = true;
      while (!is_over(stopping)) std::this_thread::yield();
    }
  };
  auto first = std::make_shared<endless>();
  first->begun = &begun;
  auto one = wanted(first), copy = one;
  worker.start(first);
  auto second = std::make_shared<task>([&](const std::atomic<bool>&) { other = true; });
  const std::weak_ptr<task> freed = second;
  auto next = wanted(second);
  worker.start(std::move(second));
  while (!begun) std::this_thread::yield();
  next = nullptr;
  one = nullptr;
  CHECK(first->state() == task_state::waiting);  // somebody holds a copy
  copy = nullptr;
  wait_for(*first);
  CHECK(first->state() == task_state::stopped);
  const auto last = std::make_shared<task>([&](const std::atomic<bool>&) { let_go = true; });
  worker.start(last);
  wait_for(*last);
  CHECK_FALSE(other);
  CHECK(freed.expired());
}

TEST_CASE("threads that stop a worker at the same time all return") {
  for (int trial = 0; trial < support::scaled(200); ++trial) {
    background worker;
    worker.start(std::make_shared<task>([](const std::atomic<bool>& stopping) {
      while (!stopping) std::this_thread::yield();
    }));
    std::thread beside([&] { worker.stop(); });
    worker.stop();
    beside.join();
  }
}

TEST_CASE("nobody's task outlives its worker, and a worker without tasks has no thread to end") {
  const background idle;
  const auto endless = std::make_shared<task>([](const std::atomic<bool>& stopping) {
    while (!stopping) std::this_thread::yield();
  });
  {
    background worker;
    worker.start(endless);
  }
  CHECK(endless->state() == task_state::stopped);
}

TEST_CASE("a task that throws what is no exception has failed, and the next one is done") {
  background worker;
  const auto odd = std::make_shared<task>([](const std::atomic<bool>&) { throw 7; });
  const auto next = std::make_shared<task>([](const std::atomic<bool>&) {});
  worker.start(odd);
  worker.start(next);
  wait_for(*next);
  CHECK(odd->state() == task_state::failed);
  CHECK(odd->problem().empty());
  CHECK(next->state() == task_state::done);
}

TEST_CASE("in a child of fork() a worker that has begun is stopped, and so are its tasks") {
  auto worker = std::make_unique<background>(), idle = std::make_unique<background>();
  std::atomic<bool> begun{false};
  const auto endless = std::make_shared<task>([&](const std::atomic<bool>& stopping) {
    begun = true;
    while (!stopping) std::this_thread::yield();
  });
  const auto waiting = std::make_shared<task>([](const std::atomic<bool>&) {});
  worker->start(endless);
  worker->start(waiting);
  while (!begun) std::this_thread::yield();
  const auto is_stopped = [](const background_task& one) { return one.state() == task_state::stopped; };
  CHECK(support::in_a_child([&] {
          if (!is_stopped(*endless) || !is_stopped(*waiting)) return 1;
          const auto late = std::make_shared<task>([](const std::atomic<bool>&) {});
          worker->start(late);
          if (!is_stopped(*late)) return 2;
          worker->stop();
          worker.reset();
          if (!support::children_may_start_threads) return 0;
          const auto own = std::make_shared<task>([](const std::atomic<bool>&) {});
          idle->start(own);  // one whose thread begins here
          wait_for(*own);
          idle.reset();
          return own->state() == task_state::done ? 0 : 3;
        }) == 0);
  CHECK(endless->state() == task_state::waiting);
}

TEST_CASE("tasks run in the default floating-point mode") {
  bool is_default = false;
  const support::odd_float_mode odd;
  background worker;
  const auto one = std::make_shared<task>(
      [&](const std::atomic<bool>&) { is_default = support::keeps_subnormals() && support::rounds_to_nearest(); });
  worker.start(one);
  wait_for(*one);
  CHECK(is_default);
}
