// A small thread pool that the caller owns: no global state, no OpenMP.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "../../../core/config.hpp"
#include "../../../core/host/float_mode.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/host/process.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Runs independent items on all cores.
///
/// Items are distributed dynamically. An operation that must give the same bits every time lets each item write its own
/// output and merges in item order afterwards: no result may depend on which worker ran an item. Items run in the
/// floating-point mode that programs begin with, whatever the caller's is.
/// Any thread may call `for_each` at any time. While the workers are busy with another call, and in a child of fork(),
/// which has no workers, the items run on the calling thread.
class executor {
 public:
  static constexpr double worth_waking = 1 << 20;

  /// Starts `threads` workers, the calling thread included; 0: one for every core.
  /// If the system starts fewer (a container's limit), the executor uses those. If these still outnumber the cores, it
  /// uses half of them, because memory for stacks may be short. See `threads` and `refused`.
  explicit executor(int threads = 0) {
    if (threads <= 0) threads = (std::max)(1, int(std::thread::hardware_concurrency()));
    if (threads == 1) return;
    helpers_ = std::make_unique<helpers>();
    helpers_->start(threads - 1);
    refused_ = threads - this->threads();
    if (helpers_->threads.empty()) helpers_ = nullptr;
  }

  executor(const executor&) = delete;
  executor& operator=(const executor&) = delete;

  /// In a child of fork() the memory of the threads is not released: their locks cannot be undone there.
  ~executor() {
    if (!has_threads()) (void)helpers_.release();
  }

  int threads() const noexcept { return helpers_ ? int(helpers_->threads.size()) + 1 : 1; }
  /// Requested threads that the system did not start.
  int refused() const noexcept { return refused_; }

  /// Calls `body(item, worker)` for every item in [0, count), with a worker in [0, threads()); 0 is the calling thread.
  /// Returns when all are done; rethrows the first exception that an item threw.
  /// `cost` estimates the multiply-adds of all items. Waking a helper takes about 25 us (2-core EPYC VM), so that work
  /// below `worth_waking` runs on the calling thread.
  template <class Body>
  void for_each(index_t count, Body&& body, double cost = 1e9) {
    if (count <= 0) return;
    const default_float_mode mode;
    if (count == 1 || cost < worth_waking || !enter()) {
      for (index_t item = 0; item < count; ++item) body(item, 0);
      return;
    }
    using body_type = std::remove_reference_t<Body>;
    const std::exception_ptr failure = helpers_->run(
        count, [](void* object, index_t item, int worker) { (*static_cast<body_type*>(object))(item, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
    is_busy_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  /// The threads beside the caller's, and the state that they share.
  struct helpers {
    using call_type = void (*)(void*, index_t, int);

    ~helpers() { keep(0); }

    /// Starts as many threads as the system allows.
    void start(int wanted) {
      threads.reserve(std::size_t(wanted));
      try {
        for (int worker = 1; worker <= wanted; ++worker) threads.emplace_back([this, worker] { serve(worker); });
      } catch (const std::system_error&) {
        const std::size_t cores = (std::max)(1u, std::thread::hardware_concurrency());
        keep((std::max)(threads.size() / 2, (std::min)(threads.size(), cores - 1)));
      }
    }
    /// Ends and joins all but the first `retained` threads: one that is not joined would wait on destroyed members.
    void keep(std::size_t retained) noexcept {
      {
        std::lock_guard lock(mutex);
        last_worker = retained;
      }
      wake.notify_all();
      for (; threads.size() > retained; threads.pop_back()) threads.back().join();
    }

    /// Runs all items. Returns the first exception that one threw.
    std::exception_ptr run(index_t items, call_type made, void* with) {
      {
        std::lock_guard lock(mutex);
        call = made;
        object = with;
        count = items;
        next.store(0, std::memory_order_relaxed);
        busy = int(threads.size());
        ++round;
      }
      wake.notify_all();
      work(0);
      std::unique_lock lock(mutex);
      done.wait(lock, [this] { return busy == 0; });
      return failure ? std::exchange(failure, nullptr) : nullptr;
    }
    void serve(int worker) {
      const default_float_mode mode;  // a thread begins in the mode of the one that starts it
      std::uint64_t observed = 0;
      for (;;) {
        {
          std::unique_lock lock(mutex);
          const auto leaves = [&] { return std::size_t(worker) > last_worker; };
          wake.wait(lock, [&] { return leaves() || round != observed; });
          if (leaves()) return;
          observed = round;
        }
        work(worker);
        std::lock_guard lock(mutex);
        if (--busy == 0) done.notify_one();
      }
    }
    void work(int worker) {
      for (index_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        try {
          call(object, item, worker);
        } catch (...) {
          std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    }

    host_vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable wake, done;
    std::atomic<index_t> next{0};
    index_t count = 0;
    int busy = 0;
    std::uint64_t round = 0;
    std::size_t last_worker = ~std::size_t(0);  // workers with higher numbers end
    call_type call = nullptr;
    void* object = nullptr;
    std::exception_ptr failure;
  };

  bool has_threads() const noexcept { return helpers_ && home_.is_here(); }
  /// Claims the helpers for this call. Returns whether that worked.
  bool enter() noexcept { return has_threads() && !is_busy_.exchange(true, std::memory_order_acquire); }

  std::unique_ptr<helpers> helpers_;  // none: the calling thread alone
  home_process home_;                 // theirs
  std::atomic<bool> is_busy_{false};
  int refused_ = 0;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
