// A background thread, and the tasks that it does. Whoever wants a task's result polls the task's state.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "../core/config.hpp"
#include "../core/host/float_mode.hpp"
#include "../core/host/process.hpp"

TESSERA_NAMESPACE_BEGIN

/// The state of a task. waiting: it is queued or running. stopped: it was abandoned and will never finish.
enum class task_state { waiting, done, failed, stopped };

/// Work for another thread. Its result may be read once `state` is `done`.
class background_task {
 public:
  background_task() = default;
  background_task(const background_task&) = delete;
  background_task& operator=(const background_task&) = delete;
  virtual ~background_task() = default;

  /// In a child of fork() a waiting task counts as stopped, because its thread exists only in the parent.
  task_state state() const noexcept {
    const task_state now = state_.load(std::memory_order_acquire);
    return now == task_state::waiting && !home_.is_here() ? task_state::stopped : now;
  }
  /// The message of a failed task; empty if the exception was not a std::exception.
  const std::string& problem() const noexcept { return problem_; }

  /// Does the work on the calling thread. `publish` then makes the state visible.
  void perform(const std::atomic<bool>& stopping) noexcept {
    try {
      if (!is_over(stopping)) run(stopping);
      outcome_ = is_over(stopping) ? task_state::stopped : task_state::done;
    } catch (const std::exception& thrown) {
      outcome_ = task_state::failed;
      try {
        problem_ = thrown.what();
      } catch (...) {  // no memory for the message
      }
    } catch (...) {
      outcome_ = task_state::failed;
    }
  }
  void publish() noexcept { state_.store(outcome_, std::memory_order_release); }

 protected:
  /// Does the work. Returns early, with an incomplete result, once `is_over` returns true.
  virtual void run(const std::atomic<bool>& stopping) = 0;
  /// Whether the work may end early: the thread is stopping, or nobody holds the pointer that `wanted` returned.
  bool is_over(const std::atomic<bool>& stopping) const { return stopping || (has_owner_ && owner_.expired()); }

 private:
  template <class Task>
  friend std::shared_ptr<Task> wanted(std::shared_ptr<Task> task);

  bool has_owner_ = false;
  std::weak_ptr<const void> owner_;
  const home_process home_;
  std::atomic<task_state> state_{task_state::waiting};
  task_state outcome_ = task_state::stopped;
  std::string problem_;
};

/// Returns a pointer for the owners of the task's result. Once its last copy is destroyed, the thread may skip the
/// task. Call this before the task is started.
template <class Task>
std::shared_ptr<Task> wanted(std::shared_ptr<Task> task) {
  Task* const raw = task.get();
  const std::shared_ptr<Task> held(std::make_shared<std::shared_ptr<Task>>(std::move(task)), raw);
  raw->owner_ = held, raw->has_owner_ = true;
  return held;
}

/// Runs tasks one after the other on its own thread, which the first task starts. `start` never waits for a task. Any
/// thread may call it. Tasks run in the floating-point mode that programs begin with. The thread does not exist in a
/// child of fork(): if the parent had started it, the child's copy of this object counts as stopped.
class background {
 public:
  background() = default;
  background(const background&) = delete;
  background& operator=(const background&) = delete;
  /// In a child of fork() the memory of the thread is not released: its locks cannot be released there.
  virtual ~background() {
    if (is_parents()) {
      (void)worker_.release();
    } else {
      worker_->stop();
    }
  }

  /// Errors   no thread can be started, or no memory is left: an exception, and the task is not started.
  virtual void start(std::shared_ptr<background_task> task) {
    if (is_parents()) return task->publish();  // its state becomes stopped
    worker_->start(std::move(task), home_);
  }

  /// Ends the thread for good. The running task returns early. Queued and later tasks never begin. All of them become
  /// stopped.
  void stop() noexcept {
    if (!is_parents()) worker_->stop();
  }

 private:
  /// The thread, and its state.
  struct worker {
    void start(std::shared_ptr<background_task> task, std::atomic<const home_process*>& home) {
      std::lock_guard lock(mutex);
      if (stopping) return task->publish();  // its state becomes stopped
      tasks.push_back(std::move(task));
      try {
        if (!thread.joinable()) {
          made_in.emplace();
          home = &*made_in;  // set before the thread starts, because another thread may fork at any moment
          thread = std::thread([this] { serve(); });
        }
      } catch (...) {
        if (!thread.joinable()) home = nullptr;
        tasks.pop_back();
        throw;
      }
      wake.notify_one();
    }
    void stop() noexcept {
      const std::lock_guard alone(ending);
      {
        std::lock_guard lock(mutex);
        stopping = true;
      }
      wake.notify_one();
      if (thread.joinable()) thread.join();
      for (; !tasks.empty(); tasks.pop_front()) tasks.front()->publish();
    }
    void serve() {
      const default_float_mode mode;  // a new thread inherits the mode of the thread that started it
      for (;;) {
        std::shared_ptr<background_task> task;
        {
          std::unique_lock lock(mutex);
          wake.wait(lock, [this] { return stopping || !tasks.empty(); });
          if (stopping) return;
          task = std::move(tasks.front());
          tasks.pop_front();
        }
        task->perform(stopping);
        task->publish();
      }
    }

    std::mutex mutex, ending;
    std::condition_variable wake;
    std::deque<std::shared_ptr<background_task>> tasks;
    std::atomic<bool> stopping{false};
    std::optional<home_process> made_in;
    std::thread thread;
  };

  /// Whether the thread belongs to the process that this one was forked from.
  bool is_parents() const noexcept {
    const home_process* const home = home_;
    return home && !home->is_here();
  }

  std::unique_ptr<worker> worker_ = std::make_unique<worker>();
  std::atomic<const home_process*> home_{nullptr};  // the process of the thread; null: no thread has started
};

TESSERA_NAMESPACE_END
