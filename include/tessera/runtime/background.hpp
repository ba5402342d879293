// One thread beside the one that calls a cache: work whose result is taken when it is there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../core/config.hpp"

TESSERA_NAMESPACE_BEGIN

enum class task_state { waiting, done, failed, stopped };

/// Work for another thread. What it has made may be read once `state` says done.
class background_task {
 public:
  background_task() = default;
  background_task(const background_task&) = delete;
  background_task& operator=(const background_task&) = delete;
  virtual ~background_task() = default;

  task_state state() const noexcept { return state_.load(std::memory_order_acquire); }
  /// What was thrown, of one that has failed.
  const std::string& problem() const noexcept { return problem_; }

  /// Does the work on the calling thread, without saying so yet; then `publish` does.
  void perform(const std::atomic<bool>& stopping) noexcept {
    try {
      if (!is_over(stopping)) run(stopping);
      outcome_ = is_over(stopping) ? task_state::stopped : task_state::done;
    } catch (const std::exception& thrown) {
      outcome_ = task_state::failed;
      try {
        problem_ = thrown.what();
      } catch (...) {  // no memory for the sentence
      }
    }
  }
  void publish() noexcept { state_.store(outcome_, std::memory_order_release); }

 protected:
  /// Returns early, with half a result, once `is_over`.
  virtual void run(const std::atomic<bool>& stopping) = 0;
  /// The thread stops, or nobody holds what `wanted` gave.
  bool is_over(const std::atomic<bool>& stopping) const { return stopping || (has_owner_ && owner_.expired()); }

 private:
  template <class Task>
  friend std::shared_ptr<Task> wanted(std::shared_ptr<Task> task);

  bool has_owner_ = false;
  std::weak_ptr<const void> owner_;
  std::atomic<task_state> state_{task_state::waiting};
  task_state outcome_ = task_state::stopped;
  std::string problem_;
};

/// The task for those who want it: `task` itself, which a thread is given, need not be done once no copy of what this returns is left.
/// Before it is started.
template <class Task>
std::shared_ptr<Task> wanted(std::shared_ptr<Task> task) {
  Task* const raw = task.get();
  const std::shared_ptr<Task> held(std::make_shared<std::shared_ptr<Task>>(std::move(task)), raw);
  raw->owner_ = held, raw->has_owner_ = true;
  return held;
}

/// Does tasks one after the other on a thread of its own, which begins with the first of them. Nobody who starts a task
/// waits for one. Any thread may call it.
class background {
 public:
  background() = default;
  background(const background&) = delete;
  background& operator=(const background&) = delete;
  virtual ~background() { stop(); }

  /// Errors   no thread, or no memory: the task is not started then.
  virtual void start(std::shared_ptr<background_task> task) {
    std::lock_guard lock(mutex_);
    if (stopping_) return task->publish();  // as stopped
    tasks_.push_back(std::move(task));
    try {
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    } catch (...) {
      tasks_.pop_back();
      throw;
    }
    wake_.notify_one();
  }

  /// Ends for good: the task that is being done returns early, those that wait are not begun, later ones neither. All
  /// are stopped.
  void stop() noexcept {
    const std::lock_guard alone(ending_);
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
    for (; !tasks_.empty(); tasks_.pop_front()) tasks_.front()->publish();
  }

 private:
  void serve() {
    for (;;) {
      std::shared_ptr<background_task> task;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
        if (stopping_) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task->perform(stopping_);
      task->publish();
    }
  }

  std::mutex mutex_, ending_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<background_task>> tasks_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

TESSERA_NAMESPACE_END
