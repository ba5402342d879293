// A small thread pool that the caller owns: no global state, no OpenMP.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "../../../core/config.hpp"
#include "../../../core/host_vector.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Runs independent items on all cores.
///
/// Items are handed out dynamically, so an operation that must give the same bits every time lets each item write its
/// own output and merges in item order afterwards; no result may depend on which worker ran an item.
/// One thread at a time may call `for_each`; an item must not call it on the same executor.
class executor {
 public:
  static constexpr double worth_waking = 1 << 20;

  /// `threads` workers, the calling thread among them; 0 takes every core of the machine.
  /// Where the system gives fewer (a container's limit), it works with those, or, where they are more than cores, with half
  /// of them: the memory of the others' stacks may be what is short. See `threads` and `refused`.
  explicit executor(int threads = 0) {
    if (threads <= 0) threads = (std::max)(1, int(std::thread::hardware_concurrency()));
    helpers_.reserve(std::size_t(threads) - 1);
    try {
      for (int worker = 1; worker < threads; ++worker) helpers_.emplace_back([this, worker] { serve(worker); });
    } catch (const std::system_error&) {
      const std::size_t cores = (std::max)(1u, std::thread::hardware_concurrency());
      keep_helpers((std::max)(helpers_.size() / 2, (std::min)(helpers_.size(), cores - 1)));
      refused_ = threads - this->threads();
    } catch (...) {
      stop();
      throw;
    }
  }

  executor(const executor&) = delete;
  executor& operator=(const executor&) = delete;

  ~executor() { stop(); }

  int threads() const noexcept { return int(helpers_.size()) + 1; }
  /// Threads that were asked for and that the system did not give.
  int refused() const noexcept { return refused_; }

  /// Calls `body(item, worker)` for every item in [0, count), worker in [0, threads()). Returns when all are done;
  /// rethrows the first exception that an item threw.
  /// `cost` is a guess of the multiply-adds in all: waking a helper takes about 25 us (2-core EPYC VM), so work below
  /// `worth_waking` runs on the calling thread.
  template <class Body>
  void for_each(index_t count, Body&& body, double cost = 1e9) {
    if (count <= 0) return;
    if (helpers_.empty() || count == 1 || cost < worth_waking) {
      for (index_t item = 0; item < count; ++item) body(item, 0);
      return;
    }
    using body_type = std::remove_reference_t<Body>;
    {
      std::lock_guard lock(mutex_);
      call_ = [](void* object, index_t item, int worker) { (*static_cast<body_type*>(object))(item, worker); };
      object_ = const_cast<void*>(static_cast<const void*>(&body));
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      busy_ = int(helpers_.size());
      failure_ = nullptr;
      ++round_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void keep_helpers(std::size_t count) noexcept {
    {
      std::lock_guard lock(mutex_);
      most_helpers_ = count;
    }
    wake_.notify_all();
    for (; helpers_.size() > count; helpers_.pop_back()) helpers_.back().join();
  }

  // A helper that is never joined would wait on members that are gone.
  void stop() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        const auto leaves = [&] { return stopping_ || std::size_t(worker) > most_helpers_; };
        wake_.wait(lock, [&] { return leaves() || round_ != seen; });
        if (leaves()) return;
        seen = round_;
      }
      work(worker);
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void work(int worker) {
    for (index_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      try {
        call_(object_, item, worker);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
    }
  }

  host_vector<std::thread> helpers_;
  int refused_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<index_t> next_{0};
  index_t count_ = 0;
  int busy_ = 0;
  std::uint64_t round_ = 0;
  bool stopping_ = false;
  std::size_t most_helpers_ = ~std::size_t(0);  // those with higher numbers leave
  void (*call_)(void*, index_t, int) = nullptr;
  void* object_ = nullptr;
  std::exception_ptr failure_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
